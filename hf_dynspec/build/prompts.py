"""Prompts, read from JSON lines and Parquet files."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .corpus import NAME_THE_FIELD, CorpusError, find_files, read_rows, text_file
from .corpus import Row as PromptRow

# Where the text of a row may be: Spec-Bench's field first.
PROMPT_FIELDS = ("turns", "prompt", "text")
# What Spec-Bench's rows say of a prompt besides its text.
QUESTION, CATEGORY = "question_id", "category"


def find_prompt_files(paths: Iterable[str | Path]) -> list[str]:
    """The files that these paths name or hold, in that order, each once."""
    return [path for path, _ in find_files(paths)]


def read_prompt_file(path: str, fields: Sequence[str], fix: str, more: Sequence[str] = ()) -> Iterator[PromptRow]:
    """Read the prompts of a JSON lines or Parquet file, which may be compressed. See `read_rows` for the arguments.

    Raises:
        CorpusError: the file cannot be read or is plain text, which does not say where prompts end; a row has no text,
            or one that is none. Names file and line.
    """
    file = text_file(path, default="json lines")
    if file.format == "text":
        raise CorpusError(f"{path}: prompts are read from JSON lines or Parquet files, not from plain text")
    for row in read_rows(file, fields, fix, (QUESTION, CATEGORY, *more)):
        if any("\ud800" <= letter <= "\udfff" for turn in row.turns for letter in turn):
            raise CorpusError(f"{row.place}: {row.field} holds half of a surrogate pair, which is no character")
        yield row


def read_prompts(paths: Iterable[str | Path], text_field: str = "text") -> Iterator[tuple[str, ...]]:
    """Read the turns of prompts that are not empty, file by file in the order of the sorted paths. The text is in
    `text_field`; `"text"` stands for the first of `PROMPT_FIELDS` that a row has."""
    fields = PROMPT_FIELDS if text_field == "text" else (text_field,)
    for path in sorted(find_prompt_files(paths)):
        for row in read_prompt_file(path, fields, NAME_THE_FIELD):
            if any(row.turns):
                yield row.turns
