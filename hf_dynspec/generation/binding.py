"""Binding: an assistant attaches to one target model, and to nothing else.

Binding sets two attributes on the target object. `generate` refuses calls that cannot work before any work is done.
Otherwise it runs the `generate` that the object had before, with this package's decoding loop in it. If a caller
looked `generate` up before the assistant was bound, transformers' own loop asks the object's
`_get_candidate_generator`, which drafts for it. Calls with another assistant, or with none, go straight on. When the
last assistant is unbound or gone, so are the attributes.
"""

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..cache_names import is_recurrent
from ..errors import NotBoundError
from ..kernels import few_rows_for, given_way, in_plain_torch
from .arguments import CallArguments, prepare_cache, prepare_stop_strings, take_healer
from .batch import NotInRounds, check_batch, generate_batch, takes_fixed_memory, why_general
from .bindable import HOW_TO_BIND, Bindable
from .call_settings import for_call
from .candidate_generator import DynSpecCandidateGenerator
from .decoding import decode
from .refusals import check_call, check_method
from .target import TargetForward

# The attributes that are set on a target.
_HOOKED = ("generate", "_get_candidate_generator")


class TargetHook:
    """Replaces `generate` of a target while assistants are bound to it.

    Args:
        target: the model, of which a weak reference is kept.
        previous: the attributes of the object that this replaces, by name.
    """

    def __init__(self, target: PreTrainedModel, previous: dict[str, Any]):
        self._target = weakref.ref(target)
        self._previous = previous
        # By weak reference to the assistant.
        self._forwards: dict[weakref.ref[Bindable], TargetForward] = {}

    def __reduce__(self):
        # A copied or unpickled target gets a hook of its own, to which no assistant is bound.
        return TargetHook, (self._target(), self._previous)

    def add(self, assistant: Bindable, forward: TargetForward) -> None:
        """Accept an assistant as long as it exists."""
        this = weakref.ref(self)

        def forget(gone: "weakref.ref[Bindable]") -> None:
            hook = this()
            if hook is not None:
                hook._forget(gone)

        self._forwards[weakref.ref(assistant, forget)] = forward

    def remove(self, assistant: Bindable) -> None:
        """Stop accepting an assistant."""
        self._forget(weakref.ref(assistant))

    def _forget(self, assistant: "weakref.ref[Bindable]") -> None:
        with _lock:
            self._forwards.pop(assistant, None)
            if not self._forwards:
                self._withdraw()

    def _withdraw(self) -> None:
        """Put the previous attributes back, unless somebody else has replaced this hook by now. If that calls this
        hook, it goes on to the previous attributes."""
        target = self._target()
        if target is not None:
            vars(target).pop("_is_stateful", None)
        for name in _HOOKED if target is not None else ():
            if getattr(vars(target).get(name), "__self__", None) is not self:
                continue
            delattr(target, name)
            previous = self._previous_of(name)
            if previous is not None:
                setattr(target, name, previous)

    def _previous_of(self, name: str) -> Any:
        """The attribute that the object had before, past hooks without assistants."""
        previous = self._previous.get(name)
        owner = getattr(previous, "__self__", None)
        if isinstance(owner, TargetHook) and not owner._forwards:
            return owner._previous_of(name)
        return previous

    def forward_of(self, assistant: Bindable) -> TargetForward | None:
        """Runs the target for an assistant that is bound through this hook; None for others."""
        return self._forwards.get(weakref.ref(assistant))

    def _inner(self, name: str) -> Callable[..., Any]:
        """The attribute that the object had before, or the method of its class."""
        target = self._target()
        return self._previous_of(name) or types.MethodType(getattr(type(target), name), target)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`target.generate`, with this package's loop if the assistant is one of ours."""
        inner = self._inner("generate")
        if not self._forwards:
            self._withdraw()
            return inner(*args, **kwargs)
        arguments = CallArguments(inner, args, kwargs)
        assistant = arguments.get("assistant_model")
        if not isinstance(assistant, Bindable):
            return inner(*args, **kwargs)
        target = self._target()
        if assistant.target is not target:
            raise NotBoundError(f"this assistant is not bound to the model that generates: {HOW_TO_BIND}.")
        if self.forward_of(assistant.owner) is None or not arguments.accepts("custom_generate"):
            # A hook below this one knows it, or a subclass's `generate` calls transformers' with other arguments.
            return inner(*args, **kwargs)
        with few_rows_for(target):
            return _generate(target, inner, arguments, assistant)

    def candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """`target._get_candidate_generator`, which transformers' own loop calls with keyword arguments."""
        assistant = kwargs.get("assistant_model")
        if not isinstance(assistant, Bindable) or self.forward_of(assistant.owner) is None:
            return self._inner("_get_candidate_generator")(*args, **kwargs)
        config, own = kwargs["generation_config"], self._target().generation_config
        check_method(config)
        # transformers has filled in its defaults, which cannot be told from the same values of a caller.
        filled = own._get_default_generation_params().items()
        unknown = {name: None for name, value in filled if getattr(config, name, None) == value}
        assistant = for_call(assistant, own, types.SimpleNamespace(**{**vars(config), **unknown}), {})
        names = ("input_ids", "generation_config", "logits_processor", "model_kwargs")
        return DynSpecCandidateGenerator(assistant, **{name: kwargs[name] for name in names})


def _generate(
    target: PreTrainedModel, inner: Callable[..., Any], arguments: CallArguments, assistant: Bindable
) -> Any:
    """Generate with this package's loop, or refuse the call before any work is done."""
    settings = arguments.resolved(target)
    check_call(target, arguments, settings)
    config = arguments.get("generation_config")
    assistant = for_call(assistant, target.generation_config, config, arguments.kwargs)
    prepare_cache(target, arguments)
    is_asked = takes_fixed_memory(arguments, settings)
    if is_asked:
        check_batch(assistant, arguments, settings)
    reason = None if is_asked else why_general(assistant, arguments, settings)
    prepare_stop_strings(target, arguments, settings)
    if reason is None:
        try:
            return generate_batch(target, inner, arguments, settings, assistant, is_asked)
        except NotInRounds as error:
            reason = str(error)
    healer = take_healer(arguments, settings)
    streamer = arguments.get("streamer")
    if healer is not None:
        arguments.remove("streamer")
    arguments.remove("assistant_model")
    with assistant.open_call() as call:
        call.stats.lane = f"general: {reason}"
        loop = functools.partial(decode, call=call, token_streamer=streamer, healer=healer)
        arguments.set("custom_generate", loop)
        output = inner(*arguments.args, **arguments.kwargs)
        call.stats.lane += in_plain_torch(given_way())
        return output


# Held while attributes of any target change. Reentrant, as the garbage collector may remove an assistant meanwhile.
_lock = threading.RLock()


def attach(target: PreTrainedModel, assistant: Bindable, forward: TargetForward) -> TargetHook:
    """Let `target.generate` accept an assistant. Returns the hook, whose `remove` undoes it."""
    with _lock:
        hook = _hook_of(target)
        if hook is None:
            hook = TargetHook(target, {name: vars(target)[name] for name in _HOOKED if name in vars(target)})
            if getattr(target, "_is_stateful", False) and not is_recurrent(target):
                # A flag of the whole class, by which transformers would refuse hybrids of attention layers alone.
                target._is_stateful = False
            target.generate = hook.generate
            target._get_candidate_generator = hook.candidate_generator
        hook.add(assistant, forward)
        return hook


def _hook_of(target: PreTrainedModel) -> TargetHook | None:
    owner = getattr(vars(target).get("generate"), "__self__", None)
    return owner if isinstance(owner, TargetHook) else None
