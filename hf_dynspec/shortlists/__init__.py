"""Shortlist policies: which tokens the drafter scores at each draft step.

To add a policy, write one file beside this one and one line in `POLICIES`; the contract tests then cover it.
"""

from ..errors import ConfigurationError, shown_value
from .base import ShortlistPolicy, ShortlistState
from .frequency import FrequencyShortlist
from .full import FullShortlist
from .in_context import InContextShortlist
from .router import Router, RouterShortlist
from .union import HybridShortlist, UnionShortlist

POLICIES: dict[str, type[ShortlistPolicy]] = {
    "full": FullShortlist,
    "frequency": FrequencyShortlist,
    "in_context": InContextShortlist,
    "router": RouterShortlist,
    "union": UnionShortlist,
    "hybrid": HybridShortlist,
}


def policy_class(name: str) -> type[ShortlistPolicy]:
    """Return the policy class of that name.

    Raises:
        ConfigurationError: there is no such policy.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigurationError(f"there is no policy {shown_value(name)}; the policies are {', '.join(POLICIES)}")
    return POLICIES[name]


def as_policy(policy: ShortlistPolicy | str | None) -> ShortlistPolicy:
    """Return a policy as it is, one made by name with its default settings, or the default policy for None.

    Raises:
        ConfigurationError: no policy has that name, or it cannot be made without settings.
    """
    if policy is None:
        return HybridShortlist()
    if isinstance(policy, ShortlistPolicy):
        return policy
    return policy_class(policy)()


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
    "as_policy",
    "policy_class",
]
