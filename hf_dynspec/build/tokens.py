"""Batches of text, and their tokens."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .corpus import Piece

# About how many characters a tokenizer gets at once. It works on the texts of a batch in parallel.
BATCH_CHARACTERS = 1 << 21


class TextBatch(NamedTuple):
    """Pieces of text that follow on one another, at least one; and the text of the piece before them if they go on
    with it, else nothing."""

    pieces: list[Piece]
    before: str

    @property
    def documents(self) -> int:
        """How many documents begin in it."""
        return sum(piece.begins_document for piece in self.pieces)


def text_batches(pieces: Iterable[Piece]) -> Iterator[TextBatch]:
    """Put pieces together. How they are put together depends on the pieces alone."""
    batch: list[Piece] = []
    before, characters = "", 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield TextBatch(batch, "" if batch[0].begins_text else before)
            before, batch, characters = piece.text, [], 0
    if batch:
        yield TextBatch(batch, "" if batch[0].begins_text else before)


def text_encoder(tokenizer: Any) -> Callable[[Iterable[str]], list[np.ndarray]]:
    """What gives the tokens of texts, int64 `[n]` each, without special tokens that the tokenizer would add."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:

        def encode(texts: Iterable[str]) -> Iterable[list[int]]:
            return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    else:
        # A copy, as the tokenizer's own may truncate or pad.
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()

        def encode(texts: Iterable[str]) -> Iterable[list[int]]:
            return (one.ids for one in backend.encode_batch_fast(list(texts), add_special_tokens=False))

    return lambda texts: [np.array(token_ids, np.int64) for token_ids in encode(texts)]


def prefix_ids(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text, such as the beginning of a text, without which some models are
    lost."""
    whole, plain = (tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    return list(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else []
