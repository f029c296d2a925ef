"""The contract of shortlist policies: an immutable policy starts one mutable state for each drafting session."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import ConfigurationError, shown_value
from ..protocol import BlockLayout, Needs, Prompt, Shortlist, Verdict, VocabularyInfo

# No setting counts tokens, clusters or positions beyond this: several times the largest vocabularies in use, as
# `configuration.LARGEST_VOCABULARY`.
LARGEST_COUNT = 2**22
# Ids of the target's most probable tokens that a policy may ask for at each position.
LARGEST_TOP_K = 1024


# What a setting may be. A rule knows plain values only: no setting can name a file, a repository or a class.


class SettingRule(ABC):
    """What values a setting of a policy may have."""

    @abstractmethod
    def allows(self, value: Any) -> bool:
        """Whether the setting may have this value."""

    @abstractmethod
    def __str__(self) -> str:
        """What the setting must be, to follow upon "must be"."""


@dataclass(frozen=True)
class WholeNumber(SettingRule):
    """A whole number from `least` to `most`, or None where it is `optional`."""

    least: int
    most: int = LARGEST_COUNT
    optional: bool = False

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}" + (" or None" if self.optional else "")


@dataclass(frozen=True)
class Share(SettingRule):
    """A number above 0 and up to 1."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1

    def __str__(self) -> str:
        return "a share above 0 and up to 1"


@dataclass(frozen=True)
class Switch(SettingRule):
    """True or False."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


@dataclass(frozen=True)
class OneOf(SettingRule):
    """One of a few names."""

    names: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


class ShortlistState(ABC):
    """What a policy remembers during one session. Not shared between threads.

    Attributes:
        layout: what the shortlists' `blocks` are blocks of, for policies that choose whole blocks.
    """

    layout: BlockLayout | None = None

    @abstractmethod
    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        """Return the shortlist for one draft step. Must not wait for the device.

        Args:
            depth: the draft step, counted from 0 in each round.
            token_ids: int64 `[m]`: the tokens whose successors are about to be drafted (1 for a chain).
            features: `[m, d]`: the drafter's hidden states at those tokens.
        """

    # Policies that learn nothing from the context leave these as they are.
    def begin_round(self) -> None:  # noqa: B027
        """A round of drafting begins: the place to take up what a worker has found since the last one. Called once
        before the round's first `observe_draft_inputs` and `select`, and must wait neither for the device nor for the
        worker. Rounds in which nothing is drafted have no such call."""

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:  # noqa: B027
        """Take in what the next draft step starts from, where the policy asked for it (`Needs.draft_inputs`). Called
        once before each `select`, and before the drafter's layers run wherever the drafter has it by then.

        Args:
            embeddings: `[m, d]`: the drafter's embeddings of the tokens whose successors are about to be drafted.
            features: `[m, d]`: what the drafter knew before each of these tokens: the feature that an EAGLE head reads
                beside the embedding, or an independent model's hidden state at the token before; zeros where there
                is none.
        """

    def restart(self) -> None:  # noqa: B027
        """Forget the context: what follows is another text. Slots that keep their ids keep their version."""

    def observe_prompt(self, prompt: Prompt) -> None:  # noqa: B027
        """Take in new context. Called with the tokens before the first draft step and, where the policy needs to know
        what the target says of them, once more (with no tokens) when the target has read the prompt."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027
        """Take in what the target said in the last round. Called after every verification, also where nothing had been
        drafted, and before the next round begins; not after the one that ends a text for good, which nothing follows.
        """

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:  # noqa: B027
        """Take up the rows of a head whose weights changed. Called between rounds, and only where the policy asked for
        rows (`Needs.drafter_rows`, `Needs.target_rows`): such policies must override it.

        Args:
            vocabulary: as at the start, with the rows as they are now.
        """

    def close(self) -> None:  # noqa: B027
        """End whatever does not end by itself, such as a thread. Called once, when the session is given up: when the
        assistant is unbound, gets another policy, has more idle sessions than it keeps, or is gone, after an error in
        a round, and at the interpreter's exit. It may be called by any thread, and should not take long. Nothing is
        called after it. The state must hold neither the assistant nor the models, which would keep them for good."""


class ShortlistPolicy(ABC):
    """How shortlists are made. Immutable and shareable; this is what an artifact stores.

    Subclasses set `name` and `setting_rules`, hold their settings against them on construction (`require_settings`),
    and can be rebuilt from `settings()` and `tensors()` by `from_settings`, which does the same before it builds
    anything.

    Attributes:
        setting_rules: what `settings()` may return: each setting by its name, which is the constructor's argument too.
    """

    name: ClassVar[str]
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {}

    @property
    def needs(self) -> Needs:
        """What the policy asks to be shown of the target."""
        return Needs()

    @abstractmethod
    def start(self, vocabulary: VocabularyInfo) -> ShortlistState:
        """Begin a session over `vocabulary`."""

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        """The tokenizers (`configuration.TokenizerFingerprint`) that the policy's ids belong to, where they are known.
        An assistant refuses models with another one."""
        return ()

    def settings(self) -> dict[str, Any]:
        """The JSON-serialisable settings that, with `tensors()`, rebuild this policy."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors (CPU, contiguous) that, with `settings()`, rebuild this policy."""
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
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "ShortlistPolicy":
        """Rebuild a policy from what `settings()` and `tensors()` returned.

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

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{type(self).__name__}({shown})"
