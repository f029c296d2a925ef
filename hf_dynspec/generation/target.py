"""The target's forward pass as verification wants it: the last rows' logits, chosen hidden states, tree masks."""

import copy
import functools
import weakref
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import CACHE, cache_inputs, passed_cache, returned_cache
from ..errors import UnsupportedError
from ..modeling.head import finish_logits
from ..modeling.masks import attention_mask, attention_windows, descent, require_known_kinds, require_tree_masks
from ..modeling.parts import FORWARD_ERRORS, decoder_of, scale_and_cap
from ..protocol import Candidates, HeadRows, Needs
from ..tree_config import LONGEST_DRAFT
from .target_head import TargetHead
from .target_limits import read_two_tokens, require_cache, require_trees, rope_limit


class TargetForward:
    """Runs one target. Shareable between calls.

    On a CPU most of a small verification is the product with the output projection, which torch's matrix product does
    in three times the time that reading the weight takes. Where this package has a faster one, and it agrees with the
    model, the decoder and the projection are run one after the other. Plain generation could have the same product, so
    `hf-dynspec bench` shows it as a row of its own.

    Args:
        model: the target.
        fast_head: use the faster product, where there is one.
        verifies_trees: make sure that it can verify trees.

    Raises:
        UnsupportedError: it keeps no cache that can be rolled back, or cannot verify trees.
    """

    def __init__(self, model: PreTrainedModel, fast_head: bool = True, verifies_trees: bool = False):
        self._model = weakref.ref(model)
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self._head = TargetHead(fast_head)
        self._verifies_trees = verifies_trees
        if verifies_trees:
            require_tree_masks(model)
        require_cache(model)
        if verifies_trees:
            require_known_kinds(model)
        self._rope_limit, self._holds_past_limit = rope_limit(model.config.get_text_config())
        self.prepare()
        if verifies_trees:
            require_trees(model, self._verified_logits)

    @property
    def model(self) -> PreTrainedModel:
        """The target. It is not kept alive from here."""
        return self._model()

    def prepare(self) -> None:
        """Take up the output projection, where it is another one than before, which takes about two forwards then.

        Raises:
            UnsupportedError: trees are verified, and attention that takes none was set since.
        """
        if self._verifies_trees:
            require_tree_masks(self.model)
        self._head.prepare(self.model)

    @functools.cached_property
    def has_head_state(self) -> bool:
        """Whether the last hidden state is what the output projection is given, so that logits follow from it. Looked
        up when hidden states are first wanted, as transformers adds hooks to a model that is asked for them."""
        model = self.model
        with torch.no_grad():
            outputs = read_two_tokens(model, output_hidden_states=True)
            # What hidden states there are, and what follows them, is a family's own.
            try:
                state = self.state(outputs, self.num_layers)[-1:]
                logits = finish_logits(model.get_output_embeddings()(state).float(), *scale_and_cap(model))[0]
            except FORWARD_ERRORS:
                return False
            expected = outputs.logits[0, -1].float()
            if state.dim() != 2 or logits.shape != expected.shape:
                return False
            return bool(((logits - expected).abs() <= 5e-2 * expected.abs().max()).all())

    def require_states(self, reads: tuple[int, ...], needs: Needs) -> None:
        """Make sure that the target has hidden states as drafters read them, and policies.

        Raises:
            UnsupportedError: it has not.
        """
        if not (reads or needs.of_states) or self.has_head_state:
            return
        reader, fix = ("EAGLE heads read", "an independent drafter") if reads else ("the policy reads", "another one")
        raise UnsupportedError(
            f"{type(self.model).__name__} has hidden states of another kind than {reader}: what its output projection "
            f"is given is none of them. Use {fix}."
        )

    def head_rows(self) -> HeadRows:
        """The rows of the output projection, the same object for as long as they do not change. Those of a plain one
        are not copied; those of any other, such as one that is quantised or has adapters, are worked out."""
        return self._head.rows(self.model)

    def room(self, length: int, positions: int) -> int:
        """How many candidates may be verified, so that positions are turned as they are one after another. Some rotary
        embeddings (dynamic, longrope) change with the length of what is read.

        Args:
            length: of the text.
            positions: of it that no mask hides.
        """
        if self._rope_limit is None or (self._holds_past_limit and positions > self._rope_limit + 1):
            return LONGEST_DRAFT
        return max(0, self._rope_limit - length)

    def run(
        self,
        input_ids: torch.Tensor,
        candidates: Candidates | None,
        unread: int | None,
        is_first: bool,
        model_kwargs: dict[str, Any],
        states: tuple[int, ...],
        buffer: "RowsBuffer | None" = None,
        earlier_rows: int = 0,
        cached_before: int = 0,
        alone: bool = False,
    ) -> CausalLMOutputWithPast:
        """Run the target on what it has not read and on the candidates.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens.
            candidates: what to verify after them.
            unread: how many of the verified tokens the target has not read (None: all of a first round).
            is_first: whether the call begins.
            model_kwargs: of transformers' loop.
            states: hidden states to return, see `state`.
            buffer: may be used for the logits.
            earlier_rows: how many rows of logits to return of the positions before.
            cached_before: tokens before those of `input_ids` that are in the cache.
            alone: show the model what is unread and nothing before it, as plain generation does after chunks.

        Returns:
            The model's output; the last `k + 1` rows of `logits` `[1, …, V]` are those after the last verified token
            and each candidate.
        """
        token_ids = input_ids
        k = 0
        if candidates is not None:
            k = candidates.token_ids.shape[0]
            token_ids = torch.cat([input_ids, candidates.token_ids.to(input_ids.device).unsqueeze(0)], dim=1)
        kwargs = _prepare_attention_mask(copy.copy(model_kwargs), cached_before + token_ids.shape[1], False)
        kwargs = _prepare_token_type_ids(kwargs, cached_before + token_ids.shape[1])
        positions = kwargs.get("position_ids")
        if positions is not None and k > 0:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + k, False)
        rows_read = None if unread is None else unread + k
        if alone:
            token_ids = token_ids[:, -rows_read:]
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., -rows_read:]
        inputs = self.model.prepare_inputs_for_generation(
            token_ids,
            next_sequence_length=None if alone else rows_read,
            is_first_iteration=is_first,
            **kwargs,
        )
        if candidates is not None and not candidates.is_chain:
            inputs |= self._tree_inputs(inputs, candidates, cached_before + input_ids.shape[1] - 1)
        if states and inputs.get("output_hidden_states") is not True:
            inputs["output_hidden_states"] = entries_with(states)
        return self._forward(inputs, earlier_rows + k + 1, buffer)

    def read_ahead(
        self,
        input_ids: torch.Tensor,
        unread: int,
        chunk_size: int,
        model_kwargs: dict[str, Any],
        states: tuple[int, ...],
    ) -> list[CausalLMOutputWithPast]:
        """Read the prompt chunk by chunk, but for the last one, as `prefill_chunk_size` asks for.

        Args:
            input_ids: int64 `[1, n]`: the prompt.
            unread: how many of its last tokens are in no cache.
            chunk_size: how many tokens to read at a time.
            model_kwargs: as for `run`; its cache is replaced by the one that the model goes on with.
            states: as for `run`.

        Returns:
            What the model returned for each chunk.
        """
        outputs = []
        for left in range(unread - chunk_size, 0, -chunk_size):
            kwargs = copy.copy(model_kwargs)
            for name in ("attention_mask", "token_type_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][..., :-left]
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., -left - chunk_size : -left]
            # The chunk alone, as plain generation has it: some models look at how much they are shown.
            inputs = self.model.prepare_inputs_for_generation(
                input_ids[:, -left - chunk_size : -left], is_first_iteration=True, **kwargs
            )
            if states and inputs.get("output_hidden_states") is not True:
                inputs["output_hidden_states"] = entries_with(states)
            outputs.append(self._forward(inputs, 1, None))
            # Some models begin another cache where a chunk is longer than a limit.
            cache = returned_cache(outputs[-1])
            cache.activate_past_recording()
            model_kwargs[CACHE] = cache
        return outputs

    def state(self, outputs: CausalLMOutputWithPast, index: int) -> torch.Tensor:
        """`[n, d]`: hidden states of the rows read; index 0 is the embedding, `num_layers` what the head is given."""
        return hidden_state(outputs, index, self.num_layers)

    def _forward(self, inputs: dict[str, Any], rows: int, buffer: "RowsBuffer | None") -> CausalLMOutputWithPast:
        head = self._head.fast(self.model)
        if head is None:
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = rows
            outputs = self.model(**inputs)
            outputs.logits = outputs.logits[:, -rows:]
            return outputs
        inputs.pop("logits_to_keep", None)
        outputs = decoder_of(self.model)(**inputs)
        into = None if buffer is None else buffer.rows(rows, head.weight.shape[0], head.weight)
        return CausalLMOutputWithPast(
            logits=head.all_scores(outputs.last_hidden_state[0, -rows:], into).unsqueeze(0),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: returned_cache(outputs)},
        )

    def _verified_logits(self, text: torch.Tensor, tree: Candidates, cache: DynamicCache) -> torch.Tensor:
        """See `target_limits.Verify`."""
        return self.run(text, tree, 1, False, cache_inputs(cache), ()).logits[0]

    def _tree_inputs(self, inputs: dict[str, Any], candidates: Candidates, cached: int) -> dict[str, Any]:
        """Mask and positions of the last verified token, which is the root, and the nodes below it."""
        device = inputs["input_ids"].device
        root = torch.zeros(1, dtype=torch.int64, device=device)
        parents = torch.cat([root - 1, candidates.parents.to(device) + 1])
        levels = torch.cat([root, candidates.depths.to(device) + 1])
        paths = descent(parents, len(candidates.shortlists) + 1)
        mask = inputs.get("attention_mask")
        visible = torch.ones(cached, dtype=torch.bool, device=device) if mask is None else mask[0, :cached].bool()
        # Of models from elsewhere, what prepares the inputs may know the older name alone.
        cache = passed_cache(inputs)
        masks = {}
        for kind, window in attention_windows(self.model.config.get_text_config()).items():
            keys, _ = cache.get_mask_sizes(paths.shape[0], self._layer_of(kind))
            prefix = visible[cached - (keys - paths.shape[0]) :]
            masks[kind] = attention_mask(prefix, paths, levels, levels, self.model.dtype, window)
        positions = inputs.get("position_ids")
        first = root.unsqueeze(0) + cached if positions is None else positions[..., :1]
        # A decoder with one kind of layer takes its mask as it is.
        return {
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "position_ids": first + levels,
        }

    def _layer_of(self, kind: str) -> int:
        """The first layer of a kind."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None)
        return 0 if kinds is None else kinds.index(kind)


def entries_with(states: tuple[int, ...]) -> bool | list[int]:
    """What `output_hidden_states` has to be for `hidden_state` to find these, at least one."""
    # Releases of transformers differ in whether entry 0 is the embedding: one of each pair is the one wanted.
    wanted = {index for state in states for index in (state - 1, state)}
    return True if min(wanted) < 0 else sorted(wanted)


def hidden_state(outputs: CausalLMOutputWithPast, index: int, num_layers: int) -> torch.Tensor:
    """`[n, d]`: hidden states of the rows read; index 0 is the embedding, `num_layers` what the head is given."""
    states = outputs.hidden_states
    return states[index - (len(states) == num_layers)][0]


class RowsBuffer:
    """Memory for as many rows of logits as one call's verifications have, the same in every round.

    That for the rows of a tree takes milliseconds to be had from the system.
    """

    def __init__(self):
        self._memory: torch.Tensor | None = None

    def rows(self, count: int, width: int, kind: torch.Tensor) -> torch.Tensor:
        """`[count, width]`, of the dtype and on the device of `kind`."""
        if self._memory is None or self._memory.shape[0] < count:
            self._memory = kind.new_empty(count, width)
        return self._memory[:count]


def keep_path(cache: Any, nodes: int, path: torch.Tensor) -> None:
    """Move the keys and values of one path to the front of a verified tree's, and forget the others.

    Args:
        cache: the target's, whose last `nodes` positions are the tree's, its root not among them.
        nodes: how many.
        path: int64 `[a]`: the indices of the path's nodes among them, ascending.
    """
    kept = path.shape[0]
    # Layers that use the keys and values of others have none.
    layers = [layer for layer in cache.layers if kept and layer.keys is not None]
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            tree = tensor[..., tensor.shape[-2] - nodes :, :]
            tree[..., :kept, :] = tree.index_select(-2, path.to(tensor.device))
    cache.crop(kept - nodes)
