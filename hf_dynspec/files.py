"""Opening files that may be anything: the only way in which the files of artifacts and checkpoints are reached."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ArtifactError
from .fields import DEEPEST_JSON, FieldError, json_object

_FETCH_AGAIN = "Download or write it again."


def is_there(path: Path) -> bool:
    """Whether anything has this name, a link that leads nowhere too."""
    return os.path.lexists(path)


def require_own_file(path: Path, field: str) -> None:
    """Refuse a link, whatever it leads to: what is published must be what lies in the folder.

    Raises:
        ArtifactError: it is one. Its `field` is `field`.
    """
    if os.path.islink(path):
        problem = f"is a link to {os.path.realpath(path)}, and links are not followed"
        raise ArtifactError(field, problem, "Put a copy of the file in its place.")


def open_file(path: Path, field: str) -> BinaryIO:
    """Open a regular file, and nothing that could keep its reader waiting.

    Links are followed within the folder, and from a snapshot in the Hub's cache to the files that it keeps beside its
    snapshots.

    Args:
        path: the file.
        field: what errors call it.

    Raises:
        ArtifactError: it is a pipe, a device or a folder, a link that leads elsewhere, or cannot be opened. Its
            `field` is `field`.
    """
    _require_near(path, field)
    try:
        # Looked at before it is opened, as to open a device may do something; and after, as it may be another by then.
        _require_regular(os.stat(path), field)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        file = os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as error:
        raise _unreadable(field, error) from error
    try:
        _require_regular(os.fstat(descriptor), field)
    except ArtifactError:
        file.close()
        raise
    return file


def read_file(path: Path, field: str, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes; a larger one is not read.

    Raises:
        ArtifactError: as `open_file`, or it is larger.
    """
    with open_file(path, field) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(most + 1) if size <= most else b""
        except OSError as error:
            raise _unreadable(field, error) from error
    if max(size, len(data)) > most:
        raise ArtifactError(field, f"has {max(size, len(data))} bytes, and {most} are the most", _FETCH_AGAIN)
    return data


def _require_near(path: Path, field: str) -> None:
    """Refuse a link out of the folder: what it leads to is none of the folder's."""
    if not os.path.islink(path):
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    # The Hub's client keeps `snapshots/<commit>/<name>` as a link to `blobs/<digest>`.
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and target.parent != blobs:
        problem = f"is a link out of its folder, to {target}"
        raise ArtifactError(field, problem, "Put a copy of the file in its place, if you trust where it leads.")


def _require_regular(status: os.stat_result, field: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(field, "is a folder, a pipe or a device, and not a file", _FETCH_AGAIN)


def _unreadable(field: str, error: Exception) -> ArtifactError:
    problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ArtifactError(field, f"cannot be read: {problem}", "Make the file readable, or download it again.")


# Several times what the index of the largest models holds. Small values take far more memory than room in a file.
MOST_JSON_VALUES = 2**18


def parse_strict_json(text: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object from a file that may be hostile.

    Args:
        text: UTF-8, already limited in length.
        source: what errors call the file.

    Raises:
        ArtifactError: not UTF-8, not JSON, not an object, a key given twice, a number that is not finite, too many
            values, or nested too deeply. Its `field` is `source`.
    """
    # Commas in texts count too: an upper bound that costs next to nothing.
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_JSON_VALUES:
        raise ArtifactError(source, f"holds more than {MOST_JSON_VALUES} values", f"{_FETCH_AGAIN}")
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        # Settings lie a few levels below the file's top. How large a number may be is its own field's to say.
        return json_object(source, data, DEEPEST_JSON + 4, largest=math.inf)
    except FieldError as error:
        raise ArtifactError(source, error.problem, f"{_FETCH_AGAIN}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(source, f"is not strict JSON: {error}", f"{_FETCH_AGAIN}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key is given twice")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
