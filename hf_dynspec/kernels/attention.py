"""Attention of the rows of a round: query rows of one or more texts attend to the text before them and to each other.

Keys and values lie in memory of fixed size, and the lengths of the texts lie on the device. So an operation has the
same shapes and addresses in every round, while its cost follows the lengths and not the size of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The tokens that a forward reads: for each text the last `q` of `t` nodes after it, which are a chain or a tree.
    A verification reads all nodes. A draft step reads the nodes of its level, and those before are cached.

    Args:
        lengths: int64 `[B]`: the tokens of each text, cached before its nodes.
        within: bool `[B, q, t]`, or `[1, q, t]` if all texts have the same: which nodes each row attends to.
        levels: int64 `[B, t]` or `[1, t]`: the tokens between the text and each node, on the node's path.
    """

    lengths: torch.Tensor
    within: torch.Tensor
    levels: torch.Tensor

    @classmethod
    def chain(cls, lengths: torch.Tensor, count: int) -> "QueryRows":
        """`count` rows one after another."""
        levels = torch.arange(count, device=lengths.device)
        return cls(lengths, (levels.unsqueeze(1) >= levels).unsqueeze(0), levels.unsqueeze(0))

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[B, q]`: the position of each row in its text."""
        return self.lengths.unsqueeze(1) + self.row_levels

    @property
    def row_levels(self) -> torch.Tensor:
        """int64 `[B, q]` or `[1, q]`: the levels of the rows."""
        return self.levels[:, -self.within.shape[1] :]

    def slots(self, size: int) -> torch.Tensor:
        """int64 `[B, q]`: where the keys and values of each row lie in memory of that many slots a text."""
        _, q, t = self.within.shape
        return (self.lengths.unsqueeze(1) + torch.arange(t - q, t, device=self.lengths.device)) % size


# Takes query [B, H, q, D]; keys [B, S, KV, D] and values [B, S, KV, E], those of the rows included; the rows; and, as
# keywords, `scale`, `window` (a row attends to positions fewer than this before it; None: to all), `soft_cap` (`c` in
# `c · tanh(scores / c)`, or None) and `sinks` (fp [H]: a score of each head that takes probability and has no value,
# or None). Returns [B, q, H, E] in the dtype of the query.
#
# Position `p` of a text lies in slot `p mod S`, and its nodes lie in the slots after it. So memory with a window needs
# `window - 1 + t` slots, and other memory as many as there are positions and nodes. Slots that no row attends to may
# hold anything.
RoundAttention = Callable[..., torch.Tensor]


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
    """`RoundAttention` in plain torch: the ground truth. It reads all of the memory."""
    (_, q, nodes), size, heads = rows.within.shape, keys.shape[1], keys.shape[2]
    # The node in each slot, int64 [B, S]; numbers past the last node are slots of the text.
    node = (torch.arange(size, device=query.device) - rows.lengths.unsqueeze(1)) % size
    is_node, some_node = node < nodes, node.clamp_max(nodes - 1)
    # How far behind the text's end each slot's token is. Slots past the beginning of a short text hold nothing.
    behind = torch.where(is_node, rows.levels.expand(len(query), -1).gather(1, some_node), node - size)
    is_token = (rows.lengths.unsqueeze(1) + behind >= 0).unsqueeze(1)
    sees_node = rows.within.expand(len(query), -1, -1).gather(2, some_node.unsqueeze(1).expand(-1, q, -1))
    visible = torch.where(is_node.unsqueeze(1), sees_node, is_token)
    if window is not None:
        visible = visible & (rows.row_levels.unsqueeze(2) - behind.unsqueeze(1) < window)
    # Memory that nothing attends to may hold NaN, which a weight of 0 would not hide.
    is_read = visible.any(1)[..., None, None]
    keys, values = (torch.where(is_read, one, 0).float().transpose(1, 2) for one in (keys, values))
    scores = query.float().unflatten(1, (heads, -1)) @ keys.unsqueeze(2).transpose(-1, -2) * scale
    weights = _weights(scores, visible[:, None, None], soft_cap, sinks)
    return (weights @ values.unsqueeze(2)).flatten(1, 2).transpose(1, 2).to(query.dtype)


def _weights(
    scores: torch.Tensor, visible: torch.Tensor | None, soft_cap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The softmax of scores, fp32 `[B, KV, H / KV, q, n]`, over the visible keys and the sinks."""
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def host_round_attention(
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
    """`RoundAttention` on a CPU: each text alone, over the slice of its memory that its rows attend to. The query
    heads that share keys become rows of one head, so that no key is repeated."""
    (_, q, nodes), size, heads = rows.within.shape, keys.shape[1], keys.shape[2]
    group = query.shape[1] // heads
    outputs = []
    for text, length in enumerate(rows.lengths.tolist()):
        first = 0 if window is None else max(0, length - window + 1)
        stop = length + nodes
        if stop <= size:
            some_keys, some_values = keys[text, first:stop], values[text, first:stop]
        else:
            slots = torch.arange(first, stop, device=keys.device) % size
            some_keys, some_values = keys[text].index_select(0, slots), values[text].index_select(0, slots)
        grouped = query[text].reshape(1, heads, group * q, -1)
        some_keys, some_values = some_keys.transpose(0, 1).unsqueeze(0), some_values.transpose(0, 1).unsqueeze(0)
        visible = _visible(rows, text, length - first, window)
        if soft_cap is None and sinks is None:
            mask = None if visible is None else visible.repeat(group, 1)
            output = scaled_dot_product_attention(grouped, some_keys, some_values, attn_mask=mask, scale=scale)
        else:
            scores = (grouped.float() @ some_keys.float().transpose(-1, -2) * scale).unflatten(2, (group, q))
            output = _weights(scores, visible, soft_cap, sinks).flatten(2, 3) @ some_values.float()
        outputs.append(output.view(heads * group, q, -1).transpose(0, 1))
    return torch.stack(outputs).to(query.dtype)


def _visible(rows: QueryRows, text: int, before: int, window: int | None) -> torch.Tensor | None:
    """bool `[q, before + t]`: which of the last positions of a text, and of its nodes, each row attends to. None for a
    single node, which attends to all."""
    within = rows.within[min(text, len(rows.within) - 1)]
    if within.shape[1] == 1:
        return None
    visible = torch.cat([within.new_ones(within.shape[0], before), within], dim=1)
    if window is not None:
        levels = rows.levels[min(text, len(rows.levels) - 1)]
        behind = torch.cat([torch.arange(-before, 0, device=levels.device), levels])
        visible &= levels[-within.shape[0] :].unsqueeze(1) - behind < window
    return visible
