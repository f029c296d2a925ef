"""The drafter's own dynamic vocabulary: the clusters that it was trained to choose its tokens from.

Gemma-4 assistants have one (transformers, `Gemma4AssistantMaskedEmbedder`): centroids of clusters of equal size, which
are scored by their products with the hidden state, and the tokens of the best clusters, which alone get logits.
"""

import threading
from typing import ClassVar

import torch

from ..fields import Switch, WholeNumber
from ..protocol import Needs, OwnClusters, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState
from .full import FixedState, FullShortlist
from .router.layout import ClusterLayout, is_same_vocabulary, lay_out
from .router.network import MOST_CLUSTERS, Router
from .router.state import RouterState


class NativeShortlist(ShortlistPolicy):
    """The tokens of the clusters that the drafter itself finds best for the hidden state of the draft step, and EOS.
    For a drafter without clusters of its own, all tokens, as `FullShortlist`.

    Args:
        top_clusters: clusters that are scored at each draft step (None: as many as the drafter was trained with).
        packed: hold a copy of the head's rows in blocks, one after another by cluster, so that no single row is
            gathered (default True). The copy takes the memory of the head.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """

    name = "native"
    setting_rules: ClassVar = {"top_clusters": WholeNumber(1, MOST_CLUSTERS, optional=True), "packed": Switch()}
    card_summary = (
        "At each draft step the drafter's own layer chooses the clusters of tokens that are scored, as it was trained "
        "to (Gemma 4's assistants); all tokens for a drafter without such a layer."
    )

    def __init__(self, top_clusters: int | None = None, packed: bool = True):
        self.top_clusters, self.packed = top_clusters, packed
        self.require_settings(self.settings())
        self._lock = threading.Lock()
        self._last: tuple[VocabularyInfo, OwnClusters, ClusterLayout] | None = None

    @property
    def needs(self) -> Needs:
        return Needs(drafter_rows=True)

    def start(self, vocabulary: VocabularyInfo) -> ShortlistState:
        """Begin a session over `vocabulary`, which must have the drafter's rows.

        Raises:
            ConfigurationError: the drafter's clusters are those of a smaller vocabulary.
        """
        clusters = vocabulary.drafter_rows.clusters
        if clusters is None:
            return _WholeVocabulary(FullShortlist().start(vocabulary).settle())
        return NativeState(self, vocabulary, clusters)

    def layout_for(self, vocabulary: VocabularyInfo, clusters: OwnClusters) -> ClusterLayout:
        """The blocks of a vocabulary. Sessions share them, and so the head's packed rows."""
        with self._lock:
            last = self._last
            is_known = last is not None and torch.equal(last[1].of_tokens, clusters.of_tokens)
            if not is_known or not is_same_vocabulary(last[0], vocabulary):
                none = torch.empty(0, dtype=torch.int64, device="cpu")
                self._last = (vocabulary, clusters, lay_out(_router_of(clusters), none, vocabulary))
            return self._last[2]


class NativeState(RouterState):
    """Chooses clusters by the drafter's own centroids. Several hidden states share the best clusters of any of them.

    Args:
        policy: has the settings.
        vocabulary: the tokens to choose from.
        clusters: the drafter's own.
    """

    def __init__(self, policy: NativeShortlist, vocabulary: VocabularyInfo, clusters: OwnClusters):
        top = min(policy.top_clusters or clusters.chosen, clusters.centroids.shape[0])
        super().__init__(
            _router_of(clusters),
            policy.layout_for(vocabulary, clusters),
            vocabulary.device,
            budget=lambda depth: top,
            mass=1.0,
            packed=policy.packed,
        )
        self._device = vocabulary.device

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        self._use(_router_of(vocabulary.drafter_rows.clusters).to(self._device))


class _WholeVocabulary(FixedState):
    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        """All tokens whatever the weights are."""


def _router_of(clusters: OwnClusters) -> Router:
    return Router(clusters.of_tokens, centroids=clusters.centroids)
