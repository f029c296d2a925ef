"""EvoSpec: tokens are retrieved when the context leaves the static vocabulary, and a cache keeps some of them."""

from .graph import CooccurrenceGraph
from .policy import RetrievalShortlist

__all__ = ["CooccurrenceGraph", "RetrievalShortlist"]
