"""The target's forward pass as verification wants it: the last rows' logits, chosen hidden states, tree masks."""

import copy
import weakref
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import UnsupportedError
from ..head import DynamicLMHead
from ..protocol import Candidates
from ..tree import attention_mask, attention_windows, descent
from .traced_decoder import MASKED_ATTENTION, TracedDecoder

_MASKED_KINDS = ("full_attention", "sliding_attention")


class TargetForward:
    """Runs one target. Shareable between calls.

    On a CPU most of a small verification is the product with the output projection, which torch's matrix product does
    in three times the time that reading the weight takes. Where this package has a faster one, and it agrees with the
    model, the decoder and the projection are run one after the other, the decoder as a trace where one holds.

    Args:
        model: the target.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self._head = _fast_head(model)
        self._traced_decoder = None if self._head is None else TracedDecoder(model)

    @property
    def model(self) -> PreTrainedModel:
        """The target. It is not kept alive from here."""
        return self._model()

    def prepare(self, states: tuple[int, ...]) -> None:
        """Trace what verifications use that return these hidden states. May take seconds the first time."""
        if self._head is not None and _may_be_taken_apart(self.model, self._head):
            self._traced_decoder.prepare(entries_with(states) if states else False)

    def run(
        self,
        input_ids: torch.Tensor,
        candidates: Candidates | None,
        unread: int | None,
        is_first: bool,
        model_kwargs: dict[str, Any],
        states: tuple[int, ...],
        buffer: "RowsBuffer | None" = None,
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

        Returns:
            The model's output; `logits` `[1, k + 1, V]` are those after the last verified token and each candidate.
        """
        token_ids = input_ids
        k = 0
        if candidates is not None:
            k = candidates.token_ids.shape[0]
            token_ids = torch.cat([input_ids, candidates.token_ids.to(input_ids.device).unsqueeze(0)], dim=1)
        kwargs = _prepare_attention_mask(copy.copy(model_kwargs), token_ids.shape[1], False)
        kwargs = _prepare_token_type_ids(kwargs, token_ids.shape[1])
        positions = kwargs.get("position_ids")
        if positions is not None and k > 0:
            kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + k, False)
        inputs = self.model.prepare_inputs_for_generation(
            token_ids,
            next_sequence_length=None if unread is None else unread + k,
            is_first_iteration=is_first,
            **kwargs,
        )
        if candidates is not None and not candidates.is_chain:
            inputs |= self._tree_inputs(inputs, candidates, input_ids.shape[1] - 1)
        if states and inputs.get("output_hidden_states") is not True:
            inputs["output_hidden_states"] = entries_with(states)
        return self._forward(inputs, k + 1, is_first, buffer)

    def state(self, outputs: CausalLMOutputWithPast, index: int) -> torch.Tensor:
        """`[n, d]`: hidden states of the rows read; index 0 is the embedding, `num_layers` what the head is given."""
        return hidden_state(outputs, index, self.num_layers)

    def _forward(
        self, inputs: dict[str, Any], rows: int, is_first: bool, buffer: "RowsBuffer | None"
    ) -> CausalLMOutputWithPast:
        if self._head is None or not _may_be_taken_apart(self.model, self._head):
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = rows
            outputs = self.model(**inputs)
            outputs.logits = outputs.logits[:, -rows:]
            return outputs
        inputs.pop("logits_to_keep", None)
        outputs = None if is_first else self._traced_decoder.run(inputs)
        if outputs is None:
            outputs = self.model.get_decoder()(**inputs)
        into = None if buffer is None else buffer.rows(rows, self._head.weight.shape[0], self._head.weight)
        return CausalLMOutputWithPast(
            logits=self._head.all_scores(outputs.last_hidden_state[0, -rows:], into).unsqueeze(0),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _tree_inputs(self, inputs: dict[str, Any], candidates: Candidates, cached: int) -> dict[str, Any]:
        """Mask and positions of the last verified token, which is the root, and the nodes below it."""
        device = inputs["input_ids"].device
        root = torch.zeros(1, dtype=torch.int64, device=device)
        parents = torch.cat([root - 1, candidates.parents.to(device) + 1])
        levels = torch.cat([root, candidates.depths.to(device) + 1])
        paths = descent(parents, len(candidates.shortlists) + 1)
        mask = inputs.get("attention_mask")
        visible = torch.ones(cached, dtype=torch.bool, device=device) if mask is None else mask[0, :cached].bool()
        cache = inputs["past_key_values"]
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

    @torch.no_grad()
    def require_trees(self) -> None:
        """Make sure that the target can verify trees, by having it verify one that is small.

        Raises:
            UnsupportedError: its attention takes no mask, or one token beside another changes what it says.
        """
        name = type(self.model).__name__
        config = self.model.config.get_text_config()
        if config._attn_implementation not in MASKED_ATTENTION:
            raise UnsupportedError(
                f"{name} uses the attention implementation {config._attn_implementation!r}, which takes no tree mask. "
                f"Load it with attn_implementation='sdpa', or draft chains with tree=False."
            )
        kinds = set(attention_windows(config))
        device = self.model.get_input_embeddings().weight.device
        prefix = torch.arange(1, 5, device=device).unsqueeze(0)
        first = torch.tensor([5, 6], device=device)
        tree = Candidates(
            token_ids=torch.cat([first, first]),
            shortlists=(None, None),
            parents=torch.tensor([-1, -1, 0, 1], device=device),
            depths=torch.tensor([0, 0, 1, 1], device=device),
        )
        agrees = kinds <= set(_MASKED_KINDS)
        if agrees:
            cache = DynamicCache(config=config)
            self.model(input_ids=prefix[:, :-1], past_key_values=cache, use_cache=True)
            kwargs = {"past_key_values": cache, "use_cache": True}
            try:
                verified = self.run(prefix, tree, 1, False, kwargs, ()).logits[0, -1]
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                raise UnsupportedError(
                    f"{name} cannot verify a tree of tokens, as it takes no tree mask: {error}. Draft chains with "
                    "tree=False."
                ) from error
            path = torch.cat([prefix, tree.token_ids[None, 1::2]], dim=1)
            alone = self.model(input_ids=path, use_cache=False).logits[0, -1]
            tolerance = (1e-3 if self.model.dtype == torch.float32 else 5e-2) * alone.float().abs().max()
            agrees = bool(((verified.float() - alone.float()).abs() <= tolerance).all())
        if not agrees:
            raise UnsupportedError(
                f"{name} cannot verify a tree of tokens: what it says of one changes with the others beside it. Draft "
                "chains with tree=False."
            )


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
    for layer in cache.layers if kept else ():
        for tensor in (layer.keys, layer.values):
            tree = tensor[..., tensor.shape[-2] - nodes :, :]
            tree[..., :kept, :] = tree.index_select(-2, path.to(tensor.device))
    cache.crop(kept - nodes)


def _fast_head(model: PreTrainedModel) -> DynamicLMHead | None:
    """The target's output projection, where this package has a faster product for it."""
    projection = model.get_output_embeddings()
    if type(projection) is not nn.Linear or projection.weight.device.type != "cpu":
        return None
    # In a model of images and text, what comes before the decoder must run too.
    if model.get_decoder() is not model.base_model:
        return None
    head = DynamicLMHead.from_model(model)
    return head if head.can_speed_up_all_scores and head.agrees_with(model) else None


def _may_be_taken_apart(model: PreTrainedModel, head: DynamicLMHead) -> bool:
    """Whether decoder and projection may run one after the other: nobody watches or changes what goes through the
    model or its projection, and the projection is still the one that the head was made from."""
    projection = model.get_output_embeddings()
    is_plain = not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in (model, projection)
    )
    return is_plain and type(projection) is nn.Linear and projection.weight.data_ptr() == head.weight.data_ptr()
