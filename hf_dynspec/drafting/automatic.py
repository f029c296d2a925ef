"""How many tokens to draft, and with which policy, chosen round by round: what is expected to bring the most tokens
per second, by what rounds have taken and what the target has accepted so far (DynaSpec, equation 2).

Nothing here waits for a device. A round is timed by the host's clock from its beginning to the next one's, and between
the two lies the one wait that every round has, so that on a GPU too it is the time of a whole round.
"""

import threading
from collections.abc import Sequence

from ..errors import warn_user
from .draft_shapes import ALONE, LONGEST, DraftShape
from .early_ends import Acceptances, EarlyEnd
from .expected_rounds import ExpectedRounds, FinishedRound
from .readings import Readings
from .rests import Rests
from .side_by_side import SideBySide
from .trials import Trials

# The most rounds that earlier calls count for in a new one.
_ROUNDS_OF_EARLIER_CALLS = 8

# What is drafted, and with which policy, is settled anew after so many rounds.
_ROUNDS_PER_CHOICE = 8
# Another policy than before is taken where it promises so many times as much: less may be chance, and a policy that
# was idle has to catch up.
_CLEARLY_BETTER = 1.03

# Rounds of the given shape that are timed, where only the policy is to be chosen, before another policy is tried.
_TIMED_AT_FIRST = 2
# Rounds with drafts that are timed before it is believed what they take, where drafting seems to lose: one may be a
# stall; and before a rest is as long as pays for one of them: two may be, which the next one shows.
_TIMED_TO_BELIEVE, _TIMED_BEFORE_LONG_REST = 2, 3
# Rounds of the target alone that are timed before drafting may rest.
_TIMED_BEFORE_REST = 8
# Rounds with drafts that are timed before a call waits for what they gain.
_TIMED_BEFORE_WAITING = 8
# Before drafting rests it is compared with not drafting side by side, where it promises at least such a part of what
# the target alone does, and so many tokens in a round: where times may be what is wrong.
_NEARLY_PAYS, _TOKENS_OF_GOOD_DRAFTS = 0.5, 1.5
# What all rounds before a rest, and before a change, count for.
_ROUNDS_BEFORE_REST, _ROUNDS_BEFORE_CHANGE = 4, 1
# Seconds in which no call begins and no round ends, after which drafting that rests is tried again.
_FORGETS_AFTER = 600.0


