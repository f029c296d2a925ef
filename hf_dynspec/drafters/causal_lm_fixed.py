"""Independent drafters over fixed memory."""

from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel

from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from .fixed import FixedDrafter, ObserveDraftInputs, rows_at


class FixedCausalLM(FixedDrafter):
    """See `FixedDrafter`.

    Args:
        model: the drafter's model.
        head_weight: `[V, d]`: the output projection's, with the dtype and the device of hidden states.
        embed: the embeddings, `[…, e]`, of tokens, int64 `[…]`.
        memory: for the texts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head_weight: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
        memory: FixedMemory,
    ):
        self.memory = memory
        self._decoder = FixedDecoder(model)
        self._head_weight, self._embed = head_weight, embed
        # A target with more rows than the drafter may choose a token without an embedding here.
        self._largest_id = head_weight.shape[0] - 1
        # The hidden state at the token before the next ones to be read, and those of the last level.
        self._before = head_weight.new_zeros(len(memory.lengths), 1, head_weight.shape[1])
        self._level = self._before

    def begin(self, text: int, read: Cache, before: torch.Tensor) -> None:
        self.memory.begin(text, read, read.layers[0].keys.shape[2])
        self.memory.lengths[text] -= 1
        self._before[text] = before

    def resize(self, texts: torch.Tensor, capacity: int) -> None:
        super().resize(texts, capacity)
        self._before = self._before.index_select(0, texts)

    def advance(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        accepted: torch.Tensor,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        last = accepted.unsqueeze(1)
        hidden = self._read(token_ids, QueryRows.chain(self.memory.lengths, token_ids.shape[1]))
        if observe_draft_inputs is not None:
            before = torch.cat([self._before, hidden], dim=1)
            observe_draft_inputs(self._embed(token_ids.gather(1, last)), rows_at(before, last))
        self._level = rows_at(hidden, last)
        self._before.copy_(self._level)
        return self._level

    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None,
        rows: QueryRows,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        if observe_draft_inputs is not None:
            before = self._level[:, :1].expand(-1, token_ids.shape[1], -1)
            before = before if parents is None else rows_at(self._level, parents)
            observe_draft_inputs(self._embed(token_ids), before)
        self._level = self._read(token_ids, rows)
        return self._level

    def _read(self, token_ids: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        return self._decoder(token_ids.clamp_max(self._largest_id), self.memory, rows)[0].to(self._head_weight)
