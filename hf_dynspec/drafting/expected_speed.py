"""The expected speed of drafting: DynaSpec's equations 1 and 2, with an acceptance for each draft step and measured
costs."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """The seconds that the parts of a round take on one machine.

    Attributes:
        draft_step: one draft step, `T_D` of the paper.
        verified_rows: ascending numbers of tokens that a measured forward of the target scored: the candidates and the
            last verified token. The first is 1.
        verification: seconds of such a forward, one for each of `verified_rows`: `T_V`.
        other: the rest of a round that drafts.
        other_alone: the rest of a round that does not.
    """

    draft_step: float
    verified_rows: tuple[int, ...]
    verification: tuple[float, ...]
    other: float = 0.0
    other_alone: float = 0.0

    def of_verification(self, rows: int) -> float:
        """Seconds of a forward of the target over `rows` tokens, by linear interpolation. Beyond the measured ones the
        last line goes on, unless it falls."""
        if len(self.verified_rows) == 1:
            return self.verification[0]
        right = min(max(bisect_left(self.verified_rows, rows), 1), len(self.verified_rows) - 1)
        fewer, more = self.verified_rows[right - 1 : right + 1]
        seconds, seconds_of_more = self.verification[right - 1 : right + 1]
        if rows > more and seconds_of_more < seconds:
            return seconds_of_more
        return seconds + (seconds_of_more - seconds) * (rows - fewer) / (more - fewer)

    def of_round(self, steps: int, candidates: int | None = None) -> float:
        """Seconds of a round.

        Args:
            steps: draft steps; 0 if nothing is drafted.
            candidates: drafted tokens (None: one for each step).
        """
        rows = 1 + (steps if candidates is None else candidates)
        return steps * self.draft_step + self.of_verification(rows) + (self.other if steps else self.other_alone)


def expected_tokens(acceptance: Sequence[float], steps: int) -> float:
    """The expected number of tokens of a round with `steps` draft steps, the target's own token included: `Ω`.

    Args:
        acceptance: for each draft step, the probability that its token is accepted if that of the step before was. The
            last entry holds for all later steps.
    """
    tokens = reached = 1.0
    for step in range(steps):
        reached *= acceptance[min(step, len(acceptance) - 1)]
        tokens += reached
    return tokens


def expected_speed(acceptance: Sequence[float], costs: RoundCosts, steps: int) -> float:
    """Expected tokens per second with chains of `steps` tokens; 0 is the target alone."""
    return expected_tokens(acceptance, steps) / costs.of_round(steps)


def best_chain_length(acceptance: Sequence[float], costs: RoundCosts, longest: int) -> int:
    """The number of draft tokens, up to `longest`, with the highest expected speed; 0 if drafting does not pay."""
    return max(range(longest + 1), key=lambda steps: expected_speed(acceptance, costs, steps))


def break_even_acceptance(costs: RoundCosts, longest: int, plain_seconds: float) -> float | None:
    """The acceptance, equal at all draft steps, at which the best chain is as fast as plain generation; None if not
    even an acceptance of 1 is enough.

    Args:
        costs: the costs of a round.
        longest: the most tokens of a chain.
        plain_seconds: seconds of one token of plain generation.
    """

    def is_as_fast(acceptance: float) -> bool:
        speeds = (expected_speed([acceptance], costs, steps) for steps in range(1, longest + 1))
        return max(speeds) * plain_seconds >= 1

    if not is_as_fast(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_as_fast(middle) else (middle, high)
    return high
