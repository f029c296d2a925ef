"""Rounds of drafting and verification along a given text, and their figures.

Papers: DynaSpec (Zhang et al., 2025), section 3.2: acceptance probability (equation 3), lemmas 1 and 2; section 3.1:
expected acceptance length (equation 1). Speculative sampling: Leviathan et al., 2023, algorithm 1.
"""

import math
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...protocol import Needs, Prompt, Shortlist, Verdict
from ...shortlists import ShortlistState
from .teacher_forcing import ForcedText, Rows, distribution

# Rounds that start with less than this probability are skipped, and depths that fewer rounds reach are left out.
LEAST_PROBABILITY = 1e-6


class DraftSteps(NamedTuple):
    """Figures of `m` draft steps, each fp32 `[m]`, as in `result.TextCoverage`; `is_draft` is the probability that the
    draft is the text's token, given that token."""

    size: torch.Tensor
    mass: torch.Tensor
    oracle_mass: torch.Tensor
    recall: torch.Tensor
    oov: torch.Tensor
    acceptance: torch.Tensor
    is_draft: torch.Tensor


# The figures that have means, and those of them that have one at each draft depth.
MEANS = DraftSteps._fields[:-1]
DEPTH_MEANS = ("size", "mass", "acceptance")


def draft_steps(
    rows: Rows, shortlist: Shortlist, token_ids: torch.Tensor, recall_k: int, is_greedy: bool
) -> DraftSteps:
    """Compare both models' predictions at `m` positions that share a shortlist, where the text has `token_ids`, int64
    `[m]`. Greedily, the draft is the drafter's argmax, and otherwise a draw from its distribution."""
    ids = shortlist.ids()
    on_shortlist, logits = rows.target.index_select(1, ids), rows.drafter.index_select(1, ids)
    # The place of each id of the vocabulary on the shortlist, or −1.
    columns = ids.new_full(rows.target.shape[1:], -1)
    columns[ids] = torch.arange(ids.shape[0], device=ids.device)
    column = columns[token_ids].unsqueeze(1)
    if is_greedy:
        is_draft = acceptance = (logits.argmax(-1, keepdim=True) == column).squeeze(1).float()
    else:
        of_drafter = distribution(logits)
        acceptance = torch.minimum(on_shortlist, of_drafter).sum(-1)
        of_token = rows.target.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        drafted = (of_drafter.gather(1, column.clamp_min(0)) * (column >= 0)).squeeze(1)
        # A token that was drawn from `p` has probability, but reading a text again rounds differently.
        is_draft = (drafted / of_token.clamp_min(torch.finfo(of_token.dtype).tiny)).clamp_max(1.0)
    return DraftSteps(
        size=torch.full_like(acceptance, ids.shape[0]),
        mass=on_shortlist.sum(-1),
        oracle_mass=rows.oracle[:, ids.shape[0] - 1],
        recall=(columns[rows.top_ids[:, :recall_k]] >= 0).float().mean(-1),
        oov=(column < 0).squeeze(1).float(),
        acceptance=acceptance,
        is_draft=is_draft,
    )


def rejected_draft(row: Rows, shortlist: Shortlist, is_greedy: bool, generator: torch.Generator) -> torch.Tensor:
    """The draft, int64 `[1]`, that was rejected at the position of `row`: the drafter's argmax, or a draw from
    `max(0, q − p)`, the distribution of rejected drafts."""
    ids = shortlist.ids()
    logits = row.drafter[0].index_select(0, ids)
    if is_greedy:
        return ids[logits.argmax(-1, keepdim=True)]
    of_drafter = distribution(logits)
    residual = (of_drafter - row.target[0].index_select(0, ids)).clamp_min(0.0)
    weights = torch.where(residual.sum() > 0, residual, of_drafter)
    return ids[torch.multinomial(weights, 1, generator=generator)]


def expected_tokens(acceptance: torch.Tensor, is_draft: torch.Tensor) -> torch.Tensor:
    """Expected tokens of one round, the target's own included, fp32 `[]`: equation 1 without the assumption that all
    positions are alike. `acceptance` and `is_draft` are those of the draft steps, fp32 `[k]`.

    A round has `1 + Σ_i P(drafts 0 … i accepted)` tokens. Averaged over texts drawn from the target,
    `is_draft_0 · … · is_draft_{i-1} · acceptance_i` is that probability, exactly: the text's tokens are the target's,
    and easier ones follow accepted drafts, for which `is_draft` weighs. If both are `α` at every step, the sum is
    equation 1.
    """
    reached = torch.cat([torch.ones_like(is_draft[:1]), is_draft[:-1].cumprod(0)])
    return 1.0 + (reached * acceptance).sum()


