"""Policies by name. Only imported and registered classes have names."""

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..artifacts.reading import read_artifact
from ..errors import ArtifactError, ConfigurationError, shown_value
from ..storable import POLICIES
from ..vocabulary import TokenizerFingerprint
from .base import ShortlistPolicy

DEFAULT_POLICY = "hybrid"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def register_policy(policy: type[ShortlistPolicy]) -> type[ShortlistPolicy]:
    """Make a policy class known by its `name` to assistants, command lines and artifacts. Usable as a decorator.

    Returns:
        The class.

    Raises:
        ConfigurationError: the class is no policy, its name is invalid, or another class has that name.
    """
    require_policy_class(policy)
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ConfigurationError(
            f"the name {policy.name!r} is taken by {POLICIES[policy.name].__qualname__}; give {policy.__qualname__} "
            "another one"
        )
    return policy


def require_policy_class(policy: Any) -> None:
    """Refuse anything but a policy class with a valid name."""
    if not isinstance(policy, type) or not issubclass(policy, ShortlistPolicy):
        raise ConfigurationError(f"{shown_value(policy)} is not a subclass of ShortlistPolicy")
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{policy.__qualname__}.name must be lower-case letters, digits and underscores, got {shown_value(name)}; "
            f'write name = "my_policy" in the class'
        )


def policy_class(name: str) -> type[ShortlistPolicy]:
    """The policy class of that name.

    Raises:
        ConfigurationError: there is no such policy.
    """
    if isinstance(name, type) and issubclass(name, ShortlistPolicy):
        raise ConfigurationError(f"{name.__name__} is a class: pass a policy, {name.__name__}(…)")
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigurationError(f"there is no policy {shown_value(name)}; the policies are {', '.join(POLICIES)}")
    return POLICIES[name]


def as_policy(policy: ShortlistPolicy | str | None) -> ShortlistPolicy:
    """Return a policy unchanged, make one by name with its default settings, or make the default one for None.

    Raises:
        ConfigurationError: no policy has that name, or it needs settings.
    """
    if isinstance(policy, ShortlistPolicy):
        return policy
    made = policy_class(DEFAULT_POLICY if policy is None else policy)
    require_arguments(made, ())
    return made()


def require_arguments(policy: type[ShortlistPolicy], given: Iterable[str]) -> None:
    """Refuse to make a policy without its required arguments. `given` names the present ones.

    Raises:
        ConfigurationError: some are missing. The message says how to pass them.
    """
    parameters = inspect.signature(policy).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise ConfigurationError(
            f"the policy {policy.name!r} is made of at least one policy: write "
            f"{policy.__name__}(FrequencyShortlist(), InContextShortlist()), and on a command line join policies with "
            "+ instead, as in --policy frequency:size=1024+in_context"
        )
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    needed = [one.name for one in named if one.default is one.empty and one.name not in set(given)]
    if needed:
        arguments = ", ".join('"path"' for _ in needed)
        settings = ",".join(f"{one}=DIR" for one in needed)
        raise ConfigurationError(
            f"the policy {policy.name!r} cannot be made without {' and '.join(needed)}: write "
            f"{policy.__name__}({arguments}), and on a command line --policy {policy.name}:{settings}, with the "
            "folder or Hub id of an artifact"
        )


class StoredPolicy(NamedTuple):
    """An artifact given in place of a ranking, a router, … . Its tensors are on the CPU."""

    name: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: TokenizerFingerprint | None


def read_stored_policy(artifact: str | os.PathLike, tensor: str) -> StoredPolicy:
    """Read an artifact (folder or Hub repository) that must hold a certain tensor.

    Raises:
        ArtifactError: the artifact is damaged or lacks the tensor.
    """
    config, tensors = read_artifact(artifact)
    if tensor not in tensors:
        fix = f"Name an artifact that holds {tensor}; this one is of the policy {config.policy.name!r}."
        raise ArtifactError(f"model.safetensors: {tensor}", "is missing", fix, str(artifact))
    return StoredPolicy(config.policy.name, config.policy.settings, tensors, config.tokenizer)
