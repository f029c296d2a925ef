"""How many tokens to draft, and with which policy, chosen round by round: what is expected to bring the most tokens
per second, by what rounds have taken and what the target has accepted so far (DynaSpec, equation 2).

Nothing here waits for a device. A round is timed by the host's clock from its beginning to the next one's, and between
the two lies the one wait that every round has, so that on a GPU too it is the time of a whole round.
"""

import threading
import warnings
from collections.abc import Iterator, Sequence

from .draft_shapes import ALONE, DraftShape, are_chains
from .round_times import RoundTimes
from .running_acceptance import RunningAcceptance

# The most rounds that earlier calls count for in a new one.
_ROUNDS_OF_EARLIER_CALLS = 8

# What to draft is settled anew after so many rounds, which is soon enough, and takes a tenth of a millisecond.
_ROUNDS_PER_CHOICE = 4
# Once in so many rounds another shape is tried that promises nearly as much and was tried too seldom, or long ago in
# rounds. Once in many more the target alone is timed, and policies that promise less are tried.
_ROUNDS_PER_TRIAL = 10
_NEARLY_BEST = 0.95
_TRIED_ENOUGH = 2
# Another policy than before is taken where it promises so many times as much: less may be chance, and a policy that
# was idle has to catch up, so that the rounds of a trial are a little longer than its others.
_CLEARLY_BETTER = 1.03
# Rounds for which a policy is tried, the first of which is not timed. At the beginning policies take turns, so that
# what slows the computer down for a while meets all of them.
_ROUNDS_OF_POLICY_TRIAL = 4
_FIRST_TURNS, _ROUNDS_OF_TURN = 3, 2
# Rounds until one that is not far behind is tried again; each time twice as many, up to `_OTHERS_AGAIN_AFTER`.
_RIVALS_AGAIN_AFTER = 32
_NOT_FAR_BEHIND = 0.85
_STALE_AFTER = 128
_OTHERS_AGAIN_AFTER = 256

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


