"""How well token clusters keep together what is alike: over how many of them the nearest neighbours of tokens lie."""

from collections.abc import Sequence

import torch

from .clusters import Report, unit_chunks


def neighbour_spread(
    weight: torch.Tensor,
    clusters: torch.Tensor,
    *,
    neighbours: Sequence[int] = (10, 50),
    samples: int = 1000,
    seed: int = 0,
    device: str | torch.device = "cpu",
    report: Report = lambda activity, done, total: None,
) -> dict[int, tuple[float, float]]:
    """In how many clusters the nearest neighbours of tokens lie: what a router has to find besides the true token's.

    Neighbours are those of highest cosine over the head's rows, by exact search, the token itself left out.

    Args:
        weight: `[V, d]`, as in `clusters.cluster_tokens`.
        clusters: int32 or int64 `[n]`, `n <= V`.
        neighbours: how many neighbours of a token are looked at; counts that the vocabulary has not are left out.
        samples: tokens that are looked at, drawn without repeats from those whose row is not zero.
        seed: for the sample and for the random partition.
        device: where rows are compared.
        report: as in `clusters.cluster_tokens`.

    Returns:
        For each number of neighbours the mean number of clusters that they lie in, and the same mean for a random
        partition with clusters of the same sizes.
    """
    tokens = clusters.shape[0]
    generator = torch.Generator().manual_seed(seed)
    has_direction = torch.cat([rows.any(dim=1).cpu() for _, rows in unit_chunks(weight[:tokens], device)])
    candidates = has_direction.nonzero().squeeze(1)
    sample = candidates[torch.randperm(candidates.shape[0], generator=generator)[:samples]].sort().values
    kept = sorted(count for count in set(neighbours) if 1 <= count < tokens)
    if not kept or not sample.numel():
        return {}
    nearest = _nearest(weight[:tokens], sample, kept[-1], device, report)
    shuffled = clusters[torch.randperm(tokens, generator=generator)]
    return {
        count: (_mean_distinct(clusters[nearest[:, :count]]), _mean_distinct(shuffled[nearest[:, :count]]))
        for count in kept
    }


def _nearest(
    weight: torch.Tensor, sample: torch.Tensor, count: int, device: str | torch.device, report: Report
) -> torch.Tensor:
    """int64 `[s, count]`: the tokens of highest cosine to those of the sample, int64 `[s]`, highest first."""
    picked = weight[sample.to(weight.device)]
    queries = torch.cat([rows for _, rows in unit_chunks(picked, device)])
    sample = sample.to(device)
    cosines = torch.empty(sample.shape[0], 0, device=device)
    nearest = torch.empty(sample.shape[0], 0, dtype=torch.int64, device=device)
    for start, rows in unit_chunks(weight, device):
        report("neighbours", start, weight.shape[0])
        found = queries @ rows.T
        ids = torch.arange(start, start + rows.shape[0], device=device)
        found.masked_fill_(ids == sample.unsqueeze(1), float("-inf"))
        cosines = torch.cat([cosines, found], dim=1)
        nearest = torch.cat([nearest, ids.expand(sample.shape[0], -1)], dim=1)
        cosines, places = cosines.topk(min(count, cosines.shape[1]), dim=1)
        nearest = nearest.gather(1, places)
    report("neighbours", weight.shape[0], weight.shape[0])
    return nearest.cpu()


def _mean_distinct(values: torch.Tensor) -> float:
    """The mean number of different values in the rows of `[s, k]`."""
    ordered = values.sort(dim=1).values
    return float((ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).float().mean()) + 1
