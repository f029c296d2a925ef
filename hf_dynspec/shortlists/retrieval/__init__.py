"""What a shortlist finds by looking things up: the token co-occurrence graph."""

from .graph import CooccurrenceGraph

__all__ = ["CooccurrenceGraph"]
