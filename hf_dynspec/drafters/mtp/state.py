"""The cache of multi-token-prediction layers: rows of a text, and of the draft after it."""

from collections.abc import Callable

import torch
from transformers import DynamicCache

from ...modeling.masks import attention_mask, descent, require_tree_masks
from ..base import DrafterState, ObserveDraftInputs
from .layers import MtpLayers


class MtpState(DrafterState):
    """Rows of each layer: row `i` reads token `i` and the hidden state of the layer before at token `i − 1`, which for
    the first layer is the target's. Step `k` of a draft runs layer `k` over all drafted tokens, and the rows that it
    has not read yet of the text; after the last layer that goes on with its own hidden states.

    A draft's rows come from guessed hidden states, so they are dropped even if their tokens were accepted.

    Args:
        layers: the layers.
        embed: the embeddings, `[m, d]`, of tokens, int64 `[m]`.
        head_weight: returns the output projection's `[V, d]`, at the start of every round.
    """

    def __init__(
        self,
        layers: MtpLayers,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head_weight: Callable[[], torch.Tensor],
    ):
        count = len(layers.layers)
        self._layers, self._embed, self._head_weight = layers, embed, head_weight
        self._cache = DynamicCache()
        self._prefix: torch.Tensor | None = None
        # For each layer the number of rows of the text, and the next token to read.
        self._rows, self._next = [0] * count, [0] * count
        # For each layer hidden states, `[m, d]`, at the tokens before the next ones to read.
        self._unread: list[torch.Tensor | None] = [None] * count
        self._forget_draft()

    @property
    def length(self) -> int:
        """The number of covered tokens of the verified text, without the draft. The next features are needed from
        token `max(0, length - 1)` on."""
        return self._next[0] if self._rows[0] else 0

    @torch.no_grad()
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Read newly verified tokens with the target's features.

        The arguments are those of `DrafterState`, with `n >= 2` tokens, and features of `m >= 1` tokens, which may
        overlap covered ones. If they begin after the last row, the rows start afresh there.

        Returns:
            `[1, d]`, in the output projection's dtype.

        Raises:
            ValueError: there are no features, more than tokens before the last one, or no tokens to cover.
        """
        n = prefix.shape[0]
        if features is None or not 0 < features.shape[0] < n:
            got = None if features is None else features.shape[0]
            raise ValueError(f"MTP layers read the target's hidden states at up to {n - 1} tokens, got {got}")
        self._forget_draft()
        weight = self._head_weight()
        self._prefix = prefix
        self._give(0, features.to(weight), n - features.shape[0])
        if self._next[0] >= n:
            raise ValueError(f"the cache covers {self.length} tokens, and the prefix has no more than {n}")
        self._tokens = self._parents = self._levels = prefix[:0]
        return self._step(1, observe_draft_inputs)

    @torch.no_grad()
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Append one level of drafted tokens. The arguments are those of `DrafterState`.

        Returns:
            `[w, d]`, in the output projection's dtype.

        Raises:
            ValueError: `advance` was not called, or several tokens have no parents.
        """
        width = token_ids.shape[0]
        if self._output is None or (parents is None and width != 1):
            raise ValueError("draft() follows advance(), and takes the parents of all levels but a chain's")
        before, begin = (self._begins or [-1])[-1], self._tokens.shape[0]
        self._is_tree |= parents is not None
        if parents is None or not self._begins:
            parents = torch.zeros_like(token_ids)
        self._tokens = torch.cat([self._tokens, token_ids])
        self._parents = torch.cat([self._parents, parents + before])
        self._levels = torch.cat([self._levels, torch.full_like(token_ids, len(self._begins))])
        self._begins.append(begin)
        return self._step(width, observe_draft_inputs)

    def truncate(self, length: int) -> None:
        """Keep the rows of the first `length` tokens, and drop the draft."""
        for at, unread in enumerate(self._unread):
            dropped = min(self._rows[at], max(0, self._next[at] - length))
            self._rows[at] -= dropped
            self._next[at] -= dropped
            if unread is not None:
                self._unread[at] = unread[: 0 if dropped else max(0, length + 1 - self._next[at])]
        self._forget_draft()

    def _forget_draft(self) -> None:
        for at in range(len(self._cache.layers)):
            self._crop(at)
        self._is_tree, self._begins = False, []
        # int64 `[t]`: the drafted nodes, the node before each (−1: the text's last token), and their levels.
        self._tokens = self._parents = self._levels = torch.zeros(0, dtype=torch.int64)
        # Hidden states of the layer that ran last, at the nodes from the first of level `_output_level` on, in order;
        # at the text's last token, and all nodes, if that is −1.
        self._output: torch.Tensor | None = None
        self._output_level = -1

    def _crop(self, at: int) -> None:
        """Drop all rows of a layer but those of the text."""
        layer = self._cache.layers[at]
        layer.keys, layer.values = (one[:, :, : self._rows[at]] for one in (layer.keys, layer.values))

    def _give(self, at: int, hidden: torch.Tensor, token: int) -> None:
        """Give a layer hidden states, `[m, d]`, at the tokens before `token` and the next ones. Tokens that it has
        hidden states for are left out; after a gap its rows start afresh."""
        unread = self._unread[at] if self._unread[at] is not None else hidden[:0]
        known = self._next[at] + unread.shape[0] - token
        if known < 0 or not (self._rows[at] or unread.shape[0]):
            self._rows[at], self._next[at], self._unread[at] = 0, token, hidden
            if at < len(self._cache.layers):
                self._crop(at)
        else:
            self._unread[at] = torch.cat([unread, hidden[known:]])

    def _step(self, width: int, observe_draft_inputs: ObserveDraftInputs | None) -> torch.Tensor:
        """Run the layer of this step, and return the hidden states of the last `width` rows."""
        prefix, begins, last = self._prefix, self._begins, len(self._rows) - 1
        at, goes_on = min(len(begins), last), len(begins) > last
        rows, token, unread = self._rows[at], self._next[at], self._unread[at]
        # Without a hidden state of its parent a node has no row.
        first = begins[-1] if goes_on else (*begins, 0)[self._output_level + 1]
        new = 0 if goes_on or unread is None else min(unread.shape[0], prefix.shape[0] - token)
        token_ids, hidden = self._tokens[first:], unread
        positions = prefix.shape[0] + self._levels[first:]
        if begins:
            parents = self._parents[first:] - (-1 if self._output_level < 0 else begins[self._output_level])
            hidden = self._output.index_select(0, parents)
        if new:
            token_ids = torch.cat([prefix[token : token + new], token_ids])
            hidden = torch.cat([unread[:new], hidden]) if begins else unread[:new]
            read = torch.arange(token, token + new, device=prefix.device)
            positions = torch.cat([read, positions])
        embedded = self._embed(token_ids)
        if observe_draft_inputs is not None:
            observe_draft_inputs(embedded[-width:], hidden[-width:])
        if not goes_on:
            self._first_in_cache = first
        mask = self._tree_mask(rows, new, first, embedded.dtype, self._layers.windows[at]) if self._is_tree else None
        output = self._layers(at, embedded, hidden, positions, self._cache, mask)
        if goes_on:
            self._output = torch.cat([self._output, output])
        else:
            self._rows[at], self._next[at] = rows + new, token + new
            if new:
                self._unread[at] = unread[new:]
                if at < last:
                    self._give(at + 1, output[:new], token + 1)
            self._output, self._output_level = output[max(0, new - 1) :], -1 if new else self._output_level + 1
        return output[-width:].to(self._head_weight())

    def _tree_mask(self, rows: int, new: int, first: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """`[1, 1, q, rows + new + t]`: the mask of `new` rows of the text, after `rows` others, and of the nodes from
        `first` on, over all of the nodes in the layer's cache."""
        # Checked again, as some kinds of attention read past the mask's memory.
        require_tree_masks(self._layers.layers[0])
        device, seen = self._tokens.device, self._first_in_cache
        paths = descent(self._parents, len(self._begins))[first:, seen:]
        within = torch.ones(new + paths.shape[0], new + paths.shape[1], dtype=torch.bool, device=device).tril()
        within[new:, :new], within[new:, new:] = True, paths
        read = torch.arange(new, device=device)
        queries, keys = (torch.cat([read, new + self._levels[one:]]) for one in (first, seen))
        prefix = torch.ones(rows, dtype=torch.bool, device=device)
        return attention_mask(prefix, within, queries, keys, dtype, window)
