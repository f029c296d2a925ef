"""Drafting and not drafting, compared where both meet the same machine."""

from itertools import cycle
from statistics import median

from .draft_shapes import ALONE, DraftShape

# Rounds of either kind.
ROUNDS_OF_EACH = 4


class SideBySide:
    """Rounds that draft and rounds that do not, in turns.

    Whatever else the machine does, it does to both. Times that were taken one after the other tell it apart from what
    shapes differ in as long as a shape goes on, and not where it changed together with the shape.

    Args:
        drafted: what the rounds that draft draft.
    """

    def __init__(self, drafted: DraftShape):
        self._turns = cycle((drafted, ALONE))
        # How many times as long as expected rounds took.
        self._drafted: list[float] = []
        self._alone: list[float] = []

    def choose(self) -> DraftShape:
        """What the next round drafts."""
        return next(self._turns)

    def add(self, drafts: bool, ratio: float) -> None:
        """A round that drafts, or one that does not, took so many times as long as expected."""
        (self._drafted if drafts else self._alone).append(ratio)

    @property
    def is_over(self) -> bool:
        """Whether there were enough rounds of both."""
        return min(len(self._drafted), len(self._alone)) >= ROUNDS_OF_EACH

    def alone_is_longer_by(self) -> float:
        """How many times as long as it seemed the target alone takes, as rounds that draft go."""
        return median(self._alone) / median(self._drafted)
