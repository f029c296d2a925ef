"""Bringing a model's dynamic cache back to the accepted tokens.

Keys and values of rejected candidates are cut off. A recurrent state has no positions to cut: it goes back to a copy
from before the verification. The modules that update it (mixers) then lag behind by the accepted rows, whose inputs
were recorded. In the next verification they read these rows again, before its own and in the same call: a mixer takes
about as long for some rows more, and reading them at once would take a call of its own.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache_names import cache_inputs, is_recurrent
from ..errors import UnsupportedError
from ..modeling.parts import FORWARD_ERRORS, agree, input_device, output_rows, require_finite_weights

_KEYS_AND_VALUES = DynamicLayer, DynamicSlidingWindowLayer
# Layers that keep states, and such that keep nothing. Older releases have no common class of the former.
_STATES = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
_NOTHING = getattr(cache_utils, "DummyLayer", ())
# A check reads this many tokens, and then so many at once and one by one.
_CHECKED_PROMPT, _CHECKED_ROWS, _CHECKED_KEPT = 5, 4, 2
# Mixers read so many rows of earlier rounds again at most.
_MOST_WAITING = 24


class Rollback:
    """How the caches of one model are rolled back. Shareable between calls.

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

    def of(self, cache: Cache) -> "RolledBack":
        """A cache that is rolled back as long as this is entered."""
        return RolledBack(cache, [self._model().get_submodule(name) for name in self._mixers])


