"""Shortlist policies: which tokens the drafter scores at each draft step.

To add a policy, write one file beside this one and one line in `POLICIES`; the contract tests then cover it.
"""

import inspect
from collections.abc import Iterable

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
    require_settings(policy, ())
    return policy_class(policy)()


def require_settings(name: str, given: Iterable[str]) -> None:
    """Refuse to make a policy by name without the settings that it has no defaults for.

    Args:
        name: the policy's.
        given: the settings that there are.

    Raises:
        ConfigurationError: there is no such policy, or it needs more. The message says how to give it.
    """
    made = policy_class(name)
    parameters = inspect.signature(made).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise ConfigurationError(
            f"the policy {name!r} is made of at least one policy: write {made.__name__}(FrequencyShortlist(), "
            "InContextShortlist()), and on a command line join policies with + instead, as in --policy "
            "frequency:size=1024+in_context"
        )
    needed = [one.name for one in parameters if one.default is one.empty and one.name not in set(given)]
    if needed:
        arguments = ", ".join('"path"' for _ in needed)
        settings = ",".join(f"{one}=DIR" for one in needed)
        raise ConfigurationError(
            f"the policy {name!r} cannot be made without {' and '.join(needed)}: write {made.__name__}({arguments}), "
            f"and on a command line --policy {name}:{settings}, with the folder or Hub id of an artifact"
        )


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
    "require_settings",
]
