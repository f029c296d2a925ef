"""Draft steps at given positions of a text: what their shortlists hold, and how often their drafts are accepted.

Papers: DynaSpec (Zhang et al., 2025), section 3.2: acceptance probability (equation 3), lemmas 1 and 2; section 3.1:
expected acceptance length (equation 1); speculative sampling: Leviathan et al., 2023, algorithm 1.
"""

import math
from typing import NamedTuple

import torch

from ...protocol import Shortlist
from .teacher_forcing import Rows, distribution


class DraftSteps(NamedTuple):
    """Figures of `m` draft steps, each fp32 `[m]`: those of `result.TextCoverage`, and `is_draft`, the probability
    that the draft is the text's token, given that token."""

    size: torch.Tensor
    mass: torch.Tensor
    oracle_mass: torch.Tensor
    recall: torch.Tensor
    oov: torch.Tensor
    acceptance: torch.Tensor
    is_draft: torch.Tensor


def draft_steps(
    rows: Rows, shortlist: Shortlist, token_ids: torch.Tensor, recall_k: int, is_greedy: bool
) -> DraftSteps:
    """Compare what both models say at `m` positions, if the drafter may propose what the shortlist holds.

    Args:
        rows: what they say.
        shortlist: the shortlist of all of these positions.
        token_ids: int64 `[m]`: the text's tokens there.
        recall_k: `k` of Recall@k.
        is_greedy: the draft is the drafter's argmax, not a draw from its distribution.
    """
    ids = shortlist.ids()
    on_shortlist, logits = rows.target.index_select(1, ids), rows.drafter.index_select(1, ids)
    # Where each id of the vocabulary stands on the shortlist, −1 where it does not. A look-up, as comparing every id
    # with every slot would take longer than all the rest.
    columns = ids.new_full(rows.target.shape[1:], -1)
    columns[ids] = torch.arange(ids.shape[0], device=ids.device)
    column = columns[token_ids].unsqueeze(1)
    if is_greedy:
        is_draft = acceptance = (logits.argmax(-1, keepdim=True) == column).squeeze(1).float()
    else:
        of_drafter = distribution(logits)
        acceptance = torch.minimum(on_shortlist, of_drafter).sum(-1)
        of_token = rows.target.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        # A token that was drawn from `p` has probability, but reading a text again rounds differently.
        tiny = torch.finfo(of_token.dtype).tiny
        drafted = (of_drafter.gather(1, column.clamp_min(0)) * (column >= 0)).squeeze(1)
        is_draft = (drafted / of_token.clamp_min(tiny)).clamp_max(1.0)
    return DraftSteps(
        size=torch.full_like(acceptance, ids.shape[0]),
        mass=on_shortlist.sum(-1),
        oracle_mass=rows.oracle[:, ids.shape[0] - 1],
        recall=(columns[rows.top_ids[:, :recall_k]] >= 0).float().mean(-1),
        oov=(column < 0).squeeze(1).float(),
        acceptance=acceptance,
        is_draft=is_draft,
    )


def rejected_draft(
    rows: Rows, index: int, shortlist: Shortlist, is_greedy: bool, generator: torch.Generator
) -> torch.Tensor:
    """The draft, int64 `[1]`, that was rejected at one position: the drafter's argmax, or a draw from
    `max(0, q − p)`, as which a rejected draft is distributed (Leviathan et al., 2023, algorithm 1).

    Args:
        rows: what both models say.
        index: which of the rows.
        shortlist: the shortlist of that position.
        is_greedy: as for `draft_steps`.
        generator: of the draw, on the device of the rows.
    """
    ids = shortlist.ids()
    logits = rows.drafter[index].index_select(0, ids)
    if is_greedy:
        return ids[logits.argmax(-1, keepdim=True)]
    of_drafter = distribution(logits)
    residual = (of_drafter - rows.target[index].index_select(0, ids)).clamp_min(0.0)
    weights = torch.where(residual.sum() > 0, residual, of_drafter)
    return ids[torch.multinomial(weights, 1, generator=generator)]


def expected_tokens(acceptance: torch.Tensor, is_draft: torch.Tensor) -> torch.Tensor:
    """Expected tokens of one round, the target's own included: equation 1 without its assumption that all positions
    are alike.

    Draft step `i` is reached if all drafts before it are accepted, so a round has `1 + Σ_i P(drafts 0 … i accepted)`
    tokens. The text's tokens are the target's, and easier ones follow accepted drafts; `is_draft` weighs for that:
    averaged over texts drawn from the target, `is_draft_0 · … · is_draft_{i-1} · acceptance_i` is the probability
    that drafts `0 … i` are accepted, exactly. Where both are `α` at every step, the sum is equation 1.

    Args:
        acceptance: fp32 `[k]`: acceptance probability at each draft step.
        is_draft: fp32 `[k]`: the probability that the draft is the text's token, given that token.

    Returns:
        fp32 `[]`, between 1 and `k + 1`.
    """
    reached = torch.cat([torch.ones_like(is_draft[:1]), is_draft[:-1].cumprod(0)])
    return 1.0 + (reached * acceptance).sum()


def expected_acceptance_length(acceptance: float, num_assistant_tokens: int) -> float:
    """Expected tokens per round, the target's own included: DynaSpec, equation 1,
    `Ω(α, γ) = (1 − α^(γ+1)) / (1 − α) = 1 + α + … + α^γ`.

    Args:
        acceptance: `α`, between 0 and 1.
        num_assistant_tokens: `γ`.
    """
    return math.fsum(acceptance**accepted for accepted in range(num_assistant_tokens + 1))
