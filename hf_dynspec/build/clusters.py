"""Token clusters: the vocabulary divided by the directions of the LM head's rows, and how well that keeps neighbours
together.

Source: DynaSpec (Zhang et al., 2025), section 4.2, "Vocabulary partition": spherical k-means over the normalised
LM-head weights, balance not enforced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional

from ..errors import ConfigurationError, DynSpecError
from ..fields import SettingError, WholeNumber
from ..files import replacing

Report = Callable[[str, int, int], None]

# Rows that are converted or normalised at once: for d = 4096, 134 MB in fp32.
_CHUNK_ROWS = 8192
# Rows that are compared with all others at once.
_CHUNK_QUERIES = 64
# faiss takes seeds of 31 bits.
LARGEST_SEED = 2**31 - 1
# Rows with this cosine to a centroid equal it up to rounding, and make no second cluster.
_SAME_DIRECTION = 1 - 1e-5
_MOST_REFILLS = 10


@dataclass(frozen=True, eq=False)
class TokenClusters:
    """A partition of a vocabulary."""

    clusters: torch.Tensor  # int32 `[n]`: the cluster of each token id, numbered from 0 without gaps
    # fp32 `[M, d]`: the mean of each cluster's rows, not normalised. Multiplied with hidden states they score
    # each cluster as if it were one token.
    centroids: torch.Tensor

    @property
    def sizes(self) -> torch.Tensor:
        """int64 `[M]`: the tokens of each cluster, at least one."""
        return torch.bincount(self.clusters, minlength=self.centroids.shape[0])


def cluster_tokens(
    weight: torch.Tensor,
    num_clusters: int,
    *,
    vocabulary_size: int | None = None,
    seed: int = 0,
    iterations: int = 25,
    balanced: bool = False,
    report: Report = lambda activity, done, total: None,
) -> TokenClusters:
    """Divide tokens into clusters by the directions of their rows in an LM head, `[V, d]`. A token whose row is zero
    is in an arbitrary cluster.

    Unbalanced, as in the paper: spherical k-means by faiss over all rows. A cluster that is left empty starts again
    from the row farthest from its centroid. If rows have fewer than `num_clusters` directions, there are fewer
    clusters.

    Balanced: sizes differ by at most one. The vocabulary is halved repeatedly by spherical 2-means whose halves have
    given sizes. That is fast for any number of clusters, but greedy: no token comes back over an earlier cut.

    An fp32 copy of the rows is held, `4 · n · d` bytes, and for balanced clusters half as much again.

    Args:
        vocabulary_size: rows from here on are padding and belong to no cluster (None: there is none).
        seed: the same seed, weights and number of threads give the same clusters.
        iterations: of k-means; if balanced, at most so many for each split.
        report: takes the activity, how much of it is done, and how much there is.
    """
    tokens = _checked_size(weight, vocabulary_size)
    require_cluster_settings(num_clusters, seed, iterations, tokens)
    if not balanced:
        require_faiss()
    rows = _unit_rows(weight[:tokens])
    has_direction = rows.any(dim=1)
    if int(has_direction.sum()) < num_clusters:
        raise ConfigurationError(
            f"{num_clusters} clusters need as many rows other than zero, and there are {int(has_direction.sum())}"
        )
    if balanced:
        clusters = _bisect(rows, num_clusters, seed, iterations, report)
    else:
        clusters = torch.zeros(tokens, dtype=torch.int64)
        # Most heads have no row that is zero, and are not copied.
        points = rows if bool(has_direction.all()) else rows[has_direction]
        clusters[has_direction] = _spherical_kmeans(points, num_clusters, seed, iterations, report)
    return TokenClusters(clusters.to(torch.int32), _means(weight[:tokens], clusters))


def require_balanced(clusters: torch.Tensor) -> None:
    """Raise a `ConfigurationError` if the sizes of clusters, int64 `[n]`, differ by more than one."""
    sizes = torch.bincount(clusters)
    if int(sizes.max() - sizes.min()) > 1:
        raise ConfigurationError(
            f"the groups of coral are of equal size, and these clusters have {int(sizes.min()):,} to "
            f"{int(sizes.max()):,} tokens. Build them with: hf-dynspec build clusters --balanced"
        )


def kept_clusters(
    file: Path,
    weight: torch.Tensor,
    num_clusters: int,
    vocabulary_size: int,
    seed: int,
    report: Report,
    balanced: bool = False,
) -> torch.Tensor:
    """int64 `[V]`: the clusters of `cluster_tokens`. They are read from a file if an earlier call wrote them
    there with the same settings, else made and written."""
    settings = {"num_clusters": num_clusters, "tokens": vocabulary_size, "seed": seed, "balanced": balanced}
    made_with = {name: str(value) for name, value in settings.items()}
    if file.exists():
        with safe_open(file, "pt") as kept:
            if kept.metadata() == made_with:
                return kept.get_tensor("clusters")
    made = cluster_tokens(
        weight, num_clusters, vocabulary_size=vocabulary_size, seed=seed, balanced=balanced, report=report
    )
    clusters = made.clusters.long()
    with replacing(file) as scratch:
        save_file({"clusters": clusters}, scratch, metadata=made_with)
    return clusters


def require_cluster_settings(num_clusters: int, seed: int, iterations: int, tokens: int) -> None:
    """Raise a `ConfigurationError` if a setting is out of range, before any weights are read."""
    for name, value, rule, most in (
        ("num_clusters", num_clusters, WholeNumber(1, tokens), "the number of tokens"),
        ("seed", seed, WholeNumber(0, LARGEST_SEED), "the most"),
        ("iterations", iterations, WholeNumber(1, 10_000), "the most"),
    ):
        if not rule.allows(value):
            raise SettingError(name, f"must be {rule}, {most}; got {value!r}")


def require_faiss() -> Any:
    """faiss, or a `DynSpecError` if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise DynSpecError(
            "token clusters need faiss; install it with: pip install 'hf-dynspec[build]'. (Balanced clusters do not.)"
        ) from error
    return faiss


