"""A model's decoder over fixed memory: transformers' own modules, whose attention reads that memory."""

import copy
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..cache_names import cache_inputs
from ..errors import UnsupportedError
from ..kernels import QueryRows, norm_from_one, norm_from_one_for, rotated, rotation_for, round_attention_for
from ..modeling.masks import attention_windows
from ..modeling.parts import FORWARD_ERRORS, decoder_of, input_device
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
        device = input_device(model)
        self._module = with_fused_norms(decoder_of(model), norm_from_one_for(device))
        rotation = rotation_for(device)
        if rotation is not None:
            fuse_rotations(self._module, rotation)
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


def with_fused_norms(
    decoder: nn.Module, from_one: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None
) -> nn.Module:
    """A copy of a decoder, with the same weights and settings, whose RMS norms are one operation each. transformers
    uses eight or nine, which are a third to a half of a small step's. Configurations are copied.

    Args:
        decoder: of a model of transformers.
        from_one: computes `kernels.norm_from_one` (None: such norms stay as they are).
    """
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
    # Norms of one class with the same settings compute the same.
    kinds: dict[tuple[Any, ...], _Norm | None] = {}
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
            settings = [one for one in vars(module).items() if isinstance(one[1], int | float | str | None)]
            key = type(module), *settings, *dict(module.named_parameters())
            if key not in kinds:
                kinds[key] = _kind_of(module)
            if kinds[key] is norm_from_one and from_one is not None:
                module.forward = partial(_normalise, module, from_one)
            elif kinds[key] is _norm:
                module.forward = partial(_normalise, module, _norm)
    return decoder


# Takes states, `[…, d]`, weights, `[d]`, and `eps`.
_Norm = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]


def _norm(states: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Llama's and most others', and with no weights Gemma-4's. torch has a kernel for it on GPUs."""
    return rms_norm(states, states.shape[-1:], weight, eps)


def _normalise(module: nn.Module, norm: _Norm, states: torch.Tensor) -> torch.Tensor:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return norm(states, getattr(module, "weight", None), eps)


@torch.no_grad()
def _kind_of(module: nn.Module) -> _Norm | None:
    """What a module's own forward computes (None: something else). Tried with other weights, on the CPU."""
    module = copy.copy(module)
    sizes = {name: weight.numel() for name, weight in module.named_parameters()}
    module._parameters = {name: torch.linspace(-1, 2, size, device="cpu") for name, size in sizes.items()}
    # So small that eps counts.
    states = torch.linspace(-2e-3, 1e-3, 2 * next(iter(sizes.values()), 16), device="cpu").view(2, -1)
    for norm in (_norm, norm_from_one):
        try:
            if torch.allclose(_normalise(module, norm, states), module.forward(states), rtol=1e-4, atol=0):
                return norm
        # A norm may take other inputs, or have its weights elsewhere.
        except FORWARD_ERRORS:
            continue
    return None


# The function in files of transformers that rotates queries and keys.
_ROTATION = "apply_rotary_pos_emb"


def fuse_rotations(decoder: nn.Module, rotation: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let a decoder rotate the queries and keys of a layer in one operation. transformers uses ten.

    Args:
        decoder: as `with_fused_norms` returns it.
        rotation: computes `kernels.rotated`.
    """
    for module in decoder.modules():
        forward = inspect.unwrap(type(module).forward)
        own = forward.__globals__.get(_ROTATION) if _ROTATION in forward.__code__.co_names else None
        if own is not None and "forward" not in vars(module) and _is_usual(own):
            # The same code, for which the name means another function.
            names = {**forward.__globals__, _ROTATION: partial(_rotate, rotation)}
            copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copied.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(copied, module)


def _rotate(rotation: Callable[..., Any], *arguments: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    """As transformers' function: takes queries and keys, or one of them, whose heads are dimension `unsqueeze_dim`,
    and tables."""
    *states, cos, sin = arguments
    states = [one.movedim(unsqueeze_dim, 1) for one in states]
    query = states[0] if len(states) == 2 else states[0][:, :0]
    turned = [one.movedim(1, unsqueeze_dim) for one in rotation(query, states[-1], cos, sin)]
    return tuple(turned) if len(states) == 2 else turned[1]


@cache
@torch.no_grad()
def _is_usual(function: Callable[..., Any]) -> bool:
    """Whether a function of transformers computes `kernels.rotated`. Some families rotate pairs of neighbours."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8))
    query, key, *tables = (torch.randn(shape, generator=generator, device="cpu") for shape in shapes)
    for states in ((query, key), (key,)):
        try:
            both = zip(function(*states, *tables), _rotate(rotated, *states, *tables), strict=True)
            return all(torch.allclose(*one) for one in both)
        except FORWARD_ERRORS:
            continue
    return False
