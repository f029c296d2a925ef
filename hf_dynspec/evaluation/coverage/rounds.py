"""Rounds of drafting and verification along a given text, and the figures of their draft steps.

Papers: DynaSpec (Zhang et al., 2025), section 3.2: acceptance probability (equation 3), lemmas 1 and 2; section 3.1:
expected acceptance length (equation 1); speculative sampling: Leviathan et al., 2023, algorithm 1.
"""

import math
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn import functional

from ...protocol import Prompt, Shortlist, Verdict, VocabularyInfo
from ...shortlists import ShortlistPolicy, ShortlistState
from .teacher_forcing import ForcedText, Rows, distribution

# Starts of rounds that are less probable than this are passed over, as nearly all are in greedy decoding, and so are
# depths that fewer rounds are expected to reach.
LEAST_PROBABILITY = 1e-6


class RoundsAlongText:
    """The rounds that one policy would have along a text.

    The text's tokens are draws from the target's `p`. Under speculative sampling a draft from `q` is the token `x`
    that comes out with probability `min(1, q(x) / p(x))`, given `x`. Where rounds start follows from which drafts are
    accepted, and each figure is a mean over rounds, weighted by how probable it is that they start where they do:

    - A policy that learns nothing from verdicts (its state does not override `ShortlistState.observe`) says the same
      in every round that starts at one token. All starts are visited in order, each with the probability that a round
      starts there: 1 for the first; one of probability `w` leads with `w · P(exactly j drafts accepted)` to the start
      `j + 1` tokens on. The weighted sums are the expectations of those over all that chance could do, exactly.
    - What another policy says depends on the verdicts before. Whether each token of the text would have been drafted
      is then drawn, and the rounds are those that follow, each with the weight 1.

    Both are rounds as a run that ends in this text has them, with two exceptions: a policy that learns is shown one
    rejected draft per round, not those after it, which follow a text that is not there; and the shortlists of draft
    steps after the rejected one are asked for as if the text's own tokens had been drafted.

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
        self._luck = torch.rand(self._token_ids.shape, device=vocabulary.device, generator=self._generator).cpu()
        self._start = text.prompt_length
        # The probability that a round starts at each token of the text, or at its end.
        self._is_start = torch.zeros(self._token_ids.shape[0] + 1, dtype=torch.float64)
        self._is_start[self._start] = 1.0
        self._means = _WeightedMeans(num_assistant_tokens)
        self._state = policy.start(vocabulary)
        self._learns = type(self._state).observe is not ShortlistState.observe
        self._state.observe_prompt(Prompt(self._token_ids[: text.prompt_length], 0))

    def follow(self, rows: Rows) -> None:
        """Go on, start by start, as far as these rows reach; the next must repeat the last `num_assistant_tokens`."""
        while self._start < self._token_ids.shape[0] and self._start + self._count() < rows.end:
            if self._is_start[self._start] > LEAST_PROBABILITY:
                self._round(rows)
            self._start += 1

    def figures(self) -> dict[str, float]:
        """The counts and means of `coverage.TextCoverage`, by name."""
        return self._means.figures()

    def figures_by_depth(self) -> list[dict[str, float]]:
        """The figures of `coverage.DepthCoverage`, by name, for every depth that was verified."""
        return self._means.figures_by_depth()

    def _count(self) -> int:
        """Tokens to draft in the next round. The last token of a text is the target's own, as in `generate`, and so is
        the first where the drafter waits for the target to read the prompt."""
        if self._start < self._text.first_draft:
            return 0
        return min(self._num_assistant_tokens, self._token_ids.shape[0] - self._start - 1)

    def _round(self, rows: Rows) -> None:
        start, count, weight = self._start, self._count(), self._is_start[self._start].item()
        rows = rows.of_round(start, count)
        if count:
            self._state.begin_round()
        shortlists = [self._select(rows, depth) for depth in range(count)]
        steps = self._draft_steps(rows, shortlists)
        is_accepted = steps.is_draft.double().cpu()
        if self._learns:
            is_accepted = (self._luck[start : start + count] < is_accepted).double()
        # Entry `j`: the probability that at least `j` drafts are accepted, and that no more are.
        at_least = torch.cat([is_accepted.new_ones(1), is_accepted.cumprod(0)])
        exactly = at_least * (1.0 - functional.pad(is_accepted, (0, 1)))
        self._is_start[start + 1 : start + count + 2] += weight * exactly
        self._means.add(steps, weight, at_least[:count])
        self._observe_prompt()
        if self._learns:
            self._observe(rows, shortlists, int(exactly.argmax()))

    def _select(self, rows: Rows, depth: int) -> Shortlist:
        """The shortlist of one draft step."""
        if self._needs.draft_inputs:
            self._state.observe_draft_inputs(rows.embeddings[depth, None], rows.before[depth, None])
        newest = rows.first + depth
        return self._state.select(depth, self._token_ids[newest - 1 : newest], rows.features[depth, None])

    def _draft_steps(self, rows: Rows, shortlists: list[Shortlist]) -> "DraftSteps":
        """The draft steps of a round. Steps in a row that share a shortlist are computed together."""
        parts = [DraftSteps(*(rows.target.new_zeros(0) for _ in DraftSteps._fields))]
        for _, group in groupby(range(len(shortlists)), key=lambda depth: id(shortlists[depth])):
            depths = list(group)
            part = rows.between(rows.first + depths[0], rows.first + depths[-1] + 1)
            shortlist, token_ids = shortlists[depths[0]], self._token_ids[part.first : part.end]
            parts.append(draft_steps(part, shortlist, token_ids, self._recall_k, self._is_greedy))
        return DraftSteps(*map(torch.cat, zip(*parts, strict=True)))

    def _observe_prompt(self) -> None:
        """Show the policy the prompt's likely tokens, as a session does when the target has read the prompt."""
        if self._start == self._text.prompt_length and self._needs.prompt_top_k:
            top_ids = self._text.prompt_top_ids[:, : self._needs.prompt_top_k]
            if self._needs.prompt_positions is not None:
                top_ids = top_ids[-self._needs.prompt_positions :]
            self._state.observe_prompt(Prompt(self._token_ids[:0], self._start, top_ids))

    def _observe(self, rows: Rows, shortlists: list[Shortlist], accepted: int) -> None:
        """Show the policy the verdict on a round, as a session does."""
        verified = self._token_ids[rows.first : rows.first + accepted + 1]
        drafted = verified[:accepted]
        if accepted < len(shortlists):
            rejected = rejected_draft(rows, accepted, shortlists[accepted], self._is_greedy, self._generator)
            drafted = torch.cat([drafted, rejected])
        top_ids = rows.top_ids[: accepted + 1, : self._needs.verify_top_k] if self._needs.verify_top_k else None
        missed = torch.zeros_like(verified, dtype=torch.bool) if self._needs.out_of_vocabulary else None
        if missed is not None and accepted < len(shortlists):
            missed[-1] = ~shortlists[accepted].contains(verified[-1])
        self._state.observe(Verdict(drafted, verified, rows.first, missed, top_ids))


