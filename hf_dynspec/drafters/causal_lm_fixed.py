"""Independent drafters over fixed memory."""

from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel

from ..devices import is_host_memory
from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from .fixed import FixedDrafter, ObserveDraftInputs, rows_at
from .traced_step import TracedStep


class FixedCausalLM(FixedDrafter):
    """See `FixedDrafter`.

    Drafted chains stay in the memory. So `advance` reads two tokens at most: the last draft, which no draft step has
    read, and the target's own token after it. After trees it reads all accepted tokens anew.

    Args:
        model: the drafter's model.
        head_weight: `[V, d]`: the output projection's, with the dtype and the device of hidden states.
        embed: the embeddings, `[…, e]`, of tokens, int64 `[…]`.
        memory: for the texts.
        step: appends a token to a single text on a CPU (None: the decoder does).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head_weight: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
        memory: FixedMemory,
        step: TracedStep | None = None,
    ):
        self.memory = memory
        self._step, self._weights = step, []
        self._decoder = FixedDecoder(model)
        self._head_weight, self._embed = head_weight, embed
        # A target with more rows than the drafter may choose a token without an embedding here.
        self._largest_id = head_weight.shape[0] - 1
        # The hidden state at the token before the next ones to be read, and those of the last level.
        self._before = head_weight.new_zeros(len(memory.lengths), 1, head_weight.shape[1])
        self._level = self._before
        self._drafts_trees = False
        # For a single text on a CPU, the hidden states `[1, 1, d]` at its last token and at those drafted after it.
        self._chain: list[torch.Tensor] = []

    def begin(self, text: int, read: Cache, before: torch.Tensor) -> None:
        self.memory.begin(text, read, read.layers[0].keys.shape[2])
        self.memory.lengths[text] -= 1
        self._before[text] = before
        self._chain = [before.unsqueeze(0)] if self._is_single else []

    def resize(self, texts: torch.Tensor, capacity: int) -> None:
        super().resize(texts, capacity)
        if not self._is_single:
            self._chain = []
        self._before = self._before.index_select(0, texts)

    def advance(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        accepted: torch.Tensor,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        if self._chain and not self._drafts_trees:
            return self._go_on(token_ids, int(accepted), observe_draft_inputs)
        last, first = accepted.unsqueeze(1), torch.zeros_like(accepted)
        if not self._drafts_trees:
            first = (accepted - 1).clamp_min(0)
            last = last - first.unsqueeze(1)
            token_ids = token_ids.gather(1, first.unsqueeze(1) + torch.arange(2, device=first.device))
        hidden = self._read(token_ids, QueryRows.chain(self.memory.lengths + first, token_ids.shape[1]))
        if observe_draft_inputs is not None:
            before = torch.cat([self._before, hidden], dim=1)
            observe_draft_inputs(self._embed(token_ids.gather(1, last)), rows_at(before, last))
        self._level = rows_at(hidden, last)
        self._before.copy_(self._level)
        return self._level

    def _go_on(
        self, token_ids: torch.Tensor, accepted: int, observe_draft_inputs: ObserveDraftInputs | None
    ) -> torch.Tensor:
        """`advance` of a single text on a CPU."""
        if self._step is not None:
            self._weights = self._step.weights()
        known = min(accepted, len(self._chain) - 1)
        fresh = token_ids[:, known : accepted + 1]
        hidden = self._append(fresh, known)
        if observe_draft_inputs is not None:
            before = self._chain[accepted] if known == accepted else hidden[:, :1]
            observe_draft_inputs(self._embed(fresh[:, -1:]), before)
        self._level = hidden[:, -1:]
        self._before.copy_(self._level)
        self._chain = [self._level]
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
        self._drafts_trees = self._drafts_trees or token_ids.shape[1] > 1
        if self._chain and not self._drafts_trees:
            self._level = self._append(token_ids, len(self._chain) - 1)
            self._chain.append(self._level)
        else:
            self._level = self._read(token_ids, rows)
        return self._level

    @property
    def _is_single(self) -> bool:
        return len(self.memory.lengths) == 1 and is_host_memory(self.memory.lengths.device)

    def _append(self, token_ids: torch.Tensor, offset: int) -> torch.Tensor:
        """Append tokens, int64 `[1, m]`, to a single text and the first `offset` tokens after it."""
        if self._step is None or token_ids.shape[1] > 1:
            return self._read(token_ids, QueryRows.chain(self.memory.lengths + offset, token_ids.shape[1]))
        length, token_id = int(self.memory.lengths) + offset, token_ids[0].clamp_max(self._largest_id)
        hidden = self._step.run(self._weights, token_id, length, self.memory.of_text(0, length + 1))
        return hidden.unsqueeze(0).to(self._head_weight)

    def _read(self, token_ids: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        return self._decoder(token_ids.clamp_max(self._largest_id), self.memory, rows)[0].to(self._head_weight)
