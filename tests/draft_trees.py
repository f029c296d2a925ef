"""EAGLE-2's dynamic tree in plain lists, and checks of trees of candidates."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from hf_dynspec import TreeConfig, devices
from hf_dynspec.generation.verification import Outcome, ProcessRow, outcome_of, walk, walk_to_end
from hf_dynspec.protocol import Candidates

Path = tuple[int, ...]


def slow_tree(successors: Callable[[Path], dict[int, float]], config: TreeConfig) -> dict[Path, float]:
    """Every node of the tree, as the path of tokens that leads to it, with its score (EAGLE-2, section 4).

    Args:
        successors: the log-probability of each token after a path.
        config: the shape.
    """
    frontier, nodes = [((), 0.0)], []
    for _ in range(config.depth + 1):
        level = []
        for path, score in frontier:
            best = sorted(successors(path).items(), key=lambda one: -one[1])[: config.top_k]
            level += [((*path, token), score + log_probability) for token, log_probability in best]
        nodes += level
        frontier = sorted(level, key=lambda one: -one[1])[: config.top_k]
    # The sort is stable: of a parent and a child of the same score, the parent comes first.
    chosen = dict(sorted(nodes, key=lambda one: -one[1])[: config.total_tokens - 1])
    assert all(path[:end] in chosen for path in chosen for end in range(1, len(path)))
    return chosen


def paths_of(candidates: Candidates) -> list[Path]:
    """The path of tokens that leads to each node, after a check that it is a tree."""
    paths: list[Path] = []
    for node, (token, parent, depth) in enumerate(
        zip(candidates.token_ids.tolist(), candidates.parents.tolist(), candidates.depths.tolist(), strict=True)
    ):
        assert -1 <= parent < node, "a node must come after its parent"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert depth == len(paths[-1]) - 1
    assert candidates.depths.diff().min() >= 0 if len(paths) > 1 else True, "nodes must come level by level"
    return paths


def assert_same_tree(candidates: Candidates, expected: dict[Path, float], tolerance: float) -> None:
    """The same nodes, with the same scores up to rounding."""
    actual = dict(zip(paths_of(candidates), candidates.scores.tolist(), strict=True))
    assert len(actual) == candidates.token_ids.shape[0], "two nodes have the same path"
    assert actual.keys() == expected.keys()
    paths = list(expected)
    torch.testing.assert_close(
        torch.tensor([actual[path] for path in paths]),
        torch.tensor([expected[path] for path in paths]),
        rtol=0,
        atol=tolerance,
    )


def over_shortlist(logits: torch.Tensor, ids: torch.Tensor) -> dict[int, float]:
    """The log-probability of each id of a shortlist, given logits `[V]`."""
    return dict(zip(ids.tolist(), logits.float()[ids].log_softmax(-1).tolist(), strict=True))


@torch.no_grad()
def slow_draft(
    drafter: PreTrainedModel, text: torch.Tensor, config: TreeConfig, ids: torch.Tensor | None = None
) -> dict[Path, float]:
    """The tree that the drafter's own forwards make, each over a whole path from the beginning of the text.

    Args:
        drafter: a whole model.
        text: `[1, n]`.
        config: the shape.
        ids: the shortlist (None: all tokens).
    """
    ids = torch.arange(drafter.config.vocab_size) if ids is None else ids

    def successors(path: Path) -> dict[int, float]:
        whole = torch.cat([text, torch.tensor([path], dtype=torch.int64)], dim=1)
        return over_shortlist(drafter(whole, use_cache=False).logits[0, -1], ids)

    return slow_tree(successors, config)


def verify(candidates: Candidates, process: ProcessRow, do_sample: bool) -> Outcome:
    """The accepted tokens, by the walk for the host's memory or by the one for devices, as `is_host_memory` says."""
    device = candidates.token_ids.device
    if devices.is_host_memory(device):
        return outcome_of(list(walk(candidates, process, do_sample, device)))
    walked = walk_to_end(candidates, process, do_sample, device, keeps_scores=False)
    stops = [*(walked.goes_on == 0).tolist(), True]
    return walked.outcome(walked.token_ids[: 1 + stops.index(True)].tolist())
