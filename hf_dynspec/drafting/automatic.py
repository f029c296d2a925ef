"""How many tokens to draft, chosen round by round: the shape of draft that is expected to bring the most tokens per
second, by what rounds have taken and what the target has accepted so far (DynaSpec, equation 2).

Nothing here waits for a device. A round is timed by the host's clock from its beginning to the next one's, and between
the two lies the one wait that every round has, so that on a GPU too it is the time of a whole round.
"""

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from .draft_shapes import ALONE, DraftShape, are_chains, shapes_of
from .round_times import RoundTimes
from .running_acceptance import RunningAcceptance
from .tree_config import TreeConfig

# The most rounds that earlier calls count for in a new one.
_ROUNDS_OF_EARLIER_CALLS = 8

# What to draft is settled anew after so many rounds, which is soon enough, and takes a tenth of a millisecond.
_ROUNDS_PER_CHOICE = 4
# Once in so many rounds another shape is tried that promises nearly as much and was tried too seldom, or long ago in
# rounds. Once in many more the target alone is timed.
_ROUNDS_PER_TRIAL = 10
_NEARLY_BEST = 0.95
_TRIED_ENOUGH = 2
_STALE_AFTER = 128
_ALONE_AGAIN_AFTER = 256

# Rounds of the target alone that are timed before drafting may rest.
_TIMED_BEFORE_REST = 3
# Tokens from when drafting was found to lose until it is tried again. Each time that it loses still they are twice as
# many, and as many as it takes for the trials to cost no more than this share of the time.
_FIRST_REST, _LONGEST_REST = 24, 4096
_SHARE_OF_TRIALS = 0.01
# Rounds of such a trial, and what all rounds before it, or before a change, count for.
_ROUNDS_OF_RETRIAL = 4
_ROUNDS_BEFORE_REST = 2
# Tokens whose features a head is given to begin with, when drafting is tried again in the midst of a text.
FEATURES_BEFORE_RETRIAL = 64
# Seconds without a round after which drafting that rests is tried again.
_FORGETS_AFTER = 600.0

# Settings of which it is remembered what was learnt.
_MOST_KEPT = 8


