"""What was learnt is served while it has earned it, and not because it was learnt."""

from collections import deque
from collections.abc import Iterable

# What was learnt is served where it drafts better than the drafter itself by this share of what is accepted of that: a
# smaller gain on so few requests may be chance, and what is not served can do no harm.
WORTHWHILE = 0.03
# What was learnt is given up where it drafts worse than the drafter itself by this share of what is accepted of that.
HOPELESS = 0.1


class Gate:
    """Compares what was learnt with the drafter itself, on requests that it was not trained on yet.

    Args:
        window: over how many of the last requests.
        least: of which there must be so many.
    """

    def __init__(self, window: int, least: int):
        self._least = least
        self._scores: deque[tuple[float, float]] = deque(maxlen=window)

    def record(self, before: float, after: float) -> None:
        """Take in what would be accepted of a request's drafts, from 0 to 1: of the drafter's own, and of those with
        what it has learnt."""
        self._scores.append((before, after))

    def clear(self) -> None:
        """Begin anew."""
        self._scores.clear()

    @property
    def scores(self) -> list[tuple[float, float]]:
        """What was recorded of the last requests."""
        return list(self._scores)

    @scores.setter
    def scores(self, scores: Iterable[tuple[float, float]]) -> None:
        self._scores.clear()
        self._scores.extend(scores)

    @property
    def means(self) -> tuple[float, float] | None:
        """Of what was recorded, before and after; None where there is nothing."""
        # A copy, as another thread may ask while one records.
        scores = self.scores
        if not scores:
            return None
        before, after = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return before, after

    @property
    def is_open(self) -> bool:
        """Whether what was learnt is to be served."""
        if len(self._scores) < self._least:
            return False
        before, after = self.means
        return after > (1 + WORTHWHILE) * before

    @property
    def is_hopeless(self) -> bool:
        """Whether learning had better begin anew. Never while the window is not full."""
        if len(self._scores) < self._scores.maxlen:
            return False
        before, after = self.means
        return not after >= (1 - HOPELESS) * before
