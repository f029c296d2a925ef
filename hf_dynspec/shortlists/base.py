"""The contract of shortlist policies: an immutable policy starts one mutable state for each drafting session."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..protocol import BlockLayout, Needs, Prompt, Shortlist, Verdict, VocabularyInfo


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
    def foresee(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:  # noqa: B027
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
        """Take in new context. Called with the tokens before the first draft step and, where the policy needs prompt
        logits, once more with `top_ids` (and no tokens) when the target has read the prompt."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027
        """Take in what the target said of the last round. Called before the next round is drafted."""


class ShortlistPolicy(ABC):
    """How shortlists are made. Immutable and shareable; this is what an artifact stores.

    Subclasses set `name`, validate their settings on construction (`ConfigurationError`), and can be rebuilt from
    `settings()` and `tensors()` by `from_settings`.
    """

    name: ClassVar[str]

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
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "ShortlistPolicy":
        """Rebuild a policy from what `settings()` and `tensors()` returned.

        Raises:
            ConfigurationError: a setting is unknown, mistyped or out of range.
        """
        from ..errors import ConfigurationError

        try:
            return cls(**settings, **tensors)
        except TypeError as error:
            raise ConfigurationError(f"policy {cls.name!r} cannot be built from its settings: {error}") from error

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{type(self).__name__}({shown})"
