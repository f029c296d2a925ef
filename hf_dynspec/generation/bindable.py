"""What may be passed as `assistant_model`, as the rest of this room sees it."""

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
from .target import TargetForward

HOW_TO_BIND = "pass target=… to DynSpecAssistant, or call assistant.bind(target), before target.generate(…)"


class Bindable(ABC):
    """What may be passed as `assistant_model` to a target that it is bound to."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} belongs to models in this process and cannot be pickled: load the models in the "
            "other process and make an assistant of them there."
        )

    @property
    @abstractmethod
    def target(self) -> PreTrainedModel | None:
        """The model that this is bound to."""

    @property
    def owner(self) -> "Bindable":
        """What has to be bound for this to be accepted: itself, or the assistant that it belongs to."""
        return self

    @abstractmethod
    def open_call(self) -> AbstractContextManager[Any]:
        """Set up one `generate_call.GenerateCall`, and tidy up after it."""

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


class Assistant(Bindable):
    """A bound assistant as its calls and conversations see it.

    Attributes:
        generation_config: the settings of drafting, which may be assigned between calls.
        policy: how shortlists are made.
        drafter: what drafts.
        tree: the shape of the trees to draft, or None for chains.
        tokenizer: the tokenizer of both models, None where it is not known.
        stats: counts of the last call.
        profile: measure where the time goes.
        measure_coverage: measure the target's probability mass on the shortlists.
        validate: check every shortlist of the policy.
        alignment: aligns the drafter with what calls leave, None where nothing does.
        choosers: what automatic drafting has learned.
    """

    generation_config: GenerationConfig
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
        """What runs the bound target."""

    @abstractmethod
    def require_rows(self) -> None:
        """Make sure that both models still score all tokens in use. Raises UnsupportedError if they were resized to
        fewer."""

    @abstractmethod
    def scored_eos_token_ids(self, generation_config: GenerationConfig) -> tuple[int, ...]:
        """Return the EOS ids of a call that the drafter can score, without repeats."""

    @abstractmethod
    def take_session(self, eos_token_ids: tuple[int, ...]) -> DraftSession:
        """Return an idle session for these EOS ids, or a new one."""

    @abstractmethod
    def resume_session(self, session: DraftSession, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether a conversation's session can go on: it is one of this assistant as it is now, for these EOS ids.
        Otherwise it is given up."""

    @abstractmethod
    def hold_session(self, session: DraftSession) -> None:
        """Let a conversation keep a session until its next call."""

    @abstractmethod
    def return_session(self, session: DraftSession) -> None:
        """Keep a session for the next call, with its buffers."""

    @abstractmethod
    def publish(self, stats: DraftingStatistics) -> None:
        """Make the counts of a finished call the last ones and add them to the total."""
