"""Where a chain ends early: before a token that would cost more time than it is likely to save, by how probable the
drafter found those before it."""

from collections.abc import Sequence
from math import frexp

# Ranges that probabilities are told apart by, each with half the odds of the one before it, from over 32 to 1 down to
# under 1 to 32: some drafters are sure of most of their tokens, and others find all of them improbable.
_RANGES = 12
# How likely a token is accepted before anything is known: its probability to this power, as drafters are right more
# often than they are sure. And how many tokens of its range this guess counts for.
_POWER, _TOKENS_OF_GUESS = 0.3, 3
# Rounds in which what was seen is forgotten by half.
_HALF_LIFE = 96


class RunningConfidence:
    """How often drafted tokens were accepted of late, by how probable the drafter found them. Not shared between
    threads."""

    def __init__(self):
        self._hits, self._asked = [0.0] * _RANGES, [0.0] * _RANGES
        self._decay = 0.5 ** (1 / _HALF_LIFE)
        odds = [2.0 ** ((_RANGES - 1) / 2 - place) for place in range(_RANGES)]
        self._guesses = [(one / (1.0 + one)) ** _POWER for one in odds]

    def add(self, probabilities: Sequence[float], accepted: int) -> None:
        """A round is over, in which the drafter found its first tokens so probable."""
        self._scale(self._decay)
        for step, probability in enumerate(probabilities[: accepted + 1]):
            place = _range_of(probability)
            self._asked[place] += 1.0
            self._hits[place] += step < accepted

    def acceptances(self) -> tuple[float, ...]:
        """How likely a token is accepted where those before it were, for each range of its probability."""
        seen = zip(self._hits, self._asked, self._guesses, strict=True)
        return tuple((hits + _TOKENS_OF_GUESS * guess) / (asked + _TOKENS_OF_GUESS) for hits, asked, guess in seen)

    def mean_acceptance(self) -> float:
        """The same of a token whose probability is not known yet."""
        # If all probabilities were seen as often.
        guess = 1 / (1 + _POWER)
        return (sum(self._hits) + _TOKENS_OF_GUESS * guess) / (sum(self._asked) + _TOKENS_OF_GUESS)

    def fade_to(self, tokens: float) -> None:
        """Let all that was seen count for no more than so many tokens."""
        asked = sum(self._asked)
        if asked > tokens:
            self._scale(tokens / asked)

    def _scale(self, factor: float) -> None:
        self._hits = [factor * number for number in self._hits]
        self._asked = [factor * number for number in self._asked]


class EarlyEnd:
    """Ends one chain.

    Args:
        acceptances: see `RunningConfidence.acceptances`.
        least: for each number of tokens, from 1 on, how likely all of them have to be accepted for another one to be
            drafted.
    """

    def __init__(self, acceptances: tuple[float, ...], least: Sequence[float]):
        self._acceptances = acceptances
        self._least = least
        self._reached = 1.0
        # Of the tokens so far, what the drafter found.
        self.probabilities: list[float] = []

    @property
    def steps(self) -> int:
        """How many tokens were drafted."""
        return len(self.probabilities)

    def goes_on(self, probability: float) -> bool:
        """Whether another token is worth its time, after one that the drafter found so probable."""
        self.probabilities.append(probability)
        self._reached *= self._acceptances[_range_of(probability)]
        return self._reached >= self._least[self.steps - 1]


def _range_of(probability: float) -> int:
    # A comparison with what is no number is false.
    if not probability > 0:
        return _RANGES - 1
    if probability >= 1:
        return 0
    _, exponent = frexp(probability / (1 - probability))
    return min(max(_RANGES // 2 - exponent, 0), _RANGES - 1)
