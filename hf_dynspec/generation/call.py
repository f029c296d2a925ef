"""What may be passed as `assistant_model`, as the rest of this room sees it."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..errors import NotBoundError
from .round import Drafting

HOW_TO_BIND = "pass target=… to DynSpecAssistant, or call assistant.bind(target), before target.generate(…)"


class Call(ABC):
    """One `generate` call of a bound assistant."""

    @abstractmethod
    def drafting(
        self,
        *,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ) -> Drafting:
        """Return the object that drafts, given the decoding loop's own arguments."""


class Bindable(ABC):
    """What may be passed as `assistant_model` to a target that it is bound to."""

    @property
    @abstractmethod
    def target(self) -> PreTrainedModel | None:
        """The model that this is bound to."""

    @property
    def owner(self) -> "Bindable":
        """What has to be bound for this to be accepted: itself, or the assistant that it belongs to."""
        return self

    @abstractmethod
    def open_call(self) -> AbstractContextManager[Call]:
        """Set up one `generate` call, and tidy up after it."""

    @property
    def config(self) -> Any:
        """The bound target's configuration: transformers compares vocabulary sizes through it, and they agree here.

        Raises:
            NotBoundError: the assistant is not bound to any model.
        """
        target = self.target
        if target is None:
            raise NotBoundError(f"this assistant is not bound to a model: {HOW_TO_BIND}.")
        return target.config

    @property
    def device(self) -> torch.device:
        """Raises NotBoundError: only a model that this assistant is not bound to asks for it."""
        raise NotBoundError(f"this assistant is bound to another model than the one that generates: {HOW_TO_BIND}.")
