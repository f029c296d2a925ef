"""`reference.best_rows` for CPUs, compiled from best_rows.cpp if there is a C++ compiler."""

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable

import torch

from . import reference
from .cpu import compiled_library, described, thread_count, typed
from .reference import TILE_COLUMNS, TILE_ROWS, Screen


@functools.cache
def _kernel() -> Callable[..., bool] | None:
    """The function of best_rows.cpp (None: it cannot be compiled, which is logged once)."""
    library = compiled_library("best_rows.cpp", "Shortlists are screened", "selection.hpp")
    return None if library is None else typed(library["best_rows"], ctypes.c_bool, ctypes.c_char_p)


def prepare_best_rows() -> None:
    """Compile the kernel, which takes seconds and is logged, unless a process on this machine did so before."""
    _kernel()


# `Call` of best_rows.cpp.
_CALL = struct.Struct("8P7q")


class _Checked:
    """The numbers of a valid screen for the kernel's calls."""

    def __init__(self, screen: Screen):
        factor = screen.factor
        levels, bias = factor.levels, screen.bias
        width, (tiles, groups), rank = screen.projection.shape[1], levels.shape[:2], screen.projection.shape[0] + 1
        read = (screen.projection, levels, factor.scale, factor.lowest, bias)
        dtypes = (torch.float32, torch.uint8, *3 * (torch.float32,))
        shapes = ((rank - 1, width), (tiles, groups, TILE_ROWS, TILE_COLUMNS), (rank,), (rank,), (tiles, TILE_ROWS))
        # The kernel does not check its arguments.
        if (
            tuple(one.dtype for one in read) != dtypes
            or tuple(tuple(one.shape) for one in read) != shapes
            or groups != -(-rank // TILE_COLUMNS)
            or not all(one.is_cpu and one.is_contiguous() for one in read)
        ):
            raise ValueError(
                f"a projection {described(screen.projection)}, a factor {described(levels)} with "
                f"{described(factor.scale)} and {described(factor.lowest)} and a bias {described(bias)} do not fit "
                f"each other: they must be float32 [r - 1, d], uint8 [B, r / {TILE_COLUMNS} rounded up, {TILE_ROWS}, "
                f"{TILE_COLUMNS}], float32 [r] twice and float32 [B, {TILE_ROWS}], all contiguous and on the CPU."
            )
        # NaN counts as low, and must not hide the other numbers.
        self._highest = bias.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).amax(1).clamp_min(0.0)
        self.pointers = tuple(one.data_ptr() for one in (*read, self._highest))
        self.sizes = (width, rank, groups, tiles)
        self.width, self.tiles, self.products = width, tiles, levels.numel()


# For the screens in use.
_checked: "weakref.WeakKeyDictionary[Screen, _Checked]" = weakref.WeakKeyDictionary()


def best_rows(hidden: torch.Tensor, screen: Screen, count: int) -> torch.Tensor:
    """`reference.best_rows`, compiled by the first call, unless prepared, if there is a compiler.

    The rows are in ascending order; of equally good rows the first are chosen. On processors that multiply bytes,
    queries are rounded too: in units of the levels, each number to a multiple of a 32,512th of the largest one. A
    screen is checked in its first call, and its tensors must not be changed in place afterwards.

    Raises:
        ValueError: shapes or dtypes do not fit together, something is not contiguous or not on the CPU, or fewer than
            `count` rows may be chosen.
    """
    kernel = _kernel()
    if kernel is None or count < 1:
        return reference.best_rows(hidden, screen, count)
    checked = _checked.get(screen)
    if checked is None:
        checked = _checked[screen] = _Checked(screen)
    m, width = hidden.shape
    if width != checked.width or m < 1 or not hidden.is_cpu:
        raise ValueError(
            f"hidden states {described(hidden)} do not fit the screen: they must be [m, {checked.width}]."
        )
    hidden = hidden.float().contiguous()
    rows = hidden.new_empty(count, dtype=torch.int64)
    threads = min(checked.tiles, thread_count(m * checked.products))
    call = _CALL.pack(hidden.data_ptr(), *checked.pointers, rows.data_ptr(), m, *checked.sizes, count, threads)
    if not kernel(call):
        raise ValueError(f"{count} rows are to be chosen, and fewer may be: the bias of the others is −inf.")
    return rows
