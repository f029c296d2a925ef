"""Which candidates the target accepts. Pure functions of the target's scores: they decide what lossless means.

Row 0 of the scores is what the target says after the last verified token, row `j + 1` what it says after candidate
`j`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import argmax_rows
from ..protocol import Candidates
from .processing import draw

# Processes the row of logits at one node, int64 [1], given the drafted tokens on the path to it, int64 [1, depth].
# Returns fp32 [1, V].
ProcessRow = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one verification accepts.

    Args:
        token_ids: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
        rows: which rows of the target's logits they were chosen at: int64 `[a + 1]`, or a slice for a chain.
        scores: fp32 `[a + 1, V]`: the processed logits that they were chosen by.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor | slice
    scores: torch.Tensor

    @property
    def accepted(self) -> int:
        """How many candidates were accepted, `a`."""
        return self.token_ids.shape[0] - 1

    def first(self, count: int) -> "Outcome":
        """The first `count` tokens alone."""
        rows = slice(0, count) if isinstance(self.rows, slice) else self.rows[:count]
        return Outcome(self.token_ids[:count], rows, self.scores[:count])


def verify_chain_greedy(scores: torch.Tensor, drafted: torch.Tensor) -> Outcome:
    """Accept candidates up to the first that is not the target's argmax.

    Args:
        scores: fp32 `[k + 1, V]`: the target's processed logits.
        drafted: int64 `[k]`, on their device: the candidates. Waits for the device once.
    """
    chosen = argmax_rows(scores)
    accepted = int((chosen[:-1] == drafted).long().cumprod(0).sum())
    return _of_chain(chosen[: accepted + 1], scores)


def verify_chain_sampled(
    scores: torch.Tensor, drafted: torch.Tensor, candidates: Candidates | None, buffer: torch.Tensor | None = None
) -> Outcome:
    """Speculative sampling (Leviathan et al., 2023, algorithm 1), which draws from the target's distribution exactly.

    A candidate `x`, drawn from `q`, is accepted with probability `min(1, p(x) / q(x))`. The first that is not is
    replaced by a draw from `max(0, p − q)`, and after the last a token is drawn from `p`.

    Args:
        scores: as for `verify_chain_greedy`; `p` is their softmax.
        drafted: as for `verify_chain_greedy`.
        candidates: the same chain with the logits that it was drawn by (None where `k` is 0).
        buffer: fp32 `[k + 1, V]`: may be overwritten (None: allocated here).
    """
    probabilities = torch.softmax(scores, -1, out=buffer)
    # Over a large vocabulary a softmax sums to 1 only to a few digits, so it is divided by its sum once more.
    totals = probabilities.sum(-1)
    k = drafted.shape[0]
    accepted = 0
    if k:
        of_drafter, drafter_probabilities = _drafter_probabilities(candidates, scores.device)
        of_target = probabilities[:-1].gather(1, drafted.unsqueeze(1)).squeeze(1) / totals[:-1]
        is_accepted = torch.rand(k, device=scores.device) * of_drafter < of_target
        accepted = int(is_accepted.long().cumprod(0).sum())
    weights = probabilities[accepted] / totals[accepted]
    if accepted < k:
        slots = candidates.shortlists[accepted].scored_slots.to(scores.device)
        lost = drafter_probabilities[accepted].to(scores.device)
        residual = weights.scatter_add(0, slots, -lost).clamp_min(0.0)
        # Where both distributions are equal to rounding, nothing is left over and the target's own takes its place.
        weights = torch.where(residual.sum() > 0, residual, weights)
    return _of_chain(torch.cat([drafted[:accepted], draw(weights)]), scores)


def _drafter_probabilities(candidates: Candidates, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The probability by which each candidate was drawn, `[k]` on `device`, and the distributions, `[width]` each."""
    distributions = [logits.softmax(-1) for logits in candidates.logits]
    # A token holds one occupied slot; unoccupied ones have probability 0.
    of_drafted = [
        torch.where(shortlist.scored_slots == token_id, one, 0.0).amax()
        for one, shortlist, token_id in zip(distributions, candidates.shortlists, candidates.token_ids, strict=True)
    ]
    return torch.stack(of_drafted).to(device), distributions


def _of_chain(token_ids: torch.Tensor, scores: torch.Tensor) -> Outcome:
    return Outcome(token_ids, slice(0, token_ids.shape[0]), scores[: token_ids.shape[0]])


def verify_tree(candidates: Candidates, process: ProcessRow, do_sample: bool, device: torch.device) -> Outcome:
    """Walk down a tree: at each node the target chooses a token, and the walk goes on if a child holds it.

    Greedily that is the longest path of the target's own tokens. When sampling it is the sibling-wise acceptance of
    EAGLE-2 and SpecInfer (Miao et al., 2024) for children that were chosen without chance. There sibling `x` is
    accepted with probability `p(x)`, else `p(x)` is set to 0 and `p` scaled back to 1 before the next one; if none is
    accepted, a token is drawn from what is left. Child `x` then comes out with probability `p(x)`, as does any other
    token, and one draw from `p` decides the same. Only the nodes on the path are processed, each with its own path as
    the context.

    Args:
        candidates: a tree.
        process: gives the processed logits at a node.
        do_sample: draw from their softmax instead of taking the largest.
        device: where they are. If it is not the CPU, it is waited for once, at the end.
    """
    token_ids, parents = candidates.token_ids.to(device), candidates.parents.to(device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    goes_on = torch.ones(1, dtype=torch.bool, device=device)
    rows, chosen, scores, steps = [], [], [], []
    path = token_ids[:0]
    for _ in range(len(candidates.shortlists) + 1):
        processed = process(row, path.unsqueeze(0))
        token = draw(_normalised(processed[0])) if do_sample else argmax_rows(processed)
        rows.append(row)
        chosen.append(token)
        scores.append(processed)
        path = torch.cat([path, token])
        is_next = (parents + 1 == row) & (token_ids == token)
        # Equal siblings stand for the same path: the first is taken.
        row = is_next.to(torch.int8).argmax(keepdim=True) + 1
        goes_on = goes_on & is_next.any()
        steps.append(goes_on)
        if device.type == "cpu" and not goes_on:
            break
    count = min(int(torch.cat(steps).sum()) + 1, len(chosen))
    return Outcome(path[:count], torch.cat(rows)[:count], torch.cat(scores[:count]))


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    """The softmax `[V]`. Over a large vocabulary it sums to 1 only to a few digits, so it is divided by its sum."""
    probabilities = scores.softmax(-1)
    return probabilities / probabilities.sum()
