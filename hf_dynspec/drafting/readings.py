"""Whether a call is worth that the drafter reads its prompt, which it does in its first draft."""

from collections import deque
from math import inf
from statistics import median_low
from typing import NamedTuple

# Unread tokens that take no time worth speaking of.
_FEW_TOKENS = 32
# Readings, drafts and calls that are remembered. One reading alone is not believed: the first one does much for the
# first time.
_KEPT, _TO_BELIEVE = 8, 2
# Readings of less than such a part of the longest one tell too little of long ones.
_SHORT = 0.25
# What it takes to read a text once more, to see, is no more than such a part of the time without drafts before.
_SHARE_OF_TRIALS = 0.01


class _Reading(NamedTuple):
    """So many tokens were read in so many seconds."""

    tokens: int
    seconds: float


class _Length(NamedTuple):
    """A call generated so many tokens, and could have generated so many at most."""

    tokens: int
    limit: int


class Readings:
    """How long the drafter takes to read, and how long calls are, of one setting. Not shared between threads."""

    def __init__(self):
        self._readings: deque[_Reading] = deque(maxlen=_KEPT)
        self._seconds_per_step: deque[float] = deque(maxlen=_KEPT)
        self._lengths: deque[_Length] = deque(maxlen=_KEPT)
        # Seconds of rounds that drafted nothing, as reading was not worth it, since a text was read.
        self._waited = 0.0

    def end_call(self, tokens: int, limit: int) -> None:
        """A call has generated so many tokens of those that it could have generated."""
        self._lengths.append(_Length(tokens, limit))

    def wait(self, seconds: float) -> None:
        """A round took so long in which nothing was drafted, as reading was not worth it."""
        self._waited += seconds

    def add(self, unread: int, steps: int, seconds: float) -> None:
        """The drafter has read so many tokens and drafted so many steps, all in so many seconds."""
        if unread <= _FEW_TOKENS:
            self._seconds_per_step.append(seconds / steps)
            return
        drafting = steps * median_low(self._seconds_per_step) if self._seconds_per_step else 0.0
        self._readings.append(_Reading(unread, max(0.0, seconds - drafting)))
        self._waited = 0.0

    def worth_after(self, unread: int, room: int, gain: float) -> float:
        """After how many tokens of a call it is worth that the drafter reads the text: 0 where it is now, as calls
        usually are long enough for it. Of others it is not known that they are until they have been: those which are
        pay for no more than what has been missed till then.

        Args:
            unread: tokens that the drafter has not read.
            room: tokens that the call still generates at most.
            gain: seconds that drafting saves for each token, more than 0.
        """
        if unread <= _FEW_TOKENS or len(self._readings) < _TO_BELIEVE:
            return 0
        seconds = unread * self._seconds_per_token()
        least = seconds / gain
        if seconds <= _SHARE_OF_TRIALS * self._waited or least <= min(self._usual_length(room), room):
            return 0
        return least if 2 * least <= room else inf

    def _seconds_per_token(self) -> float:
        longest = max(one.tokens for one in self._readings)
        return median_low(one.seconds / one.tokens for one in self._readings if one.tokens >= _SHORT * longest)

    def _usual_length(self, room: int) -> float:
        """Of calls with so much room. Those that had less and used it up are taken to be as long as that."""
        if not self._lengths:
            return room
        lengths = [room if one.tokens >= one.limit < room else one.tokens for one in self._lengths]
        return sum(lengths) / len(lengths)
