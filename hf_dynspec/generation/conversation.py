"""A conversation: what may be passed as `assistant_model` in each of its turns."""

import copy
from contextlib import AbstractContextManager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..drafting.session import DraftSession
from ..errors import NotBoundError
from ..stats import DraftingStatistics
from .call import Assistant, Bindable, Call
from .generate_call import GenerateCall


class Conversation(Bindable):
    """One conversation with an assistant: what it learnt in a turn is there in the next. Not for use in two threads.

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
        # Starts anew: models and caches are not copied.
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
        """The assistant's."""
        return self.assistant.generation_config

    @property
    def stats(self) -> DraftingStatistics:
        """The assistant's, of the last call."""
        return self.assistant.stats

    def open_call(self) -> AbstractContextManager[Call]:
        """See `Bindable.open_call`."""
        return _Turn(self)


class _Turn(GenerateCall):
    """One call of a conversation, which keeps the session."""

    is_kept = True

    def __init__(self, conversation: Conversation):
        super().__init__(conversation.assistant)
        self._conversation = conversation

    def kept_session(self) -> DraftSession | None:
        # Taken out for as long as the turn lasts: a turn within this one begins with a session of its own.
        session, self._conversation.session = self._conversation.session, None
        return session

    def leave_session(self, session: DraftSession) -> None:
        of_turn_within, self._conversation.session = self._conversation.session, None
        if of_turn_within is not None:
            self._conversation.assistant.return_session(of_turn_within)
        self._conversation.assistant.hold_session(session)
        self._conversation.session = None if session.is_closed else session
