"""The arguments of a `generate` call: looking them up, resolving them, and preparing the inner call."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..cache_names import CACHE_NAMES, passed_cache
from ..errors import UnsupportedError

CACHES_THAT_CAN_BE_CROPPED = (None, "dynamic", "dynamic_full", "offloaded")
# Served by this package's own memory of fixed size.
STATIC_CACHE = "static"


class CallArguments:
    """The arguments of a `generate` call by name, which can be passed on in their original form.

    Args:
        generate: the function to call. Positions past those that it names are those of transformers' `generate`.
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

    def copy(self) -> "CallArguments":
        """The same arguments, to be changed apart."""
        twin = copy.copy(self)
        twin.args, twin.kwargs = list(self.args), dict(self.kwargs)
        return twin

    def accepts(self, name: str) -> bool:
        """Whether an argument of this name can be passed."""
        return self._accepts_any or name in self._names

    def _place(self, name: str) -> int | None:
        place = self._names.index(name) if name in self._names else len(self.args)
        return place if place < len(self.args) else None

    def get(self, name: str) -> Any:
        """An argument, or None if it was not passed."""
        place = self._place(name)
        return self.kwargs.get(name) if place is None else self.args[place]

    def asked(self, name: str) -> Any:
        """A setting that the caller passed, by keyword or in a configuration."""
        return self.kwargs.get(name, getattr(self.get("generation_config"), name, None))

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
        """The configuration that `generate` will use: the caller's settings, else those of a passed configuration,
        else the target's own."""
        own = (*inspect.signature(GenerationMixin.generate).parameters, "input_ids", "tokenizer", "trust_remote_code")
        settings = {name: value for name, value in self.kwargs.items() if name not in own}
        return target._prepare_generation_config(self.get("generation_config"), **settings)[0]

    def cache(self) -> Any:
        """The cache that was passed, under either name."""
        return passed_cache({name: self.get(name) for name in CACHE_NAMES})

    def input_ids(self) -> Any:
        """The tokens that were passed, under either name."""
        inputs = self.get("inputs")
        return self.get("input_ids") if inputs is None else inputs


def prepare_cache(target: PreTrainedModel, call: CallArguments) -> None:
    """Request a dynamic cache if only the target's defaults name another one (Gemma 2) or none (MPT)."""
    default = target.generation_config.cache_implementation
    asked = call.asked("cache_implementation")
    if default not in CACHES_THAT_CAN_BE_CROPPED and asked is None and call.cache() is None:
        call.set("cache_implementation", "dynamic")
    if target.generation_config.use_cache is False:
        call.set("use_cache", True)


def prepare_stop_strings(target: PreTrainedModel, call: CallArguments, settings: GenerationConfig) -> None:
    """Turn stop strings into a criterion here, as `generate` does not pass their tokenizer on to custom loops."""
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


def take_healer(call: CallArguments, settings: GenerationConfig) -> Any:
    """The tokenizer for token healing, or None if it was not requested. The decoding loop heals, as `generate` does
    not pass the tokenizer on to custom loops."""
    if not settings.token_healing:
        return None
    if call.get("tokenizer") is None:
        raise UnsupportedError("token_healing reads text: pass the target's tokenizer as tokenizer=… too.")
    call.set("token_healing", False)
    return call.get("tokenizer")
