"""Policies that are made of several others: what they are stored as, and which they may be."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigurationError, shown_value
from ..fields import FieldError
from ..protocol import Needs
from ..storable import POLICIES, UNKNOWN_POLICY_FIX, Storable, TensorRule
from ..vocabulary import TokenizerFingerprint
from .base import ShortlistPolicy
from .frequency import FrequencyShortlist
from .registry import policy_class

# Policies of one that is made of several and of such ones within it, all together, and how deep they may lie.
MOST_POLICIES = 32
DEEPEST = 4


class CompositePolicy(ShortlistPolicy):
    """A policy that others are parts of. It is stored with all of them.

    Args:
        policies: at least one policy.

    Attributes:
        called: what errors call it.

    Raises:
        ConfigurationError: no policies, too many of them, or something that is not a policy or cannot be a part.
    """

    called = "a policy of several"

    def __init__(self, *policies: ShortlistPolicy):
        if not policies:
            raise ConfigurationError(f"{self.called} needs at least one policy")
        for policy in policies:
            if not isinstance(policy, ShortlistPolicy):
                raise ConfigurationError(f"{self.called} is made of policies, got {shown_value(policy)}")
            if not policy.can_be_part:
                raise ConfigurationError(f"the policy {policy.name!r} cannot be a part of {self.called}")
        self.policies = policies
        # One that nobody registered may be made of others like it.
        if POLICIES.get(self.name) is type(self):
            _count_policies(type(self), self.settings())

    @classmethod
    @abstractmethod
    def of(cls, policies: list[ShortlistPolicy]) -> "CompositePolicy":
        """Make it of these."""

    @property
    def needs(self) -> Needs:
        """Those of all."""
        needs = Needs()
        for policy in self.policies:
            needs = needs | policy.needs
        return needs

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        return tuple(one for policy in self.policies for one in policy.tokenizer_fingerprints)

    @property
    def static_core(self) -> FrequencyShortlist | None:
        """The largest of its policies' cores."""
        cores = [core for core in (policy.static_core for policy in self.policies) if core is not None]
        return max(cores, key=lambda core: core.size, default=None)

    def new_memory(self) -> tuple[Any, ...] | None:
        memories = tuple(policy.new_memory() for policy in self.policies)
        return None if all(memory is None for memory in memories) else memories

    def with_memories(self, memory: tuple[Any, ...] | None) -> tuple[tuple[ShortlistPolicy, Any], ...]:
        """Each policy and what it remembers, given what `new_memory` returned."""
        return tuple(zip(self.policies, memory or (None,) * len(self.policies), strict=True))

    def settings(self) -> dict[str, Any]:
        return {"policies": [{"name": policy.name, "settings": policy.settings()} for policy in self.policies]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, policy in enumerate(self.policies)
            for name, tensor in policy.tensors().items()
        }

    @classmethod
    def require_settings(cls, settings: Mapping[str, Any]) -> None:
        """As for every policy; the policies inside are counted before the settings of any are looked at."""
        _count_policies(cls, settings)
        for index, part in enumerate(settings["policies"]):
            field = f"policies[{index}]"
            try:
                policy = policy_class(part["name"])
            except ConfigurationError as error:
                raise FieldError(f"{field}.name", str(error), UNKNOWN_POLICY_FIX) from error
            try:
                policy.require_settings(part["settings"])
            except FieldError as error:
                raise FieldError(f"{field}.settings.{error.field}", error.problem, error.fix) from error

    @classmethod
    def tensor_rules_for(cls, settings: Mapping[str, Any]) -> Mapping[str, TensorRule]:
        rules = {}
        for index, part in enumerate(settings["policies"]):
            own = policy_class(part["name"]).tensor_rules_for(part["settings"])
            rules.update({f"{index}.{name}": rule for name, rule in own.items()})
        return rules

    @classmethod
    def classes_in(cls, settings: Mapping[str, Any]) -> tuple[type[Storable], ...]:
        classes = super().classes_in(settings)
        for part in settings["policies"]:
            classes += policy_class(part["name"]).classes_in(part["settings"])
        return classes

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "CompositePolicy":
        cls.require_settings(settings)
        policies = []
        for index, part in enumerate(settings["policies"]):
            prefix = f"{index}."
            own = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            policies.append(policy_class(part["name"]).from_settings(part["settings"], own))
        return cls.of(policies)


def _count_policies(made: type[CompositePolicy], settings: Mapping[str, Any], depth: int = 1, path: str = "") -> int:
    """The number of policies inside one of several of these settings, those within them too.

    Raises:
        ConfigurationError: these are not such settings, or the policies are too many, lie too deep or cannot be parts.
    """
    parts = settings.get("policies") if isinstance(settings, Mapping) else None
    if not isinstance(parts, list) or not parts or set(settings) != {"policies"}:
        raise ConfigurationError(f"the settings of {made.called} are a list named 'policies' and nothing else")
    if depth > DEEPEST:
        raise ConfigurationError(f"{made.called} lies within others more than {DEEPEST} deep")
    count = len(parts)
    for index, part in enumerate(parts[: MOST_POLICIES + 1]):
        if not isinstance(part, Mapping) or set(part) != {"name", "settings"}:
            raise ConfigurationError(f"policy {index} of {made.called} must have exactly a name and settings")
        if not isinstance(part["settings"], Mapping):
            problem = f"must be a JSON object, got {shown_value(part['settings'])}"
            raise FieldError(f"{path}policies[{index}].settings", problem, "Give the settings of that policy")
        inner = POLICIES.get(part["name"]) if isinstance(part["name"], str) else None
        if inner is not None and issubclass(inner, CompositePolicy):
            if not inner.can_be_part:
                raise ConfigurationError(f"the policy {inner.name!r} cannot be a part of {made.called}")
            count += _count_policies(inner, part["settings"], depth + 1, f"{path}policies[{index}].settings.")
        if count > MOST_POLICIES:
            raise ConfigurationError(f"{made.called} holds {count} policies or more, and {MOST_POLICIES} are the most")
    return count