class AutomaticDrafting:
    """What was learnt of drafting under one setting, and the choice that follows from it. Shareable between threads.

    At first a few shapes are tried. Then the one that promises the most tokens per second is drafted, and now and then
    another one that may be as good. Where the target alone promises more than every shape, drafting rests, with a
    warning when that happens first; it is tried again at intervals that grow as long as it loses.

    Args:
        shapes: those to choose from besides `ALONE`.
    """

    def __init__(self, shapes: Sequence[DraftShape]):
        self._lock = threading.Lock()
        self._shapes = tuple(shapes)
        self._times = RoundTimes()
        self._acceptance = RunningAcceptance(set() if are_chains(shapes) else {shape.nodes for shape in shapes})
        self._first_trials = _first_trials(self._shapes)
        self._rounds = 0
        self._tried_at = dict.fromkeys((ALONE, *self._shapes), 0)
        self._choice = self._shapes[0]
        self._choose_again_at = self._try_another_at = 0
        self._ended = -float("inf")
        # Tokens to generate alone before drafting is tried again, None while it is not resting; and how many were.
        self._rest: int | None = None
        self._rested = 0
        self._retrials = 0
        self._lost = 0.0
        self._has_warned = False

    # A call ---------------------------------------------------------------------------------------------------------

    def begin_call(self, clock: Callable[[], float] = time.perf_counter) -> "AutomaticCall":
        """A call begins: what was learnt of other texts counts for less in it.

        Args:
            clock: tells the time in seconds.
        """
        with self._lock:
            self._acceptance.fade_to(_ROUNDS_OF_EARLIER_CALLS)
            if clock() - self._ended > _FORGETS_AFTER:
                self._wake()
        return AutomaticCall(self, clock)

    def renew(self) -> None:
        """Weights are others now: drafting is tried again, and what was accepted hardly counts any more."""
        with self._lock:
            self._acceptance.fade_to(_ROUNDS_BEFORE_REST)
            self._wake()

    def _wake(self) -> None:
        self._rest, self._rested, self._retrials = None, 0, 0

    # A round --------------------------------------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted now."""
        return self._rest is not None and self._rested < self._rest

    @property
    def reads_features(self) -> bool:
        """Whether a head that reads the target's features has to be given those of the tokens that come now."""
        return self._rest is None or self._rest - self._rested <= FEATURES_BEFORE_RETRIAL

    def choose(self) -> DraftShape:
        """What to draft in the next round."""
        with self._lock:
            shape = self._choose()
            warns = self.is_resting and not self._has_warned
            self._has_warned |= warns
        if warns:
            self._warn()
        return shape

    def _choose(self) -> DraftShape:
        if self.is_resting:
            return ALONE
        if self._rest is not None:
            return self._best_drafted()
        for shape, count in self._first_trials:
            if self._times.count(shape) < count:
                return shape
        if self._rounds < self._choose_again_at:
            return self._choice
        self._choose_again_at = self._rounds + _ROUNDS_PER_CHOICE
        speeds = self._speeds()
        self._choice = max(speeds, key=speeds.get)
        if self._choice == ALONE and self._times.count(ALONE) >= _TIMED_BEFORE_REST:
            self._rest, self._rested, self._lost = _FIRST_REST, 0, 0.0
            # What comes later counts from its first round on.
            self._acceptance.fade_to(_ROUNDS_BEFORE_REST)
            return ALONE
        if self._rounds < self._try_another_at:
            return self._choice
        self._try_another_at = self._rounds + _ROUNDS_PER_TRIAL
        # For this round alone.
        self._choose_again_at = self._rounds
        return self._trial_beside(speeds)

    def _speeds(self) -> dict[DraftShape, float]:
        """Tokens per second to expect of every shape."""
        tokens = self._acceptance.expected_tokens()
        return {shape: tokens[shape] / self._times.expected(shape) for shape in self._tried_at}

    def _best_drafted(self) -> DraftShape:
        speeds = self._speeds()
        return max(self._shapes, key=speeds.get)

    def _trial_beside(self, speeds: dict[DraftShape, float]) -> DraftShape:
        """A shape to try in place of the chosen one, or that one where there is none to try."""
        enough = _NEARLY_BEST * speeds[self._choice]
        age = {shape: self._rounds - tried_at for shape, tried_at in self._tried_at.items()}
        wanted = [
            shape
            for shape, speed in speeds.items()
            if (speed >= enough and (self._times.count(shape) < _TRIED_ENOUGH or age[shape] > _STALE_AFTER))
            or (shape == ALONE and age[shape] > _ALONE_AGAIN_AFTER)
        ]
        return max(wanted, key=age.get) if wanted else self._choice

    def record(self, shape: DraftShape, accepted: int, began: float, ended: float, is_usual: bool) -> None:
        """A round is over.

        Args:
            shape: what it drafted, or was to draft where drafts may end early.
            accepted: how many of the tokens were accepted, one below the other.
            began: the time in seconds.
            ended: the time at which the next one began.
            is_usual: it read no more than rounds do, and so has taken as long as another one would.
        """
        with self._lock:
            self._ended, seconds = ended, ended - began
            self._rounds += 1
            if shape not in self._tried_at:
                return
            self._tried_at[shape] = self._rounds
            if is_usual:
                self._times.add(shape, seconds)
            if shape != ALONE:
                self._acceptance.add(shape, accepted)
            if self._rest is not None:
                self._record_rest(shape, accepted, seconds)

    def _record_rest(self, shape: DraftShape, accepted: int, seconds: float) -> None:
        """A round is over while drafting rests or is tried again."""
        if shape == ALONE:
            self._rested += 1
            return
        alone = self._times.expected(ALONE)
        self._retrials += 1
        self._lost += max(0.0, seconds - (accepted + 1) * alone)
        speeds = self._speeds()
        if max(speeds, key=speeds.get) != ALONE:
            self._wake()
        elif self._retrials >= _ROUNDS_OF_RETRIAL:
            paid = int(self._lost / (alone * _SHARE_OF_TRIALS))
            self._rest = max(min(2 * self._rest, _LONGEST_REST), paid)
            self._rested, self._retrials, self._lost = 0, 0, 0.0
            self._acceptance.fade_to(_ROUNDS_BEFORE_REST)

    def _warn(self) -> None:
        alone = self._times.expected(ALONE)
        speeds = self._speeds()
        drafted = 1 / max(speeds[shape] for shape in self._shapes)
        warnings.warn(
            f"drafting does not pay here and rests: a token takes {1e3 * alone:.3g} ms without it, "
            f"and about {1e3 * drafted:.3g} ms with the best drafts. It is tried again from time to time, and "
            "when weights, policy or drafter change; this is said once.",
            stacklevel=2,
        )


