"""Jobs that are stopped and go on: what a job was given, and the folder that keeps what it has finished."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import write_json

JOB_FILE = "job.json"


def describe_files(paths: Iterable[str | Path]) -> str:
    """A digest of paths, sizes and times of last change, to tell whether inputs are still the same."""
    digest = hashlib.sha256()
    for path in paths:
        status = os.stat(path)
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def describe_tokenizer(tokenizer: Any) -> str:
    """A digest of everything that decides how text is cut into tokens, as far as the tokenizer can be written out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def describe_model(model: Any) -> str:
    """Tells whether a model is still the same: by its commit on the Hub, or by the files of its folder."""
    folder = Path(model.name_or_path)
    if not folder.is_dir():
        return f"{model.name_or_path} {getattr(model.config, '_commit_hash', None)}"
    return describe_files(path for path in sorted(folder.resolve().iterdir()) if path.is_file())


def begin_job(folder: Path, job: dict[str, Any], *, fresh: bool = False, is_main: bool = True) -> None:
    """Prepare the folder that keeps what a job has finished: make it, or check that it is of the same job, which is
    JSON values that decide the results. `fresh` drops what the folder holds. Of several processes the main one
    prepares the folder before the others check it."""
    file, job = folder / JOB_FILE, json.loads(json.dumps(job))
    if is_main:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or {path.name for path in folder.iterdir()} <= {JOB_FILE}:
            write_json(file, job)
    try:
        saved = json.loads(file.read_bytes())
        changed = [key for key in job if saved.get(key) != job[key]]
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} lacks {JOB_FILE}. Machines that work together need a folder that all of them see; if there is "
            "one machine, pass --overwrite to begin again."
        ) from error
    except (ValueError, AttributeError) as error:
        raise damaged_work(file, error) from error
    if changed:
        raise ConfigurationError(
            f"{folder} holds unfinished work of another job (changed: {', '.join(changed)}). Run with the same inputs "
            "and settings to go on, choose another folder, or pass --overwrite to drop it."
        )


def damaged_work(file: Path, problem: object) -> ConfigurationError:
    """The error that a file of unfinished work cannot be used."""
    return ConfigurationError(f"{file}: is damaged ({problem}). Pass --overwrite to begin again.")
