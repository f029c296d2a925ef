"""The state of independent drafters: keys and values that can be rolled back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Cache, DynamicCache

from ..cache_names import cache_inputs
from ..memory.recurrent import Places, positions_from
from ..modeling.masks import attention_mask, require_tree_masks
from .base import DrafterState, ObserveDraftInputs
from .traceable_decoder import cache_of, layers_of
from .traced_step import GrownLayers


class CausalLMState(DrafterState):
    """A growing key-value cache that is rolled back to the verified prefix after each round.

    Every layer keeps all positions, also one with a sliding window, whose mask hides the older ones: a rejected draft
    could push positions out of a smaller cache for good. Only models whose layers keep more than keys and values use
    a cache of transformers.

    Args:
        decoder: the model without its output projection.
        head_weight: `[V, d]`: the output projection's, with the dtype and the device of hidden states.
        windows: for each kind of layer the most positions that it looks back on (None: all).
        embed: the embeddings, `[m, e]`, of tokens, int64 `[m]`.
        layers: empty keys and values, and the recorded step that appends tokens to them.
        cache: for decoders that keep more than keys and values, an empty cache that can be rolled back.
        places: for decoders with recurrent states, those of this cache.
        reads_at_once: read several tokens in one forward also after others.

    Attributes:
        reads_at_once: as given.
    """

    def __init__(
        self,
        decoder: torch.nn.Module,
        head_weight: torch.Tensor,
        windows: Mapping[str, int | None],
        embed: Callable[[torch.Tensor], torch.Tensor],
        layers: GrownLayers,
        cache: DynamicCache | None = None,
        places: Places | None = None,
        reads_at_once: bool = True,
    ):
        self._decoder = decoder
        self._head_weight = head_weight
        self._windows = windows
        self._embed = embed
        self._layers = layers
        # A target with more rows than the drafter may choose a token without an embedding here.
        self._largest_id = head_weight.shape[0] - 1
        self._cache, self._places, self.reads_at_once = cache, places, reads_at_once
        self._length = 0
        self._tree: _Tree | None = None
        # The hidden states of the newest verified token and of a drafted chain, `[r, d]`; and of a tree's last level.
        self._hidden = head_weight.new_zeros(0, head_weight.shape[1])
        self._level = self._hidden

    @property
    def length(self) -> int:
        return self._length if self._tree is None else self._length + self._tree.levels

    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        self.truncate(self._length)
        self._layers.start_round()
        unread = prefix[self._length :].clamp_max(self._largest_id)
        before = self._hidden[-1:]
        if observe_draft_inputs is not None and unread.shape[0] == 1:
            self._pass_draft_inputs(observe_draft_inputs, unread, before)
        hidden = self._extend(unread)
        if self._places is not None:
            self._places.forget_before(self._length)
        if observe_draft_inputs is not None and unread.shape[0] > 1:
            self._pass_draft_inputs(observe_draft_inputs, unread[-1:], hidden[-2:-1])
        self._hidden = hidden[-1:]
        return hidden

    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        if parents is None:
            if observe_draft_inputs is not None:
                self._pass_draft_inputs(observe_draft_inputs, token_ids, self._hidden[-1:])
            hidden = self._extend(token_ids)
            self._hidden = torch.cat([self._hidden, hidden])
            return hidden
        is_first = self._tree is None
        if observe_draft_inputs is not None:
            rows = self._hidden[-1:].expand(token_ids.shape[0], -1) if is_first else self._level[parents]
            self._pass_draft_inputs(observe_draft_inputs, token_ids, rows)
        if is_first:
            self._tree = _Tree(token_ids.device)
        self._tree.add_level(parents)
        self._level = self._run(token_ids, **self._tree_inputs(token_ids.shape[0]))
        return self._level

    def _pass_draft_inputs(self, observe: ObserveDraftInputs, token_ids: torch.Tensor, before: torch.Tensor) -> None:
        embedded = self._embed(token_ids)
        # The first token of a text has no hidden state before it.
        observe(embedded, before if before.shape[0] else before.new_zeros(1, before.shape[1]))

    def truncate(self, length: int) -> None:
        # The nodes of a tree lie one after another in the cache, so none of them can stay.
        length = min(length, self._length)
        if self._places is not None and self._length:
            length = self._places.truncate(self._length, length - self._length)
        elif self._cache is not None and self._length:
            nodes = 0 if self._tree is None else self._tree.level_of.shape[0]
            self._cache.crop(length - self._length - nodes)
        elif length < self._length or self._tree is not None:
            self._layers.truncate(length)
        kept = self._hidden.shape[0] - (self._length - length)
        self._hidden = self._hidden[: max(0, kept)]
        self._length = length
        self._tree = None

    def read(self) -> Cache:
        return cache_of(self._layers.read()) if self._cache is None else self._cache

    def _extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append tokens one after another and return their hidden states, `[m, d]`."""
        if self._length and not self.reads_at_once and token_ids.shape[0] > 1:
            return torch.cat([self._extend(one) for one in token_ids.split(1)])
        if token_ids.shape[0] <= self._layers.most_appended:
            hidden = self._layers.append(token_ids, self._length).to(self._head_weight)
        elif self._places is None:
            hidden = self._run(token_ids)
        else:
            device = token_ids.device
            hidden = self._run(token_ids, **positions_from(self._decoder, self._length, token_ids.shape[0], device))
        self._length += token_ids.shape[0]
        if self._places is not None:
            self._places.add(self._length)
        return hidden

    def _run(self, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the decoder on tokens, `[m]`, and keep their keys and values."""
        cache = self.read()
        hidden = self._decoder(input_ids=token_ids.unsqueeze(0), **cache_inputs(cache), **inputs)[0]
        if self._cache is None:
            self._layers.replace(layers_of(cache))
        return hidden[0].to(self._head_weight)

    def _tree_inputs(self, width: int) -> dict[str, Any]:
        """Mask and positions of the last `width` nodes."""
        # Checked again, as the attention may have been changed, and some kinds then read past the mask's memory.
        require_tree_masks(self._decoder)
        tree = self._tree
        device = tree.paths.device
        level = torch.full((width,), tree.levels - 1, dtype=torch.int64, device=device)
        prefix = torch.ones(self._length, dtype=torch.bool, device=device)
        masks = {
            kind: attention_mask(prefix, tree.paths, level, tree.level_of, self._head_weight.dtype, window)
            for kind, window in self._windows.items()
        }
        # A decoder with one kind of layer takes its mask as it is.
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"attention_mask": mask, "position_ids": (level + self._length).unsqueeze(0)}


class _Tree:
    """The drafted nodes on the path to each node of the last level."""

    def __init__(self, device: torch.device):
        self.levels = 0
        # bool [w, t]: for each of the w nodes of the last level, the nodes on its path among all t.
        self.paths = torch.zeros(1, 0, dtype=torch.bool, device=device)
        # int64 [t]
        self.level_of = torch.zeros(0, dtype=torch.int64, device=device)

    def add_level(self, parents: torch.Tensor) -> None:
        """Add a level of nodes with these parents' rows in the level before, `[w]`."""
        w = parents.shape[0]
        rows = torch.zeros_like(parents) if self.levels == 0 else parents
        itself = torch.eye(w, dtype=torch.bool, device=parents.device)
        self.paths = torch.cat([self.paths[rows], itself], dim=1)
        self.level_of = torch.cat([self.level_of, torch.full_like(parents, self.levels)])
        self.levels += 1
