"""A round as one graph, which the host launches at once.

To launch a round operation by operation takes a GPU's host several times as long as the GPU needs for it. A graph
holds all operations with the addresses that they read and write. So whatever one round leaves to the next must lie
where the next one reads it: models' memory and the round's own tensors do, and policies' tensors are carried there.
"""

import ctypes
import gc
import sys
import threading
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from ..cache_names import cache_inputs
from ..drafters.traceable_decoder import are_close
from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from ..modeling.parts import decoder_of, input_device, output_rows
from ..protocol import Shortlist
from ..shortlists.base import ShortlistState
from .round import Report, Round

# Rounds before a capture, in which libraries set themselves up. The last of them tells whether the host waits. If
# there is a graph already, one round does.
_WARM_UPS = 2
# Captures that may fail before rounds are launched for good. One may have had too little memory.
_MOST_FAILURES = 2

# A capture waits for the device, and no other capture may run meanwhile.
_capturing = threading.Lock()


class RecordedRound:
    """Runs rounds as graphs, one for each number of draft steps, from its third time on.

    Args:
        one: the round.

    Attributes:
        failure: why rounds are launched operation by operation (None: they are graphs, or will be).
    """

    def __init__(self, one: Round):
        self._round = one
        self._states = [text.selector.state for text in one.texts]
        self._carried: Carried | None = None
        # By the number of draft steps: how often it was launched, and its graph.
        self._runs: Counter[int] = Counter()
        self._graphs: dict[int, _Graph] = {}
        self._failures = 0
        self.failure: str | None = None

    def settle(self) -> None:
        """Let the next round find what policies have taken up since the last one: other texts, or results of the
        host's."""
        self._round.settle()
        if self._carried is None or not self._carried.settle():
            self._carry_anew()

    def _carry_anew(self) -> None:
        self._carried, self._graphs = Carried(self._states), {}

    def forget(self) -> None:
        """Record again, as tensors have moved or a capture has failed."""
        self._runs.clear()
        self._graphs.clear()
        if self._failures < _MOST_FAILURES:
            self.failure = None

    def run(self) -> bool:
        """Run one round. Returns whether it was a launch of a graph that was there before."""
        steps = self._round.steps
        if any(graph.replaced != _replaced[self._round.device] for graph in self._graphs.values()):
            # They have the old generator, and would draw what others draw.
            self._graphs.clear()
        was_there, warm_ups = steps in self._graphs, 1 if self._graphs else _WARM_UPS
        if not was_there and self.failure is None and self._runs[steps] >= warm_ups:
            self._record()
        if steps in self._graphs:
            graph = self._graphs[steps]
            self._round.report = graph.report
            graph.launch()
            return was_there
        self._runs[steps] += 1
        if self.failure is None and self._runs[steps] >= warm_ups:
            with noting_waits(self._round.device) as waits:
                is_same = self._run_once()
            if waits:
                self._failures, self.failure = _MOST_FAILURES, f"the host waits for the device in {waits[0]}"
        else:
            is_same = self._run_once()
        if not is_same:
            # The first rounds make what later ones have.
            self._carry_anew()
        return False

    def _run_once(self) -> bool:
        """Run a round and carry what it leaves to the next. False if that has another structure than before."""
        self._round.run()
        self._round.settle()
        return self._carried.settle()

    def _record(self) -> None:
        # A model may do anything in its forward. Without a graph its rounds are only slower.
        try:
            with _Inputs() as inputs:
                launch = record(self._run_steadily, self._round.device)
            replaced = _replaced[self._round.device]
            self._graphs[self._round.steps] = _Graph(launch, self._round.report, inputs.found, replaced)
        except Exception as error:
            self._failures += 1
            self.failure = f"{type(error).__name__}: {error!s:.200}"
            self._graphs.clear()
            self._carried.restore()
            for text in self._round.texts:
                # They count as changed, and are not.
                text.selector.rows.expire()

    def _run_steadily(self) -> None:
        if not self._run_once():
            raise RuntimeError("a policy whose shapes are said to be fixed has changed them")


class _Graph(NamedTuple):
    """A recorded round.

    Args:
        launch: runs it.
        report: what it leaves to the host.
        inputs: what it reads and has not made, which must live as long as it does.
        replaced: see `_replaced`.
    """

    launch: Callable[[], None]
    report: Report
    inputs: list[torch.Tensor]
    replaced: int


class _Inputs(TorchDispatchMode):
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


