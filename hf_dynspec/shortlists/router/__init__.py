"""DynaSpec: clusters of tokens, and a router that chooses among them."""

from .network import Router
from .policy import RouterShortlist

__all__ = ["Router", "RouterShortlist"]
