"""`reference.best_rows` for CPUs, compiled from best_rows.cpp where there is a C++ compiler."""

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable

import torch

from . import reference
from .cpu import compiled_library, described, thread_count
from .reference import TILE_COLUMNS, TILE_ROWS, Screen


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
_CALL = struct.Struct("8P7q")


class _Checked:
    """A screen that the kernel can read, in the numbers that its calls are packed with."""

    def __init__(self, screen: Screen):
        factor = screen.factor
        levels, bias = factor.levels, screen.bias
        width, (tiles, groups), rank = screen.projection.shape[1], levels.shape[:2], screen.projection.shape[0] + 1
        read = (screen.projection, levels, factor.scale, factor.lowest, bias)
        dtypes = (torch.float32, torch.uint8, *3 * (torch.float32,))
        shapes = ((rank - 1, width), (tiles, groups, TILE_ROWS, TILE_COLUMNS), (rank,), (rank,), (tiles, TILE_ROWS))
        # The kernel reads memory by these numbers, unchecked.
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
        # NaN, which no row is chosen by, must not hide the others.
        self._highest = bias.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).amax(1).clamp_min(0.0)
        self.pointers = tuple(one.data_ptr() for one in (*read, self._highest))
        self.sizes = (width, rank, groups, tiles)
        self.width, self.tiles, self.products = width, tiles, levels.numel()


# Of the screens in use.
_checked: "weakref.WeakKeyDictionary[Screen, _Checked]" = weakref.WeakKeyDictionary()


def best_rows(hidden: torch.Tensor, screen: Screen, count: int) -> torch.Tensor:
    """`reference.best_rows`, compiled where a compiler is at hand; in the first call, unless prepared.

    The rows are in ascending order, and of several that are equally good at the end the first ones are chosen. Where
    the processor multiplies bytes, queries are rounded as the factor is: in units of the levels that they are
    multiplied with, each number to a multiple of a 32,512th of the largest one. What stays the same from call to call
    is read once of a screen, whose tensors must not be changed in place after its first call.

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
