"""What a forked process makes anew, as the threads that did its work stay behind in the process that was forked."""

import os
import weakref
from abc import ABC, abstractmethod


class MadeAnewAfterFork(ABC):
    """Something that uses a thread or a lock, to be known from when it is made."""

    def __init__(self) -> None:
        _known.add(self)

    @abstractmethod
    def begin_anew(self) -> None:
        """Called in a forked process: wait for no thread, and for no lock that one may hold."""


_known: "weakref.WeakSet[MadeAnewAfterFork]" = weakref.WeakSet()


def _begin_all_anew() -> None:
    for one in list(_known):
        one.begin_anew()


# Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all_anew)
