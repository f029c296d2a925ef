"""What commands share that build and train artifacts: their folder, their texts, and what provenance says."""

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigurationError
from .common import command_line, progress_bar
from .running import MODEL_FILES, claim_folder

if TYPE_CHECKING:
    import torch

    from ..build.corpus import Corpus, TextFile
    from ..vocabulary import TokenizerFingerprint

# Where a folder keeps finished work until its artifact is written.
UNFINISHED = "partial"
# Provenance names this many input files, and of more than these their number and their size.
_MOST_NAMED_INPUTS = 100


def require_free_folder(context: typer.Context, out: Path, overwrite: bool) -> None:
    """Lock the folder of an artifact, or raise a `ConfigurationError` if it cannot be written after the work."""
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is a file; give --out a folder")
    if _holds_artifact(out):
        if not overwrite:
            problem = "already holds an artifact or a model; choose another --out or --overwrite it"
            raise ConfigurationError(f"{out} {problem}")
        from ..artifacts.folder import is_own_config

        if not is_own_config(out / "config.json"):
            raise ConfigurationError(f"{out} holds files of something else than hf_dynspec; choose another --out")
    claim_folder(context, out, own=(*MODEL_FILES, UNFINISHED))


def _holds_artifact(out: Path) -> bool:
    return any((out / name).exists() for name in MODEL_FILES)


def going_on(out: Path, overwrite: bool) -> str:
    """How to go on after a command was stopped."""
    if not overwrite:
        return "run the same command again to go on"
    if _holds_artifact(out):
        return f"with --overwrite a run begins anew: to go on, move the artifact out of {out} and run without it"
    return "run the same command without --overwrite to go on"


def describe_inputs(files: "Iterable[TextFile]") -> dict[str, Any]:
    """Provenance of input files: names without folders, and sizes."""
    files = list(files)
    named = [f"{Path(file.path).name} ({file.size} bytes)" for file in files[:_MOST_NAMED_INPUTS]]
    return {"inputs": named, "input_files": len(files), "input_bytes": sum(file.size for file in files)}


def command_text(context: typer.Context) -> str:
    """The command as it was given, with files and folders reduced to their names."""
    return shlex.join(command_line(context, shorten_name))


def shorten_name(value: Any) -> str:
    is_path = isinstance(value, Path) or (isinstance(value, str) and os.path.exists(value))
    return Path(value).resolve().name if is_path else str(value)


def write_policy(
    out: Path,
    name: str,
    settings: dict[str, Any],
    tensors: "dict[str, torch.Tensor]",
    tokenizer: "TokenizerFingerprint",
    provenance: dict[str, Any],
    **models: Any,
) -> None:
    """Write an artifact; `models` are other fields of its configuration, such as `target`."""
    from ..artifacts import write_artifact
    from ..artifacts.config import DynSpecConfig, PolicyConfig

    policy = PolicyConfig(name=name, settings=settings)
    config = DynSpecConfig(policy=policy, tokenizer=tokenizer, provenance=provenance, **models)
    write_artifact(out, config, tensors=tensors)


def find_text(paths: list[Path], text_field: str) -> "Corpus":
    """The files. Says which are left out."""
    from ..build.corpus import find_corpus

    corpus = find_corpus(paths, text_field)
    if corpus.skipped:
        names = [Path(path).name for path in corpus.skipped[:5]]
        names += [f"and {len(corpus.skipped) - 5} more"] if len(corpus.skipped) > 5 else []
        typer.echo(f"left out, as not text: {', '.join(names)}", err=True)
    return corpus


def describe_text(corpus: "Corpus", tokenizer: Any) -> dict[str, Any]:
    """What tells whether a job is still about the same texts."""
    from .. import __version__
    from ..build.jobs import describe_files, describe_tokenizer

    return {
        "inputs": describe_files(file.path for file in corpus.files),
        "text field": corpus.text_field,
        "tokenizer": describe_tokenizer(tokenizer),
        # Another version may cut text in other places.
        "hf_dynspec": __version__,
    }


@contextmanager
def counting_bar(title: str, total: int, tokens: int, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar; yields a function that takes how much of `total` is done and how many tokens were counted."""
    if tokens and is_shown:
        typer.echo(f"continuing: {tokens:,} tokens were counted before", err=True)
    with progress_bar(is_shown) as report:
        yield lambda done, tokens: report(f"{title}: {tokens:,} tokens", done, total)
