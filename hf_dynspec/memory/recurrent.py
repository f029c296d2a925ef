"""Bringing a model's dynamic cache back to the accepted tokens.

Keys and values of rejected candidates are cut off. A recurrent state has no positions to cut: it is copied before a
verification, and the inputs of the modules that update it (mixers) are recorded meanwhile. Afterwards these modules
alone read the accepted rows again. Their projections return the outputs that were recorded, so that little more than
the recurrence itself is computed twice.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache_names import cache_inputs, is_recurrent
from ..errors import UnsupportedError
from ..modeling.parts import (
    FORWARD_ERRORS,
    computes_in_fp32,
    input_device,
    output_rows,
    require_finite_weights,
)

_KEYS_AND_VALUES = DynamicLayer, DynamicSlidingWindowLayer
# Layers that keep states, and such that keep nothing. Older releases have no common class of the former.
_STATES = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
_NOTHING = getattr(cache_utils, "DummyLayer", ())
# A check reads this many tokens, and then so many at once and one by one.
_CHECKED_PROMPT, _CHECKED_ROWS, _CHECKED_KEPT = 5, 4, 2


class Rollback:
    """Rolls the caches of one model back. Shareable between calls.

    Args:
        model: a model whose caches are dynamic.

    Raises:
        UnsupportedError: it keeps a state that cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        # By name, so that parts of the model may be replaced.
        self._mixers = _checked_mixers(model) if is_recurrent(model) else ()

    @property
    def has_states(self) -> bool:
        """Whether the model keeps recurrent states."""
        return bool(self._mixers)

    def activate(self, cache: Cache) -> None:
        """Let a cache keep what a rollback needs."""
        if not self.has_states:
            cache.activate_past_recording()
            return
        # Convolutions of recurrent layers are copied with the states: recording them would change how models step.
        for layer in cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()

    def reading(self, cache: Cache, candidates: int) -> "Reading":
        """What records the next forward over the last verified token and `candidates` after it."""
        mixers = [self._model().get_submodule(name) for name in self._mixers] if candidates else []
        return Reading(cache, mixers, candidates + 1)

    def crop(self, cache: Cache, change: int) -> None:
        """Remove the keys and values of the last `-change` tokens."""
        if self.has_states:
            _crop_attention(cache, change)
        else:
            cache.crop(change)


