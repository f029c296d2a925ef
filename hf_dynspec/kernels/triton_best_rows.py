"""`reference.best_rows` for GPUs: rough scores in one Triton kernel, and torch's selection among them.

This file needs triton, which is optional: `kernels.best_rows_for` imports it if possible. With `TRITON_INTERPRET=1`
set before that, the kernel runs on the CPU, line by line, for tests.
"""

import torch
import triton
import triton.language as tl

from .reference import TILE_COLUMNS, TILE_ROWS, Screen

# Queries of one product: the narrowest matrix that it takes; likewise ranks.
QUERY_ROWS = 16
# Tiles of one program, and the most ranks that it reads at a time.
PROGRAM_TILES = 4
MOST_RANKS = 64


@triton.jit(do_not_specialize=["m", "tiles"])
def _rough_scores_kernel(
    queries,
    bases,
    levels,
    bias,
    scores,
    m,
    tiles,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    T: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    # Scores the rows of a few tiles. Their levels are read once for up to `QUERIES` queries.
    row = tl.program_id(0).to(tl.int64) * TILES * T + tl.arange(0, TILES * T)
    is_row = row < tiles * T
    rank = tl.arange(0, RANKS)
    first = tl.arange(0, QUERIES)
    groups = (RANK + COLUMNS - 1) // COLUMNS
    row_pointers = levels + ((row // T) * groups * T + row % T) * COLUMNS
    lowest = -3.4028234663852886e38
    best = tl.full((TILES * T,), lowest, tl.float32)
    for start in range(0, m, QUERIES):
        # The last query fills the rest.
        query = tl.minimum(start + first, m - 1)
        products = tl.zeros((QUERIES, TILES * T), tl.float32)
        for k in range(0, RANK, RANKS):
            inside = rank < RANK - k
            column = k + rank
            numbers = tl.load(
                row_pointers[None, :] + (column // COLUMNS * T * COLUMNS + column % COLUMNS)[:, None],
                mask=inside[:, None] & is_row[None, :],
                other=0,
            )
            asked = tl.load(queries + query[:, None] * RANK + k + rank[None, :], mask=inside[None, :], other=0.0)
            # "ieee": tensor cores would otherwise round fp32 to 10 bits (tf32).
            products = tl.dot(asked, numbers.to(tl.float32), products, input_precision="ieee")
        products += tl.load(bases + query)[:, None]
        # NaN loses every comparison.
        best = tl.maximum(best, tl.max(tl.where(products > lowest, products, lowest), axis=0))
    own = tl.load(bias + row, mask=is_row, other=float("-inf"))
    total = best + own
    total = tl.where(total > lowest, total, lowest)
    tl.store(scores + row, tl.where(own == float("-inf"), own, total), mask=is_row)


def best_rows(hidden: torch.Tensor, screen: Screen, count: int) -> torch.Tensor:
    """`reference.best_rows` for tensors on one GPU. The kernel is compiled once for each rank."""
    queries, factor, bias = screen.queries(hidden), screen.factor, screen.bias
    (m, rank), tiles = queries.shape, factor.levels.shape[0]
    scores = torch.empty_like(bias)
    # Triton launches on torch's current device, which need not be the tensors'.
    with torch.cuda.device_of(queries):
        _rough_scores_kernel[(triton.cdiv(tiles, PROGRAM_TILES),)](
            queries * factor.scale,
            # This excludes queries that are not finite: their scores are NaN or −inf.
            torch.where(queries.isfinite().all(1), torch.mv(queries, factor.lowest), -torch.inf),
            factor.levels,
            bias,
            scores,
            m,
            tiles,
            RANK=rank,
            RANKS=min(MOST_RANKS, max(16, triton.next_power_of_2(rank))),
            T=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            TILES=PROGRAM_TILES,
            QUERIES=QUERY_ROWS,
            num_warps=4,
            num_stages=3,
        )
    return scores.flatten().topk(count, sorted=False).indices