def _first_trials(shapes: Sequence[DraftShape]) -> tuple[tuple[DraftShape, int], ...]:
    """What is tried before anything else, in this order, and how often: enough to tell what a draft step costs, and a
    node of a tree."""
    if are_chains(shapes):
        steps = max(shape.steps for shape in shapes)
        middle, short = DraftShape(min(5, steps), min(5, steps)), DraftShape(min(2, steps), min(2, steps))
        return ((middle, 2), (ALONE, 1), (short, 2))
    sizes = sorted({shape.nodes for shape in shapes})
    small = sizes[len(sizes) // 2 - 1] if len(sizes) > 1 else sizes[0]
    deep = max(shape for shape in shapes if shape.nodes == small)
    shallow = DraftShape(min(2, deep.steps), small)
    large = max(shape for shape in shapes if shape.nodes == sizes[-1])
    return ((deep, 2), (ALONE, 1), (shallow, 2), (large, 2))


class AutomaticCall:
    """The rounds of one call under automatic drafting. Not shared between threads.

    Args:
        drafting: what was learnt, and is learnt on.
        clock: tells the time in seconds.
    """

    def __init__(self, drafting: AutomaticDrafting, clock: Callable[[], float]):
        self._drafting = drafting
        self._clock = clock
        # The round that was begun last: what it drafts, when it began, whether it reads no more than rounds do, and
        # how many tokens were accepted in it, None until that is known.
        self._shape: DraftShape | None = None
        self._began = 0.0
        self._is_usual = False
        self._accepted: int | None = None
        # Rounds since the drafter has read the text, None where it never has.
        self._unread: int | None = None
        self._is_first = True

    @property
    def is_resting(self) -> bool:
        """See `AutomaticDrafting.is_resting`."""
        return self._drafting.is_resting

    @property
    def reads_features(self) -> bool:
        """See `AutomaticDrafting.reads_features`."""
        return self._drafting.reads_features

    def begin_round(self, most: int) -> DraftShape:
        """A round begins, and the one before it is over.

        Args:
            most: steps that there is room for; 0 where nothing can be drafted now.

        Returns:
            What to draft.
        """
        now = self._clock()
        if self._accepted is not None:
            self._drafting.record(self._shape, self._accepted, self._began, now, self._is_usual)
        self._began, self._accepted = now, None
        shape = self._drafting.choose() if most > 0 else ALONE
        # Nothing is learnt of rounds without a choice, nor of those at the end of a text, which are cut short.
        self._shape = shape if shape.steps <= most and most > 0 else None
        is_drafting = shape.steps > 0
        has_read = not is_drafting or (self._unread is not None and self._unread <= 1)
        self._is_usual = has_read and not self._is_first
        self._is_first = False
        if is_drafting:
            self._unread = 0
        elif self._unread is not None:
            self._unread += 1
        return shape

    def end_round(self, accepted: int) -> None:
        """The target has spoken: so many drafted tokens were accepted, one below the other."""
        if self._shape is not None:
            self._accepted = accepted


class LearntDrafting:
    """What was learnt of drafting under the settings that were used last. Shareable between threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._learnt: OrderedDict[Hashable, tuple[AutomaticDrafting, int]] = OrderedDict()

    def under(self, setting: Hashable, tree: TreeConfig | None, weights_version: int) -> AutomaticDrafting:
        """What was learnt under a setting.

        Args:
            setting: what acceptance and times depend on, besides the next two.
            tree: the largest trees to draft, None for chains.
            weights_version: of the drafter. Where it is another one than before, drafting is tried again.
        """
        key = (setting, tree)
        with self._lock:
            learnt, version = self._learnt.pop(key, None) or (AutomaticDrafting(shapes_of(tree)), weights_version)
            self._learnt[key] = learnt, weights_version
            while len(self._learnt) > _MOST_KEPT:
                self._learnt.popitem(last=False)
        if version != weights_version:
            learnt.renew()
        return learnt

    def forget(self) -> None:
        """Another drafter, policy or target: nothing that was learnt is true any more."""
        with self._lock:
            self._learnt.clear()
