"""Any decoder-only causal language model of transformers as an independent drafter."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..head import DynamicLMHead
from ..tree import attention_mask, attention_windows
from .base import Drafter, DrafterState, ShowInputs, UnrolledStep
from .traced_step import cache_of, layers_of, trace_step


class CausalLMDrafter(Drafter):
    """Runs the model's decoder without its output projection.

    Args:
        model: a decoder-only model with a language modelling head, in evaluation mode for reproducible drafts.

    Raises:
        UnsupportedError: the model is an encoder-decoder, keeps a state that cannot be rolled back, or does
            something to its hidden states or logits that its configuration does not tell.
    """

    def __init__(self, model: PreTrainedModel):
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(model).__name__} is an encoder-decoder model. Use a decoder-only model as the drafter, or "
                "transformers' own assisted generation."
            )
        if getattr(model, "_is_stateful", False):
            raise UnsupportedError(
                f"{type(model).__name__} keeps a recurrent state, which cannot be rolled back to the accepted tokens. "
                "Use an attention-only model as the drafter."
            )
        self.model = model
        self.decoder = model.get_decoder()
        self.head = DynamicLMHead.from_model(model)
        if not self.head.agrees_with(model):
            raise UnsupportedError(
                f"{type(model).__name__} does something between its decoder and its logits that this package does not "
                "know, so shortlist logits would be wrong. Use another drafter."
            )
        self.step = trace_step(model)
        self.windows = attention_windows(model.config.get_text_config())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[m, d]`: the embeddings of tokens, int64 `[m]`, as rows of the matrix."""
        return torch.nn.functional.embedding(token_ids, self.decoder.get_input_embeddings().weight)

    @torch.no_grad()
    def unroll(self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int) -> Iterator[UnrolledStep]:
        # Its hidden states depend on the text alone, and not on where a draft began.
        embedded, hidden = self.embed(token_ids), self.start().advance(token_ids)
        for step in range(depth):
            yield UnrolledStep(embedded[1 + step :], hidden[step:-1], hidden[1 + step :])

    def start(self) -> "CausalLMState":
        return CausalLMState(self)


class CausalLMState(DrafterState):
    """A growing key-value cache that is rolled back to the verified prefix after each round.

    Every layer keeps all positions, those with a sliding window too (their masks still hide what lies outside it): a
    window that forgets could not be rolled back past what a rejected draft pushed out of it.
    """

    def __init__(self, drafter: CausalLMDrafter):
        self._drafter = drafter
        self._decoder = drafter.decoder
        self._step = drafter.step
        self._windows = drafter.windows
        self._head_weight = drafter.head.weight
        # A target with more rows than the drafter may say a token that the drafter has no embedding for.
        self._largest_id = drafter.head.weight.shape[0] - 1
        self._layers: list[torch.Tensor] = []
        self._length = 0
        self._tree: _Tree | None = None
        # The hidden states of the last tokens in the cache, `[r, d]`, from the newest that was verified on; and those
        # of the last level of a tree.
        self._hidden = drafter.head.weight.new_zeros(0, drafter.head.weight.shape[1])
        self._level = self._hidden

    @property
    def length(self) -> int:
        return self._length if self._tree is None else self._length + self._tree.levels

    def advance(
        self, prefix: torch.Tensor, features: torch.Tensor | None = None, show: ShowInputs | None = None
    ) -> torch.Tensor:
        self.truncate(self._length)
        unread = prefix[self._length :].clamp_max(self._largest_id)
        before = self._hidden[-1:]
        if show is not None and unread.shape[0] == 1:
            self._show(show, unread, before)
        hidden = self._extend(unread)
        if show is not None and unread.shape[0] > 1:
            self._show(show, unread[-1:], hidden[-2:-1])
        self._hidden = hidden[-1:]
        return hidden

    def draft(
        self, token_ids: torch.Tensor, parents: torch.Tensor | None = None, show: ShowInputs | None = None
    ) -> torch.Tensor:
        if parents is None:
            if show is not None:
                self._show(show, token_ids, self._hidden[-1:])
            hidden = self._extend(token_ids)
            self._hidden = torch.cat([self._hidden, hidden])
            return hidden
        is_first = self._tree is None
        if show is not None:
            rows = self._hidden[-1:].expand(token_ids.shape[0], -1) if is_first else self._level[parents]
            self._show(show, token_ids, rows)
        if is_first:
            self._tree = _Tree(token_ids.device)
        self._tree.add_level(parents)
        self._level = self._run(token_ids, **self._tree_inputs(token_ids.shape[0]))
        return self._level

    def _show(self, show: ShowInputs, token_ids: torch.Tensor, before: torch.Tensor) -> None:
        embedded = self._drafter.embed(token_ids)
        # Before the first token of a text there is nothing.
        show(embedded, before if before.shape[0] else before.new_zeros(1, before.shape[1]))

    def truncate(self, length: int) -> None:
        # The nodes of a tree lie one after another in the cache, so none of them can stay.
        length = min(length, self._length)
        if length < self._length or self._tree is not None:
            self._layers = [tensor[..., :length, :] for tensor in self._layers] if length else []
        kept = self._hidden.shape[0] - (self._length - length)
        self._hidden = self._hidden[: max(0, kept)]
        self._length = length
        self._tree = None

    def _extend(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append tokens one after another and return their hidden states, `[m, d]`."""
        if self._step is not None and self._layers and token_ids.shape[0] == 1:
            position = torch.full((1, 1), self._length, dtype=torch.int64, device=token_ids.device)
            hidden, *self._layers = self._step(token_ids.unsqueeze(0), position, *self._layers)
            hidden = hidden[0].to(self._head_weight)
        else:
            hidden = self._run(token_ids)
        self._length += token_ids.shape[0]
        return hidden

    def _run(self, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Run the decoder on tokens, `[m]`, and keep their keys and values."""
        cache = cache_of(self._layers)
        hidden = self._decoder(input_ids=token_ids.unsqueeze(0), past_key_values=cache, use_cache=True, **inputs)[0]
        self._layers = layers_of(cache)
        return hidden[0].to(self._head_weight)

    def _tree_inputs(self, width: int) -> dict[str, Any]:
        """Mask and positions of the last `width` nodes."""
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
    """Which of the drafted nodes lie on the path to each node of the last level."""

    def __init__(self, device: torch.device):
        self.levels = 0
        # bool [w, t]: for each of the w nodes of the last level, which of all t nodes are on its path.
        self.paths = torch.zeros(1, 0, dtype=torch.bool, device=device)
        # int64 [t]
        self.level_of = torch.zeros(0, dtype=torch.int64, device=device)

    def add_level(self, parents: torch.Tensor) -> None:
        """Take in a level of nodes, given the row of each one's parent in the level before, `[w]`."""
        w = parents.shape[0]
        rows = torch.zeros_like(parents) if self.levels == 0 else parents
        itself = torch.eye(w, dtype=torch.bool, device=parents.device)
        self.paths = torch.cat([self.paths[rows], itself], dim=1)
        self.level_of = torch.cat([self.level_of, torch.full_like(parents, self.levels)])
        self.levels += 1
