"""How an assistant attaches to one target model, and to nothing else.

Binding sets one attribute on the target object: a `generate` that refuses what cannot work before any work is done,
and otherwise runs the target's own `generate` with the decoding loop of this package in it. Calls with another
assistant, or with none, go straight to the method of the class. Unbinding the last assistant removes the attribute.
"""

import copy
import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache, StoppingCriteriaList, StopStringCriteria

from ..errors import NotBoundError, UnsupportedError
from .decoding import decode
from .drafting import Drafting
from .target import TargetForward

_FIX = "pass target=… to DynSpecAssistant, or call assistant.bind(target), before target.generate(…)"

_CACHES_THAT_CAN_BE_CROPPED = (None, "dynamic", "dynamic_full", "offloaded")


class Call(ABC):
    """One `generate` call of a bound assistant."""

    @abstractmethod
    def drafting(self, **arguments: Any) -> Drafting:
        """Return the object that drafts, given the decoding loop's own arguments by name."""


class Bindable(ABC):
    """What may be passed as `assistant_model` to a target that it is bound to."""

    @property
    @abstractmethod
    def target(self) -> PreTrainedModel | None:
        """The model that this is bound to."""

    @property
    def owner(self) -> "Bindable":
        """What has to be bound for this to be accepted: itself, or the assistant that it belongs to."""
        return self

    @abstractmethod
    def open_call(self) -> AbstractContextManager[Call]:
        """Set up one `generate` call, and tidy up after it."""

    @property
    def config(self) -> Any:
        """The bound target's configuration: transformers compares vocabulary sizes through it, and they agree here.

        Raises:
            NotBoundError: the assistant is not bound to any model.
        """
        target = self.target
        if target is None:
            raise NotBoundError(f"this assistant is not bound to a model: {_FIX}.")
        return target.config

    @property
    def device(self) -> torch.device:
        """Raises NotBoundError: only a model that this assistant is not bound to asks for it."""
        raise NotBoundError(f"this assistant is bound to another model than the one that generates: {_FIX}.")


class TargetHook:
    """The `generate` that stands in for the target's own while assistants are bound to it."""

    def __init__(self, target: PreTrainedModel):
        self._target = weakref.ref(target)
        self.assistants: weakref.WeakSet[Bindable] = weakref.WeakSet()

    @functools.cached_property
    def forward(self) -> TargetForward:
        """What runs the target. Made when it is first asked for, as a target that is being copied has no parts yet."""
        return TargetForward(self._target())

    def __reduce__(self):
        # A copied or unpickled target gets a hook of its own, to which no assistant is bound.
        return TargetHook, (self._target(),)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`target.generate`, with a check of the arguments where the assistant is one of ours."""
        target = self._target()
        generate = type(target).generate
        named = _by_name(generate, args, kwargs)
        assistant = named.get("assistant_model")
        if not isinstance(assistant, Bindable):
            return generate(target, *args, **kwargs)
        if assistant.owner not in self.assistants:
            raise NotBoundError(f"this assistant is not bound to the model that generates: {_FIX}.")
        check_call(target, named)
        named = _with_stop_strings(_with_dynamic_cache(target, named))
        del named["assistant_model"]
        with assistant.open_call() as call:
            loop = functools.partial(decode, drafting_call=call, token_streamer=named.get("streamer"))
            return generate(target, **{**named, "custom_generate": loop})


def attach(target: PreTrainedModel, assistant: Bindable, drafts_trees: bool) -> None:
    """Let `target.generate` accept an assistant.

    Raises:
        UnsupportedError: the assistant drafts trees, and the target cannot verify them.
    """
    hook = _hook_of(target) or TargetHook(target)
    if drafts_trees:
        hook.forward.require_trees()
    target.generate = hook.generate
    hook.assistants.add(assistant)


def forward_of(target: PreTrainedModel) -> TargetForward:
    """What runs a target that an assistant is attached to."""
    return _hook_of(target).forward


def detach(target: PreTrainedModel, assistant: Bindable) -> None:
    """Undo `attach`."""
    hook = _hook_of(target)
    if hook is None:
        return
    hook.assistants.discard(assistant)
    if not hook.assistants:
        del target.generate


def _hook_of(target: PreTrainedModel) -> TargetHook | None:
    owner = getattr(target.__dict__.get("generate"), "__self__", None)
    return owner if isinstance(owner, TargetHook) else None


def check_target(target: Any) -> None:
    """Refuse targets that cannot be bound.

    Raises:
        UnsupportedError: not a transformers model that generates, an encoder-decoder or stateful model, or one whose
            parameters are sharded.
    """
    if not isinstance(target, PreTrainedModel) or not target.can_generate():
        raise UnsupportedError(
            f"the target must be a transformers model with generate, got {type(target).__name__}. "
            "Load it with AutoModelForCausalLM.from_pretrained."
        )
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder-decoder model, and only decoder-only targets are supported. Use transformers' own "
            "assisted generation: pass the drafter itself as assistant_model."
        )
    if getattr(target, "_is_stateful", False):
        raise UnsupportedError(
            f"{name} keeps a recurrent state, which cannot be rolled back to the accepted tokens. Generate without an "
            "assistant."
        )
    _check_sharding(target)


def _check_sharding(target: PreTrainedModel) -> None:
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target):
        raise UnsupportedError(
            "the target's parameters are sharded by FSDP or DeepSpeed ZeRO-3, where all processes must run in step. "
            "Load the model with device_map='auto' to spread it over devices, or generate without an assistant."
        )


def _asked_cache_implementation(kwargs: dict[str, Any]) -> str | None:
    """The cache that the caller asked for, by keyword or in a configuration of this call."""
    config = kwargs.get("generation_config")
    return kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))


def _with_dynamic_cache(target: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Ask for a dynamic cache where only the target's own defaults name another, as Gemma 2's do."""
    default = target.generation_config.cache_implementation
    asked = _asked_cache_implementation(kwargs)
    if default in _CACHES_THAT_CAN_BE_CROPPED or asked is not None or kwargs.get("past_key_values") is not None:
        return dict(kwargs)
    return {**kwargs, "cache_implementation": "dynamic"}


