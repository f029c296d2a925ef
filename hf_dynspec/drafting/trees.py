"""Draft trees: how one grows from the drafter's scores or from its draws, and who descends from whom.

Every function works on whole levels of a tree, never node by node, and none waits for the device.
"""

import functools

import torch

from ..protocol import Draws
from ..tree_config import TreeConfig

# Of children that are drawn, a later one is asked about seldom and accepted seldom: the tenth that is asked about was
# accepted once in fifty times, where this was measured.
MOST_DRAWN_SIBLINGS = 16


class TreeGrowth:
    """Grows one tree of the likeliest tokens (EAGLE-2): expand the frontier level by level, keep its best children,
    choose the best nodes of all.

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
        # By functions: an index of one number would be read back.
        place.index_copy_(0, chosen, torch.arange(count, device=scores.device))
        # The root's children have the parent −1, which finds the last place, and that holds −1.
        parents = place.take(torch.cat(self._parents).take(chosen))
        depths = _depths(tuple(level.shape[0] for level in self._scores), scores.device)
        return torch.cat(self._token_ids).take(chosen), scores.take(chosen), parents, depths.take(chosen)


class DrawnTreeGrowth:
    """Grows one tree of drawn tokens level by level: draw children of the frontier, and keep the most promising draws.

    Verification is exact only if no token has a say in whether it is itself in the tree. So EAGLE-2's last step, which
    drops nodes for the tokens that they hold and for what grew below them, is not taken: that a node is kept is
    settled when its level is. Every level has an equal share of the nodes, and gives it to those draws that, as far as
    can be told before they are drawn, verification is most likely to come to and to accept (`chances_of_draws`). What
    a token says of itself decides only about the draws after it and about its own children.

    Args:
        config: the shape.
        levels: how many levels there will be, at most as many as nodes.
    """

    def __init__(self, config: TreeConfig, levels: int):
        self._config = config
        self._levels_left = levels
        self._nodes_left = config.total_tokens - 1
        self._token_ids: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._columns: list[torch.Tensor] = []
        self._drawn_from: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._nodes = 0
        # The nodes that the next level grows from: their indices among all nodes, and the logarithms of the estimated
        # probabilities that they are accepted. The root has −1.
        self._frontier: torch.Tensor | None = None
        self._frontier_values: torch.Tensor | None = None

    @property
    def most_children(self) -> int:
        """How many children of a node are worth drawing."""
        return min(self._config.top_k, MOST_DRAWN_SIBLINGS)

    def add_level(
        self, token_ids: torch.Tensor, probabilities: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the draws at every frontier node, keep the level's share, and choose the next frontier.

        Args:
            token_ids: int64 `[w, n]`: what the children of each of the `w` frontier nodes were drawn from; at first
                the frontier is the root alone.
            probabilities: fp32 `[w, n]`: by which they were drawn.
            columns: int64 `[w, c]`: the children, in the order in which they were drawn.

        Returns:
            The next frontier: its tokens, int64 `[f]`, `f <= top_k`, and for each the row of its parent in the
            frontier that was expanded.
        """
        w, c = columns.shape
        if self._frontier is None:
            self._frontier = token_ids.new_full((1,), -1)
            self._frontier_values = probabilities.new_zeros(1)
        asked, accepted = chances_of_draws(probabilities.gather(1, columns))
        scores = (self._frontier_values.unsqueeze(1) + asked).flatten()
        share = min(-(-self._nodes_left // self._levels_left), w * c)
        # Of one node's draws the first ones are kept, as scores never rise from one to the next.
        kept = scores.sort(descending=True, stable=True).indices[:share].sort().values
        rows = kept // c
        self._drawn_from.append((token_ids, probabilities))
        self._token_ids.append(token_ids.gather(1, columns).flatten()[kept])
        self._scores.append(scores[kept])
        self._parents.append(self._frontier[rows])
        self._rows.append(rows)
        self._columns.append(columns.flatten()[kept])
        best = (self._frontier_values.unsqueeze(1) + accepted).flatten()[kept].topk(min(self._config.top_k, share))
        self._frontier = best.indices + self._nodes
        self._frontier_values = best.values
        self._nodes += share
        self._nodes_left -= share
        self._levels_left -= 1
        return self._token_ids[-1][best.indices], rows[best.indices]

    def choose(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All nodes: see `TreeGrowth.choose`. Siblings lie side by side, in the order in which they were drawn."""
        depths = _depths(tuple(level.shape[0] for level in self._scores), self._parents[0].device)
        return torch.cat(self._token_ids), torch.cat(self._scores), torch.cat(self._parents), depths

    def draws(self) -> Draws:
        """What they were drawn from."""
        token_ids, probabilities = zip(*self._drawn_from, strict=True)
        return Draws(token_ids, probabilities, torch.cat(self._rows), torch.cat(self._columns), self.most_children)


@functools.lru_cache(maxsize=32)
def _depths(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 `[n]`: the depth of each node, level by level, for levels of these sizes. Most rounds have the same."""
    return torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(sizes)])


def chances_of_draws(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate what becomes of the children of a node if verification comes to that node.

    On a target of 45M parameters with an EAGLE-3 head, at temperature 0.8 over six kinds of text, the `j`-th child was
    accepted, if its elder siblings were not, in 64, 32, 20, 13, 12, … of 100 cases; and of first children that the
    drafter had given the probability `q`, about `(1 + q) / 2` were. So `(1 + q) / 2j` it is, with the probability `q`
    of a draw given those before it. An estimate decides about the shape of a tree, never about what comes out.

    Args:
        probabilities: fp32 `[w, c]`: of each child among all tokens, in the order in which they were drawn; 0 where
            nothing was left to draw.

    Returns:
        Two logarithms, fp32 `[w, c]`, −inf for children that do not count: of the most that the probability of being
        accepted can be, which does not depend on the child's own token, and of what it is with that token. The first
        never rises from a child to the next.
    """
    order = torch.arange(1, probabilities.shape[1] + 1, device=probabilities.device)
    taken = torch.nn.functional.pad(probabilities.cumsum(-1)[:, :-1], (1, 0))
    given_others = (probabilities / (1.0 - taken)).nan_to_num(1.0).clamp(0.0, 1.0)
    accepted = (1.0 + given_others) / (2 * order)
    asked = torch.nn.functional.pad((1.0 - accepted[:, :-1]).cumprod(-1), (1, 0), value=1.0)
    counts = torch.where(probabilities > 0, 0.0, -torch.inf)
    return (asked / order).log() + counts, (asked * accepted).log() + counts