def expected_acceptance_length(acceptance: float, num_assistant_tokens: int) -> float:
    """Expected tokens per round, the target's own included: DynaSpec, equation 1,
    `Ω(α, γ) = (1 − α^(γ+1)) / (1 − α) = 1 + α + … + α^γ`."""
    return math.fsum(acceptance**accepted for accepted in range(num_assistant_tokens + 1))


def learns_from_verdicts(state: ShortlistState) -> bool:
    """Whether a policy's shortlists may depend on earlier verdicts, and so on where rounds started."""
    return type(state).observe is not ShortlistState.observe


class RoundsAlongText:
    """The rounds that one policy would have along a text.

    The text's tokens are draws from the target's `p`. Under speculative sampling, the draft is the text's token `x`
    with probability `min(1, q(x) / p(x))`, given `x`. Accepted drafts decide where rounds start.

    - Without a seed, for a policy that learns nothing from verdicts: its shortlists are the same in every round that
      starts at one token. All starts are visited in order. A start of probability `w` leads to the start `j + 1`
      tokens on with `w · P(exactly j drafts accepted)`. Sums with these weights are exact expectations.
    - With a seed, for all policies: whether each token of the text would have been drafted is drawn, and the rounds
      follow from that. Policies drawn with one seed have the same luck at the same token, so that luck cancels in
      comparisons. The seed must not be that of the text.

    Rounds are as in `generate`, with two exceptions: a policy that learns observes one rejected draft per round, as
    the drafts after it follow a text that is not there; and draft steps after the rejected one select as if the text's
    own tokens had been drafted. The figures of the rounds are added to `figures`. `offset` is the position of the
    text's first token in a stream of texts, whose `state` may have observed others.
    """

    def __init__(
        self,
        state: ShortlistState,
        needs: Needs,
        text: ForcedText,
        figures: "RoundFigures",
        seed: int | None,
        offset: int = 0,
    ):
        self._learns = learns_from_verdicts(state)
        if seed is None and self._learns:
            raise ValueError("the rounds of a policy that learns from verdicts have to be drawn: give a seed")
        self._state, self._needs, self._text, self._token_ids = state, needs, text, text.token_ids
        self._figures, self._offset, self._is_greedy = figures, offset, text.settings.temperature == 0
        self._luck: torch.Tensor | None = None
        if seed is not None:
            self._generator = torch.Generator(self._token_ids.device).manual_seed(seed)
            luck = torch.rand(self._token_ids.shape, device=self._token_ids.device, generator=self._generator)
            self._luck = luck.cpu()
        # The probability that a round starts at each token of the text, or at its end.
        self._is_start = torch.zeros(self._token_ids.shape[0] + 1, dtype=torch.float64)
        self._is_start[text.prompt_length] = 1.0
        state.observe_prompt(Prompt(self._token_ids[: text.prompt_length], offset))

    def follow(self, starts: range) -> None:
        """Add the rounds that start at these tokens, those of the text's last block."""
        for start in starts:
            if self._is_start[start] > LEAST_PROBABILITY:
                self._round(start)

    def _round(self, start: int) -> None:
        weight = self._is_start[start].item()
        # The last token of a text is the target's own, and a head waits for the target to read the prompt.
        count = min(self._text.settings.num_assistant_tokens, self._token_ids.shape[0] - start - 1)
        count = count if start >= self._text.first_draft else 0
        rows = self._text.round(start, count)
        if count:
            # In a session, a policy's thread has the time of a verification, and here it has none.
            self._state.finish_background_work()
            self._state.begin_round()
        shortlists = [self._select(start, depth) for depth in range(count)]
        steps = self._draft_steps(rows, shortlists, self._token_ids[start : start + count])
        is_accepted = steps.is_draft.double().cpu()
        if self._luck is not None:
            is_accepted = (self._luck[start : start + count] < is_accepted).double()
        # Entry `j`: the probability that at least `j` drafts are accepted, and that no more are.
        at_least = torch.cat([is_accepted.new_ones(1), is_accepted.cumprod(0)])
        exactly = at_least * (1.0 - functional.pad(is_accepted, (0, 1)))
        self._is_start[start + 1 : start + count + 2] += weight * exactly
        self._figures.add(steps, weight, at_least[:count])
        if start == self._text.prompt_length and self._needs.of_prompt:
            self._observe_prompt()
        if self._learns:
            self._observe(start, rows, shortlists, int(exactly.argmax()))

    def _select(self, start: int, depth: int) -> Shortlist:
        features, embeddings, before = self._text.steps[:, start - self._text.prompt_length, depth, None]
        if self._needs.draft_inputs:
            self._state.observe_draft_inputs(embeddings, before)
        return self._state.select(depth, self._token_ids[start + depth - 1 : start + depth], features)

    def _draft_steps(self, rows: Rows, shortlists: list[Shortlist], token_ids: torch.Tensor) -> DraftSteps:
        """The draft steps of a round. Consecutive steps with one shortlist are computed together."""
        parts = [DraftSteps(*(rows.target.new_zeros(0) for _ in DraftSteps._fields))]
        for _, group in groupby(range(len(shortlists)), key=lambda depth: id(shortlists[depth])):
            first, *others = group
            end = first + len(others) + 1
            some = rows.part(first, end), shortlists[first], token_ids[first:end]
            parts.append(draft_steps(*some, self._text.settings.recall_k, self._is_greedy))
        return DraftSteps(*map(torch.cat, zip(*parts, strict=True)))

    def _observe_prompt(self) -> None:
        """Show the policy the target's predictions at the prompt, as a session does when the target has read it."""
        needs, length = self._needs, self._text.prompt_length
        first = 0 if needs.prompt_positions is None else max(0, length - needs.prompt_positions)
        shown = self._predicted(first, length, needs.prompt_top_k, needs.prompt_hidden_states)
        self._state.observe_prompt(Prompt(self._token_ids[:0], self._offset + length, **shown))

    def _observe(self, start: int, rows: Rows, shortlists: list[Shortlist], accepted: int) -> None:
        """Show the policy the verdict on a round, as a session does."""
        needs, end = self._needs, start + accepted + 1
        verified = self._token_ids[start:end]
        drafted, missed = verified[:accepted], torch.zeros_like(verified, dtype=torch.bool)
        if accepted < len(shortlists):
            row, shortlist = rows.part(accepted, accepted + 1), shortlists[accepted]
            drafted = torch.cat([drafted, rejected_draft(row, shortlist, self._is_greedy, self._generator)])
            missed[-1] = ~shortlist.contains(verified[-1])
        shown = self._predicted(start - 1, end - 1, needs.verify_top_k, needs.hidden_states)
        if needs.out_of_vocabulary:
            shown["out_of_vocabulary"] = missed
        self._state.observe(Verdict(drafted, verified, self._offset + start, **shown))

    def _predicted(self, start: int, end: int, top_k: int, with_states: bool) -> dict[str, Any]:
        """What the policy needs of the target's predictions after the tokens `start … end - 1`."""
        shown = {}
        if top_k:
            shown["top_ids"] = self._text.top_ids[start:end, :top_k]
        if top_k and self._needs.top_logits:
            shown["top_logits"] = self._text.top_logits[start:end, :top_k]
        if with_states:
            shown["hidden_states"] = self._text.states[start:end]
        return shown


