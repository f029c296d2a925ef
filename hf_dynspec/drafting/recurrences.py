"""What a text says of its next token by itself: what came the last time after the same few tokens."""

from enum import IntEnum

import torch

# Tokens that have to be the same for what came after them to be told. Of two or four, drafts end as well.
_CONTEXT = 3
# Tokens at the end of a prompt that are looked at, so that a long one takes no time and memory worth speaking of.
_MOST_OF_PROMPT = 8192


class Recurrence(IntEnum):
    """What a text says of a token: nothing, as its context is new; that it came there; that another one did."""

    NEW = 0
    SAME = 1
    OTHER = 2


class Recurrences:
    """The contexts of one text, each with the token that came last after it. Not shared between threads."""

    def __init__(self):
        self._next: dict[tuple[int, ...], int] = {}
        # Tokens of the text that were read, and the last ones of it, or of what is drafted after it.
        self._read = 0
        self._context: tuple[int, ...] = ()

    def begin_draft(self, text: torch.Tensor) -> None:
        """A draft begins.

        Args:
            text: int64 `[n]` on a CPU: what it follows, the text of the drafts before and more.
        """
        unread = max(self._read, text.shape[0] - _MOST_OF_PROMPT)
        tokens = text[max(0, unread - _CONTEXT) :].tolist()
        for place in range(_CONTEXT, len(tokens)):
            self._next[tuple(tokens[place - _CONTEXT : place])] = tokens[place]
        self._read, self._context = text.shape[0], tuple(tokens[-_CONTEXT:])

    def go_on(self, token_id: int) -> Recurrence:
        """The draft goes on with a token. Returns what the text says of it."""
        last = self._next.get(self._context)
        self._context = (*self._context, token_id)[-_CONTEXT:]
        if last is None:
            return Recurrence.NEW
        return Recurrence.SAME if last == token_id else Recurrence.OTHER
