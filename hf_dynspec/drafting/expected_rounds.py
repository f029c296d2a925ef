"""What rounds of each shape are expected to bring and to take, by those that were."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from .draft_shapes import ALONE, LONGEST, DraftShape, are_chains
from .early_ends import Acceptances, EarlyEnd, RunningConfidence
from .round_times import RoundTimes
from .running_acceptance import RunningAcceptance

# Drafted tokens that a round counts for, where it is tokens that are counted.
_TOKENS_PER_ROUND = 3
# The part of what is expected of a round below which it is no chance that it took less.
_CLEARLY_LESS = 0.75


class FinishedRound(NamedTuple):
    """What became of a round.

    Attributes:
        shape: what was to be drafted.
        steps: how many steps were: fewer where a chain ended early, or there was no room.
        accepted: how many of the tokens were accepted, one below the other.
        is_known: whether it is known what the target says of the draft: not where a text ends within it.
        end: what ended the draft, where drafts end early.
        seconds: how long the round took.
        is_usual: it read no more than rounds do, and so has taken as long as another one would.
        is_waiting: nothing was drafted, as it is not worth it yet that the drafter reads the text.
        is_timed: it was timed as a whole, and not in part because the target read the prompt in it.
        drafting_seconds: how much of its time drafting took, as far as the host knows.
    """

    shape: DraftShape
    steps: int
    accepted: int
    is_known: bool
    end: EarlyEnd | None
    seconds: float
    is_usual: bool
    is_waiting: bool
    is_timed: bool
    drafting_seconds: float


class ExpectedRounds:
    """The times and acceptances of rounds under one setting, and what follows from them for those to come. Not shared
    between threads.

    Args:
        shapes: those that are drafted, of the policy 0.
        policies: how many there are. All of them draft each of the shapes.
        ends_early: the shape is a chain, which ends before a token that is not worth its time (`EarlyEnd`).
    """

    def __init__(self, shapes: Sequence[DraftShape], policies: int, ends_early: bool):
        self._policies = policies
        self._times = RoundTimes()
        # Some of the shapes of trees look like a chain.
        self._drafts_chains = are_chains(shapes)
        sizes = set() if self._drafts_chains else {shape.nodes for shape in shapes}
        self._acceptance = RunningAcceptance(sizes, policies)
        self._confidence = RunningConfidence() if ends_early else None
        # Of each policy the chains that a longest one may end early as.
        self._chains = [
            [DraftShape(steps, steps, policy) for steps in range(1, LONGEST + 1)] for policy in range(policies)
        ]

    # What was --------------------------------------------------------------------------------------------------------

    def add(self, round: FinishedRound) -> None:
        """A round is over."""
        drafted = self.drafted(round.shape, round.steps)
        if round.shape != ALONE and round.is_known:
            self._acceptance.add(drafted, round.accepted)
            if round.end is not None:
                self._confidence.add(round.end.tokens, round.accepted)
        if round.is_usual:
            self._times.add(self._features(drafted), round.seconds, round.drafting_seconds)

    def is_contradicted_by(self, round: FinishedRound) -> bool:
        """Whether a round took clearly less than those that draft no more than it, although it read more than they do:
        so they have met stalls, or a machine that was much slower."""
        if round.is_usual or not round.is_timed:
            return False
        drafted = self._features(self.drafted(round.shape, round.steps))
        return self._times.at_usual_pace(round.seconds) < _CLEARLY_LESS * self._times.longest_within(drafted)

    def begin_again(self, round: FinishedRound) -> None:
        """Forget all that is known of how long rounds with drafts take, but for this one, whatever it read."""
        self._times.forget_drafts()
        drafted = self._features(self.drafted(round.shape, round.steps))
        self._times.add(drafted, round.seconds, round.drafting_seconds)

    def fade_to(self, rounds: int) -> None:
        """Let what was accepted before count for no more than so many rounds."""
        self.fade_acceptance_to(rounds)
        self.fade_confidence_to(rounds)

    def fade_acceptance_to(self, rounds: int) -> None:
        """The same of how much was accepted of drafts, not of tokens by what is known of them."""
        self._acceptance.fade_to(rounds)

    def fade_confidence_to(self, rounds: int) -> None:
        """The same of tokens by what is known of them."""
        if self._confidence is not None:
            self._confidence.fade_to(_TOKENS_PER_ROUND * rounds)

    def lengthen_alone(self, factor: float) -> None:
        """Take rounds of the target alone to be so many times as long as they seemed."""
        self._times.scale(self._features(ALONE), factor)

    def count(self, shape: DraftShape) -> int:
        """How many timed rounds of a shape are remembered."""
        return self._times.count(self._features(shape))

    @property
    def timed_drafts(self) -> int:
        """How many timed rounds with a draft, of whichever shape, are remembered."""
        return self._times.drafted

    def drafted(self, shape: DraftShape, steps: int) -> DraftShape:
        """What a round drafted of a shape that had so many steps."""
        return shape._replace(steps=steps, nodes=steps if self._drafts_chains else shape.nodes)

    # What is to be expected ------------------------------------------------------------------------------------------

    def seconds(self, shape: DraftShape) -> float:
        """How long a round takes that drafts just this. Some round must have been timed."""
        return self._times.expected(self._features(shape))

    def typical_seconds(self, shape: DraftShape) -> float:
        """How long rounds took that drafted just this. There must have been some."""
        return self._times.typical(self._features(shape))

    def tokens(self, shape: DraftShape) -> float:
        """What a round brings that drafts just this."""
        return self._acceptance.expected_tokens(shape)

    def tokens_and_seconds(self, shape: DraftShape) -> tuple[float, float]:
        """What a round is expected to bring, and to take. One that ends early brings at least what the best length
        does."""
        lengths = self._chains[shape.policy] if self.ends_early(shape) else [shape]
        expected = ((self.tokens(one), self.seconds(one)) for one in lengths)
        return max(expected, key=lambda of_length: of_length[0] / of_length[1])

    def speeds(self, among: Iterable[DraftShape]) -> dict[DraftShape, float]:
        """Tokens per second to expect of these shapes."""
        expected = {shape: self.tokens_and_seconds(shape) for shape in among}
        return {shape: tokens / seconds for shape, (tokens, seconds) in expected.items()}

    def ends_early(self, shape: DraftShape) -> bool:
        """Whether drafts of this shape end where another token is not worth its time."""
        return self._confidence is not None and shape.steps == LONGEST

    @property
    def tells_tokens_apart(self) -> bool:
        """Whether drafts may end early, by what is known of their tokens."""
        return self._confidence is not None

    def acceptances(self) -> Acceptances:
        """How likely tokens are accepted by what is known of them, where they are told apart."""
        return self._confidence.acceptances()

    def least_reaches(self, policy: int, speed: float) -> list[float]:
        """For each number of drafted tokens how likely all of them have to be accepted for more to be worth their
        time: that those bring as many tokens as that time does otherwise.

        Times do not grow evenly: where one more costs much, as the target goes through its weights once more for it,
        several more may still be worth theirs.

        Args:
            policy: the one that drafts.
            speed: the tokens per second that there are otherwise.
        """
        # Of a token that is still to be drafted, where those before it were accepted.
        acceptance = self._confidence.mean_acceptance()
        seconds = list(map(self.seconds, self._chains[policy]))
        tokens = list(accumulate(acceptance**more for more in range(1, LONGEST)))
        least = [
            speed * min((later - now) / more for later, more in zip(seconds[step:], tokens, strict=False))
            for step, now in enumerate(seconds[:-1], start=1)
        ]
        return [*least, inf]

    def _features(self, shape: DraftShape) -> tuple[float, ...]:
        """What the time of a round depends on: draft steps, nodes where there may be more, and by how much a step of
        its policy is longer than one of the first policy."""
        sizes = shape[:1] if self._drafts_chains else shape[:2]
        if self._policies == 1:
            return sizes
        longer = [0] * (self._policies - 1)
        if shape.policy:
            longer[shape.policy - 1] = shape.steps
        return (*sizes, *longer)
