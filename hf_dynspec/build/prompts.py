"""Prompts, read from JSON lines and Parquet files."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .corpus import COMPRESSIONS, FORMATS, find_files, split_suffix
from .texts import (
    NAME_IT,
    CorpusError,
    FilePart,
    as_turns,
    find_turns,
    naming_damage,
    read_json_lines,
    read_parquet,
)

# Where the text of a row may be: Spec-Bench's field first.
PROMPT_FIELDS = ("turns", "prompt", "text")
# What a row may say of its prompt besides the text, as Spec-Bench's do.
QUESTION, CATEGORY = "question_id", "category"


@dataclass(frozen=True)
class PromptRow:
    """One prompt as a file has it.

    Args:
        file: where it stands.
        number: the line of a JSON lines file, or the row of a Parquet file, from 1.
        field: the field that holds its text.
        turns: what the user says, turn by turn; a single text is one turn. Any may be empty, and so may be the whole.
        values: all that the row says, as it stands there; of a Parquet file, `question_id`, `category`, and what else
            was asked for.
    """

    file: Path
    number: int
    field: str
    turns: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """The file's name without what tells its format."""
        return self.file.with_suffix("").stem if self.file.suffix.lower() in COMPRESSIONS else self.file.stem

    @property
    def place(self) -> str:
        """The file, and the line in it."""
        return f"{self.file}, line {self.number}"


def find_prompt_files(paths: Iterable[str | Path]) -> list[str]:
    """The files that these paths name or hold, in that order, each once.

    Raises:
        CorpusError: a path does not exist.
    """
    return [path for path, _ in find_files(paths)]


def read_prompt_file(path: str, fields: Sequence[str], fix: str, more: Sequence[str] = ()) -> Iterator[PromptRow]:
    """Read the prompts of a file: JSON lines, which may be compressed, or Parquet.

    Args:
        path: the file. Unless its suffix says that it is Parquet or plain text, it holds JSON lines.
        fields: where the text may be; the first of these fields that a row has counts.
        fix: what to do where a row has none of them.
        more: columns of a Parquet file that are wanted besides, if there are any.

    Raises:
        CorpusError: the file cannot be read or is plain text, which does not say where prompts end; a row has no text,
            or one that is none. Names file and line.
    """
    suffix, compression = split_suffix(path)
    kind = FORMATS.get(suffix, "json lines")
    if kind == "text":
        raise CorpusError(f"{path}: prompts are read from JSON lines or Parquet files, not from plain text")
    part = FilePart(path, kind, compression, size=os.path.getsize(path))

    def prompt(row: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
        field, turns = find_turns(row, fields, fix)
        _require_characters(turns, field)
        return field, turns, row

    with naming_damage(part):
        rows = _parquet_prompts(part, fields, more) if kind == "parquet" else read_json_lines(part, prompt)
        for number, (field, turns, values) in rows:
            yield PromptRow(Path(path), number, field, turns, values)


def read_prompts(paths: Iterable[str | Path], text_field: str = "text") -> Iterator[tuple[str, ...]]:
    """Read the turns of prompts that are not empty. The order is that of the sorted paths, whichever order they are
    given in.

    Args:
        paths: files and directories.
        text_field: where the text is; `"text"` stands for the first of `PROMPT_FIELDS` that a row has.

    Raises:
        CorpusError: a path does not exist, or as `read_prompt_file`.
    """
    fields = PROMPT_FIELDS if text_field == "text" else (text_field,)
    for path in sorted(find_prompt_files(paths)):
        for row in read_prompt_file(path, fields, NAME_IT):
            if any(row.turns):
                yield row.turns


def _parquet_prompts(
    part: FilePart, fields: Sequence[str], more: Sequence[str]
) -> Iterator[tuple[int, tuple[str, tuple[str, ...], dict[str, Any]]]]:
    for number, row in enumerate(read_parquet(part, fields, (QUESTION, CATEGORY, *more)), 1):
        field = next(field for field in fields if field in row)
        yield number, (field, as_turns(row[field], field), row)


def _require_characters(turns: tuple[str, ...], field: str) -> None:
    """Refuse what JSON may carry and no tokenizer takes."""
    for turn in turns:
        try:
            turn.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorpusError(f"{field} holds half of a surrogate pair, which is no character") from error
