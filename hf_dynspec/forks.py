"""Objects that a forked process has to rebuild, as threads do not survive a fork."""

import os
import weakref
from abc import ABC, abstractmethod


class ForkSafe(ABC):
    """An object that uses a thread or a lock."""

    def __init__(self) -> None:
        _known.add(self)

    @abstractmethod
    def reset_after_fork(self) -> None:
        """Called in a forked process. Must not wait for a thread, nor for a lock that a thread may hold."""


_known: "weakref.WeakSet[ForkSafe]" = weakref.WeakSet()


def _reset_all() -> None:
    for one in list(_known):
        one.reset_after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_all)
