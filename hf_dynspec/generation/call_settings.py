"""Settings of drafting that one call has of its own."""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from ..drafting.settings import SETTINGS, require_drafting_settings
from ..errors import UnsupportedError
from ..tree_config import AUTO
from .bindable import Bindable

_OF_OTHERS: dict[str, str] = {
    **dict.fromkeys(("assistant_tokenizer", "assistant_lookbehind", "target_lookbehind"), "with another tokenizer"),
    "max_matching_ngram_size": "that look up the prompt",
    "is_assistant": "of transformers' own",
}


class _WithSettings:
    """An assistant, or a conversation with one, that has other settings of drafting for one call."""

    def __init__(self, assistant: Bindable, settings: GenerationConfig):
        self._assistant, self.generation_config = assistant, settings

    def __getattr__(self, name: str) -> Any:
        return self if name == "owner" and self._assistant.owner is self._assistant else getattr(self._assistant, name)

    def open_call(self) -> Any:
        call = self._assistant.open_call()
        call.settings = self.generation_config
        return call


def for_call(assistant: Bindable, own: GenerationConfig, config: Any, keywords: Mapping[str, Any]) -> Any:
    """The assistant with the settings of a call: those that were passed, else the assistant's, and in place of the
    defaults, which nobody gave the assistant, the target's own. Raises UnsupportedError or ConfigurationError, which
    name the setting, if it is not for this assistant, mistyped or out of range.

    Args:
        assistant: an assistant, or a conversation with one.
        own: the target's own configuration. A passed one may be a copy of it, and then asks for nothing more.
        config, keywords: what was passed: a configuration or None, and arguments.
    """
    passed = {name: getattr(config, name, None) for name in (*SETTINGS, *_OF_OTHERS)}
    passed = {name: value for name, value in passed.items() if value != getattr(own, name, None)} | dict(keywords)
    for name, kind in _OF_OTHERS.items():
        if passed.get(name) is not None:
            raise UnsupportedError(f"{name} is for drafters {kind}, which the assistant's is not: leave {name} out.")
    owner, config = assistant.owner, copy.copy(assistant.generation_config)
    settings = {name: passed[name] for name in SETTINGS if passed.get(name) is not None}
    for name, value in settings.items():
        if owner.tree is not None and value not in (AUTO, "constant", 0):
            raise UnsupportedError(
                f"{name} is for chains, and assistant.tree is set: leave {name} out, or set tree=False."
            )
    for name, default in owner.defaults.items():
        if getattr(config, name) == default and getattr(own, name, None) is not None:
            settings.setdefault(name, getattr(own, name))
    vars(config).update(settings)
    require_drafting_settings(config)
    return _WithSettings(assistant, config) if settings else assistant
