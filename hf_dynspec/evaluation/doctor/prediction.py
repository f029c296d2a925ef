"""From calls that were timed to the speed of chains of all lengths.

*Tokens:* whether a draft of the next token is accepted depends on the text before it, and not on where its round began
(when sampling, its probability does). So the verdicts along a text that long chains were drafted for tell what rounds
of shorter chains would have brought. That is exact but for two things: a token that the target chose after a chain
that was accepted as a whole has no verdict, and is given the one that the last draft step's tokens mostly have; and
shortlists that fill with drafts depend on them a little.

*Seconds:* chains of two lengths are timed, and a round of any other is taken to lie on the line through them, bent by
what more rows cost a verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from ...drafting.expected_speed import RoundCosts, break_even_acceptance
from .timing import TimedCall

# Rounds before this one are not like those that follow: the prompt is read in the first, and what policies learn of
# it falls into the second.
_FIRST_STEADY = 2
# Of the median: a round that took longer was interrupted by something else.
_LONGEST_ROUND = 3.0


# Tokens ------------------------------------------------------------------------------------------------------------


def verdicts_of(calls: Sequence[TimedCall], steps: int, drafts_at_once: bool) -> list[list[bool]]:
    """For each token of each text, whether a draft of it is accepted.

    Args:
        calls: drafted chains.
        steps: their length.
        drafts_at_once: the round that reads the prompt drafts too.
    """
    # The share of tokens without a verdict that would have been rejected, evenly spread.
    rejected = 1 - acceptance_by_step(calls, steps, drafts_at_once)[-1]
    owed = 0.5
    texts = []
    for call in calls:
        verdicts: list[bool] = []
        for brought, drafted in zip(call.tokens, drafted_steps(call, steps, drafts_at_once), strict=True):
            was_all_accepted = 0 < drafted < brought
            owed += rejected * was_all_accepted
            verdicts += [True] * (brought - 1) + [was_all_accepted and owed < 1]
            owed -= owed >= 1
        texts.append(verdicts)
    return texts


def drafted_steps(call: TimedCall, steps: int, drafts_at_once: bool) -> list[int]:
    """How many draft steps each round of a call had: no more than the text had room for.

    Args:
        call: drafted chains or trees.
        steps: those of a round with room.
        drafts_at_once: the round that reads the prompt drafts too.
    """
    counts, before = [], 0
    for number, brought in enumerate(call.tokens):
        counts.append(min(steps, call.wanted - before - 1) if number or drafts_at_once else 0)
        before += brought
    return counts


def rounds_along(verdicts: Sequence[bool], steps: int, drafts_at_once: bool) -> list[int]:
    """The draft steps of each round that a text takes with chains of a length.

    Args:
        verdicts: see `verdicts_of`.
        steps: the length.
        drafts_at_once: the round that reads the prompt drafts too.
    """
    rounds: list[int] = []
    place = 0
    while place < len(verdicts):
        drafted = min(steps, len(verdicts) - place - 1) if rounds or drafts_at_once else 0
        rounds.append(drafted)
        end = place + drafted
        while place < end and verdicts[place]:
            place += 1
        place += 1
    return rounds


def acceptance_by_step(calls: Sequence[TimedCall], steps: int, drafts_at_once: bool) -> tuple[float, ...]:
    """For each draft step, the share of drafts accepted where that of the step before was; 0 where none ever was."""
    tried, accepted = [0] * steps, [0] * steps
    for call in calls:
        for brought, drafted in zip(call.tokens, drafted_steps(call, steps, drafts_at_once), strict=True):
            for step in range(min(drafted, brought)):
                tried[step] += 1
                accepted[step] += step < brought - 1
    return tuple(count / total if total else 0.0 for count, total in zip(accepted, tried, strict=True))


# Seconds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How fast calls went.

    Args:
        round_seconds: mean seconds of a round in the middle of a text.
        start_seconds: mean seconds of a call without its rounds after the first: the prompt, and what policies learn
            of it.
    """

    round_seconds: float
    start_seconds: float


def pace_of(calls: Sequence[TimedCall], steps: int = 0, drafts_at_once: bool = False) -> Pace:
    """The pace of calls.

    Args:
        calls: at least one.
        steps: draft steps of a round that the end of the text did not shorten; 0 for plain generation.
        drafts_at_once: the round that reads the prompt drafts too.
    """
    rounds = [seconds for call in calls for seconds in _steady_rounds(call, steps, drafts_at_once)]
    # Where texts are so short that no round is steady, all that are known to count.
    rounds = rounds or [call.seconds / len(call.ends) for call in calls]
    longest = _LONGEST_ROUND * median(rounds)
    seconds = fmean(one for one in rounds if one <= longest)
    # A start holds the first round, however short what followed it was.
    start = max(fmean(call.ends[0] for call in calls), fmean(_start(call, seconds) for call in calls))
    return Pace(seconds, start)


