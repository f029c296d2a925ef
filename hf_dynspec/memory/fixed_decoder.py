"""A model's decoder over fixed memory: transformers' own modules, whose attention reads that memory."""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..cache_names import cache_inputs
from ..errors import UnsupportedError
from ..kernels import QueryRows, round_attention_for
from ..modeling.masks import attention_windows
from ..modeling.parts import decoder_of
from .fixed import FixedMemory

# The name by which transformers finds the attention of rounds.
_ATTENTION = "hf_dynspec_rounds"


class FixedDecoder:
    """Reads nodes into fixed memory. The model stays as it is.

    Args:
        model: a decoder-only model with a language modelling head.
    """

    def __init__(self, model: PreTrainedModel):
        self._kinds = list(attention_windows(model.config.get_text_config()))
        self._module = with_fused_norms(decoder_of(model))
        self._module.config._attn_implementation = _ATTENTION

    def __call__(self, token_ids: torch.Tensor, memory: FixedMemory, rows: QueryRows, **kwargs: Any) -> Any:
        """Read nodes, and write their keys and values.

        Args:
            token_ids: int64 `[B, q]`.
            memory: holds the texts.
            rows: says where the nodes are.
            kwargs: more arguments of the decoder, such as `output_hidden_states`.

        Returns:
            The decoder's output.
        """
        memory.reading(rows)
        # A prepared mask, so that the model makes none. What it hides is for the attention to say.
        mask = rows.within.unsqueeze(1)
        return self._module(
            input_ids=token_ids,
            position_ids=memory.positions(rows),
            # A decoder with one kind of layer takes a mask, others a mask by kind.
            attention_mask=mask if len(self._kinds) == 1 else dict.fromkeys(self._kinds, mask),
            fixed_memory=memory,
            **cache_inputs(memory),
            **kwargs,
        )


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    fixed_memory: FixedMemory | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """See transformers' `AttentionInterface`; `key` and `value` are those of `FixedLayer`."""
    if fixed_memory is None or position_bias is not None:
        raise UnsupportedError(f"{type(module).__name__} has an attention that cannot read fixed memory")
    attended = round_attention_for(query.device)(
        query,
        key,
        value,
        fixed_memory.rows,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=fixed_memory.windows[module.layer_idx],
        soft_cap=softcap,
        sinks=s_aux,
    )
    return attended, None


AttentionInterface.register(_ATTENTION, _attend)


def with_fused_norms(decoder: nn.Module) -> nn.Module:
    """A copy of a decoder, with the same weights and settings, whose RMS norms are one operation each. transformers
    uses eight, which are a third of a small step's. Configurations are copied."""
    shared = {
        id(value): value
        for module in decoder.modules()
        for name, value in vars(module).items()
        # Methods and hooks on a module belong to it. transformers adds hooks where hidden states are asked for.
        if name != "_modules"
        and not name.endswith("hooks")
        and not isinstance(value, nn.Module | PreTrainedConfig)
        and not callable(value)
    }
    decoder = copy.deepcopy(decoder, shared)
    for module in decoder.modules():
        eps = getattr(module, "variance_epsilon", None)
        weights = dict(module.named_parameters())
        is_own = "forward" not in vars(module)
        if is_own and type(module).__name__.endswith("RMSNorm") and eps is not None and list(weights) == ["weight"]:
            module.forward = partial(_normed, module, eps)
    return decoder


def _normed(norm: nn.Module, eps: float, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, norm.weight.shape, norm.weight, eps)
