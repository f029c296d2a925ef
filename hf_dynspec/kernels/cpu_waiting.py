"""Waiting for another thread by polling: waking a thread costs the other one tens of microseconds."""

import ctypes
import functools
from collections.abc import Callable

from .cpu import compiled_library, typed

# Takes a number, its last seen value, the nanoseconds between two polls, below 10^9, and the most polls. Returns
# whether the number changed. Other threads run meanwhile.
WaitForChange = Callable[[ctypes.c_int64, int, int, int], bool]


@functools.cache
def wait_for_change() -> WaitForChange | None:
    """The function of waiting.cpp (None: it cannot be compiled)."""
    library = compiled_library("waiting.cpp", None)
    arguments = ctypes.POINTER(ctypes.c_int64), *[ctypes.c_int64] * 3
    return None if library is None else typed(library["wait_for_change"], ctypes.c_bool, *arguments)
