"""What artifacts can hold: the table of classes, and the rules for their settings and tensors.

A class declares its settings and tensors by name, and readers of artifacts refuse everything else. Dtypes and shapes
are checked before memory is taken for a tensor, contents afterwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch

from .errors import ArtifactError, ConfigurationError, shown_value
from .fields import SettingRule
from .vocabulary import TokenizerFingerprint

# Dtypes by their names in safetensors.
ID_DTYPES = ("I32", "I64")
WEIGHT_DTYPES = ("F32", "F16", "BF16")
# A dimension of a rule: one place for each id of the tokenizer.
TOKENIZER_SIZE: Callable[[int], int] = int

BUILD_AGAIN = "Build it again with the tokenizer that config.json names."
UNKNOWN_POLICY_FIX = (
    "Import the package that registers it (register_policy) before the artifact is loaded, or install the hf_dynspec "
    "that wrote it"
)

# The table of classes, by name. `shortlists` fills it, and `register_policy` adds a user's own.
POLICIES: dict[str, Any] = {}
# Data that policies read. It has artifacts of its own.
POLICY_DATA: dict[str, type["Storable"]] = {}


def stored_class(name: str) -> type["Storable"]:
    """The class of an artifact's contents: a policy's, or one of `POLICY_DATA`.

    Raises:
        ConfigurationError: no class of that name is registered. A file never causes an import.
    """
    import_module("hf_dynspec.shortlists")  # registers the policies of this package
    if isinstance(name, str) and name in POLICY_DATA:
        return POLICY_DATA[name]
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigurationError(f"there is no policy {shown_value(name)}; the policies are {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class TensorRule:
    """The rule of a stored tensor.

    ```python
    tensor_rules = {"ranking": token_ranking(), "gain": TensorRule(WEIGHT_DTYPES, (TOKENIZER_SIZE,))}
    ```

    Args:
        dtypes: the safetensors names of its dtypes, such as `ID_DTYPES` or `WEIGHT_DTYPES`. NaN and infinity are
            always refused.
        largest_shape: the most of each dimension, as a number or as a function of the tokenizer's size, such as
            `TOKENIZER_SIZE`. No dimension may be 0.
        check_contents: called with the tensor's field, the tensor, the tokenizer and the end-of-sequence ids that
            rankings must hold. Raises `ArtifactError` (None: any contents will do).
    """

    dtypes: tuple[str, ...]
    largest_shape: tuple[int | Callable[[int], int], ...]
    check_contents: Callable[[str, torch.Tensor, TokenizerFingerprint, tuple[int, ...]], None] | None = None

    def largest_for(self, tokenizer: TokenizerFingerprint) -> tuple[int, ...]:
        """The most of each dimension for a tokenizer."""
        return tuple(most(tokenizer.size) if callable(most) else most for most in self.largest_shape)


def token_ids() -> TensorRule:
    """The rule of unique token ids `[n]`."""
    return TensorRule(ID_DTYPES, (TOKENIZER_SIZE,), check_token_ids)


def token_ranking() -> TensorRule:
    """The rule of a ranking `[n]`: unique token ids, the end-of-sequence ids among them."""
    return TensorRule(ID_DTYPES, (TOKENIZER_SIZE,), check_token_ranking)


def check_token_ids(
    field: str, ids: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that ids `[n]` are unique ids of the tokenizer.

    Raises:
        ArtifactError: they are not. Its `field` is `field`.
    """
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= tokenizer.size:
        outside = least if least < 0 else most
        raise ArtifactError(field, f"holds the id {outside}, and ids run from 0 to {tokenizer.size - 1}", BUILD_AGAIN)
    counts = torch.bincount(ids, minlength=tokenizer.size)
    if int(counts.max()) > 1:
        raise ArtifactError(field, f"repeats the id {int(counts.argmax())}", BUILD_AGAIN)


def check_token_ranking(
    field: str, ranking: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that a ranking `[n]` holds unique ids of the tokenizer, the end-of-sequence ids among them.

    Raises:
        ArtifactError: it does not. Its `field` is `field`.
    """
    check_token_ids(field, ranking, tokenizer, eos_token_ids)
    for token_id in eos_token_ids:
        if not bool((ranking == token_id).any()):
            problem = f"lacks the end-of-sequence id {token_id}, so that no draft could ever end"
            raise ArtifactError(field, problem, "Append the id to the ranking and write the artifact again.")


class Storable:
    """Something that artifacts can hold, and that its settings and tensors rebuild. Nothing else is written or read.

    Attributes:
        name: its name on command lines and in artifacts.
        setting_rules: the rules of `settings()` by name. Each name is an argument of the constructor and an attribute.
        tensor_rules: the rules of `tensors()`, likewise.
        card_summary: a sentence about it for model cards.
        card_tags: tags for the Hub, beside its name.
    """

    name: ClassVar[str]
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {}
    tensor_rules: ClassVar[Mapping[str, TensorRule]] = {}
    card_summary: ClassVar[str] = ""
    card_tags: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        """The JSON values that, with `tensors()`, rebuild this: the attributes that `setting_rules` names."""
        return {name: getattr(self, name) for name in self.setting_rules}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors (CPU, contiguous) that, with `settings()`, rebuild this."""
        return {}

    @classmethod
    def require_settings(cls, settings: Mapping[str, Any]) -> None:
        """Check settings without building anything.

        Raises:
            ConfigurationError: a setting is unknown, mistyped or out of range.
        """
        for name, value in settings.items():
            rule = cls.setting_rules.get(name)
            if rule is None:
                known = ", ".join(cls.setting_rules) or "none"
                raise ConfigurationError(f"the policy {cls.name!r} has no setting {shown_value(name)}; it has {known}")
            if not rule.allows(value):
                raise ConfigurationError(f"{name} must be {rule}, got {shown_value(value)}")

    @classmethod
    def tensor_rules_for(cls, settings: Mapping[str, Any]) -> Mapping[str, TensorRule]:
        """The rules of the tensors for these valid settings."""
        return cls.tensor_rules

    @classmethod
    def classes_in(cls, settings: Mapping[str, Any]) -> tuple[type["Storable"], ...]:
        """The classes needed to load these settings: this one, and those of its parts."""
        return (cls,)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "Storable":
        """Rebuild one from `settings()` and `tensors()`.

        Raises:
            ConfigurationError: a setting is unknown, mistyped or out of range.
        """
        cls.require_settings(settings)
        try:
            return cls(**settings, **cls._arguments_from(tensors))
        except TypeError as error:
            raise ConfigurationError(f"policy {cls.name!r} cannot be built from its tensors: {error}") from error

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The constructor's arguments from the tensors."""
        return dict(tensors)
