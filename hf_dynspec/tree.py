"""Draft trees: how EAGLE-2 grows one from the drafter's scores, and who descends from whom.

Every function works on whole levels of a tree, never node by node, and none waits for the device.
"""

from typing import Any

import torch

from .tree_config import TreeConfig


class TreeGrowth:
    """Grows one tree level by level: expand the frontier, keep its best children, choose the best nodes of all.

    Args:
        config: the shape.
    """

    def __init__(self, config: TreeConfig):
        self._config = config
        self._token_ids: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._nodes = 0
        # The nodes that the next level grows from: their indices among all nodes, and their scores. The root has −1.
        self._frontier: torch.Tensor | None = None
        self._frontier_scores: torch.Tensor | None = None

    def add_level(self, token_ids: torch.Tensor, log_probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the children of every frontier node and choose the next frontier.

        Args:
            token_ids: int64 `[w, c]`: the most probable children of each of the `w` frontier nodes; at first the
                frontier is the root alone.
            log_probabilities: fp32 `[w, c]`.

        Returns:
            The next frontier: its tokens, int64 `[min(top_k, w · c)]`, and for each the row of its parent in the
            frontier that was expanded.
        """
        w, c = token_ids.shape
        if self._frontier is None:
            self._frontier = token_ids.new_full((1,), -1)
            self._frontier_scores = log_probabilities.new_zeros(1)
        scores = (self._frontier_scores.unsqueeze(1) + log_probabilities).flatten()
        self._token_ids.append(token_ids.flatten())
        self._scores.append(scores)
        self._parents.append(self._frontier.unsqueeze(1).expand(w, c).flatten())
        best = scores.topk(min(self._config.top_k, w * c))
        self._frontier = best.indices + self._nodes
        self._frontier_scores = best.values
        self._nodes += w * c
        return token_ids.flatten()[best.indices], best.indices // c

    def choose(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the `total_tokens − 1` nodes whose paths are the most probable.

        A node is never more probable than its parent, and the sort is stable, so that a parent, which comes first,
        is chosen with its child also where rounding makes their scores equal.

        Returns:
            token_ids int64 `[k]`, scores fp32 `[k]`, parents int64 `[k]` (−1 for children of the root) and depths
            int64 `[k]`, level by level, parents before children.
        """
        scores = torch.cat(self._scores)
        count = min(self._config.total_tokens - 1, self._nodes)
        chosen = scores.sort(descending=True, stable=True).indices[:count].sort().values
        place = torch.full((self._nodes + 1,), -1, dtype=torch.int64, device=scores.device)
        place[chosen] = torch.arange(count, device=scores.device)
        # The root's children have the parent −1, which finds the last place, and that holds −1.
        parents = place[torch.cat(self._parents)[chosen]]
        sizes = [level.shape[0] for level in self._scores]
        ends = torch.tensor(sizes, device=scores.device).cumsum(0)
        depths = torch.searchsorted(ends, chosen, right=True)
        return torch.cat(self._token_ids)[chosen], scores[chosen], parents, depths


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


def attention_windows(config: Any) -> dict[str, int | None]:
    """The kinds of attention layers of a model, by transformers' names, and how far back each looks (None: all).

    Args:
        config: the text configuration of a decoder-only model.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return {kind: None if kind == "full_attention" else window for kind in dict.fromkeys(kinds)}
