"""Text corpora: finds the files and cuts them into work units of bounded size, which `texts` reads.

A unit is what one process counts in one go and what a killed run loses at most. Plain text and JSON lines are cut into
byte ranges and Parquet files into row groups, so that several processes share one big file; a compressed file can only
be read from its beginning and is one unit; small files are put together.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .texts import CorpusError, FilePart, require_readable, row_group_bytes

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
# What these suffixes promise is held to. Files with any other suffix are read as plain text if they are plain text.
FORMATS = {".jsonl": "json lines", ".ndjson": "json lines", ".parquet": "parquet", ".txt": "text", ".md": "text"}
# JSON in one piece cannot be streamed, but many `.json` files hold one object a line and can.
UNPROMISED_FORMATS = {".json": "json lines"}

# Pictures, shapes and fonts that are written as text. Of a directory they are left out, as nobody reads them.
DRAWINGS = {
    *(".svg", ".eps", ".ps", ".pbm", ".pgm", ".ppm", ".xbm", ".xpm"),
    *(".dae", ".gltf", ".obj", ".ply", ".stl"),
    *(".afm", ".bdf", ".ttx"),
}

UNIT_BYTES = 8 << 20
# About how far text is compressed, to judge how much of it small files hold.
TEXT_BYTES_PER_PACKED_BYTE = 5


@dataclass(frozen=True)
class Corpus:
    """What `plan_corpus` found.

    Args:
        files: path and size in bytes of each file, sorted by path.
        units: the work units; each is a tuple of file parts.
        skipped: files of a directory that are not text, or drawings.
    """

    files: tuple[tuple[str, int], ...]
    units: tuple[tuple[FilePart, ...], ...]
    skipped: tuple[str, ...]

    def unit_bytes(self, index: int) -> int:
        """Bytes on disk of a unit."""
        return sum(part.size for part in self.units[index])

    def text_bytes(self, index: int) -> int:
        """About how many bytes of text a unit holds."""
        return sum(_text_bytes(part) for part in self.units[index])


def plan_corpus(paths: Iterable[str | Path], text_field: str = "text", unit_bytes: int = UNIT_BYTES) -> Corpus:
    """Find the files, look at the beginning of each, and cut them into units. Depends on nothing but the files.

    Args:
        paths: files and directories. Directories are walked; their hidden files are left out. A file that is named
            twice counts once.
        text_field: the JSON field or Parquet column that holds the text.
        unit_bytes: about how many bytes on disk make a unit.

    Raises:
        CorpusError: a path does not exist, a file is not what its suffix promises, a field is missing from the first
            line, a column from a Parquet file, or there is no text at all.
    """
    files, skipped = {}, []
    for path, is_named in find_files(paths):
        if not is_named and split_suffix(path)[0] in DRAWINGS:
            skipped.append(path)
            continue
        try:
            files[path] = _first_look(path, text_field)
        except CorpusError:
            if is_named or split_suffix(path)[0] in FORMATS:
                raise
            skipped.append(path)
    parts = (part for path in sorted(files) for part in _cut_file(files[path], text_field, unit_bytes))
    units = tuple(_group(parts, unit_bytes))
    if not units:
        raise CorpusError(
            f"there is no text in {', '.join(map(str, paths))}: name files or directories that hold text"
        )
    return Corpus(tuple((path, files[path].size) for path in sorted(files)), units, tuple(sorted(skipped)))


def find_files(paths: Iterable[str | Path]) -> Iterator[tuple[str, bool]]:
    """Yield the absolute path of each file once, and whether the caller named it (not just a directory around it).

    A link keeps its name, which tells the format, as those in the Hub's cache do.

    Raises:
        CorpusError: a path does not exist.
    """
    seen = set()
    for path in map(Path, paths):
        # Those of pathlib raise what the system says of a path that may not be looked at.
        is_file = os.path.isfile(path)
        if not is_file and not os.path.isdir(path):
            raise CorpusError(f"{path}: no such file or directory")
        for found in [path] if is_file else _files_below(path):
            resolved = found.resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield os.path.abspath(found), is_file


def _files_below(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            found = Path(folder, name)
            if not name.startswith(".") and os.path.isfile(found):
                yield found


def split_suffix(path: str) -> tuple[str, str | None]:
    """The suffix that tells the format, in lower case, and the compression: `a.jsonl.xz` has `.jsonl` and `xz`."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSIONS:
        return os.path.splitext(stem)[1], COMPRESSIONS[suffix]
    return suffix, None


def _first_look(path: str, text_field: str) -> FilePart:
    """Check the beginning of a file, so that a wrong input is told before hours of work, and return all of it."""
    suffix, compression = split_suffix(path)
    file_format = FORMATS.get(suffix) or UNPROMISED_FORMATS.get(suffix, "text")
    part = FilePart(path, file_format, compression, size=os.path.getsize(path))
    require_readable(part, text_field)
    return part


def _cut_file(whole: FilePart, text_field: str, unit_bytes: int) -> Iterator[FilePart]:
    path, size = whole.path, whole.size
    if whole.format == "parquet":
        yield from _cut_parquet(whole, text_field, unit_bytes)
    elif whole.compression:
        yield whole
    else:
        for start in range(0, size, unit_bytes):
            end = min(size, start + unit_bytes)
            yield FilePart(path, whole.format, None, start, end, end - start)


def _cut_parquet(whole: FilePart, text_field: str, unit_bytes: int) -> Iterator[FilePart]:
    groups = row_group_bytes(whole, text_field)
    start, size = 0, 0
    for index, group_bytes in enumerate(groups):
        size += group_bytes
        if size >= unit_bytes or index == len(groups) - 1:
            share = whole.size * size // max(1, sum(groups))
            yield FilePart(whole.path, "parquet", None, start, index + 1, share)
            start, size = index + 1, 0


def _group(parts: Iterable[FilePart], unit_bytes: int) -> Iterator[tuple[FilePart, ...]]:
    """Put neighbours together while they fit into a unit."""
    unit: list[FilePart] = []
    used = 0
    for part in parts:
        text_bytes = _text_bytes(part)
        if unit and used + text_bytes > unit_bytes:
            yield tuple(unit)
            unit, used = [], 0
        unit.append(part)
        used += text_bytes
    if unit:
        yield tuple(unit)


def _text_bytes(part: FilePart) -> int:
    is_packed = part.compression or part.format == "parquet"
    return part.size * TEXT_BYTES_PER_PACKED_BYTE if is_packed else part.size
