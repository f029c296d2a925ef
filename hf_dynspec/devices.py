"""What the host may do on a device without waiting for it, and on itself without keeping others waiting."""

import ctypes
import os
from contextlib import suppress

import torch

# Kinds of device whose numbers lie in the host's own memory. On every other kind, to look at a number is to wait until
# all that was asked of the device is done. The one switch of all shortcuts that look at numbers: with nothing in it,
# everything on a CPU goes as it goes elsewhere.
FREE_TO_LOOK = frozenset({"cpu"})


def is_free_to_look(device: torch.device) -> bool:
    """Whether numbers on a device can be looked at without waiting for it."""
    return device.type in FREE_TO_LOOK


# Kinds of device to which many operations can be given at once, as a graph that was captured.
GRAPHS = frozenset({"cuda"})


def has_graphs(device: torch.device) -> bool:
    """Whether operations on a device can be captured, and asked for at once."""
    return device.type in GRAPHS


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leaves_a_core(device: torch.device) -> bool:
    """Whether a core of the host is likely idle while operations on a device go on: on a CPU, where torch has fewer
    threads than there are cores. Of other devices it is not known."""
    return is_free_to_look(device) and torch.get_num_threads() < usable_cores()


# What sets how many threads take part in the operations of the thread that calls it, and of no other.
_SET_OWN_THREADS = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"


def compute_alone() -> None:
    """Let no other threads take part in the CPU operations of this thread, which works beside one that generates;
    where torch is built so that this can be said.

    OpenMP would keep such threads beside those of the thread that generates, be more of them than cores, and from then
    on let all of them sleep between operations: to wake them takes a third of a round's time. `torch.set_num_threads`
    holds for threads to come as well.
    """
    # Where torch has not looked at a thread's number yet, it sets it at the first operation.
    torch.get_num_threads()
    # An error here would end the thread, and others wait for what it does.
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(torch._C.__file__)
        for name in _SET_OWN_THREADS:
            if hasattr(library, name):
                getattr(library, name)(1)
