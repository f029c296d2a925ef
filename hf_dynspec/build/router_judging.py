"""How a trained router does at held-out draft steps, and how many clusters it should choose at each depth."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..shortlists.router.clusters import ClusterShortlist
from ..shortlists.router.policy import SCHEDULES, RouterShortlist
from .recording import Recording
from .router_networks import Embed

# Held-out steps that are judged at a time. Each takes as many numbers as clusters, and as the square of the draws.
_ROWS = 1024


@dataclass(frozen=True)
class HeldOutFigures:
    """Means over the held-out draft steps."""

    size: float  # tokens of a shortlist
    # Share of the clusters with likely tokens of the drafter (its `L` most probable ones, without pinned ones)
    # that are chosen.
    cluster_recall: float
    likeliest_recall: float  # share of steps whose shortlist holds the drafter's most probable token
    # Share of the target's probability, of its `target_top_k` most probable tokens, on the shortlist.
    target_mass: float
    # Expected tokens per round, as a share of those with the whole vocabulary, if the draft at each depth is
    # accepted with the mean probability of the steps there (DynaSpec, equation 3).
    relative_acceptance_length: float


class HeldOutSteps:
    """The held-out draft steps of a recording, at which policies with trained routers are judged. `draftable`, int64
    `[n]`, are the only token ids that the drafter's head can score (None: all)."""

    def __init__(self, recording: Recording, embed: Embed, draftable: torch.Tensor | None = None):
        self._recording, self._embed, self._draftable = recording, embed, draftable
        self._depths = recording.depths(recording.held_out)

    @torch.no_grad()
    def figures(self, policy: ClusterShortlist) -> HeldOutFigures:
        """Judge a policy in chains."""
        cluster_of, sizes = self._clusters_and_sizes(policy)
        count = policy.router.num_clusters
        totals = torch.zeros(2, 4, dtype=torch.float64)
        by_depth = torch.zeros(3, self._depths, dtype=torch.float64)
        budgets = torch.tensor([policy.budget(depth) for depth in range(self._depths)])
        for shard, scores, order in self._ranked(policy, sizes):
            depths = shard["depths"].long()
            chosen = torch.minimum(budgets[depths], _most_by_mass(policy, scores)).unsqueeze(1)
            ranks = _ranks(order)
            likely = cluster_of[shard["top_ids"].long()]
            is_label = _is_first(likely) & (likely < count)
            # Pinned tokens, of rank 0, are on every shortlist.
            is_hit = ranks.gather(1, likely) <= chosen
            mass = shard["target_probabilities"].double()
            covered = torch.where(ranks.gather(1, cluster_of[shard["target_ids"].long()]) <= chosen, mass, 0.0)
            size = sizes[order].cumsum(1).gather(1, chosen - 1).sum() + sizes[-1] * len(chosen)
            rows = torch.tensor(len(chosen))
            found = [size, (is_hit & is_label).sum(), is_hit[:, 0].sum(), covered.sum()]
            totals += torch.stack([torch.stack(found), torch.stack([rows, is_label.sum(), rows, mass.sum()])])
            accepted = _accepted(shard["drawn_ratios"], ranks.gather(1, cluster_of[shard["drawn_ids"].long()]), count)
            rates = torch.stack([accepted.gather(1, chosen - 1).squeeze(1), accepted[:, -1], _is_reached(shard)])
            by_depth.index_add_(1, depths, rates.double())
        length, of_all = 1 + (by_depth[:2] / by_depth[2].clamp_min(1)).cumprod(1).sum(1)
        return HeldOutFigures(*(totals[0] / totals[1].clamp_min(1)).tolist(), float(length / of_all))

    @torch.no_grad()
    def largest_budget(self, policy: ClusterShortlist, size: float) -> int:
        """The largest budget of the first draft step for which the mean shortlist holds at most `size` tokens, or 1.
        The policy's own budget does not matter."""
        sizes, count = self._clusters_and_sizes(policy)[1], policy.router.num_clusters
        # The clusters at each depth, by the number at the first step.
        budgets = torch.tensor(
            [[policy.budget(depth, first) for first in range(1, count + 1)] for depth in range(self._depths)]
        )
        total, steps = torch.zeros(count, dtype=torch.float64), 0
        for shard, scores, order in self._ranked(policy, sizes):
            chosen = torch.minimum(budgets[shard["depths"].long()], _most_by_mass(policy, scores).unsqueeze(1))
            total += sizes[order].cumsum(1).gather(1, chosen - 1).sum(0)
            steps += len(chosen)
        fitting = (total / max(steps, 1) + sizes[-1] <= size).nonzero()
        return 1 + int(fitting[-1]) if len(fitting) else 1

    def fit_budgets(self, policy: RouterShortlist) -> torch.Tensor:
        """int32 `[M, D]`: for each number of clusters at the first draft step, how many at later ones cost the least
        acceptance, as `RouterShortlist` takes them. The policy's own budgets do not matter.

        A later step is reached only if all before it were accepted, and what it drafts is worth less. DynaSpec's
        schedule (section 4.2) answers that with a formula. Here it is measured: a cluster on the shortlist of a step
        gains what it adds to the probability that the step's draft is accepted (equation 3), times the further tokens
        that a round then accepts. Budgets are such that the last cluster at each step gains as much for its size as at
        every other step.
        """
        sizes, acceptance = self._curves(policy)
        # More clusters can cost a little, if they take the drafter's probability from what the target likes.
        best = np.maximum.accumulate(acceptance, axis=1)
        missed = (best[:, -1:] - best) * _worth(best[:, -1])[:, np.newaxis]
        hulls = [_lower_hull(size, loss) for size, loss in zip(sizes, missed, strict=True)]
        firsts, gains = hulls[0]
        # The vertices of the first step, and at each the clusters of the other steps that gain as much or more.
        knots = [ends[np.searchsorted(-slopes, -gains, side="right") - 1] for ends, slopes in hulls]
        columns = [np.interp(np.arange(sizes.shape[1]), firsts, one) for one in knots]
        return torch.from_numpy(np.stack(columns, axis=1)).round().to(torch.int32) + 1

    def settle(
        self, policy: ClusterShortlist, schedule: str, size: float, others: Iterable[tuple[str, ClusterShortlist]]
    ) -> tuple[ClusterShortlist, dict[str, Any]]:
        """Give a policy budgets for a mean shortlist of `size` tokens, and judge it beside its other schedules and
        `others`, routers by the names to show, with equal shortlists. Returns the policy with budgets, and all figures
        as JSON values."""

        def fill(one: ClusterShortlist) -> ClusterShortlist:
            return one.with_budget(self.largest_budget(one, size))

        compared = []
        if isinstance(policy, RouterShortlist):
            arguments = {"ranking": policy.ranking, "budgets": self.fit_budgets(policy), **policy.settings()}
            schedules = {
                one: fill(RouterShortlist(policy.router, **{**arguments, "schedule": one})) for one in SCHEDULES
            }
            policy = schedules.pop(schedule)
            compared = [(f"schedule {name}", other) for name, other in schedules.items()]
        else:
            policy = fill(policy)
        compared += [(name, fill(other)) for name, other in others]
        metrics: dict[str, Any] = {"held_out_steps": self._recording.count(self._recording.held_out)}
        metrics |= vars(self.figures(policy))
        metrics["compared"] = [{"router": name, **vars(self.figures(other))} for name, other in compared]
        return policy, metrics

    def _clusters_and_sizes(self, policy: ClusterShortlist) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[V]`: the cluster of each id, `M` for pinned ones and `M + 1` for ids that cannot be drafted; int64
        `[M + 1]`: the tokens of each cluster and of the pinned ones."""
        count = policy.router.num_clusters
        cluster_of = policy.router.clusters.long().clone()
        if policy.pinned:
            cluster_of[policy.ranking[: policy.pinned]] = count
        if self._draftable is not None:
            cannot = torch.ones(cluster_of.shape, dtype=torch.bool).index_fill(0, self._draftable.cpu(), False)
            cluster_of[cannot] = count + 1
        return cluster_of, torch.bincount(cluster_of, minlength=count + 1)[: count + 1]

    def _ranked(
        self, policy: ClusterShortlist, sizes: torch.Tensor
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]]:
        """Yield up to `_ROWS` steps, the scores of the clusters `[n, M]`, best first, and which clusters these are."""
        router = policy.router
        for shard in self._recording.shards(self._recording.held_out):
            for start in range(0, len(shard["depths"]), _ROWS):
                part = {name: tensor[start : start + _ROWS] for name, tensor in shard.items()}
                if router.looks_ahead:
                    scores = router.scores(self._embed(part["token_ids"].long()).cpu(), part["features"])
                else:
                    scores = router.scores_of_hidden(part["hidden"])
                yield part, *scores.masked_fill(sizes[:-1] == 0, -torch.inf).sort(-1, descending=True)

    @torch.no_grad()
    def _curves(self, policy: ClusterShortlist) -> tuple[np.ndarray, np.ndarray]:
        """By depth, for shortlists of 1 to `M` clusters, both fp64 `[D, M]`: the mean number of tokens, and the mean
        probability that a draft is accepted."""
        cluster_of, sizes = self._clusters_and_sizes(policy)
        count = policy.router.num_clusters
        size, acceptance = torch.zeros(2, self._depths, count, dtype=torch.float64)
        steps, reached = torch.zeros(2, self._depths, dtype=torch.float64)
        for shard, _, order in self._ranked(policy, sizes):
            depth = shard["depths"].long()
            size.index_add_(0, depth, sizes[order].cumsum(1).double())
            drawn = _ranks(order).gather(1, cluster_of[shard["drawn_ids"].long()])
            acceptance.index_add_(0, depth, _accepted(shard["drawn_ratios"], drawn, count).double())
            steps += torch.bincount(depth, minlength=self._depths)
            reached += torch.bincount(depth[_is_reached(shard)], minlength=self._depths)
        steps, reached = steps.clamp_min(1).unsqueeze(1), reached.clamp_min(1).unsqueeze(1)
        return (size / steps + sizes[-1]).numpy(), (acceptance / reached).numpy()


def _is_reached(shard: dict[str, torch.Tensor]) -> torch.Tensor:
    """bool `[n]`: whether the target reached a step. In rounds, other steps do not tell what it accepts."""
    return shard["target_probabilities"][:, 0] > 0


def _most_by_mass(policy: ClusterShortlist, scores: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: how many clusters reach the policy's `mass`, given their scores `[n, M]`, best first."""
    if policy.mass == 1:
        return torch.full(scores.shape[:1], scores.shape[1])
    probabilities = scores.sigmoid()
    before = probabilities.cumsum(-1) - probabilities
    return (before < policy.mass * probabilities.sum(-1, keepdim=True)).sum(-1)


def _ranks(order: torch.Tensor) -> torch.Tensor:
    """int64 `[n, M + 2]`: the places of clusters in an order `[n, M]`, from 1; 0 for pinned tokens, and `M + 1` for
    tokens that cannot be drafted."""
    n, count = order.shape
    ranks = order.new_tensor([0, count + 1]).repeat_interleave(order.new_tensor([count + 1, 1])).repeat(n, 1)
    return ranks.scatter_(1, order, torch.arange(1, count + 1).expand_as(order))


def _is_first(values: torch.Tensor) -> torch.Tensor:
    """bool `[n, k]`: whether a value occurs for the first time in its row."""
    earlier = torch.ones(values.shape[1], values.shape[1], dtype=torch.bool).tril(-1)
    return ~((values.unsqueeze(2) == values.unsqueeze(1)) & earlier).any(-1)


def _worth(acceptance: np.ndarray) -> np.ndarray:
    """`[D]`: how many more tokens a round of `D` draft steps accepts if the draft of a step is accepted, given the
    probabilities that they are."""
    worth = np.zeros_like(acceptance)
    before = 1.0
    for depth, probability in enumerate(acceptance):
        worth[depth] = before * (1 + acceptance[depth + 1 :].cumprod().sum())
        before *= probability
    return worth


def _lower_hull(sizes: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The vertices of the lower convex hull of falling losses over rising sizes, both `[M]`: their indices `[n]`, and
    the gain of each for its size over the one before it `[n]`, infinite for the first."""
    hull, gains = [0], [np.inf]
    for index in range(1, len(sizes)):
        while True:
            gain = (losses[hull[-1]] - losses[index]) / max(sizes[index] - sizes[hull[-1]], 1e-9)
            if gain < gains[-1]:
                break
            hull.pop()
            gains.pop()
        hull.append(index)
        gains.append(gain)
    return np.array(hull), np.array(gains)


def _accepted(ratios: torch.Tensor, drawn: torch.Tensor, count: int) -> torch.Tensor:
    """The probability that a draft is accepted from shortlists of the best 1 to `M` clusters, fp32 `[n, M]`. `ratios`
    `[n, draws]` are `p / q` of tokens drawn from `q`, and `drawn` the ranks of their clusters.

    A draft from a shortlist is distributed as a draw from the drafter's whole distribution that is on it. It is
    accepted with `min(1, p / q')`, where `q' = q / Q` and `Q` is the shortlist's share of the drafter's probability,
    and of the draws. So the mean over all draws is that of `min(p / q, 1 / Q)`, or 0 for draws that are not on it.
    """
    n, draws = ratios.shape
    order = drawn.argsort(1)
    numbers = torch.arange(1, draws + 1)
    # `[i, k, j]`: of draw `j`, the `j`-th best ranked one, if the shortlist has the first `k + 1` of them.
    shares = torch.minimum(ratios.float().gather(1, order).unsqueeze(1), (draws / numbers).unsqueeze(1))
    accepted = functional.pad((shares * (numbers <= numbers.unsqueeze(1))).sum(2) / draws, (1, 0))
    held = torch.zeros(n, count + 2).scatter_add_(1, drawn, torch.ones(n, draws)).cumsum(1)[:, 1:-1]
    return accepted.gather(1, held.long())
