"""Rounds of drafting and verification along a given text, and the figures of their draft steps.

Papers: DynaSpec (Zhang et al., 2025), section 3.2: acceptance probability (equation 3), lemmas 1 and 2; section 3.1:
expected acceptance length (equation 1); speculative sampling: Leviathan et al., 2023, algorithm 1.
"""

import math
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

import torch

from ..protocol import Prompt, Shortlist, Verdict, VocabularyInfo
from ..shortlists import ShortlistPolicy
from .teacher_forcing import ForcedText, Rows, distribution


class RoundsAlongText:
    """The rounds that one policy would have along a text.

    The text's tokens are draws from the target's `p`. Under speculative sampling a draft from `q` is the token `x`
    that comes out with probability `min(1, q(x) / p(x))`, given `x`. So drawing, for each token of the text, whether
    the draft was that token gives rounds as a run that ends in this text has them, with two exceptions: the policy is
    shown one rejected draft per round, not those after it, which follow a text that is not there; and the shortlists
    of draft steps after the rejected one are asked for as if the text's own tokens had been drafted.

    Args:
        policy: the policy.
        vocabulary: what it selects from.
        text: what both models say along the text.
        num_assistant_tokens: tokens drafted per round.
        recall_k: `k` of Recall@k.
        is_greedy: a draft is the drafter's argmax, and not a draw from its distribution.
        seed: of the draws, and not one that the text was drawn with. Policies with one seed have the same luck at the
            same token.
    """

    def __init__(
        self,
        policy: ShortlistPolicy,
        vocabulary: VocabularyInfo,
        text: ForcedText,
        num_assistant_tokens: int,
        recall_k: int,
        is_greedy: bool,
        seed: int,
    ):
        self._needs = policy.needs
        self._num_assistant_tokens = num_assistant_tokens
        self._recall_k = recall_k
        self._is_greedy = is_greedy
        self._text = text
        self._token_ids = text.token_ids
        self._generator = torch.Generator(vocabulary.device).manual_seed(seed)
        self._luck = torch.rand(self._token_ids.shape, device=vocabulary.device, generator=self._generator)
        self._prefix_length = text.prompt_length
        self._steps: list[DraftSteps] = []
        self._tokens: list[float] = []
        self._state = policy.start(vocabulary)
        self._state.observe_prompt(Prompt(self._token_ids[: text.prompt_length]))

    def follow(self, rows: Rows) -> None:
        """Go on, round by round, as far as these rows reach; the next must repeat the last `num_assistant_tokens`."""
        while self._prefix_length < self._token_ids.shape[0] and self._prefix_length + self._count() < rows.end:
            self._round(rows)

    def figures(self) -> dict[str, float]:
        """The counts and means of `coverage.PromptCoverage`, by name."""
        steps = _joined(self._steps)
        means = {name: values.double().mean().item() for name, values in steps._asdict().items() if name != "is_draft"}
        positions, rounds = steps.mass.shape[0], len(self._tokens)
        return {"positions": positions, "rounds": rounds, **means, "acceptance_length": fmean(self._tokens)}

    def figures_by_depth(self) -> list[dict[str, float]]:
        """The figures of `coverage.DepthCoverage`, by name, for every depth that was verified."""
        figures = []
        for depth in range(max(steps.mass.shape[0] for steps in self._steps)):
            steps = _joined([DraftSteps(*(one[depth : depth + 1] for one in steps)) for steps in self._steps])
            means = {name: getattr(steps, name).double().mean().item() for name in ("size", "mass", "acceptance")}
            figures.append({"depth": depth, "positions": steps.mass.shape[0], **means})
        return figures

    def _count(self) -> int:
        """Tokens to draft in the next round. The last token of a text is the target's own, as in `generate`, and so is
        the first where the drafter waits for the target to read the prompt."""
        if self._prefix_length < self._text.first_draft:
            return 0
        return min(self._num_assistant_tokens, self._token_ids.shape[0] - self._prefix_length - 1)

    def _round(self, rows: Rows) -> None:
        start, count = self._prefix_length, self._count()
        rows = rows.of_round(start, count)
        shortlists = [self._select(rows, depth) for depth in range(count)]
        accepted = 0
        if count:
            steps = self._draft_steps(rows, shortlists)
            self._tokens.append(expected_tokens(steps.acceptance, steps.is_draft).item())
            hits = self._luck[start : start + count] < steps.is_draft
            accepted = int(hits.long().cumprod(0).sum())
            self._steps.append(DraftSteps(*(one[: accepted + 1] for one in steps)))
        else:
            self._tokens.append(1.0)
        self._observe(rows, shortlists, accepted)
        self._prefix_length += accepted + 1

    def _select(self, rows: Rows, depth: int) -> Shortlist:
        """The shortlist of one draft step."""
        if self._needs.draft_inputs:
            self._state.foresee(rows.embeddings[depth, None], rows.before[depth, None])
        newest = rows.first + depth
        return self._state.select(depth, self._token_ids[newest - 1 : newest], rows.features[depth, None])

    def _draft_steps(self, rows: Rows, shortlists: list[Shortlist]) -> "DraftSteps":
        """The draft steps of a round. Steps in a row that share a shortlist are computed together."""
        parts = []
        for _, group in groupby(range(len(shortlists)), key=lambda depth: id(shortlists[depth])):
            depths = list(group)
            part = rows.between(rows.first + depths[0], rows.first + depths[-1] + 1)
            shortlist, token_ids = shortlists[depths[0]], self._token_ids[part.first : part.end]
            parts.append(draft_steps(part, shortlist, token_ids, self._recall_k, self._is_greedy))
        return _joined(parts)

    def _observe(self, rows: Rows, shortlists: list[Shortlist], accepted: int) -> None:
        """Show the policy what a session would: the prompt's likely tokens with the first verdict, then verdicts."""
        if self._prefix_length == self._text.prompt_length and self._needs.prompt_top_k:
            top_ids = self._text.prompt_top_ids[:, : self._needs.prompt_top_k]
            if self._needs.prompt_positions is not None:
                top_ids = top_ids[-self._needs.prompt_positions :]
            self._state.observe_prompt(Prompt(self._token_ids[:0], top_ids))
        if not shortlists:
            return
        verified = self._token_ids[rows.first : rows.first + accepted + 1]
        drafted = verified[:accepted]
        if accepted < len(shortlists):
            rejected = rejected_draft(rows, accepted, shortlists[accepted], self._is_greedy, self._generator)
            drafted = torch.cat([drafted, rejected])
        top_ids = rows.top_ids[: accepted + 1, : self._needs.verify_top_k] if self._needs.verify_top_k else None
        self._state.observe(Verdict(drafted, verified, top_ids))


