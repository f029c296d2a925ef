"""The target's decoder in verification as traced graphs, without the Python between its operations.

On a CPU a verification of few tokens by a small target spends much of its time between the operations. A trace replays
them alone. It is a graph over the model's own parameters, so it holds for as long as nothing else has changed: what it
was made from is compared with what is there before each use, and the decoder itself runs wherever that differs, or is
asked for anything that the trace does not do.
"""

import operator
import threading
import warnings
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..drafters.traced_step import cache_of, has_steady_steps, layers_of, without_warnings
from ..tree import attention_mask, descent

# Attention implementations that take any mask.
MASKED_ATTENTION = ("sdpa", "eager")

# One row alone takes no mask in transformers, and in that of many rows the arithmetic is nearly all of the time.
_FEWEST_ROWS, _MOST_ROWS = 2, 128

# Lengths of the cache and numbers of rows: one to trace with, others to compare with.
_TRACED_SIZE = (7, 5)
_COMPARED_SIZES = ((1, 2), (30, 9), (300, 17))
# What the order of sums may change, relative to the largest number. The trace runs the same kernels, and says the same
# to the last bit, unless one of them sums in an order that depends on where in memory a tensor begins.
_TOLERANCE = 1e-5

_UNDERSTOOD = {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "output_hidden_states"}
# The classes of other packages, such as adapters and quantised layers, may change what they do without a trace of it.
_KNOWN_PACKAGES = ("torch.nn.modules.", "transformers.")
# transformers records hidden states by hooks that it adds when it is first asked for some, and that change nothing.
_RECORDING_HOOKS = "transformers.utils.output_capturing"
# It asks whether there is one row alone, in code that is the same for all models.
_STEADY_BRANCHES = "sdpa_attention.py"


class TracedDecoder:
    """Runs verifications of one target by traces of its decoder, where they hold. Shareable between calls.

    Args:
        model: the target, which has a causal decoder that takes token ids alone. It is not kept alive from here.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        # For each request for hidden states; None where they cannot be had by a trace.
        self._traces: dict[Any, _Trace | None] = {}

    @torch.no_grad()
    def prepare(self, output_hidden_states: bool | list[int]) -> None:
        """Trace verifications that return these hidden states, as the decoder's argument of that name says (False:
        none), unless that was done before. Takes about as long as a dozen small verifications."""
        model = self._model()
        with self._lock:
            if _key(output_hidden_states) not in self._traces and _can_be_traced(model):
                self._traces[_key(output_hidden_states)] = _trace(model, output_hidden_states)

    def run(self, inputs: dict[str, Any]) -> BaseModelOutputWithPast | None:
        """Do what the decoder does with these inputs, as `prepare_inputs_for_generation` gives them.

        Args:
            inputs: by name. `attention_mask` may be `[1, n]`, or `[1, 1, m, n]` to be added to the scores.

        Returns:
            The decoder's output, or None where no trace holds and nothing has been done: the first round, one row, a
            model that has been changed, an input or a cache that is not understood.
        """
        trace = self._traces.get(_key(inputs.get("output_hidden_states") or False))
        if trace is None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        cache = inputs.get("past_key_values")
        if not (_is_understood(inputs) and _is_plain(cache)):
            return None
        arguments = _arguments(inputs, cache, trace.dtype)
        if arguments is None or not trace.watch.sees_no_change(self._model()):
            return None
        return trace.run(arguments, cache)


class _Trace:
    """One traced graph.

    Args:
        graph: `_Verification`, traced.
        example: what the decoder returned for the same example as the graph was traced with.
        watch: over what it was traced from.
    """

    def __init__(self, graph: torch.jit.ScriptModule, example: BaseModelOutputWithPast, watch: "_Watch"):
        self.watch = watch
        self.dtype = example.last_hidden_state.dtype
        self._graph = graph
        # Which hidden states are there; the others are None in the decoder's output.
        states = example.hidden_states
        self._recorded = None if states is None else [state is not None for state in states]

    def run(self, arguments: tuple[torch.Tensor, ...], cache: DynamicCache) -> BaseModelOutputWithPast:
        """Run the graph, and give the cache the longer keys and values."""
        last, *outputs = self._graph(*arguments)
        states = outputs[: len(outputs) - 2 * len(cache.layers)]
        tensors = outputs[len(states) :]
        for layer, keys, values in zip(cache.layers, tensors[::2], tensors[1::2], strict=True):
            layer.keys, layer.values = keys, values
        if self._recorded is not None:
            following = iter(states)
            states = tuple(next(following) if is_there else None for is_there in self._recorded)
        return BaseModelOutputWithPast(
            last_hidden_state=last, past_key_values=cache, hidden_states=states if self._recorded is not None else None
        )


class _Watch:
    """Remembers what a trace was made from: modules, parameters, buffers, settings, and the classes' methods.

    A weight that is changed in place is still the same, as the graph reads it where it lies.
    """

    def __init__(self, model: PreTrainedModel):
        self._decoder = model.get_decoder()
        self._modules = list(self._decoder.modules())
        self._hooks = [hooks for module in self._modules for hooks in _hooks_of(module)]
        configs = (model.config, model.config.get_text_config())
        self._settings = [vars(one) for one in (*configs, *self._modules)]
        self._settings_then = [dict(one) for one in self._settings]
        # A forward that was written for a module without parts uses none that it is given.
        parts = [part for one in self._modules for part in (one._modules, one._parameters, one._buffers)]
        self._parts = list(filter(None, parts))
        self._parts_then = self._parts_now()
        self._tensors = [*self._decoder.parameters(), *self._decoder.buffers()]
        self._addresses_then = self._addresses_now()
        self._types_then = list(map(type, self._modules))
        self._classes = list(set(self._types_then))
        self._methods_then = self._methods_now()

    def sees_no_change(self, model: PreTrainedModel) -> bool:
        """Whether the decoder would run what it ran when it was traced. Takes less than a microsecond for each module,
        as no line of Python is run for each."""
        return (
            model.get_decoder() is self._decoder
            and not _has_foreign_hooks(self._hooks)
            and _are_the_same(self._parts_now(), self._parts_then)
            and _are_the_same(list(map(type, self._modules)), self._types_then)
            and _are_the_same(self._methods_now(), self._methods_then)
            and self._addresses_now() == self._addresses_then
            and self._has_the_same_settings()
        )

    def _has_the_same_settings(self) -> bool:
        try:
            return self._settings == self._settings_then
        # Two different tensors, which have no truth value together.
        except (RuntimeError, ValueError):
            return False

    def _parts_now(self) -> list[nn.Module | torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._parts)))

    def _addresses_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))

    def _methods_now(self) -> list[Any]:
        return [one.forward for one in self._classes] + [one.__call__ for one in self._classes]


def _are_the_same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    yield module._forward_hooks
    yield module._forward_pre_hooks


def _has_foreign_hooks(hooks: list[dict[int, Any]]) -> bool:
    """Whether anybody but transformers' recording of outputs listens."""
    return nn.modules.module._has_any_global_hook() or any(
        getattr(hook, "__module__", None) != _RECORDING_HOOKS for some in hooks if some for hook in some.values()
    )


