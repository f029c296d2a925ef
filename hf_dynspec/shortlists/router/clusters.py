"""The base of policies that choose whole clusters of tokens by a router."""

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ArtifactError, ConfigurationError
from ...protocol import Needs, VocabularyInfo
from ...vocabulary import TokenizerFingerprint
from ..base import ShortlistPolicy
from ..registry import StoredPolicy, read_stored_policy
from .layout import ClusterLayout, is_same_vocabulary, lay_out
from .network import ROUTER_TENSOR_RULES, Router
from .state import RouterState


class ClusterShortlist(ShortlistPolicy):
    """The clusters that a router finds likely, and EOS.

    Args:
        router: scores the clusters.
        packed: hold a copy of the head's rows in blocks, one cluster after another, so that no single row is gathered.
        tokenizer: the tokenizer of the token ids, if it is known.

    Attributes:
        ranking: token ids, most frequent first, or None.
        pinned: the number of tokens of the ranking that are on every shortlist.
        mass: clusters are chosen up to this share of the router's probability over all of them; 1 for no such bound.
    """

    ranking: torch.Tensor | None = None
    pinned: int = 0
    mass: float = 1.0

    def __init__(self, router: Router, packed: bool, tokenizer: TokenizerFingerprint | None):
        self.router = router
        self.packed = packed
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._last_layout: tuple[VocabularyInfo, ClusterLayout] | None = None

    @abstractmethod
    def budget(self, depth: int, first: int | None = None) -> int:
        """The most clusters at draft step `depth`, with `first` (None: the policy's own setting) at the first step."""

    @abstractmethod
    def with_budget(self, first: int) -> "ClusterShortlist":
        """The same policy with another number of clusters at the first draft step."""

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        return () if self.tokenizer is None else (self.tokenizer,)

    @property
    def needs(self) -> Needs:
        return Needs(draft_inputs=self.router.looks_ahead)

    def start(self, vocabulary: VocabularyInfo) -> RouterState:
        """Begin a session over `vocabulary`.

        Raises:
            ConfigurationError: the router was made for another drafter or vocabulary.
        """
        if vocabulary.width not in (None, self.router.reads):
            raise ConfigurationError(
                f"the router reads hidden states of {self.router.reads} numbers, and the drafter's have "
                f"{vocabulary.width}. Load the router that was trained for this drafter, or clusters that were built "
                "from it."
            )
        return RouterState(
            self.router,
            self._layout(vocabulary),
            vocabulary.device,
            budget=self.budget,
            mass=self.mass,
            packed=self.packed,
        )

    def _layout(self, vocabulary: VocabularyInfo) -> ClusterLayout:
        """The blocks of a vocabulary. Sessions share them, and so the head's packed rows."""
        with self._lock:
            if self._last_layout is None or not is_same_vocabulary(self._last_layout[0], vocabulary):
                self._last_layout = (vocabulary, lay_out(self.router, self._pinned_ids(vocabulary), vocabulary))
            return self._last_layout[1]

    def _pinned_ids(self, vocabulary: VocabularyInfo) -> torch.Tensor:
        """int64 `[p]`: the ids on every shortlist."""
        if not self.pinned:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self.ranking[self.ranking < vocabulary.size][: self.pinned]

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if "clusters" not in tensors:
            raise ConfigurationError(f"the policy {cls.name!r} cannot be built without its clusters")
        rest = {name: tensor for name, tensor in tensors.items() if name not in ROUTER_TENSOR_RULES}
        return {"router": Router.from_tensors(tensors), **rest}

    @classmethod
    def _loaded(cls, router: Router | str | os.PathLike) -> tuple[Router, StoredPolicy | None]:
        """The router, and the artifact that was given in its place.

        Raises:
            ConfigurationError: it is neither.
            ArtifactError: the artifact is of another policy, or its tensors do not fit together.
        """
        if isinstance(router, Router):
            return router, None
        if not isinstance(router, str | os.PathLike):
            raise ConfigurationError(f"router must be a Router or the name of an artifact, got {router!r}")
        stored = read_stored_policy(router, tensor="clusters")
        if stored.name != cls.name:
            fix = f"Name an artifact of the policy {cls.name!r}."
            raise ArtifactError("config.json: policy", f"is {stored.name!r}", fix, str(router))
        try:
            loaded = Router.from_tensors(stored.tensors)
            cls._require_stored(stored.settings, loaded, stored.tensors)
        except ConfigurationError as error:
            raise ArtifactError("model.safetensors", str(error), "Build the router again.") from error
        return loaded, stored

    @classmethod
    def _settings(
        cls, defaults: Mapping[str, Any], stored: StoredPolicy | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The given settings that are not None, else the stored ones, else the defaults, checked."""
        settings = {**defaults, **({} if stored is None else stored.settings)}
        settings |= {name: value for name, value in given.items() if value is not None}
        cls.require_settings(settings)
        return settings

    @classmethod
    def _require_stored(cls, settings: Mapping[str, Any], router: Router, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse an artifact's other contents if they do not fit the router (`ConfigurationError`)."""
