"""What the commands share that build and train artifacts: their folder, their texts, and what provenance says."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import counted
from .common import command_line
from .running import claim_folder, raise_lost_interrupt

if TYPE_CHECKING:
    from ..build.bigram_counts import BigramCounts
    from ..build.corpus import Corpus
    from ..build.frequency import Tally

# Provenance names this many input files; beyond them it keeps their number and their total size.
MOST_NAMED_INPUTS = 100


# By which a folder is known to hold an artifact or a model.
_ARTIFACT_FILES = ("config.json", "model.safetensors")
# Where a folder keeps what was done until its artifact is written.
UNFINISHED = "partial"


# The folder ----------------------------------------------------------------------------------------------------------


def require_free_folder(context: typer.Context, out: Path, overwrite: bool) -> None:
    """Refuse before any work what could not be written after it, and keep the folder from other commands."""
    from ..artifacts.config import LIBRARY_NAME
    from ..errors import ConfigurationError

    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is a file; give --out a folder")
    if holds_artifact(out):
        if not overwrite:
            problem = "already holds an artifact or a model; choose another --out or --overwrite it"
            raise ConfigurationError(f"{out} {problem}")
        try:
            is_ours = json.loads((out / "config.json").read_bytes()).get("library_name") == LIBRARY_NAME
        except (OSError, ValueError, AttributeError):
            is_ours = False
        if not is_ours:
            raise ConfigurationError(f"{out} holds files of something else than hf_dynspec; choose another --out")
    claim_folder(context, out, own=(*_ARTIFACT_FILES, UNFINISHED))


def holds_artifact(out: Path) -> bool:
    """Whether a folder holds an artifact or a model."""
    return any((out / name).exists() for name in _ARTIFACT_FILES)


def going_on(out: Path, overwrite: bool) -> str:
    """How to go on with what a command keeps in a folder when it is stopped."""
    if not overwrite:
        return "run the same command again to go on"
    if holds_artifact(out):
        return f"with --overwrite a run begins anew: to go on, move the artifact out of {out} and run without it"
    return "run the same command without --overwrite to go on"


# Provenance ----------------------------------------------------------------------------------------------------------


def describe_inputs(files: Any) -> dict[str, Any]:
    """What provenance says of input files: names without folders, and sizes."""
    named = [f"{Path(path).name} ({size} bytes)" for path, size in files[:MOST_NAMED_INPUTS]]
    return {"inputs": named, "input_files": len(files), "input_bytes": sum(size for _, size in files)}


def command_text(context: typer.Context) -> str:
    """The command as it was given, with files and folders reduced to their names."""
    return shlex.join(command_line(context, shorten_name))


def shorten_name(value: Any) -> str:
    is_path = isinstance(value, Path) or (isinstance(value, str) and os.path.exists(value))
    return Path(value).resolve().name if is_path else str(value)


# Texts ---------------------------------------------------------------------------------------------------------------


def find_text(paths: list[Path], text_field: str, tokenizer: Any) -> tuple["Corpus", dict[str, Any]]:
    """The files, cut into units, and what tells whether a job is still about the same ones."""
    from ..build.corpus import plan_corpus
    from ..build.inputs import describe_files, describe_tokenizer

    corpus = plan_corpus(paths, text_field)
    if corpus.skipped:
        shown, more = corpus.skipped[:5], corpus.skipped[5:]
        names = ", ".join([Path(path).name for path in shown] + [f"and {len(more)} more"] * bool(more))
        typer.echo(f"left out, as not text: {names}", err=True)
    job = {
        "inputs": describe_files(corpus.files),
        "units": len(corpus.units),
        "text field": text_field,
        "tokenizer": describe_tokenizer(tokenizer),
    }
    return corpus, job


def tell_resumed(tally: "Tally | BigramCounts") -> None:
    if tally.finished.any():
        done, total = int(tally.finished.sum()), len(tally.finished)
        typer.echo(
            f"continuing: {done} of {counted(total, 'part')} and {counted(tally.tokens, 'token')} were counted before",
            err=True,
        )


@contextmanager
def counting_bar(title: str, sizes: list[int], tally: "Tally | BigramCounts") -> Iterator[Callable[[int], None]]:
    """A bar over the units, weighted by `sizes`; yields what takes the number of tokens counted so far."""
    import numpy as np
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    weights = np.array(sizes, np.int64)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=int(weights.sum()), tokens=tally.tokens)

        def report(tokens: int) -> None:
            raise_lost_interrupt()
            progress.update(task, completed=int(weights[tally.finished].sum()), tokens=tokens)

        report(tally.tokens)
        yield report
        report(tally.tokens)
