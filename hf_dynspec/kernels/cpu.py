"""CPU kernels compiled by torch's inductor, which needs a C++ compiler."""

import functools
import os
import shutil
import warnings
from collections.abc import Callable

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


@functools.cache
def _compiled_block_scores(m: int, shape: torch.Size, dtype: torch.dtype, has_bias: bool):
    """One pass over chosen blocks of a weight `[B, T, d]` that takes all `m` sums of a row while the row is in the
    cache; for any number of blocks from two on."""
    count, block_rows, columns = shape
    # One sum waits for its last addition; several at once fill the wait. A block's rows are therefore summed in up to
    # four parts side by side, as long as all sums stay in registers.
    parts = max(parts for parts in (1, 2, 4) if parts == 1 or (parts * m <= _LARGEST_PASS and block_rows % parts == 0))

    def scores(
        hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        chosen = blocks.clamp(min=0)
        absent = (blocks < 0).unsqueeze(-1)
        rows = weight.view(count, parts, block_rows // parts, columns)[chosen].float()
        row_bias = bias.view(count, parts, block_rows // parts)[chosen].float() if has_bias else None

        def part_scores(one: torch.Tensor, part: int) -> torch.Tensor:
            sums = (rows[:, part] * one).sum(-1)
            # Inside the loop over the rows, where it costs nothing, unlike another pass over the scores.
            return torch.where(absent, -torch.inf, sums + row_bias[:, part] if has_bias else sums)

        queries = hidden.view(m, columns).float().unbind(0)
        blocks_of = [torch.stack([part_scores(one, part) for part in range(parts)], dim=1) for one in queries]
        return torch.stack(blocks_of).flatten(1)

    # As for the dense kernels, each size has its own piece of code.
    name = "_".join(map(str, ("scores", m, *shape, dtype, has_bias)))
    scores.__code__ = scores.__code__.replace(co_name=name)
    # Without `dynamic`, whose setting and resetting would take a tenth of a small shortlist's time in every call.
    return torch.compile(scores)


# The kernels for blocks by the numbers of query rows that they take, ascending, for each shape and dtype of the weight
# with or without bias.
_BLOCK_KERNELS: dict[tuple[torch.Size, torch.dtype, bool], dict[int, Callable[..., torch.Tensor]]] = {}


@torch.no_grad()
def prepare_block_scores(weight: torch.Tensor, m: int, bias: torch.Tensor | None = None) -> None:
    """Compile what `block_scores` uses for `m` query rows, which takes seconds, unless it is there.

    Fewer query rows are padded to the next number that was prepared, so prepare each that occurs often, such as 1 for
    the steps of a chain. Does nothing for small weights, off the CPU, and where no compiler is at hand.

    Args:
        weight: `[B, T, d]`, contiguous.
        m: the number of query rows; more than 12 are taken in equal passes.
        bias: `[B, T]` or None.
    """
    key = (weight.shape, weight.dtype, bias is not None)
    size = _rows_in_a_pass(m)
    kernels = _BLOCK_KERNELS.get(key, {})
    is_small = weight.numel() < FEWEST_COMPILED_ELEMENTS
    if size in kernels or is_small or weight.device.type != "cpu" or not _has_compiler():
        return
    blocks = torch.zeros(2, dtype=torch.int64)
    torch._dynamo.mark_dynamic(blocks, 0)
    kernel = _compiled_block_scores(size, *key)
    kernel(weight.new_zeros(size * weight.shape[2]), weight, blocks, bias)
    _BLOCK_KERNELS[key] = dict(sorted([*kernels.items(), (size, kernel)]))


@torch.no_grad()
def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.block_scores`, compiled for large weights where a compiler is at hand; in the first call, unless
    prepared."""
    if weight.numel() < FEWEST_COMPILED_ELEMENTS:
        return reference.block_scores(hidden, weight, blocks, bias)
    m, n = hidden.shape[0], blocks.shape[0]
    if n < 2:
        # torch compiles sizes of 0 and 1 apart from all others.
        two = torch.nn.functional.pad(blocks, (0, 2 - n), value=-1)
        return block_scores(hidden, weight, two, bias)[:, : n * weight.shape[1]]
    size = _rows_in_a_pass(m)
    key = (weight.shape, weight.dtype, bias is not None)
    if size > max(_BLOCK_KERNELS.get(key, ()), default=0):
        if not _has_compiler():
            return reference.block_scores(hidden, weight, blocks, bias)
        prepare_block_scores(weight, m, bias)
    size, kernel = next((least, kernel) for least, kernel in _BLOCK_KERNELS[key].items() if least >= size)
    blocks = blocks.contiguous()
    # Flat, as the stride of a single row is whatever it was cut from, and torch compiles anew for each.
    if size == m:
        return kernel(hidden.reshape(-1), weight, blocks, bias)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, -m % size))
    parts = [kernel(part.reshape(-1), weight, blocks, bias) for part in padded.split(size)]
    return parts[0][:m] if m < size else _join(parts, parts[0].new_empty(m, parts[0].shape[1]))
