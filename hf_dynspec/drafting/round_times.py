"""What rounds of different shapes take, told from the times of those that were."""

from collections import deque
from collections.abc import Hashable, Sequence
from math import inf
from operator import mul
from statistics import median, median_low

# Times kept of each shape, and ratios of the latest rounds to what was expected of them.
_KEPT, _PACES, _ENOUGH_PACES = 61, 9, 5
# Rounds with a draft after which a time is forgotten, but for the latest few: a shape that is not drafted any more
# would seem as long for ever as it was while the machine was slow.
_FORGOTTEN_AFTER, _NOT_FORGOTTEN = 128, 3
# A pace that differs from the usual one by no more than this may be chance, nor by so many times the spread of the
# latest: what is chance would add up, and shapes drift apart by it.
_USUAL_PACE, _SPREADS = 0.08, 1.5
# How many rounds the straight line through all shapes counts for beside a shape's own.
_ROUNDS_OF_LINE = 10
# What the target alone counts for in the line: it drafts nothing, which saves more than draft steps, and tells only
# what drafts of one length do not.
_WEIGHT_OF_ALONE = 0.05
# Rounds after which the line is drawn anew, and with it all that is expected; at once where a shape was seen no more
# often than this.
_ROUNDS_PER_PLANE, _FEW = 8, 3
# From so many shapes on, times of a shape that was seen seldom are not believed beyond so many times what is expected
# of it: they may have been stalls.
_SHAPES_OF_LINE, _MOST_SURPRISE = 2, 1.3


