"""Drafters over fixed memory: the same operations at the same addresses in every round, for one or more texts."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from transformers import Cache

from ..kernels import QueryRows
from ..memory.fixed import FixedMemory

# Takes the inputs of a draft step: the embeddings of the tokens whose successors are wanted, [m, d], and for each of
# them, [m, d], an EAGLE head's feature or an independent model's hidden state at the token before. Over fixed memory
# both are [B, m, d].
ObserveDraftInputs = Callable[[torch.Tensor, torch.Tensor], None]


class FixedDrafter(ABC):
    """Drafts for `B` texts at once.

    A round calls `advance` once, and `draft` for each level of its drafts. `memory.lengths` is for the caller to
    change: after `advance` it grows by the tokens that count.

    Attributes:
        memory: the keys and values of the texts, and of the draft after each.
    """

    memory: FixedMemory

    @abstractmethod
    def begin(self, text: int, read: Cache, before: torch.Tensor) -> None:
        """Begin a text that the drafter has read up to its last token. The next `advance` reads that token again.

        Args:
            text: its index.
            read: the keys and values.
            before: `[1, f]`: the hidden state at the token before the last one: the target's, if the drafter reads
                these, otherwise its own.
        """

    def resize(self, texts: torch.Tensor, capacity: int) -> None:
        """Keep some of the texts, int64 `[b]`, in memory of at least this capacity. For use between two rounds."""
        self.memory = self.memory.copy(texts, capacity)

    @abstractmethod
    def advance(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        accepted: torch.Tensor,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Read the tokens of the last round.

        Args:
            token_ids: int64 `[B, m]`: of each text the first `accepted + 1` count.
            features: `[B, m, d_target · layers]`: the target's hidden states at the token before each, for drafters
                that read them.
            accepted: int64 `[B]`.
            observe_draft_inputs: called with the draft inputs of the last token that counts, `[B, 1, …]`.

        Returns:
            `[B, 1, d]`: the hidden state at that token, as the output projection expects it.
        """

    @abstractmethod
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None,
        rows: QueryRows,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Append one level of drafted tokens.

        Args:
            token_ids: int64 `[B, w]`.
            parents: int64 `[B, w]`: for each token its parent's row in the level before (None: row 0 for all).
            rows: where the tokens are.
            observe_draft_inputs: called with the draft inputs of these tokens, `[B, w, …]`.

        Returns:
            `[B, w, d]`: the hidden states that predict their successors.
        """


def rows_at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`[B, w, …]`: rows of states, `[B, m, …]`, at places, int64 `[B, w]`."""
    places = places.view(*places.shape, *[1] * (states.dim() - 2))
    return states.gather(1, places.expand(-1, -1, *states.shape[2:]))
