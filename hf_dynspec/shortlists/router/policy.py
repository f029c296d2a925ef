"""DynaSpec: the vocabulary in clusters, a router that chooses among them, and a budget that shrinks with depth.

Paper: DynaSpec (Zhang et al., 2025), section 4.2.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from ...devices import is_free_to_look
from ...errors import ArtifactError, ConfigurationError
from ...protocol import BlockLayout, BlockShortlist, Needs, Shortlist, VocabularyInfo
from ..base import OneOf, Share, ShortlistPolicy, ShortlistState, Switch, WholeNumber
from ..frequency import as_ranking

if TYPE_CHECKING:
    from ...vocabulary import TokenizerFingerprint

# How many clusters are chosen at later draft steps, see `RouterShortlist`.
SCHEDULES = ("fitted", "dynaspec", "fixed")
# Rows of a block: enough for the matrix units of GPUs, and few enough that the last blocks of clusters waste little.
BLOCK_ROWS = 16


def position_aware_clusters(largest: int, depth: int) -> int:
    """Clusters chosen at draft step `depth` (DynaSpec, section 4.2): `largest` at 0 and 1, then
    `⌊largest / (2 · (depth + 1))⌋`, never fewer than one."""
    return largest if depth <= 1 else max(1, largest // (2 * (depth + 1)))


@dataclass(frozen=True, eq=False)
class Router:
    """Token clusters and what chooses among them: a small network, or the clusters' centroids. Immutable.

    The network (DynaSpec, section 4.2, "Low-cost router") sees what a draft step starts from, so that it can run
    beside the drafter's layers: `scores = W₂ · silu(W₁ · [e, f] + b₁) + b₂`, where `e` is the embedding of the newest
    token and `f` the drafter's feature before it, both divided by their root mean square. Centroids need no training:
    the scores are the products of the drafter's hidden state with them, as if each cluster were one token.

    Args:
        clusters: int32 or int64 `[V]`: the cluster of each token id. Every cluster below the largest has a token.
        centroids: `[M, d]`, one for each cluster, in the space of the drafter's hidden states.
        input_weight: `[h, 2 · d]`: `W₁`; likewise the next three.
        input_bias: `[h]`.
        output_weight: `[M, h]`.
        output_bias: `[M]`.

    Raises:
        ConfigurationError: shapes that do not fit each other, or neither a network nor centroids.
    """

    clusters: torch.Tensor
    centroids: torch.Tensor | None = None
    input_weight: torch.Tensor | None = None
    input_bias: torch.Tensor | None = None
    output_weight: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None

    def __post_init__(self):
        clusters = self.clusters
        if clusters.dim() != 1 or not clusters.numel() or clusters.dtype not in (torch.int32, torch.int64):
            raise ConfigurationError(
                f"clusters must be int32 or int64, one for each token id, got {_described(clusters)}"
            )
        # Looked at first, as a count is taken up to the largest number.
        is_in_range = int(clusters.min()) >= 0 and int(clusters.max()) < clusters.numel()
        sizes = torch.bincount(clusters) if is_in_range else torch.zeros(1)
        if not bool((sizes > 0).all()):
            raise ConfigurationError("clusters must be numbered from 0 without gaps, so that each of them has a token")
        self._require_shapes(sizes.shape[0])

    def _require_shapes(self, count: int) -> None:
        network = [getattr(self, name) for name in NETWORK_TENSORS]
        if self.centroids is None and any(one is None for one in network):
            raise ConfigurationError(f"a router needs centroids, or all of {', '.join(NETWORK_TENSORS)}")
        if self.centroids is not None:
            if any(one is not None for one in network):
                raise ConfigurationError("a router has centroids or a network, not both")
            wanted = {"centroids": (count, _columns(self.centroids))}
        else:
            hidden, inputs = _columns(self.output_weight), _columns(self.input_weight)
            wanted = dict(zip(NETWORK_TENSORS, ((hidden, inputs), (hidden,), (count, hidden), (count,)), strict=True))
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                raise ConfigurationError(f"{name} must be floating-point {list(shape)}, got {_described(tensor)}")
        if self.centroids is None and inputs % 2:
            raise ConfigurationError(f"input_weight must have an even number of columns, got {inputs}")

    @property
    def num_clusters(self) -> int:
        """How many clusters there are, `M`."""
        return (self.output_weight if self.centroids is None else self.centroids).shape[0]

    @property
    def reads(self) -> int:
        """Width `d` of what the router reads."""
        return self.input_weight.shape[1] // 2 if self.centroids is None else self.centroids.shape[1]

    def scores(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The network's logits `[m, M]` for embeddings `[m, d]` and features `[m, d]`."""
        return network_scores(embeddings, features, *(getattr(self, name) for name in NETWORK_TENSORS))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the router's tensors that it has."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device) -> "Router":
        """The same router in fp32 on a device; the clusters stay where they are."""
        moved = {
            name: tensor.to(device=device, dtype=torch.float32)
            for name, tensor in self.tensors().items()
            if name != "clusters"
        }
        return replace(self, **moved)


