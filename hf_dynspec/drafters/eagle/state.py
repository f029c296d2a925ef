"""The cache of an EAGLE head: the rows of a text, and of the draft after it."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from ..base import DrafterState, ObserveDraftInputs
from ..traceable_decoder import cache_of
from .rotary import rotate
from .weights import FusedWeights

_FIRST_CAPACITY = 256


class EagleState(DrafterState):
    """The stable rows of the verified text, computed from the target's features, and after them the rows of a draft.

    A draft's rows come from the head's own guesses of features, so they are dropped even if their tokens were
    accepted. `length` counts verified tokens only: the stable rows, and the token that the last one read.

    Keys are stored rotated, unless the rotation of a position depends on the length of the text (dynamic and
    longrope): then they are rotated at every step.

    Args:
        weights_now: returns the weights, at the start of every round.
    """

    def __init__(self, weights_now: Callable[[], FusedWeights]):
        self._weights_now = weights_now
        self._weights = weights_now()
        self._start = 0  # the position of the first row: not 0 if the text's first features were not available
        self._stable = 0
        self._drafted = 0
        self._levels = 0
        # `[w, H]`: the outputs of the last level, or of the last stable row.
        self._output: torch.Tensor | None = None
        # bool `[w, drafted]`: the drafted rows that the last level saw (None: all).
        self._ancestors: torch.Tensor | None = None
        self._reserve(_FIRST_CAPACITY)

    @property
    def length(self) -> int:
        """The number of covered tokens of the verified text, without the draft. The next features are needed from
        token `max(0, length - 1)` on."""
        return self._start + self._stable + 1 if self._stable else 0

    @torch.no_grad()
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Compute the stable rows of newly verified tokens from the target's features.

        If the features begin after the last row, as when the target had the beginning of a text in its cache, the rows
        start afresh there, at their true positions.

        The arguments are those of `DrafterState`, with `n >= 2` tokens, and features of `m >= 1` tokens, which may
        overlap covered ones. `observe_draft_inputs` gets EAGLE-3's feature after `fc`.

        Returns:
            `[1, H]`, in the output projection's dtype.

        Raises:
            ValueError: there are no features, more than tokens before the last one, or no tokens to cover.
        """
        n = prefix.shape[0]
        if features is None or not features.shape[0]:
            raise ValueError("an EAGLE head drafts from the target's hidden states, and none were given")
        first = n - 1 - features.shape[0]
        if first < 0:
            raise ValueError(f"{features.shape[0]} features, and the prefix has {n - 1} tokens before its last one")
        self._forget_draft()
        if first > self._start + self._stable or not self._stable:
            self._start, self._stable = first, 0
        position = self._start + self._stable
        if position >= n - 1:
            raise ValueError(f"the cache covers {self.length} tokens, and the prefix has no more than {n}")
        self._weights = self._weights_now()
        weight = self._weights.qkv
        features = features[position - n + 1 :].to(device=weight.device, dtype=weight.dtype)
        self._output = self._append(
            prefix[position + 1 :], features, position, fed_back=False, observe_draft_inputs=observe_draft_inputs
        )
        self._stable += features.shape[0]
        return self._weights.predict(self._output)

    @torch.no_grad()
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Append one level of drafted tokens, each with its parent's output in the place of a feature. The arguments
        are those of `DrafterState`, with the target's ids also for a head with its own vocabulary.

        Returns:
            `[w, H]`, in the output projection's dtype.

        Raises:
            ValueError: `advance` was not called, or several tokens have no parents.
        """
        width = token_ids.shape[0]
        if self._output is None or (parents is None and width != 1):
            raise ValueError("draft() follows advance(), and takes the parents of all levels but a chain's")
        hidden = self._output
        if parents is None or not self._levels:
            hidden = hidden.expand(width, -1)
        else:
            hidden = hidden.index_select(0, parents)
        self._ancestors = self._ancestors_of(width, parents)
        position = self._start + self._stable + self._levels
        self._output = self._append(
            token_ids, hidden, position, fed_back=True, observe_draft_inputs=observe_draft_inputs
        )
        self._drafted += width
        self._levels += 1
        return self._weights.predict(self._output)

    def truncate(self, length: int) -> None:
        """Keep the rows of the first `length` tokens, and drop the draft."""
        self._forget_draft()
        self._stable = max(0, min(self._stable, length - 1 - self._start))

    def read(self) -> Cache:
        if self._start or not self._weights.rotary.is_steady:
            raise NotImplementedError("these rows lie at other positions, or are rotated at every step")
        rows = [one[None, :, : self._stable] for one in (self._keys, self._values)]
        return cache_of(rows)

    def _forget_draft(self) -> None:
        self._drafted = self._levels = 0
        self._output = self._ancestors = None

    def _ancestors_of(self, width: int, parents: torch.Tensor | None) -> torch.Tensor | None:
        """bool `[w, drafted + w]`: the drafted rows that a level sees, itself included (None: all)."""
        if width == 1 and self._ancestors is None and (self._drafted == self._levels):
            return None
        device = self._keys.device
        own = torch.eye(width, dtype=torch.bool, device=device)
        if not self._levels:
            return own
        before = self._ancestors
        if before is None:
            before = torch.ones(1, self._drafted, dtype=torch.bool, device=device)
        before = before if parents is None else before.index_select(0, parents)
        return torch.cat([before, own], 1)

    def _append(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        position: int,
        fed_back: bool,
        observe_draft_inputs: ObserveDraftInputs | None,
    ) -> torch.Tensor:
        """Append rows for tokens, int64 `[w]`, and hidden states `[w, d]`: those of a draft (`fed_back`), all of them
        at `position`, or stable rows from `position` on. Returns the outputs `[w, H]` of a draft's rows; of stable
        rows only the last one's, `[1, H]`, as the others only need keys and values."""
        weights = self._weights
        width = token_ids.shape[0]
        outputs = width if fed_back else 1
        begin = self._stable + self._drafted
        if begin + width > self._keys.shape[1]:
            self._reserve(max(begin + width, 2 * self._keys.shape[1]))
        stop = position + (1 if fed_back else width)
        cos, sin = weights.rotary.tables(stop)
        embedded, hidden = weights.embed(token_ids), weights.feature(hidden, fed_back)
        if observe_draft_inputs is not None:
            observe_draft_inputs(embedded[-outputs:], hidden[-outputs:])
        joined, residual = weights.combine(embedded, hidden)
        at = slice(position, stop)
        if weights.rotary.is_steady:
            queries, keys, values = weights.project(joined, outputs, cos[at], sin[at])
        else:
            queries, keys, values = weights.project(joined, outputs)
            queries = rotate(queries, cos[stop - 1], sin[stop - 1])
            self._positions[begin : begin + width] = torch.arange(position, stop, device=keys.device)
        self._keys[:, begin : begin + width] = keys.transpose(0, 1)
        self._values[:, begin : begin + width] = values.transpose(0, 1)
        attended = self._attend(queries, begin + width, cos, sin)
        return weights.finish(attended, residual[-outputs:])

    def _attend(self, queries: torch.Tensor, rows: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[w, heads · head_dim]`: attention of queries `[w, heads, head_dim]` to the first `rows` rows. Heads that
        share keys are treated as more queries, so that keys are never repeated."""
        width, heads, head_dim = queries.shape
        keys, values = self._keys[:, :rows], self._values[:, :rows]
        if not self._weights.rotary.is_steady:
            positions = self._positions[:rows]
            keys = rotate(keys, cos[:, 0].index_select(0, positions), sin[:, 0].index_select(0, positions))
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        queries = queries.view(width, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        queries = queries.reshape(1, kv_heads, group * width, head_dim)
        mask = None
        if self._ancestors is not None:
            stable = self._ancestors.new_ones(width, self._stable)
            mask = torch.cat([stable, self._ancestors], 1).repeat(group, 1)
        attended = scaled_dot_product_attention(queries, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask)
        return attended.view(kv_heads, group, width, head_dim).permute(2, 0, 1, 3).reshape(width, -1)

    def _reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, and keep the present ones."""
        settings, like = self._weights.settings, self._weights.qkv
        rows = self._stable + self._drafted
        shape = (settings.num_key_value_heads, capacity, settings.head_dim)
        keys, values = like.new_empty(shape), like.new_empty(shape)
        positions = torch.empty(capacity, dtype=torch.int64, device=like.device)
        if rows:
            keys[:, :rows], values[:, :rows] = self._keys[:, :rows], self._values[:, :rows]
            positions[:rows] = self._positions[:rows]
        self._keys, self._values, self._positions = keys, values, positions
