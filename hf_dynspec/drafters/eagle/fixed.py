"""EAGLE heads over fixed memory."""

from collections.abc import Callable

import torch
from transformers import Cache

from ...kernels import QueryRows, round_attention_for
from ...memory.fixed import FixedMemory
from ..fixed import FixedDrafter, ObserveDraftInputs, rows_at
from .weights import FusedWeights


class FixedEagle(FixedDrafter):
    """See `FixedDrafter`. Row `i` of the memory reads token `i + 1` and the target's hidden state at token `i`.

    Args:
        weights_now: the present weights of a head whose rotary embedding is steady.
        memory: for the texts, of one layer.
    """

    def __init__(self, weights_now: Callable[[], FusedWeights], memory: FixedMemory):
        self.memory = memory
        self._weights_now, weights = weights_now, weights_now()
        self._attention = round_attention_for(weights.qkv.device)
        self._cos, self._sin = weights.rotary.tables(memory.capacity)
        # `[B, w, H]`: the outputs of the last level.
        self._output = weights.qkv.new_zeros(len(memory.lengths), 1, weights.settings.hidden_size)

    @property
    def _weights(self) -> FusedWeights:
        return self._weights_now()

    def begin(self, text: int, read: Cache, before: torch.Tensor) -> None:
        self.memory.begin(text, read, read.layers[0].keys.shape[2])
        self.memory.lengths[text] -= 1

    def resize(self, texts: torch.Tensor, capacity: int) -> None:
        super().resize(texts, capacity)
        self._cos, self._sin = self._weights.rotary.tables(capacity)

    def advance(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        accepted: torch.Tensor,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        last = accepted.unsqueeze(1)
        rows = QueryRows.chain(self.memory.lengths, token_ids.shape[1])
        weights = self._weights
        hidden = weights.feature(features.to(weights.qkv.dtype).flatten(0, 1), fed_back=False)
        hidden = hidden.unflatten(0, token_ids.shape)
        embedded = self._embedded(token_ids)
        if observe_draft_inputs is not None:
            observe_draft_inputs(rows_at(embedded, last), rows_at(hidden, last))
        self._output = rows_at(self._read(embedded, hidden, rows), last)
        return weights.predict(self._output)

    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None,
        rows: QueryRows,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        hidden = self._output[:, :1].expand(-1, token_ids.shape[1], -1)
        hidden = hidden if parents is None else rows_at(self._output, parents)
        embedded = self._embedded(token_ids)
        if observe_draft_inputs is not None:
            observe_draft_inputs(embedded, hidden)
        self._output = self._read(embedded, hidden, rows)
        return self._weights.predict(self._output)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weights.embed(token_ids.flatten()).unflatten(0, token_ids.shape)

    def _read(self, embedded: torch.Tensor, hidden: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        """`[B, q, H]`: the outputs of rows, whose keys and values are written to the memory."""
        weights, (texts, q) = self._weights, embedded.shape[:2]
        joined, residual = weights.combine(embedded.flatten(0, 1), hidden.flatten(0, 1))
        positions = rows.positions.expand(texts, -1).flatten()
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        queries, keys, values = (
            states.unflatten(0, (texts, q)).transpose(1, 2) for states in weights.project(joined, texts * q, cos, sin)
        )
        self.memory.reading(rows)
        keys, values = self.memory.update(keys, values, 0)
        attended = self._attention(queries, keys, values, rows, scale=queries.shape[-1] ** -0.5)
        return weights.finish(attended.flatten(0, 1).flatten(1), residual).unflatten(0, (texts, q))