def _checked_size(weight: torch.Tensor, vocabulary_size: int | None) -> int:
    """How many leading rows are tokens."""
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        shape = list(weight.shape)
        raise ConfigurationError(f"weight must be floating-point [vocabulary, hidden], got {weight.dtype} {shape}")
    if vocabulary_size is None:
        return weight.shape[0]
    if isinstance(vocabulary_size, bool) or not 1 <= vocabulary_size <= weight.shape[0]:
        raise ConfigurationError(
            f"the tokenizer has {vocabulary_size} ids, and the head scores {weight.shape[0]}. Give the tokenizer of "
            "this model; heads with a vocabulary of their own cannot be clustered"
        )
    return vocabulary_size


def _unit_rows(weight: torch.Tensor) -> torch.Tensor:
    """fp32 `[n, d]` on the CPU: the rows, each divided by its length; zero rows stay zero. A row that is not finite
    is refused."""
    unit = torch.empty(weight.shape, dtype=torch.float32)
    for start in range(0, weight.shape[0], _CHUNK_ROWS):
        rows = weight[start : start + _CHUNK_ROWS].detach().to(device="cpu", dtype=torch.float32)
        is_finite = rows.isfinite().all(dim=1)
        if not bool(is_finite.all()):
            row = start + int((~is_finite).nonzero()[0])
            raise ConfigurationError(f"row {row} of the head holds NaN or infinity. Load undamaged weights")
        # Divided by the largest entry first, so that squares neither overflow nor vanish.
        rows = rows / rows.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        unit[start : start + rows.shape[0]] = functional.normalize(rows, dim=1)
    return unit


def _spherical_kmeans(
    rows: torch.Tensor, num_clusters: int, seed: int, iterations: int, report: Report
) -> torch.Tensor:
    """int64 `[n]`: clusters, numbered without gaps, of rows that have length one."""
    points = rows.numpy()
    kmeans = require_faiss().Kmeans(
        points.shape[1],
        num_clusters,
        niter=1,
        spherical=True,
        seed=seed,
        max_points_per_centroid=points.shape[0],
        min_points_per_centroid=1,
    )
    # One iteration in each call, as only between calls it can be told how far it is.
    for done in range(iterations):
        report("k-means", done, iterations)
        kmeans.train(points, init_centroids=kmeans.centroids)
    report("k-means", iterations, iterations)
    for _ in range(_MOST_REFILLS):
        cosines, clusters = kmeans.assign(points)
        cosines, clusters = torch.from_numpy(cosines), torch.from_numpy(clusters)
        empty = (torch.bincount(clusters, minlength=num_clusters) == 0).nonzero().squeeze(1)
        farthest = torch.argsort(cosines, stable=True)[: empty.shape[0]]
        farthest = farthest[cosines[farthest] < _SAME_DIRECTION]
        if not farthest.numel():
            break
        kmeans.centroids[empty[: farthest.shape[0]].numpy()] = points[farthest.numpy()]
    return torch.unique(clusters, return_inverse=True)[1]


