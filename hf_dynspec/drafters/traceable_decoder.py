"""Whether a draft step of a causal language model can be recorded, and whether a record still holds."""

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..cache_names import cache_inputs
from ..errors import UnsupportedError
from .weights_watch import WeightsWatch

# Lengths of cached context at which a record is compared with the decoder.
COMPARED_LENGTHS = (1, 7, 30)

# Kinds of rotary embedding that are the same function of the position at every length.
_STEADY_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
# Classes of other packages, such as adapters and quantised layers, may change their behaviour unnoticed.
_KNOWN_PACKAGES = ("torch.nn.modules.", "transformers.")
# transformers records hidden states by hooks, added on first use, which change nothing.
RECORDING_HOOKS = "transformers.utils.output_capturing"


def layers_of(cache: DynamicCache) -> list[torch.Tensor]:
    """The keys and values `[1, heads, n, head_dim]` of a cache, layer by layer: key, value, key, value, …"""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def cache_of(tensors: list[torch.Tensor], kind: type[DynamicLayer] = DynamicLayer) -> DynamicCache:
    """A cache over the keys and values of `layers_of`, without copying them, in layers of this kind."""
    cache = DynamicCache()
    for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
        layer = kind()
        # As its lazy initialization, but without the empty tensors, which wait for a GPU.
        layer.keys, layer.values, layer.dtype, layer.device = keys, values, keys.dtype, keys.device
        layer.is_initialized = True
        cache.layers.append(layer)
    return cache


class SteadyDecoder:
    """The hooks, settings and methods of a decoder at the time of a record. `watch` watches the decoder."""

    def __init__(self, watch: WeightsWatch):
        self.watch = watch
        modules = list(watch.module.modules())
        self._hooks = _hooks_of(modules)
        self._settings = [vars(one) for one in modules]
        self._settings_then = [dict(one) for one in self._settings]
        self._classes = list({type(one) for one in modules})
        self._methods_then = self._methods_now()

    def still_holds(self) -> bool:
        """Whether the decoder has no hooks, and its settings and methods have not changed. Weights may change freely,
        and the watch sees replaced parts."""
        if _has_foreign_hooks(self._hooks) or self._methods_now() != self._methods_then:
            return False
        try:
            return self._settings == self._settings_then
        # The comparison of two different tensors has no truth value.
        except (RuntimeError, ValueError):
            return False

    def _methods_now(self) -> list[Any]:
        return [method for one in self._classes for method in (one.forward, one.__call__)]


def can_be_recorded(model: PreTrainedModel, modules: list[nn.Module]) -> bool:
    """Whether a record of a step can hold for these modules of a model in their present state."""
    return may_be_recorded(model, modules) and are_known(modules)


def may_be_recorded(model: PreTrainedModel, modules: list[nn.Module]) -> bool:
    """`can_be_recorded`, if modules of other packages do nothing that a record misses."""
    return (
        _has_steady_positions(model)
        and not any(module.training or "forward" in vars(module) for module in modules)
        and not _has_foreign_hooks(_hooks_of(modules))
    )


def are_known(modules: list[nn.Module]) -> bool:
    """Whether all modules are torch's or transformers' own."""
    return all(type(module).__module__.startswith(_KNOWN_PACKAGES) for module in modules)


def context_of(decoder: nn.Module, length: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A token, int64 `[1, 1]`, and the keys and values of a context of that length before it."""
    embedding = decoder.get_input_embeddings().weight
    context = torch.arange(length, device=embedding.device).remainder(embedding.shape[0]).unsqueeze(0)
    cache = DynamicCache()
    decoder(input_ids=context, **cache_inputs(cache))
    return context[:, -1:], layers_of(cache)


def are_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of a step agree up to rounding."""
    tolerance = 1e-4 if first.dtype == torch.float32 else 5e-2
    return first.shape == second.shape and torch.allclose(first, second, rtol=tolerance, atol=tolerance)


def require_steady_positions(model: PreTrainedModel) -> None:
    """Make sure that the rotation of a position is the same in every context, and the model on one device
    (`UnsupportedError`)."""
    if not _has_steady_positions(model):
        raise UnsupportedError(
            f"{type(model).__name__} lies on several devices, or has a rotary embedding that changes with the length "
            "of the text."
        )


def _has_steady_positions(model: PreTrainedModel) -> bool:
    """Whether the rotation of a position is the same in every context, and the model is on one device."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return (
        all(one.get("rope_type", "default") in _STEADY_ROPE for one in ropes)
        and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
    )


def _hooks_of(modules: list[nn.Module]) -> list[dict[int, Any]]:
    return [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]


def _has_foreign_hooks(hooks: list[dict[int, Any]]) -> bool:
    """Whether there are hooks other than transformers' recording of outputs."""
    return nn.modules.module._has_any_global_hook() or any(
        getattr(hook, "__module__", None) != RECORDING_HOOKS for some in hooks if some for hook in some.values()
    )
