"""Operations as torch hands them to a device, and the bytes and the arithmetic in each, from shapes alone.

On torch's `meta` device tensors have shapes and no memory, so that models of any size are counted on any computer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

# Without a kernel: they name memory that is there, or reserve some.
_FREE = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}
_FREE |= {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_FREE |= {"aten::_fused_sdp_choice", "aten::record_stream", "prim::device"}
# Of their first tensor they read what comes out, and not all of it.
_GATHERING = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::take"}
# A copy of rows of a weight is one too, which a head keeps and reads in its place.
_COPYING_ROWS = "aten::index_select"
# They overwrite their first tensor: all of it, or as many of its elements as there are in the largest other tensor.
_OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_"}
_SCATTERING = {"aten::index_put_", "aten::_index_put_impl_", "aten::index_copy_", "aten::index_fill_"}
_SCATTERING |= {"aten::scatter_", "aten::scatter_reduce_"}
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Work:
    """What a device is given to do.

    Attributes:
        operations: kernels to launch; views and memory that is only reserved are none.
        weight_bytes: bytes of weights that are read. Of a mixture's experts it is an expectation, and no whole number.
        other_bytes: bytes of everything else that is read or written: keys, values, activations, logits, masks.
        flops: of the products and the attention, a multiplication and an addition being two.
    """

    operations: float = 0
    weight_bytes: float = 0
    other_bytes: float = 0
    flops: float = 0

    @property
    def bytes(self) -> float:
        """All bytes that are read or written."""
        return self.weight_bytes + self.other_bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Work)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(Work)))


def is_operation(func: Any, results: Any) -> bool:
    """Whether a kernel is launched for what torch calls.

    Args:
        func: an overload of torch's, such as `torch.ops.aten.mm.default`.
        results: what it returned.
    """
    made = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
    is_empty = bool(made) and not any(one.numel() for one in made)
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return not (is_view or is_empty or func._schema.name in _FREE)


def bytes_read(func: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors that an operation reads, and how many bytes of each. What is broadcast is read once."""
    name = func._schema.name
    given = {key: value for key, value in kwargs.items() if key != "out"}
    tensors = [one for one in tree_leaves((args, given)) if isinstance(one, torch.Tensor)]
    read = [(one, _size(one)) for one in tensors]
    if name in _GATHERING:
        table, size = read[0]
        read[0] = table, min(size, sum(map(_size, _tensors(results))))
    elif name in _OVERWRITING | _SCATTERING:
        del read[0]
    return read


def bytes_written(func: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> int:
    """How many bytes an operation writes."""
    if func._schema.name in _SCATTERING:
        into, *others = _tensors((args, kwargs))
        return max((one.numel() for one in others), default=0) * into.element_size()
    return sum(map(_size, _tensors(results)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor covers, repetitions aside."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


class FusedAttention(TorchFunctionMode):
    """Attention as one kernel, which a GPU has for it. On devices that torch knows nothing of, such as `meta`, it
    would take it apart into products and a softmax. The mask is made one of numbers first, as torch makes it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and args[0].device.type != "cpu":
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

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
            numbers = {"dtype": query.dtype, "device": query.device}
            zero, lowest = (torch.scalar_tensor(one, **numbers) for one in (0.0, -torch.inf))
            attn_mask = torch.where(attn_mask, zero, lowest)
        return _ATTENTION(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class OperationCounter(TorchDispatchMode):
    """Counts what runs while it is entered, on whatever device.

    Args:
        weights: the tensors that count as weights, and so their views.
        rows: how many tokens a mixture's router chooses experts for. On `meta`, where nobody can know which, as many
            different ones are taken to be read as there would be on average if each token chose at random.

    Attributes:
        work: what has been counted.
    """

    def __init__(self, weights: Iterable[torch.Tensor] = (), rows: int = 1):
        super().__init__()
        # By identity, and held, so that no other tensor takes the place of one that is gone.
        self._weights = {storage._cdata: storage for storage in (one.untyped_storage() for one in weights)}
        self._rows = rows
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        is_grouped = func is _aten._grouped_mm.default
        if is_grouped and args[0].device.type == "meta":
            # On meta torch knows bfloat16 alone.
            results = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            results = func(*args, **kwargs)
        if is_operation(func, results):
            of_weights, others = 0.0, float(bytes_written(func, args, kwargs, results))
            for tensor, size in bytes_read(func, args, kwargs, results):
                if tensor.untyped_storage()._cdata in self._weights:
                    is_of_experts = is_grouped and tensor is args[1]
                    of_weights += size * (self._share_of_experts(args, kwargs) if is_of_experts else 1)
                    if func._schema.name == _COPYING_ROWS:
                        copied = _tensors(results)[0].untyped_storage()
                        self._weights[copied._cdata] = copied
                else:
                    others += size
            self.work += Work(1, of_weights, others, _flops(func, args, kwargs, results))
        return results

    def _share_of_experts(self, args: tuple, kwargs: dict[str, Any]) -> float:
        """The share of the experts that are read."""
        experts = args[1].shape[0]
        ends = kwargs["offs"] if "offs" in kwargs else args[2]
        if ends.device.type != "meta":
            return int((ends.diff(prepend=ends.new_zeros(1)) > 0).sum()) / experts
        chosen = args[0].shape[0] / self._rows
        return 1 - (1 - chosen / experts) ** self._rows


def _flops(func: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> int:
    packet = func.overloadpacket
    if packet is _ATTENTION:
        query, key, value = args[:3]
        return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    if packet is _aten._grouped_mm:
        return 2 * results.numel() * args[0].shape[-1]
    known = flop_registry.get(packet)
    return 0 if known is None else known(*args, **kwargs, out_val=results)


@contextmanager
def counting(*modules: torch.nn.Module, rows: int = 1) -> Iterator[OperationCounter]:
    """Count what the modules do, without gradients.

    Args:
        modules: their parameters and buffers are the weights.
        rows: as for `OperationCounter`.
    """
    weights = [one for module in modules for one in (*module.parameters(), *module.buffers())]
    counter = OperationCounter(weights, rows)
    with torch.no_grad(), FusedAttention(), counter:
        yield counter