class AutomaticDrafting:
    """What was learnt of drafting under one setting, and the choice that follows from it. Shareable between threads.

    At first a few shapes are tried. Then the one that promises the most tokens per second is drafted, and now and then
    another one that may be as good. Where the target alone promises more than every shape, drafting rests, with a
    warning when that happens first; it is tried again at intervals that grow as long as it loses.

    Args:
        shapes: those to choose from besides `ALONE`, of the policy 0.
        policies: how many there are to choose from. All of them draft each of the shapes.
    """

    def __init__(self, shapes: Sequence[DraftShape], policies: int = 1):
        self._lock = threading.Lock()
        self._policies = policies
        self._shapes = tuple(shape._replace(policy=policy) for policy in range(policies) for shape in shapes)
        self._times = RoundTimes()
        sizes = set() if are_chains(shapes) else {shape.nodes for shape in shapes}
        self._acceptance = RunningAcceptance(sizes, policies)
        self._first_trials = _first_trials(tuple(shapes))
        self._rounds = 0
        self._tried_at = dict.fromkeys((ALONE, *self._shapes), 0)
        self._choice = self._shapes[0]
        # The policy that drafts but for trials, the turns at the beginning that are still to come, and how long each
        # of them is left alone.
        self._policy = 0
        turns = [policy for policy in range(policies) for _ in range(_ROUNDS_OF_TURN)]
        self._turns = turns * _FIRST_TURNS if policies > 1 else []
        self._again_after = [_RIVALS_AGAIN_AFTER] * policies
        # A policy that is tried, and for how many rounds yet.
        self._tried: DraftShape | None = None
        self._rounds_of_trial = 0
        self._choose_again_at = self._try_another_at = 0
        self._ended = -float("inf")
        # Tokens to generate alone before drafting is tried again, None while it is not resting; and how many were.
        self._rest: int | None = None
        self._rested = 0
        self._retrials = 0
        self._lost = 0.0
        self._has_warned = False

    # A call ---------------------------------------------------------------------------------------------------------

    def begin_call(self, now: float) -> None:
        """A call begins: what was learnt of other texts counts for less in it.

        Args:
            now: the time in seconds.
        """
        with self._lock:
            self._acceptance.fade_to(_ROUNDS_OF_EARLIER_CALLS)
            if now - self._ended > _FORGETS_AFTER:
                self._wake()

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

    def choose(self, fixed: DraftShape | None = None) -> DraftShape:
        """What to draft in the next round, and with which policy.

        Args:
            fixed: the shape to choose a policy for (None: the shape is to be chosen too, `ALONE` among them).
        """
        with self._lock:
            shape = self._choose() if fixed is None else self._choose_policy(fixed)
            warns = fixed is None and self.is_resting and not self._has_warned
            self._has_warned |= warns
        if warns:
            self._warn()
        return shape

    def _choose_policy(self, fixed: DraftShape) -> DraftShape:
        if self._turns:
            return fixed._replace(policy=self._turns.pop(0))
        if not self._times.knows_drafts:
            # Calls of one round each: none could be timed.
            return fixed._replace(policy=self._policy)
        among = [fixed._replace(policy=policy) for policy in range(self._policies)]
        return self._best_or_trial(among)._replace(steps=fixed.steps, nodes=fixed.nodes)

    def _choose(self) -> DraftShape:
        if self.is_resting:
            return ALONE
        if self._rest is not None:
            return self._best_drafted()
        for shape, count in self._first_trials:
            if self._times.count(self._features(shape)) < count:
                return shape
        if self._turns:
            return self._first_trials[0][0]._replace(policy=self._turns.pop(0))
        return self._best_or_trial((ALONE, *self._shapes))

    def _best_or_trial(self, among: Sequence[DraftShape]) -> DraftShape:
        """What promises the most, settled anew every few rounds; or now and then another one, to see."""
        if self._rounds_of_trial:
            self._rounds_of_trial -= 1
            return self._tried
        if self._rounds < self._choose_again_at:
            return self._choice
        self._choose_again_at = self._rounds + _ROUNDS_PER_CHOICE
        speeds = self._speeds(among)
        self._choice = self._best_of(speeds)
        if self._choice == ALONE and self._times.count(self._features(ALONE)) >= _TIMED_BEFORE_REST:
            self._rest, self._rested, self._lost = _FIRST_REST, 0, 0.0
            # What comes later counts from its first round on.
            self._acceptance.fade_to(_ROUNDS_BEFORE_REST)
            return ALONE
        if self._rounds < self._try_another_at:
            return self._choice
        self._try_another_at = self._rounds + _ROUNDS_PER_TRIAL
        # For this round alone.
        self._choose_again_at = self._rounds
        trial = self._trial_beside(speeds)
        if trial != ALONE and trial.policy != self._policy:
            self._tried, self._rounds_of_trial = trial, _ROUNDS_OF_POLICY_TRIAL - 1
        return trial

    def _best_of(self, speeds: dict[DraftShape, float]) -> DraftShape:
        """What promises the most, with the policy of before unless another one is clearly better."""
        best = max(speeds, key=speeds.get)
        if best == ALONE:
            return best
        own = max((shape for shape in speeds if shape.steps and shape.policy == self._policy), key=speeds.get)
        if speeds[best] < _CLEARLY_BETTER * speeds[own]:
            best = own
        self._policy = best.policy
        return best

    def _features(self, shape: DraftShape) -> tuple[int, ...]:
        """What the time of a round depends on: draft steps, nodes, and by how much a step of its policy is longer than
        one of the first policy."""
        steps = (shape.steps if policy == shape.policy else 0 for policy in range(1, self._policies))
        return (shape.steps, shape.nodes, *steps)

    def _speeds(self, among: Sequence[DraftShape]) -> dict[DraftShape, float]:
        """Tokens per second to expect of these shapes."""
        tokens = self._acceptance.expected_tokens()
        gains = [self._acceptance.gain(policy) for policy in range(self._policies)]
        return {
            shape: tokens[shape._replace(policy=0)]
            * (gains[shape.policy] if shape.steps else 1.0)
            / self._times.expected(self._features(shape))
            for shape in among
        }

    def _best_drafted(self) -> DraftShape:
        speeds = self._speeds(self._shapes)
        return max(speeds, key=speeds.get)

    def _trial_beside(self, speeds: dict[DraftShape, float]) -> DraftShape:
        """A shape to try in place of the chosen one, or that one where there is none to try."""
        enough = _NEARLY_BEST * speeds[self._choice]
        age = {shape: self._rounds - self._tried_at.get(shape, 0) for shape in speeds}
        wanted = [
            shape
            for shape, speed in speeds.items()
            if speed >= enough
            and (self._times.count(self._features(shape)) < _TRIED_ENOUGH or age[shape] > _STALE_AFTER)
        ]
        if not wanted:
            wanted = list(self._best_of_each(speeds))
        return max(wanted, key=age.get) if wanted else self._choice

    def _best_of_each(self, speeds: dict[DraftShape, float]) -> Iterator[DraftShape]:
        """What was not tried for long: the target alone, and of each policy what promises the most."""
        if ALONE in speeds and self._rounds - self._tried_at[ALONE] > _OTHERS_AGAIN_AFTER:
            yield ALONE
        for policy in range(self._policies):
            tried = [tried_at for shape, tried_at in self._tried_at.items() if shape.steps and shape.policy == policy]
            best = max((one for one in speeds if one.steps and one.policy == policy), key=speeds.get)
            is_rival = speeds[best] > _NOT_FAR_BEHIND * speeds[self._choice]
            after = self._again_after[policy] if is_rival else _OTHERS_AGAIN_AFTER
            if self._rounds - max(tried) > after:
                self._again_after[policy] = min(2 * after, _OTHERS_AGAIN_AFTER)
                yield best

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
                self._times.add(self._features(shape), seconds)
            if shape != ALONE:
                self._acceptance.add(shape, accepted)
            if self._rest is not None:
                self._record_rest(shape, accepted, seconds)

    def _record_rest(self, shape: DraftShape, accepted: int, seconds: float) -> None:
        """A round is over while drafting rests or is tried again."""
        if shape == ALONE:
            self._rested += 1
            return
        alone = self._times.expected(self._features(ALONE))
        self._retrials += 1
        self._lost += max(0.0, seconds - (accepted + 1) * alone)
        speeds = self._speeds((ALONE, *self._shapes))
        if max(speeds, key=speeds.get) != ALONE:
            self._wake()
        elif self._retrials >= _ROUNDS_OF_RETRIAL:
            paid = int(self._lost / (alone * _SHARE_OF_TRIALS))
            self._rest = max(min(2 * self._rest, _LONGEST_REST), paid)
            self._rested, self._retrials, self._lost = 0, 0, 0.0
            self._acceptance.fade_to(_ROUNDS_BEFORE_REST)

    def _warn(self) -> None:
        alone = self._times.expected(self._features(ALONE))
        drafted = 1 / max(self._speeds(self._shapes).values())
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
