"""The settings that steer drafting: where they come from, and what they may be."""

import copy
from typing import Any

from transformers import GenerationConfig

from ..errors import ConfigurationError, shown_value
from ..fields import OneOf, Share
from .tree_config import AUTO, NUM_ASSISTANT_TOKENS, TreeConfig

# What an assistant drafts that was not told how much.
DEFAULT_NUM_ASSISTANT_TOKENS = 5
# And where nothing but the speed of a call shows it.
DEFAULT_WHERE_ONLY_SPEED_SHOWS = AUTO

# Those of a generation configuration, and what stands for one that is None.
_RULES = {
    "num_assistant_tokens": (NUM_ASSISTANT_TOKENS, DEFAULT_NUM_ASSISTANT_TOKENS),
    "assistant_confidence_threshold": (Share(or_nothing=True), 0.0),
    "num_assistant_tokens_schedule": (OneOf(("constant", "heuristic", "heuristic_transient")), "constant"),
}


def as_tree_config(tree: bool | TreeConfig) -> TreeConfig | None:
    """The shape of the trees to draft, or None for chains.

    Args:
        tree: a shape, True for the default one, or False for chains.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(tree, TreeConfig):
        return tree
    if not isinstance(tree, bool):
        raise ConfigurationError(f"tree must be True, False or a TreeConfig, got {tree!r}")
    return TreeConfig() if tree else None


def drafting_config(drafter: Any, tokens: int | str | None, threshold: float | None) -> GenerationConfig:
    """A generation configuration that has the settings of drafting.

    Args:
        drafter: a model whose own configuration says what is not given.
        tokens: `num_assistant_tokens`, where it is given.
        threshold: `assistant_confidence_threshold`, where it is given.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """
    given = getattr(drafter, "generation_config", None)
    config = copy.deepcopy(given) if isinstance(given, GenerationConfig) else GenerationConfig()
    defaults = {
        # What is best is not known before the call, see `settled`.
        "num_assistant_tokens": (tokens, None),
        "num_assistant_tokens_schedule": (None, "constant"),
        "assistant_confidence_threshold": (threshold, 0.0),
    }
    for name, (argument, default) in defaults.items():
        choices = (argument, getattr(config, name, None))
        setattr(config, name, next((choice for choice in choices if choice is not None), default))
    # What the drafter's own file says is looked at too.
    require_drafting_settings(config)
    return config


def require_drafting_settings(config: GenerationConfig) -> None:
    """Refuse settings of drafting that are mistyped or out of range. They may be assigned at any time.

    Raises:
        ConfigurationError: one is.
    """
    for name, (rule, instead_of_none) in _RULES.items():
        value = getattr(config, name)
        value = instead_of_none if value is None else value
        if not rule.allows(value):
            raise ConfigurationError(f"{name} must be {rule}, got {shown_value(value)}")


def settled(config: GenerationConfig, is_fixed: bool) -> GenerationConfig:
    """The settings of one call, where `num_assistant_tokens` is a number or `"auto"`, also where none is set.

    Args:
        config: that of `drafting_config`.
        is_fixed: nothing is to go by the clock that nobody has asked to: what was drafted shows in what comes of the
            call, or its shape was given.
    """
    config = copy.copy(config)
    if config.num_assistant_tokens is None:
        is_fixed = is_fixed or config.num_assistant_tokens_schedule not in (None, "constant")
        config.num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS if is_fixed else DEFAULT_WHERE_ONLY_SPEED_SHOWS
    return config
