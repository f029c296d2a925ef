"""What the host may do on a device without waiting for it, and on itself without keeping others waiting."""

import ctypes
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache

import torch

# Kinds of device whose numbers lie in the host's own memory. On every other kind, to look at a number is to wait until
# all that was asked of the device is done. The one switch of all shortcuts that look at numbers: with nothing in it,
# everything on a CPU goes as it goes elsewhere.
HOST_MEMORY = frozenset({"cpu"})


def is_host_memory(device: torch.device) -> bool:
    """Whether numbers on a device can be looked at without waiting for it."""
    return device.type in HOST_MEMORY


# Kinds of device to which many operations can be given at once, as a graph that was captured.
GRAPHS = frozenset({"cuda"})


def has_graphs(device: torch.device) -> bool:
    """Whether operations on a device can be captured, and asked for at once."""
    return device.type in GRAPHS


class _WithoutPlans:
    """While anybody is in it torch leaves out cuDNN's attention, in the whole process: it cannot be told of a thread
    alone. It is as it was when the last one leaves."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                # Where the user has left only this one, it has to do.
                self._was_on = torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
                if self._was_on:
                    torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_on:
                torch.backends.cuda.enable_cudnn_sdp(True)


_without_plans = _WithoutPlans()


def without_attention_plans(*devices: torch.device) -> AbstractContextManager[None]:
    """In which attention on GPUs takes as long for a text of a new length as for any other. May be entered again, also
    by several threads at once. Does nothing where all of the devices are CPUs.

    cuDNN's, which torch prefers on some GPUs for 16 bits, makes a plan for every number of queries and of keys. Texts
    and drafts bring new ones in almost every round, and a plan takes longer than the rest of it.
    """
    return nullcontext() if all(map(is_host_memory, devices)) else _without_plans


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leaves_a_core(device: torch.device) -> bool:
    """Whether a core of the host is likely idle while operations on a device go on: on a CPU, where torch has fewer
    threads than there are cores. Of other devices it is not known."""
    return is_host_memory(device) and torch.get_num_threads() < usable_cores()


@cache
def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether torch multiplies a few rows by 16-bit weights clearly faster than by weights in fp32 on this computer's
    CPU. Without units for 16 bits it widens every number for every row anew, so that rows take as long together as one
    after another. Measured once, in about 20 ms."""
    threads, seconds = torch.get_num_threads(), {torch.float32: float("inf"), dtype: float("inf")}
    weights = {kind: torch.ones(1024, 1024, dtype=kind, device="cpu") for kind in seconds}
    torch.set_num_threads(1)
    for kind, weight in list(weights.items()) * 16:
        began = time.perf_counter()
        torch.nn.functional.linear(weight[:16], weight)
        seconds[kind] = min(seconds[kind], time.perf_counter() - began)
    torch.set_num_threads(threads)
    # It is 0.3 to 0.5 times with such units, and 1.1 to 2.9 times without.
    return seconds[dtype] < 0.7 * seconds[torch.float32]


def dtype_for_training(device: torch.device) -> str | torch.dtype:
    """In which dtype to load a model that reads many rows at a time: `"auto"`, that of its weights, or `torch.float32`
    on a CPU that multiplies 16-bit numbers slowly."""
    return "auto" if device.type != "cpu" or multiplies_fast(torch.bfloat16) else torch.float32


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
