"""The policies by name. A name stands for a class that was imported and registered, and for nothing else."""

import inspect
from collections.abc import Iterable

from ..errors import ConfigurationError, shown_value
from .base import ShortlistPolicy

DEFAULT_POLICY = "hybrid"
POLICIES: dict[str, type[ShortlistPolicy]] = {}


def register_policy(policy: type[ShortlistPolicy]) -> type[ShortlistPolicy]:
    """Let a policy class be found by its `name`: by an assistant, on a command line and in artifacts.

    Returns:
        The class, so that this can stand above it as a decorator.

    Raises:
        ConfigurationError: another class has that name.
    """
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ConfigurationError(
            f"the name {policy.name!r} is taken by {POLICIES[policy.name].__qualname__}; give {policy.__qualname__} "
            "another one"
        )
    return policy


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
        return POLICIES[DEFAULT_POLICY]()
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
