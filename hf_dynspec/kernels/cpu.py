"""CPU kernels compiled by torch's inductor, which needs a C++ compiler."""

import functools
import os
import shutil
import warnings

import torch

from . import reference


@functools.cache
def _has_compiler() -> bool:
    """Whether a C++ compiler is at hand. Says so once where none is."""
    found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name)
    if not found:
        warnings.warn(
            "no C++ compiler was found, so LM heads are scored by plain torch, several times slower. Install g++ or "
            "clang++ to compile the kernels.",
            stacklevel=2,
        )
    return found


@functools.cache
def _compiled_scores():
    """One loop over the rows that neither copies them nor writes them down: a row is read once and summed."""

    def scores(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (weight[ids].unsqueeze(0).float() * hidden.unsqueeze(1).float()).sum(-1)

    return torch.compile(scores, dynamic=True)


# A matrix product packs its large operand anew in every call, which for a few rows takes longer than the arithmetic. A
# kernel that takes this many rows in one pass over the weight still has all of their sums in registers.
_LARGEST_PASS = 12
# A weight with fewer elements than this fits the cache, and then packing costs little.
FEWEST_COMPILED_ELEMENTS = 2**23


@functools.cache
def _compiled_dense_scores(m: int, rows: int, columns: int):
    """One pass over a weight `[rows, columns]` that takes all `m` sums of a row while the row is in the cache."""

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * one).sum(-1) for one in hidden.unbind(0)])

    # torch counts how often it compiles one piece of code, and after eight times runs it uncompiled: each size has its
    # own piece.
    scores.__code__ = scores.__code__.replace(co_name=f"scores_{m}_{rows}_{columns}")
    return torch.compile(scores, dynamic=False)


# The numbers of rows that a kernel was compiled for, ascending, by the shape of the weight.
_COMPILED_PASSES: dict[tuple[int, int], list[int]] = {}


def can_compile_dense_scores(weight: torch.Tensor) -> bool:
    """Whether `dense_scores` has a compiled kernel for this weight: in fp32, on the CPU, and large."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= FEWEST_COMPILED_ELEMENTS
        and _has_compiler()
    )


# torch compiles anew where gradients are switched on or off, so both run without.
@torch.no_grad()
def prepare_dense_scores(weight: torch.Tensor, m: int) -> None:
    """Compile what `dense_scores` uses for up to `m` rows, which takes seconds, unless it is there."""
    passes = -(-m // _LARGEST_PASS)
    size = -(-m // passes)
    compiled = _COMPILED_PASSES.setdefault(tuple(weight.shape), [])
    if not any(other >= size for other in compiled):
        _compiled_dense_scores(size, *weight.shape)(weight.new_zeros(size, weight.shape[1]), weight)
        compiled.append(size)
        compiled.sort()


@torch.no_grad()
def dense_scores(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.packed_scores` without bias, for weights that `prepare_dense_scores` was called for.

    Args:
        hidden: `[m, d]`.
        weight: `[V, d]`.
        out: `[m, V]`: may be used for the result, which saves the system's handing out of memory anew.

    Returns:
        `[m, V]`.
    """
    m = hidden.shape[0]
    compiled = _COMPILED_PASSES.get(tuple(weight.shape))
    if not compiled:
        return reference.packed_scores(hidden, weight, None)
    size = next((size for size in compiled if size >= m), compiled[-1])
    kernel = _compiled_dense_scores(size, *weight.shape)
    passes = -(-m // size)
    if passes * size > m:
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, passes * size - m))
    parts = [kernel(part, weight) for part in hidden.contiguous().split(size)]
    return parts[0][:m] if passes == 1 else _join(parts, hidden.new_empty(m, weight.shape[0]) if out is None else out)


def _join(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Lay parts one below the other into `out`, `[m, V]`; the last one may have rows too many."""
    for part, into in zip(parts, out.split(parts[0].shape[0]), strict=True):
        into.copy_(part[: into.shape[0]])
    return out


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.scattered_scores`, compiled where a compiler is at hand, summed and returned in fp32."""
    if not _has_compiler():
        return reference.scattered_scores(hidden, weight, ids, bias).float()
    scores = _compiled_scores()(hidden, weight, ids)
    return scores if bias is None else scores + bias.index_select(0, ids).float()