def _key(output_hidden_states: bool | list[int]) -> bool | tuple[int, ...]:
    return tuple(output_hidden_states) if isinstance(output_hidden_states, list) else output_hidden_states


# Making a trace ------------------------------------------------------------------------------------------------------


class _Verification(nn.Module):
    """A verification as a function of tensors: tokens, positions, mask, keys and values in; last hidden states, the
    hidden states asked for, keys and values out."""

    def __init__(self, decoder: nn.Module, output_hidden_states: bool | list[int]):
        super().__init__()
        self.decoder = decoder
        self._request = output_hidden_states

    def run(self, token_ids: torch.Tensor, cache: DynamicCache, **inputs: Any) -> BaseModelOutputWithPast:
        """Run the decoder as `TargetForward` does."""
        if self._request is not False:
            inputs["output_hidden_states"] = self._request
        return self.decoder(input_ids=token_ids, past_key_values=cache, use_cache=True, **inputs)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, *tensors: torch.Tensor):
        cache = cache_of(list(tensors))
        return _tensors_of(self.run(token_ids, cache, position_ids=positions, attention_mask=mask))


def _tensors_of(outputs: BaseModelOutputWithPast) -> tuple[torch.Tensor, ...]:
    states = [state for state in outputs.hidden_states or () if state is not None]
    return (outputs.last_hidden_state, *states, *layers_of(outputs.past_key_values))


def _can_be_traced(model: PreTrainedModel) -> bool:
    """Whether a trace could hold for the model as it is now."""
    modules = list(model.get_decoder().modules())
    config = model.config.get_text_config()
    return (
        has_steady_steps(model)
        and config._attn_implementation in MASKED_ATTENTION
        and not getattr(model, "is_quantized", False)
        and not any(module.training or "forward" in vars(module) for module in modules)
        and all(type(module).__module__.startswith(_KNOWN_PACKAGES) for module in modules)
        and all(one.device.type == "cpu" for one in chain(model.parameters(), model.buffers()))
        and not _has_foreign_hooks([hooks for module in modules for hooks in _hooks_of(module)])
    )


def _trace(model: PreTrainedModel, output_hidden_states: bool | list[int]) -> _Trace | None:
    """Trace the decoder, or return None where the trace would not hold for every context."""
    verification = _Verification(model.get_decoder(), output_hidden_states).eval()
    try:
        with without_warnings():
            example = _example(model, *_TRACED_SIZE, is_tree=False)
            # What transformers sets up when it is first asked for hidden states must be there before the watch begins.
            model.get_decoder()(input_ids=example.token_ids, use_cache=False, output_hidden_states=[0])
            outputs = example.run(verification)
            graph = _traced(verification, example)
            watch = _Watch(model)
            holds = graph is not None and outputs.attentions is None
            for index, size in enumerate(_COMPARED_SIZES if holds else ()):
                holds = holds and _agrees(verification, graph, _example(model, *size, is_tree=index % 2 == 1))
    # A model may do anything in its forward; whatever keeps it from being traced only costs the speed of the trace.
    except Exception:
        return None
    return _Trace(graph, outputs, watch) if holds and watch.sees_no_change(model) else None


