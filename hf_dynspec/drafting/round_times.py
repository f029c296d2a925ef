"""What rounds of different shapes take, told from the times of those that were."""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from math import inf
from operator import mul
from statistics import median, median_low

# Rounds kept of each shape, and ratios of the latest rounds to what was expected of them.
_KEPT, _PACES, _ENOUGH_PACES = 61, 9, 5
# Rounds with a draft after which a time is forgotten, but for the latest few: a shape that is not drafted any more
# would seem as long for ever as it was while the machine was slow.
_FORGOTTEN_AFTER, _NOT_FORGOTTEN = 256, 3
# All of them are where the shape seemed so many times as long as drafting it and the least that was left of a round
# with a draft, as its rounds may have been stalls: after the second number of rounds, each time twice as many.
_SURPRISINGLY_LONG, _TOLD_ANEW_AFTER = 1.3, 64
# A pace that differs from the usual one by no more than this may be chance, nor by so many times the spread of the
# latest: what is chance would add up, and shapes drift apart by it.
_USUAL_PACE, SPREADS = 0.08, 1.5
# What is left of the pace of a round is told by so many before it and after it, and anew as long as it is among the
# latest. What differs by more is the shape's own.
_NEIGHBOURS, _LATEST, _MOST_DRIFT = 4, 64, 1.15
# How many rounds the straight line through all shapes counts for beside a shape's own: where drifts are told, next to
# none. Rounds of a shape that lies beside the line would seem slow or fast there, and their neighbours with them, so
# that what the shape takes would come nearer to the line each time.
_ROUNDS_OF_LINE, _ROUNDS_OF_LINE_IN_DRIFTS = 20, 1
# What the target alone counts for in the line: it drafts nothing, which saves more than draft steps, and tells only
# what drafts of one length do not.
_WEIGHT_OF_ALONE = 0.05
# What it counts for, that to draft nothing takes no time, in the line that drafting lies on by itself: little, as the
# first step takes longer than others.
_ROUNDS_OF_NO_DRAFT = 1.0
# Rounds after which drifts are told and the line is drawn anew, and with them all that is expected; at once where a
# shape was seen no more often than this.
_ROUNDS_PER_PLANE, _FEW = 8, 3
# From so many shapes on, times of a shape that was seen seldom are not believed beyond so many times what is expected
# of it: they may have been stalls.
_SHAPES_OF_LINE, _MOST_SURPRISE = 2, 1.3


def beyond_chance(ratio: float, chance: float) -> float:
    """A ratio of times without so much of its difference from 1 as may be chance: 1 where all of it may."""
    longer = ratio - 1.0
    return 1.0 + max(0.0, longer - chance) + min(0.0, longer + chance)


class _TimedRound:
    """One that is remembered.

    Attributes:
        shape: what it drafted.
        seconds: how long it would have taken at the usual pace, as far as that was known when it ended.
        share: which part of that drafting took, as far as it was timed.
        drafted: how many rounds with a draft there were until then.
        drift: how many times as long its neighbours took as is expected of them.
    """

    __slots__ = ("drafted", "drift", "seconds", "shape", "share")

    def __init__(self, shape: tuple[int, ...], seconds: float, share: float, drafted: int):
        self.shape, self.seconds, self.share, self.drafted, self.drift = shape, seconds, share, drafted, 1.0


