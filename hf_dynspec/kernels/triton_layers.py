"""Small operations of a decoder's layers for GPUs, in Triton: in a graph each takes as long as its launch.

Importing this file imports triton, which is optional: `kernels.rotation_for` and `kernels.norm_from_one_for` import it
where it is of use. With `TRITON_INTERPRET=1` set before that, the kernels run on the CPU, line by line, which is for
tests.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _rotation_kernel(
    query,
    key,
    cos,
    sin,
    rotated_query,
    rotated_key,
    query_text,
    query_head,
    query_row,
    key_text,
    key_head,
    key_row,
    table_text,
    table_row,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One head of one row of one text: `tl.program_id` is the row, the head and the text."""
    row, head, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.num_programs(0)
    if head < HEADS:
        source = query + text * query_text + head * query_head + row * query_row
        into = rotated_query + ((text * HEADS + head) * rows + row) * D
    else:
        head -= HEADS
        source = key + text * key_text + head * key_head + row * key_row
        into = rotated_key + ((text * rows + row) * KEY_HEADS + head) * D
    d = tl.arange(0, PADDED)
    numbers = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
    # The other half's numbers: (−second, first).
    is_first, is_rotated = d < ROTATED // 2, d < ROTATED
    other = tl.where(is_first, d + ROTATED // 2, d - ROTATED // 2)
    turned = tl.load(source + other, mask=is_rotated, other=0.0).to(tl.float32)
    at = text * table_text + row * table_row + d
    cosines = tl.load(cos + at, mask=is_rotated, other=1.0).to(tl.float32)
    sines = tl.load(sin + at, mask=is_rotated, other=0.0).to(tl.float32)
    rotated = numbers * cosines + tl.where(is_first, -turned, turned) * sines
    tl.store(into + d, rotated.to(into.dtype.element_ty), mask=d < D)


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rotated` in one kernel, for tensors on one GPU whose last dimensions are contiguous. Queries come out
    as attention reads them, and keys as a memory holds them, so that neither is copied again."""
    texts, heads, rows, d = query.shape
    key_heads = key.shape[1]
    rotated_query = query.new_empty(texts, heads, rows, d)
    rotated_key = key.new_empty(texts, rows, key_heads, d)
    cos, sin = (table.expand(texts, rows, -1) for table in (cos, sin))
    # Triton launches on torch's current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        _rotation_kernel[(rows, heads + key_heads, texts)](
            query,
            key,
            cos,
            sin,
            rotated_query,
            rotated_key,
            *query.stride()[:3],
            *key.stride()[:3],
            *cos.stride()[:2],
            HEADS=heads,
            KEY_HEADS=key_heads,
            D=d,
            ROTATED=cos.shape[-1],
            PADDED=triton.next_power_of_2(d),
            num_warps=1,
        )
    return rotated_query, rotated_key.transpose(1, 2)


@triton.jit
def _norm_kernel(
    states,
    weight,
    output,
    eps,
    first_stride,
    second_stride,
    third_stride,
    second_size,
    third_size,
    D: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One row of states, `[i, j, k, D]`."""
    row = tl.program_id(0).to(tl.int64)
    i, j, k = row // (second_size * third_size), row // third_size % second_size, row % third_size
    d = tl.arange(0, PADDED)
    source = states + i * first_stride + j * second_stride + k * third_stride
    numbers = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / D + eps) * scale
    tl.store(output + row * D + d, normed.to(output.dtype.element_ty), mask=d < D)


def norm_from_one(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`reference.norm_from_one` in one kernel, for tensors of up to four dimensions on one GPU, the last of which is
    contiguous."""
    d, padded = states.shape[-1], triton.next_power_of_2(states.shape[-1])
    output = states.new_empty(states.shape)
    rows = states[(None,) * (4 - states.dim())]
    with torch.cuda.device_of(states):
        _norm_kernel[(output.numel() // d,)](
            rows,
            weight,
            output,
            eps,
            *rows.stride()[:3],
            *rows.shape[1:3],
            D=d,
            PADDED=padded,
            num_warps=min(8, max(1, padded // 512)),
        )
    return output
