"""How an assistant attaches to one target model, and to nothing else.

Binding sets two attributes on the target object. `generate` refuses what cannot work before any work is done, and
otherwise runs whatever `generate` the object had before with the decoding loop of this package in it. Where that is
not what was called, because it was looked up before the assistant was bound, transformers' own loop asks the object's
`_get_candidate_generator`, which drafts for it. Calls with another assistant, or with none, go straight on. When the
last assistant is unbound or gone, so are the attributes.
"""

import copy
import functools
import inspect
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from ..errors import NotBoundError, UnsupportedError
from ..model_parts import require_real_tokens
from .candidate_generator import DynSpecCandidateGenerator
from .decoding import decode
from .drafting import Drafting
from .target import TargetForward

_FIX = "pass target=… to DynSpecAssistant, or call assistant.bind(target), before target.generate(…)"

_CACHES_THAT_CAN_BE_CROPPED = (None, "dynamic", "dynamic_full", "offloaded")

# The attributes that are set on a target.
_HOOKED = ("generate", "_get_candidate_generator")

# Ways to generate that transformers chooses by a setting, and that leave no place for an assistant.
_OTHER_METHODS = {
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup, another way of drafting",
    "assistant_early_exit": "early exit, another way of drafting",
    "use_mtp": "multi-token prediction, another way of drafting",
    "speculation_type": "another way of drafting",
    "assistant_ensemble_weight": "ensemble verification, whose output is not the target's own",
}


class Call(ABC):
    """One `generate` call of a bound assistant."""

    @abstractmethod
    def drafting(
        self,
        *,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ) -> Drafting:
        """Return the object that drafts, given the decoding loop's own arguments."""


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
    """What stands on a target in the place of `generate` while assistants are bound to it.

    Args:
        target: the model. It is not kept alive from here.
        previous: the attributes of the object that this takes the place of, by name.
    """

    def __init__(self, target: PreTrainedModel, previous: dict[str, Any]):
        self._target = weakref.ref(target)
        self._previous = previous
        # By assistant, none of which is kept alive from here.
        self._forwards: dict[weakref.ref[Bindable], TargetForward] = {}

    def __reduce__(self):
        # A copied or unpickled target gets a hook of its own, to which no assistant is bound.
        return TargetHook, (self._target(), self._previous)

    def add(self, assistant: Bindable, forward: TargetForward) -> None:
        """Accept an assistant, for as long as it is there."""
        this = weakref.ref(self)

        def forget(gone: "weakref.ref[Bindable]") -> None:
            hook = this()
            if hook is not None:
                hook._forget(gone)

        self._forwards[weakref.ref(assistant, forget)] = forward

    def remove(self, assistant: Bindable) -> None:
        """Accept an assistant no longer."""
        self._forget(weakref.ref(assistant))

    def _forget(self, assistant: "weakref.ref[Bindable]") -> None:
        with _lock:
            self._forwards.pop(assistant, None)
            if not self._forwards:
                self._withdraw()

    def _withdraw(self) -> None:
        """Put back what was there, but where somebody else has put something in its place by now: if that calls this
        hook, it goes on to what was there."""
        target = self._target()
        for name in _HOOKED if target is not None else ():
            if getattr(vars(target).get(name), "__self__", None) is not self:
                continue
            delattr(target, name)
            previous = self._previous_of(name)
            if previous is not None:
                setattr(target, name, previous)

    def _previous_of(self, name: str) -> Any:
        """The attribute that the object had, but for those of hooks that no assistant is bound to any more."""
        previous = self._previous.get(name)
        owner = getattr(previous, "__self__", None)
        if isinstance(owner, TargetHook) and not owner._forwards:
            return owner._previous_of(name)
        return previous

    def forward_of(self, assistant: Bindable) -> TargetForward | None:
        """What runs the target for an assistant that is bound to it through this."""
        return self._forwards.get(weakref.ref(assistant))

    def _inner(self, name: str) -> Callable[..., Any]:
        """What is called in the end: the attribute that the object had, or the method of its class."""
        target = self._target()
        return self._previous_of(name) or types.MethodType(getattr(type(target), name), target)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`target.generate`, with a check of the arguments where the assistant is one of ours."""
        inner = self._inner("generate")
        if not self._forwards:
            self._withdraw()
            return inner(*args, **kwargs)
        call = _Arguments(inner, args, kwargs)
        assistant = call.get("assistant_model")
        if not isinstance(assistant, Bindable):
            return inner(*args, **kwargs)
        target = self._target()
        if assistant.target is not target:
            raise NotBoundError(f"this assistant is not bound to the model that generates: {_FIX}.")
        if self.forward_of(assistant.owner) is None or not call.accepts("custom_generate"):
            # A hook below this one knows it, or a subclass's own `generate` calls transformers' with what it takes.
            return inner(*args, **kwargs)
        settings = call.resolved(target)
        check_call(target, call, settings)
        _prepare_cache(target, call)
        _prepare_stop_strings(target, call, settings)
        healer = _take_healer(call, settings)
        streamer = call.get("streamer")
        if healer is not None:
            call.remove("streamer")
        call.remove("assistant_model")
        with assistant.open_call() as opened:
            loop = functools.partial(decode, drafting_call=opened, token_streamer=streamer, healer=healer)
            call.set("custom_generate", loop)
            return inner(*call.args, **call.kwargs)

    def candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """`target._get_candidate_generator`, which transformers' own loop asks with keyword arguments."""
        assistant = kwargs.get("assistant_model")
        if not isinstance(assistant, Bindable) or self.forward_of(assistant.owner) is None:
            return self._inner("_get_candidate_generator")(*args, **kwargs)
        _check_method(kwargs["generation_config"])
        names = ("input_ids", "generation_config", "logits_processor", "model_kwargs")
        return DynSpecCandidateGenerator(assistant, **{name: kwargs[name] for name in names})