class RecurrentStates:
    """The states of a cache's recurrent layers after some token.

    Args:
        cache: the cache, whose states are copied.
    """

    def __init__(self, cache: Cache):
        self._layers = layers_with_states(cache)
        self._saved = [
            (dict(layer.has_previous_state), _copied(layer.conv_states), _copied(layer.recurrent_states))
            for layer in self._layers
        ]

    def tensors(self) -> list[torch.Tensor]:
        """The copies."""
        return [state for _, *both in self._saved for states in both for state in states.values()]

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
    """One call of a mixer: its arguments, and those of them that have a row for each token, by place or name."""

    mixer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: dict[int | str, torch.Tensor]

    @classmethod
    def of(cls, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> "_Call":
        """The call of a forward over `count` tokens, none of which is padding."""
        args, kwargs = tuple(map(_without_mask, args)), {name: _without_mask(one) for name, one in kwargs.items()}
        places = [*enumerate(args), *kwargs.items()]
        rows = {key: one for key, one in places if _is_tensor(one, 3) and one.shape[1] == count}
        return cls(mixer, args, kwargs, rows)

    def after(self, earlier: "_Call") -> "_Call":
        """The same call with the rows of an earlier one before its own."""
        rows = {key: torch.cat([earlier.rows[key], one], dim=1) for key, one in self.rows.items()}
        return self._replace(rows=rows)

    def first(self, count: int) -> "_Call":
        """The same call with its first rows alone."""
        return self._replace(rows={key: one[:, :count] for key, one in self.rows.items()})

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these rows."""
        args = tuple(self.rows.get(place, one) for place, one in enumerate(self.args))
        return args, {name: self.rows.get(name, one) for name, one in self.kwargs.items()}


def _is_tensor(value: Any, dim: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == dim


def _without_mask(value: Any) -> Any:
    return None if _is_tensor(value, 2) else value


class RolledBack:
    """One cache that is rolled back after each forward. When this is left, its states are those after all tokens that
    it holds.

    Args:
        cache: a cache that is in use, or an empty one.
        mixers: the modules that update its recurrent states; none if it has none.

    Attributes:
        cache: as given.
    """

    def __init__(self, cache: Cache, mixers: list[nn.Module]):
        self.cache, self._mixers = cache, mixers
        self._rows = 1
        # The states before the rows that mixers have yet to read, and these rows.
        self._base: RecurrentStates | None = None
        self._waiting: list[_Call] = []
        self._count_waiting = 0
        # The calls of the present forward, if they are recorded.
        self._calls: list[_Call] | None = None
        self.use(cache)

    @property
    def has_states(self) -> bool:
        """Whether the cache has recurrent states."""
        return bool(self._mixers)

    def use(self, cache: Cache) -> None:
        """Go on with another cache: some models begin one when a text grows past a limit."""
        self.cache = cache
        record_past(cache, self.has_states)

    def __enter__(self) -> "RolledBack":
        return self

    def __exit__(self, *raised: object) -> None:
        self._catch_up()

    @contextmanager
    def reading(self, candidates: int) -> Iterator[None]:
        """A forward of the model over the last verified token and so many candidates. Meanwhile hooks are on the
        mixers, and nothing stays there."""
        self._rows, self._calls = candidates + 1, None
        if not self._mixers or (not candidates and not self._waiting):
            yield
            return
        if not self._waiting:
            self._base = RecurrentStates(self.cache)
        self._calls, hooks = [], []
        try:
            for mixer in self._mixers:
                hooks.append(mixer.register_forward_pre_hook(self._begin, with_kwargs=True))
                hooks.append(mixer.register_forward_hook(self._end, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Let a mixer read the waiting rows first. Other threads may run the same modules with other caches."""
        if kwargs is None or not self._is_given(args, kwargs):
            return None
        call = _Call.of(mixer, args, kwargs, self._rows)
        if self._waiting:
            call = call.after(self._waiting[len(self._calls)])
        self._calls.append(call)
        return call.arguments()

    def _end(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> Any:
        return output[:, -self._rows :] if output is not None and self._is_given(args, kwargs) else None

    def _is_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(one is self.cache for one in (*args, *kwargs.values()))

    def keep(self, accepted: int) -> None:
        """Go back to the end of the accepted candidates of the last forward.

        Raises:
            UnsupportedError: the forward ran without the hooks.
        """
        removed = self._rows - 1 - accepted
        if self._calls is not None:
            if [id(call.mixer) for call in self._calls] != [id(mixer) for mixer in self._mixers]:
                raise UnsupportedError(
                    "the target ran without the hooks that record how to roll its recurrent states back, as compiled "
                    "models do: do not compile it, or generate without an assistant."
                )
            calls, count, self._calls = self._calls, self._count_waiting + accepted + 1, None
            self._waiting, self._count_waiting = [], 0
            if removed:
                self._base.restore()
                self._waiting, self._count_waiting = [call.first(count) for call in calls], count
            if count > _MOST_WAITING:
                self._catch_up()
        if self.has_states:
            crop_attention(self.cache, -removed)
        else:
            self.cache.crop(-removed)

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Let the mixers read the waiting rows."""
        waiting, self._waiting, self._count_waiting = self._waiting, [], 0
        for call in waiting:
            args, kwargs = call.arguments()
            call.mixer.forward(*args, **kwargs)

    def reset(self) -> None:
        """Forget the text, as it is unknown how far the layers have read."""
        self._waiting, self._count_waiting, self._calls = [], 0, None
        self.cache.reset()


def layers_with_states(cache: Cache) -> list[Any]:
    """The layers that have recurrent states or convolutions, beside keys and values or alone."""
    return [layer for layer in cache.layers if isinstance(layer, _STATES)]


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


@torch.no_grad()
def require_states_in_cache(model: PreTrainedModel) -> None:
    """Check that a recurrent model keeps its states in transformers' own layers of a cache.

    Raises:
        UnsupportedError: it does not.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    others = [layer for layer in cache.layers if not isinstance(layer, (_STATES, _NOTHING))]
    own = next((type(layer).__name__ for layer in others if type(layer) not in _KEYS_AND_VALUES), None)
    kept = f"layers of its own kind, {own}" if own else "a place of its own, and not in transformers' cache"
    detail = ""
    if own is None and hasattr(cache, "get_recurrent_state"):
        try:
            model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=input_device(model)), **cache_inputs(cache))
        except FORWARD_ERRORS as error:
            detail = f" ({error!s:.200})"
        if any(any(layer.is_recurrent_states_initialized.values()) for layer in layers_with_states(cache)):
            return
    raise UnsupportedError(
        f"{type(model).__name__} keeps a recurrent state in {kept}, which cannot be rolled back to the accepted "
        f"tokens{detail}. Use another model, or generate without an assistant."
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

    record_past(cache, has_states=True)
    names = _names_of_mixers(model, cache, partial(read, 0, _CHECKED_PROMPT))
    before, places = RecurrentStates(cache), range(_CHECKED_PROMPT, count)
    alone = torch.cat([read(place, place + 1) for place in places])
    states = RecurrentStates(cache).tensors()
    crop_attention(cache, -_CHECKED_ROWS)
    before.restore()
    rolled = RolledBack(cache, [model.get_submodule(one) for one in names])
    problem, detail = "has recurrent layers that cannot read tokens again alone, to roll back their state", ""
    try:
        with rolled.reading(_CHECKED_ROWS - 1):
            together = read(_CHECKED_PROMPT, count)
        # Of a model that is not trained, what the states say may be lost in the logits.
        both = zip([together, *RecurrentStates(cache).tensors()], [alone, *states], strict=True)
        if not all(agree(model, *one) for one in both):
            require_finite_weights(model)
            problem = (
                "says something else after several tokens read at once than after the same tokens read one by one, so "
                "no draft can be verified in one forward"
            )
        else:
            rolled.keep(_CHECKED_KEPT - 1)
            with rolled.reading(_CHECKED_ROWS - _CHECKED_KEPT - 1):
                again = read(_CHECKED_PROMPT + _CHECKED_KEPT, count)
            if agree(model, again, alone[_CHECKED_KEPT:]):
                return names
    except FORWARD_ERRORS as error:
        detail = f": {error!s:.200}"
    raise UnsupportedError(
        f"{type(model).__name__} {problem}{detail}. Use another target, or generate without an assistant."
    )


def _names_of_mixers(model: PreTrainedModel, cache: Any, run: Callable[[], Any]) -> tuple[str, ...]:
    """The names of the modules that ask the cache for a state during a run."""
    found = set()

    def noticed(get_state: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
                frame = frame.f_back
            if frame is not None:
                found.add(frame.f_locals["self"])
            return get_state(*args, **kwargs)

        return get

    names = "get_conv_state", "get_recurrent_state"
    for name in names:
        setattr(cache, name, noticed(getattr(cache, name)))
    run()
    for name in names:
        delattr(cache, name)
    return tuple(name for name, module in model.named_modules() if module in found)
