"""The kernels in plain torch: the ground truth for all faster implementations."""

from dataclasses import dataclass

import torch
from torch.nn import functional

# Rows of a tile in a factor for `best_rows`, and columns that lie together.
TILE_ROWS, TILE_COLUMNS = 32, 4
# The highest level of a number in such a factor.
_LEVELS = 255


@dataclass(frozen=True, eq=False)
class TiledFactor:
    """The rows of a low-rank factor in 8 bits, in the layout of `best_rows`: `T = TILE_ROWS` rows side by side, each
    with `TILE_COLUMNS` columns, which a processor multiplies at once.

    Args:
        levels: uint8 `[B, G, T, TILE_COLUMNS]`: column `k` of row `i` is `levels[i // T, k // 4, i % T, k % 4]`; 0
            beyond the last row or column.
        scale: fp32 `[r]`: the distance of two levels of a column.
        lowest: fp32 `[r]`: the value of level 0 of a column.
    """

    levels: torch.Tensor
    scale: torch.Tensor
    lowest: torch.Tensor

    def rows(self) -> torch.Tensor:
        """fp32 `[B · T, r]`: the values of the levels."""
        rows = self.levels.transpose(1, 2).flatten(2).flatten(0, 1)[:, : self.scale.shape[0]]
        return torch.addcmul(self.lowest, rows.float(), self.scale)


def tiled(rows: torch.Tensor) -> TiledFactor:
    """Lay out rows, finite and floating-point `[n, r]`, for `best_rows`. The error of each number is at most half a
    level, a 510th of its column's range."""
    n, rank = rows.shape
    rows = rows.float()
    lowest, highest = rows.aminmax(dim=0)
    scale = (highest - lowest) / _LEVELS
    levels = ((rows - lowest) / scale.masked_fill(scale == 0, 1.0)).round().clamp(0, _LEVELS).to(torch.uint8)
    levels = functional.pad(levels, (0, -rank % TILE_COLUMNS, 0, -n % TILE_ROWS))
    tiles = levels.view(-1, TILE_ROWS, levels.shape[1] // TILE_COLUMNS, TILE_COLUMNS).transpose(1, 2)
    return TiledFactor(tiles.contiguous(), scale, lowest)


@dataclass(frozen=True, eq=False)
class Screen:
    """The rough scores of hidden states of width `d`, for `best_rows`.

    Args:
        projection: fp32 `[r - 1, d]`: projects a hidden state to the first numbers of a query. The last number is its
            squared length.
        factor: `r` columns, see `tiled`.
        bias: fp32 `[B, T]`, added to the score of each row; rows with −inf are never chosen.
    """

    projection: torch.Tensor
    factor: TiledFactor
    bias: torch.Tensor

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 `[m, r]` for hidden states, floating-point `[m, d]`."""
        hidden = hidden.float()
        lengths = torch.linalg.vecdot(hidden, hidden).unsqueeze(1)
        return torch.cat([functional.linear(hidden, self.projection), lengths], dim=1)


def packed_scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Score adjacent rows: `[m, n]`, for hidden states `[m, d]`, a weight `[n, d]` and a bias `[n]`, all of one
    dtype."""
    return functional.linear(hidden, weight, bias)


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Score the rows `ids`, int64 `[n]`: `[m, n]`, for hidden states `[m, d]`, a weight `[V, d]` and a bias `[V]`, all
    of one dtype."""
    rows = weight.index_select(0, ids)
    return functional.linear(hidden, rows, None if bias is None else bias.index_select(0, ids))


def block_scores(
    hidden: torch.Tensor, weight: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Score any blocks of rows: the fused index and product of DynaSpec (section 4.3).

    Args:
        hidden: `[m, d]`.
        weight: `[B, T, d]`, of the same dtype and contiguous: `B` blocks of `T` rows.
        blocks: int64 `[n]`, each below `B`, or −1 for no block.
        bias: `[B, T]` or None.

    Returns:
        fp32 `[m, n · T]`, summed in fp32: block by block, −inf for −1.
    """
    n, block_rows = blocks.shape[0], weight.shape[1]
    chosen = blocks.clamp(min=0)
    rows = weight.index_select(0, chosen).flatten(0, 1).float()
    row_bias = None if bias is None else bias.index_select(0, chosen).flatten().float()
    scores = functional.linear(hidden.float(), rows, row_bias)
    return scores.view(hidden.shape[0], n, block_rows).masked_fill((blocks < 0).unsqueeze(-1), -torch.inf).flatten(1)


def replace_rows(packed: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> None:
    """Set `packed[slots] = table[ids]` in place, rounded to the dtype of `packed` `[C, …]`, for a table `[V, …]` and
    int64 `[r]` slots and ids. A slot that occurs twice must have the same id both times."""
    packed.index_copy_(0, slots, table.index_select(0, ids).to(packed.dtype))


def norm_from_one(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation with weights `1 + weight`, `[d]`, in fp32: `[…, d]` for states `[…, d]`, in their
    dtype. Gemma's and Qwen3-Next's."""
    normed = functional.rms_norm(states.float(), weight.shape, None, eps)
    return (normed * (1.0 + weight.float())).to(states.dtype)


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embeddings in transformers' usual layout: a number of the first half and one of the second are a
    point that is turned (Su et al., 2021, "RoFormer", section 3.2).

    Args:
        query: `[B, H, q, D]`.
        key: `[B, KV, q, D]`.
        cos, sin: `[B or 1, q, r]`: of the first `r` numbers of each head. The others are as before.

    Returns:
        Queries and keys in the same shapes.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(states: torch.Tensor) -> torch.Tensor:
        some, others = states.tensor_split([cos.shape[-1]], dim=-1)
        first, second = some.chunk(2, dim=-1)
        return torch.cat([some * cos + torch.cat([-second, first], dim=-1) * sin, others], dim=-1).to(states.dtype)

    return turned(query), turned(key)


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """The first column that holds each row's maximum: int64 `[m]` for `[m, V]`."""
    return scores.argmax(-1)


def top_k_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of the `k <= V` largest values in each row, largest first: int64 `[m, k]` for `[m, V]`."""
    return scores.topk(k, dim=-1).indices


def best_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`top_k_ids` whose first column is `argmax_rows`: torch promises no order of equal scores."""
    first, others = scores.argmax(-1, keepdim=True), top_k_ids(scores, k)
    return torch.cat([first, torch.where(others == first, others[:, :1], others)[:, 1:]], dim=1)


def best_rows(hidden: torch.Tensor, screen: Screen, count: int) -> torch.Tensor:
    """Choose the best rows of a low-rank factor. A row's score is its bias plus the largest of its products with the
    queries of the hidden states, summed in fp32. NaN and −inf count as the lowest finite score.

    Args:
        hidden: floating-point `[m, d]`, `m >= 1`. Those with queries that are not finite are ignored.
        screen: the factor with its projection and bias.
        count: the number of rows, at most those with a bias above −inf.

    Returns:
        int64 `[count]`: different rows, in any order. Ties are broken arbitrarily.
    """
    lowest = torch.finfo(torch.float32).min
    queries, bias = screen.queries(hidden), screen.bias
    products = functional.linear(queries, screen.factor.rows())
    products = products.masked_fill(~queries.isfinite().all(1, keepdim=True), lowest)
    scores = (products.amax(0).view_as(bias) + bias).nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)
    return scores.masked_fill(bias == -torch.inf, -torch.inf).flatten().topk(count, sorted=False).indices
