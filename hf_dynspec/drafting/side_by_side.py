"""Drafting and not drafting, compared where both meet the same machine."""

from collections.abc import Callable
from statistics import median, median_low

from .draft_shapes import ALONE, DraftShape
from .round_times import SPREADS, beyond_chance

# Rounds of either kind, and turns after which it is over with fewer: rounds that read more than others, as the first
# ones of a call do, do not count.
_ROUNDS_OF_EACH, _MOST_TURNS = 4, 24


class SideBySide:
    """Rounds that draft and rounds that do not, in turns.

    Whatever else the machine does, it does to both. Times that were taken one after the other tell it apart from what
    shapes differ in as long as a shape goes on, and not where it changed together with the shape.

    Args:
        drafted: what the rounds that draft draft.

    Attributes:
        turns: rounds that were begun.
    """

    def __init__(self, drafted: DraftShape):
        self._shape = drafted
        # What the rounds drafted, which may have ended early, and how long they took.
        self._drafted: list[tuple[DraftShape, float]] = []
        self._alone: list[tuple[DraftShape, float]] = []
        self.turns = 0

    def choose(self) -> DraftShape:
        """What the next round drafts: what was seen less often."""
        self.turns += 1
        return self._shape if len(self._drafted) <= len(self._alone) else ALONE

    def add(self, drafted: DraftShape, seconds: float) -> None:
        """A round that drafted so much, or nothing, took so long."""
        (self._alone if drafted == ALONE else self._drafted).append((drafted, seconds))

    def forget_drafts(self) -> None:
        """What rounds that draft took tells nothing."""
        self._drafted.clear()

    @property
    def is_over(self) -> bool:
        """Whether there were enough rounds of both, or too many turns."""
        return self.turns >= _MOST_TURNS or min(len(self._drafted), len(self._alone)) >= _ROUNDS_OF_EACH

    def alone_is_longer_by(self, typical: Callable[[DraftShape], float]) -> float:
        """How many times as long as it seemed the target alone takes, as rounds that draft go, but for what may be
        chance; 1 where too few of either were seen. Two stalls of either do not count.

        Args:
            typical: tells how long rounds took that drafted so much, these included.
        """
        if min(len(self._drafted), len(self._alone)) < _ROUNDS_OF_EACH:
            return 1.0
        alone, drafted = (
            [seconds / typical(shape) for shape, seconds in rounds] for rounds in (self._alone, self._drafted)
        )
        middles = median_low(alone), median_low(drafted)
        chance = SPREADS * median(
            abs(one / middle - 1.0) for rounds, middle in zip((alone, drafted), middles, strict=True) for one in rounds
        )
        return beyond_chance(middles[0] / middles[1], chance)
