"""The state of policies that choose clusters by a router."""

from collections.abc import Callable

import torch
from torch.nn import functional

from ...protocol import BlockShortlist, Shortlist
from ..base import ShortlistState
from .layout import ClusterLayout
from .network import Router


class RouterState(ShortlistState):
    """Chooses clusters by the scores of the present draft step. Several tokens, as in a tree, count by their maximum.

    `budget` returns the most clusters at a draft step, and `mass` is the share of the router's probability at which to
    stop. If `packed`, shortlists are whole blocks of the layout, otherwise single slots.
    """

    carried = ()

    def __init__(
        self,
        router: Router,
        layout: ClusterLayout,
        device: torch.device,
        *,
        budget: Callable[[int], int],
        mass: float,
        packed: bool,
    ):
        # Logits of a softmax are only comparable with those of the same hidden state.
        self._is_softmax = not router.looks_ahead and router.centroids is None
        self._layout = layout
        self._budget = budget
        self._mass = mass
        # bool [M + 1]: a choice of no cluster. The pinned tokens, which count as one more, are on every shortlist.
        self._none_chosen = functional.pad(torch.zeros_like(layout.is_empty), (0, 1), value=True)
        self.layout = layout.blocks if packed else None
        self._version = 0
        self._use(router.to(device))
        # The router runs beside the drafter's layers, and `select` makes the drafter's stream wait for it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and router.looks_ahead else None

    def _use(self, router: Router) -> None:
        """Score clusters by this router, which lies on the state's device."""
        # Empty clusters would waste the budget, and alone give an empty shortlist.
        self._router = router.without(self._layout.is_empty)
        self._scores: torch.Tensor | None = None
        self._features: torch.Tensor | None = None
        # The last shortlist and its budget; None after new scores.
        self._shown: tuple[int, Shortlist] | None = None

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        if not self._router.looks_ahead:
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
        if not self._router.looks_ahead and features is not self._features:
            self._features = features
            self._take(self._router.scores_of_hidden(features))
        if self._scores is None:
            raise RuntimeError("observe_draft_inputs() must be called before select()")
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            self._scores.record_stream(current)
        budget = self._budget(depth)
        if self._shown is None or self._shown[0] != budget:
            self._shown = budget, self._shortlist(budget)
        return self._shown[1]

    def _take(self, scores: torch.Tensor) -> None:
        if self._is_softmax and scores.shape[0] > 1:
            scores = scores.log_softmax(-1)
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
        if self._mass == 1:
            return self._none_chosen.index_fill(0, best.indices, True)
        # A cluster is chosen if the better ones do not reach the share yet.
        probabilities = best.values.sigmoid()
        before = probabilities.cumsum(0) - probabilities
        is_chosen = before < self._mass * self._scores.sigmoid().sum()
        return self._none_chosen.index_copy(0, best.indices, is_chosen)