NETWORK_TENSORS = ("input_weight", "input_bias", "output_weight", "output_bias")


def network_scores(
    embeddings: torch.Tensor,
    features: torch.Tensor,
    input_weight: torch.Tensor,
    input_bias: torch.Tensor,
    output_weight: torch.Tensor,
    output_bias: torch.Tensor,
) -> torch.Tensor:
    """fp32 `[m, M]`: the logits of a router's network, see `Router`."""
    # Divided by their root mean square, embeddings and features weigh the same.
    read = torch.stack([embeddings, features], dim=-2).float()
    read = functional.rms_norm(read, read.shape[-1:]).flatten(-2)
    hidden = functional.silu(functional.linear(read, input_weight, input_bias))
    return functional.linear(hidden, output_weight, output_bias)


class RouterShortlist(ShortlistPolicy):
    """The clusters that a router finds likely in the context, and tokens that are always there.

    Args:
        router: a `Router`, or the artifact (folder or Hub repository) that `hf-dynspec train router` or
            `hf-dynspec build clusters` wrote. What is not given below is then as it was stored.
        max_clusters: how many clusters are chosen at the first draft step (default 64).
        schedule: how many at later ones: `"fitted"`, as `budgets` says (default, where there are any), `"dynaspec"`,
            by `position_aware_clusters` (default otherwise), or `"fixed"`, always as many.
        mass: choose no more clusters than reach this share of the router's probability over all clusters (default 1:
            always as many as the budget allows). For trained routers.
        ranking: token ids, most frequent first.
        pinned: how many tokens of the ranking are on every shortlist (default 0). A router is trained to leave out
            those that were pinned then, so keep them.
        packed: hold the head's rows once more, cluster by cluster in blocks, so that no row is gathered by itself
            (default True). It takes as much memory as the head, and up to a tenth more for clusters that do not fill
            their last block.
        budgets: int32 or int64 `[M, D]`: row `k - 1` says how many clusters to choose at each draft step where `k` are
            chosen at the first; the last column holds for all later steps. `hf-dynspec train router` fits them, see
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
        self.tokenizer: TokenizerFingerprint | None = None
        settings = {**_DEFAULTS, "schedule": "dynaspec" if budgets is None else "fitted"}
        if isinstance(router, (str, os.PathLike)):
            router, stored, stored_settings, self.tokenizer = _read_router(router)
            ranking = stored.get("ranking") if ranking is None else ranking
            budgets = stored.get("budgets") if budgets is None else budgets
            settings |= stored_settings
        if not isinstance(router, Router):
            raise ConfigurationError(f"router must be a Router or the name of an artifact, got {router!r}")
        given = {
            "max_clusters": max_clusters,
            "schedule": schedule,
            "mass": mass,
            "pinned": pinned,
            "packed": packed,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        self.require_settings(settings)
        _require_fit(settings, router, ranking)
        _require_budgets(settings["schedule"], router, budgets)
        self.router = router
        self.ranking = None if ranking is None else as_ranking(ranking)
        self.max_clusters: int = settings["max_clusters"]
        self.schedule: str = settings["schedule"]
        self.mass: float = settings["mass"]
        self.pinned: int = settings["pinned"]
        self.packed: bool = settings["packed"]
        self.budgets = budgets
        self._budgets = self._budgets_by_depth(self.max_clusters)
        self._lock = threading.Lock()
        self._last_layout: tuple[VocabularyInfo, _Layout] | None = None

    @property
    def tokenizer_fingerprints(self) -> tuple["TokenizerFingerprint", ...]:
        return () if self.tokenizer is None else (self.tokenizer,)

    @property
    def needs(self) -> Needs:
        return Needs(draft_inputs=self.router.centroids is None)

    def budget(self, depth: int, first: int | None = None) -> int:
        """The most clusters that are chosen at draft step `depth`, where `first` (None: `max_clusters`) are at the
        first step."""
        budgets = self._budgets if first is None else self._budgets_by_depth(first)
        if self.schedule == "dynaspec":
            return position_aware_clusters(budgets[0], depth)
        return budgets[min(depth, len(budgets) - 1)]

    def _budgets_by_depth(self, first: int) -> list[int]:
        """The budgets of the first draft steps."""
        largest = min(first, self.router.num_clusters)
        return self.budgets[largest - 1].tolist() if self.schedule == "fitted" else [largest]

    def with_budget(self, max_clusters: int) -> "RouterShortlist":
        """The same policy with another `max_clusters`."""
        settings = {**self.settings(), "max_clusters": max_clusters}
        return RouterShortlist(self.router, ranking=self.ranking, budgets=self.budgets, **settings)

    def start(self, vocabulary: VocabularyInfo) -> "RouterState":
        """Begin a session over `vocabulary`.

        Raises:
            ConfigurationError: the router was made for another drafter or vocabulary.
        """
        if vocabulary.width not in (None, self.router.reads):
            raise ConfigurationError(
                f"the router reads hidden states of {self.router.reads} numbers, and the drafter's have "
                f"{vocabulary.width}. Load the router that was trained for this drafter."
            )
        return RouterState(self, self._layout(vocabulary), vocabulary.device)

    def _layout(self, vocabulary: VocabularyInfo) -> "_Layout":
        """The blocks for a vocabulary. Sessions share them, and with them the head's packed rows."""
        with self._lock:
            if self._last_layout is None or not _is_same(self._last_layout[0], vocabulary):
                self._last_layout = (vocabulary, _lay_out(self, vocabulary))
            return self._last_layout[1]

    def settings(self) -> dict[str, Any]:
        return {
            "max_clusters": self.max_clusters,
            "schedule": self.schedule,
            "mass": self.mass,
            "pinned": self.pinned,
            "packed": self.packed,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {"ranking": self.ranking, "budgets": self.budgets}
        return self.router.tensors() | {name: tensor for name, tensor in own.items() if tensor is not None}

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        known = {one.name for one in fields(Router)}
        own = {name: tensor for name, tensor in tensors.items() if name in known}
        if "clusters" not in own:
            raise ConfigurationError("the policy 'router' cannot be built without its clusters")
        rest = {name: tensor for name, tensor in tensors.items() if name not in known}
        return {"router": Router(**own), **rest}


_DEFAULTS = {"max_clusters": 64, "schedule": "dynaspec", "mass": 1.0, "pinned": 0, "packed": True}


def _require_fit(settings: Mapping[str, Any], router: Router, ranking: Any) -> None:
    """Refuse settings that do not fit the router or the ranking."""
    if settings["mass"] < 1 and router.centroids is not None:
        raise ConfigurationError("mass needs a trained router; centroids give no probabilities")
    if settings["pinned"] and ranking is None:
        raise ConfigurationError("pinned tokens need a ranking")


def _require_budgets(schedule: str, router: Router, budgets: Any) -> None:
    """Refuse budgets that are missing, or are none for the router's clusters."""
    if budgets is None:
        if schedule == "fitted":
            raise ConfigurationError(
                "the schedule 'fitted' needs budgets; `hf-dynspec train router` fits and stores them"
            )
        return
    if not isinstance(budgets, torch.Tensor) or budgets.dtype not in (torch.int32, torch.int64) or budgets.dim() != 2:
        shown = _described(budgets) if isinstance(budgets, torch.Tensor) else repr(budgets)
        raise ConfigurationError(f"budgets must be int32 or int64, a row for each number of clusters, got {shown}")
    count = router.num_clusters
    if budgets.shape[0] != count or not budgets.shape[1]:
        raise ConfigurationError(f"budgets must have a row for each of {count} clusters, got {_described(budgets)}")
    firsts = torch.arange(1, count + 1, dtype=budgets.dtype)
    if int(budgets.min()) < 1 or int(budgets.max()) > count or not torch.equal(budgets[:, 0].cpu(), firsts):
        raise ConfigurationError(f"budgets must run from 1 to {count}, and begin with the number of their row")


class RouterState(ShortlistState):
    """Chooses clusters from the scores of the newest draft step; several tokens, as in a tree, share their best."""

    def __init__(self, policy: RouterShortlist, layout: "_Layout", device: torch.device):
        self._policy = policy
        self._router = policy.router.to(device)
        self._layout = layout
        # Clusters without a token of their own would waste the budget, and leave nothing where they are all that is
        # chosen.
        no_bar = torch.zeros_like(layout.is_empty, dtype=torch.float32)
        self._barred = no_bar.masked_fill(layout.is_empty, -torch.inf)
        if self._router.centroids is None:
            self._router = replace(self._router, output_bias=self._router.output_bias + self._barred)
        # bool [M + 1]: a choice of no cluster. The pinned tokens, which count as one more, are on every shortlist.
        self._none_chosen = functional.pad(torch.zeros_like(layout.is_empty), (0, 1), value=True)
        self.layout = layout.blocks if policy.packed else None
        self._scores: torch.Tensor | None = None
        self._features: torch.Tensor | None = None
        # What was shown last, and with which budget; None after new scores.
        self._shown: tuple[int, Shortlist] | None = None
        self._version = 0
        # The router works beside the drafter's layers, and `select` waits for it there.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and policy.needs.draft_inputs else None

    def foresee(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        if self._router.centroids is not None:
            return
        if self._stream is None:
            self._take(self._router.scores(embeddings, features))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._take(self._router.scores(embeddings, features))
        for tensor in (embeddings, features):
            tensor.record_stream(self._stream)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        if self._router.centroids is not None and features is not self._features:
            self._features = features
            self._take(functional.linear(features.float(), self._router.centroids, self._barred))
        if self._scores is None:
            raise RuntimeError("foresee() tells the router what a draft step starts from before select() is called")
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            self._scores.record_stream(current)
        budget = self._policy.budget(depth)
        if self._shown is None or self._shown[0] != budget:
            self._shown = budget, self._shortlist(budget)
        return self._shown[1]

    def _take(self, scores: torch.Tensor) -> None:
        """Take in new scores `[m, M]`."""
        self._scores = scores.amax(0)
        self._shown = None

    def _shortlist(self, budget: int) -> Shortlist:
        self._version += 1
        blocks = self._layout.blocks_of(self._chosen(budget), budget)
        shortlist = BlockShortlist(blocks, self._layout.blocks, self._version)
        if self.layout is not None:
            return shortlist
        return Shortlist(shortlist.slots, self._version, occupied=shortlist.occupied, is_transient=True)

    def _chosen(self, budget: int) -> torch.Tensor:
        """bool `[M + 1]`: the clusters on the shortlist, and the pinned tokens."""
        best = self._scores.topk(budget)
        if self._policy.mass == 1:
            return self._none_chosen.index_fill(0, best.indices, True)
        # A cluster is chosen where those before it do not reach the share yet.
        probabilities = best.values.sigmoid()
        before = probabilities.cumsum(0) - probabilities
        is_chosen = before < self._policy.mass * self._scores.sigmoid().sum()
        return self._none_chosen.index_copy(0, best.indices, is_chosen)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The vocabulary in blocks, cluster by cluster.

    Args:
        blocks: token ids by block.
        cluster_of: int64 `[B]`: the cluster of each block; `M` for those of the pinned tokens.
        most_blocks: entry `k` is the number of blocks of the pinned tokens and the `k` largest clusters.
        is_empty: bool `[M]`: clusters whose tokens are all pinned, or cannot be drafted.
    """

    blocks: BlockLayout
    cluster_of: torch.Tensor
    most_blocks: tuple[int, ...]
    is_empty: torch.Tensor

    def blocks_of(self, chosen: torch.Tensor, budget: int) -> torch.Tensor:
        """int64 `[n]`: the blocks of chosen clusters, bool `[M + 1]`, at most `budget` of them. Off the CPU, where the
        number of blocks would be waited for, see `fixed_blocks_of`."""
        if not is_free_to_look(chosen.device):
            return self.fixed_blocks_of(chosen, budget)
        return chosen.index_select(0, self.cluster_of).nonzero().squeeze(1)

    def fixed_blocks_of(self, chosen: torch.Tensor, budget: int) -> torch.Tensor:
        """The same with as many places as there can be blocks, and −1 where there is none."""
        is_wanted = chosen.index_select(0, self.cluster_of)
        capacity = self.most_blocks[budget]
        place = torch.where(is_wanted, is_wanted.cumsum(0) - 1, capacity)
        blocks = torch.full((capacity + 1,), -1, dtype=torch.int64, device=is_wanted.device)
        blocks.scatter_(0, place, torch.arange(is_wanted.shape[0], device=is_wanted.device))
        return blocks[:capacity]


def _lay_out(policy: RouterShortlist, vocabulary: VocabularyInfo) -> _Layout:
    """Lay out the draftable tokens of a vocabulary: the pinned ones and EOS first, then the clusters.

    Raises:
        ConfigurationError: the clusters are those of a smaller vocabulary.
    """
    clusters = policy.router.clusters.to(torch.int64)
    if clusters.shape[0] < vocabulary.size:
        raise ConfigurationError(
            f"the router's clusters are of {clusters.shape[0]} tokens, and the vocabulary has {vocabulary.size}. "
            "Build them for this target."
        )
    count = policy.router.num_clusters
    group = clusters[: vocabulary.size].clone()
    if policy.pinned:
        ranking = policy.ranking[policy.ranking < vocabulary.size]
        group[ranking[: policy.pinned]] = count
    group[list(vocabulary.eos_token_ids)] = count
    token_ids = torch.arange(vocabulary.size)
    can_draft = vocabulary.can_draft(token_ids.to(vocabulary.device)).cpu()
    token_ids, group = token_ids[can_draft], group[can_draft]
    # Pinned tokens first: their blocks are on every shortlist.
    group, order = torch.sort((group + 1) % (count + 1), stable=True)
    sizes = torch.bincount(group, minlength=count + 1)
    block_counts = (sizes + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_row = (block_counts.cumsum(0) - block_counts) * BLOCK_ROWS
    rank = torch.arange(group.shape[0]) - (sizes.cumsum(0) - sizes)[group]
    rows = torch.zeros(int(block_counts.sum()) * BLOCK_ROWS, dtype=torch.int64)
    is_token = torch.zeros(rows.shape, dtype=torch.bool)
    rows[first_row[group] + rank] = token_ids[order]
    is_token[first_row[group] + rank] = True
    # A slot without a token holds some valid id.
    rows = torch.where(is_token, rows, token_ids[0]).view(-1, BLOCK_ROWS)
    largest_first = block_counts[1:].sort(descending=True).values.cumsum(0)
    pinned_blocks = int(block_counts[0])
    device = vocabulary.device
    return _Layout(
        BlockLayout(rows.to(device), is_token.view(-1, BLOCK_ROWS).to(device), vocabulary.size),
        torch.repeat_interleave((torch.arange(count + 1) + count) % (count + 1), block_counts).to(device),
        (pinned_blocks, *(pinned_blocks + int(blocks) for blocks in largest_first)),
        (sizes[1:] == 0).to(device),
    )


def _is_same(one: VocabularyInfo, other: VocabularyInfo) -> bool:
    same = (one.size, one.eos_token_ids, one.device) == (other.size, other.eos_token_ids, other.device)
    return same and one.draftable is other.draftable


def _columns(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 0


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _read_router(
    artifact: str | os.PathLike,
) -> tuple[Router, Mapping[str, torch.Tensor], Mapping[str, Any], "TokenizerFingerprint | None"]:
    """The router of an artifact, all of its tensors, the settings it was stored with, and its tokenizer."""
    # Imported here, as only those who name an artifact need the Hub client.
    from ...artifacts import read_artifact

    config, tensors = read_artifact(artifact)
    if "clusters" not in tensors:
        raise ArtifactError("model.safetensors: clusters", "is missing", "Name an artifact that holds a router.")
    settings = config.policy.settings
    if config.policy.name != RouterShortlist.name:
        raise ArtifactError(
            "config.json: policy", f"is {config.policy.name!r}", "Name an artifact of the policy 'router'."
        )
    known = {one.name for one in fields(Router)}
    try:
        router = Router(**{name: tensor for name, tensor in tensors.items() if name in known})
        _require_budgets(settings.get("schedule", "fixed"), router, tensors.get("budgets"))
    except ConfigurationError as error:
        raise ArtifactError("model.safetensors", str(error), "Build the router again.") from error
    return router, tensors, settings, config.tokenizer
