"""`reference.best_rows` for CPUs, compiled from best_rows.cpp where there is a C++ compiler."""

import ctypes
import functools
import struct
from collections.abc import Callable

import torch

from . import reference
from .cpu import compiled_library, described, thread_count


@functools.cache
def _kernel() -> Callable[..., bool] | None:
    """The function of best_rows.cpp, compiled for this machine; None where it cannot be, which is said once."""
    library = compiled_library("best_rows.cpp", "Shortlists are screened")
    if library is None:
        return None
    kernel = library["best_rows"]
    kernel.argtypes = [ctypes.c_char_p]
    kernel.restype = ctypes.c_bool
    return kernel


def prepare_best_rows() -> None:
    """Compile the kernel, which takes seconds and is said once, unless a process on this machine did so before."""
    _kernel()


# `Call` of best_rows.cpp.
_CALL = struct.Struct("4P5q")


def best_rows(queries: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor, count: int) -> torch.Tensor:
    """`reference.best_rows`, compiled where a compiler is at hand; in the first call, unless prepared.

    The rows are in ascending order, and of several that are equally good at the end the first ones are chosen.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not contiguous or not on the CPU, or fewer than
            `count` rows may be chosen.
    """
    kernel = _kernel()
    if kernel is None or count < 1:
        return reference.best_rows(queries, factor, bias, count)
    (m, rank), (tiles, factor_rank, tile_rows) = queries.shape, factor.shape
    dtypes = (queries.dtype, factor.dtype, bias.dtype)
    # The kernel reads memory by these numbers, unchecked.
    if (
        dtypes != (torch.float32, torch.bfloat16, torch.float32)
        or (factor_rank, tile_rows, tuple(bias.shape)) != (rank, reference.TILE_ROWS, (tiles, tile_rows))
        or m < 1
        or not (queries.is_cpu and factor.is_cpu and bias.is_cpu and factor.is_contiguous() and bias.is_contiguous())
    ):
        raise ValueError(
            f"queries {described(queries)}, a factor {described(factor)} and a bias {described(bias)} do not fit each "
            f"other: they must be float32 [m, r], bfloat16 [B, r, {reference.TILE_ROWS}] and float32 "
            f"[B, {reference.TILE_ROWS}], the last two contiguous and everything on the CPU."
        )
    queries = queries.contiguous()
    rows = torch.empty(count, dtype=torch.int64)
    call = _CALL.pack(
        queries.data_ptr(),
        factor.data_ptr(),
        bias.data_ptr(),
        rows.data_ptr(),
        m,
        rank,
        tiles,
        count,
        min(tiles, thread_count(m * factor.numel())),
    )
    if not kernel(call):
        raise ValueError(f"{count} rows are to be chosen, and fewer may be: the bias of the others is −inf.")
    return rows
