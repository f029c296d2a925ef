"""The kernels in plain torch: the ground truth that every faster twin is tested against."""

import torch
from torch.nn import functional

# Rows that lie side by side in a factor for `best_rows`.
TILE_ROWS = 32


def packed_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Score rows that lie side by side.

    Args:
        hidden: `[m, d]`.
        weight: `[n, d]`, of the same dtype.
        bias: `[n]` or None.

    Returns:
        `[m, n]` of the same dtype.
    """
    return functional.linear(hidden, weight, bias)


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Score rows wherever they lie.

    Args:
        hidden: `[m, d]`.
        weight: `[V, d]`, of the same dtype.
        ids: int64 `[n]`, each below `V`.
        bias: `[V]` or None.

    Returns:
        `[m, n]` of the same dtype.
    """
    rows = weight.index_select(0, ids)
    return functional.linear(hidden, rows, None if bias is None else bias.index_select(0, ids))


def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Score whole blocks of rows, wherever the blocks lie: the fused index and product of DynaSpec (section 4.3).

    Args:
        hidden: `[m, d]`.
        weight: `[B, T, d]`, of the same dtype and contiguous: `B` blocks of `T` rows.
        blocks: int64 `[n]`, each below `B`, or −1 for no block.
        bias: `[B, T]` or None.

    Returns:
        fp32 `[m, n · T]`, summed in fp32: the rows of one block after the other, −inf where there is no block.
    """
    n, block_rows = blocks.shape[0], weight.shape[1]
    chosen = blocks.clamp(min=0)
    rows = weight.index_select(0, chosen).flatten(0, 1).float()
    row_bias = None if bias is None else bias.index_select(0, chosen).flatten().float()
    scores = functional.linear(hidden.float(), rows, row_bias)
    return scores.view(hidden.shape[0], n, block_rows).masked_fill((blocks < 0).unsqueeze(-1), -torch.inf).flatten(1)


def replace_rows(packed: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    """Set `packed[slots] = table[ids]` in place. Slots that occur twice must be given the same id both times.

    Args:
        packed: `[C, …]`.
        slots: int64 `[r]`, each below `C`.
        table: `[V, …]`, of the same dtype and trailing shape.
        ids: int64 `[r]`, each below `V`.
    """
    packed.index_copy_(0, slots, table.index_select(0, ids))


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """The first column that holds each row's maximum: int64 `[m]` for `[m, V]`."""
    return scores.argmax(-1)


def top_k_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the column indices of the `k` largest values in each row, largest first.

    Args:
        scores: `[m, V]`.
        k: how many, at most `V`.

    Returns:
        int64 `[m, k]`.
    """
    return scores.topk(k, dim=-1).indices


def tiled(rows: torch.Tensor) -> torch.Tensor:
    """bf16 `[B, r, T]`: floating-point rows `[n, r]`, laid out as `best_rows` reads them: `T` side by side, and
    zeros at the end where `n` is no multiple of `T`."""
    n, rank = rows.shape
    padded = functional.pad(rows, (0, 0, 0, -n % TILE_ROWS)).to(torch.bfloat16)
    return padded.view(-1, TILE_ROWS, rank).transpose(1, 2).contiguous()


def best_rows(queries: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor, count: int) -> torch.Tensor:
    """Choose the rows of a low-rank factor that score best: a row's score is its bias and the largest of its products
    with the queries, each summed in fp32. What is no number, or −inf, counts as the lowest finite score.

    Args:
        queries: fp32 `[m, r]`, `m >= 1`.
        factor: bf16 `[B, r, T]`, `T = TILE_ROWS`: row `i` is `factor[i // T, :, i % T]`, see `tiled`.
        bias: fp32 `[B, T]`; −inf bars a row from being chosen.
        count: how many rows, of which at least as many are not barred.

    Returns:
        int64 `[count]`: different rows, in any order. Of rows that score the same, any.
    """
    lowest = torch.finfo(torch.float32).min
    products = torch.matmul(queries, factor.float()).nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    scores = (products.amax(1) + bias).nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    return scores.masked_fill(bias == -torch.inf, -torch.inf).flatten().topk(count, sorted=False).indices
