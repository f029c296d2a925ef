"""Routers: clusters of tokens, scored by DynaSpec's network, CORAL's layer or the clusters' centroids."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional

from ...errors import ArtifactError, ConfigurationError
from ...storable import BUILD_AGAIN, ID_DTYPES, TOKENIZER_SIZE, WEIGHT_DTYPES, TensorRule
from ...vocabulary import TokenizerFingerprint

LAYER_TENSORS = ("output_weight", "output_bias")
NETWORK_TENSORS = ("input_weight", "input_bias", *LAYER_TENSORS)

# The limits on the dimensions of stored routers.
MOST_CLUSTERS = 2**16
_MOST_UNITS = 2**14
MOST_FEATURES = 2**16


@dataclass(frozen=True, eq=False)
class Router:
    """Token clusters, and a small network, one layer or centroids to score them. Immutable.

    The network (DynaSpec, section 4.2, "Low-cost router") reads the inputs of a draft step, so it can run beside the
    drafter's layers: `scores = W₂ · silu(W₁ · [e, f] + b₁) + b₂`, with the embedding `e` of the newest token and the
    drafter's feature `f` before it, both divided by their root mean square. One layer, without `W₁` and `b₁`, reads
    the drafter's hidden state `h`, as the head does (CORAL, Weng et al., 2025, "LM head router"): `scores = W₂ · h +
    b₂`, whose softmax is the probability of each cluster. Centroids need no training: the scores are their products
    with `h`, as if each cluster were one token.

    Args:
        clusters: int32 or int64 `[V]`: the cluster of each token id. Every cluster below the largest has a token.
        centroids: `[M, d]`, one for each cluster, in the space of the drafter's hidden states.
        input_weight: `[h, 2 · d]`: `W₁`; likewise the next three.
        input_bias: `[h]`.
        output_weight: `[M, h]`; of one layer `[M, d]`.
        output_bias: `[M]`.

    Raises:
        ConfigurationError: the shapes do not fit together, or there is no complete network, layer or centroids.
    """

    clusters: torch.Tensor
    centroids: torch.Tensor | None = None
    input_weight: torch.Tensor | None = None
    input_bias: torch.Tensor | None = None
    output_weight: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None

    def __post_init__(self):
        clusters = self.clusters
        if clusters.dim() != 1 or not clusters.numel() or clusters.dtype not in (torch.int32, torch.int64):
            raise ConfigurationError(
                f"clusters must be int32 or int64, one for each token id, got {described(clusters)}"
            )
        # Checked first, since bincount takes memory for every number up to the largest.
        is_in_range = int(clusters.min()) >= 0 and int(clusters.max()) < clusters.numel()
        sizes = torch.bincount(clusters) if is_in_range else clusters.new_zeros(1)
        if not bool((sizes > 0).all()):
            raise ConfigurationError("clusters must be numbered from 0 without gaps, so that each of them has a token")
        self._require_shapes(sizes.shape[0])

    def _require_shapes(self, count: int) -> None:
        has = tuple(name for name in NETWORK_TENSORS if getattr(self, name) is not None)
        if self.centroids is None and has not in (NETWORK_TENSORS, LAYER_TENSORS):
            raise ConfigurationError(
                f"a router needs centroids, or all of {', '.join(NETWORK_TENSORS)}, or the last two alone"
            )
        if self.centroids is not None:
            if has:
                raise ConfigurationError("a router has centroids or a network, not both")
            wanted = {"centroids": (count, _columns(self.centroids))}
        else:
            hidden = _columns(self.output_weight)
            wanted = {"output_weight": (count, hidden), "output_bias": (count,)}
            if self.looks_ahead:
                wanted = {"input_weight": (hidden, _columns(self.input_weight)), "input_bias": (hidden,), **wanted}
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                raise ConfigurationError(f"{name} must be floating-point {list(shape)}, got {described(tensor)}")
        if self.looks_ahead and self.input_weight.shape[1] % 2:
            raise ConfigurationError(
                f"input_weight must have an even number of columns, got {self.input_weight.shape[1]}"
            )

    @property
    def num_clusters(self) -> int:
        """The number of clusters `M`."""
        return (self.output_weight if self.centroids is None else self.centroids).shape[0]

    @property
    def looks_ahead(self) -> bool:
        """Whether it reads the inputs of a draft step (`scores`), not the hidden state (`scores_of_hidden`)."""
        return self.input_weight is not None

    @property
    def reads(self) -> int:
        """The width `d` of the router's inputs."""
        if self.looks_ahead:
            return self.input_weight.shape[1] // 2
        return (self.output_weight if self.centroids is None else self.centroids).shape[1]

    def scores(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The network's logits `[m, M]` for embeddings `[m, d]` and features `[m, d]`."""
        return network_scores(embeddings, features, *(getattr(self, name) for name in NETWORK_TENSORS))

    def scores_of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's logits, fp32 `[m, M]`, for the drafter's hidden states `[m, d]`."""
        return functional.linear(hidden.float(), self.output_weight.float(), self.output_bias.float())

    def without(self, is_empty: torch.Tensor) -> "Router":
        """The same router with scores of −inf for some clusters, bool `[M]`. Centroids become one layer."""
        bar = torch.zeros_like(is_empty, dtype=torch.float32).masked_fill(is_empty, -torch.inf)
        if self.centroids is not None:
            return Router(self.clusters, output_weight=self.centroids, output_bias=bar)
        return replace(self, output_bias=self.output_bias + bar)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The router's tensors that are not None."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Router":
        """Make a router from its tensors among others."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: tensor for name, tensor in tensors.items() if name in known})

    def to(self, device: torch.device) -> "Router":
        """The same router in fp32 on a device; the clusters stay where they are."""
        moved = {
            name: tensor.to(device=device, dtype=torch.float32)
            for name, tensor in self.tensors().items()
            if name != "clusters"
        }
        return replace(self, **moved)


def network_scores(
    embeddings: torch.Tensor,
    features: torch.Tensor,
    input_weight: torch.Tensor,
    input_bias: torch.Tensor,
    output_weight: torch.Tensor,
    output_bias: torch.Tensor,
) -> torch.Tensor:
    """fp32 `[m, M]`: the logits of a router's network, see `Router`."""
    # Normalized, embeddings and features weigh the same.
    read = torch.stack([embeddings, features], dim=-2).float()
    read = functional.rms_norm(read, read.shape[-1:]).flatten(-2)
    hidden = functional.silu(functional.linear(read, input_weight, input_bias))
    return functional.linear(hidden, output_weight, output_bias)


def check_token_clusters(
    field: str, clusters: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that clusters `[tokenizer size]` give every token id a cluster, numbered from 0 without a gap.

    Raises:
        ArtifactError: they do not. Its `field` is `field`.
    """
    if clusters.shape[0] != tokenizer.size:
        problem = f"gives {clusters.shape[0]} tokens a cluster, and the tokenizer has {tokenizer.size}"
        raise ArtifactError(field, problem, BUILD_AGAIN)
    most_clusters = min(MOST_CLUSTERS, tokenizer.size)
    least, most = int(clusters.min()), int(clusters.max())
    if least < 0 or most >= most_clusters:
        outside = least if least < 0 else most
        problem = f"holds the cluster {outside}, and clusters run from 0 to at most {most_clusters - 1}"
        raise ArtifactError(field, problem, BUILD_AGAIN)
    counts = torch.bincount(clusters)
    if int(counts.min()) == 0:
        problem = f"leaves the cluster {int(counts.argmin())} of {counts.shape[0]} without a token"
        raise ArtifactError(field, problem, "Number the clusters that hold tokens from 0 on.")


# The tensors of a stored router. `Router` checks that they fit together.
ROUTER_TENSOR_RULES = {
    "clusters": TensorRule(ID_DTYPES, (TOKENIZER_SIZE,), check_token_clusters),
    "centroids": TensorRule(WEIGHT_DTYPES, (MOST_CLUSTERS, MOST_FEATURES)),
    "input_weight": TensorRule(WEIGHT_DTYPES, (_MOST_UNITS, 2 * MOST_FEATURES)),
    "input_bias": TensorRule(WEIGHT_DTYPES, (_MOST_UNITS,)),
    "output_weight": TensorRule(WEIGHT_DTYPES, (MOST_CLUSTERS, _MOST_UNITS)),
    "output_bias": TensorRule(WEIGHT_DTYPES, (MOST_CLUSTERS,)),
}


def _columns(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 0


def described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