class RoundFigures:
    """Counts of rounds, and means over their at most `num_assistant_tokens` draft steps, each weighted by its
    probability. Of several draws, counts are means over the draws, and means are over the rounds of all draws, as the
    mean of the draws' own means would not converge to the expectation."""

    def __init__(self, num_assistant_tokens: int, draws: int = 1):
        self._draws = draws
        # fp64 `[2, figures, k]`: by depth, the weights of each figure's values, and their weighted sums.
        self._sums = torch.zeros(2, len(MEANS), num_assistant_tokens, dtype=torch.float64)
        self._rounds = self._tokens = 0.0

    def add(self, steps: DraftSteps, start: float, reached: torch.Tensor) -> None:
        """Add a round that takes place with probability `start`, and whose draft steps are verified with the
        probabilities `reached`, fp64 `[m]`."""
        start /= self._draws
        self._rounds += start
        self._tokens += start * expected_tokens(steps.acceptance, steps.is_draft).item()
        weights = start * reached.repeat(len(MEANS), 1)
        # Every draft step scores a shortlist, whether its draft is verified or not.
        weights[MEANS.index("size")] = start
        values = torch.stack(steps[:-1]).double().cpu()
        self._sums[:, :, : reached.shape[0]] += torch.stack([weights, weights * values])

    def overall(self) -> dict[str, float]:
        """The counts and means of `result.TextCoverage`, by name."""
        figures = _figures(self._sums.sum(-1))
        return {**figures, "rounds": self._rounds, "acceptance_length": self._tokens / self._rounds}

    def by_depth(self) -> list[dict[str, float]]:
        """The counts and means of `result.DepthCoverage`, by name."""
        depths = [_figures(sums) for sums in self._sums.unbind(-1)]
        return [
            {"depth": depth, **{name: figures[name] for name in ("draft_steps", "positions", *DEPTH_MEANS)}}
            for depth, figures in enumerate(depths)
            if figures["positions"] > LEAST_PROBABILITY
        ]


def _figures(sums: torch.Tensor) -> dict[str, float]:
    weights = dict(zip(MEANS, sums[0].tolist(), strict=True))
    means = dict(zip(MEANS, (sums[1] / sums[0]).tolist(), strict=True))
    return {"draft_steps": weights["size"], "positions": weights["mass"], **means}
