"""Prompts to measure on, and their token ids."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..build.corpus import CorpusError
from ..build.prompts import CATEGORY, PROMPT_FIELDS, QUESTION, PromptRow, find_prompt_files, read_prompt_file
from ..errors import DynSpecError, counted, shown_text


class WorkloadError(DynSpecError, ValueError):
    """Prompts cannot be read or do not fit the models. The message names the file and line, or the prompt."""


@dataclass(frozen=True)
class WorkloadPrompt:
    """One prompt.

    Args:
        identifier: unique among the prompts of a run, such as `"code/17"`: the file's name and the `question_id`.
        domain: what results are grouped by: the row's `category`, else the file's name.
        text: the prompt's text, not empty; of a conversation, what the user says first.
        later_turns: what the user says after the model's answers, turn by turn.
    """

    identifier: str
    domain: str
    text: str
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """All that the user says, turn by turn."""
        return (self.text, *self.later_turns)


def read_workload(
    paths: Sequence[str | Path],
    limit: int | None = None,
    require: Callable[[PromptRow], None] = lambda row: None,
    more: Sequence[str] = (),
) -> list[WorkloadPrompt]:
    """Read prompts from JSON lines and Parquet files.

    A row has Spec-Bench's `turns`, the first of which is the prompt's text, or a text in `prompt` or `text`;
    `question_id` and `category` are optional. Where two files have the same category, their names tell the two apart.

    Args:
        paths: files, and directories of files.
        limit: take the first so many prompts of each category of each file (None: all).
        require: what else a row must fulfil, or raises `WorkloadError`.
        more: fields that `require` looks at, besides those above.

    Raises:
        WorkloadError: no files, a file that cannot be read, a malformed row, two prompts with one identifier.
    """
    if not paths:
        raise WorkloadError("no prompts: name at least one JSON lines file")
    try:
        rows = [row for path in find_prompt_files(paths) for row in _read_file(path, require, more)]
    except CorpusError as error:
        raise WorkloadError(str(error)) from error
    files_of = Counter(category for _, category in {(row.file, _category(row)) for row in rows})
    prompts: dict[str, WorkloadPrompt] = {}
    taken: Counter[tuple[Path, str]] = Counter()
    for row in rows:
        category = _category(row)
        taken[row.file, category] += 1
        if limit is not None and taken[row.file, category] > limit:
            continue
        identifier = f"{row.file_name}/{_question(row)}"
        if identifier in prompts:
            raise WorkloadError(f"{row.place}: a second prompt {identifier}; rename the file or the question_id")
        domain = category if files_of[category] == 1 else f"{row.file_name}/{category}"
        prompts[identifier] = WorkloadPrompt(identifier, shown_text(domain, 80), row.turns[0], row.turns[1:])
    return list(prompts.values())


def _question(row: PromptRow) -> Any:
    given = row.values.get(QUESTION)
    return f"line {row.number}" if given is None else given


def _category(row: PromptRow) -> Any:
    given = row.values.get(CATEGORY)
    return row.file_name if given is None else given


def _read_file(path: str, require: Callable[[PromptRow], None], more: Sequence[str]) -> list[PromptRow]:
    rows = list(read_prompt_file(path, PROMPT_FIELDS, "a row needs turns (a list of texts), prompt or text", more))
    for row in rows:
        question, category = _question(row), _category(row)
        if not row.turns or not row.turns[0]:
            raise WorkloadError(f"{row.place}: {row.field} must hold a text that is not empty")
        if isinstance(question, bool) or not isinstance(question, int | str):
            raise WorkloadError(f"{row.place}: question_id must be a number or text, got {question!r}")
        if not isinstance(category, str) or not category:
            raise WorkloadError(f"{row.place}: category must be text, got {category!r}")
        require(row)
    if not rows:
        raise WorkloadError(f"{path}: holds no prompts")
    return rows


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
        prompts, tokenizer: the prompts, and the models' tokenizer.
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
                f"prompt {prompt.identifier} has {counted(len(token_ids), 'token')}, and the models have room for "
                f"{max(longest, 0):,} before the new ones; shorten it with --max-prompt-tokens or leave it out"
            )
        encoded.append(token_ids)
    return encoded
