"""Bringing a model's dynamic cache back to the accepted tokens.

Keys and values of rejected candidates are cut off. A recurrent state has no positions to cut: it is copied before a
verification, and the inputs of the modules that update it (mixers) are recorded meanwhile. Afterwards these modules
alone read the accepted rows again. Their projections return the outputs that were recorded, so that little more than
the recurrence itself is computed twice.
"""

import copy
import functools
import inspect
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
from ..modeling.parts import FORWARD_ERRORS, computes_in_fp32, input_device, output_rows, require_finite_weights

_KEYS_AND_VALUES = DynamicLayer, DynamicSlidingWindowLayer
# Layers that keep states, and such that keep nothing. Older releases have no common class of the former.
_STATES = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
_NOTHING = getattr(cache_utils, "DummyLayer", ())
# A check reads this many tokens, and then so many at once and one by one.
_CHECKED_PROMPT, _CHECKED_ROWS, _CHECKED_KEPT = 5, 4, 2
_WAY_OUT = "Use another target, or generate without an assistant."


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
        record_past(cache, self.has_states)

    def reading(self, cache: Cache, candidates: int) -> "Reading":
        """What the next forward is entered with: it reads that many candidates after the last verified token."""
        mixers = [self._model().get_submodule(name) for name in self._mixers] if candidates else []
        return Reading(cache, mixers, candidates + 1)

    def keep(self, cache: Cache, reading: "Reading", accepted: int) -> None:
        """Bring a cache to the end of the accepted candidates of its last forward.

        Raises:
            UnsupportedError: the forward ran without its hooks.
        """
        reading.keep(accepted + 1)
        removed = reading.rows - accepted - 1
        if self.has_states:
            crop_attention(cache, -removed)
        else:
            cache.crop(-removed)


