"""Waiting for another thread without being woken by it, which takes tens of microseconds of that one."""

import ctypes
import functools
from collections.abc import Callable

from .cpu import compiled_library

# Takes a number, what was seen of it, nanoseconds from look to look, below 10^9, and how often to look at most.
# Returns whether it differs from what was seen. Other threads run meanwhile.
WaitForChange = Callable[[ctypes.c_int64, int, int, int], bool]


@functools.cache
def wait_for_change() -> WaitForChange | None:
    """The function of waiting.cpp; None where it cannot be compiled."""
    library = compiled_library("waiting.cpp", None)
    if library is None:
        return None
    kernel = library["wait_for_change"]
    kernel.argtypes = [ctypes.POINTER(ctypes.c_int64), *[ctypes.c_int64] * 3]
    kernel.restype = ctypes.c_bool
    return kernel
