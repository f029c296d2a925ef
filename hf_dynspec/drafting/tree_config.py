"""Moved to `hf_dynspec.tree_config`."""

from ..tree_config import AUTO, LONGEST_DRAFT, NUM_ASSISTANT_TOKENS, TreeConfig

__all__ = ["AUTO", "LONGEST_DRAFT", "NUM_ASSISTANT_TOKENS", "TreeConfig"]