def _with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turn stop strings into a criterion here: `generate` keeps the tokenizer that they need from other loops."""
    config = kwargs.get("generation_config")
    strings = kwargs.get("stop_strings", getattr(config, "stop_strings", None))
    if strings is None:
        return kwargs
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise UnsupportedError("stop_strings are found in text: pass the target's tokenizer as tokenizer=… too.")
    kwargs = {**kwargs, "stop_strings": None}
    if config is not None and config.stop_strings is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return kwargs


def _by_name(generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by keyword, as `generate` takes its first ones by position too."""
    names = list(inspect.signature(generate).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def check_call(target: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Refuse what assisted generation cannot do, before any work is done.

    Raises:
        UnsupportedError: names the argument and the alternative.
    """
    inputs = kwargs.get("inputs")
    inputs = kwargs.get("input_ids") if inputs is None else inputs

    def setting(name: str) -> Any:
        """What transformers resolves it to: the argument, else the call's configuration, else the target's own."""
        if name in kwargs:
            return kwargs[name]
        value = getattr(kwargs.get("generation_config"), name, None)
        return getattr(target.generation_config, name, None) if value is None else value

    cache_implementation = _asked_cache_implementation(kwargs)

    refusals = [
        (
            isinstance(inputs, torch.Tensor) and inputs.shape[0] > 1,
            "a batch of several sequences is not supported: call generate once for each, or generate without an "
            "assistant, which fills the device better at larger batches.",
        ),
        (
            kwargs.get("inputs_embeds") is not None,
            "inputs_embeds is not supported, as the drafter needs token ids: pass input_ids.",
        ),
        (
            (setting("num_beams") or 1) > 1 or (setting("num_return_sequences") or 1) > 1,
            "beam search and several return sequences are not supported: set num_beams=1 and num_return_sequences=1, "
            "and call generate once for each sequence.",
        ),
        (
            setting("use_cache") is False,
            "use_cache=False is not supported, as verification rolls the cache back: leave use_cache at True.",
        ),
        (
            cache_implementation not in _CACHES_THAT_CAN_BE_CROPPED,
            f"cache_implementation={cache_implementation!r} cannot be rolled back to the accepted tokens: leave it "
            "unset for a dynamic cache.",
        ),
        (
            isinstance(kwargs.get("past_key_values"), StaticCache),
            "a StaticCache cannot be rolled back to the accepted tokens: pass a DynamicCache as past_key_values.",
        ),
        (
            kwargs.get("custom_generate") is not None,
            "custom_generate replaces the loop that the assistant works in: leave one of the two out.",
        ),
        (
            setting("prompt_lookup_num_tokens") is not None,
            "prompt_lookup_num_tokens is another way of drafting: leave it or assistant_model out.",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise UnsupportedError(reason)
    if kwargs.get("synced_gpus"):
        raise UnsupportedError("synced_gpus=True is for FSDP and ZeRO-3, which are not supported: leave it unset.")
    _check_sharding(target)