class AutomaticDrafting:
    """What was learnt of drafting under one setting, and the choice that follows from it. Shareable between threads.

    At first a few shapes are tried. Then the one that promises the most tokens per second is drafted, and now and then
    another policy, or nothing, to see. Where the target alone promises more than every shape, drafting rests, with a
    warning when that happens first; it is tried again at intervals that grow as long as it loses, and begin short
    where it has gained before.

    Args:
        shapes: those to choose from besides `ALONE`, of the policy 0.
        policies: how many there are to choose from. All of them draft each of the shapes.
        ends_early: the shape is a chain, which ends before a token that is not worth its time (`EarlyEnd`).
    """

    def __init__(self, shapes: Sequence[DraftShape], policies: int = 1, ends_early: bool = False):
        self._lock = threading.Lock()
        self._expected = ExpectedRounds(shapes, policies, ends_early)
        self._policies = policies
        self._shapes = tuple(shape._replace(policy=policy) for policy in range(policies) for shape in shapes)
        self._trials = Trials(tuple(shapes), policies)
        # What is drafted but for trials, the tokens per second that it promises, and the rounds to settle it anew in.
        self._choice, self._promised = self._shapes[0], 0.0
        self._rounds = self._choose_again_at = 0
        # Rounds that nothing was learnt of yet: as long as they change no choice they wait for the next one. Together
        # they take much less time, as what is learnt and how is not in the processor's caches after a round.
        self._new: list[FinishedRound] = []
        # A shape, and what its drafts end by until more is learnt: how likely tokens are accepted, and how likely a
        # draft has to be to go on.
        self._end: tuple[DraftShape, Acceptances, list[float]] | None = None
        # The policy that drafts but for trials.
        self._policy = 0
        self._ended = -float("inf")
        self._rests = Rests()
        self._readings = Readings()
        # That goes on before a rest, or when drafting is tried again.
        self._comparison: SideBySide | None = None
        # What is still to be said, and whether it was said.
        self._warning: str | None = None
        self._has_warned = False

    # A call ---------------------------------------------------------------------------------------------------------

    def begin_call(self, now: float) -> None:
        """A call begins: what was learnt of other texts counts for less in it.

        Args:
            now: the time in seconds.
        """
        with self._lock:
            self._learn()
            # How likely a token is by what is known of it, other texts tell as well.
            self._expected.fade_acceptance_to(_ROUNDS_OF_EARLIER_CALLS)
            self._rests.begin_call()
            if not self._rests.have_ended and now - self._ended > _FORGETS_AFTER:
                self._expected.fade_to(_ROUNDS_BEFORE_CHANGE)
                self._rests.end(is_new=True)
                self._comparison = None
            self._ended = now

    def renew(self) -> None:
        """Weights are others now: drafting is tried again soon, and what was accepted hardly counts any more."""
        with self._lock:
            self._learn()
            self._expected.fade_to(_ROUNDS_BEFORE_CHANGE)
            self._rests.hasten()

    # A round --------------------------------------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted now."""
        return self._rests.is_resting

    @property
    def reads_features(self) -> bool:
        """Whether a head that reads the target's features has to be given those of the tokens that come now."""
        return self._rests.reads_features

    @property
    def alone(self) -> float:
        """Seconds that the target alone takes for a token; 0 as long as nothing was timed."""
        with self._lock:
            return self._expected.seconds(ALONE) if self._expected.count(ALONE) else 0.0

    def worth_after(self, unread: int, room: int) -> float:
        """After how many tokens of a call it is worth that the drafter reads the text, see `Readings.worth_after`; 0
        also where that cannot be told yet, or drafting is being tried.

        Args:
            unread: tokens that the drafter has not read.
            room: tokens that the call still generates at most.
        """
        with self._lock:
            if not self._expected.count(ALONE) or self._comparison is not None or not self._rests.have_ended:
                return 0
            # As long as little is known of it, all that there is to gain.
            gain = self._expected.seconds(ALONE)
            if self._expected.timed_drafts >= _TIMED_BEFORE_WAITING:
                tokens, seconds = self._expected.tokens_and_seconds(self._best_drafted())
                gain -= seconds / tokens
            # Where there is none drafting rests, and knows by itself when it is tried again.
            return self._readings.worth_after(unread, room, gain) if gain > 0 else 0

    def read(self, unread: int, steps: int, seconds: float) -> None:
        """The drafter has read so many tokens and drafted so many steps, all in so many seconds."""
        with self._lock:
            self._readings.add(unread, steps, seconds)

    def end_call(self, tokens: int, limit: int) -> None:
        """A call has generated so many tokens of those that it could have generated."""
        with self._lock:
            self._readings.end_call(tokens, limit)

    def choose(self, fixed: DraftShape | None = None, room: int = LONGEST) -> DraftShape:
        """What to draft in the next round, and with which policy.

        Args:
            fixed: the shape to choose a policy for (None: the shape is to be chosen too, `ALONE` among them).
            room: the most steps of a draft of which it would be seen how long it takes.
        """
        with self._lock:
            shape = self._choose(room) if fixed is None else self._choose_policy(fixed)
            warning, self._warning = self._warning, None
        if warning is not None:
            warn_user(warning)
        return shape

    def _choose_policy(self, fixed: DraftShape) -> DraftShape:
        own = fixed._replace(policy=self._policy)
        # Where texts have no room for it, shorter ones are all that is ever timed.
        timed = [self._expected.drafted(own, steps) for steps in range(1, own.steps + 1)]
        if sum(map(self._expected.count, timed)) < _TIMED_AT_FIRST:
            return own
        among = [fixed._replace(policy=policy) for policy in range(self._policies)]
        return self._best_or_trial(among)._replace(steps=fixed.steps, nodes=fixed.nodes)

    def _choose(self, room: int) -> DraftShape:
        if self._comparison is not None and self._comparison.is_over:
            # By rounds that tell nothing, as the last ones of texts do: where another is recorded it ends itself.
            self._end_comparison()
        if self._comparison is not None:
            return self._comparison.choose()
        if self.is_resting:
            return ALONE
        if not self._rests.have_ended:
            return self._compare()
        expected = self._expected
        first = self._trials.first(expected.count, expected.seconds, expected.tokens, room)
        return first or self._best_or_trial((ALONE, *self._shapes))

    def early_end(self, shape: DraftShape) -> EarlyEnd | None:
        """What ends the draft of the next round, with what was chosen for it; None where drafts are as long as was
        chosen."""
        expected = self._expected
        if not expected.tells_tokens_apart:
            return None
        with self._lock:
            if self._end is None or self._end[0] != shape:
                least = [0.0] * shape.steps
                if expected.ends_early(shape):
                    least = expected.least_reaches(shape.policy, max(self._promised, 1 / expected.seconds(ALONE)))
                self._end = shape, expected.acceptances(), least
            return EarlyEnd(*self._end[1:])

    def _best_or_trial(self, among: Sequence[DraftShape]) -> DraftShape:
        """What promises the most, settled anew every few rounds; or now and then another one, to see."""
        if (trial := self._trials.go_on()) is not None:
            return trial
        if self._rounds + len(self._new) < self._choose_again_at:
            return self._choice
        speeds = self._expected.speeds(among)
        self._choice = self._best_of(speeds)
        self._promised = speeds[self._choice]
        if self._choice == ALONE and self._expected.count(ALONE) >= _TIMED_BEFORE_REST:
            if self._may_pay():
                return self._compare()
            self._begin_rest()
            return ALONE
        tokens, _ = self._expected.tokens_and_seconds(self._choice)
        if (trial := self._trials.begin(speeds, self._choice, tokens)) is not None:
            return trial
        self._choose_again_at = self._rounds + _ROUNDS_PER_CHOICE
        return self._choice

    def _may_pay(self) -> bool:
        """Whether drafting, which seems to lose, may pay if rounds take somewhat else than they seemed to."""
        tokens, seconds = self._expected.tokens_and_seconds(self._best_drafted())
        return (
            tokens > _TOKENS_OF_GOOD_DRAFTS and tokens / seconds > _NEARLY_PAYS * self._promised and self._could_pay()
        )

    def _could_pay(self) -> bool:
        """Whether drafting would pay if all of it were accepted."""
        return any((1 + shape.steps) / self._expected.seconds(shape) > self._promised for shape in self._shapes)

    @property
    def _is_first_of_trial(self) -> bool:
        """Whether the round is the first with which drafting is tried again after a rest."""
        return self._comparison is not None and self._comparison.turns == 1 and not self._rests.have_ended

    def _compare(self) -> DraftShape:
        """Begin to compare drafting with not drafting. Returns what is drafted first."""
        # Rounds before it are none of its own.
        self._learn()
        self._comparison = SideBySide(self._best_drafted())
        self._rests.try_again()
        self._promised = 1 / self._expected.seconds(ALONE)
        return self._comparison.choose()

    def _begin_rest(self) -> None:
        """Generate without drafts until it is worth a trial."""
        if not self._has_warned:
            self._warning, self._has_warned = self._what_is_lost(), True
        alone = self._expected.seconds(ALONE)
        _, drafted = self._expected.tokens_and_seconds(self._best_drafted())
        lost = drafted - alone
        is_short = self._expected.timed_drafts < _TIMED_BEFORE_LONG_REST
        self._rests.begin(min(lost, alone) if is_short else lost, alone)
        # What comes later counts from its first round on.
        self._expected.fade_to(_ROUNDS_BEFORE_REST)

    def _best_of(self, speeds: dict[DraftShape, float]) -> DraftShape:
        """What promises the most, with the policy of before unless another one is clearly better."""
        best = max(speeds, key=speeds.get)
        if best == ALONE:
            return best
        own = max((shape for shape in speeds if shape.steps and shape.policy == self._policy), key=speeds.get)
        if speeds[best] < _CLEARLY_BETTER * speeds[own]:
            best = own
        if best.policy != self._policy:
            # What became of another one's tokens tells less of its own.
            self._expected.fade_confidence_to(_ROUNDS_OF_EARLIER_CALLS)
        self._policy = best.policy
        return best

    def _best_drafted(self) -> DraftShape:
        speeds = self._expected.speeds(self._shapes)
        return max(speeds, key=speeds.get)

    def record(self, round: FinishedRound, ended: float) -> None:
        """A round is over.

        Args:
            ended: the time at which the next one began.
        """
        with self._lock:
            self._ended = ended
            self._new.append(round)
            is_settled = self._comparison is None and self._rests.have_ended and round.shape == self._choice
            if not is_settled or self._rounds + len(self._new) >= self._choose_again_at:
                self._learn()

    def _learn(self) -> None:
        """Learn what there is to learn of rounds that are over."""
        new, self._new, self._end = self._new, [], None
        for round in new:
            self._learn_from(round)

    def _learn_from(self, round: FinishedRound) -> None:
        shape, accepted, seconds = round.shape, round.accepted, round.seconds
        drafted = self._expected.drafted(shape, round.steps)
        self._rounds += 1
        self._expected.add(round)
        if self._is_first_of_trial and self._expected.is_contradicted_by(round):
            self._expected.begin_again(round)
            self._comparison.forget_drafts()
            self._rests.forget()
        if round.is_usual and self._comparison is not None:
            self._comparison.add(drafted, seconds)
        cost = self._cost(drafted, seconds, round.is_usual)
        if shape != ALONE:
            self._gain(accepted, cost)
        if self._comparison is not None:
            self._record_comparison(shape, accepted, cost)
        elif not self._rests.have_ended:
            self._rests.add()
        elif round.is_waiting:
            self._readings.wait(seconds if round.is_usual else 0.0)
        else:
            self._trials.record(shape, seconds, self._lost_by(shape, drafted, cost))

    def _gain(self, accepted: int, cost: float) -> None:
        """A round with drafts has cost so many seconds."""
        if self._expected.count(ALONE):
            self._rests.gain((accepted + 1) * self._expected.seconds(ALONE) - cost)

    def _lost_by(self, shape: DraftShape, drafted: DraftShape, cost: float) -> float:
        """How much longer a round of a trial took than what is chosen would have taken for as many tokens."""
        if shape == self._choice or not self._promised:
            return 0.0
        tokens, _ = self._expected.tokens_and_seconds(shape if self._expected.ends_early(shape) else drafted)
        return cost - tokens / self._promised

    def _cost(self, drafted: DraftShape, seconds: float, is_usual: bool) -> float:
        """What a round is taken to have cost that took so long: a stall is not its fault, unless it read more than
        rounds do."""
        return self._expected.seconds(drafted) if is_usual else seconds

    def _record_comparison(self, shape: DraftShape, accepted: int, cost: float) -> None:
        """A round is over while drafting and not drafting are compared."""
        alone = self._expected.seconds(ALONE)
        if shape != ALONE:
            self._rests.lose(cost - (accepted + 1) * alone)
        is_over = self._comparison.is_over
        if is_over:
            self._expected.lengthen_alone(self._comparison.alone_is_longer_by(self._expected.typical_seconds))
        elif self._rests.have_ended or shape == ALONE:
            return
        else:
            # Times decide nothing where next to none of the tokens are accepted. Where some are, and hardly any draft
            # was timed but for stalls, a trial has a second round, which is timed.
            is_hardly_timed = self._expected.timed_drafts < _TIMED_TO_BELIEVE
            may_err = self._is_first_of_trial and is_hardly_timed
            is_over = not self._may_pay() and not (accepted and (may_err or self._could_pay()))
        if is_over or self._pays():
            self._end_comparison()

    def _pays(self) -> bool:
        """Whether drafting promises more than the target alone."""
        speeds = self._expected.speeds((ALONE, *self._shapes))
        return max(speeds, key=speeds.get) != ALONE

    def _end_comparison(self) -> None:
        """Draft on where that pays by what was seen, and rest where it does not."""
        self._comparison = None
        if self._pays():
            self._rests.end()
        elif self._rests.have_ended:
            self._begin_rest()
        else:
            self._rests.go_on(self._expected.seconds(ALONE))
            self._expected.fade_to(_ROUNDS_BEFORE_REST)

    def _what_is_lost(self) -> str:
        """The warning that drafting rests."""
        alone = self._expected.seconds(ALONE)
        drafted = 1 / max(self._expected.speeds(self._shapes).values())
        return (
            f"drafting does not pay here and rests: a token takes {1e3 * alone:.3g} ms without it, "
            f"and about {1e3 * drafted:.3g} ms with the best drafts. It is tried again from time to time, and "
            "when weights, policy or drafter change; this is said once."
        )
