"""Layers of 16 bits on CPUs: products of a few rows, which torch computes about as slowly as one row after another."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from .cpu import most_queries, packed_scores

# Smaller weights are multiplied within microseconds.
_FEWEST_ELEMENTS = 2**17


class _FewRows(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Modules give no keyword arguments.
        if func is linear and not kwargs and _are_few_rows(*args):
            hidden, weight, *bias = args
            scores = packed_scores(hidden.reshape(-1, hidden.shape[-1]), weight, *bias or (None,))
            return scores.to(weight.dtype).view(*hidden.shape[:-1], -1)
        return func(*args, **(kwargs or {}))


def _are_few_rows(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return (
        weight.dtype.itemsize == 2
        # A subclass has a product of its own.
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.numel() >= _FEWEST_ELEMENTS
        and weight.is_cpu
        and weight.is_contiguous()
        and hidden.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        # One row torch multiplies as fast. So for one text this speeds up drafts alone, not what plain generate does.
        and 1 < hidden.shape[:-1].numel() <= most_queries(weight.dtype)
    )


def few_rows_for(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """In which a few rows, at least 2, are multiplied by a model's large weights of 16 bits with the kernel of heads:
    each number of a weight is read and widened once for several rows. As torch's, sums are in fp32 and are rounded
    once. It holds for the thread that enters it. Does nothing for models elsewhere than on the CPU or in fp32.

    Args:
        model: has `device` and `dtype`, as transformers' models.
    """
    return _FewRows() if model.device.type == "cpu" and model.dtype.itemsize == 2 else nullcontext()
