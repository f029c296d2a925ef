"""Waiting for another thread without being woken by it, which takes tens of microseconds of that one."""

import ctypes
import functools
from collections.abc import Callable

from .cpu import compiled_library


@functools.cache
def _kernel() -> Callable[..., bool] | None:
    """The function of waiting.cpp, compiled for this machine; None where it cannot be."""
    library = compiled_library("waiting.cpp", None)
    if library is None:
        return None
    kernel = library["wait_for_change"]
    kernel.argtypes = [ctypes.POINTER(ctypes.c_int64), *[ctypes.c_int64] * 3]
    kernel.restype = ctypes.c_bool
    return kernel


def wait_for_change(number: ctypes.c_int64, seen: int, pause: float, seconds: float) -> bool:
    """Wait until another thread changes a number, looking at it from time to time; other threads run meanwhile. Where
    there is no compiler, or the system has no such pauses, wait no longer than for one look.

    Args:
        number: what is looked at.
        seen: what it was.
        pause: seconds from look to look, less than one.
        seconds: how long to wait at most.

    Returns:
        Whether it differs from what was seen.
    """
    kernel = _kernel()
    if kernel is None:
        return number.value != seen
    return kernel(ctypes.byref(number), seen, int(1e9 * pause), round(seconds / pause))
