"""The token co-occurrence graph: which tokens follow on which in text, and how likely.

Source: EvoSpec, section 3.3 and appendices A.2 and A.3: an edge leads from `u` to `v` where `v` immediately follows
`u`, weighted with the empirical probability `p(v | u)`; kept are edges that were seen at least 5 times, with a
probability of at least τ = 10⁻⁴, and at most 64 for each source.

The bigrams are those that `bigram_counts` has counted, whose runs are merged into the graph here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ConfigurationError
from ..fields import SettingError
from .bigram_counts import BigramCounts
from .bigram_runs import Block, merged_blocks, sum_equal

if TYPE_CHECKING:
    from ..shortlists.retrieval.graph import CooccurrenceGraph

# How many successors of each seed the paper takes (appendix A.3).
EXPANSION = 8


@dataclass(frozen=True)
class Pruning:
    """Which bigrams become edges.

    Args:
        minimum_count: how often one was seen at least.
        threshold: its probability `p(v | u)` at least.
        largest_degree: edges of one source at most: the likeliest, of equally likely ones those with the lower ids.

    Raises:
        ConfigurationError: a value is out of range.
    """

    minimum_count: int = 5
    threshold: float = 1e-4
    largest_degree: int = 64

    def __post_init__(self):
        for name, least in (("minimum_count", 1), ("largest_degree", 1)):
            if getattr(self, name) < least:
                raise SettingError(name, f"must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.threshold < 1:
            raise SettingError("threshold", f"must be a probability of at least 0 and below 1, got {self.threshold}")


def build_graph(
    counts: BigramCounts,
    vocabulary_size: int,
    pruning: Pruning,
    *,
    memory: int = 1 << 30,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> "CooccurrenceGraph":
    """Make the graph of a job that is counted and merged. `p(v | u)` is the share of `v` among all bigrams that begin
    with `u`, those that are pruned included.

    Args:
        counts: all of whose units are finished, with no more than `FAN_IN` runs.
        vocabulary_size: as they were counted with.
        pruning: which bigrams become edges.
        memory: bytes that this may take, the graph itself not included (8 for each edge, 8 for each id).
        report: called with how many of how many sources are done.

    Raises:
        ConfigurationError: there would be no edge.
    """
    import torch

    from ..shortlists.retrieval.graph import CooccurrenceGraph

    degrees = np.zeros(vocabulary_size, np.int64)
    successors, probabilities = [], []
    distinct = 0
    for bigrams, numbers in _whole_sources(merged_blocks(counts.runs(), memory // 3), vocabulary_size):
        sources, followers, shares = _edges(bigrams, numbers, vocabulary_size, pruning)
        source, degree = sum_equal(sources)
        degrees[source] += degree
        successors.append(followers.astype(np.int32))
        probabilities.append(shares.astype(np.float32))
        distinct += len(bigrams)
        report(int(bigrams[-1]) // vocabulary_size + 1, vocabulary_size)
    report(vocabulary_size, vocabulary_size)
    if not degrees.any():
        raise ConfigurationError(
            f"none of {distinct:,} different bigrams was seen {pruning.minimum_count} times and has a "
            f"probability of {pruning.threshold:g}: give more text, or lower --minimum-count or --threshold"
        )
    return CooccurrenceGraph(
        torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)])),
        torch.from_numpy(np.concatenate(successors)),
        torch.from_numpy(np.concatenate(probabilities)),
    )


@dataclass(frozen=True)
class Coverage:
    """How much of a text leads along edges of a graph.

    Args:
        bigrams: how many were counted.
        in_expansion: how many of them lead to one of the `EXPANSION` likeliest successors.
        in_graph: how many of them are edges.
    """

    bigrams: int
    in_expansion: int
    in_graph: int


def graph_coverage(graph: "CooccurrenceGraph", counts: BigramCounts, *, memory: int = 1 << 30) -> Coverage:
    """Hold other text against a graph.

    Args:
        graph: on the CPU.
        counts: of a job that is counted and merged, with the graph's vocabulary.
        memory: bytes that this may take, 32 for each edge not included.
    """
    offsets = graph.offsets.numpy()
    sources = np.repeat(np.arange(graph.vocabulary_size), np.diff(offsets))
    places = np.arange(len(sources)) - offsets[sources]
    edges = sources * graph.vocabulary_size + graph.successors.numpy()
    order = np.argsort(edges)
    edges, places = edges[order], places[order]
    bigrams = in_expansion = in_graph = 0
    for keys, numbers in merged_blocks(counts.runs(), memory // 2):
        nearest = np.minimum(np.searchsorted(edges, keys), len(edges) - 1)
        is_edge = edges[nearest] == keys
        bigrams += int(numbers.sum())
        in_graph += int(numbers[is_edge].sum())
        in_expansion += int(numbers[is_edge & (places[nearest] < EXPANSION)].sum())
    return Coverage(bigrams, in_expansion, in_graph)


def _whole_sources(blocks: Iterable[Block], vocabulary_size: int) -> Iterator[Block]:
    """The same bigrams in blocks that hold all bigrams of each of their sources."""
    held: list[Block] = []
    for bigrams, counts in blocks:
        begin = int(np.searchsorted(bigrams, bigrams[-1] // vocabulary_size * vocabulary_size))
        if held and begin == 0 and held[-1][0][-1] // vocabulary_size == bigrams[0] // vocabulary_size:
            held.append((bigrams, counts))
            continue
        if held or begin:
            yield _joined([*held, (bigrams[:begin], counts[:begin])])
        held = [(bigrams[begin:], counts[begin:])]
    if held:
        yield _joined(held)


def _joined(blocks: list[Block]) -> Block:
    return np.concatenate([bigrams for bigrams, _ in blocks]), np.concatenate([counts for _, counts in blocks])


def _edges(
    bigrams: np.ndarray, counts: np.ndarray, vocabulary_size: int, pruning: Pruning
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bigrams that become edges: int64 `[m]` sources in ascending order, int64 `[m]` their successors, the
    likeliest of each source first, and float64 `[m]` probabilities."""
    sources, followers = np.divmod(bigrams, vocabulary_size)
    starts = np.flatnonzero(np.diff(sources, prepend=-1))
    totals = np.add.reduceat(counts, starts)
    shares = counts / np.repeat(totals, np.diff(starts, append=len(counts)))
    kept = np.flatnonzero((counts >= pruning.minimum_count) & (shares >= pruning.threshold))
    # Likelier is more often, within a source.
    kept = kept[np.lexsort((followers[kept], -counts[kept], sources[kept]))]
    place = np.arange(len(kept)) - np.searchsorted(sources[kept], sources[kept])
    kept = kept[place < pruning.largest_degree]
    return sources[kept], followers[kept], shares[kept]
