"""The pool of an assistant's idle sessions."""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Protocol

from ..drafting.session import DraftSession
from ..forks import ForkSafe

# Idle lanes, each with the target's memory of some thousand positions and its graph.
_MOST_LANES = 2


class Lane(Protocol):
    """What generates one call after another with the same sessions: see `fixed_lane.FixedLane`."""

    sessions: list[DraftSession]

    def still_holds(self) -> bool: ...

    def close(self) -> None: ...


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
        # Idle lanes with their sessions, by what they were made for.
        self._lanes: list[tuple[Any, Lane]] = []

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

    def take_lane(self, key: Any) -> Lane | None:
        """Return an idle lane that was given with this key, if it still holds."""
        with self._lock:
            place = next((place for place, (other, _) in enumerate(self._lanes) if other == key), None)
            lane = None if place is None else self._lanes.pop(place)[1]
        if lane is None or lane.still_holds():
            return lane
        lane.close()
        return None

    def give_lane(self, key: Any, lane: Lane) -> None:
        """Keep a lane for the next call without its texts, or close it if it cannot be kept."""
        can_be_kept = all(session in self._made and not session.is_closed for session in lane.sessions)
        given_up = [lane]
        if can_be_kept and lane.still_holds():
            for session in lane.sessions:
                session.rest()
            with self._lock:
                self._lanes.append((key, lane))
                given_up = [one for _, one in self._lanes[:-_MOST_LANES]]
                self._lanes = self._lanes[-_MOST_LANES:]
        for one in given_up:
            one.close()

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
            lanes = [lane for _, lane in self._lanes]
            given_up, self._idle, self._lanes = [*self._idle, *self._held, *lanes], [], []
            self._made, self._held, self.memory = weakref.WeakSet(), weakref.WeakSet(), memory
        _close(given_up)


def _close(sessions: Iterable[DraftSession | Lane]) -> None:
    """Close all sessions and lanes, even if closing one raises."""
    with ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
