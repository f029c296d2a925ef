"""Where a chain ends early: before a token that would cost more time than it is likely to save, by how probable the
drafter found those before it, and by what the text says of them."""

from collections.abc import Sequence
from math import frexp
from typing import NamedTuple

from .recurrences import Recurrence

# Ranges that probabilities are told apart by, each with half the odds of the one before it, from over 32 to 1 down to
# under 1 to 32: some drafters are sure of most of their tokens, and others find all of them improbable.
_RANGES = 12
# How likely a token is accepted before anything is known: its probability to this power, as drafters are right more
# often than they are sure; but where the text says something of it, this. And how many tokens a guess counts for.
_POWER, _TOKENS_OF_GUESS = 0.3, 3
_GUESSES_OF_RECURRENCES = {Recurrence.SAME: 0.9, Recurrence.OTHER: 0.4}
# Rounds in which what was seen is forgotten by half: what is seen later counts for so much more. Numbers are made
# small again before a token counts for more than the second one.
_HALF_LIFE, _LARGEST_WEIGHT = 96, 1e9


class DraftedToken(NamedTuple):
    """What is known of a drafted token before the target has spoken: how probable the drafter found it, and what the
    text says of it."""

    probability: float
    recurrence: Recurrence = Recurrence.NEW


# How likely tokens are accepted where those before them were, as far as that was known at some time: for each
# recurrence, by range.
Acceptances = list[list[float]]


class RunningConfidence:
    """How often drafted tokens were accepted of late, by what was known of them. Not shared between threads."""

    def __init__(self):
        # For each recurrence, by range; and what a token of the latest round counts for in them.
        self._hits, self._asked = ([[0.0] * _RANGES for _ in Recurrence] for _ in range(2))
        self._weight = 1.0
        odds = [2.0 ** ((_RANGES - 1) / 2 - place) for place in range(_RANGES)]
        self._guesses = [(one / (1.0 + one)) ** _POWER for one in odds]

    def add(self, tokens: Sequence[DraftedToken], accepted: int) -> None:
        """A round is over, whose draft were these tokens."""
        self._weight *= 2.0 ** (1 / _HALF_LIFE)
        if self._weight > _LARGEST_WEIGHT:
            self._hits, self._asked = (
                [[number / self._weight for number in of] for of in counts] for counts in (self._hits, self._asked)
            )
            self._weight = 1.0
        for step, (probability, recurrence) in enumerate(tokens[: accepted + 1]):
            place = range_of(probability)
            self._asked[recurrence][place] += self._weight
            if step < accepted:
                self._hits[recurrence][place] += self._weight

    def acceptances(self) -> Acceptances:
        """How likely tokens are accepted now: by what was seen of such ones, as far as that goes, then by what was
        seen of all of which the text says the same, which tells more than how probable they are; or where it says
        nothing, of all that were as probable, and then by how probable they are."""
        hits, asked = (
            [sum(of_range) for of_range in zip(*counts, strict=True)] for counts in (self._hits, self._asked)
        )
        guesses = {Recurrence.NEW: list(map(self._with_guess, hits, asked, self._guesses))}
        for one, guess in _GUESSES_OF_RECURRENCES.items():
            guesses[one] = [self._with_guess(sum(self._hits[one]), sum(self._asked[one]), guess)] * _RANGES
        return [list(map(self._with_guess, self._hits[one], self._asked[one], guesses[one])) for one in Recurrence]

    def _with_guess(self, hits: float, asked: float, guess: float) -> float:
        tokens = _TOKENS_OF_GUESS * self._weight
        return (hits + tokens * guess) / (asked + tokens)

    def mean_acceptance(self) -> float:
        """The same of a token of which nothing is known yet."""
        # If all probabilities were seen as often.
        guess = 1 / (1 + _POWER)
        return self._with_guess(sum(map(sum, self._hits)), sum(map(sum, self._asked)), guess)

    def fade_to(self, tokens: float) -> None:
        """Let all that was seen count for no more than so many tokens."""
        self._weight = max(self._weight, sum(map(sum, self._asked)) / tokens)


class EarlyEnd:
    """Ends one chain.

    Args:
        acceptances: see `RunningConfidence.acceptances`.
        least: for each number of tokens, from 1 on, how likely all of them have to be accepted for another one to be
            drafted.
    """

    def __init__(self, acceptances: Acceptances, least: Sequence[float]):
        self._acceptances = acceptances
        self._least = least
        self._reached = 1.0
        # Those that were drafted so far.
        self.tokens: list[DraftedToken] = []

    @property
    def steps(self) -> int:
        """How many tokens were drafted."""
        return len(self.tokens)

    def goes_on(self, token: DraftedToken) -> bool:
        """Whether another token is worth its time after one that was drafted."""
        self.tokens.append(token)
        self._reached *= self._acceptances[token.recurrence][range_of(token.probability)]
        return self._reached >= self._least[len(self.tokens) - 1]


def range_of(probability: float) -> int:
    """The number of the range that a probability is in."""
    # A comparison with what is no number is false.
    if not probability > 0:
        return _RANGES - 1
    if probability >= 1:
        return 0
    _, exponent = frexp(probability / (1 - probability))
    return min(max(_RANGES // 2 - exponent, 0), _RANGES - 1)
