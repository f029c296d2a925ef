"""The shape of a draft tree. Plain data: importing this module does not load torch."""

from dataclasses import dataclass

from .errors import ConfigurationError
from .fields import WholeNumber

LONGEST_DRAFT = 1024
# Let the number of tokens to draft be chosen round by round.
AUTO = "auto"
NUM_ASSISTANT_TOKENS = WholeNumber(1, LONGEST_DRAFT, word=AUTO)

# Larger trees would take more memory for their masks than for anything else.
_LIMITS = {"total_tokens": (2, 4096), "depth": (0, 128), "top_k": (1, 512)}


@dataclass(frozen=True)
class TreeConfig:
    """The shape of a dynamic draft tree (EAGLE-2, section 4; the defaults are those of its code).

    Greedy trees hold the drafter's likeliest tokens, as EAGLE-2's do; when sampling, a node's children are drawn.

    Args:
        total_tokens: nodes of the tree that is verified, the last verified token at its root included.
        depth: draft steps after the first, so that paths have up to `depth + 1` drafted tokens.
        top_k: nodes that each draft step expands, and children that each of them gets (when sampling 16 at most).

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """

    total_tokens: int = 60
    depth: int = 5
    top_k: int = 10

    def __post_init__(self):
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigurationError(f"tree: {name} must be a whole number from {least} to {most}, got {value!r}")
