"""Opening files that may be anything, and replacing files in one step: the only place for either."""

import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ArtifactError
from .fields import DEEPEST_JSON, FieldError, json_object

# The most bytes of tensors in one file of an artifact, by default.
DEFAULT_SHARD_SIZE = "1GB"
# Several times the index of the largest models. Small values take far more memory than room in a file.
MOST_JSON_VALUES = 2**18

# Seconds; a file that is being written changes more often.
_ABANDONED_AFTER = 3600.0
_FETCH_AGAIN = "Download or write it again."


def is_there(path: Path) -> bool:
    """Whether anything has this name, even a broken link."""
    return os.path.lexists(path)


def require_own_file(path: Path, field: str) -> None:
    """Refuse a link: only files of the folder itself are published.

    Raises:
        ArtifactError: it is one. Its `field` is `field`.
    """
    if os.path.islink(path):
        problem = f"is a link to {os.path.realpath(path)}, and links are not followed"
        raise ArtifactError(field, problem, "Put a copy of the file in its place.")


def open_file(path: Path, field: str) -> BinaryIO:
    """Open a regular file, and nothing that could block its reader.

    Links are followed within the folder, and from a snapshot in the Hub's cache to its blobs.

    Args:
        path: the file.
        field: its name in errors.

    Raises:
        ArtifactError: it is a pipe, a device or a folder, a link that leads elsewhere, or cannot be opened. Its
            `field` is `field`.
    """
    _require_near(path, field)
    try:
        # Before opening, as opening a device may have effects; and after, as it may be another file by then.
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
    if not os.path.islink(path):
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    # The Hub's client keeps `snapshots/<commit>/<name>` as a link to `blobs/<digest>`.
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and target.parent != blobs:
        problem = f"is a link out of its folder, to {target}"
        raise ArtifactError(field, problem, "Put a copy of the file in its place, if you trust the link.")


def _require_regular(status: os.stat_result, field: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(field, "is a folder, a pipe or a device, and not a file", _FETCH_AGAIN)


def _unreadable(field: str, error: Exception) -> ArtifactError:
    problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ArtifactError(field, f"cannot be read: {problem}", "Make the file readable, or download it again.")


def parse_strict_json(text: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object from a file that may be hostile.

    Args:
        text: UTF-8, already limited in length.
        source: the file's name in errors.

    Raises:
        ArtifactError: not UTF-8, not JSON, not an object, a key given twice, a number that is not finite, too many
            values, or nested too deeply. Its `field` is `source`.
    """
    # An upper bound that costs next to nothing: commas in texts count too.
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_JSON_VALUES:
        raise ArtifactError(source, f"holds more than {MOST_JSON_VALUES} values", _FETCH_AGAIN)
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        # Settings lie a few levels below the file's top. Numbers are bounded by their own fields.
        return json_object(source, data, DEEPEST_JSON + 4, largest=math.inf)
    except FieldError as error:
        raise ArtifactError(source, error.problem, _FETCH_AGAIN) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(source, f"is not strict JSON: {error}", _FETCH_AGAIN) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key is given twice")
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that readers always find the old one or the whole new one.

    ```python
    with replacing(path) as scratch:
        scratch.write_bytes(data)
    ```

    Yields a scratch file beside it, which is synced and takes its place at the end of the block, and is removed if the
    block raises. Scratch files of killed processes are removed by the next writer, an hour later.

    Args:
        path: the file to make or replace. Its folder is made if needed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in scratch_files(path):
        with suppress(FileNotFoundError):  # another process may remove it too
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER:
                left.unlink()
    # A name of its own, as two processes may write the same file.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        yield scratch
        with scratch.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def scratch_files(path: Path) -> list[Path]:
    """The unfinished files beside a file."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.writing")
    return [one for one in path.parent.glob(".*.writing") if name.fullmatch(one.name)]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON values to a file, which is replaced in one step."""
    text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def append_json_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line of JSON and sync the file. A killed process leaves a torn last line at worst, which
    `read_whole_lines` leaves out."""
    with path.open("ab") as file:
        file.write(json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of `append_json_line`, without a torn last line.

    Raises:
        ArtifactError: a line before the last is no JSON object. Its `field` names the file and the line.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            if number == len(lines) - 1:
                break
            fix = "Restore the file, or delete that line; its measurement is then repeated."
            raise ArtifactError(f"{path}, line {number}", "is no JSON object", fix)
        found.append(values)
    return found


def write_through(path: Path, data: bytes) -> None:
    """Write a file and sync it, so that a rename never shows half a file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
