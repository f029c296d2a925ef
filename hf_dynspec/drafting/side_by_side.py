"""Drafting and not drafting, compared where both meet the same machine."""

from statistics import median

from .draft_shapes import ALONE, DraftShape

# Rounds of either kind, and turns after which it is over with fewer: rounds that read more than others, as the first
# ones of a call do, do not count.
ROUNDS_OF_EACH, _MOST_TURNS = 4, 24


class SideBySide:
    """Rounds that draft and rounds that do not, in turns.

    Whatever else the machine does, it does to both. Times that were taken one after the other tell it apart from what
    shapes differ in as long as a shape goes on, and not where it changed together with the shape.

    Args:
        drafted: what the rounds that draft draft.
    """

    def __init__(self, drafted: DraftShape):
        self._shape = drafted
        # How many times as long as expected rounds took.
        self._drafted: list[float] = []
        self._alone: list[float] = []
        self._turns = 0

    def choose(self) -> DraftShape:
        """What the next round drafts: what was seen less often."""
        self._turns += 1
        return self._shape if len(self._drafted) <= len(self._alone) else ALONE

    def add(self, drafts: bool, ratio: float) -> None:
        """A round that drafts, or one that does not, took so many times as long as expected."""
        (self._drafted if drafts else self._alone).append(ratio)

    @property
    def is_over(self) -> bool:
        """Whether there were enough rounds of both, or too many turns."""
        return self._turns >= _MOST_TURNS or min(len(self._drafted), len(self._alone)) >= ROUNDS_OF_EACH

    def alone_is_longer_by(self) -> float:
        """How many times as long as it seemed the target alone takes, as rounds that draft go; 1 where too few of
        either were seen."""
        if min(len(self._drafted), len(self._alone)) < ROUNDS_OF_EACH:
            return 1.0
        return median(self._alone) / median(self._drafted)
