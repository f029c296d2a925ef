"""The contract of drafters: tokens in, hidden states out, and never a projection to the vocabulary."""

from abc import ABC, abstractmethod

import torch

from ..head import DynamicLMHead


class DrafterState(ABC):
    """What a drafter remembers during one session: its cache over the verified prefix and the current draft."""

    @property
    @abstractmethod
    def length(self) -> int:
        """How many tokens the cache covers."""

    @abstractmethod
    def extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append tokens to the cache.

        Args:
            token_ids: int64 `[m]`, `m >= 1`, on the drafter's device.

        Returns:
            `[m, d]`: the hidden state at each of them, as the output projection expects it.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Shorten the cache to its first `length` tokens, `length <= self.length`."""


class Drafter(ABC):
    """A model that proposes tokens. Shareable between sessions.

    Attributes:
        head: the output projection that turns the hidden states into logits over a shortlist.
    """

    head: DynamicLMHead

    @abstractmethod
    def start(self) -> DrafterState:
        """Begin a session with an empty cache."""
