"""Automatic drafting: how many tokens to draft in each round, and with which policy, for the most tokens per second.

Four things are learned while texts are generated: how often the tokens of each draft step are accepted, how long a
round of each shape takes, how often a token of a given drafter probability is accepted, and whether drafting pays at
all. The plan with the highest expected speed (DynaSpec, equation 2) drafts next.

Nothing here waits for a device. The host's clock times a round from its beginning to the beginning of the next one.
Each round waits for the device once in between, so on a GPU too this is the time of a whole round.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from ..errors import warn_user
from ..stats import Clock
from ..tree_config import TreeConfig
from .expected_speed import expected_tokens

# The longest chains and tree paths to consider: at an acceptance of 0.9, one round in three reaches the twelfth token.
LONGEST = 12
# The lengths of chains that do not stop by themselves: few, as each is a graph of its own on a GPU.
LENGTHS = (1, 2, 3, 5, 8, LONGEST)
# The first length that is tried, and the second one, which shows what a draft step costs.
_FIRST_LENGTHS = (5, 2)
# Rounds of a shape that are timed before their median is trusted, and how many recent rounds it is taken over.
_TRUSTED, _RECENT_TIMES = 3, 9
# The share of a round that one more draft step takes, as long as nothing has been measured.
_ASSUMED_STEP_COST = 0.1
# Each round multiplies the weight of earlier acceptances by this; a new text multiplies it by the second number.
_FADE, _FADE_OF_CALL = 0.97, 0.5
# Recent rounds whose tokens are averaged for drafts that stop early.
_RECENT_ROUNDS = 32
# Bins for the probabilities of drafted tokens.
_BINS = 10
# The least probability of being accepted so far with which a draft goes on, as long as nothing has been measured.
_WORTH_AT_FIRST = 0.5
# Rounds between two explorations of other plans, and rounds that an exploration takes.
_EXPLORES_AFTER, _EXPLORATION = 32, 3
# Plans that promise less than this share of the best plan's speed are not explored again.
_WORTH_EXPLORING = 0.6
# Another policy has to promise more by this factor: the session has to read the text for it first.
_CLEARLY_BETTER = 1.03
# Timed rounds with drafts before drafting may back off.
_DRAFTS_BEFORE_BACKOFF = 4
# Tokens without drafts after drafting has lost for the first time, and at most.
_SHORTEST_BACKOFF, _LONGEST_BACKOFF = 16, 512
# Tokens that a new text waits at most, as the drafter may know it better; and tokens before a retrial from which on
# heads collect the target's hidden states.
_SOON = 64
# Settings for which learned choosers are kept.
_MOST_CHOOSERS = 8


class DraftPlan(NamedTuple):
    """What one round drafts.

    Attributes:
        steps: draft steps; 0 if the target generates alone.
        nodes: drafted tokens: one for each step in a chain, more in a tree.
        policy: the index of the policy that drafts, among those to choose from.
    """

    steps: int
    nodes: int
    policy: int = 0


NO_DRAFT = DraftPlan(0, 0)


def plans_of(tree: TreeConfig | None, stops_early: bool) -> tuple[DraftPlan, ...]:
    """The plans of one policy to choose from, without `NO_DRAFT`. Arguments as for `DraftChooser`."""
    if tree is None:
        # Chains that stop by themselves have one plan, the longest.
        return tuple(DraftPlan(steps, steps) for steps in ((LONGEST,) if stops_early else LENGTHS))
    deepest, largest = min(tree.depth + 1, LONGEST), tree.total_tokens - 1
    sizes = [size for size in (largest, largest // 2, largest // 4) if size]
    plans = {DraftPlan(min(depth, size), size) for size in sizes for depth in (deepest, (deepest + 1) // 2)}
    return tuple(sorted(plans, reverse=True))


class RunningRates:
    """How often something happened at each of several places. Recent cases count more.

    Args:
        expected: the rates to begin with.
        weight: the number of cases that they count for.
    """

    def __init__(self, expected: Sequence[float], weight: float):
        self._happened = [weight * rate for rate in expected]
        self._cases = [weight] * len(expected)

    def add(self, place: int, happened: bool) -> None:
        """Count one case."""
        self._happened[place] += happened
        self._cases[place] += 1.0

    def fade(self, factor: float, least: float = 1.0) -> None:
        """Let earlier cases count less, but no place less than `least` cases."""
        for place, cases in enumerate(self._cases):
            kept = max(factor * cases, min(cases, least)) / cases
            self._happened[place] *= kept
            self._cases[place] *= kept

    def rates(self) -> list[float]:
        """The rate at each place."""
        return [happened / cases for happened, cases in zip(self._happened, self._cases, strict=True)]


class RoundLatency:
    """Seconds of a round for each shape: the median of its recent rounds, and a straight line for other shapes."""

    def __init__(self) -> None:
        self._recent: dict[DraftPlan, deque[float]] = {}
        self._median: dict[DraftPlan, float] = {}

    def add(self, shape: DraftPlan, seconds: float) -> None:
        """Note how long a round took."""
        recent = self._recent.setdefault(shape, deque(maxlen=_RECENT_TIMES))
        recent.append(seconds)
        self._median[shape] = median(recent)

    def count(self, shape: DraftPlan) -> int:
        """How many recent rounds of a shape were timed."""
        return len(self._recent.get(shape, ()))

    def timed_drafts(self, policy: int) -> int:
        """How many recent rounds with drafts of a policy were timed."""
        return sum(self.count(shape) for shape in self._recent if shape.steps and shape.policy == policy)

    def of_round(self, shape: DraftPlan) -> float | None:
        """Seconds to expect of a round; None if nothing of its policy was timed."""
        if self.count(shape) >= _TRUSTED:
            return self._median[shape]
        known = self._known(shape.policy)
        if not known:
            return None
        nearest = min(known, key=lambda one: (abs(one.nodes - shape.nodes) + abs(one.steps - shape.steps), one))
        seconds = self._median[nearest]
        return max(seconds + (shape.steps - nearest.steps) * self.of_step(shape.policy), 0.2 * seconds)

    def of_step(self, policy: int) -> float:
        """Seconds that one more draft step takes, verification of its token included."""
        known = self._known(policy)
        first, last = min(known), max(known)
        steps = last.steps - first.steps
        if not steps or last.nodes - first.nodes != steps:
            return _ASSUMED_STEP_COST * self._median[first]
        return max((self._median[last] - self._median[first]) / steps, 0.0)

    def _known(self, policy: int) -> list[DraftPlan]:
        """Timed shapes of a policy, if possible those that are trusted."""
        timed = [shape for shape in self._recent if shape.steps and shape.policy == policy]
        return [shape for shape in timed if self.count(shape) >= _TRUSTED] or timed


class Backoff:
    """Exponential backoff: after drafting has lost, it is left out for 16 tokens, then 32, and so on up to 512."""

    def __init__(self) -> None:
        # Tokens of a whole backoff, tokens until drafting is tried again, and rounds that the retrial still takes.
        self.length = self.remaining = self.retrial = 0

    def begin(self) -> None:
        """Drafting has lost."""
        self.length = min(max(2 * self.length, _SHORTEST_BACKOFF), _LONGEST_BACKOFF)
        self.remaining, self.retrial = self.length, 0

    def advance(self, tokens: int) -> None:
        """So many tokens came out. When the wait is over, a retrial begins."""
        if self.remaining:
            self.remaining = max(0, self.remaining - tokens)
            self.retrial = 0 if self.remaining else _EXPLORATION

    def reset(self, retrial: int = 0) -> None:
        """Forget the losses, and try drafting for so many rounds."""
        self.length, self.remaining, self.retrial = 0, 0, retrial


class FinishedRound(NamedTuple):
    """A round that is over: its plan, the steps that were drafted, and the accepted tokens, one below the other.

    Attributes:
        is_last: the text ended, perhaps within the draft.
        seconds: None if the round read more than usual, such as the prompt.
        confidences: for each token of a chain that can stop early, the bin of the drafter's probability.
    """

    plan: DraftPlan
    steps: int
    accepted: int
    is_last: bool
    seconds: float | None
    confidences: tuple[int, ...] = ()


class DraftChooser:
    """What was learned of drafting under one setting, and the plan that follows. Shareable between threads.

    Args:
        tree: the largest tree to draft (None: chains).
        policies: how many policies there are to choose from.
        stops_early: chains stop before a token that is not worth its time.
        fixed: the plan whose policy alone is to be chosen (None: the length is chosen too, `NO_DRAFT` included).
    """

    def __init__(self, tree: TreeConfig | None, policies: int, stops_early: bool, fixed: DraftPlan | None):
        self._lock = threading.Lock()
        self._stops_early, self._is_fixed = stops_early, fixed is not None
        plans = plans_of(tree, stops_early) if fixed is None else (fixed,)
        self._plans = tuple(plan._replace(policy=policy) for policy in range(policies) for plan in plans)
        # By policy, and in trees by size too: how often a node at each depth is accepted if its parent was.
        self._acceptance: dict[tuple[int, int], RunningRates] = {}
        self._latency = RoundLatency()
        # By policy: recent numbers of tokens and steps, for chains that stop early.
        self._recent = [deque[tuple[int, int]](maxlen=_RECENT_ROUNDS) for _ in range(policies)]
        centres = [(place + 0.5) / _BINS for place in range(_BINS)]
        self._confidence = RunningRates(centres, weight=2.0)
        self._backoff = Backoff()
        self._has_warned = False
        self._explored: DraftPlan | None = None
        self._rounds_to_explore = self._rounds_since_exploration = 0
        self._plan = self._first_plan()

    def _first_plan(self) -> DraftPlan:
        return min(self._plans, key=lambda plan: (plan.policy, abs(plan.steps - _FIRST_LENGTHS[0]), -plan.nodes))

    def begin_call(self) -> None:
        """A new text begins: acceptances of earlier texts count for less."""
        with self._lock:
            for rates in self._acceptance.values():
                rates.fade(_FADE_OF_CALL)
            self._backoff.remaining = min(self._backoff.remaining, _SOON)

    def renew(self) -> None:
        """The drafter's weights changed: drafting is tried again at once, and earlier acceptances hardly count."""
        with self._lock:
            for rates in (*self._acceptance.values(), self._confidence):
                rates.fade(0.0)
            self._backoff.reset(_EXPLORATION if self._backoff.length else 0)

    @property
    def is_backing_off(self) -> bool:
        """Whether nothing is drafted for now since drafting has lost."""
        return self._backoff.remaining > 0

    @property
    def keeps_features(self) -> bool:
        """Whether a head needs the target's hidden states at the tokens that come now."""
        return self._backoff.remaining <= _SOON

    def choose(self) -> DraftPlan:
        """The plan of the next round."""
        warning = None
        with self._lock:
            if self._backoff.remaining:
                return NO_DRAFT
            if self._backoff.retrial:
                return self._best(self._plans)
            if (first := self._untimed()) is not None:
                return first
            if self._rounds_to_explore:
                return self._explored
            among = self._plans if self._is_fixed else (NO_DRAFT, *self._plans)
            self._plan = self._best(among)
            if self._plan == NO_DRAFT:
                warning = self._begin_backoff()
            elif self._rounds_since_exploration >= _EXPLORES_AFTER:
                self._explore(among)
                return self._explored or self._plan
        if warning is not None:
            warn_user(warning)
        return self._plan

    def _untimed(self) -> DraftPlan | None:
        """A plan that has to be timed before plans can be compared."""
        first = self._first_plan()
        if self._stops_early:
            # Early stops decide how long its rounds are.
            if len(self._recent[0]) < _DRAFTS_BEFORE_BACKOFF:
                return first
        # Texts may have no room for the whole plan, so rounds of any length count.
        elif (timed := self._latency.timed_drafts(0)) < _TRUSTED:
            return first
        elif not self._is_fixed and timed < 2 * _TRUSTED:
            return min(self._plans, key=lambda plan: (plan.policy, abs(plan.steps - _FIRST_LENGTHS[1])))
        if not self._is_fixed and self._latency.count(NO_DRAFT) < _TRUSTED:
            return NO_DRAFT
        for plan in self._plans:
            if plan.policy and self._latency.of_round(plan) is None:
                return plan._replace(steps=first.steps, nodes=first.nodes)
        return None

    def _best(self, among: Sequence[DraftPlan]) -> DraftPlan:
        """The plan with the highest expected speed, with the policy of before unless another is clearly better."""
        own = self._plan.policy
        favour = {plan: _CLEARLY_BETTER for plan in among if plan.steps and plan.policy == own}
        return max(among, key=lambda plan: favour.get(plan, 1.0) * self._speed(plan))

    def _speed(self, plan: DraftPlan) -> float:
        """Expected tokens per second; 0 if nothing of its policy was timed."""
        if plan.steps and self._stops_early and self._recent[plan.policy]:
            return self._speed_of(plan, self._recent[plan.policy])
        seconds = self._latency.of_round(plan)
        return expected_tokens(self._rates(plan).rates(), plan.steps) / seconds if seconds else 0.0

    def _speed_of(self, plan: DraftPlan, rounds: Sequence[tuple[int, int]]) -> float:
        """Tokens per second of rounds with so many tokens and draft steps, at the usual latency; 0 if unknown."""
        seconds = [self._latency.of_round(_shape(plan, steps)) for _, steps in rounds]
        return sum(tokens for tokens, _ in rounds) / sum(seconds) if seconds and None not in seconds else 0.0

    def _rates(self, plan: DraftPlan) -> RunningRates:
        """Acceptances of a plan's policy, and tree size. Those of a kindred plan stand in for one not yet seen."""
        key = (plan.policy, plan.nodes if plan.nodes > plan.steps else 0)
        if key not in self._acceptance:
            kindred = next(iter(self._acceptance.values()), None)
            expected = [0.7] * LONGEST if kindred is None else kindred.rates()
            self._acceptance[key] = RunningRates(expected, weight=1.0)
        return self._acceptance[key]

    def _explore(self, among: Sequence[DraftPlan]) -> None:
        """Begin to explore the plan that was timed least among those that may be worth it."""
        self._rounds_since_exploration, self._explored = 0, None
        worth = _WORTH_EXPLORING * self._speed(self._plan)
        others = [plan for plan in among if plan != self._plan and self._speed(plan) > worth]
        if self._stops_early:
            others = [plan for plan in others if plan == NO_DRAFT or plan.policy != self._plan.policy]
        if others:
            self._explored = min(others, key=lambda plan: (self._latency.count(plan), -self._speed(plan)))
            self._rounds_to_explore = _EXPLORATION

    def _begin_backoff(self) -> str | None:
        """Leave drafts out for a while. Returns the warning, which is given once."""
        self._backoff.begin()
        if self._has_warned:
            return None
        self._has_warned = True
        drafted, alone = self._speed(self._best(self._plans)), self._speed(NO_DRAFT)
        return (
            f"drafting does not pay here: {drafted:.3g} tokens per second with drafts, {alone:.3g} without. Drafts "
            "are left out now and tried again from time to time. This warning is given once."
        )

    def early_stop(self, policy: int) -> tuple[float, list[float]]:
        """The least probability of being accepted so far with which another draft step pays; and for each bin of the
        drafter's probability, how often such a token is accepted."""
        with self._lock:
            worth, rates = _WORTH_AT_FIRST, self._confidence.rates()
            if self._latency.of_round(DraftPlan(1, 1, policy)) is not None:
                speed = max(map(self._speed, (self._plan._replace(policy=policy), NO_DRAFT)))
                worth = speed * self._latency.of_step(policy) / fmean(rates)
            return worth, rates

    def record(self, done: FinishedRound) -> None:
        """Learn from a round."""
        with self._lock:
            self._learn_acceptance(done)
            if done.seconds is not None:
                self._latency.add(_shape(done.plan, done.steps), done.seconds)
            if not done.plan.steps:
                self._backoff.advance(done.accepted + 1)
            elif self._backoff.retrial:
                self._judge_retrial(done)
            if self._rounds_to_explore and done.plan == self._explored:
                self._rounds_to_explore -= 1
            else:
                self._rounds_since_exploration += 1

    def _learn_acceptance(self, done: FinishedRound) -> None:
        if not done.steps:
            return
        # It is not known if the token that ended the text was drafted.
        judged = done.accepted if done.is_last else min(done.accepted + 1, done.steps)
        rates = self._rates(done.plan)
        rates.fade(_FADE)
        for step in range(min(judged, LONGEST)):
            rates.add(step, step < done.accepted)
        if done.confidences:
            self._confidence.fade(_FADE)
            for step, place in enumerate(done.confidences[:judged]):
                self._confidence.add(place, step < done.accepted)
        if not done.is_last:
            self._recent[done.plan.policy].append((done.accepted + 1, done.steps))

    def _judge_retrial(self, done: FinishedRound) -> None:
        self._backoff.retrial -= 1
        if self._backoff.retrial:
            return
        recent = self._recent[done.plan.policy]
        latest = list(recent)[-_EXPLORATION:]
        if self._speed_of(done.plan, latest) > self._speed(NO_DRAFT):
            self._backoff.reset()
            # Rounds before the backoff say that drafting loses.
            recent.clear()
            recent.extend(latest)
            self._rates(done.plan).fade(0.0)
        else:
            self._backoff.begin()


