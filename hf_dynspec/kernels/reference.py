"""The kernels in plain torch: the ground truth that every faster twin is tested against."""

import torch
from torch.nn import functional


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


def argmax_rows(scores: torch.Tensor, block: int = 128) -> torch.Tensor:
    """The first column that holds each row's maximum: int64 `[m]` for `[m, V]`.

    torch's argmax compares one by one, its maximum many at a time; so the maxima of blocks are compared.
    """
    m, columns = scores.shape
    blocks = columns // block
    if blocks < 2:
        return scores.argmax(-1)
    best = scores[:, : blocks * block].view(m, blocks, block).amax(-1).argmax(-1, keepdim=True) * block
    leftover = torch.arange(blocks * block, columns, device=scores.device)
    candidates = torch.cat([best + torch.arange(block, device=scores.device), leftover.expand(m, -1)], dim=1)
    return candidates.gather(1, scores.gather(1, candidates).argmax(-1, keepdim=True)).squeeze(1)


def top_k_ids(scores: torch.Tensor, k: int, block: int = 128) -> torch.Tensor:
    """Return the column indices of the `k` largest values in each row, largest first.

    Reads many scores once: the `k` largest values lie in the `k` blocks whose maxima are largest, so that only those
    are looked at closely.

    Args:
        scores: `[m, V]`.
        k: how many, at most `V`.
        block: columns in a block.

    Returns:
        int64 `[m, k]`.
    """
    m, columns = scores.shape
    blocks = columns // block
    # Where more than a quarter would be looked at closely, the steps take longer than what they save.
    if 4 * k > blocks:
        return scores.topk(k, dim=-1).indices
    blocked = scores[:, : blocks * block].view(m, blocks, block)
    best_blocks = blocked.amax(-1).topk(k, dim=-1).indices
    block_columns = torch.arange(block, device=scores.device)
    candidates = (best_blocks.unsqueeze(-1) * block + block_columns).view(m, k * block)
    leftover = torch.arange(blocks * block, columns, device=scores.device)
    candidates = torch.cat([candidates, leftover.expand(m, -1)], dim=1)
    return candidates.gather(1, scores.gather(1, candidates).topk(k, dim=-1).indices)
