"""The interfaces of assistants: what may be passed as `assistant_model`."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..alignment.aligner import Aligner
from ..drafters import Drafter
from ..drafting.automatic import ChooserPool
from ..drafting.session import DraftSession
from ..errors import NotBoundError, UnsupportedError
from ..shortlists import ShortlistPolicy
from ..stats import DraftingStatistics
from ..tree_config import TreeConfig
from .sessions import Lane
from .target import TargetForward

HOW_TO_BIND = "pass target=… to DynSpecAssistant, or call assistant.bind(target), before target.generate(…)"


class Bindable(ABC):
    """An `assistant_model` for the target that it is bound to."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} belongs to models in this process and cannot be pickled: load the models in the "
            "other process and make an assistant of them there."
        )

    @property
    @abstractmethod
    def target(self) -> PreTrainedModel | None:
        """The bound target, or None."""

    @property
    def owner(self) -> "Bindable":
        """The object that must be bound: this one, or the assistant that it belongs to."""
        return self

    @abstractmethod
    def open_call(self) -> AbstractContextManager[Any]:
        """A context with one `generate_call.GenerateCall`."""

    @property
    def config(self) -> Any:
        """The bound target's configuration, by which transformers compares vocabulary sizes.

        Raises:
            NotBoundError: the assistant is not bound to any model.
        """
        target = self.target
        if target is None:
            raise NotBoundError(f"this assistant is not bound to a model: {HOW_TO_BIND}.")
        return target.config

    @property
    def device(self) -> torch.device:
        """Raises NotBoundError, as only a model that this is not bound to asks for it."""
        raise NotBoundError(f"this assistant is bound to another model than the one that generates: {HOW_TO_BIND}.")


class Assistant(Bindable):
    """An assistant as its calls and conversations use it.

    Attributes:
        generation_config: the settings of drafting, which may be assigned between calls.
        defaults: those that nobody gave the assistant, with the values that they had at first.
        policy: makes the shortlists.
        drafter: the drafter.
        tree: the shape of the trees to draft, or None for chains.
        tokenizer: the tokenizer of both models, or None if it is not known.
        stats: counts of the last call.
        profile: measure the time of each section.
        measure_coverage: measure the target's probability mass on the shortlists.
        validate: check every shortlist of the policy.
        alignment: aligns the drafter with the target, or None.
        choosers: what automatic drafting has learned.
    """

    generation_config: GenerationConfig
    defaults: dict[str, Any]
    policy: ShortlistPolicy
    drafter: Drafter
    tree: TreeConfig | None
    tokenizer: Any
    stats: DraftingStatistics
    profile: bool
    measure_coverage: bool
    validate: bool
    alignment: Aligner | None
    choosers: ChooserPool

    @property
    @abstractmethod
    def forward(self) -> TargetForward:
        """Runs the bound target."""

    @abstractmethod
    def require_rows(self) -> None:
        """Check that both models still score all tokens in use. Raises UnsupportedError if they were resized to
        fewer."""

    @abstractmethod
    def scored_eos_token_ids(self, generation_config: GenerationConfig) -> tuple[int, ...]:
        """Return the EOS ids of a call that the drafter can score, without repeats."""

    @abstractmethod
    def take_session(self, eos_token_ids: tuple[int, ...]) -> DraftSession:
        """Return an idle session for these EOS ids, or a new one."""

    @abstractmethod
    def resume_session(self, session: DraftSession, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether a conversation's session can go on, with these EOS ids and the assistant's present drafter and
        policy. Otherwise it is closed."""

    @abstractmethod
    def hold_session(self, session: DraftSession) -> None:
        """Let a conversation keep a session until its next call."""

    @abstractmethod
    def return_session(self, session: DraftSession) -> None:
        """Keep a session for the next call, with its buffers."""

    @abstractmethod
    def take_lane(self, key: Any) -> Lane | None:
        """Return an idle lane that was returned with this key, if the models are as they were then."""

    @abstractmethod
    def return_lane(self, key: Any, lane: Lane) -> None:
        """Keep a lane for the next call like it."""

    @abstractmethod
    def publish(self, stats: DraftingStatistics) -> None:
        """Publish the counts of a finished call, and add them to the total."""
