"""CPU kernels, compiled where there is a C++ compiler: by torch's inductor from torch code, or from blocks.cpp."""

import ctypes
import functools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

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


def _rows_in_a_pass(m: int) -> int:
    """How many of `m` query rows each of the fewest possible passes takes."""
    return -(-m // -(-m // _LARGEST_PASS))


@functools.cache
def _compiled_dense_scores(m: int, rows: int, columns: int):
    """One pass over a weight `[rows, columns]` that takes all `m` sums of a row while the row is in the cache."""

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * one).sum(-1) for one in hidden.view(m, columns).unbind(0)])

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
    size = _rows_in_a_pass(m)
    compiled = _COMPILED_PASSES.setdefault(tuple(weight.shape), [])
    if not any(other >= size for other in compiled):
        _compiled_dense_scores(size, *weight.shape)(weight.new_zeros(size * weight.shape[1]), weight)
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
    # Flat, as the stride of a single row is whatever it was cut from, and torch compiles anew for each.
    parts = [kernel(part.reshape(-1), weight) for part in hidden.split(size)]
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


# A product of fewer numbers than this takes one thread less time than others need to wake.
_FEWEST_SHARED_PRODUCTS = 2**17
# What blocks.cpp has a function for.
_BLOCK_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _block_kernels() -> dict[torch.dtype, Callable[..., bool]]:
    """The functions of blocks.cpp by the weight's dtype, compiled for this machine; torch keeps them on disk."""
    # Takes over a second, which importing this file must not.
    from torch._inductor.codecache import CppCodeCache

    source = Path(__file__).with_name("blocks.cpp").read_text(encoding="utf-8")
    # Where torch compiles, a product and a sum are two instructions, unless told otherwise.
    library = CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))
    kernels = {}
    for dtype in _BLOCK_KERNEL_DTYPES:
        kernel = library[f"block_scores_{str(dtype).removeprefix('torch.')}"]
        kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 6
        kernel.restype = ctypes.c_bool
        kernels[dtype] = kernel
    return kernels


def prepare_block_scores() -> None:
    """Compile what `block_scores` uses, which takes seconds, unless a process on this machine did so before."""
    if _has_compiler():
        _block_kernels()


def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.block_scores`, compiled where a compiler is at hand; in the first call, unless prepared.

    A call costs microseconds, unlike one of a function that torch compiled, whose checks alone take longer than to
    score a thousand rows. Gradients do not flow through it.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not on the CPU, or the weight or bias is not
            contiguous.
        IndexError: a block is not below `B`.
    """
    if weight.dtype not in _BLOCK_KERNEL_DTYPES or not _has_compiler():
        return reference.block_scores(hidden, weight, blocks, bias)
    (m, d), n, (count, block_rows, columns) = hidden.shape, blocks.shape[0], weight.shape
    # The kernel reads memory by these numbers, unchecked.
    is_in_memory = hidden.is_cpu and weight.is_cpu and blocks.is_cpu and (bias is None or bias.is_cpu)
    if d != columns or blocks.dtype != torch.int64 or not weight.is_contiguous() or not is_in_memory:
        raise ValueError(
            f"hidden states {_kind(hidden)} and blocks {_kind(blocks)} do not fit a weight {_kind(weight)}: the last "
            "dimensions must be equal, the blocks int64, the weight contiguous and everything on the CPU."
        )
    if bias is not None and (bias.shape != weight.shape[:2] or bias.dtype != weight.dtype or not bias.is_contiguous()):
        raise ValueError(f"the bias {_kind(bias)} must be contiguous and {_kind(weight[..., 0])}.")
    hidden, blocks = hidden.float().contiguous(), blocks.contiguous()
    scores = hidden.new_empty(m, n * block_rows)
    # All threads or one: the pool that torch shares dismisses those that a call leaves out.
    threads = torch.get_num_threads() if scores.numel() * d >= _FEWEST_SHARED_PRODUCTS else 1
    is_in_range = _block_kernels()[weight.dtype](
        hidden.data_ptr(),
        weight.data_ptr(),
        blocks.data_ptr(),
        None if bias is None else bias.data_ptr(),
        scores.data_ptr(),
        m,
        d,
        n,
        count,
        block_rows,
        threads,
    )
    if not is_in_range:
        raise IndexError(f"block {int(blocks.max())} is out of range: the weight has {count} blocks.")
    return scores


def _kind(tensor: torch.Tensor) -> str:
    """`float32 [3, 4] on cpu`, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
