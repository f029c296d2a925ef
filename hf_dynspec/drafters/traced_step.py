"""One draft step of a causal language model as a traced graph, without the Python between its operations.

A drafter has few layers, and a step of one token does little arithmetic in each: most of the time of such a step is
spent between the operations. A trace of the step replays them alone. Weights are given to it like any other input, so
that it never holds old ones, and models of one architecture share it. Tracing takes a fraction of a second, and the
graph is used only for models with which it has agreed, at lengths other than the one it was traced at.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from .weights_watch import WeightsWatch

# Lengths of cached context: one to trace at, the others to compare at.
_TRACED_LENGTH = 7
_COMPARED_LENGTHS = (1, 7, 30)

# Kinds of rotary embedding that are the same function of the position at every length.
_STEADY_ROPE = ("default", "linear", "llama3", "proportional")
# The classes of other packages, such as adapters and quantised layers, may change what they do without a trace of it.
_KNOWN_PACKAGES = ("torch.nn.modules.", "transformers.")
# transformers records hidden states by hooks that it adds when it is first asked for some, and that change nothing.
_RECORDING_HOOKS = "transformers.utils.output_capturing"

# torch never gives back the memory of a trace, some megabytes, so there is a limit to how many are made.
_MOST_TRACES = 32
_traces: dict[Any, Callable[..., tuple[torch.Tensor, ...]] | None] = {}
_lock = threading.Lock()


def layers_of(cache: DynamicCache) -> list[torch.Tensor]:
    """The keys and values `[1, heads, n, head_dim]` of a cache, layer by layer: key, value, key, value, …"""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def cache_of(tensors: list[torch.Tensor]) -> DynamicCache:
    """A cache over these keys and values, which are not copied."""
    cache = DynamicCache()
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


class TracedStep:
    """Draft steps of one model, for as long as its decoder does what it did when this was made.

    Args:
        watch: over the model's decoder, which is not being changed meanwhile.
        graph: a trace that agrees with the decoder.
    """

    def __init__(self, watch: WeightsWatch, graph: Callable[..., tuple[torch.Tensor, ...]]):
        self._watch = watch
        self._graph = graph
        modules = list(watch.module.modules())
        self._hooks = _hooks_of(modules)
        self._settings = [vars(one) for one in modules]
        self._settings_then = [dict(one) for one in self._settings]
        self._classes = list({type(one) for one in modules})
        self._methods_then = self._methods_now()

    def still_holds(self) -> bool:
        """Whether nobody listens in the decoder, and its settings and methods are what they were. Weights may change
        freely; whether parts were put in the place of others is for the watch to say."""
        if _has_foreign_hooks(self._hooks) or self._methods_now() != self._methods_then:
            return False
        try:
            return self._settings == self._settings_then
        # Two different tensors, which have no truth value together.
        except (RuntimeError, ValueError):
            return False

    def weights(self) -> list[torch.Tensor]:
        """What `run` takes, good for a round."""
        return self._watch.parameters()

    def run(
        self, weights: list[torch.Tensor], token_id: torch.Tensor, length: int, layers: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Append one token.

        Args:
            weights: what `weights()` returned.
            token_id: int64 `[1]`.
            length: of the cache.
            layers: keys and values of every layer.

        Returns:
            The hidden state `[1, d]`, and the longer keys and values.
        """
        position = torch.full((1, 1), length, dtype=torch.int64, device=token_id.device)
        hidden, *layers = self._graph(token_id.unsqueeze(0), position, *weights, *layers)
        return hidden[0], layers

    def _methods_now(self) -> list[Any]:
        return [method for one in self._classes for method in (one.forward, one.__call__)]


@torch.no_grad()
def trace_step(model: PreTrainedModel, watch: WeightsWatch) -> TracedStep | None:
    """Trace one step of a model's decoder, or find a trace of another model of the same architecture.

    Args:
        model: a causal language model.
        watch: over its decoder.

    Returns:
        None where a trace would not hold for every context, or for weights that come and go.
    """
    decoder = watch.module
    modules = list(decoder.modules())
    if not can_be_traced(model, modules):
        return None
    weights = watch.parameters()
    key = (repr(model.config), repr(decoder), tuple((one.shape, one.dtype, one.device) for one in weights))
    # A model may do anything in its forward; whatever keeps it from being traced only costs the speed of the trace.
    try:
        with _lock, without_warnings():
            step = _Step(decoder, weights)
            if key not in _traces and len(_traces) < _MOST_TRACES:
                _traces[key] = None
                example = _example(decoder, _TRACED_LENGTH)
                graph = torch.jit.trace(step.run, (*example[:2], *weights, *example[2:]), check_trace=False)
                # By this torch would keep alive what was traced, and with it these weights.
                graph.__dict__.pop("_torchdynamo_inline", None)
                _traces[key] = graph
            graph = _traces.get(key)
            if graph is not None and all(
                _agrees(step, graph, weights, _example(decoder, n)) for n in _COMPARED_LENGTHS
            ):
                return TracedStep(watch, graph)
    except Exception:
        return None
    return None


class _Step:
    """A step as a function of tensors: token, position, weights, keys and values in; hidden state, keys and values
    out. It runs a copy of the decoder's modules, which share its weights until others are put in their place."""

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
        cache = cache_of(list(layers))
        outputs = self._decoder(input_ids=token_id, position_ids=position, past_key_values=cache, use_cache=True)
        return (outputs[0], *layers_of(cache))


def can_be_traced(model: PreTrainedModel, modules: list[nn.Module]) -> bool:
    """Whether a trace could hold for these modules of a model as they are now."""
    return (
        has_steady_steps(model)
        and not any(module.training or "forward" in vars(module) for module in modules)
        and all(type(module).__module__.startswith(_KNOWN_PACKAGES) for module in modules)
        and not _has_foreign_hooks(_hooks_of(modules))
    )


def _hooks_of(modules: list[nn.Module]) -> list[dict[int, Any]]:
    return [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]


def _has_foreign_hooks(hooks: list[dict[int, Any]]) -> bool:
    """Whether anybody but transformers' recording of outputs listens."""
    return nn.modules.module._has_any_global_hook() or any(
        getattr(hook, "__module__", None) != _RECORDING_HOOKS for some in hooks if some for hook in some.values()
    )


@contextmanager
def without_warnings() -> Iterator[None]:
    """Tracing warns of every value that it takes for a constant, which the comparison checks, and of every attribute
    that it looks at."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def has_steady_steps(model: PreTrainedModel) -> bool:
    """Whether a step does the same operations whatever the length of the context is."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return (
        kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and all(one.get("rope_type", "default") in _STEADY_ROPE for one in ropes)
        and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
    )


def _example(decoder: nn.Module, length: int) -> tuple[torch.Tensor, ...]:
    """Inputs of a step after a context of that length."""
    device = next(decoder.parameters()).device
    context = torch.arange(length, device=device).unsqueeze(0)
    cache = DynamicCache()
    decoder(input_ids=context, past_key_values=cache, use_cache=True)
    return context[:, -1:], torch.tensor([[length]], device=device), *layers_of(cache)


def _agrees(step: _Step, graph: Any, weights: list[torch.Tensor], example: tuple[torch.Tensor, ...]) -> bool:
    tolerance = 1e-4 if example[2].dtype == torch.float32 else 5e-2
    inputs = (*example[:2], *weights, *example[2:])
    return all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(graph(*inputs), step.run(*inputs), strict=True)
    )
