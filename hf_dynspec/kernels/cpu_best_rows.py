"""`reference.best_rows` for CPUs, compiled from best_rows.cpp where there is a C++ compiler."""

import ctypes
import functools
import struct
from collections.abc import Callable

import torch

from . import reference
from .cpu import compiled_library, described, thread_count
from .reference import TILE_COLUMNS, TILE_ROWS, TiledFactor


@functools.cache
def _kernel() -> Callable[..., bool] | None:
    """The function of best_rows.cpp, compiled for this machine; None where it cannot be, which is said once."""
    library = compiled_library("best_rows.cpp", "Shortlists are screened", "selection.hpp")
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
_CALL = struct.Struct("6P6q")


def best_rows(queries: torch.Tensor, factor: TiledFactor, bias: torch.Tensor, count: int) -> torch.Tensor:
    """`reference.best_rows`, compiled where a compiler is at hand; in the first call, unless prepared.

    The rows are in ascending order, and of several that are equally good at the end the first ones are chosen.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not contiguous or not on the CPU, or fewer than
            `count` rows may be chosen.
    """
    kernel = _kernel()
    if kernel is None or count < 1:
        return reference.best_rows(queries, factor, bias, count)
    levels, scale, lowest = factor.levels, factor.scale, factor.lowest
    (m, rank), (tiles, groups) = queries.shape, levels.shape[:2]
    read = (levels, scale, lowest, bias)
    # The kernel reads memory by these numbers, unchecked.
    if (
        (queries.dtype, *(one.dtype for one in read)) != (torch.float32, torch.uint8, *3 * (torch.float32,))
        or tuple(levels.shape[2:]) != (TILE_ROWS, TILE_COLUMNS)
        or (groups, tuple(scale.shape), tuple(lowest.shape)) != (-(-rank // TILE_COLUMNS), (rank,), (rank,))
        or tuple(bias.shape) != (tiles, TILE_ROWS)
        or m < 1
        or not queries.is_cpu
        or not all(one.is_cpu and one.is_contiguous() for one in read)
    ):
        raise ValueError(
            f"queries {described(queries)}, a factor {described(levels)} with {described(scale)} and "
            f"{described(lowest)} and a bias {described(bias)} do not fit each other: they must be float32 [m, r], "
            f"uint8 [B, r / {TILE_COLUMNS} rounded up, {TILE_ROWS}, {TILE_COLUMNS}], float32 [r] twice and float32 "
            f"[B, {TILE_ROWS}], all but the first contiguous and everything on the CPU."
        )
    queries = queries.contiguous()
    rows = torch.empty(count, dtype=torch.int64, device="cpu")
    call = _CALL.pack(
        queries.data_ptr(),
        *(one.data_ptr() for one in read),
        rows.data_ptr(),
        m,
        rank,
        groups,
        tiles,
        count,
        min(tiles, thread_count(m * levels.numel())),
    )
    if not kernel(call):
        raise ValueError(f"{count} rows are to be chosen, and fewer may be: the bias of the others is −inf.")
    return rows
