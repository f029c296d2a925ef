"""How the nodes of a tree attend to the text before it and to each other."""

from typing import Any

import torch

from ..errors import UnsupportedError

# Attention implementations that take any mask.
_MASKED_ATTENTION = ("sdpa", "eager")
# The kinds of attention layers, by transformers' names, that trees have masks for.
_MASKED_KINDS = ("full_attention", "sliding_attention")


def descent(parents: torch.Tensor, levels: int) -> torch.Tensor:
    """bool `[k, k]`: which nodes (columns) lie on the path from the root to each node (rows), itself included.

    Args:
        parents: int64 `[k]`: for each node the index of its parent, −1 for children of the root.
        levels: at least the number of nodes on the longest path.
    """
    k = parents.shape[0]
    itself = torch.eye(k, dtype=torch.bool, device=parents.device)
    # A row more, which is empty, for the parent −1.
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
    """The mask by which nodes of a tree attend to a cached prefix and to each other.

    Args:
        prefix: bool `[p]`: which of the last `p` cached positions count. The level after them is level 0.
        within: bool `[q, t]`: which of the `t` nodes in the cache each of the `q` querying nodes attends to.
        query_levels: int64 `[q]`: the level of each querying node.
        key_levels: int64 `[t]`: the level of each node in the cache.
        dtype: of the mask.
        window: a query attends only to keys fewer than this many positions before it (None: to all).

    Returns:
        `[1, 1, q, p + t]`: 0 where a query attends to a key, the lowest number where it does not.
    """
    visible = torch.cat([prefix.expand(within.shape[0], -1), within], dim=1)
    if window is not None:
        prefix_levels = torch.arange(-prefix.shape[0], 0, device=prefix.device)
        distances = query_levels.unsqueeze(1) - torch.cat([prefix_levels, key_levels])
        visible = visible & (distances < window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def require_tree_masks(model: Any) -> None:
    """Make sure that the attention of a model takes the mask of a tree.

    Raises:
        UnsupportedError: it does not.
    """
    implementation = model.config.get_text_config()._attn_implementation
    if implementation not in _MASKED_ATTENTION:
        raise UnsupportedError(
            f"{type(model).__name__} uses the attention implementation {implementation!r}, which takes no tree mask. "
            f"Load it with attn_implementation='sdpa', or draft chains with tree=False."
        )


def require_known_kinds(model: Any) -> None:
    """Make sure that there is a tree mask for every kind of layer that a model has.

    Raises:
        UnsupportedError: there is none for one of them.
    """
    others = sorted(set(attention_windows(model.config.get_text_config())) - set(_MASKED_KINDS))
    if others:
        raise UnsupportedError(
            f"{type(model).__name__} has layers of the kind {', '.join(others)}, for which this package knows no tree "
            "mask. Draft chains with tree=False."
        )


def attention_windows(config: Any) -> dict[str, int | None]:
    """The kinds of attention layers of a model, by transformers' names, and how far back each looks (None: all).

    Args:
        config: the text configuration of a decoder-only model.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return {kind: None if kind == "full_attention" else window for kind in dict.fromkeys(kinds)}
