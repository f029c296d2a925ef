"""The expected speed of drafting: DynaSpec's equations 1 and 2, with an acceptance for each draft step and measured
costs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round on one machine.

    Attributes:
        draft_step: one draft step, `T_D` of the paper.
        verification: a forward of the target over 1, 2, … tokens: the last verified one and the candidates, `T_V`.
        other: the rest of a round that drafts.
        other_alone: the rest of a round that does not.
    """

    draft_step: float
    verification: tuple[float, ...]
    other: float = 0.0
    other_alone: float = 0.0

    def of_round(self, steps: int) -> float:
        """Seconds of a round of `steps` draft steps; 0 if nothing is drafted."""
        return steps * self.draft_step + self.verification[steps] + (self.other if steps else self.other_alone)


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


def acceptance_for(tokens: float, steps: int) -> float | None:
    """The acceptance, equal at all draft steps, at which a round of `steps` draft steps has an expected number of
    tokens; None if not even an acceptance of 1 is enough."""
    if tokens > steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens([middle], steps) >= tokens else (middle, high)
    return high


def break_even_acceptance(costs: RoundCosts, longest: int, plain_seconds: float) -> float | None:
    """The least acceptance, equal at all draft steps, at which some chain is as fast as plain generation; None if not
    even an acceptance of 1 is enough.

    Args:
        costs: the costs of a round.
        longest: the most tokens of a chain.
        plain_seconds: seconds of one token of plain generation.
    """
    found = (acceptance_for(costs.of_round(steps) / plain_seconds, steps) for steps in range(1, longest + 1))
    return min((one for one in found if one is not None), default=None)
