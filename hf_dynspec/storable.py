"""What artifacts store of a policy, as its class declares it.

A class declares its settings and its tensors by name, and whoever reads an artifact refuses everything else. Dtypes
and shapes are looked at before memory is taken for a tensor, its contents afterwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch

from .errors import ArtifactError, ConfigurationError, shown_value
from .fields import SettingRule
from .vocabulary import TokenizerFingerprint

# The dtypes by the names that safetensors gives them.
ID_DTYPES = ("I32", "I64")
WEIGHT_DTYPES = ("F32", "F16", "BF16")
# In the shape of a rule, a function of the tokenizer's size: one place for each of its ids.
TOKENIZER_SIZE: Callable[[int], int] = int

BUILD_AGAIN = "Build it again with the tokenizer that config.json names."

# The table of classes, by name. `shortlists` fills it, and `register_policy` adds classes of a user's own.
POLICIES: dict[str, Any] = {}
# Data that policies read. It has artifacts of its own.
POLICY_DATA: dict[str, type["Storable"]] = {}

UNKNOWN_POLICY_FIX = (
    "Import the package that registers it (register_policy) before the artifact is loaded, or install the hf_dynspec "
    "that wrote it"
)


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
    """What a stored tensor of a certain name may be.

    ```python
    tensor_rules = {"ranking": token_ranking(), "gain": TensorRule(WEIGHT_DTYPES, (TOKENIZER_SIZE,))}
    ```

    Args:
        dtypes: the safetensors names of its dtypes, such as `ID_DTYPES` or `WEIGHT_DTYPES`. Numbers that are not
            finite are refused for every rule.
        largest_shape: the most of each of its dimensions, as a number or as a function of the tokenizer's size, such
            as `TOKENIZER_SIZE` for as many as there are ids; none may be 0.
        check_contents: called with the tensor's field, the tensor, the tokenizer and the end-of-sequence ids to cover.
            Raises `ArtifactError` (None: any contents will do).
    """

    dtypes: tuple[str, ...]
    largest_shape: tuple[int | Callable[[int], int], ...]
    check_contents: Callable[[str, torch.Tensor, TokenizerFingerprint, tuple[int, ...]], None] | None = None

    def largest_for(self, tokenizer: TokenizerFingerprint) -> tuple[int, ...]:
        """The most of each dimension for a tokenizer."""
        return tuple(most(tokenizer.size) if callable(most) else most for most in self.largest_shape)


def token_ids() -> TensorRule:
    """The rule of a list of unique token ids `[n]`. The end-of-sequence ids need not be among them."""
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
    is_ranked = ranking.new_zeros(tokenizer.size, dtype=torch.bool).index_fill(0, ranking.to(torch.int64), True)
    for token_id in eos_token_ids:
        if token_id >= tokenizer.size or not bool(is_ranked[token_id]):
            problem = f"lacks the end-of-sequence id {token_id}, so that no draft could ever end"
            raise ArtifactError(field, problem, "Append the id to the ranking and write the artifact again.")


class Storable:
    """What an artifact can hold: something that its settings and its tensors rebuild, and whose class declares which
    those may be. Nothing else is written, and nothing else is read.

    Attributes:
        name: what it is called on a command line and in artifacts.
        setting_rules: what `settings()` may return: each setting by its name, which is the constructor's argument too.
        tensor_rules: what `tensors()` may return, likewise.
        card_summary: a sentence that says what it is, for the model cards of its artifacts.
        card_tags: what people who search the Hub call it, beside its name.
    """

    name: ClassVar[str]
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {}
    tensor_rules: ClassVar[Mapping[str, TensorRule]] = {}
    card_summary: ClassVar[str] = ""
    card_tags: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        """The JSON-serialisable settings that, with `tensors()`, rebuild this."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors (CPU, contiguous) that, with `settings()`, rebuild this."""
        return {}

    @classmethod
    def require_settings(cls, settings: Mapping[str, Any]) -> None:
        """Check settings, from wherever they come, without building anything.

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
        """The rules of the tensors that one of these settings may have, by the names that `tensors()` gives them.

        Args:
            settings: those that `require_settings` let pass.
        """
        return cls.tensor_rules

    @classmethod
    def classes_in(cls, settings: Mapping[str, Any]) -> tuple[type["Storable"], ...]:
        """The classes that have to be registered where one of these settings is loaded: this one, and those of its
        parts where it has some."""
        return (cls,)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "Storable":
        """Rebuild one from what `settings()` and `tensors()` returned.

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
        """The constructor's arguments that the tensors stand for."""
        return dict(tensors)