# Held while attributes of any target are set and taken back. It may be asked for again while it is held, as assistants
# can go at any time.
_lock = threading.RLock()


def attach(target: PreTrainedModel, assistant: Bindable, forward: TargetForward) -> TargetHook:
    """Let `target.generate` accept an assistant. Returns what `TargetHook.remove` takes it back with."""
    with _lock:
        hook = _hook_of(target)
        if hook is None:
            hook = TargetHook(target, {name: vars(target)[name] for name in _HOOKED if name in vars(target)})
            target.generate = hook.generate
            target._get_candidate_generator = hook.candidate_generator
        hook.add(assistant, forward)
        return hook


def _hook_of(target: PreTrainedModel) -> TargetHook | None:
    owner = getattr(vars(target).get("generate"), "__self__", None)
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


# The arguments of a call ---------------------------------------------------------------------------------------------


class _Arguments:
    """The arguments of a call of some `generate`, by name and yet passed on as they came.

    Args:
        generate: what is going to be called. Positions past those that it names are those of transformers' own.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def __init__(self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args, self.kwargs = list(args), dict(kwargs)
        kinds = {name: one.kind for name, one in inspect.signature(generate).parameters.items()}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [name for name, kind in kinds.items() if kind in positional]
        if inspect.Parameter.VAR_POSITIONAL in kinds.values():
            self._names += list(inspect.signature(GenerationMixin.generate).parameters)[1 + len(self._names) :]
        self._accepts_any = inspect.Parameter.VAR_KEYWORD in kinds.values()

    def accepts(self, name: str) -> bool:
        """Whether an argument of this name can be passed."""
        return self._accepts_any or name in self._names

    def _place(self, name: str) -> int | None:
        place = self._names.index(name) if name in self._names else len(self.args)
        return place if place < len(self.args) else None

    def get(self, name: str) -> Any:
        """An argument, or None where it was not passed."""
        place = self._place(name)
        return self.kwargs.get(name) if place is None else self.args[place]

    def set(self, name: str, value: Any) -> None:
        """Pass another value."""
        place = self._place(name)
        if place is None:
            self.kwargs[name] = value
        else:
            self.args[place] = value

    def remove(self, name: str) -> None:
        """Pass no value."""
        if self._place(name) is not None:
            self.set(name, None)
        self.kwargs.pop(name, None)

    def resolved(self, target: PreTrainedModel) -> GenerationConfig:
        """The configuration that `generate` will come to: the caller's settings, else those of a configuration that
        was passed, else the target's own."""
        own = (*inspect.signature(GenerationMixin.generate).parameters, "input_ids", "tokenizer", "trust_remote_code")
        settings = {name: value for name, value in self.kwargs.items() if name not in own}
        return target._prepare_generation_config(self.get("generation_config"), **settings)[0]

    def input_ids(self) -> Any:
        """The tokens that were passed, under either name."""
        inputs = self.get("inputs")
        return self.get("input_ids") if inputs is None else inputs


def _asked_by_call(call: _Arguments, name: str) -> Any:
    """A setting that the caller asked for, by keyword or in a configuration of this call."""
    return call.kwargs.get(name, getattr(call.get("generation_config"), name, None))


def _prepare_cache(target: PreTrainedModel, call: _Arguments) -> None:
    """Ask for a dynamic cache where only the target's own defaults name another, as Gemma 2's, or none, as MPT's."""
    default = target.generation_config.cache_implementation
    asked = _asked_by_call(call, "cache_implementation")
    if default not in _CACHES_THAT_CAN_BE_CROPPED and asked is None and call.get("past_key_values") is None:
        call.set("cache_implementation", "dynamic")
    if target.generation_config.use_cache is False:
        call.set("use_cache", True)