# One draft step ----------------------------------------------------------------------------------------------------


class DraftSteps(NamedTuple):
    """Figures of `m` draft steps, each fp32 `[m]`: those of `coverage.PromptCoverage`, and `is_draft`, the probability
    that the draft is the text's token, given that token."""

    size: torch.Tensor
    mass: torch.Tensor
    oracle_mass: torch.Tensor
    recall: torch.Tensor
    oov: torch.Tensor
    acceptance: torch.Tensor
    is_draft: torch.Tensor


def _joined(parts: list[DraftSteps]) -> DraftSteps:
    """The steps of all parts, one after another."""
    return DraftSteps(*map(torch.cat, zip(*parts, strict=True)))


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
    on_shortlist = rows.target.index_select(1, ids)
    logits = rows.drafter.index_select(1, ids)
    is_token = ids == token_ids.unsqueeze(1)
    if is_greedy:
        is_draft = acceptance = is_token.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1).float()
    else:
        of_drafter = distribution(logits)
        acceptance = torch.minimum(on_shortlist, of_drafter).sum(-1)
        of_token = rows.target.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        # A token that was drawn from `p` has probability, but reading a text again rounds differently.
        tiny = torch.finfo(of_token.dtype).tiny
        is_draft = ((of_drafter * is_token).sum(-1) / of_token.clamp_min(tiny)).clamp_max(1.0)
    return DraftSteps(
        size=torch.full_like(acceptance, ids.shape[0]),
        mass=on_shortlist.sum(-1),
        oracle_mass=rows.oracle[:, ids.shape[0] - 1],
        recall=shortlist.contains(rows.top_ids[:, :recall_k]).float().mean(-1),
        oov=1.0 - is_token.any(-1).float(),
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
