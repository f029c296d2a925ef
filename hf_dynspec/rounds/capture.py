"""Captures of a device's operations as a graph, which must not be able to hurt: whatever fails in one, all else is as
it was before."""

import ctypes
import gc
import sys
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A capture waits for the device, and no other capture may run meanwhile.
_capturing = threading.Lock()
# How often the generator of random numbers was replaced on a device, as a capture that failed has left it unusable.
replaced: Counter[torch.device] = Counter()
# Idle streams for captures, by device. Those of torch come from a pool that goes round: others may be using them.
_streams: "defaultdict[torch.device, list[torch.cuda.Stream]]" = defaultdict(list)


def record(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record the operations of a function on a device, without running them. Returns a function that runs them. If the
    function or the capture fails, stream, allocator and generator of random numbers are as before."""
    with _capturing, torch.cuda.device(device), _without_collections():
        current, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        aside = _streams[device].pop() if _streams[device] else _new_stream(device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        aside.wait_stream(current)
        try:
            with torch.cuda.stream(aside):
                # Other threads may be computing.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            _recover(device, pool)
            raise
        current.wait_stream(aside)

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    weakref.finalize(replay, _streams[device].append, aside)
    return replay


@contextmanager
def _without_collections() -> Iterator[None]:
    """In which the garbage collector does not run: a graph that it frees ends a capture."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has."""
    handle, without_waiting_for_others = ctypes.c_void_p(), 1
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if library.cuStreamCreate(ctypes.byref(handle), without_waiting_for_others) == 0:
            return torch.cuda.ExternalStream(handle.value, device)
    except (OSError, AttributeError):
        # Another kind of driver.
        pass
    return torch.cuda.Stream(device, priority=-1)


def _recover(device: torch.device, pool: tuple[int, int]) -> None:
    """Undo what torch leaves after a capture that failed. The memory that it had taken is left to it, as only torch
    knows whether it gives that up with the graph."""
    # The capture's end may have come to it.
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        # It waits for the end of the capture.
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
        replaced[device] += 1


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Note where this thread waits for a device: the places are in the list when this is left."""
    places: list[str] = []
    with _capturing, warnings.catch_warnings():
        thread, show, mode = threading.get_ident(), warnings.showwarning, torch.cuda.get_sync_debug_mode()

        def note(message: Any, category: Any, filename: str, lineno: int, *others: Any) -> None:
            if "synchronizing CUDA" not in str(message):
                show(message, category, filename, lineno, *others)
            elif threading.get_ident() == thread:
                places.append(f"{filename}:{lineno}")

        warnings.filterwarnings("always", ".*synchronizing CUDA")
        # That this mode is a prototype, which need not concern a user.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class InputsOf(TorchDispatchMode):
    """Collects in `found` the tensors that operations read and that none of them has made."""

    def __init__(self):
        super().__init__()
        self.found: list[torch.Tensor] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # Storages that are found stay, so that no other one gets their address.
        self.found += self._unknown((args, kwargs))
        results = func(*args, **kwargs)
        self._unknown(results)
        return results

    def _unknown(self, values: Any) -> list[torch.Tensor]:
        tensors = {one.untyped_storage()._cdata: one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
        unknown = [one for storage, one in tensors.items() if storage not in self._known]
        self._known |= tensors.keys()
        return unknown
