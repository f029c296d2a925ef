"""The fused index and matrix product of DynaSpec (section 4.3) for GPUs, in Triton.

This file needs triton, which is optional: `kernels.block_scores_for` imports it if possible. With `TRITON_INTERPRET=1`
set before that, the kernel runs on the CPU, line by line, for tests.
"""

import torch
import triton
import triton.language as tl

# Query rows of one program: the narrowest matrix of the tensor cores' instructions.
QUERY_ROWS = 16


@triton.jit(do_not_specialize=["n", "m"])
def _block_scores_kernel(
    hidden,
    weight,
    blocks,
    bias,
    scores,
    m,
    n,
    D: tl.constexpr,
    T: tl.constexpr,
    PADDED_T: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
):
    """Score one block's rows for up to `QUERIES` hidden states. Each row of the weight is read once."""
    slot = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    row = tl.arange(0, PADDED_T)
    is_row = row < T
    is_query = query < m
    into = scores + query[None, :].to(tl.int64) * n * T + slot * T + row[:, None]
    kept = is_row[:, None] & is_query[None, :]

    block = tl.load(blocks + slot)
    if block < 0:
        tl.store(into, tl.full((PADDED_T, QUERIES), float("-inf"), tl.float32), mask=kept)
        return

    column = tl.arange(0, COLUMNS)
    row_pointers = weight + block * T * D + row[:, None] * D + column[None, :]
    query_pointers = hidden + query[None, :].to(tl.int64) * D + column[:, None]
    sums = tl.zeros((PADDED_T, QUERIES), tl.float32)
    for start in range(0, D, COLUMNS):
        inside = column < D - start
        rows = tl.load(row_pointers + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        queries = tl.load(query_pointers + start, mask=inside[:, None] & is_query[None, :], other=0.0)
        # "ieee": tensor cores would otherwise round fp32 to 10 bits (tf32). Without effect on 16-bit products.
        sums = tl.dot(rows.to(PRODUCT_DTYPE), queries.to(PRODUCT_DTYPE), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + block * T + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    tl.store(into, sums, mask=kept)


_IS_INTERPRETED = not isinstance(_block_scores_kernel, triton.JITFunction)
_PRODUCT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.block_scores` in one kernel, for tensors on one GPU: a program for each block reads its rows once and
    writes only scores. The kernel is compiled once for each dtype, `T` and `d`, with and without bias."""
    m, d = hidden.shape
    n, block_rows = blocks.shape[0], weight.shape[1]
    scores = torch.empty(m, n * block_rows, dtype=torch.float32, device=hidden.device)
    if scores.numel() == 0:
        return scores
    product_dtype = _PRODUCT_DTYPES[weight.dtype]
    if _IS_INTERPRETED:
        # The interpreter stores bf16 as 16-bit integers and would multiply those. In fp32 the product of two 16-bit
        # numbers is exact.
        product_dtype = tl.float32
    # Triton launches on torch's current device, which need not be the tensors'.
    with torch.cuda.device_of(hidden):
        _block_scores_kernel[(n, triton.cdiv(m, QUERY_ROWS))](
            hidden.contiguous(),
            weight.contiguous(),
            blocks.contiguous(),
            None if bias is None else bias.contiguous(),
            scores,
            m,
            n,
            D=d,
            T=block_rows,
            PADDED_T=max(16, triton.next_power_of_2(block_rows)),
            QUERIES=QUERY_ROWS,
            # 256 bytes of each row at a time: whole cache lines, and several tiles fit the shared memory, so that the
            # next are loaded during a product.
            COLUMNS=256 // weight.element_size(),
            HAS_BIAS=bias is not None,
            PRODUCT_DTYPE=product_dtype,
            num_warps=4,
            num_stages=4,
        )
    return scores
