"""A round as one graph, which the host launches at once.

To launch a round operation by operation takes a GPU's host several times as long as the GPU needs for it. A graph
holds all operations with the addresses that they read and write. So whatever one round leaves to the next must lie
where the next one reads it: models' memory and the round's own tensors do, and policies' tensors are carried there.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from .capture import InputsOf, noting_waits, record, replaced
from .round import Report, Round

# Rounds before a capture, in which libraries set themselves up. The last of them tells whether the host waits. If
# there is a graph already, one round does.
_WARM_UPS = 2
# Captures that may fail before rounds are launched for good. One may have had too little memory.
_MOST_FAILURES = 2


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
        if any(graph.generator != replaced[self._round.device] for graph in self._graphs.values()):
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
            with noting_waits() as waits:
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
            with InputsOf() as inputs:
                launch = record(self._run_steadily, self._round.device)
            generator = replaced[self._round.device]
            self._graphs[self._round.steps] = _Graph(launch, self._round.report, inputs.found, generator)
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
        generator: see `capture.replaced`.
    """

    launch: Callable[[], None]
    report: Report
    inputs: list[torch.Tensor]
    generator: int


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
    with noting_waits() as waits:
        run()
    if waits:
        return False
    with InputsOf() as inputs:  # noqa: F841
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
