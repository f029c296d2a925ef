"""What belongs to one policy along a text: its state, and the courses of rounds that it is led along."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...protocol import VocabularyInfo
from ...shortlists import ShortlistPolicy, ShortlistState
from .rounds import RoundFigures, RoundsAlongText, learns_from_verdicts
from .teacher_forcing import Rows


class States:
    """What policies remember: of one text, or of all texts of a stream until now.

    Args:
        policies: all that are measured.
        vocabularies: what each of them selects from.
        is_stream: keep the states from text to text.

    Attributes:
        learners: the policies that learn from verdicts.
    """

    def __init__(self, policies: Sequence[ShortlistPolicy], vocabularies: Sequence[VocabularyInfo], is_stream: bool):
        self._vocabularies = {id(policy): one for policy, one in zip(policies, vocabularies, strict=True)}
        self._is_stream = is_stream
        # By label, policy and draw: a state, and how many tokens it was shown.
        self._kept: dict[tuple[str, int, int | None], tuple[ShortlistState, int]] = {}
        self._started: list[ShortlistState] = []
        self.learners = [policy for policy in policies if learns_from_verdicts(self._start(policy))]
        self.close()

    def of(self, label: str, policy: ShortlistPolicy, draw: int | None, length: int) -> tuple[ShortlistState, int]:
        """The state that is led along the next text, and how many tokens it was shown before.

        Args:
            label: what the policy is shown as.
            policy: that of the text's domain.
            draw: which of the draws of its rounds; None where expectations are computed.
            length: tokens of the text.
        """
        if not self._is_stream:
            return self._start(policy), 0
        key = (label, id(policy), draw)
        state, shown = self._kept.get(key) or (self._start(policy), 0)
        if shown:
            # As a turn of a conversation that has nothing in common with the one before.
            state.resume(torch.empty(0, dtype=torch.int64, device=self._vocabularies[id(policy)].device))
        self._kept[key] = state, shown + length
        return state, shown

    def end_text(self) -> None:
        """Give up the states that are not kept for the next text."""
        if not self._is_stream:
            self.close()

    def close(self) -> None:
        """Give up all states: a stream ends."""
        self._kept.clear()
        while self._started:
            self._started.pop().close()

    def _start(self, policy: ShortlistPolicy) -> ShortlistState:
        self._started.append(policy.start(self._vocabularies[id(policy)]))
        return self._started[-1]


@dataclass(frozen=True, eq=False)
class Courses:
    """The rounds of one policy along a text: as expected, and as drawn.

    Args:
        expected: computes expectations; None for a policy that learns from verdicts, which has none.
        drawn: one for each draw.
    """

    expected: RoundsAlongText | None
    drawn: list[RoundsAlongText]

    def follow(self, rows: Rows) -> None:
        """See `RoundsAlongText.follow`."""
        for rounds in [self.expected, *self.drawn]:
            if rounds is not None:
                rounds.follow(rows)

    def figures(self) -> RoundFigures:
        """Expectations where there are any, else what was drawn."""
        return self.drawn_figures() if self.expected is None else self.expected.figures

    def drawn_figures(self) -> RoundFigures:
        """What was drawn, over all draws."""
        return RoundFigures.mean([rounds.figures for rounds in self.drawn])
