"""Whether a call is worth that the drafter reads its prompt, which it does in its first draft."""

from collections import deque
from math import inf
from statistics import median_low

# Unread tokens that take no time worth speaking of.
_FEW_TOKENS = 32
# Readings, and calls, that are remembered.
_KEPT = 8
# What it takes to read a text once more, to see, is no more than such a part of the time without drafts before.
_SHARE_OF_TRIALS = 0.01


class Readings:
    """How long the drafter takes to read, and how long calls are, of one setting. Not shared between threads."""

    def __init__(self):
        self._seconds_per_token: deque[float] = deque(maxlen=_KEPT)
        # Tokens that the latest calls generated, the one that goes on last.
        self._tokens: deque[int] = deque(maxlen=_KEPT + 1)
        # Seconds of rounds that drafted nothing, as reading was not worth it, since a text was read.
        self._waited = 0.0

    def begin_call(self) -> None:
        """A call begins."""
        self._tokens.append(0)

    def generate(self, tokens: int) -> None:
        """So many tokens were generated. Those of calls beside each other are taken for those of one."""
        if self._tokens:
            self._tokens[-1] += tokens

    def wait(self, seconds: float) -> None:
        """A round took so long in which nothing was drafted, as reading was not worth it."""
        self._waited += seconds

    def add(self, unread: int, seconds: float) -> None:
        """The drafter took so long to read so many tokens."""
        if unread > _FEW_TOKENS:
            self._seconds_per_token.append(max(0.0, seconds) / unread)
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
        if unread <= _FEW_TOKENS or not self._seconds_per_token:
            return 0
        seconds = unread * median_low(self._seconds_per_token)
        if seconds <= _SHARE_OF_TRIALS * self._waited:
            return 0
        least = seconds / gain
        earlier = list(self._tokens)[:-1]
        usual = sum(earlier) / len(earlier) if earlier else room
        if least <= min(usual, room):
            return 0
        return least if 2 * least <= room else inf
