"""What a job was given, in a few letters each: tells whether it may go on with what it kept."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def describe_files(files: Iterable[tuple[str | Path, int]]) -> str:
    """A digest of paths, sizes and times of last change, to tell whether inputs are still the same."""
    digest = hashlib.sha256()
    for path, size in files:
        digest.update(f"{path}\0{size}\0{os.stat(path).st_mtime_ns}\n".encode(errors="surrogateescape"))
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
    return describe_files((path, path.stat().st_size) for path in sorted(folder.resolve().iterdir()) if path.is_file())
