"""The attention of a tree's nodes to the text before it and to each other."""

from typing import Any

import torch

from ..errors import UnsupportedError

# Attention implementations that take any mask.
_MASKED_ATTENTION = ("sdpa", "eager")
# The kinds of attention layers with masks for trees, by transformers' names.
_MASKED_KINDS = ("full_attention", "sliding_attention")


def descent(parents: torch.Tensor, levels: int) -> torch.Tensor:
    """bool `[k, k]`: the nodes (columns) on the path from the root to each node (rows), itself included.

    Args:
        parents: int64 `[k]`: for each node the index of its parent, −1 for children of the root.
        levels: at least the number of nodes on the longest path.
    """
    k = parents.shape[0]
    itself = torch.eye(k, dtype=torch.bool, device=parents.device)
    # One more row, which is empty, for the parent −1.
    paths = torch.cat([itself, itself.new_zeros(1, k)])
    for _ in range(levels - 1):
        paths[:k] = itself | paths[parents]
    return paths[:k]


def attention_mask(
    prefix: torch.Tensor,
    within: torch.Tensor,
    query_levels: torch.Tensor,
    key_levels: torch.Tensor,
    dtype: torch.dtype,
    window: int | None = None,
) -> torch.Tensor:
    """The attention mask of a tree's nodes, over a cached prefix and each other.

    Args:
        prefix: bool `[p]`: whether each of the last `p` cached positions counts. Level 0 follows them.
        within: bool `[q, t]`: the nodes, of `t` in the cache, that each of the `q` querying nodes attends to.
        query_levels: int64 `[q]`: the level of each querying node.
        key_levels: int64 `[t]`: the level of each node in the cache.
        dtype: the dtype of the mask.
        window: a query attends only to keys fewer than this many positions before it (None: to all).

    Returns:
        `[1, 1, q, p + t]`: 0 if a query attends to a key, otherwise the lowest number.
    """
    visible = torch.cat([prefix.expand(within.shape[0], -1), within], dim=1)
    if window is not None:
        prefix_levels = torch.arange(-prefix.shape[0], 0, device=prefix.device)
        distances = query_levels.unsqueeze(1) - torch.cat([prefix_levels, key_levels])
        visible = visible & (distances < window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def require_tree_masks(model: Any) -> None:
    """Make sure that the attention of a model takes a tree mask (`UnsupportedError`)."""
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in _MASKED_ATTENTION:
        raise UnsupportedError(
            f"{type(model).__name__} uses the attention implementation {implementation!r}, which takes no tree mask. "
            f"Load it with attn_implementation='sdpa', or draft chains with tree=False."
        )


def require_known_kinds(model: Any) -> None:
    """Make sure that there are tree masks for all kinds of layers of a model (`UnsupportedError`)."""
    others = sorted(set(attention_windows(model.config.get_text_config())) - set(_MASKED_KINDS))
    if others:
        raise UnsupportedError(
            f"{type(model).__name__} has layers of the kind {', '.join(others)}, for which this package knows no tree "
            "mask. Draft chains with tree=False."
        )


def attention_windows(config: Any) -> dict[str, int | None]:
    """The window of each kind of attention layers (None: all positions), by transformers' names, for the text
    configuration of a decoder-only model."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return {kind: None if kind == "full_attention" else window for kind in dict.fromkeys(kinds)}