def _prepare_stop_strings(target: PreTrainedModel, call: _Arguments, settings: GenerationConfig) -> None:
    """Turn stop strings into a criterion here: `generate` keeps the tokenizer that they need from other loops."""
    strings = settings.stop_strings
    if strings is None:
        return
    tokenizer = call.get("tokenizer")
    if tokenizer is None:
        raise UnsupportedError("stop_strings are found in text: pass the target's tokenizer as tokenizer=… too.")
    call.kwargs.pop("stop_strings", None)
    config = call.get("generation_config")
    if getattr(config, "stop_strings", None) is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
        call.set("generation_config", config)
    if target.generation_config.stop_strings is not None:
        call.set("stop_strings", None)
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    call.set("stopping_criteria", StoppingCriteriaList([*(call.get("stopping_criteria") or ()), criterion]))


def _take_healer(call: _Arguments, settings: GenerationConfig) -> Any:
    """The tokenizer to heal the prompt's last token with, None where that was not asked for. The loop does it, as
    `generate` keeps the tokenizer from loops that are not its own."""
    if not settings.token_healing:
        return None
    if call.get("tokenizer") is None:
        raise UnsupportedError("token_healing reads text: pass the target's tokenizer as tokenizer=… too.")
    call.set("token_healing", False)
    return call.get("tokenizer")


def check_call(target: PreTrainedModel, call: _Arguments, settings: GenerationConfig) -> None:
    """Refuse what assisted generation cannot do, before any work is done.

    Args:
        target: the model that generates.
        call: its arguments.
        settings: the configuration that they come to.

    Raises:
        UnsupportedError: names the argument and the alternative.
    """
    require_real_tokens(getattr(vars(target).get("prepare_inputs_for_generation"), "__self__", None))
    inputs = call.input_ids()
    cache_implementation = _asked_by_call(call, "cache_implementation")
    asked_use_cache = _asked_by_call(call, "use_cache")
    refusals = [
        (
            isinstance(inputs, torch.Tensor) and (inputs.dim() != 2 or not inputs.shape[1]),
            "a prompt is int64 [1, n], n at least 1: pass the input_ids that a tokenizer returns, or leave them out "
            "to begin with the BOS token.",
        ),
        (
            isinstance(inputs, torch.Tensor) and inputs.shape[0] > 1,
            "a batch of several sequences is not supported: call generate once for each, or generate without an "
            "assistant, which fills the device better at larger batches.",
        ),
        (
            call.get("inputs_embeds") is not None,
            "inputs_embeds is not supported, as the drafter needs token ids: pass input_ids.",
        ),
        (
            (settings.num_beams or 1) > 1 or (settings.num_return_sequences or 1) > 1,
            "beam search and several return sequences are not supported: set num_beams=1 and num_return_sequences=1, "
            "and call generate once for each sequence.",
        ),
        (
            asked_use_cache is False,
            "use_cache=False is not supported, as verification rolls the cache back: leave use_cache at True.",
        ),
        (
            cache_implementation not in _CACHES_THAT_CAN_BE_CROPPED,
            f"cache_implementation={cache_implementation!r} cannot be rolled back to the accepted tokens: leave it "
            "unset for a dynamic cache.",
        ),
        (
            call.get("custom_generate") is not None,
            "custom_generate replaces the loop that the assistant works in: leave one of the two out.",
        ),
        (
            bool(call.get("synced_gpus")),
            "synced_gpus=True is for FSDP and ZeRO-3, which are not supported: leave it unset.",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise UnsupportedError(reason)
    _check_method(settings)
    _check_passed_cache(call, inputs)
    _check_sharding(target)


def _check_method(settings: GenerationConfig) -> None:
    """Refuse settings by which transformers generates in another way than greedily or by sampling."""
    ensemble = getattr(settings, "assistant_ensemble_weight", None) is not None
    is_plain = settings.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    if is_plain and not ensemble and getattr(settings, "speculation_type", None) is None:
        return
    asked = [name for name in _OTHER_METHODS if getattr(settings, name, None)]
    named = asked[0] if asked else settings.get_generation_mode().value
    raise UnsupportedError(
        f"{named} asks for {_OTHER_METHODS.get(named, 'another decoding method')}, in which there is no place for "
        f"this assistant: leave {named} or assistant_model out."
    )


def _check_passed_cache(call: _Arguments, inputs: Any) -> None:
    """Refuse caches that cannot be rolled back, and those that leave nothing to read."""
    cache = call.get("past_key_values")
    if cache is None:
        return
    if not isinstance(cache, DynamicCache):
        raise UnsupportedError(
            f"a {type(cache).__name__} cannot be rolled back to the accepted tokens: pass a DynamicCache as "
            "past_key_values."
        )
    mask = call.get("attention_mask")
    cached = cache.get_seq_length()
    if not isinstance(inputs, torch.Tensor) or (mask is not None and mask.shape[1] != inputs.shape[1]):
        return
    if cached and cached >= inputs.shape[1]:
        raise UnsupportedError(
            f"past_key_values holds {cached} tokens, which is all of the prompt's {inputs.shape[1]}, and the target "
            f"must read at least the last one: call past_key_values.crop({inputs.shape[1] - 1 - cached}) first, or "
            "pass new tokens alone together with the attention_mask of the whole text."
        )
