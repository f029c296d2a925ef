"""Shortlist policies: which tokens the drafter scores at each draft step.

To add a policy, write one file beside this one and one line below; the contract tests then cover it.
"""

from .base import ShortlistPolicy, ShortlistState, WholeNumber
from .frequency import FrequencyShortlist
from .full import FullShortlist
from .in_context import InContextShortlist
from .registry import POLICIES, as_policy, policy_class, register_policy, require_settings
from .router import Router, RouterShortlist
from .union import HybridShortlist, UnionShortlist

register_policy(FullShortlist)
register_policy(FrequencyShortlist)
register_policy(InContextShortlist)
register_policy(RouterShortlist)
register_policy(UnionShortlist)
register_policy(HybridShortlist)

__all__ = [
    "POLICIES",
    "FrequencyShortlist",
    "FullShortlist",
    "HybridShortlist",
    "InContextShortlist",
    "Router",
    "RouterShortlist",
    "ShortlistPolicy",
    "ShortlistState",
    "UnionShortlist",
    "WholeNumber",
    "as_policy",
    "policy_class",
    "register_policy",
    "require_settings",
]
