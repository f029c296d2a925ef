"""Attention of the rows of a round for GPUs, in Triton.

A program takes one part of the keys of one key head, and reads it once for up to 64 pairs of a row and a query head
(Dao et al., 2023, "Flash-Decoding"). A second kernel combines the parts.

Importing this file imports triton, which is optional: `kernels.round_attention_for` imports it where it is of use.
With `TRITON_INTERPRET=1` set before that, the kernels run on the CPU, line by line, which is for tests.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .attention import QueryRows

# Scores of keys that no row attends to. Finite, as the difference of two infinities is no number.
_HIDDEN = tl.constexpr(-1e30)


# Kernels are compiled once whatever these are: a round has several of each, and a compilation takes seconds.
@triton.jit(do_not_specialize=["window", "within_stride", "levels_stride", "q", "nodes", "size"])
def _part_kernel(
    query,
    keys,
    values,
    within,
    levels,
    lengths,
    sums,
    maxima,
    totals,
    scale,
    soft_cap,
    window,
    within_stride,
    levels_stride,
    q,
    nodes,
    size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
):
    """One part of one text's keys against up to `ROWS` pairs of a row and a query head of one key head."""
    text = tl.program_id(0).to(tl.int64) // HEADS
    head = tl.program_id(0) % HEADS
    part = tl.program_id(1)
    pair = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = pair // GROUP
    is_row = row < q
    d, e = tl.arange(0, PADDED_D), tl.arange(0, PADDED_E)

    length = tl.load(lengths + text)
    first = length * 0
    if HAS_WINDOW:
        first = tl.maximum(length - window + 1, 0)
    stop = length + nodes
    share = tl.cdiv(tl.cdiv(stop - first, PARTS), KEYS) * KEYS
    begin = first + part * share
    end = tl.minimum(begin + share, stop)

    query_row = (text * HEADS * GROUP + head * GROUP + pair % GROUP) * q + row
    of_query = is_row[:, None] & (d < D)[None, :]
    some_queries = tl.load(query + query_row[:, None] * D + d[None, :], mask=of_query, other=0.0).to(PRODUCT_DTYPE)
    level = tl.load(levels + text * levels_stride + nodes - q + row, mask=is_row, other=0)
    maximum = tl.full((ROWS,), _HIDDEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, PADDED_E), tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < end
        # Only memory with a window is written in circles.
        slot = (text * size + (position % size if HAS_WINDOW else position)) * HEADS + head
        of_key = inside[:, None] & (d < D)[None, :]
        some_keys = tl.load(keys + slot[:, None] * D + d[None, :], mask=of_key, other=0.0).to(PRODUCT_DTYPE)
        of_value = inside[:, None] & (e < E)[None, :]
        some_values = tl.load(values + slot[:, None] * E + e[None, :], mask=of_value, other=0.0).to(PRODUCT_DTYPE)
        # "ieee": tensor cores would otherwise round fp32 to 10 bits (tf32). Without effect on 16-bit products.
        scores = tl.dot(some_queries, tl.trans(some_keys), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            # c · tanh(scores / c)
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
        drafted = position - length
        is_draft = inside & (drafted >= 0)
        at = within + text * within_stride + row[:, None].to(tl.int64) * nodes + drafted[None, :]
        sees = tl.load(at, mask=is_row[:, None] & is_draft[None, :], other=0) != 0
        visible = inside[None, :] & ((drafted < 0)[None, :] | sees)
        if HAS_WINDOW:
            behind = tl.load(levels + text * levels_stride + drafted, mask=is_draft, other=0)
            behind = tl.where(is_draft, behind, drafted)
            visible = visible & (level[:, None] - behind[None, :] < window)
        scores = tl.where(visible, scores, _HIDDEN)
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        summed = tl.dot(weights.to(PRODUCT_DTYPE), some_values, summed * shrink[:, None], input_precision="ieee")
        maximum = higher
    into = (tl.program_id(0).to(tl.int64) * PARTS + part) * tl.num_programs(2) * ROWS + pair
    tl.store(sums + into[:, None] * E + e[None, :], summed, mask=(e < E)[None, :])
    tl.store(maxima + into, maximum)
    tl.store(totals + into, total)


@triton.jit(do_not_specialize=["q", "pairs"])
def _combining_kernel(
    sums,
    maxima,
    totals,
    sinks,
    output,
    q,
    pairs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """All parts of one row and query head."""
    text = tl.program_id(0).to(tl.int64) // q
    row = tl.program_id(0) % q
    head = tl.program_id(1)
    part, e = tl.arange(0, PARTS), tl.arange(0, PADDED_E)
    at = ((text * HEADS + head // GROUP) * PARTS + part) * pairs + row * GROUP + head % GROUP
    maximum, total = tl.load(maxima + at), tl.load(totals + at)
    highest = tl.max(maximum, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weight = tl.where(total > 0.0, tl.exp(maximum - highest), 0.0)
    summed = tl.load(sums + at[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
    all_of_it = tl.sum(total * weight, 0)
    if HAS_SINKS:
        all_of_it += tl.exp(sink - highest)
    attended = tl.sum(summed * weight[:, None], 0) / all_of_it
    into = output + (tl.program_id(0).to(tl.int64) * HEADS * GROUP + head) * E + e
    tl.store(into, attended.to(output.dtype.element_ty), mask=e < E)


class Launch(NamedTuple):
    """How the kernel of parts is launched.

    Args:
        rows: pairs of a row and a query head that a program takes.
        keys: keys that it reads at a time.
        parts: of the keys.
        warps, stages: see Triton.
    """

    rows: int
    keys: int
    parts: int
    warps: int
    stages: int


def launch_of(pairs: int, size: int, dtype: torch.dtype, heads: int, processors: int) -> Launch:
    """A launch that fits into the shared memory and the registers of all GPUs from compute capability 8.0 on, the
    smallest of which have 99 KiB for a program (`tests/kernels/test_compiled_kernels.py`).

    Args:
        pairs: of a row and a query head, for each key head.
        size: numbers of a key or a value, padded to a power of two.
        dtype: of keys and values.
        heads: key heads of all texts.
        processors: multiprocessors of the GPU.
    """
    is_wide, is_fp32 = size > 128, dtype == torch.float32
    most = (16 if is_wide else 32) if is_fp32 else 16 if size > 256 else 64
    rows = min(most, max(16, triton.next_power_of_2(pairs)))
    keys = 16 if is_fp32 else 32 if is_wide else 64
    # Few rows are waiting for memory: more programs read at once. Many rows have enough programs.
    programs = heads * triton.cdiv(pairs, rows)
    parts = 1 << max(1, (processors // programs).bit_length() - 1)
    # All parts of a row are combined in one program.
    parts = min(parts, max(2, 2**13 // size))
    return Launch(rows, keys, parts, 4 if rows == 16 and not is_fp32 and size <= 256 else 8, 2 if is_wide else 3)


@cache
def _processors(device: torch.device) -> int:
    """The multiprocessors of a GPU. The interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_IS_INTERPRETED = not isinstance(_part_kernel, triton.JITFunction)
_PRODUCT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def round_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: QueryRows,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention.round_attention` in two kernels, which launch the same programs whatever the lengths are.

    All tensors lie on one GPU; keys and values are contiguous. The kernels are compiled once for each dtype, number of
    heads and head size, with and without window, soft cap and sinks.
    """
    texts, query_heads, q, d = query.shape
    nodes, size, heads, e = rows.levels.shape[1], keys.shape[1], keys.shape[2], values.shape[3]
    group = query_heads // heads
    padded_d, padded_e = (max(16, triton.next_power_of_2(one)) for one in (d, e))
    processors = _processors(query.device)
    launch = launch_of(group * q, max(padded_d, padded_e), query.dtype, texts * heads, processors)
    parts, blocks = launch.parts, triton.cdiv(group * q, launch.rows)
    pairs = blocks * launch.rows
    partial = query.new_empty(texts * heads * parts * pairs, e + 2, dtype=torch.float32)
    sums, maxima, totals = partial.view(-1).split([partial.shape[0] * e, partial.shape[0], partial.shape[0]])
    output = query.new_empty(texts, q, query_heads, e)
    within, levels = rows.within.contiguous(), rows.levels.contiguous()
    # The interpreter keeps bf16 as 16-bit integers and would multiply those.
    product_dtype = tl.float32 if _IS_INTERPRETED else _PRODUCT_DTYPES[query.dtype]
    shapes = {"HEADS": heads, "GROUP": group, "E": e, "PADDED_E": padded_e, "PARTS": parts}
    # Triton launches on torch's current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        _part_kernel[(texts * heads, parts, blocks)](
            query.contiguous(),
            keys,
            values,
            within.view(torch.uint8),
            levels,
            rows.lengths,
            sums,
            maxima,
            totals,
            scale,
            0.0 if soft_cap is None else soft_cap,
            0 if window is None else window,
            q * nodes if len(within) > 1 else 0,
            nodes if len(levels) > 1 else 0,
            q,
            nodes,
            size,
            D=d,
            PADDED_D=padded_d,
            ROWS=launch.rows,
            KEYS=launch.keys,
            HAS_WINDOW=window is not None,
            HAS_SOFT_CAP=soft_cap is not None,
            PRODUCT_DTYPE=product_dtype,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **shapes,
        )
        _combining_kernel[(texts * q, query_heads)](
            sums, maxima, totals, sinks, output, q, pairs, HAS_SINKS=sinks is not None, **shapes
        )
    return output
