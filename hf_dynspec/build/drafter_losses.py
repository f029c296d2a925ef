"""How far a drafter's chains are from its target along a text: the loss to train on, and the figures to judge by."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafters import CausalLMDrafter, Drafter
from ..errors import UnsupportedError
from ..modeling.head import DynamicLMHead, finish_logits
from ..modeling.parts import decoder_of

# Rows of logits that are held at a time.
_ROWS_ON_CPU, _ROWS = 128, 512
# At which acceptance is judged.
TEMPERATURE = 0.8


@dataclass(frozen=True)
class HeldOutFigures:
    """A drafter's chains beside the target, along texts that it was not trained on."""

    loss: float  # the divergence by which drafters are chosen, averaged over steps as in training
    agreement: list[float]  # by draft step: how often both have the same most probable token
    acceptance: list[float]  # by draft step: the probability that verification accepts a token drawn at `TEMPERATURE`
    acceptance_length: float  # tokens of a round at `TEMPERATURE`, the target's own one included


@torch.no_grad()
def target_states(target: PreTrainedModel, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A target's hidden states along a text, int64 `[n]`: its embedding and those after layers, `[n, d]` each."""
    text = text.unsqueeze(0).to(target.device)
    outputs = decoder_of(target)(input_ids=text, output_hidden_states=True, use_cache=False)
    return tuple(states[0] for states in outputs.hidden_states)


class ScoredTokens:
    """The token ids that a batch is scored by: those of its texts and the most frequent ones, and a random sample,
    each token of which stands for several that are left out.

    Args:
        ranking: int64 `[V]`: all ids, the most frequent first.
        count: how many ids (None, or as many as there are: all).
    """

    def __init__(self, ranking: torch.Tensor, count: int | None):
        self._ranking = ranking
        self._count = ranking.shape[0] if count is None else min(count, ranking.shape[0])

    def draw(self, texts: Iterable[torch.Tensor], seed: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """int64 `[k]`, rising, and fp32 `[k]`, the log of how many tokens each stands for (None: all ids)."""
        size = self._ranking.shape[0]
        if self._count == size:
            return None, None
        is_certain = torch.zeros(size, dtype=torch.bool)
        is_certain[self._ranking[: self._count // 2]] = True
        for text in texts:
            is_certain[text[text < size]] = True
        others = (~is_certain).nonzero().squeeze(1)
        random = torch.Generator().manual_seed(seed)
        drawn = others[torch.randperm(others.shape[0], generator=random)[: max(1, self._count // 2)]]
        weights = torch.zeros(size).index_fill_(0, drawn, float(np.log(others.shape[0] / drawn.shape[0])))
        is_certain[drawn] = True
        ids = is_certain.nonzero().squeeze(1)
        return ids, weights[ids]


class _Rows:
    """The logits of some ids by an output projection. `weight` is a leaf if it is trained."""

    def __init__(self, head: DynamicLMHead, ids: torch.Tensor | None, weights: torch.Tensor | None, size: int):
        self._head, device = head, head.device
        pick = slice(0, size) if ids is None else ids.to(device)
        self.weight = head.weight[pick]
        self._bias = None if head.bias is None else head.bias[pick]
        self._weights = None if weights is None else weights.to(device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 `[m, k]`, from hidden states `[m, d]`."""
        logits = hidden.to(self.weight) @ self.weight.T
        logits = (logits if self._bias is None else logits + self._bias).float()
        logits = finish_logits(logits, self._head.logit_scale, self._head.soft_cap)
        return logits if self._weights is None else logits + self._weights


class DraftLosses:
    """Compares a drafter with its target along texts.

    Args:
        target, drafter: they share a vocabulary.
        depth: draft steps of a chain.
        decay: the weight of each step beside the one before it.

    Raises:
        UnsupportedError: the target does something between its decoder and its logits that is not known here.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter, vocabulary_size: int, depth: int, decay: float):
        self.target, self.drafter, self.depth = target, drafter, depth
        self._size = vocabulary_size
        self.weights = [decay**step for step in range(depth)]
        self._head = DynamicLMHead.matching(target)
        if self._head is None:
            raise UnsupportedError(
                f"{type(target).__name__} does something between its decoder and its logits that this package does "
                "not know, so no drafter can be trained for it."
            )
        self._rows = _ROWS_ON_CPU if self._head.device.type == "cpu" else _ROWS

    def _unroll(self, text: torch.Tensor, states: tuple[torch.Tensor, ...], depth: int) -> list[torch.Tensor]:
        device = self.drafter.head.device
        reads = [states[layer].to(device) for layer in self.drafter.reads]
        features = torch.cat(reads, -1) if reads else None
        return [step.hidden for step in self.drafter.unroll(text.to(device), features, depth)]

    def backward(
        self, texts: list[torch.Tensor], ids: torch.Tensor | None, weights: torch.Tensor | None, predictions: float
    ) -> torch.Tensor:
        """Add the gradients of some texts of a batch to the module's: the divergence of the drafter from the target by
        the tokens of `ScoredTokens.draw`, each step's with its weight, over the batch's weight of `predictions`.
        Returns their part of the batch's loss."""
        of_target = _Rows(self._head, ids, weights, self._size)
        of_drafter = _Rows(self.drafter.head, ids, weights, self._size)
        trained = self._trained_projection()
        if trained is not None:
            of_drafter.weight = of_drafter.weight.detach().requires_grad_()
        # An independent model's outputs do not depend on the step of a draft: one step is enough.
        depth = self.depth if self.drafter.reads else 1
        total = torch.zeros((), dtype=torch.float64)
        device = self.drafter.head.device
        for text in texts:
            states = target_states(self.target, text)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                outputs = self._unroll(text, states, min(depth, text.shape[0] - 1))
            gradients = [torch.zeros_like(one) for one in outputs]
            for start in range(1, text.shape[0], self._rows):
                end = min(start + self._rows, text.shape[0])
                with torch.no_grad():
                    logits = of_target(states[-1][start:end])
                    wanted = logits.softmax(-1)
                    # The part of the divergence that does not depend on the drafter.
                    own = (wanted * logits).sum(-1) - logits.logsumexp(-1)
                for step, (hidden, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                    # The target's hidden state before the token that this row predicts is `1 + step` further.
                    first, last = max(0, start - 1 - step), end - 1 - step
                    if last <= first:
                        continue
                    leaf, skip = hidden[first:last].detach().requires_grad_(), end - start - (last - first)
                    drafted, its = of_drafter(leaf), wanted[skip:]
                    with torch.no_grad():
                        weight = self.weights[step] / predictions
                        crossed = torch.linalg.vecdot(its, drafted) - drafted.logsumexp(-1)
                        total += weight * (own[skip:] - crossed).double().sum().cpu()
                        slope = drafted.softmax(-1).sub_(its).mul_(weight)
                    # The logits of a few rows at a time are all that is held.
                    drafted.backward(slope)
                    gradient[first:last] += leaf.grad
            torch.autograd.backward(outputs, gradients)
        if trained is not None and texts:
            rows = trained[: self._size] if ids is None else trained[ids.to(trained.device)]
            rows.backward(of_drafter.weight.grad)
        return total

    def predictions(self, texts: Iterable[torch.Tensor]) -> float:
        """The weight of all predictions along some texts."""
        weights = self.weights if self.drafter.reads else self.weights[:1]
        return sum(weight * max(0, len(text) - 1 - step) for text in texts for step, weight in enumerate(weights))

    def _trained_projection(self) -> torch.nn.Parameter | None:
        """The output projection, if it is trained: a small model's own."""
        is_own = isinstance(self.drafter, CausalLMDrafter)
        return self.drafter.model.get_output_embeddings().weight if is_own else None

    @torch.no_grad()
    def judge(self, texts: list[torch.Tensor], chains: int) -> HeldOutFigures:
        """Figures of about so many chains, spread evenly over the texts, over the whole vocabulary."""
        found = []
        of_target = _Rows(self._head, None, None, self._size)
        of_drafter = _Rows(self.drafter.head, None, None, self._size)
        texts = [text for text in texts if text.shape[0] > self.depth + 1]
        for text in texts[:chains]:
            states = target_states(self.target, text)
            outputs = self._unroll(text, states, self.depth)
            last = outputs[-1].shape[0]
            starts = torch.linspace(0, last - 1, min(last, max(1, chains // len(texts)))).long()
            for rows in starts.to(states[-1].device).split(self._rows):
                by_step = []
                for step, hidden in enumerate(outputs):
                    wanted = of_target(states[-1][rows + 1 + step])
                    drafted = of_drafter(hidden[rows.to(hidden.device)]).to(wanted.device)
                    probable, log_drafted = wanted.log_softmax(-1), drafted.log_softmax(-1)
                    divergence = (probable.exp() * (probable - log_drafted)).sum(-1)
                    is_same = (wanted.argmax(-1) == drafted.argmax(-1)).float()
                    colder = [(one / TEMPERATURE).softmax(-1) for one in (wanted, drafted)]
                    by_step.append(torch.stack([divergence, is_same, torch.minimum(*colder).sum(-1)]))
                found.append(torch.stack(by_step).double().cpu())
        figures = torch.cat(found, -1)  # [depth, 3, chains]
        weights = torch.tensor(self.weights, dtype=torch.float64)
        loss = (figures[:, 0].mean(-1) * weights).sum() / weights.sum()
        length = 1 + figures[:, 2].cumprod(0).sum(0).mean()
        means = figures.mean(-1)
        return HeldOutFigures(float(loss), means[:, 1].tolist(), means[:, 2].tolist(), float(length))
