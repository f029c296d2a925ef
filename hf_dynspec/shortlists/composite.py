"""Policies made of several others: their storage, and the limits on their parts."""

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

# The limits on all parts of a composite, nested ones included, and on the depth of nesting.
MOST_POLICIES = 32
DEEPEST = 4


class CompositePolicy(ShortlistPolicy):
    """A policy with others as parts, which are stored with it.

    Args:
        policies: at least one policy.

    Attributes:
        called: its name in errors.

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
        # An unregistered class may hold unregistered parts.
        if POLICIES.get(self.name) is type(self):
            _count_policies(type(self), self.settings())

    @classmethod
    @abstractmethod
    def of(cls, policies: list[ShortlistPolicy]) -> "CompositePolicy":
        """Make one of a list of policies."""

    @property
    def needs(self) -> Needs:
        needs = Needs()
        for policy in self.policies:
            needs = needs | policy.needs
        return needs

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        return tuple(one for policy in self.policies for one in policy.tokenizer_fingerprints)

    @property
    def static_core(self) -> FrequencyShortlist | None:
        """The largest core of its policies."""
        cores = [policy.static_core for policy in self.policies if policy.static_core is not None]
        return max(cores, key=lambda core: core.size, default=None)

    def new_memory(self) -> tuple[Any, ...] | None:
        memories = tuple(policy.new_memory() for policy in self.policies)
        return None if all(memory is None for memory in memories) else memories

    def with_memories(self, memory: tuple[Any, ...] | None) -> tuple[tuple[ShortlistPolicy, Any], ...]:
        """Each policy with its part of a memory from `new_memory`."""
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
        """Check settings without building anything. The parts are counted before any of their settings is read."""
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
    """Count the parts in a composite's settings, nested ones included, and refuse too many, too deep or unfit ones."""
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
