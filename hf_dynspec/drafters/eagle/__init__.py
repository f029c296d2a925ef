"""EAGLE-2 and EAGLE-3 heads: the drafter, its checkpoints in three layouts, and conversion between them."""

from .drafter import EagleDrafter

__all__ = ["EagleDrafter"]
