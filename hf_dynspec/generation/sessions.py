"""The pool of an assistant's idle sessions."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from ..drafting.session import DraftSession
from ..forks import ForkSafe


class SessionPool(ForkSafe):
    """Idle sessions, which keep their buffers, the last used one last. Shareable between threads.

    Args:
        most: the most idle sessions; the one that waited longest is closed first.

    Attributes:
        memory: the policy's memory, which sessions share (`ShortlistPolicy.new_memory`).
    """

    def __init__(self, most: int = 4):
        super().__init__()
        self._most = most
        self.memory: Any = None
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """In a forked process: drop all sessions, whose threads stayed behind."""
        # Reentrant, as the garbage collector may return a session at any time.
        self._lock = threading.RLock()
        self._idle: list[DraftSession] = []
        # Sessions made since the last `clear`. Others have an old memory and are not taken back.
        self._made: weakref.WeakSet[DraftSession] = weakref.WeakSet()
        # Sessions that conversations keep between two calls.
        self._held: weakref.WeakSet[DraftSession] = weakref.WeakSet()

    def take(self, eos_token_ids: tuple[int, ...], make: Callable[[Any], DraftSession]) -> DraftSession:
        """Return an idle session for these EOS ids, or make one, given the memory."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place].vocabulary.eos_token_ids == eos_token_ids:
                    return self._idle.pop(place)
            made, memory = self._made, self.memory
        session = make(memory)
        made.add(session)
        return session

    def give(self, session: DraftSession) -> None:
        """Keep a session for the next call without its text, or close it if it cannot be kept."""
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
        """Let a conversation keep a session until its next call, or close it if it cannot be kept."""
        with self._lock:
            is_held = session in self._made and not session.is_closed
            if is_held:
                self._held.add(session)
        if not is_held:
            session.close()

    def resume(self, session: DraftSession) -> bool:
        """Whether a conversation's session can go on; it is in use again then."""
        with self._lock:
            self._held.discard(session)
            return session in self._made and not session.is_closed

    def clear(self, memory: Any = None) -> None:
        """Close all sessions; those in use are closed when they come back.

        Args:
            memory: the memory of new sessions.
        """
        with self._lock:
            given_up, self._idle = [*self._idle, *self._held], []
            self._made, self._held, self.memory = weakref.WeakSet(), weakref.WeakSet(), memory
        _close(given_up)


def _close(sessions: Iterable[DraftSession]) -> None:
    """Close all sessions, even if closing one raises."""
    with ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
