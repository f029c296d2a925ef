"""The settings of drafting: their defaults and rules."""

import copy
from typing import Any

from transformers import GenerationConfig

from ..errors import ConfigurationError, shown_value
from ..fields import OneOf, Share
from ..tree_config import NUM_ASSISTANT_TOKENS, TreeConfig

# Tokens drafted per round by default.
DEFAULT_NUM_ASSISTANT_TOKENS = 5

# By name in a generation configuration: the rule, and the default.
SETTINGS = {
    "num_assistant_tokens": (NUM_ASSISTANT_TOKENS, DEFAULT_NUM_ASSISTANT_TOKENS),
    "assistant_confidence_threshold": (Share(or_nothing=True), 0.0),
    "num_assistant_tokens_schedule": (OneOf(("constant", "heuristic", "heuristic_transient")), "constant"),
}


def as_tree_config(tree: bool | TreeConfig) -> TreeConfig | None:
    """Return the shape of the trees to draft, or None for chains.

    Args:
        tree: a shape, True for the default one, or False for chains.

    Raises:
        ConfigurationError: `tree` is none of these.
    """
    if isinstance(tree, TreeConfig):
        return tree
    if not isinstance(tree, bool):
        raise ConfigurationError(f"tree must be True, False or a TreeConfig, got {tree!r}")
    return TreeConfig() if tree else None


def drafting_config(drafter: Any, tokens: int | str | None, threshold: float | None) -> tuple[GenerationConfig, dict]:
    """The settings of drafting: the given ones, else the drafter's own, else defaults. And these defaults, by name.

    Args:
        drafter: a model whose own generation configuration may have some settings.
        tokens: `num_assistant_tokens` (None: not given).
        threshold: `assistant_confidence_threshold` (None: not given).

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """
    own = getattr(drafter, "generation_config", None)
    config = copy.deepcopy(own) if isinstance(own, GenerationConfig) else GenerationConfig()
    given = {"num_assistant_tokens": tokens, "assistant_confidence_threshold": threshold}
    vars(config).update({name: value for name, value in given.items() if value is not None})
    defaults = {name: default for name, (_, default) in SETTINGS.items() if getattr(config, name, None) is None}
    vars(config).update(defaults)
    # The drafter's own file may hold anything.
    require_drafting_settings(config)
    return config, defaults


def require_drafting_settings(config: GenerationConfig) -> None:
    """Check the settings of drafting, which may be assigned at any time.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """
    for name, (rule, default) in SETTINGS.items():
        value = getattr(config, name)
        value = default if value is None else value
        if not rule.allows(value):
            raise ConfigurationError(f"{name} must be {rule}, got {shown_value(value)}")
