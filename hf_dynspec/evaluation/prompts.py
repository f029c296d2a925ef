"""Prompts to measure on: JSON lines in Spec-Bench's schema or with one text each, and their token ids."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DynSpecError, shown_text

TEXT_FIELDS = ("prompt", "text")


class WorkloadError(DynSpecError, ValueError):
    """Prompts cannot be read or do not fit the models. The message names the file and line, or the prompt."""


@dataclass(frozen=True)
class WorkloadPrompt:
    """One prompt.

    Args:
        identifier: unique among the prompts of a run, such as `"code/17"`: the file's name and the `question_id`.
        domain: what results are grouped by: the row's `category`, else the file's name.
        text: the prompt's text, not empty.
    """

    identifier: str
    domain: str
    text: str


def read_workload(paths: Sequence[str | Path], limit: int | None = None) -> list[WorkloadPrompt]:
    """Read prompts from JSON lines files.

    A row is an object with Spec-Bench's `turns`, of which the first is taken, or with a text in `prompt` or `text`;
    `question_id` and `category` are optional. Where two files have the same category, their names tell the two apart.

    Args:
        paths: the files.
        limit: take the first so many prompts of each category of each file (None: all).

    Raises:
        WorkloadError: no files, a file that cannot be read, a malformed row, two prompts with one identifier.
    """
    if not paths:
        raise WorkloadError("no prompts: name at least one JSON lines file")
    rows = [row for path in paths for row in _read_file(Path(path))]
    files_of = Counter(category for _, category in {(row.file, row.category) for row in rows})
    prompts: dict[str, WorkloadPrompt] = {}
    taken: Counter[tuple[Path, str]] = Counter()
    for row in rows:
        taken[row.file, row.category] += 1
        if limit is not None and taken[row.file, row.category] > limit:
            continue
        identifier = f"{row.file.stem}/{row.question}"
        if identifier in prompts:
            raise WorkloadError(
                f"{row.file}, line {row.line}: a second prompt {identifier}; rename the file or the question_id"
            )
        domain = row.category if files_of[row.category] == 1 else f"{row.file.stem}/{row.category}"
        prompts[identifier] = WorkloadPrompt(identifier, shown_text(domain, 80), row.text)
    return list(prompts.values())


@dataclass(frozen=True)
class _Row:
    file: Path
    line: int
    question: str
    category: str
    text: str


def _read_file(path: Path) -> Iterator[_Row]:
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error
    if not any(map(bytes.strip, lines)):
        raise WorkloadError(f"{path}: holds no prompts")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _parse_row(path, number, line)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from error


def _parse_row(path: Path, number: int, line: bytes) -> _Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason})") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    question, category = row.get("question_id", f"line {number}"), row.get("category", path.stem)
    if isinstance(question, bool) or not isinstance(question, int | str):
        raise ValueError(f"question_id must be a number or text, got {question!r}")
    if not isinstance(category, str) or not category:
        raise ValueError(f"category must be text, got {category!r}")
    return _Row(path, number, str(question), category, _text_of(row))


def _text_of(row: dict[str, Any]) -> str:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list of texts that is not empty")
        text, name = turns[0], "the first turn"
    else:
        name = next((field for field in TEXT_FIELDS if field in row), None)
        if name is None:
            raise ValueError("a row needs turns (a list of texts), prompt or text")
        text = row[name]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} must be a text that is not empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no character") from error
    return text


def encode_workload(
    prompts: Iterable[WorkloadPrompt],
    tokenizer: Any,
    longest: int | None,
    *,
    truncate_to: int | None = None,
    use_chat_template: bool = False,
) -> list[list[int]]:
    """Turn prompts into token ids.

    Args:
        prompts: the prompts.
        tokenizer: the models' tokenizer.
        longest: most tokens that the models have room for (None: any number).
        truncate_to: keep the last so many tokens of longer prompts (None: never shorten).
        use_chat_template: make each prompt the user's turn of a chat. Base models are given the text as it is.

    Raises:
        WorkloadError: a prompt has no tokens or too many, or the tokenizer has no chat template.
    """
    if use_chat_template and not tokenizer.chat_template:
        raise WorkloadError("the tokenizer has no chat template; leave --chat-template out")
    encoded = []
    for prompt in prompts:
        if use_chat_template:
            messages = [{"role": "user", "content": prompt.text}]
            token_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        else:
            token_ids = tokenizer(prompt.text, verbose=False)
        token_ids = list(token_ids["input_ids"])
        if truncate_to is not None:
            token_ids = token_ids[-truncate_to:]
        if not token_ids:
            raise WorkloadError(f"prompt {prompt.identifier} has no tokens")
        if longest is not None and len(token_ids) > longest:
            raise WorkloadError(
                f"prompt {prompt.identifier} has {len(token_ids):,} tokens, and the models have room for "
                f"{max(longest, 0):,} before the new ones; shorten it with --max-prompt-tokens or leave it out"
            )
        encoded.append(token_ids)
    return encoded
