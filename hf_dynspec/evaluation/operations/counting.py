"""Operations as torch hands them to a device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# These launch no kernel: they name existing memory, or reserve some.
_FREE = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}
_FREE |= {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_FREE |= {"aten::_fused_sdp_choice", "aten::record_stream", "prim::device"}
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def is_operation(func: Any, results: Any) -> bool:
    """Whether a call of an overload such as `torch.ops.aten.mm.default`, with these results, launches a kernel: views
    and reserved memory do not."""
    made = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
    is_empty = bool(made) and not any(one.numel() for one in made)
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return not (is_view or is_empty or func._schema.name in _FREE)


@torch.library.custom_op("hf_dynspec::rms_norm", mutates_args=())
def _rms_norm(states: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
    return functional.rms_norm(states, shape, weight, eps)


@_rms_norm.register_fake
def _(states: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(states)


class FusedOperations(TorchFunctionMode):
    """Attention and RMS norms as one kernel each, as on a GPU; torch would split them on devices that it does not
    know, such as `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].device.type != "cpu":
            return self._attend(*args, **kwargs)
        if func is functional.rms_norm and args[0].device.type != "cpu":
            return self._normalise(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _normalise(
        states: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        return _rms_norm(states, list(shape), weight, eps)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch makes a mask of numbers first, too.
            numbers = {"dtype": query.dtype, "device": query.device}
            zero, lowest = (torch.scalar_tensor(one, **numbers) for one in (0.0, -torch.inf))
            attn_mask = torch.where(attn_mask, zero, lowest)
        return _ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class OperationCounter(TorchDispatchMode):
    """Counts `operations` while it is entered, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self._fused = FusedOperations()

    def __enter__(self) -> "OperationCounter":
        self._fused.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._fused.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _aten._grouped_mm.default and args[0].device.type == "meta":
            # torch has this on meta for bfloat16 only.
            results = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            results = func(*args, **kwargs or {})
        self.operations += is_operation(func, results)
        return results
