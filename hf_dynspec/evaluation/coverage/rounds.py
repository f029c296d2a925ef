"""Rounds of drafting and verification along a given text, and what they come to."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch.nn import functional

from ...protocol import Needs, Prompt, Shortlist, Verdict
from ...shortlists import ShortlistState
from .draft_steps import DraftSteps, draft_steps, expected_tokens, rejected_draft
from .teacher_forcing import ForcedText, Rows

# Starts of rounds that are less probable than this are passed over, as nearly all are in greedy decoding, and so are
# depths that fewer rounds are expected to reach.
LEAST_PROBABILITY = 1e-6


def learns_from_verdicts(state: ShortlistState) -> bool:
    """Whether what a policy says may depend on the verdicts before, and so on where rounds started."""
    return type(state).observe is not ShortlistState.observe


class RoundsAlongText:
    """The rounds that one policy would have along a text.

    The text's tokens are draws from the target's `p`. Under speculative sampling a draft from `q` is the token `x`
    that comes out with probability `min(1, q(x) / p(x))`, given `x`. Where rounds start follows from which drafts are
    accepted, and each figure is a mean over rounds, weighted by how probable it is that they start where they do:

    - A policy that learns nothing from verdicts says the same in every round that starts at one token. All starts are
      visited in order, each with the probability that a round starts there: 1 for the first; one of probability `w`
      leads with `w · P(exactly j drafts accepted)` to the start `j + 1` tokens on. The weighted sums are the
      expectations of those over all that chance could do, exactly.
    - What another policy says depends on the verdicts before. Whether each token of the text would have been drafted
      is then drawn, and the rounds are those that follow, each with the weight 1: one course of rounds. The course of
      a policy that learns nothing can be drawn too, to be compared with it: whoever is drawn with one seed has the
      same luck at the same token, and what luck does to both is not in their difference.

    Both are rounds as a run that ends in this text has them, with two exceptions: a policy that learns is shown one
    rejected draft per round, not those after it, which follow a text that is not there; and the shortlists of draft
    steps after the rejected one are asked for as if the text's own tokens had been drafted.

    Args:
        state: of the policy. It is shown the text, and may have seen others before.
        needs: what the policy asks to be shown.
        text: what both models say along the text.
        num_assistant_tokens: tokens drafted per round.
        recall_k: `k` of Recall@k.
        is_greedy: a draft is the drafter's argmax, and not a draw from its distribution.
        seed: of the draws, and not one that the text was drawn with. None computes expectations.
        offset: the position of the text's first token, which in a stream is not the first that the policy is shown.

    Attributes:
        figures: of the rounds so far.

    Raises:
        ValueError: there is no seed, and the policy learns from verdicts.
    """

    def __init__(
        self,
        state: ShortlistState,
        needs: Needs,
        text: ForcedText,
        num_assistant_tokens: int,
        recall_k: int,
        is_greedy: bool,
        seed: int | None,
        offset: int = 0,
    ):
        if seed is None and learns_from_verdicts(state):
            raise ValueError("the rounds of a policy that learns from verdicts have to be drawn: give a seed")
        self._state = state
        self._needs = needs
        self._num_assistant_tokens = num_assistant_tokens
        self._recall_k = recall_k
        self._is_greedy = is_greedy
        self._text = text
        self._offset = offset
        self._token_ids = text.token_ids
        self._luck: torch.Tensor | None = None
        if seed is not None:
            self._generator = torch.Generator(self._token_ids.device).manual_seed(seed)
            luck = torch.rand(self._token_ids.shape, device=self._token_ids.device, generator=self._generator)
            self._luck = luck.cpu()
        self._start = text.prompt_length
        # The probability that a round starts at each token of the text, or at its end.
        self._is_start = torch.zeros(self._token_ids.shape[0] + 1, dtype=torch.float64)
        self._is_start[self._start] = 1.0
        self.figures = RoundFigures(num_assistant_tokens)
        self._state.observe_prompt(Prompt(self._token_ids[: text.prompt_length], self._offset))

    def follow(self, rows: Rows) -> None:
        """Go on, start by start, as far as these rows reach; the next must repeat the last `num_assistant_tokens`."""
        while self._start < self._token_ids.shape[0] and self._start + self._count() < rows.end:
            if self._is_start[self._start] > LEAST_PROBABILITY:
                self._round(rows)
            self._start += 1

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
            # Nothing takes time here while a thread works that has the time of a verification and a draft step.
            self._state.finish_background_work()
            self._state.begin_round()
        shortlists = [self._select(rows, depth) for depth in range(count)]
        steps = self._draft_steps(rows, shortlists)
        is_accepted = steps.is_draft.double().cpu()
        if self._luck is not None:
            is_accepted = (self._luck[start : start + count] < is_accepted).double()
        # Entry `j`: the probability that at least `j` drafts are accepted, and that no more are.
        at_least = torch.cat([is_accepted.new_ones(1), is_accepted.cumprod(0)])
        exactly = at_least * (1.0 - functional.pad(is_accepted, (0, 1)))
        self._is_start[start + 1 : start + count + 2] += weight * exactly
        self.figures.add(steps, weight, at_least[:count])
        self._observe_prompt()
        if learns_from_verdicts(self._state):
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
        """Show the policy what the target says of the prompt, as a session does when the target has read it."""
        if self._start != self._text.prompt_length or not self._needs.of_prompt:
            return
        needs, text = self._needs, self._text
        last = slice(None if needs.prompt_positions is None else -needs.prompt_positions, None)
        shown = {}
        if needs.prompt_top_k:
            shown["top_ids"] = text.prompt_top_ids[last, : needs.prompt_top_k]
            if needs.top_logits:
                shown["top_logits"] = text.prompt_top_logits[last, : needs.prompt_top_k]
        if needs.prompt_hidden_states:
            shown["hidden_states"] = text.prompt_states[last]
        self._state.observe_prompt(Prompt(self._token_ids[:0], self._offset + self._start, **shown))

    def _observe(self, rows: Rows, shortlists: list[Shortlist], accepted: int) -> None:
        """Show the policy the verdict on a round, as a session does."""
        needs, count = self._needs, accepted + 1
        verified = self._token_ids[rows.first : rows.first + count]
        drafted = verified[:accepted]
        if accepted < len(shortlists):
            rejected = rejected_draft(rows, accepted, shortlists[accepted], self._is_greedy, self._generator)
            drafted = torch.cat([drafted, rejected])
        shown = {}
        if needs.out_of_vocabulary:
            shown["out_of_vocabulary"] = torch.zeros_like(verified, dtype=torch.bool)
            if accepted < len(shortlists):
                shown["out_of_vocabulary"][-1] = ~shortlists[accepted].contains(verified[-1])
        if needs.verify_top_k:
            shown["top_ids"] = rows.top_ids[:count, : needs.verify_top_k]
            if needs.top_logits:
                shown["top_logits"] = rows.top_logits[:count, : needs.verify_top_k]
        if needs.hidden_states:
            shown["hidden_states"] = rows.states[:count]
        self._state.observe(Verdict(drafted, verified, self._offset + rows.first, **shown))


class RoundFigures:
    """Counts of rounds, and means over their draft steps, each weighted by how probable it is.

    Args:
        num_assistant_tokens: `k`, most draft steps of a round.
    """

    _NAMES = DraftSteps._fields[: DraftSteps._fields.index("is_draft")]

    def __init__(self, num_assistant_tokens: int):
        # fp64 `[figures, k]`: by depth, the weights of each figure's values, and their weighted sums.
        self._weights, self._sums = torch.zeros(2, len(self._NAMES), num_assistant_tokens, dtype=torch.float64)
        self._rounds = self._tokens = 0.0

    @classmethod
    def mean(cls, courses: Sequence["RoundFigures"]) -> "RoundFigures":
        """The figures of several courses of rounds along one text: their rounds together, counted as one course's.

        Thus a mean weighs each course by its rounds, as an expectation does, which it comes ever closer to with more
        courses. The mean of the courses' own means would not: that of a ratio is another thing than the ratio of
        means.
        """
        mean = cls(courses[0]._sums.shape[1])
        for one in courses:
            mean._weights += one._weights / len(courses)
            mean._sums += one._sums / len(courses)
            mean._rounds += one._rounds / len(courses)
            mean._tokens += one._tokens / len(courses)
        return mean

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

    def overall(self) -> dict[str, float]:
        """The counts and means of `result.TextCoverage`, by name."""
        return {
            **self._figures(self._weights.sum(1), self._sums.sum(1)),
            "rounds": self._rounds,
            "acceptance_length": self._tokens / self._rounds,
        }

    def by_depth(self) -> list[dict[str, float]]:
        """The counts and means of `result.DepthCoverage`, by name."""
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