# How often the generator of random numbers was replaced on a device, as a capture that failed has left it unusable.
_replaced: Counter[torch.device] = Counter()
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
    """Undo what torch leaves after a capture that failed."""
    for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        # The capture's end may have come to it.
        with suppress(AttributeError, RuntimeError):
            getattr(torch._C, undo)(device.index, pool)
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        # It waits for the end of the capture.
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
        _replaced[device] += 1


@contextmanager
def noting_waits(device: torch.device) -> Iterator[list[str]]:
    """Note where this thread waits for the device: the list is filled when it is left."""
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


# The classes of a model's modules, and whether a recorded forward of it agrees with a launched one.
_agreements: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[set[type], bool]]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def recorded_forward_agrees(model: PreTrainedModel) -> bool:
    """Whether a forward over fixed memory that was recorded says of other tokens what a launched one says, for models
    with parts that may do anything. Tried once for a model, and again if it gets parts of other classes."""
    classes = set(map(type, model.modules()))
    known = _agreements.get(model)
    if known is None or known[0] != classes:
        # Whatever is wrong with it, it can be launched.
        try:
            known = classes, _agrees(model)
        except Exception:
            known = classes, False
        _agreements[model] = known
    return known[1]


def _agrees(model: PreTrainedModel) -> bool:
    decoder, device, config = FixedDecoder(model), input_device(model), model.config.get_text_config()
    cache = DynamicCache(config=config)
    token_ids = torch.arange(1, 4, device=device).unsqueeze(0) % output_rows(model)
    decoder_of(model)(token_ids, **cache_inputs(cache))
    memory = FixedMemory.like(cache, config, 1, 16, 3)
    memory.begin(0, cache, 3)
    found: list[torch.Tensor] = []

    def run() -> None:
        found[:] = [decoder(token_ids, memory, QueryRows.chain(memory.lengths, 3))[0]]

    run()
    with noting_waits(device) as waits:
        run()
    if waits:
        return False
    with _Inputs() as inputs:  # noqa: F841
        launch = record(run, device)
    (recorded,) = found
    launch()
    token_ids.add_(3).remainder_(output_rows(model))
    memory.lengths.fill_(2)
    launch()
    run()
    return are_close(recorded, found[0])


class Carried:
    """The tensors that policies' states replace in a round and read in the next (`ShortlistState.carried`), at the
    addresses that they have now."""

    def __init__(self, states: Sequence[ShortlistState]):
        self._states = states
        self._kept = [_tensors_of(state) for state in states]

    def settle(self) -> bool:
        """Copy the present tensors to the kept addresses, and put the kept ones in their place. False if they have
        other shapes."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        fits = all(_collect(one, kept, pairs) for one, kept in zip(self._states, self._kept, strict=True))
        if not fits:
            return False
        for kept, present in pairs:
            kept.copy_(present)
        self.restore()
        return True

    def restore(self) -> None:
        """Put the kept tensors back, with their present numbers."""
        for one, kept in zip(self._states, self._kept, strict=True):
            _put_back(one, kept)


_OF_SHORTLIST = ("slots", "occupied")


def _names_of(holder: Any) -> Sequence[str]:
    return _OF_SHORTLIST if isinstance(holder, Shortlist) else holder.carried


def _tensors_of(value: Any) -> Any:
    """The tensors in a value, in its structure."""
    if isinstance(value, list | tuple):
        return [_tensors_of(one) for one in value]
    if isinstance(value, ShortlistState | Shortlist):
        return {name: _tensors_of(getattr(value, name)) for name in _names_of(value)}
    return value if isinstance(value, torch.Tensor) else None


def _collect(value: Any, kept: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Add each kept tensor that was replaced, with the present one. False if the structures differ."""
    if isinstance(kept, torch.Tensor):
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (kept.shape, kept.dtype):
            return False
        if value is not kept:
            pairs.append((kept, value))
        return True
    if isinstance(kept, list):
        return len(kept) == len(value) and all(_collect(*both, pairs) for both in zip(value, kept, strict=True))
    if isinstance(kept, dict):
        return value is not None and all(_collect(getattr(value, name), one, pairs) for name, one in kept.items())
    return not isinstance(value, torch.Tensor)


def _put_back(value: Any, kept: Any) -> Any:
    """The value with the kept tensors."""
    if isinstance(kept, torch.Tensor):
        return kept
    if isinstance(kept, list):
        return type(value)(_put_back(*both) for both in zip(value, kept, strict=True))
    if isinstance(kept, dict):
        # Shortlists are immutable for all others.
        vars(value).update({name: _put_back(getattr(value, name), one) for name, one in kept.items()})
    return value
