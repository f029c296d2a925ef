"""Pickles of other projects, loaded without running their code."""

import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import ArtifactError
from ..files import open_file


def load_pickle(path: Path, field: str, most: int) -> Any:
    """Load a file of `torch.save` with at most `most` bytes, with `weights_only=True`. Errors call it `field`.

    Raises:
        ArtifactError: it is no file, too large, damaged, or holds more than tensors and plain values.
    """
    with open_file(path, field) as file:
        size = file.seek(0, os.SEEK_END)
        if size > most:
            raise ArtifactError(field, f"has {size} bytes, and {most} are the most", "Download or write it again.")
        try:
            _require_sound_archive(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a hostile file can raise anything, and torch's own advice is to run it
            is_ours = isinstance(error, ValueError | zipfile.BadZipFile)
            problem = next(iter(str(error).splitlines()), "") if is_ours else ""
            problem = f"is damaged, or holds more than tensors and numbers: {problem or type(error).__name__}"
            fix = "Nothing in the file was run; ask its author for plain values written by torch.save."
            raise ArtifactError(field, problem, fix) from error


def _require_sound_archive(file: BinaryIO) -> None:
    """Check the checksums of an archive, which torch ignores. Compressed members, which torch never writes, could
    unpack to anything."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} does not have its checksum")