# One draft step ----------------------------------------------------------------------------------------------------


class DraftSteps(NamedTuple):
    """Figures of `m` draft steps, each fp32 `[m]`: those of `coverage.TextCoverage`, and `is_draft`, the probability
    that the draft is the text's token, given that token."""

    size: torch.Tensor
    mass: torch.Tensor
    oracle_mass: torch.Tensor
    recall: torch.Tensor
    oov: torch.Tensor
    acceptance: torch.Tensor
    is_draft: torch.Tensor


class _WeightedMeans:
    """Means over the draft steps of rounds, each weighted by how probable it is.

    Args:
        num_assistant_tokens: `k`, most draft steps of a round.
    """

    _NAMES = DraftSteps._fields[: DraftSteps._fields.index("is_draft")]

    def __init__(self, num_assistant_tokens: int):
        # fp64 `[figures, k]`: by depth, the weights of each figure's values, and their weighted sums.
        self._weights, self._sums = torch.zeros(2, len(self._NAMES), num_assistant_tokens, dtype=torch.float64)
        self._rounds = self._tokens = 0.0

    def add(self, steps: DraftSteps, start: float, reached: torch.Tensor) -> None:
        """Take in a round.

        Args:
            steps: its draft steps, at most `k`.
            start: the probability that the round takes place.
            reached: fp64 `[m]`: for each of the steps, the probability that all drafts before it are accepted.
        """
        self._rounds += start
        self._tokens += start * expected_tokens(steps.acceptance, steps.is_draft).item()
        weights = start * reached.repeat(len(self._NAMES), 1)
        # A shortlist costs what its draft step costs, whether the draft is verified or not.
        weights[self._NAMES.index("size")] = start
        values = torch.stack([getattr(steps, name) for name in self._NAMES]).double().cpu()
        self._weights[:, : reached.shape[0]] += weights
        self._sums[:, : reached.shape[0]] += weights * values

    def figures(self) -> dict[str, float]:
        """The counts and means of `coverage.TextCoverage`, by name."""
        return {
            **self._figures(self._weights.sum(1), self._sums.sum(1)),
            "rounds": self._rounds,
            "acceptance_length": self._tokens / self._rounds,
        }

    def figures_by_depth(self) -> list[dict[str, float]]:
        """The counts and means of `coverage.DepthCoverage`, by name."""
        depths = [self._figures(*columns) for columns in zip(self._weights.T, self._sums.T, strict=True)]
        wanted = ("draft_steps", "positions", "size", "mass", "acceptance")
        return [
            {"depth": depth, **{name: figures[name] for name in wanted}}
            for depth, figures in enumerate(depths)
            if figures["positions"] > LEAST_PROBABILITY
        ]

    def _figures(self, weights: torch.Tensor, sums: torch.Tensor) -> dict[str, float]:
        of_figure = dict(zip(self._NAMES, weights.tolist(), strict=True))
        means = dict(zip(self._NAMES, (sums / weights).tolist(), strict=True))
        return {"draft_steps": of_figure["size"], "positions": of_figure["mass"], **means}


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
