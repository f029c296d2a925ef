"""The choice of top tokens on CPUs, where torch is slow at it: compiled from top_k.cpp if there is a compiler."""

import ctypes
import functools
import struct
from collections.abc import Callable

import torch

from . import reference
from .cpu import compiled_library, thread_count, typed


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """The function of top_k.cpp (None: it cannot be compiled, which is logged once)."""
    library = compiled_library("top_k.cpp", "Top tokens are chosen", "selection.hpp")
    return None if library is None else typed(library["top_k"], None, ctypes.c_char_p)


# Dtypes that convert to fp32 without rounding.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# `Call` of top_k.cpp.
_CALL = struct.Struct("2P5q")
# For fewer columns torch is as fast, and column numbers have 32 bits.
FEWEST_COLUMNS, _MOST_COLUMNS = 2048, 2**32 - 1
# For fewer numbers in all, torch finds the largest of each row within about ten microseconds.
_FEWEST_NUMBERS_OF_ARGMAX = 2**14


def top_k_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`reference.top_k_ids`, for many columns compiled by the first call if there is a compiler. Of equal scores the
    leftmost are then chosen, and come first. NaN counts as the largest, as in torch."""
    ids = _compiled_top_k(scores, k)
    return reference.top_k_ids(scores, k) if ids is None else ids


def best_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`reference.best_ids`, compiled likewise."""
    ids = _compiled_top_k(scores, k)
    return reference.best_ids(scores, k) if ids is None else ids


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """`reference.argmax_rows`, compiled likewise."""
    ids = _compiled_top_k(scores, 1) if scores.numel() >= _FEWEST_NUMBERS_OF_ARGMAX else None
    return reference.argmax_rows(scores) if ids is None else ids.squeeze(1)


def _compiled_top_k(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """The kernel's result (None: there is no kernel, or it is not worth calling)."""
    m, columns = scores.shape
    # The kernel does not check its arguments.
    fits = m > 0 and 0 < k <= columns and FEWEST_COLUMNS <= columns <= _MOST_COLUMNS and scores.is_cpu
    kernel = _kernel() if fits and scores.dtype in _DTYPES else None
    if kernel is None:
        return None
    scores = scores.float()
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    ids = torch.empty(m, k, dtype=torch.int64, device="cpu")
    threads = min(m, thread_count(m * columns))
    kernel(_CALL.pack(scores.data_ptr(), ids.data_ptr(), m, columns, scores.stride(0), k, threads))
    return ids