class RecurrentStates:
    """The states of a cache's recurrent layers after some token.

    Args:
        cache: the cache, whose states are copied.
    """

    def __init__(self, cache: Cache):
        self._layers = [layer for layer in cache.layers if isinstance(layer, _STATES)]
        self._saved = [
            (dict(layer.has_previous_state), _copied(layer.conv_states), _copied(layer.recurrent_states))
            for layer in self._layers
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of the copies."""
        kept = [one for _, *both in self._saved for states in both for one in states.values() if one is not None]
        return sum(one.nbytes for one in kept)

    def restore(self) -> None:
        """Give the cache these states."""
        for layer, (has_state, convolutions, states) in zip(self._layers, self._saved, strict=True):
            layer.has_previous_state.update(has_state)
            # Models update states in place, so the copies stay apart.
            layer.conv_states.update(_copied(convolutions))
            layer.recurrent_states.update(_copied(states))


def _copied(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    # A layer without a state overwrites what is there.
    return {index: state.clone() for index, state in states.items() if state is not None}


class _Call(NamedTuple):
    """One call of a mixer: its inputs, and the outputs of its projections by name."""

    mixer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    projected: dict[str, list[torch.Tensor]]


class Reading:
    """Records one forward, while it is entered. Hooks are on the mixers meanwhile, and nothing stays there.

    Args:
        cache: the cache that the forward reads on from.
        mixers: the modules that update recurrent states; none if there is nothing to record.
        rows: the tokens of the forward.
    """

    def __init__(self, cache: Cache, mixers: list[nn.Module], rows: int):
        self._cache, self._mixers, self._rows = cache, mixers, rows
        self._states = RecurrentStates(cache) if mixers else None
        self._calls: list[_Call] = []
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> "Reading":
        for mixer in self._mixers:
            self._hooks.append(mixer.register_forward_pre_hook(self._begin, with_kwargs=True))
            for name, child in mixer.named_children():
                if isinstance(child, nn.Linear):
                    self._hooks.append(child.register_forward_hook(partial(self._keep_projected, name)))
        return self

    def __exit__(self, *raised: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread may run the same modules.
        if kwargs is not None and self._is_mine():
            self._calls.append(_Call(mixer, args, kwargs, {}))

    def _keep_projected(self, name: str, child: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if self._is_mine() and self._calls and output.dim() == 3 and output.shape[1] == self._rows:
            self._calls[-1].projected.setdefault(name, []).append(output)

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    @torch.no_grad()
    def keep(self, rows: int) -> None:
        """Bring the recurrent states to the end of the first rows of the forward.

        Raises:
            UnsupportedError: the forward ran without its hooks.
        """
        if not self._mixers or rows == self._rows:
            return
        if {id(call.mixer) for call in self._calls} != {id(mixer) for mixer in self._mixers}:
            raise UnsupportedError(
                "the model ran without the hooks by which its recurrent states are rolled back, as compiled models do: "
                "generate with a model that is not compiled, or without an assistant."
            )
        self._states.restore()
        for call in self._calls:
            _run_again(call, self._rows, rows)


def _run_again(call: _Call, rows: int, kept: int) -> None:
    """Let a mixer read the first rows of a call again. The module itself is not touched."""
    mixer = _twin(call.mixer)
    mixer.__dict__["_modules"] = dict(call.mixer._modules)
    for name, outputs in call.projected.items():
        twin = _twin(call.mixer._modules[name])
        left = iter(outputs)
        twin.forward = lambda *args, left=left, **kwargs: next(left)[:, :kept]
        mixer._modules[name] = twin

    def first(value: Any) -> Any:
        is_rows = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == rows
        return value[:, :kept] if is_rows else value

    mixer.forward(*map(first, call.args), **{name: first(value) for name, value in call.kwargs.items()})


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same weights, without hooks: these have run already."""
    twin = copy.copy(module)
    twin.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    return twin


def _crop_attention(cache: Cache, change: int) -> None:
    """Remove the keys and values of the last `-change` tokens, and leave recurrent states alone."""
    for layer in cache.layers:
        if isinstance(layer, _STATES):
            if layer.record_past:
                # A layer with a window, which records convolutions too.
                _STATES.crop(layer, 0)
            kind = next((kind for kind in reversed(_KEYS_AND_VALUES) if isinstance(layer, kind)), None)
            if kind is not None:
                kind.crop(layer, change)
        else:
            layer.crop(change)


# Checks --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _checked_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the modules of a recurrent model that update its states.

    Raises:
        UnsupportedError: its states cannot be rolled back.
    """
    name, way_out = type(model).__name__, "Generate without an assistant, or use another drafter"
    cache = DynamicCache(config=model.config.get_text_config())
    own = [type(one).__name__ for one in cache.layers if not isinstance(one, (_STATES, _NOTHING, *_KEYS_AND_VALUES))]
    if own or not model._supports_default_dynamic_cache() or not _STATES or not hasattr(cache, "get_recurrent_state"):
        kept = f"layers of its own kind ({own[0]})" if own else "a cache of its own"
        raise UnsupportedError(
            f"{name} keeps a recurrent state in {kept}, which cannot be rolled back to the accepted tokens. {way_out}."
        )
    device, count = input_device(model), _CHECKED_PROMPT + _CHECKED_ROWS
    text = torch.arange(1, count + 1, device=device).unsqueeze(0) % output_rows(model)

    def read(first: int, end: int) -> torch.Tensor:
        return model(input_ids=text[:, first:end], **cache_inputs(cache)).logits[0].float()

    try:
        names = _names_of_mixers(model, cache, partial(read, 0, _CHECKED_PROMPT))
        if not names:
            raise UnsupportedError(
                f"{name} keeps a recurrent state outside its cache, which cannot be rolled back to the accepted "
                f"tokens. {way_out}."
            )
        before = RecurrentStates(cache)
        places = range(_CHECKED_PROMPT, count)
        alone = torch.cat([read(place, place + 1) for place in places])
        _crop_attention(cache, -_CHECKED_ROWS)
        before.restore()
        reading = Reading(cache, [model.get_submodule(one) for one in names], _CHECKED_ROWS)
        with reading:
            together = read(_CHECKED_PROMPT, count)
        reading.keep(_CHECKED_KEPT)
        _crop_attention(cache, _CHECKED_KEPT - _CHECKED_ROWS)
        place = places[_CHECKED_KEPT]
        after = read(place, place + 1)
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(
            f"{name} keeps a recurrent state that cannot be rolled back to the accepted tokens: {error!s:.200}. "
            f"{way_out}."
        ) from error
    tolerance = (1e-3 if computes_in_fp32(model) else 5e-2) * alone.abs().max()
    problems = (
        (together, alone, "reads several tokens at once in another way than one by one once it has a state"),
        (after, alone[_CHECKED_KEPT : _CHECKED_KEPT + 1], "has recurrent layers that cannot be run again alone"),
    )
    for actual, expected, problem in problems:
        if not bool(((actual - expected).abs() <= tolerance).all()):
            require_finite_weights(model)
            raise UnsupportedError(
                f"{name} {problem}, so its recurrent state cannot be rolled back to the accepted tokens. {way_out}."
            )
    return names


def _names_of_mixers(model: PreTrainedModel, cache: Any, run: Callable[[], Any]) -> tuple[str, ...]:
    """The names of the modules that ask the cache for a recurrent state during a run."""
    running: list[nn.Module] = []
    found: dict[nn.Module, None] = {}
    thread, get_state = threading.get_ident(), cache.get_recurrent_state

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    def get_recurrent_state(*args: Any, **kwargs: Any) -> Any:
        found[running[-1]] = None
        return get_state(*args, **kwargs)

    modules = list(model.modules())
    hooks = [one.register_forward_pre_hook(enter) for one in modules]
    hooks += [one.register_forward_hook(leave, always_call=True) for one in modules]
    cache.get_recurrent_state = get_recurrent_state
    try:
        run()
    finally:
        del cache.get_recurrent_state
        for hook in hooks:
            hook.remove()
    return tuple(name for name, module in model.named_modules() if module in found)