class RecurrentStates:
    """The states of a cache's recurrent layers after some token.

    Args:
        cache: the cache, whose states are copied.

    Attributes:
        of_layers: the layers.
    """

    def __init__(self, cache: Cache):
        self.of_layers = [layer for layer in cache.layers if isinstance(layer, _STATES)]
        self._saved = [
            (dict(layer.has_previous_state), _copied(layer.conv_states), _copied(layer.recurrent_states))
            for layer in self.of_layers
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of the copies."""
        kept = [one for _, *both in self._saved for states in both for one in states.values() if one is not None]
        return sum(one.nbytes for one in kept)

    def restore(self) -> None:
        """Give the cache these states."""
        for layer, (has_state, convolutions, states) in zip(self.of_layers, self._saved, strict=True):
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

    Attributes:
        rows: as given.
    """

    def __init__(self, cache: Cache, mixers: list[nn.Module], rows: int):
        self._mixers, self.rows = mixers, rows
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
        if self._is_mine() and self._calls and output.dim() == 3 and output.shape[1] == self.rows:
            self._calls[-1].projected.setdefault(name, []).append(output)

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread

    @torch.no_grad()
    def keep(self, rows: int) -> None:
        """Bring the recurrent states to the end of the first rows of the forward."""
        if not self._mixers or rows == self.rows:
            return
        if {id(call.mixer) for call in self._calls} != {id(mixer) for mixer in self._mixers}:
            raise UnsupportedError(
                "the target ran without the hooks that record how to roll its recurrent states back, as compiled "
                "models do: do not compile it, or generate without an assistant."
            )
        self._states.restore()
        for call in self._calls:
            _run_again(call, self.rows, rows)


def _run_again(call: _Call, rows: int, kept: int) -> None:
    """Let a mixer read the first rows of a call again, one by one as in plain generation: many read several in chunks,
    which cost more than so few steps. The module itself is not touched."""
    mixer = _twin(call.mixer)
    mixer.__dict__["_modules"] = dict(call.mixer._modules)
    twins = {name: _twin(call.mixer._modules[name]) for name in call.projected}
    mixer._modules.update(twins)
    for row in range(kept):
        for name, outputs in call.projected.items():
            left = iter(outputs)
            twins[name].forward = lambda *args, left=left, row=row: next(left)[:, row : row + 1]
        named = {name: _row(value, row, rows) for name, value in call.kwargs.items()}
        mixer.forward(*(_row(value, row, rows) for value in call.args), **named)


def _row(value: Any, row: int, rows: int) -> Any:
    """One row of an argument that has them."""
    has_rows = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == rows
    return value[:, row : row + 1] if has_rows else value


def _twin(module: nn.Module) -> nn.Module:
    """A module with the same weights, without hooks: these have run already."""
    twin = copy.copy(module)
    twin.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    return twin


def record_past(cache: Cache, has_states: bool) -> None:
    """Let a cache keep what cropping needs. Convolutions beside recurrent states are copied with them: recording them
    would change how some models step."""
    if not has_states:
        cache.activate_past_recording()
        return
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()


def crop_attention(cache: Cache, change: int) -> None:
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


class Places:
    """The recurrent states of a cache after some of its tokens, for a model that reads them one by one.

    Args:
        cache: an empty cache.
    """

    def __init__(self, cache: Cache):
        self._cache = cache
        self._states = {0: RecurrentStates(cache)}

    def add(self, length: int) -> None:
        """Copy the states, which are those after so many tokens."""
        self._states[length] = RecurrentStates(self._cache)

    def forget_before(self, length: int) -> None:
        """Nothing will be truncated to a length below this one, except to 0."""
        self._states = {place: states for place, states in self._states.items() if place >= length or not place}

    def truncate(self, length: int, change: int) -> int:
        """Shorten the cache, of that length, by at least `-change` tokens. Returns its length."""
        place = max(one for one in self._states if one <= length + change)
        crop_attention(self._cache, place - length)
        if place < length:
            self._states[place].restore()
            self._states = {one: states for one, states in self._states.items() if one <= place}
        return place


def positions_from(model: nn.Module, first: int, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The positions of `count` tokens as an argument of a model's forward, if it takes them: some hybrids count from 0
    in every forward unless they are told."""
    if not _takes_positions(type(model)):
        return {}
    return {"position_ids": torch.arange(first, first + count, device=device).unsqueeze(0)}


@functools.cache
def _takes_positions(architecture: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(architecture.forward).parameters


# Checks --------------------------------------------------------------------------------------------------------------


def require_states_in_cache(model: PreTrainedModel) -> None:
    """Check that a recurrent model keeps its states in transformers' own layers of a cache.

    Raises:
        UnsupportedError: it does not.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    own = [
        type(layer).__name__
        for layer in cache.layers
        if not isinstance(layer, (_STATES, _NOTHING)) and type(layer) not in _KEYS_AND_VALUES
    ]
    kept = f"layers of its own kind, {own[0]}" if own else "a cache of its own"
    if not own and model._supports_default_dynamic_cache() and _STATES and hasattr(cache, "get_recurrent_state"):
        tokens = torch.ones(1, 2, dtype=torch.int64, device=input_device(model))
        model(input_ids=tokens, **cache_inputs(cache))
        if any(
            state is not None for one in RecurrentStates(cache).of_layers for state in one.recurrent_states.values()
        ):
            return
        kept = "its modules, and not in its cache"
    raise UnsupportedError(
        f"{type(model).__name__} keeps a recurrent state in {kept}, which cannot be rolled back to the accepted "
        "tokens. Use another model, or generate without an assistant."
    )


@torch.no_grad()
def _checked_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the modules of a recurrent model that update its states.

    Raises:
        UnsupportedError: its states cannot be rolled back.
    """
    require_states_in_cache(model)
    cache, device = DynamicCache(config=model.config.get_text_config()), input_device(model)
    count = _CHECKED_PROMPT + _CHECKED_ROWS
    text = torch.arange(1, count + 1, device=device).unsqueeze(0) % output_rows(model)

    def read(first: int, end: int) -> torch.Tensor:
        inputs = cache_inputs(cache) | positions_from(model, first, end - first, device)
        return model(input_ids=text[:, first:end], **inputs).logits[0].float()

    names = _names_of_mixers(model, cache, partial(read, 0, _CHECKED_PROMPT))
    before, places = RecurrentStates(cache), range(_CHECKED_PROMPT, count)
    alone = torch.cat([read(place, place + 1) for place in places])
    crop_attention(cache, -_CHECKED_ROWS)
    before.restore()
    reading = Reading(cache, [model.get_submodule(one) for one in names], _CHECKED_ROWS)
    with reading:
        together = read(_CHECKED_PROMPT, count)
    _require_agreement(
        model,
        together,
        alone,
        "does not go on from its recurrent state when it reads several tokens at once, so no draft can be verified in "
        "one forward",
    )
    problem = "has recurrent layers that cannot be run alone, to roll back the state to the accepted tokens"
    try:
        reading.keep(_CHECKED_KEPT)
    except FORWARD_ERRORS as error:
        raise UnsupportedError(f"{type(model).__name__} {problem}: {error!s:.200}. {_WAY_OUT}") from error
    crop_attention(cache, _CHECKED_KEPT - _CHECKED_ROWS)
    place = places[_CHECKED_KEPT]
    _require_agreement(model, read(place, place + 1), alone[_CHECKED_KEPT : _CHECKED_KEPT + 1], problem)
    return names


def _require_agreement(model: PreTrainedModel, actual: torch.Tensor, expected: torch.Tensor, problem: str) -> None:
    tolerance = (1e-3 if computes_in_fp32(model) else 5e-2) * expected.abs().max()
    if not bool(((actual - expected).abs() <= tolerance).all()):
        require_finite_weights(model)
        raise UnsupportedError(f"{type(model).__name__} {problem}. {_WAY_OUT}")


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
