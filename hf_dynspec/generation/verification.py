"""Which candidates the target accepts. Pure functions of the target's scores: they decide what lossless means."""

import torch

from ..protocol import Candidates
from .processing import draw


def verify_greedy(scores: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Accept candidates up to the first that is not the target's argmax.

    Args:
        scores: fp32 `[k + 1, V]`: the target's processed logits after the prefix and after each candidate.
        drafted: int64 `[k]`: a chain of candidates.

    Returns:
        int64 `[a + 1]`, the accepted candidates and the target's own token after them, and `a`. Waits for the device.
    """
    chosen = scores.argmax(-1)
    accepted = int((chosen[:-1] == drafted).long().cumprod(0).sum())
    return chosen[: accepted + 1], accepted


def verify_sampled(scores: torch.Tensor, drafted: torch.Tensor, candidates: Candidates | None):
    """Speculative sampling (Leviathan et al., 2023, algorithm 1), which draws from the target's distribution exactly.

    A candidate `x`, drawn from `q`, is accepted with probability `min(1, p(x) / q(x))`. The first that is not is
    replaced by a draw from `max(0, p − q)`, and after the last a token is drawn from `p`.

    Args:
        scores: fp32 `[k + 1, V]`: as for `verify_greedy`; `p` is their softmax.
        drafted: int64 `[k]`, on the device of `scores`.
        candidates: the same chain with the logits that it was drawn by; None where `k` is 0.

    Returns:
        As `verify_greedy`.
    """
    k = drafted.shape[0]
    accepted = 0
    if k:
        drafter_probabilities = [logits.softmax(-1) for logits in candidates.logits]
        # A token holds one occupied slot; unoccupied ones have probability 0.
        of_drafter = torch.stack(
            [
                torch.where(shortlist.scored_slots == token_id, one, 0.0).amax()
                for one, shortlist, token_id in zip(
                    drafter_probabilities, candidates.shortlists, candidates.token_ids, strict=True
                )
            ]
        ).to(scores.device)
        # The target's probabilities of the candidates alone, which writes no full-vocabulary softmax for each of them.
        of_target = (scores[:-1].gather(1, drafted.unsqueeze(1)).squeeze(1) - scores[:-1].logsumexp(-1)).exp()
        is_accepted = torch.rand(k, device=scores.device) * of_drafter < of_target
        accepted = int(is_accepted.long().cumprod(0).sum())
    weights = scores[accepted].softmax(-1)
    if accepted < k:
        slots = candidates.shortlists[accepted].scored_slots.to(scores.device)
        lost = drafter_probabilities[accepted].to(scores.device)
        residual = weights.scatter_add(0, slots, -lost).clamp_min(0.0)
        # Where both distributions are equal to rounding, nothing is left over and the target's own takes its place.
        weights = torch.where(residual.sum() > 0, residual, weights)
    return torch.cat([drafted[:accepted], draw(weights)]), accepted
