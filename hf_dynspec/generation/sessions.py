"""The sessions of an assistant that wait for their next call."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from ..drafting.session import DraftSession
from ..forks import ForkSafe


class SessionPool(ForkSafe):
    """Sessions that wait for the next call, with their buffers, the latest used last. Shareable between threads.

    Args:
        most: how many may wait; of more the one that has waited longest is given up.

    Attributes:
        memory: what they share (`ShortlistPolicy.new_memory`).
    """

    def __init__(self, most: int = 4):
        super().__init__()
        self._most = most
        self.memory: Any = None
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In a forked process: give up all sessions, as what they work with may have stayed behind."""
        # A session may be given back by the garbage collector, at any time.
        self._lock = threading.RLock()
        self._idle: list[DraftSession] = []
        # Sessions that were made before the last `clear` are not taken back, and know another memory.
        self._made: weakref.WeakSet[DraftSession] = weakref.WeakSet()
        # Sessions that conversations keep between two calls.
        self._held: weakref.WeakSet[DraftSession] = weakref.WeakSet()

    def take(self, eos_token_ids: tuple[int, ...], make: Callable[[Any], DraftSession]) -> DraftSession:
        """Return a waiting session for these EOS ids, or one that `make` makes, given the memory."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place].vocabulary.eos_token_ids == eos_token_ids:
                    return self._idle.pop(place)
            made, memory = self._made, self.memory
        session = make(memory)
        made.add(session)
        return session

    def give(self, session: DraftSession) -> None:
        """Keep a session for the next call, without the text that it was for, or give it up where it cannot be."""
        if session.is_closed:
            return
        session.rest()
        with self._lock:
            given_up = [session]
            if session in self._made:
                self._idle.append(session)
                given_up, self._idle = self._idle[: -self._most], self._idle[-self._most :]
        _close(given_up)

    def hold(self, session: DraftSession) -> None:
        """Let a conversation keep a session until its next call, or give it up where that cannot be."""
        with self._lock:
            is_held = session in self._made and not session.is_closed
            if is_held:
                self._held.add(session)
        if not is_held:
            session.close()

    def resume(self, session: DraftSession) -> bool:
        """Whether a conversation's session, which is in use again, can go on: it has not been given up."""
        with self._lock:
            self._held.discard(session)
            return session in self._made and not session.is_closed

    def clear(self, memory: Any = None) -> None:
        """Give up all sessions, those that are in use when they are given back.

        Args:
            memory: what those that are made from now on share.
        """
        with self._lock:
            given_up, self._idle = [*self._idle, *self._held], []
            self._made, self._held, self.memory = weakref.WeakSet(), weakref.WeakSet(), memory
        _close(given_up)


def _close(sessions: Iterable[DraftSession]) -> None:
    """Close all, also where one cannot be."""
    with ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
