"""A round as one graph, which the host launches at once.

To launch a round operation by operation takes a GPU's host several times as long as the GPU needs for it. A graph
holds all operations with the addresses that they read and write. So whatever one round leaves to the next must lie
where the next one reads it: models' memory and the round's own tensors do, and policies' tensors are carried there.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
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

# Rounds before a capture, in which libraries set themselves up.
_WARM_UPS = 2

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
        # By the number of draft steps: how often it was launched, and its graph with its report.
        self._runs: Counter[int] = Counter()
        self._graphs: dict[int, tuple[Callable[[], None], Report]] = {}
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
        """Record again, as tensors have moved."""
        self._runs.clear()
        self._graphs.clear()

    def run(self) -> bool:
        """Run one round. Returns whether it was a launch of a graph that was there before."""
        steps = self._round.steps
        was_there = steps in self._graphs
        if not was_there and self.failure is None and self._runs[steps] >= _WARM_UPS:
            self._record()
        if steps in self._graphs:
            launch, self._round.report = self._graphs[steps]
            launch()
            return was_there
        self._runs[steps] += 1
        if not self._run_once():
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
            launch = record(self._run_steadily, self._round.device)
            self._graphs[self._round.steps] = launch, self._round.report
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error!s:.200}"
            self._carried.restore()
            for text in self._round.texts:
                # They count as changed, and are not.
                text.selector.rows.forget()

    def _run_steadily(self) -> None:
        if not self._run_once():
            raise RuntimeError("a policy whose shapes are said to be fixed has changed them")


def record(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record the operations of a function on a device, without running them. Returns a function that runs them."""
    with _capturing, torch.cuda.device(device):
        current, aside, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        aside.wait_stream(current)
        # Other threads may be computing.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            run()
        current.wait_stream(aside)

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


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

    for _ in range(_WARM_UPS):
        run()
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
