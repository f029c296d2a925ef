"""What a forked process makes anew, as the threads that did its work stay behind in the process that was forked."""

import os
import weakref
from abc import ABC, abstractmethod


class ForkSafe(ABC):
    """Something that uses a thread or a lock, to be known from when it is made."""

    def __init__(self) -> None:
        _known.add(self)

    @abstractmethod
    def reset_after_fork(self) -> None:
        """Called in a forked process: wait for no thread, and for no lock that one may hold."""


_known: "weakref.WeakSet[ForkSafe]" = weakref.WeakSet()


def _reset_all() -> None:
    for one in list(_known):
        one.reset_after_fork()


# Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
