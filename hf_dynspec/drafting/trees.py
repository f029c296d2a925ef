"""Draft trees, grown from the drafter's scores or from its draws.

Every function works on whole levels of a tree, not node by node, and none waits for the device.
"""

import functools
from collections.abc import Sequence

import torch

from ..kernels import top_k_ids
from ..protocol import Candidates, Draws, Shortlist
from ..tree_config import TreeConfig
from .token_choice import TokenChoice

# Later drawn children are rarely reached and rarely accepted: the tenth child was accepted in one case of fifty when
# it was reached (the measurement is that of `chances_of_draws`).
MOST_DRAWN_SIBLINGS = 16


class TreeGrowth:
    """Grows one tree of the most probable tokens (EAGLE-2): expands the frontier level by level, and at the end
    chooses the best of all nodes.

    Args:
        config: the shape.
    """

    def __init__(self, config: TreeConfig):
        self._config = config
        self._token_ids: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._nodes = 0
        # The nodes to expand next: their indices among all nodes (−1 is the root), and their scores.
        self._frontier: torch.Tensor | None = None
        self._frontier_scores: torch.Tensor | None = None

    @property
    def most_children(self) -> int:
        """The number of children to take of a node."""
        return self._config.top_k

    def add_level(self, token_ids: torch.Tensor, log_probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the children of every frontier node and choose the next frontier.

        Args:
            token_ids: int64 `[w, c]`: the most probable children of each of the `w` frontier nodes. The first frontier
                is the root.
            log_probabilities: fp32 `[w, c]`.

        Returns:
            The tokens of the next frontier, int64 `[min(top_k, w · c)]`, and the row of each one's parent in the old
            frontier.
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

        A node is never more probable than its parent, and the sort is stable. So a parent, which comes first, is
        chosen with its child even if rounding makes their scores equal.

        Returns:
            token_ids int64 `[k]`, scores fp32 `[k]`, parents int64 `[k]` (−1 for children of the root) and depths
            int64 `[k]`, level by level, parents before children.
        """
        scores = torch.cat(self._scores)
        count = min(self._config.total_tokens - 1, self._nodes)
        chosen = scores.sort(descending=True, stable=True).indices[:count].sort().values
        place = torch.full((self._nodes + 1,), -1, dtype=torch.int64, device=scores.device)
        # Not by indexing, which would wait for the device if the index has one element.
        place.index_copy_(0, chosen, torch.arange(count, device=scores.device))
        # The parent −1 of the root's children looks up the last place, which holds −1.
        parents = place.take(torch.cat(self._parents).take(chosen))
        depths = _depths(tuple(level.shape[0] for level in self._scores), scores.device)
        return torch.cat(self._token_ids).take(chosen), scores.take(chosen), parents, depths.take(chosen)


class DrawnTreeGrowth:
    """Grows one tree of drawn tokens level by level.

    Verification is exact only if whether a node is in the tree does not depend on its own token. So there is no last
    step as in EAGLE-2, which drops nodes by their scores: a node is kept or dropped when its level is drawn. Every
    level has an equal share of the nodes, and gives it to the draws that verification is most likely to reach and to
    accept, estimated without their own tokens (`chances_of_draws`). A token's own probability decides only about later
    draws and about its children.

    Args:
        config: the shape.
        levels: the number of levels, at most the number of nodes.
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
        # The nodes to expand next: their indices among all nodes (−1 is the root), and the logarithms of the estimated
        # probabilities that they are accepted.
        self._frontier: torch.Tensor | None = None
        self._frontier_values: torch.Tensor | None = None

    @property
    def most_children(self) -> int:
        """The number of children to draw for a node."""
        return min(self._config.top_k, MOST_DRAWN_SIBLINGS)

    def add_level(
        self, token_ids: torch.Tensor, probabilities: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the draws at every frontier node, keep the level's share, and choose the next frontier.

        Args:
            token_ids: int64 `[w, n]`: the tokens that children of each of the `w` frontier nodes were drawn from. The
                first frontier is the root.
            probabilities: fp32 `[w, n]`: their probabilities.
            columns: int64 `[w, c]`: the children, in the order of the draws.

        Returns:
            The tokens of the next frontier, int64 `[f]`, `f <= top_k`, and the row of each one's parent in the old
            frontier.
        """
        w, c = columns.shape
        if self._frontier is None:
            self._frontier = token_ids.new_full((1,), -1)
            self._frontier_values = probabilities.new_zeros(1)
        asked, accepted = chances_of_draws(probabilities.gather(1, columns))
        scores = (self._frontier_values.unsqueeze(1) + asked).flatten()
        share = min(-(-self._nodes_left // self._levels_left), w * c)
        # Scores never rise from one draw of a node to the next, so a node keeps its first draws.
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
        """Return all nodes: see `TreeGrowth.choose`. Siblings lie side by side, in the order of the draws."""
        depths = _depths(tuple(level.shape[0] for level in self._scores), self._parents[0].device)
        return torch.cat(self._token_ids), torch.cat(self._scores), torch.cat(self._parents), depths

    def draws(self) -> Draws:
        """The distributions that the nodes were drawn from."""
        token_ids, probabilities = zip(*self._drawn_from, strict=True)
        return Draws(token_ids, probabilities, torch.cat(self._rows), torch.cat(self._columns), self.most_children)


def grow(
    growth: TreeGrowth | DrawnTreeGrowth,
    logits: torch.Tensor,
    shortlist: Shortlist,
    paths: torch.Tensor,
    choice: TokenChoice,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a level to a tree.

    Args:
        growth: the tree.
        logits: fp32 `[w, width]`: the drafter's, at the frontier's nodes.
        shortlist: of the draft step.
        paths: int64 `[w, depth]`: the tokens on the way to each of these nodes, if a processor looks at token ids.
        choice: draws children, or processes the logits of which the most probable are the children. Those that look
            at values only, and come last, are left out then: a top-k would leave no alternatives.

    Returns:
        The next frontier's tokens, int64 `[f]`, the row of each one's parent in the old frontier, and its paths.
    """
    if isinstance(growth, DrawnTreeGrowth):
        children = choice.draw_children(logits, shortlist, paths, growth.most_children)
    else:
        logits = choice.process_by_id(logits, shortlist, paths)
        best = top_k_ids(logits, min(growth.most_children, shortlist.width))
        children = shortlist.ids_at(best), logits.gather(1, best) - logits.logsumexp(-1, keepdim=True)
    fresh, parents = growth.add_level(*children)
    if choice.looks_at_ids:
        paths = torch.cat([paths.index_select(0, parents), fresh.unsqueeze(1)], dim=1)
    return fresh, parents, paths


def candidates_of(growth: TreeGrowth | DrawnTreeGrowth, shortlists: Sequence[Shortlist]) -> Candidates:
    """The nodes of a tree that is grown, whose levels were chosen from these shortlists."""
    token_ids, scores, parents, depths = growth.choose()
    draws = growth.draws() if isinstance(growth, DrawnTreeGrowth) else None
    return Candidates(token_ids, tuple(shortlists), (), parents, depths, scores, draws)


@functools.lru_cache(maxsize=32)
def _depths(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 `[n]`: the depth of each node, level by level, for levels of these sizes. Cached: sizes rarely change."""
    return torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(sizes)])


def chances_of_draws(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the probabilities that children of a node are accepted, if verification reaches the node.

    On a target of 45M parameters with an EAGLE-3 head, at temperature 0.8 over six kinds of text, the `j`-th child was
    accepted, if its earlier siblings were not, in 64, 32, 20, 13, 12, … of 100 cases. First children of drafter
    probability `q` were accepted in a share of about `(1 + q) / 2`. So the estimate is `(1 + q) / 2j`, with `q` given
    the draws before. Estimates decide about the shape of a tree, never about the output.

    Args:
        probabilities: fp32 `[w, c]`: the probability of each child among all tokens, in the order of the draws; 0 if
            nothing was left to draw.

    Returns:
        Two logarithms, fp32 `[w, c]`, −inf for children of probability 0: of an upper bound that does not depend on
        the child's own token and never rises from a child to the next, and of the estimate with that token.
    """
    order = torch.arange(1, probabilities.shape[1] + 1, device=probabilities.device)
    taken = torch.nn.functional.pad(probabilities.cumsum(-1)[:, :-1], (1, 0))
    given_others = (probabilities / (1.0 - taken)).nan_to_num(1.0).clamp(0.0, 1.0)
    accepted = (1.0 + given_others) / (2 * order)
    asked = torch.nn.functional.pad((1.0 - accepted[:, :-1]).cumprod(-1), (1, 0), value=1.0)
    counts = torch.where(probabilities > 0, 0.0, -torch.inf)
    return (asked / order).log() + counts, (asked * accepted).log() + counts
