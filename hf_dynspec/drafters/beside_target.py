"""The base of drafters that are models of transformers and draft from a target's own states and weights."""

import operator
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import NotBoundError, UnsupportedError
from ..modeling.head import DynamicLMHead
from .base import Drafter, UnrolledStep
from .weights_watch import WeightsWatch


class BesideTarget(Drafter):
    """A model that was trained for one target. It drafts chains, and is not trained here.

    Args:
        model: the drafter's model, as transformers loads it.
        target: the model that it drafts for (None: not known yet; `for_target` makes a twin beside one).

    Attributes:
        model: as given.
        why_no_trees: the end of a sentence that begins with the model's class.

    Raises:
        ArtifactError: the model was made for a target of another size.
        UnsupportedError: the target is of another family or has too few layers, or one of the two cannot be used.
    """

    why_no_trees: ClassVar[str]

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel | None = None):
        self.model = model
        self._lock = threading.RLock()
        self._version = 0
        self._target = None if target is None else weakref.ref(target)
        if target is not None:
            self.require_target(target)
            self.reads = self._reads_of(target)
            self._load_head()

    @classmethod
    @abstractmethod
    def is_kind_of(cls, config: PreTrainedConfig) -> bool:
        """Whether a model with this configuration is one of this kind."""

    @abstractmethod
    def _reads_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """See `Drafter.reads`."""

    @abstractmethod
    def _make_head(self) -> DynamicLMHead:
        """The output projection."""

    @abstractmethod
    def _head_parts(self) -> Sequence[nn.Module]:
        """The modules that the output projection is made of."""

    def for_target(self, target: PreTrainedModel) -> "BesideTarget":
        if self._target is None or self._target() is not target:
            return type(self)(self.model, target)
        self.require_target(target)
        return self

    @property
    def target(self) -> PreTrainedModel:
        """The target.

        Raises:
            NotBoundError: it is not known yet, or gone.
        """
        target = None if self._target is None else self._target()
        if target is None:
            raise self._unbound()
        return target

    def _unbound(self) -> NotBoundError:
        return NotBoundError(
            f"a {type(self.model).__name__} drafts beside its target alone: pass target=… to DynSpecAssistant, or "
            "call assistant.bind(target)."
        )

    @property
    def module(self) -> PreTrainedModel:
        """The model."""
        return self.model

    @property
    def head(self) -> DynamicLMHead:
        """The output projection. Raises NotBoundError if the target is not known yet."""
        if self._target is None:
            raise self._unbound()
        return self._head

    @property
    def weights_version(self) -> int:
        with self._lock:
            # After the target is gone, its last weights are used.
            if self._target is not None and self._target() is not None and self._has_changed():
                self._load_head()
            return self._version

    def _has_changed(self) -> bool:
        parts = (self.model, *self._head_parts())
        is_same = len(parts) == len(self._watches) and all(
            map(operator.is_, parts, (watch.module for watch in self._watches))
        )
        return not is_same or any(watch.has_changed() for watch in self._watches)

    def _load_head(self) -> None:
        # If there is an error here, the next round tries again.
        self._watches: list[WeightsWatch] = []
        self._head = self._make_head()
        of_head = [WeightsWatch(one, samples=True) for one in self._head_parts()]
        self._watches = [WeightsWatch(self.model), *of_head]
        self._version += 1

    def require_trees(self) -> None:
        raise UnsupportedError(f"{type(self.model).__name__} {self.why_no_trees}. Draft chains with tree=False.")

    def copy(self) -> "BesideTarget":
        raise UnsupportedError(f"{type(self.model).__name__} cannot be trained or aligned here. {_OTHERS}")

    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        raise UnsupportedError(f"{type(self.model).__name__} cannot be unrolled along a text. {_OTHERS}")


_OTHERS = "Use an independent drafter or an EAGLE head for that."
