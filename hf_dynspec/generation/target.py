"""The target's forward in a verification: logits of the last rows, chosen hidden states, tree masks."""

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
from ..drafters.traceable_decoder import RECORDING_HOOKS
from ..errors import UnsupportedError
from ..memory.recurrent import Rollback, record_past
from ..modeling.head import finish_logits
from ..modeling.masks import attention_mask, attention_windows, descent, require_known_kinds, require_tree_masks
from ..modeling.parts import FORWARD_ERRORS, decoder_of, scale_and_cap
from ..protocol import Candidates, HeadRows, Needs
from ..tree_config import LONGEST_DRAFT
from .target_head import TargetHead
from .target_limits import (
    read_two_tokens,
    require_batches,
    require_cache,
    require_no_state,
    require_rows_apart,
    require_trees,
    rope_limit,
)


class TargetForward:
    """Runs one target. Shareable between calls.

    On a CPU most of a small verification is the product with the output projection. torch's product takes three times
    as long as reading the weight. If this package has a faster product that agrees with the model, decoder and
    projection run one after the other. Plain generation could use the same product, so `hf-dynspec bench` shows it in
    a row of its own.

    Args:
        model: the target.
        fast_head: use the faster product if there is one.
        verifies_trees: check that it can verify trees.

    Attributes:
        rollback: rolls its caches back.

    Raises:
        UnsupportedError: its cache cannot be rolled back, or it cannot verify chains or trees.
    """

    def __init__(self, model: PreTrainedModel, fast_head: bool = True, verifies_trees: bool = False):
        self._model = weakref.ref(model)
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self._head = TargetHead(fast_head)
        self._verifies_trees = verifies_trees
        # The hooks and patches of the model with which it can read batches.
        self._reads_batches: Any = None
        if verifies_trees:
            # Before anything is run with an attention that may not be installed.
            require_tree_masks(model)
        self.rollback = Rollback(model)
        cache = require_cache(model)
        if not self.rollback.has_states:
            require_rows_apart(model, cache)
        if verifies_trees:
            require_no_state(model)
            require_known_kinds(model)
        self._rope_limit, self._holds_past_limit = rope_limit(model.config.get_text_config())
        self.prepare()
        if verifies_trees:
            require_trees(model, self._verified_logits)

    @property
    def model(self) -> PreTrainedModel:
        """The target, by a weak reference."""
        return self._model()

    def prepare(self) -> None:
        """Follow the output projection. If it was replaced, this takes about two forwards.

        Raises:
            UnsupportedError: trees are verified, and the attention was changed to one that takes no tree mask.
        """
        if self._verifies_trees:
            require_tree_masks(self.model)
        self._head.prepare(self.model)

    @functools.cached_property
    def has_head_state(self) -> bool:
        """Whether the last hidden state is the input of the output projection, so that logits follow from it. Computed
        when hidden states are first needed, as transformers then adds hooks to the model."""
        model = self.model
        with torch.no_grad():
            outputs = read_two_tokens(model, output_hidden_states=True)
            # Each family has its own hidden states.
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
        """Check that the target has the hidden states that drafters or policies read.

        Raises:
            UnsupportedError: it does not.
        """
        if not (reads or needs.of_states) or self.has_head_state:
            return
        reader, fix = ("the drafter reads", "an independent drafter") if reads else ("the policy reads", "another one")
        raise UnsupportedError(
            f"{type(self.model).__name__} has hidden states of another kind than {reader}: what its output projection "
            f"is given is none of them. Use {fix}."
        )

    def require_batches(self) -> None:
        """Check that the target can read the texts of a batch. The first time, and after hooks or patches have come or
        gone, this takes two short forwards.

        Raises:
            UnsupportedError: it cannot.
        """
        if self.rollback.has_states:
            raise UnsupportedError(
                f"{type(self.model).__name__} keeps a recurrent state, for which memory of fixed size has no place. "
                "Call generate once for each prompt, with cache_implementation unset."
            )
        if self._rope_limit is not None:
            raise UnsupportedError(
                f"{type(self.model).__name__} has a rotary embedding that changes with the length of the text, and "
                "so with other texts. Call generate once for each prompt, with cache_implementation unset."
            )
        changes = _changes_of(self.model)
        if changes != self._reads_batches:
            require_batches(self.model, self.logits)
            self._reads_batches = changes

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits `[…, V]` of the decoder's output `[…, d]`."""
        model = self.model
        head = self._head.fast(model)
        if head is not None:
            return head.all_scores(states.flatten(0, -2)).unflatten(0, states.shape[:-1])
        return finish_logits(model.get_output_embeddings()(states), *scale_and_cap(model))

    def head_rows(self) -> HeadRows:
        """The rows of the output projection: the same object as long as they do not change. A plain projection is not
        copied; the rows of a quantised or adapted one are computed."""
        return self._head.rows(self.model)

    def room(self, length: int, positions: int) -> int:
        """The most candidates that can be verified with the rotary embedding of single steps. Some rotary embeddings
        (dynamic, longrope) change with the length of the input.

        Args:
            length: the length of the text.
            positions: its positions that no mask hides.
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
        """Run the target on the tokens that it has not read and on the candidates.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens.
            candidates: the candidates to verify after them.
            unread: how many of the verified tokens the target has not read (None: all, in a first round).
            is_first: whether the call begins.
            model_kwargs: the arguments of transformers' loop.
            states: hidden states to return, see `state`.
            buffer: memory for the logits, if there is some.
            earlier_rows: the number of rows of logits to return for the positions before.
            cached_before: cached tokens before `input_ids`.
            alone: pass only unread tokens to the model, as plain generation does after chunks.

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
        """Read all chunks of the prompt except the last one, as `prefill_chunk_size` asks for.

        Args:
            input_ids: int64 `[1, n]`: the prompt.
            unread: how many of its last tokens are not cached.
            chunk_size: tokens of a chunk.
            model_kwargs: as for `run`; its cache is replaced by the one that the model returns.
            states: as for `run`.

        Returns:
            The model's output for each chunk.
        """
        outputs = []
        for left in range(unread - chunk_size, 0, -chunk_size):
            kwargs = copy.copy(model_kwargs)
            for name in ("attention_mask", "token_type_ids"):
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][..., :-left]
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., -left - chunk_size : -left]
            # The chunk alone, as in plain generation: some models look at the length of their input.
            inputs = self.model.prepare_inputs_for_generation(
                input_ids[:, -left - chunk_size : -left], is_first_iteration=True, **kwargs
            )
            if states and inputs.get("output_hidden_states") is not True:
                inputs["output_hidden_states"] = entries_with(states)
            outputs.append(self._forward(inputs, 1, None))
            # Some models begin another cache if a chunk is longer than a limit.
            cache = returned_cache(outputs[-1])
            record_past(cache, self.rollback.has_states)
            model_kwargs[CACHE] = cache
        return outputs

    def state(self, outputs: CausalLMOutputWithPast, index: int) -> torch.Tensor:
        """See `hidden_state`."""
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
        """The mask and positions of the last verified token, which is the root, and of the nodes below it."""
        device = inputs["input_ids"].device
        root = torch.zeros(1, dtype=torch.int64, device=device)
        parents = torch.cat([root - 1, candidates.parents.to(device) + 1])
        levels = torch.cat([root, candidates.depths.to(device) + 1])
        paths = descent(parents, len(candidates.shortlists) + 1)
        mask = inputs.get("attention_mask")
        visible = torch.ones(cached, dtype=torch.bool, device=device) if mask is None else mask[0, :cached].bool()
        # The inputs of custom models may have the older name only.
        cache = passed_cache(inputs)
        masks = {}
        for kind, window in attention_windows(self.model.config.get_text_config()).items():
            keys, _ = cache.get_mask_sizes(paths.shape[0], self._layer_of(kind))
            prefix = visible[cached - (keys - paths.shape[0]) :]
            masks[kind] = attention_mask(prefix, paths, levels, levels, self.model.dtype, window)
        positions = inputs.get("position_ids")
        first = root.unsqueeze(0) + cached if positions is None else positions[..., :1]
        # A decoder with one kind of layer takes a mask, others a mask by kind.
        return {
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "position_ids": first + levels,
        }

    def _layer_of(self, kind: str) -> int:
        """The first layer of a kind."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None)
        return 0 if kinds is None else kinds.index(kind)


def _changes_of(model: PreTrainedModel) -> list[Any]:
    """The hooks and replaced forwards of a model's modules, and torch's global hooks. Those by which transformers
    records hidden states change nothing."""
    hooks = [torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks]
    hooks += [hooks for one in model.modules() for hooks in (one._forward_hooks, one._forward_pre_hooks) if hooks]
    patches = [vars(one)["forward"] for one in model.modules() if "forward" in vars(one)]
    kinds = (item for one in hooks for item in one.items())
    return [*patches, *(key for key, hook in kinds if getattr(hook, "__module__", None) != RECORDING_HOOKS)]


def entries_with(states: tuple[int, ...]) -> bool | list[int]:
    """The value of `output_hidden_states` for these indices of `hidden_state`, at least one."""
    # Releases of transformers differ in whether entry 0 is the embedding, so both entries are requested.
    wanted = {index for state in states for index in (state - 1, state)}
    return True if min(wanted) < 0 else sorted(wanted)


def hidden_states(outputs: CausalLMOutputWithPast, index: int, num_layers: int) -> torch.Tensor:
    """`[B, n, d]`: the hidden states of the rows read; index 0: the embedding, `num_layers`: the head's input."""
    states = outputs.hidden_states
    return states[index - (len(states) == num_layers)]