class RoundTimes:
    """Seconds of rounds, by their shape.

    Shapes are compared as if the machine had always worked at one pace: how much longer or shorter the latest rounds
    took than others of the same shape before them is told apart from what the shapes differ in. So other work on the
    machine, which slows down the shape that is being drafted and is not seen in the others, changes no choice; and as
    medians are compared, a stall does not either.

    That tells large changes at once. Small ones are no less than what a draft step more or less takes, but hidden by
    chance: they are told later, and together with what shapes take. The drift of a round is by how much it and its
    neighbours, of whichever shapes, differ from what is expected of them, and a shape takes what its rounds would have
    without theirs; each is told from the other, as it was told before.

    What a shape takes that was seldom tried follows from the others by a straight line over its features. Few rounds
    tell little of that line, but enough of what drafting takes of them, which is timed by itself: no draft takes less
    than its steps and the least that was left of any round.
    """

    def __init__(self):
        self._kept: dict[Hashable, deque[_TimedRound]] = {}
        self._latest: deque[_TimedRound] = deque(maxlen=_LATEST + _NEIGHBOURS)
        # What shapes take, the most that is believed of one, and which part of it drafting takes.
        self._typical: dict[Hashable, float] = {}
        self._most: dict[Hashable, float] = {}
        self._shares: dict[Hashable, float] = {}
        # Rounds with a draft so far; and after how many of them shapes are told anew that seemed too long before.
        self._drafted = 0
        self._told_anew_after: dict[Hashable, int] = {}
        self._paces: deque[float] = deque(maxlen=_PACES)
        # The plane through all of them, None where it has to be drawn anew; that of what drafting takes of each, and
        # the least that is left of one without it; the rounds that were added since, and what is expected until then.
        self._plane: _Plane | None = None
        self._drafting: _Plane | None = None
        self._least_left = 0.0
        self._rounds_of_plane = 0
        self._expected: dict[Hashable, float] = {}

    def add(self, shape: tuple[int, ...], seconds: float, drafting_seconds: float = 0.0) -> None:
        """A round of a shape took so long.

        Args:
            shape: its features, such as the number of nodes, the first of them that of draft steps.
            drafting_seconds: how much of that drafting took, as far as it was timed.
        """
        if shape in self._kept:
            self._paces.append(seconds / self._middle(shape))
        most = inf
        if self.count(shape) < _FEW and len(self._kept) >= _SHAPES_OF_LINE:
            most = _MOST_SURPRISE * self.expected(shape)
        self._drafted += any(shape)
        round = _TimedRound(shape, self.at_usual_pace(seconds), drafting_seconds / seconds, self._drafted)
        self._latest.append(round)
        kept = self._kept.setdefault(shape, deque(maxlen=_KEPT))
        kept.append(round)
        self._most[shape] = most
        self._tell_typical([shape])
        self._rounds_of_plane += 1
        if len(kept) <= _FEW or self._rounds_of_plane >= _ROUNDS_PER_PLANE:
            self._plane = None

    def _pace(self) -> float:
        """How many times as long as usual rounds take now."""
        if len(self._paces) < _ENOUGH_PACES:
            return 1.0
        middle = median(self._paces)
        return beyond_chance(middle, max(_USUAL_PACE, SPREADS * median(abs(one - middle) for one in self._paces)))

    def scale(self, shape: tuple[int, ...], factor: float) -> None:
        """Take rounds of a shape to be so many times as long as they seemed."""
        for round in self._kept[shape]:
            round.seconds *= factor
        self._most[shape] *= factor
        self._tell_typical([shape])
        self._plane = None

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
        for shape in [shape for shape in self._kept if any(shape)]:
            self._forget_shape(shape)
        self._plane = None

    def at_usual_pace(self, seconds: float) -> float:
        """What a round that takes so many seconds now would take if the machine worked as it usually does."""
        return seconds / self._pace()

    def count(self, shape: tuple[int, ...]) -> int:
        """How many rounds of a shape are remembered."""
        return len(self._kept.get(shape, ()))

    @property
    def drafted(self) -> int:
        """How many rounds with a draft, of whichever shape, are remembered."""
        return sum(len(kept) for shape, kept in self._kept.items() if any(shape))

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
        if self._plane is None:
            self._settle()
        expected = self._expected.get(shape)
        if expected is None:
            expected = self._expected[shape] = self._by_plane(shape)
        return expected

    # Drifts and shapes, told together --------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._forget()
        self._shares = {shape: median_low([round.share for round in kept]) for shape, kept in self._kept.items()}
        self._draw_planes()
        self._tell_drifts()
        self._tell_typical(self._kept)
        self._draw_planes()
        self._rounds_of_plane = 0

    def _forget(self) -> None:
        """Forget the times of shapes that were drafted long ago."""
        for shape, kept in self._kept.items():
            while any(shape) and len(kept) > _NOT_FORGOTTEN and self._drafted - kept[0].drafted > _FORGOTTEN_AFTER:
                kept.popleft()
        if self._drafting is not None:
            self._forget_surprises()

    def _forget_surprises(self) -> None:
        """Forget shapes that seemed too long, and are not drafted for that: nothing else would tell whether they are.
        Where no other shape of a policy was drafted since, its shapes stay: it would be forgotten with them."""
        drafted = [shape for shape in self._kept if any(shape)]
        left = min((self._typical[shape] - self._drafting.at(shape) for shape in drafted), default=0.0)
        latest: dict[tuple[bool, ...], int] = {}
        for shape in drafted:
            policy = tuple(map(bool, shape))
            latest[policy] = max(latest.get(policy, 0), self._kept[shape][-1].drafted)
        for shape in drafted:
            after = self._told_anew_after.get(shape, _TOLD_ANEW_AFTER)
            is_idle = latest[tuple(map(bool, shape))] - self._kept[shape][-1].drafted > after
            if is_idle and self._typical[shape] > _SURPRISINGLY_LONG * (self._drafting.at(shape) + left):
                self._told_anew_after[shape] = 2 * after
                self._forget_shape(shape)

    def _forget_shape(self, shape: Hashable) -> None:
        del self._kept[shape], self._typical[shape], self._most[shape]

    def _tell_drifts(self) -> None:
        expected = {
            shape: self._by_plane(shape, _ROUNDS_OF_LINE_IN_DRIFTS) if any(shape) else self._typical[shape]
            for shape in self._kept
        }
        latest = list(self._latest)
        # What forgotten shapes took tells nothing any more.
        ratios = [round.seconds / expected.get(round.shape, round.seconds / round.drift) for round in latest]
        # The first ones have no neighbours before them, unless they were the first ever.
        first = _NEIGHBOURS if len(latest) == self._latest.maxlen else 0
        for place in range(first, len(latest)):
            drift = median(ratios[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1])
            latest[place].drift = drift if 1 / _MOST_DRIFT < drift < _MOST_DRIFT else 1.0

    def _tell_typical(self, shapes: Iterable[Hashable]) -> None:
        for shape in shapes:
            self._typical[shape] = min(self._middle(shape), self._most[shape])

    def _middle(self, shape: tuple[int, ...]) -> float:
        """Seconds that rounds of a shape took, whatever is believed of it."""
        return median_low([round.seconds / round.drift for round in self._kept[shape]])

    def _draw_planes(self) -> None:
        weights = {shape: len(kept) if any(shape) else _WEIGHT_OF_ALONE for shape, kept in self._kept.items()}
        seconds, nothing = self._typical, len(next(iter(weights))) * (0,)
        self._plane = _Plane([(shape, seconds[shape], weight) for shape, weight in weights.items()])
        drafting = [(shape, self._shares[shape] * seconds[shape], weights[shape]) for shape in weights if any(shape)]
        self._drafting = _Plane([(nothing, 0.0, _ROUNDS_OF_NO_DRAFT), *drafting])
        self._least_left = min(
            seconds[shape] - self._drafting.at(shape) if any(shape) else seconds[shape] for shape in weights
        )
        self._expected.clear()

    def _by_plane(self, shape: tuple[int, ...], rounds_of_line: int = _ROUNDS_OF_LINE) -> float:
        line = max(self._plane.at(shape), self._drafting.at(shape) + self._least_left)
        kept = self._kept.get(shape)
        if kept is None:
            return line
        return (len(kept) * self._typical[shape] + rounds_of_line * line) / (len(kept) + rounds_of_line)


class _Plane:
    """The plane closest to points, each of features, a height and a weight.

    A little is held against slopes, so that they are told also where the points do not tell: where features always
    change together they share what comes of it, and through one point the plane is level.
    """

    def __init__(self, points: Sequence[tuple[tuple[int, ...], float, float]]):
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
        self._slopes = [rows[i][-1] / rows[i][i] for i in range(width)]
        self._intercept = height - sum(map(mul, self._slopes, centre))

    def at(self, features: tuple[int, ...]) -> float:
        """The height over a place."""
        return self._intercept + sum(map(mul, self._slopes, features))
