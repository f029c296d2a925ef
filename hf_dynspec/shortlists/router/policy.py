"""DynaSpec: the vocabulary in clusters, a router that chooses among them, and a budget that shrinks with depth.

Paper: DynaSpec (Zhang et al., 2025), section 4.2.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...errors import ConfigurationError
from ...fields import OneOf, Share, Switch, WholeNumber
from ...storable import ID_DTYPES, TensorRule, token_ranking
from ..frequency import as_ranking
from .clusters import ClusterShortlist
from .network import MOST_CLUSTERS, ROUTER_TENSOR_RULES, Router, described

# The number of clusters at later draft steps, see `RouterShortlist`.
SCHEDULES = ("fitted", "dynaspec", "fixed")
# The most columns of stored budgets.
_MOST_DEPTHS = 2**8


def position_aware_clusters(largest: int, depth: int) -> int:
    """The number of clusters at draft step `depth` (DynaSpec, section 4.2): `largest` at 0 and 1, then
    `⌊largest / (2 · (depth + 1))⌋`, at least one."""
    return largest if depth <= 1 else max(1, largest // (2 * (depth + 1)))


class RouterShortlist(ClusterShortlist):
    """The clusters that a router finds likely in the context, and pinned tokens.

    Args:
        router: a `Router`, or the artifact (folder or Hub repository) of `hf-dynspec train router` or `hf-dynspec
            build clusters`, whose stored settings are then the defaults of those below.
        max_clusters: clusters at the first draft step (default 64).
        schedule: clusters at later steps: `"fitted"`: by `budgets` (default if there are any); `"dynaspec"`: by
            `position_aware_clusters` (default otherwise); or `"fixed"`: the same number.
        mass: stop at this share of the router's probability over all clusters (default 1: use the whole budget). For
            trained routers.
        ranking: token ids, most frequent first.
        pinned: the number of tokens of the ranking on every shortlist (default 0). A router is trained to leave out
            the tokens that were pinned then, so keep that number.
        packed: hold a copy of the head's rows in blocks, one cluster after another, so that no single row is gathered
            (default True). The copy takes the memory of the head, and up to a tenth more for last blocks that are not
            full.
        budgets: int32 or int64 `[M, D]`: row `k - 1` holds the number of clusters at each draft step if the first step
            has `k`; the last column also counts for all later steps. `hf-dynspec train router` fits them, see
            `build.router_judging.fit_budgets`.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
        ArtifactError: the router's artifact is damaged or holds no clusters.
    """

    name = "router"
    setting_rules: ClassVar = {
        "max_clusters": WholeNumber(1),
        "schedule": OneOf(SCHEDULES),
        "mass": Share(),
        "pinned": WholeNumber(0),
        "packed": Switch(),
    }

    tensor_rules: ClassVar = {
        **ROUTER_TENSOR_RULES,
        "ranking": token_ranking(),
        "budgets": TensorRule(ID_DTYPES, (MOST_CLUSTERS, _MOST_DEPTHS)),
    }
    card_summary = (
        "The vocabulary is split into clusters of tokens, and before each draft step a small trained network (the "
        "router) chooses the clusters that the drafter scores, more of them at the first steps of a draft (DynaSpec). "
        "Where no network was trained, the clusters are chosen whose centroids have the largest product with the "
        "hidden state of the drafter of whose head they were built."
    )
    card_tags = ("dynaspec", "router")

    def __init__(
        self,
        router: Router | str | os.PathLike,
        max_clusters: int | None = None,
        schedule: str | None = None,
        mass: float | None = None,
        ranking: Sequence[int] | torch.Tensor | None = None,
        pinned: int | None = None,
        packed: bool | None = None,
        budgets: torch.Tensor | None = None,
    ):
        defaults = {**_DEFAULTS, "schedule": "dynaspec" if budgets is None else "fitted"}
        router, stored = self._loaded(router)
        if stored is not None:
            ranking = stored.tensors.get("ranking") if ranking is None else ranking
            budgets = stored.tensors.get("budgets") if budgets is None else budgets
        if not router.looks_ahead and router.centroids is None:
            raise ConfigurationError("a router of one layer is CORAL's: give it to CoralShortlist")
        given = {
            "max_clusters": max_clusters,
            "schedule": schedule,
            "mass": mass,
            "pinned": pinned,
            "packed": packed,
        }
        settings = self._settings(defaults, stored, given)
        if settings["mass"] < 1 and router.centroids is not None:
            raise ConfigurationError("mass needs a trained router; centroids give no probabilities")
        if settings["pinned"] and ranking is None:
            raise ConfigurationError("pinned tokens need a ranking")
        _require_budgets(settings["schedule"], router, budgets)
        super().__init__(router, settings["packed"], None if stored is None else stored.tokenizer)
        self.ranking = None if ranking is None else as_ranking(ranking)
        self.max_clusters: int = settings["max_clusters"]
        self.schedule: str = settings["schedule"]
        self.mass: float = settings["mass"]
        self.pinned: int = settings["pinned"]
        self.budgets = budgets
        self._budgets = self._budgets_by_depth(self.max_clusters)

    def budget(self, depth: int, first: int | None = None) -> int:
        budgets = self._budgets if first is None else self._budgets_by_depth(first)
        if self.schedule == "dynaspec":
            return position_aware_clusters(budgets[0], depth)
        return budgets[min(depth, len(budgets) - 1)]

    def _budgets_by_depth(self, first: int) -> list[int]:
        largest = min(first, self.router.num_clusters)
        return self.budgets[largest - 1].tolist() if self.schedule == "fitted" else [largest]

    def with_budget(self, max_clusters: int) -> "RouterShortlist":
        """The same policy with another `max_clusters`."""
        settings = {**self.settings(), "max_clusters": max_clusters}
        return RouterShortlist(self.router, ranking=self.ranking, budgets=self.budgets, **settings)

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {"ranking": self.ranking, "budgets": self.budgets}
        return self.router.tensors() | {name: tensor for name, tensor in own.items() if tensor is not None}

    @classmethod
    def _require_stored(cls, settings: Mapping[str, Any], router: Router, tensors: Mapping[str, torch.Tensor]) -> None:
        _require_budgets(settings.get("schedule", "fixed"), router, tensors.get("budgets"))


_DEFAULTS = {"max_clusters": 64, "schedule": "dynaspec", "mass": 1.0, "pinned": 0, "packed": True}


def _require_budgets(schedule: str, router: Router, budgets: Any) -> None:
    if budgets is None:
        if schedule == "fitted":
            raise ConfigurationError(
                "the schedule 'fitted' needs budgets; `hf-dynspec train router` fits and stores them"
            )
        return
    if not isinstance(budgets, torch.Tensor) or budgets.dtype not in (torch.int32, torch.int64) or budgets.dim() != 2:
        shown = described(budgets) if isinstance(budgets, torch.Tensor) else repr(budgets)
        raise ConfigurationError(f"budgets must be int32 or int64, a row for each number of clusters, got {shown}")
    count = router.num_clusters
    if budgets.shape[0] != count or not budgets.shape[1]:
        raise ConfigurationError(f"budgets must have a row for each of {count} clusters, got {described(budgets)}")
    firsts = torch.arange(1, count + 1, dtype=budgets.dtype, device=budgets.device)
    if int(budgets.min()) < 1 or int(budgets.max()) > count or not torch.equal(budgets[:, 0].cpu(), firsts):
        raise ConfigurationError(f"budgets must run from 1 to {count}, and begin with the number of their row")