def hidden_state(outputs: CausalLMOutputWithPast, index: int, num_layers: int) -> torch.Tensor:
    """`[n, d]`: as `hidden_states`, for one text."""
    return hidden_states(outputs, index, num_layers)[0]


class RowsBuffer:
    """Memory for the logits of a call's verifications: allocating it for a tree takes milliseconds."""

    def __init__(self):
        self._memory: torch.Tensor | None = None

    def rows(self, count: int, width: int, kind: torch.Tensor) -> torch.Tensor:
        """`[count, width]`, of the dtype and on the device of `kind`."""
        if self._memory is None or self._memory.shape[0] < count:
            self._memory = kind.new_empty(count, width)
        return self._memory[:count]


def keep_path(cache: Any, nodes: int, path: torch.Tensor) -> None:
    """Keep the keys and values of one path of a verified tree, and drop the others.

    Args:
        cache: the target's cache, whose last `nodes` positions are the tree's, without its root.
        nodes: the number of these positions.
        path: int64 `[a]`: the indices of the path's nodes among them, ascending.
    """
    kept = path.shape[0]
    # Layers that share the keys and values of others have none.
    layers = [layer for layer in cache.layers if kept and layer.keys is not None]
    for layer in layers:
        for tensor in (layer.keys, layer.values):
            tree = tensor[..., tensor.shape[-2] - nodes :, :]
            tree[..., :kept, :] = tree.index_select(-2, path.to(tensor.device))
    cache.crop(kept - nodes)