class RoundTimes:
    """Seconds of rounds, by their shape.

    Shapes are compared as if the machine had always worked at one pace: how much longer or shorter the latest rounds
    took than others of the same shape before them is told apart from what the shapes differ in. So other work on the
    machine, which slows down the shape that is being drafted and is not seen in the others, changes no choice; and as
    medians are compared, a stall does not either.

    What a shape takes that was seldom tried follows from the others by a straight line over its features.
    """

    def __init__(self):
        self._seconds: dict[Hashable, deque[float]] = {}
        self._typical: dict[Hashable, float] = {}
        # Rounds with a draft so far, and how many there were when each of the seconds was kept.
        self._rounds = 0
        self._kept_at: dict[Hashable, deque[int]] = {}
        self._paces: deque[float] = deque(maxlen=_PACES)
        # The plane through all of them, its slopes None where it has to be drawn anew, and the least of them; the
        # rounds that were added since, and what is expected of shapes until then.
        self._intercept, self._least, self._rounds_of_plane = 0.0, 0.0, 0
        self._slopes: list[float] | None = None
        self._expected: dict[Hashable, float] = {}

    def add(self, shape: tuple[int, ...], seconds: float) -> None:
        """A round of a shape, which are the numbers of its draft steps and nodes, took so long."""
        kept = self._seconds.get(shape)
        if kept is not None:
            self._paces.append(seconds / median_low(kept))
        most = inf
        if self.count(shape) < _FEW and len(self._seconds) >= _SHAPES_OF_LINE:
            most = _MOST_SURPRISE * self.expected(shape)
        kept = self._seconds.setdefault(shape, deque(maxlen=_KEPT))
        kept.append(self.at_usual_pace(seconds))
        self._rounds += any(shape)
        self._kept_at.setdefault(shape, deque(maxlen=_KEPT)).append(self._rounds)
        self._typical[shape] = min(median_low(kept), most)
        self._rounds_of_plane += 1
        if len(kept) <= _FEW or self._rounds_of_plane >= _ROUNDS_PER_PLANE:
            self._slopes = None

    def _pace(self) -> float:
        """How many times as long as usual rounds take now."""
        if len(self._paces) < _ENOUGH_PACES:
            return 1.0
        middle = median(self._paces)
        usual = max(_USUAL_PACE, _SPREADS * median(abs(one - middle) for one in self._paces))
        longer = middle - 1.0
        return 1.0 + max(0.0, longer - usual) + min(0.0, longer + usual)

    def scale(self, shape: tuple[int, ...], factor: float) -> None:
        """Take rounds of a shape to be so many times as long as they seemed."""
        kept = self._seconds[shape] = deque((factor * one for one in self._seconds[shape]), maxlen=_KEPT)
        self._typical[shape], self._slopes = median_low(kept), None

    def longest_within(self, shape: tuple[int, ...]) -> float:
        """Seconds that the slowest shape took of those that draft with the same policy, and no more than this one; 0
        where none is remembered."""
        within = (
            seconds
            for one, seconds in self._typical.items()
            # What a policy's steps are longer by than others' is not 0 in any of its shapes, and may be less than 0.
            if any(one) and all(0 < own <= most or own == most for own, most in zip(one, shape, strict=True))
        )
        return max(within, default=0.0)

    def forget_drafts(self) -> None:
        """Forget how long all rounds with a draft took."""
        for shape in [shape for shape in self._seconds if any(shape)]:
            del self._seconds[shape], self._kept_at[shape], self._typical[shape]
        self._slopes = None

    def at_usual_pace(self, seconds: float) -> float:
        """What a round that takes so many seconds now would take if the machine worked as it usually does."""
        return seconds / self._pace()

    def count(self, shape: tuple[int, ...]) -> int:
        """How many rounds of a shape are remembered."""
        return len(self._seconds.get(shape, ()))

    @property
    def drafted(self) -> int:
        """How many rounds with a draft, of whichever shape, are remembered."""
        return sum(len(kept) for shape, kept in self._seconds.items() if any(shape))

    def typical(self, shape: tuple[int, ...]) -> float:
        """Seconds that rounds of a shape took, whatever others did. Some of them must have been timed."""
        return self._typical[shape]

    def expected(self, shape: tuple[int, ...]) -> float:
        """Seconds to expect of a round. Some round must have been timed.

        Those that draft lie on the line, but for what was seen of them; and none of them takes less than the target
        alone.
        """
        if not any(shape):
            return self._typical.get(shape) or min(self._typical.values())
        if self._slopes is None:
            self._draw_plane()
        expected = self._expected.get(shape)
        if expected is None:
            expected = self._expected[shape] = self._by_plane(shape)
        return expected

    def _forget(self) -> None:
        """Forget the times of shapes that were drafted long ago."""
        for shape, kept_at in self._kept_at.items():
            kept = self._seconds[shape]
            before = len(kept)
            while any(shape) and len(kept) > _NOT_FORGOTTEN and self._rounds - kept_at[0] > _FORGOTTEN_AFTER:
                kept.popleft()
                kept_at.popleft()
            if len(kept) < before:
                self._typical[shape] = median_low(kept)

    def _draw_plane(self) -> None:
        self._forget()
        points = [
            (one, self._typical[one], len(kept) if any(one) else _WEIGHT_OF_ALONE)
            for one, kept in self._seconds.items()
        ]
        self._intercept, self._slopes = _fit(points)
        self._least, self._rounds_of_plane = min(self._typical.values()), 0
        self._expected.clear()

    def _by_plane(self, shape: tuple[int, ...]) -> float:
        line = max(self._intercept + sum(map(mul, self._slopes, shape)), self._least)
        kept = self._seconds.get(shape)
        if kept is None:
            return line
        return (len(kept) * self._typical[shape] + _ROUNDS_OF_LINE * line) / (len(kept) + _ROUNDS_OF_LINE)


def _fit(points: Sequence[tuple[tuple[int, ...], float, float]]) -> tuple[float, list[float]]:
    """The intercept and slopes of the plane closest to points, each of features, a height and a weight.

    A little is held against slopes, so that they are told also where the points do not tell: where features always
    change together they share what comes of it, and through one point the plane is level.
    """
    weight = sum(one[2] for one in points)
    width = len(points[0][0])
    centre = [sum(one[2] * one[0][i] for one in points) / weight for i in range(width)]
    height = sum(one[2] * one[1] for one in points) / weight
    # The normal equations of what lies around the middle, the right side last.
    rows = [[0.0] * (width + 1) for _ in range(width)]
    for features, seconds, w in points:
        around = [feature - middle for feature, middle in zip(features, centre, strict=True)]
        around.append(seconds - height)
        for row, one in zip(rows, around, strict=False):
            if one:
                weighted = w * one
                row[:] = [value + weighted * other for value, other in zip(row, around, strict=True)]
    for i in range(width):
        rows[i][i] += 1e-3 * weight
    for i in range(width):
        for j in range(width):
            if i != j:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    slopes = [rows[i][-1] / rows[i][i] for i in range(width)]
    return height - sum(map(mul, slopes, centre)), slopes