def _bisect(rows: torch.Tensor, num_clusters: int, seed: int, iterations: int, report: Report) -> torch.Tensor:
    """int64 `[n]`: clusters whose sizes differ by at most one, of rows that have length one or are zero."""
    generator = torch.Generator().manual_seed(seed)
    smaller, larger_clusters = divmod(rows.shape[0], num_clusters)
    clusters = torch.empty(rows.shape[0], dtype=torch.int64)
    pending = [(torch.arange(rows.shape[0]), 0, num_clusters)]
    done = 0
    while pending:
        ids, first, count = pending.pop()
        if count == 1:
            clusters[ids] = first
            done += 1
            report("halving", done, num_clusters)
            continue
        left = count // 2
        # The first clusters are those that are larger by one.
        left_size = left * smaller + min(max(larger_clusters - first, 0), left)
        direction = torch.randn(rows.shape[1], generator=generator)
        # All rows are in order at first, and are not copied.
        part = rows if ids.shape[0] == rows.shape[0] else rows.index_select(0, ids)
        is_left = _split(part, left_size, direction, iterations)
        pending += [(ids[~is_left], first + left, count - left), (ids[is_left], first, left)]
    return clusters


def _split(rows: torch.Tensor, left_size: int, direction: torch.Tensor, iterations: int) -> torch.Tensor:
    """bool `[n]`: spherical 2-means with `left_size` rows on the left, from an initial direction `[d]`."""
    is_left = torch.zeros(rows.shape[0], dtype=torch.bool)
    for _ in range(iterations):
        before, is_left = is_left, torch.zeros_like(is_left)
        is_left[torch.argsort(rows @ direction, descending=True, stable=True)[:left_size]] = True
        if torch.equal(before, is_left):
            break
        sums = torch.stack([is_left, ~is_left]).to(rows.dtype) @ rows
        left_centroid, right_centroid = functional.normalize(sums, dim=1)
        direction = left_centroid - right_centroid
    return is_left


def _means(weight: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
    """fp32 `[M, d]` on the CPU: the mean of each cluster's rows."""
    sizes = torch.bincount(clusters)
    sums = torch.zeros(sizes.shape[0], weight.shape[1], dtype=torch.float64)
    for start in range(0, weight.shape[0], _CHUNK_ROWS):
        chunk = weight[start : start + _CHUNK_ROWS].detach().to(device="cpu", dtype=torch.float64)
        sums.index_add_(0, clusters[start : start + chunk.shape[0]], chunk)
    return (sums / sizes.unsqueeze(1)).float()


def neighbour_spread(
    weight: torch.Tensor,
    clusters: torch.Tensor,
    *,
    neighbours: Sequence[int] = (10, 50),
    samples: int = 1000,
    seed: int = 0,
    report: Report = lambda activity, done, total: None,
) -> dict[int, tuple[float, float]]:
    """In how many clusters the nearest neighbours of tokens lie, which are the other rows of highest cosine. By number
    of neighbours: the mean number of their clusters, and the same for a random partition of the same sizes.

    Args:
        neighbours: how many neighbours of a token are counted. Numbers that the vocabulary has not are left out.
        samples: tokens to look at, drawn without repeats from all whose row is not zero.
        seed: of the sample and of the random partition.
    """
    tokens = clusters.shape[0]
    rows = _unit_rows(weight[:tokens])
    generator = torch.Generator().manual_seed(seed)
    candidates = rows.any(dim=1).nonzero().squeeze(1)
    sample = candidates[torch.randperm(candidates.shape[0], generator=generator)[:samples]].sort().values
    kept = sorted(count for count in set(neighbours) if 1 <= count < tokens)
    if not kept or not sample.numel():
        return {}
    nearest = []
    for part in sample.split(_CHUNK_QUERIES):
        report("neighbours", len(nearest) * _CHUNK_QUERIES, sample.shape[0])
        cosines = rows[part] @ rows.T
        cosines.scatter_(1, part.unsqueeze(1), -torch.inf)
        nearest.append(cosines.topk(kept[-1], dim=1).indices)
    report("neighbours", sample.shape[0], sample.shape[0])
    nearest = torch.cat(nearest)
    shuffled = clusters[torch.randperm(tokens, generator=generator)]
    return {
        count: (_mean_distinct(clusters[nearest[:, :count]]), _mean_distinct(shuffled[nearest[:, :count]]))
        for count in kept
    }


def _mean_distinct(values: torch.Tensor) -> float:
    """The mean number of different values in the rows of `[s, k]`."""
    ordered = values.sort(dim=1).values
    return float((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).float().mean()) + 1