def _traced(verification: _Verification, example: "_Example") -> torch.jit.ScriptModule | None:
    """The graph, or None where Python looked at a number in a tensor, or at the size of one, and went by that, as for
    a mixture of experts that runs only those that are asked, or a rotary embedding that changes with the length."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = torch.jit.trace(verification, example.arguments(), check_trace=False)
    branches = [
        one
        for one in caught
        if issubclass(one.category, torch.jit.TracerWarning)
        and not str(one.message).startswith("torch.tensor results")
        and not one.filename.endswith(_STEADY_BRANCHES)
    ]
    return None if branches else graph


class _Example:
    """A verification after a context: both as the decoder takes it and as the graph does.

    Args:
        inputs: those of the decoder but the cache.
        tensors: keys and values.
    """

    def __init__(self, inputs: dict[str, torch.Tensor], tensors: list[torch.Tensor]):
        self.token_ids = inputs["input_ids"]
        self._inputs = inputs
        self._tensors = tensors

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What the graph is given."""
        return _arguments(self._inputs, cache_of(self._tensors), self._tensors[0].dtype)

    def run(self, verification: _Verification) -> BaseModelOutputWithPast:
        """Run the decoder itself."""
        inputs = {name: value for name, value in self._inputs.items() if name != "input_ids"}
        return verification.run(self.token_ids, cache_of(self._tensors), **inputs)


def _example(model: PreTrainedModel, length: int, rows: int, is_tree: bool) -> _Example:
    """A verification of random tokens after random keys and values; that of a tree at the last positions there are."""
    generator = torch.Generator().manual_seed(length)
    config = model.config.get_text_config()
    cache = DynamicCache()
    model.get_decoder()(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    tensors = [
        torch.randn(*one.shape[:2], length, one.shape[3], generator=generator, dtype=one.dtype)
        for one in layers_of(cache)
    ]
    token_ids = torch.randint(config.vocab_size, (1, rows), generator=generator)
    if not is_tree:
        mask = torch.ones(1, length + rows, dtype=torch.int64)
        positions = torch.arange(length, length + rows).unsqueeze(0)
        return _Example({"input_ids": token_ids, "attention_mask": mask, "position_ids": positions}, tensors)
    # Two children for each node.
    parents = (torch.arange(rows) - 1) // 2
    levels = torch.log2(torch.arange(1.0, rows + 1)).long()
    mask = attention_mask(torch.ones(length, dtype=torch.bool), descent(parents, rows), levels, levels, model.dtype)
    first = max(length, (getattr(config, "max_position_embeddings", None) or 0) - rows)
    positions = (first + levels).unsqueeze(0)
    return _Example({"input_ids": token_ids, "attention_mask": mask, "position_ids": positions}, tensors)


def _agrees(verification: _Verification, graph: torch.jit.ScriptModule, example: _Example) -> bool:
    theirs = _tensors_of(example.run(verification))
    return all(
        ours.shape == own.shape and bool(((ours - own).abs() <= _TOLERANCE * own.abs().max()).all())
        for ours, own in zip(graph(*example.arguments()), theirs, strict=True)
    )


# Using a trace -------------------------------------------------------------------------------------------------------


def _is_understood(inputs: dict[str, Any]) -> bool:
    """Whether nothing is asked for that the graph does not do."""
    others = (value for name, value in inputs.items() if name not in _UNDERSTOOD)
    return inputs.get("use_cache") is True and all(value is None or value is False for value in others)


def _is_plain(cache: Any) -> bool:
    """Whether the cache is one that keeps everything, of one sequence, and holds something."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)
        and cache.get_seq_length() > 0
        and all(tensor.shape[0] == 1 for tensor in layers_of(cache))
    )


def _arguments(inputs: dict[str, Any], cache: DynamicCache, dtype: torch.dtype) -> tuple[torch.Tensor, ...] | None:
    """The graph's arguments; None for inputs of other shapes than a verification has."""
    token_ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    cached, rows = cache.get_seq_length(), token_ids.shape[1]
    if token_ids.shape[0] != 1 or not _FEWEST_ROWS <= rows <= _MOST_ROWS:
        return None
    steps = torch.arange(rows)
    if positions is None:
        positions = (steps + cached).unsqueeze(0)
    if mask is None or (isinstance(mask, torch.Tensor) and mask.shape == (1, cached + rows)):
        visible = torch.ones(cached + rows, dtype=torch.bool) if mask is None else mask[0].bool()
        earlier = torch.ones(rows, rows, dtype=torch.bool).tril() & visible[cached:]
        mask = attention_mask(visible[:cached], earlier, steps, steps, dtype)
    if not isinstance(mask, torch.Tensor) or mask.shape != (1, 1, rows, cached + rows) or mask.dtype != dtype:
        return None
    if not isinstance(positions, torch.Tensor) or positions.shape != (1, rows):
        return None
    return token_ids, positions, mask, *layers_of(cache)
