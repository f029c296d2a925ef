"""What a model reads in each turn of a prompt: what the user says, and what it answered before."""

from collections.abc import Sequence
from typing import Any

from ...errors import counted
from ..prompts import WorkloadError, WorkloadPrompt


class Dialogue:
    """One prompt, turn by turn, with the model's own answers put back in.

    Base models are given the text as it is, so that a turn goes on where the answer before it ends; with
    `use_chat_template` each turn is the user's in a chat. The model reads the last `truncate_to` tokens (None: all).
    """

    def __init__(
        self,
        prompt: WorkloadPrompt,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        *,
        use_chat_template: bool = False,
        truncate_to: int | None = None,
    ):
        self._turns = list(prompt.turns)
        self._tokenizer, self._eos, self._truncate_to = tokenizer, set(eos_token_ids), truncate_to
        self._use_chat_template = use_chat_template
        self._messages: list[dict[str, str]] = []
        self._text: list[int] = []
        self._said = 0

    @property
    def is_over(self) -> bool:
        """Whether the user says no more."""
        return self._said == len(self._turns)

    def next_turn(self) -> list[int]:
        """The ids of all that the model reads before it answers the next turn."""
        turn = self._turns[self._said]
        if self._use_chat_template:
            self._messages.append({"role": "user", "content": turn})
            encoded = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, return_dict=True)
            self._text = list(encoded["input_ids"])
        else:
            # What stands at the beginning of a text alone, such as a special token, is not put into its middle.
            added = self._tokenizer(turn, add_special_tokens=self._said == 0, verbose=False)
            self._text += added["input_ids"]
        self._said += 1
        return self._text[-self.truncated(len(self._text)) :]

    def truncated(self, tokens: int) -> int:
        """How many of so many tokens the model reads."""
        return tokens if self._truncate_to is None else min(tokens, self._truncate_to)

    def answer(self, token_ids: Sequence[int]) -> None:
        """Put in what the model answered."""
        kept = [one for one in token_ids if one not in self._eos]
        if self._use_chat_template:
            content = self._tokenizer.decode(kept, skip_special_tokens=True)
            self._messages.append({"role": "assistant", "content": content})
        else:
            self._text += kept


def require_room(dialogue: Dialogue, identifier: str, room: int | None, max_new_tokens: int) -> None:
    """Refuse a conversation, of which nothing was said yet, that could outgrow the models' positions: `room` are
    those, less the tokens of one answer (None: any number). It is at its end afterwards.

    Raises:
        WorkloadError: it could.
    """
    most, answers = 0, 0
    while not dialogue.is_over:
        most = max(most, len(dialogue.next_turn()) + answers * max_new_tokens)
        dialogue.answer([])
        answers += 1
    most = dialogue.truncated(most)
    if room is not None and most > room:
        raise WorkloadError(
            f"prompt {identifier} may grow to {counted(most, 'token')} in {counted(answers, 'turn')}, and the models "
            f"have room for {max(room, 0):,} before the last answer; shorten it with --max-prompt-tokens or leave it "
            "out"
        )
