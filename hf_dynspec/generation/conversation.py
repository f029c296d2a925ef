"""A conversation, which is passed as `assistant_model` in each of its turns."""

import copy
from contextlib import AbstractContextManager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..drafting.session import DraftSession
from ..errors import NotBoundError
from ..stats import DraftingStatistics
from .bindable import Assistant, Bindable
from .generate_call import GenerateCall


class Conversation(Bindable):
    """One conversation with an assistant: its state of a turn is there in the next. Not for use in two threads.

    ```python
    conversation = assistant.conversation()
    for turn in turns:
        target.generate(**inputs_of(turn), assistant_model=conversation)
    ```

    Raises:
        NotBoundError: the assistant is not bound to a target.
    """

    def __init__(self, assistant: Assistant):
        if assistant.target is None:
            raise NotBoundError("bind the assistant to a target before starting a conversation.")
        self.assistant = assistant
        self.session: DraftSession | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Conversation":
        # A copy starts anew: models and caches are not copied.
        return copy.copy(self)

    def __copy__(self) -> "Conversation":
        return Conversation(self.assistant)

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that the assistant is bound to, or None."""
        return self.assistant.target

    @property
    def owner(self) -> Assistant:
        """The assistant."""
        return self.assistant

    @property
    def generation_config(self) -> GenerationConfig:
        """The assistant's settings of drafting."""
        return self.assistant.generation_config

    @property
    def stats(self) -> DraftingStatistics:
        """The assistant's counts of the last call."""
        return self.assistant.stats

    def open_call(self) -> AbstractContextManager[GenerateCall]:
        """See `Bindable.open_call`."""
        return _Turn(self)


class _Turn(GenerateCall):
    """One call of a conversation, which keeps the session."""

    keeps_session = True

    def __init__(self, conversation: Conversation):
        super().__init__(conversation.assistant)
        self._conversation = conversation

    def _open_session(self, eos_token_ids: tuple[int, ...]) -> tuple[DraftSession, bool]:
        # Taken out while the turn lasts: a turn within this one begins with a session of its own.
        session, self._conversation.session = self._conversation.session, None
        # Other EOS ids, which every shortlist contains, or another policy or drafter begin a new session.
        if session is not None and self._assistant.resume_session(session, eos_token_ids):
            return session, True
        return super()._open_session(eos_token_ids)

    def _leave_session(self, session: DraftSession) -> None:
        of_turn_within, self._conversation.session = self._conversation.session, None
        if of_turn_within is not None:
            self._assistant.return_session(of_turn_within)
        self._assistant.hold_session(session)
        self._conversation.session = None if session.is_closed else session
