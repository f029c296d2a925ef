"""The sessions of an assistant that wait for their next call."""

import threading
import weakref
from collections.abc import Callable

from ..drafting.session import DraftSession


class SessionPool:
    """Sessions that wait for the next call, with their buffers, the latest used last. Shareable between threads.

    Args:
        most: how many may wait; of more the one that has waited longest is given up.
    """

    def __init__(self, most: int = 4):
        self._most = most
        # A session may be given back by the garbage collector, at any time.
        self._lock = threading.RLock()
        self._idle: list[DraftSession] = []
        # Sessions that were made before the last `clear` are not taken back.
        self._made: weakref.WeakSet[DraftSession] = weakref.WeakSet()

    def take(self, eos_token_ids: tuple[int, ...], make: Callable[[], DraftSession]) -> DraftSession:
        """Return a waiting session for these EOS ids, or one that `make` makes."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place].vocabulary.eos_token_ids == eos_token_ids:
                    return self._idle.pop(place)
            made = self._made
        session = make()
        made.add(session)
        return session

    def give(self, session: DraftSession) -> None:
        """Keep a session for the next call, without the text that it was for."""
        session.rest()
        with self._lock:
            if session in self._made:
                self._idle.append(session)
                del self._idle[: -self._most]

    def has_made(self, session: DraftSession) -> bool:
        """Whether a session was made since the last `clear`."""
        return session in self._made

    def clear(self) -> None:
        """Give up all sessions, those that are in use when they are given back."""
        with self._lock:
            self._idle.clear()
            self._made = weakref.WeakSet()
