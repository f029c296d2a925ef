"""One draft step of a causal language model as a traced graph, without the Python between its operations.

A drafter has few layers, and a step of one token does little arithmetic in each: most of the time of such a step is
spent between the operations. A trace of the step replays them alone. Tracing takes a fraction of a second, and the
graph is used only after it has agreed with the model at lengths other than the one it was traced at.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

# Lengths of cached context: one to trace at, the others to compare at.
_TRACED_LENGTH = 7
_COMPARED_LENGTHS = (1, 7, 30)

# Kinds of rotary embedding that are the same function of the position at every length.
_STEADY_ROPE = ("default", "linear", "llama3", "proportional")


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


class _Step(nn.Module):
    """A step as a function of tensors: token, position, keys and values in; hidden state, keys and values out."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder = decoder

    def forward(self, token_id: torch.Tensor, position: torch.Tensor, *tensors: torch.Tensor):
        cache = cache_of(list(tensors))
        outputs = self.decoder(input_ids=token_id, position_ids=position, past_key_values=cache, use_cache=True)
        return (outputs[0], *layers_of(cache))


def trace_step(model: PreTrainedModel) -> torch.jit.ScriptModule | None:
    """Trace one step of the model's decoder, or return None where a trace would not hold for every context.

    Returns:
        A function of a token id, int64 `[1, 1]`, its position, int64 `[1, 1]`, and the keys and values of every layer;
        it returns the hidden state `[1, 1, d]` and the longer keys and values.
    """
    if model.training or not has_steady_steps(model):
        return None
    step = _Step(model.get_decoder()).eval()
    try:
        with torch.no_grad(), without_warnings():
            traced = torch.jit.trace(step, _example(model, _TRACED_LENGTH), check_trace=False)
            agrees = all(_agrees(step, traced, _example(model, length)) for length in _COMPARED_LENGTHS)
    # A model may do anything in its forward; whatever keeps it from being traced only costs the speed of the trace.
    except Exception:
        return None
    return traced if agrees else None


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


def _example(model: PreTrainedModel, length: int) -> tuple[torch.Tensor, ...]:
    """Inputs of a step after a context of that length."""
    device = model.get_input_embeddings().weight.device
    context = torch.arange(length, device=device).unsqueeze(0)
    cache = DynamicCache()
    model.get_decoder()(input_ids=context, past_key_values=cache, use_cache=True)
    return context[:, -1:], torch.tensor([[length]], device=device), *layers_of(cache)


def _agrees(step: nn.Module, traced: torch.jit.ScriptModule, example: tuple[torch.Tensor, ...]) -> bool:
    tolerance = 1e-4 if example[2].dtype == torch.float32 else 5e-2
    return all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(traced(*example), step(*example), strict=True)
    )
