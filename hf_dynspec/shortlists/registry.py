"""The policies by name, and what else artifacts hold. A name stands for a class that was imported and registered, and
for nothing else."""

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..artifacts.reading import read_artifact
from ..errors import ArtifactError, ConfigurationError, shown_value
from ..storable import POLICIES, UNKNOWN_POLICY_FIX
from ..vocabulary import TokenizerFingerprint
from .base import ShortlistPolicy

__all__ = ["POLICIES", "UNKNOWN_POLICY_FIX", "as_policy", "policy_class", "read_stored_policy", "register_policy"]

DEFAULT_POLICY = "hybrid"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def register_policy(policy: type[ShortlistPolicy]) -> type[ShortlistPolicy]:
    """Let a policy class be found by its `name`: by an assistant, on a command line and in artifacts.

    Returns:
        The class, so that this can stand above it as a decorator.

    Raises:
        ConfigurationError: the class is no policy, has no name that a command line could hold, or another class has
            that name.
    """
    require_policy_class(policy)
    if POLICIES.setdefault(policy.name, policy) is not policy:
        raise ConfigurationError(
            f"the name {policy.name!r} is taken by {POLICIES[policy.name].__qualname__}; give {policy.__qualname__} "
            "another one"
        )
    return policy


def require_policy_class(policy: Any) -> None:
    """Refuse what is not a policy's class with a name of its own.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(policy, type) or not issubclass(policy, ShortlistPolicy):
        raise ConfigurationError(f"{shown_value(policy)} is not a subclass of ShortlistPolicy")
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{policy.__qualname__}.name must be lower-case letters, digits and underscores, got {shown_value(name)}; "
            f'write name = "my_policy" in the class'
        )


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
    made = policy_class(policy)
    require_arguments(made, ())
    return made()


def require_arguments(policy: type[ShortlistPolicy], given: Iterable[str]) -> None:
    """Refuse to make a policy without the arguments that it has no defaults for.

    Args:
        policy: its class.
        given: the arguments that there are.

    Raises:
        ConfigurationError: it needs more. The message says how to give it.
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


@dataclass(frozen=True)
class StoredPolicy:
    """What an artifact holds that was named in place of a ranking, a router, … .

    Args:
        name: the policy's.
        settings: those that it was stored with.
        tensors: on the CPU, by name.
        tokenizer: whose ids the tensors speak of.
    """

    name: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: TokenizerFingerprint | None


def read_stored_policy(artifact: str | os.PathLike, tensor: str) -> StoredPolicy:
    """Read an artifact for one of its tensors. The one place where a policy opens files.

    Args:
        artifact: a folder, or a repository on the Hub.
        tensor: the name of a tensor that must be there.

    Raises:
        ArtifactError: the artifact is damaged, or has no such tensor.
    """
    config, tensors = read_artifact(artifact)
    if tensor not in tensors:
        fix = f"Name an artifact that holds {tensor}; this one is of the policy {config.policy.name!r}."
        raise ArtifactError(f"model.safetensors: {tensor}", "is missing", fix, str(artifact))
    return StoredPolicy(config.policy.name, config.policy.settings, tensors, config.tokenizer)
