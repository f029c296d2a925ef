"""The networks of routers: their parameters, what they read of recorded draft steps, their labels and their loss."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from ..shortlists.router.network import Router, network_scores

# Gives the drafter's embeddings [m, d] of tokens, int64 [m].
Embed = Callable[[torch.Tensor], torch.Tensor]
Batch = Mapping[str, torch.Tensor]


class RouterNetwork(nn.Module):
    """The part of a `Router` that is trained. Its parameters have the names of the router's tensors.

    `begin_at` starts from scores that give every context the mean of the labels of a batch. `labels` are what the
    scores are to be, both fp32 `[m, M]`; `cluster_of`, int64 `[V]`, is `M` for tokens that need no cluster. `loss` is
    the mean of the draft steps.

    Attributes:
        reads: the tensors of a shard that training needs, see `Recording`.
    """

    reads: ClassVar[tuple[str, ...]]
    begin_at: Callable[[Batch, torch.Tensor], None]
    inputs: Callable[[Batch, Embed], tuple[torch.Tensor, ...]]
    labels: Callable[[Batch, torch.Tensor, int], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def router(self, clusters: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> Router:
        """The router with these weights, in fp32 on the CPU."""
        return Router(clusters, **weights)


class DynaSpecNetwork(RouterNetwork):
    """Predicts which clusters hold the drafter's likely tokens (DynaSpec, section 4.2, "Training the router"), from
    features of `width` numbers and by a hidden layer of `hidden`."""

    reads = ("token_ids", "features", "top_ids")

    def __init__(self, width: int, clusters: int, hidden: int):
        super().__init__()
        first, second = nn.Linear(2 * width, hidden), nn.Linear(hidden, clusters)
        self.input_weight, self.input_bias = first.weight, first.bias
        self.output_weight, self.output_bias = second.weight, second.bias

    @torch.no_grad()
    def begin_at(self, batch: Batch, labels: torch.Tensor) -> None:
        rates = labels.mean(0).clamp(1e-5, 1 - 1e-5)
        self.output_bias.copy_((rates / (1 - rates)).log())

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The logits `[m, M]`, see `Router.scores`."""
        weights = (self.input_weight, self.input_bias, self.output_weight, self.output_bias)
        return network_scores(embeddings, features, *weights)

    @staticmethod
    def inputs(batch: Batch, embed: Embed) -> tuple[torch.Tensor, ...]:
        return embed(batch["token_ids"].long()), batch["features"]

    @staticmethod
    def labels(batch: Batch, cluster_of: torch.Tensor, count: int) -> torch.Tensor:
        """1 for clusters that hold one of the drafter's most probable tokens."""
        chosen = cluster_of[batch["top_ids"].long()]
        labels = torch.zeros(chosen.shape[0], count + 1, device=chosen.device)
        return labels.scatter_(1, chosen, 1.0)[:, :-1]

    @staticmethod
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Binary cross-entropy, summed over clusters."""
        return functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / scores.shape[0]


class CoralNetwork(RouterNetwork):
    """Predicts the group of the drafter's token (CORAL, Weng et al., 2025, "LM head router").

    One layer on the drafter's hidden states. In training they are divided by their usual root mean square, so that one
    learning rate serves all drafters.
    """

    reads = ("hidden", "top_ids", "top_shares")

    def __init__(self, width: int, clusters: int):
        super().__init__()
        layer = nn.Linear(width, clusters)
        self.output_weight, self.output_bias = layer.weight, layer.bias
        self._scale = 1.0

    @torch.no_grad()
    def begin_at(self, batch: Batch, labels: torch.Tensor) -> None:
        self._scale = max(float(batch["hidden"].float().square().mean().sqrt()), 1e-6)
        self.output_weight.zero_()
        self.output_bias.copy_(labels.mean(0).clamp_min(1e-6).log())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `[m, M]`, see `Router.scores_of_hidden`."""
        return functional.linear(hidden.float() / self._scale, self.output_weight, self.output_bias)

    @staticmethod
    def inputs(batch: Batch, embed: Embed) -> tuple[torch.Tensor, ...]:
        return (batch["hidden"],)

    @staticmethod
    def labels(batch: Batch, cluster_of: torch.Tensor, count: int) -> torch.Tensor:
        """The drafter's probability of each group, of its most probable tokens."""
        shares, chosen = batch["top_shares"].float(), cluster_of[batch["top_ids"].long()]
        labels = torch.zeros(chosen.shape[0], count + 1, device=chosen.device)
        return labels.scatter_add_(1, chosen, shares)[:, :-1]

    @staticmethod
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with the group of the drafter's next token, in expectation over that token."""
        return functional.cross_entropy(scores, labels)

    def router(self, clusters: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> Router:
        return Router(clusters, **{**weights, "output_weight": weights["output_weight"] / self._scale})
