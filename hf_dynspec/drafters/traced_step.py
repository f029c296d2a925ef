"""One draft step of a causal language model as a traced graph, without the Python between its operations.

A drafter has few layers with little arithmetic for one token, so most of a step's time is spent between operations. A
trace replays the operations alone. Weights are inputs of the trace, so that it never holds old ones and models of one
architecture share it. Tracing takes a fraction of a second, and the graph must agree with the model at lengths other
than the traced one.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from ..cache_names import cache_inputs
from .traceable_decoder import (
    COMPARED_LENGTHS,
    SteadyDecoder,
    are_close,
    cache_of,
    can_be_recorded,
    context_of,
)
from .weights_watch import WeightsWatch

# The length of cached context during tracing.
_TRACED_LENGTH = 7

# torch never frees the memory of a trace, some megabytes, so their number is limited.
_MOST_TRACES = 32
_traces: dict[Any, Callable[..., torch.Tensor] | None] = {}
_lock = threading.Lock()


class TracedStep:
    """Draft steps of one model, valid while `still_holds`.

    Args:
        decoder: the traced decoder.
        graph: a trace that agrees with it.
    """

    def __init__(self, decoder: SteadyDecoder, graph: Callable[..., torch.Tensor]):
        self._decoder = decoder
        self._graph = graph

    def still_holds(self) -> bool:
        return self._decoder.still_holds()

    def layers(self) -> "GrownLayers":
        """Empty keys and values, to which steps append."""
        return GrownLayers(self)

    def weights(self) -> list[torch.Tensor]:
        """The weights for `run`, valid for a round."""
        return self._decoder.watch.parameters()

    def run(
        self, weights: list[torch.Tensor], token_id: torch.Tensor, length: int, layers: list[torch.Tensor]
    ) -> torch.Tensor:
        """Append a token, int64 `[1]`, to `length` tokens. Writes its keys and values to the last of the `length + 1`
        positions of `layers`. Returns the hidden state, `[1, d]`."""
        position = torch.full((1, 1), length, dtype=torch.int64, device=token_id.device)
        return self._graph(token_id.unsqueeze(0), position, *weights, *layers)[0]


class _LastPosition(DynamicLayer):
    """Keys and values of one attention layer with a place for one more token, to which that is written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1


class GrownLayers:
    """Keys and values of one text, `[1, heads, S, head_dim]` each, of which the first `n` positions count.

    Args:
        step: appends a token (None: only the decoder does).
    """

    def __init__(self, step: TracedStep | None = None):
        self._step = step
        self._weights: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._length = 0

    @property
    def most_appended(self) -> int:
        """The most tokens for `append`; 0 at the beginning of a text, which the decoder must read."""
        return 1 if self._step is not None and self._length else 0

    def start_round(self) -> None:
        """Look up the weights, which may have changed."""
        if self._step is not None:
            self._weights = self._step.weights()

    def append(self, token_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Append a token, int64 `[1]`, to a text of that length. Returns its hidden state, `[1, d]`."""
        if length == self._tensors[0].shape[2]:
            # Twice as much, so that a text is copied a few times in all.
            self._tensors = [pad(tensor, (0, 0, 0, length)) for tensor in self._tensors]
        self._length = length + 1
        return self._step.run(self._weights, token_ids, length, self.read())

    def read(self) -> list[torch.Tensor]:
        """The positions that count, as `layers_of` returns them."""
        return [tensor[:, :, : self._length] for tensor in self._tensors] if self._length else []

    def replace(self, tensors: list[torch.Tensor]) -> None:
        """Replace the tensors by longer ones with the same beginning."""
        self._tensors, self._length = tensors, tensors[0].shape[2]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions."""
        self._length = length


@torch.no_grad()
def trace_step(model: PreTrainedModel, watch: WeightsWatch) -> TracedStep | None:
    """Trace one step of a model's decoder, which `watch` watches, or find a trace of another model of the same
    architecture (None: a trace would not hold for every context, or the weights are offloaded)."""
    decoder = watch.module
    if not can_be_recorded(model, list(decoder.modules())) or not _has_steady_masks(model):
        return None
    weights = watch.parameters()
    key = (repr(model.config), repr(decoder), tuple((one.shape, one.dtype, one.device) for one in weights))
    # A model may do anything in its forward. Without a trace its steps are only slower.
    try:
        with _lock, without_warnings():
            step = _Step(decoder, weights)

            def inputs(length: int) -> tuple[torch.Tensor, ...]:
                token_id, layers = context_of(decoder, length)
                layers = [pad(one, (0, 0, 0, 1)) for one in layers]
                return token_id, torch.tensor([[length]], device=token_id.device), *weights, *layers

            def agree(inputs: tuple[torch.Tensor, ...]) -> bool:
                layers = inputs[2 + len(weights) :]
                both = [(run(*inputs), *(one.clone() for one in layers)) for run in (graph, step.run)]
                return all(map(are_close, *both))

            if key not in _traces and len(_traces) < _MOST_TRACES:
                _traces[key] = None
                graph = torch.jit.trace(step.run, inputs(_TRACED_LENGTH), check_trace=False)
                # This would keep the traced module and its weights alive.
                graph.__dict__.pop("_torchdynamo_inline", None)
                _traces[key] = graph
            graph = _traces.get(key)
            if graph is not None and all(agree(inputs(length)) for length in COMPARED_LENGTHS):
                return TracedStep(SteadyDecoder(watch), graph)
    except Exception:
        return None
    return None


class _Step:
    """A step as a function of tensors, from token, position, weights, keys and values to the hidden state. It runs a
    copy of the decoder's modules, whose weights it replaces, and writes to the last position of keys and values."""

    def __init__(self, decoder: nn.Module, weights: list[torch.Tensor]):
        self._decoder = copy.deepcopy(decoder, {id(one): one for one in weights})
        # In the order of `WeightsWatch.parameters`.
        self._places = [
            (tensors, name)
            for module in self._decoder.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    def run(self, token_id: torch.Tensor, position: torch.Tensor, *tensors: torch.Tensor):
        weights, layers = tensors[: len(self._places)], tensors[len(self._places) :]
        for (holder, name), weight in zip(self._places, weights, strict=True):
            holder[name] = weight
        cache = cache_of(list(layers), _LastPosition)
        return self._decoder(input_ids=token_id, position_ids=position, **cache_inputs(cache))[0]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings of tracing, about constants, which the comparison checks, and about attributes."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _has_steady_masks(model: PreTrainedModel) -> bool:
    """Whether the operations of a step are the same for contexts of every length."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
