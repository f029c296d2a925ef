"""The caches of transformers' models: their length, whether they hold recurrent states, and their name, given and
returned: `cache` from 5.24 on, `past_key_values` before."""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

CACHE_NAMES = "cache", "past_key_values"
_INPUTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# Under which models are given it, and under which their outputs hold it.
CACHE = next(name for name in CACHE_NAMES if name in _INPUTS)


def cache_inputs(cache: Cache | None) -> dict[str, Any]:
    """The arguments of a forward that reads on from a cache, and into it."""
    return {CACHE: cache, "use_cache": True}


def passed_cache(arguments: Mapping[str, Any]) -> Cache | None:
    """The cache among a caller's arguments. Versions that take the newer name take the older one too."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def returned_cache(outputs: Any) -> Cache | None:
    """The cache among a model's outputs."""
    return getattr(outputs, CACHE, None)


def cached_tokens(cache: Cache | None) -> int:
    """The tokens whose keys and values a cache holds: 0 if it has no layer with attention."""
    if cache is None or (getattr(cache, "layers", None) and all(getattr(cache, "is_linear", [False]))):
        return 0
    return cache.get_seq_length()


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether a model keeps a recurrent state. A class of hybrids is flagged as recurrent as a whole, though a model
    of it may have attention layers alone."""
    if not getattr(model, "_is_stateful", False):
        return False
    config = model.config.get_text_config()
    if not getattr(config, "layer_types", None):
        return True
    layers = DynamicCache(config=config).layers
    return any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