def _shape(plan: DraftPlan, steps: int) -> DraftPlan:
    """The shape of a round in which so many steps of a plan were drafted."""
    is_chain = plan.nodes == plan.steps
    return plan._replace(steps=steps, nodes=steps if is_chain else plan.nodes) if steps else NO_DRAFT


class AutomaticCall:
    """The rounds of one call under automatic drafting. Not shared between threads.

    Args:
        chooser: plans rounds and learns from them.
        stops_early: `goes_on` is to be asked after each token of a chain.
        now: the clock, in seconds (None: `time.perf_counter`).
    """

    def __init__(self, chooser: DraftChooser, stops_early: bool, now: Callable[[], float] | None = None):
        self.chooser, self.stops_early = chooser, stops_early
        self._clock = Clock(now)
        chooser.begin_call()
        self._plan, self._steps, self._began = NO_DRAFT, 0, 0.0
        # None until the target has judged the round.
        self._accepted: int | None = None
        self._is_first, self._is_last, self._is_steady = True, False, False
        # The policy that drafted the round before, None if it drafted nothing.
        self._drafted_with: int | None = None
        self._reach, self._worth = 1.0, 0.0
        self._rates: list[float] = []
        self._confidences: list[int] = []

    def begin_round(self, most: int) -> DraftPlan:
        """Begin a round, which ends the one before. Returns the plan, `NO_DRAFT` if `most` steps are none."""
        now = self._clock()
        if self._accepted is not None:
            self._record(now)
        self._began, self._accepted, self._confidences = now, None, []
        self._plan = self.chooser.choose() if most > 0 else NO_DRAFT
        self._steps = min(most, self._plan.steps)
        # The target reads the prompt in the first round, and a drafter that drafted nothing has to catch up.
        policy = self._plan.policy if self._plan.steps else None
        self._is_steady = not self._is_first and (policy is None or policy == self._drafted_with)
        self._drafted_with, self._is_first = policy, False
        if self.stops_early and self._steps:
            self._reach = 1.0
            self._worth, self._rates = self.chooser.early_stop(self._plan.policy)
        return self._plan

    def goes_on(self, probability: float) -> bool:
        """Whether another token is worth its time after one that the drafter gave this probability."""
        place = min(int(probability * _BINS), _BINS - 1)
        self._confidences.append(place)
        self._reach *= self._rates[place]
        return self._reach > self._worth

    def has_drafted(self, steps: int, is_usual: bool = True) -> None:
        """The draft is there, of so many steps. Unless the round is a usual one, its time says nothing of others."""
        self._steps, self._is_steady = steps, self._is_steady and is_usual

    def end_round(self, accepted: int, is_last: bool = False) -> None:
        """The target has accepted so many drafted tokens, one below the other; `is_last`: the text ends there."""
        self._accepted, self._is_last = accepted, is_last

    def end_call(self) -> None:
        """The call is over, and its last round too."""
        if self._accepted is not None:
            self._record(self._clock())
            self._accepted = None

    def _record(self, now: float) -> None:
        seconds = now - self._began if self._is_steady else None
        plan = self._plan if self._steps else NO_DRAFT
        judged = self._accepted, self._is_last, seconds, tuple(self._confidences[: self._steps])
        self.chooser.record(FinishedRound(plan, self._steps, *judged))


class ChooserPool:
    """The choosers of the settings that were used last. Shareable between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._choosers: OrderedDict[Hashable, tuple[DraftChooser, int]] = OrderedDict()

    def chooser(self, sampling: Hashable, weights_version: int, *setting: Any) -> DraftChooser:
        """The chooser for sampling settings, which acceptance depends on, and the arguments of `DraftChooser`. If the
        version of the drafter's weights changed, drafting is tried again at once."""
        key = (sampling, *setting)
        with self._lock:
            chooser, version = self._choosers.pop(key, None) or (DraftChooser(*setting), weights_version)
            self._choosers[key] = chooser, weights_version
            while len(self._choosers) > _MOST_CHOOSERS:
                self._choosers.popitem(last=False)
        if version != weights_version:
            chooser.renew()
        return chooser

    def forget(self) -> None:
        """Another drafter, policy or target: nothing that was learned holds any more."""
        with self._lock:
            self._choosers.clear()
