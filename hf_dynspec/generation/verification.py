"""Which candidates the target accepts. Pure functions of the target's scores: they decide what lossless means.

Row 0 of the scores is what the target says after the last verified token, row `j + 1` what it says after candidate
`j`.
"""

from dataclasses import dataclass

import torch

from ..protocol import Candidates
from ..tree import descent
from .processing import draw


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one verification accepts.

    Args:
        token_ids: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
        rows: which of the scored rows each of them was chosen at: int64 `[a + 1]`, or a slice for a chain.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor | slice

    @property
    def accepted(self) -> int:
        """How many candidates were accepted, `a`."""
        return self.token_ids.shape[0] - 1

    def first(self, count: int) -> "Outcome":
        """The first `count` tokens alone."""
        rows = slice(0, count) if isinstance(self.rows, slice) else self.rows[:count]
        return Outcome(self.token_ids[:count], rows)


def verify_greedy(scores: torch.Tensor, candidates: Candidates | None) -> Outcome:
    """Accept candidates as long as they are the target's argmax: the longest such path of a tree.

    Args:
        scores: fp32 `[k + 1, V]`: the target's processed logits.
        candidates: what was verified (None: nothing, `k` is 0). Waits for the device once.
    """
    chosen = scores.argmax(-1)
    if candidates is None:
        return Outcome(chosen, slice(0, 1))
    token_ids = candidates.token_ids.to(scores.device)
    if candidates.is_chain:
        accepted = int((chosen[:-1] == token_ids).long().cumprod(0).sum())
        return Outcome(chosen[: accepted + 1], slice(0, accepted + 1))
    parents = candidates.parents.to(scores.device)
    is_wrong = chosen[parents + 1] != token_ids
    paths = descent(parents, len(candidates.shortlists))
    is_reached = ~(paths & is_wrong).any(1)
    lengths = (candidates.depths.to(scores.device) + 1) * is_reached
    # Equal siblings make equal paths, of which the first is as good as the others.
    length, node = lengths.max(0, keepdim=True)
    rows = _rows_of_path(paths.index_select(0, node)[0], candidates, int(length))
    return Outcome(chosen[rows], rows)


def verify_sampled(scores: torch.Tensor, candidates: Candidates | None, buffer: torch.Tensor | None = None) -> Outcome:
    """Accept candidates so that the tokens that come out are drawn from the target's distribution exactly.

    Args:
        scores: as for `verify_greedy`; the target's distribution `p` is their softmax.
        candidates: as for `verify_greedy`; a chain with the logits that it was drawn by.
        buffer: fp32 of at least the size of `scores`, overwritten with probabilities (None: allocated here).
    """
    # Over a large vocabulary a softmax sums to 1 only to a few digits: below, it is divided by its sum once more.
    probabilities = torch.softmax(scores, -1, out=None if buffer is None else buffer[: scores.shape[0]])
    if candidates is None:
        return Outcome(draw(probabilities[0]), slice(0, 1))
    if candidates.is_chain:
        return _sample_chain(probabilities, candidates)
    return _sample_tree(probabilities, candidates)


def _sample_chain(probabilities: torch.Tensor, candidates: Candidates) -> Outcome:
    """Speculative sampling (Leviathan et al., 2023, algorithm 1).

    A candidate `x`, drawn from `q`, is accepted with probability `min(1, p(x) / q(x))`. The first that is not is
    replaced by a draw from `max(0, p − q)`, and after the last a token is drawn from `p`.
    """
    device = probabilities.device
    drafted = candidates.token_ids.to(device)
    k = drafted.shape[0]
    totals = probabilities.sum(-1)
    drafter_probabilities = [logits.softmax(-1) for logits in candidates.logits]
    # A token holds one occupied slot; unoccupied ones have probability 0.
    of_drafter = torch.stack(
        [
            torch.where(shortlist.scored_slots == token_id, one, 0.0).amax()
            for one, shortlist, token_id in zip(
                drafter_probabilities, candidates.shortlists, candidates.token_ids, strict=True
            )
        ]
    ).to(device)
    of_target = probabilities[:-1].gather(1, drafted.unsqueeze(1)).squeeze(1) / totals[:-1]
    is_accepted = torch.rand(k, device=device) * of_drafter < of_target
    accepted = int(is_accepted.long().cumprod(0).sum())
    weights = probabilities[accepted] / totals[accepted]
    if accepted < k:
        slots = candidates.shortlists[accepted].scored_slots.to(device)
        lost = drafter_probabilities[accepted].to(device)
        residual = weights.scatter_add(0, slots, -lost).clamp_min(0.0)
        # Where both distributions are equal to rounding, nothing is left over and the target's own takes its place.
        weights = torch.where(residual.sum() > 0, residual, weights)
    return Outcome(torch.cat([drafted[:accepted], draw(weights)]), slice(0, accepted + 1))


def _sample_tree(probabilities: torch.Tensor, candidates: Candidates) -> Outcome:
    """Sibling-wise acceptance of children that were chosen without chance (EAGLE-2; SpecInfer, Miao et al., 2024).

    Walking down, sibling `x` is accepted with probability `p(x)`; if it is not, `p(x)` is set to 0 and `p` scaled back
    to 1 before the next sibling. If none is accepted, a token is drawn from what is left of `p`. A token thus comes
    out with probability `p`. All nodes decide at once: a decision only counts where the walk gets there.
    """
    device = probabilities.device
    token_ids, parents = candidates.token_ids.to(device), candidates.parents.to(device)
    k = token_ids.shape[0]
    levels = len(candidates.shortlists)
    totals = probabilities.sum(-1)
    is_earlier_sibling = (parents.unsqueeze(1) == parents).tril(-1)
    # The second of equal siblings has nothing left.
    is_repeat = (is_earlier_sibling & (token_ids.unsqueeze(1) == token_ids)).any(1)
    own = (probabilities[parents + 1, token_ids] / totals[parents + 1]).masked_fill(is_repeat, 0.0)
    left = 1.0 - (is_earlier_sibling * own).sum(1)
    accepts = torch.rand(k, device=device) * left < own
    is_chosen = accepts & ~(is_earlier_sibling & accepts).any(1)
    paths = descent(parents, levels)
    is_reached = ~(paths & ~is_chosen).any(1)
    lengths = (candidates.depths.to(device) + 1) * is_reached
    length, node = lengths.max(0, keepdim=True)
    rows = _rows_of_path(paths.index_select(0, node)[0], candidates, int(length))
    last = rows[-1:]
    weights = probabilities.index_select(0, last)[0]
    is_refused = torch.zeros_like(weights).scatter_reduce(0, token_ids, (parents + 1 == last).to(weights), "amax")
    residual = weights.masked_fill(is_refused > 0, 0.0)
    # All siblings can only be refused together where something is left; rounding may say otherwise.
    weights = torch.where(residual.sum() > 0, residual, weights)
    return Outcome(torch.cat([token_ids[rows[1:] - 1], draw(weights)]), rows)


def _rows_of_path(path: torch.Tensor, candidates: Candidates, length: int) -> torch.Tensor:
    """int64 `[length + 1]`: the scored rows on a path, given bool `[k]`, from the root's down. Does not wait."""
    depths = candidates.depths.to(path.device)
    rows = torch.zeros(len(candidates.shortlists) + 1, dtype=torch.int64, device=path.device)
    nodes = torch.arange(path.shape[0], device=path.device)
    rows.scatter_reduce_(0, depths + 1, torch.where(path, nodes + 1, 0), "amax")
    return rows[: length + 1]
