"""EvoSpec: what is retrieved when the context leaves the static vocabulary, and which of it stays."""

from .graph import CooccurrenceGraph
from .policy import RetrievalShortlist

__all__ = ["CooccurrenceGraph", "RetrievalShortlist"]