def _steady_rounds(call: TimedCall, steps: int, drafts_at_once: bool) -> list[float]:
    drafted = drafted_steps(call, steps, drafts_at_once)
    return [
        call.ends[number] - call.ends[number - 1]
        for number in range(_FIRST_STEADY, len(call.ends))
        if drafted[number] == steps or not steps
    ]


def _start(call: TimedCall, round_seconds: float) -> float:
    """Seconds of a call without the rounds after the first, of which the second is taken for a steady one."""
    second = min(1, len(call.ends) - 1)
    return call.seconds - (call.ends[-1] - call.ends[second]) - second * round_seconds


@dataclass(frozen=True)
class Course:
    """What texts are expected to take, a call each.

    Args:
        seconds: mean seconds of a call, the prompt included.
        rounds: mean rounds.
        tokens: mean new tokens.
    """

    seconds: float
    rounds: float
    tokens: float

    @property
    def tokens_per_round(self) -> float:
        """The acceptance length."""
        return self.tokens / self.rounds


@dataclass(frozen=True)
class ChainCosts:
    """What chains of one policy cost, of whatever length.

    Args:
        costs: of the parts of a round.
        starts: `Pace.start_seconds` of the shorter chains that were timed, and of the longer ones.
        lengths: how long both were.
    """

    costs: RoundCosts
    starts: tuple[float, float]
    lengths: tuple[int, int]

    def start_seconds(self, steps: int) -> float:
        """`Pace.start_seconds` of chains of that length."""
        (short, long), (shorter, longer) = self.starts, self.lengths
        share = min(1.0, max(0.0, (steps - shorter) / (longer - shorter)))
        return short + share * (long - short)

    def course(
        self, steps: int, texts: Sequence[Sequence[bool]], lengths: Sequence[int], drafts_at_once: bool
    ) -> Course:
        """What texts take with chains of that length.

        Args:
            steps: the length.
            texts: the verdicts along them, see `verdicts_of`.
            lengths: how long each text becomes, of which the verdicts may be a first part.
            drafts_at_once: the round that reads the prompt drafts too.
        """
        rounds, later = [], []
        for verdicts, length in zip(texts, lengths, strict=True):
            drafted = rounds_along(verdicts, steps, drafts_at_once)
            longer = length / len(verdicts)
            rounds.append(len(drafted) * longer)
            later.append(sum(map(self.costs.of_round, drafted[1:])) * longer)
        return Course(self.start_seconds(steps) + fmean(later), fmean(rounds), fmean(lengths))

    def without_head(self, share: float) -> "ChainCosts":
        """The same with draft steps that are shorter by that share."""
        return replace(self, costs=replace(self.costs, draft_step=self.costs.draft_step * (1 - share)))

    def break_even(self, plain_seconds: float) -> float | None:
        """See `break_even_acceptance`."""
        return break_even_acceptance(self.costs, self.lengths[1], plain_seconds)


def chain_costs(short: Pace, long: Pace, lengths: tuple[int, int], verification: RoundCosts) -> ChainCosts:
    """The costs that chains of two lengths had. No part takes less than no time, whatever disturbed the clock.

    Args:
        short: pace of the shorter chains.
        long: pace of the longer ones.
        lengths: how long both were.
        verification: has what forwards of the target cost.
    """
    shorter, longer = lengths

    def step_and_other(scale: float) -> tuple[float, float]:
        """Seconds of a draft step and of what is left of a round, if forwards take that share of what they took."""
        rest = [
            pace.round_seconds - scale * verification.of_verification(1 + steps)
            for pace, steps in zip((short, long), lengths, strict=True)
        ]
        step = max(0.0, (rest[1] - rest[0]) / (longer - shorter))
        return step, fmean([rest[0] - shorter * step, rest[1] - longer * step])

    scale, (step, other) = 1.0, step_and_other(1.0)
    if other < 0:
        # Forwards took longer when they were timed than they do in a round.
        _, without_forwards = step_and_other(0.0)
        scale = max(0.0, without_forwards) / (without_forwards - other) if without_forwards > other else 0.0
        step, other = step_and_other(scale)
        if other < 0:
            step, other = (long.round_seconds - scale * verification.of_verification(1 + longer)) / longer, 0.0
    scaled = tuple(scale * seconds for seconds in verification.verification)
    costs = replace(verification, verification=scaled, draft_step=max(0.0, step), other=other)
    return ChainCosts(costs, (short.start_seconds, long.start_seconds), lengths)
