"""Which candidates the target accepts: what lossless means.

Row 0 of the target's logits is what it says after the last verified token, row `j + 1` what it says after candidate
`j`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import argmax_rows
from ..protocol import Candidates
from .processing import draw

# Processes the row of logits at one node, int64 [1], given the tokens on the path to it, int64 [1, depth]. Returns
# fp32 [1, V].
ProcessRow = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one verification accepts.

    Args:
        token_ids: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
        rows: int64 `[a + 1]`: which rows of the target's logits they were chosen at.
        scores: for each of them the processed logits that it was chosen by, fp32 `[1, V]`.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    scores: tuple[torch.Tensor, ...]

    @property
    def accepted(self) -> int:
        """How many candidates were accepted, `a`."""
        return self.token_ids.shape[0] - 1

    def first(self, count: int) -> "Outcome":
        """The first `count` tokens alone."""
        return Outcome(self.token_ids[:count], self.rows[:count], self.scores[:count])


def verify(candidates: Candidates | None, process: ProcessRow, do_sample: bool, device: torch.device) -> Outcome:
    """Walk from the last verified token along the candidates for as long as the target agrees.

    At every node the target chooses a token: greedily its most probable one, when sampling a draw from its
    distribution `p`. If a candidate below the node is that token, the walk goes on there.

    When sampling from a chain, whose candidate `x` was drawn from `q`, that draw is the one of speculative sampling
    (Leviathan et al., 2023, algorithm 1): `x` with probability `min(1, p(x) / q(x))`, else a token from
    `max(0, p − q)`. A tree's candidates were chosen without chance. There a plain draw from `p` does what the
    sibling-wise acceptance of EAGLE-2 and SpecInfer (Miao et al., 2024) does, which accepts sibling `x` with
    probability `p(x)`, else sets `p(x)` to 0 and scales `p` back to 1 before the next one: child `x` comes out with
    probability `p(x)`, as does any other token.

    Only the nodes on the path are processed, one after another, each with its own path as the context. On a CPU the
    walk ends where it ends; elsewhere all levels are walked, and the device is waited for once.

    Args:
        candidates: what was verified (None: nothing).
        process: gives the processed logits at a node.
        do_sample: draw tokens.
        device: where the logits are.
    """
    row = torch.zeros(1, dtype=torch.int64, device=device)
    goes_on = torch.ones(1, dtype=torch.bool, device=device)
    path = row[:0]
    if candidates is not None:
        token_ids = candidates.token_ids.to(device)
        steps = torch.arange(token_ids.shape[0], device=device)
        parents = steps - 1 if candidates.is_chain else candidates.parents.to(device)
    rows, scores, agrees = [], [], []
    for depth in range(1 if candidates is None else len(candidates.shortlists) + 1):
        processed = process(row, path.unsqueeze(0))
        if not do_sample:
            token = argmax_rows(processed)
        elif candidates is not None and candidates.is_chain and depth < token_ids.shape[0]:
            token = _draw_at(candidates, depth, _probabilities(processed))
        else:
            token = draw(_probabilities(processed))
        rows.append(row)
        scores.append(processed)
        path = torch.cat([path, token])
        if candidates is None:
            break
        is_next = (parents + 1 == row) & (token_ids == token)
        goes_on = goes_on & is_next.any()
        agrees.append(goes_on)
        # Of equal siblings, which stand for the same path, the first is taken.
        row = is_next.to(torch.int8).argmax(keepdim=True) + 1
        if device.type == "cpu" and not goes_on:
            break
    count = 1 + (int(torch.cat(agrees).sum()) if agrees else 0)
    return Outcome(path[:count], torch.cat(rows)[:count], tuple(scores[:count]))


def _draw_at(candidates: Candidates, depth: int, p: torch.Tensor) -> torch.Tensor:
    """Speculative sampling at one depth of a chain: a token, int64 `[1]`, distributed as `p`, fp32 `[V]`, says."""
    shortlist = candidates.shortlists[depth]
    q = candidates.logits[depth].softmax(-1)
    drafted = candidates.token_ids[depth : depth + 1]
    # A token holds one occupied slot; unoccupied ones have probability 0.
    of_drafter = torch.where(shortlist.scored_slots == drafted, q, 0.0).amax(keepdim=True).to(p.device)
    drafted = drafted.to(p.device)
    is_accepted = torch.rand(1, device=p.device) * of_drafter < p.index_select(0, drafted)
    if p.device.type == "cpu" and is_accepted:
        return drafted
    residual = p.scatter_add(0, shortlist.scored_slots.to(p.device), -q.to(p.device)).clamp_min(0.0)
    # Where both distributions are equal to rounding, nothing is left over and the target's own takes its place.
    residual = torch.where(residual.sum() > 0, residual, p)
    return torch.where(is_accepted, drafted, draw(residual))


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """The softmax `[V]` of `[1, V]`, divided by its sum, which over a large vocabulary is 1 only to a few digits."""
    probabilities = scores[0].softmax(-1)
    return probabilities / probabilities.sum()
