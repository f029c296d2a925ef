"""Settings of drafting that one call has of its own."""

import copy
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from ..drafting.settings import SETTINGS, require_drafting_settings
from ..errors import UnsupportedError
from ..tree_config import AUTO
from .bindable import Bindable

_ANOTHER_TOKENIZER = "a drafter with another tokenizer, and this assistant's drafter has the target's"
# Arguments that say how another kind of drafter drafts.
_OF_OTHERS = {
    "assistant_tokenizer": _ANOTHER_TOKENIZER,
    "assistant_lookbehind": _ANOTHER_TOKENIZER,
    "target_lookbehind": _ANOTHER_TOKENIZER,
    "max_matching_ngram_size": "prompt lookup, another way of drafting",
    "is_assistant": "drafters in transformers' own assisted generation",
}


class WithSettings:
    """An assistant, or a conversation with one, that has other settings of drafting for one call.

    Args:
        assistant: has everything else.
        settings: in place of its `generation_config`.
    """

    def __init__(self, assistant: Bindable, settings: GenerationConfig):
        self._assistant, self.generation_config = assistant, settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._assistant, name)

    @property
    def owner(self) -> Any:
        """See `Bindable.owner`."""
        return self if self._assistant.owner is self._assistant else self._assistant.owner

    def open_call(self) -> Any:
        """See `Bindable.open_call`."""
        call = self._assistant.open_call()
        call.settings = self.generation_config
        return call


def for_call(assistant: Bindable, given: Callable[[str], Any], own: GenerationConfig) -> Any:
    """The assistant with the settings of a call: those that it was given, else the assistant's, and in place of the
    defaults, which nobody gave the assistant, the target's own.

    Args:
        assistant: an assistant, or a conversation with one.
        given: a setting of the call by its name (None: it was not given).
        own: the target's own configuration.

    Raises:
        UnsupportedError: names what the assistant has no use for, and the way out.
        ConfigurationError: a setting is mistyped or out of range.
    """
    for name, purpose in _OF_OTHERS.items():
        if given(name) is not None:
            raise UnsupportedError(f"{name} is for {purpose}: leave {name} out.")
    before, owner = assistant.generation_config, assistant.owner
    asked = {name: given(name) for name in SETTINGS if given(name) is not None}
    for name, value in asked.items():
        if owner.tree is not None and value not in (AUTO, "constant", 0):
            raise UnsupportedError(
                f"{name} is for chains, and this assistant drafts trees, whose shape is assistant.tree: leave {name} "
                "out, or set assistant.tree = False."
            )
    defaults = [name for name, value in owner.defaults.items() if getattr(before, name) == value]
    settings = {name: getattr(own, name, None) for name in defaults} | asked
    if all(value is None for value in settings.values()):
        return assistant
    config = copy.copy(before)
    vars(config).update({name: value for name, value in settings.items() if value is not None})
    require_drafting_settings(config)
    return WithSettings(assistant, config)
