"""DynaSpec: clusters of tokens, and a router that chooses among them."""

from .policy import Router, RouterShortlist

__all__ = ["Router", "RouterShortlist"]
