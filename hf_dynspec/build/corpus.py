"""Text corpora, streamed: finds the files, cuts them into work units of bounded size and reads the text of a unit.

A unit is what one process counts in one go and what a killed run loses at most. Plain text and JSON lines are cut into
byte ranges and Parquet files into row groups, so that several processes share one big file; a compressed file can only
be read from its beginning and is one unit; small files are put together.
"""

import codecs
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ..errors import DynSpecError

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
# What these suffixes promise is held to. Files with any other suffix are read as plain text if they are plain text.
FORMATS = {".jsonl": "json lines", ".ndjson": "json lines", ".parquet": "parquet", ".txt": "text", ".md": "text"}
# JSON in one piece cannot be streamed, but many `.json` files hold one object a line and can.
UNPROMISED_FORMATS = {".json": "json lines"}

UNIT_BYTES = 8 << 20
# About how far text is compressed, to judge how much of it small files hold.
TEXT_BYTES_PER_PACKED_BYTE = 5
# A text is handed on in pieces, so that a tokenizer never holds more than this many characters of it at once.
PIECE_CHARACTERS = 1 << 16
# What to do where a row has no text.
NAME_IT = "name the one with the text (--text-field)"
LONGEST_JSON_LINE = 256 << 20
PARQUET_BATCH_ROWS = 256

T = TypeVar("T")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CorpusError(DynSpecError, ValueError):
    """A corpus cannot be read: a path, a column, a line or an encoding is wrong. The message says where."""


@dataclass(frozen=True)
class FilePart:
    """A part of one file.

    Args:
        path: the file.
        format: `"text"`, `"json lines"` or `"parquet"`.
        compression: `"gzip"`, `"xz"`, `"zstd"` or None.
        start: the first byte, or the first row group of a Parquet file. The lines that begin in the part belong to it.
        end: the byte or row group after the last; None reads to the end of the file.
        size: bytes on disk, for showing progress.
    """

    path: str
    format: str
    compression: str | None = None
    start: int = 0
    end: int | None = None
    size: int = 0


@dataclass(frozen=True)
class Corpus:
    """What `plan_corpus` found.

    Args:
        files: path and size in bytes of each file, sorted by path.
        units: the work units; each is a tuple of file parts.
        skipped: files of a directory that are not text.
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


class Piece(NamedTuple):
    """A piece of text that is not empty.

    Args:
        text: at most `PIECE_CHARACTERS` characters.
        begins_text: a text begins with it. A plain text file is one text, and so is each turn of a conversation.
        begins_document: a document begins with it.
    """

    text: str
    begins_text: bool
    begins_document: bool


def read_pieces(unit: Iterable[FilePart], text_field: str = "text") -> Iterator[Piece]:
    """Read the text of a unit in pieces.

    Raises:
        CorpusError: undecodable bytes, a malformed JSON line, a missing field or a damaged file; names file and line.
    """
    for part in unit:
        with naming_damage(part):
            if part.format == "text":
                for text, begins in _read_text(part):
                    yield Piece(text, begins, begins)
            else:
                for turns in read_documents(part, text_field):
                    begins_document = True
                    for turn in turns:
                        begins_text = True
                        for text in _pieces(turn):
                            yield Piece(text, begins_text, begins_document)
                            begins_text = begins_document = False


def read_unit(unit: Iterable[FilePart], text_field: str = "text") -> Iterator[tuple[str, bool]]:
    """Read the text of a unit in pieces of at most `PIECE_CHARACTERS`.

    Yields:
        a piece of text that is not empty, and whether a document begins with it. A plain text file is one document.

    Raises:
        CorpusError: as `read_pieces`.
    """
    return ((piece.text, piece.begins_document) for piece in read_pieces(unit, text_field))


def read_documents(part: FilePart, text_field: str = "text") -> Iterator[tuple[str, ...]]:
    """Read the documents of a part of a JSON lines or Parquet file: one text each, or the turns of a conversation.

    Raises:
        CorpusError: as `read_pieces`.
    """
    with naming_damage(part):
        if part.format == "parquet":
            yield from (as_turns(row[text_field], text_field) for row in read_parquet(part, (text_field,)))
        else:
            fields = text_fields(text_field)
            yield from (turns for _, (_, turns) in read_json_lines(part, lambda row: find_turns(row, fields, NAME_IT)))


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
    with naming_damage(part):
        if file_format == "parquet":
            if compression:
                raise CorpusError(f"{path}: a Parquet file is compressed inside; unpack this one first")
            with _parquet_file(part, (text_field,)):
                pass
        elif file_format == "json lines":
            next(read_documents(part, text_field), None)
        else:
            with _open(part) as stream:
                beginning = stream.read(8192)
            if b"\0" in beginning:
                raise CorpusError(f"{path}: not UTF-8 text (it holds zero bytes)")
            _decode_line(part, 0, beginning, codecs.getincrementaldecoder("utf-8")())
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
    with naming_damage(whole), _parquet_file(whole, (text_field,)) as (parquet, _):
        groups = [parquet.metadata.row_group(index).total_byte_size for index in range(parquet.num_row_groups)]
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


def _open(part: FilePart) -> BinaryIO:
    if part.compression == "gzip":
        return gzip.open(part.path, "rb")
    if part.compression == "xz":
        return lzma.open(part.path, "rb")
    if part.compression == "zstd":
        import io

        return io.BufferedReader(_pyarrow(part.path).input_stream(part.path, compression="zstd"))
    return open(part.path, "rb")


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # makes the submodule an attribute
    except ImportError as error:
        raise CorpusError(
            f"{path}: reading this file needs pyarrow; install it with: pip install 'hf-dynspec[build]'"
        ) from error
    return pyarrow


@contextmanager
def naming_damage(part: FilePart) -> Iterator[None]:
    """Within this block, failures to read a part become a `CorpusError` that names the file."""
    try:
        yield
    except CorpusError:
        raise
    except (PermissionError, FileNotFoundError) as error:
        raise CorpusError(f"{part.path}: cannot be opened: {error.strerror}") from error
    except Exception as error:  # what pyarrow and the decompressors raise for damaged files has no common class
        raise CorpusError(f"{part.path}: the file is damaged or not what its suffix says: {error}") from error


def _lines(part: FilePart, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of the lines that begin in `part`; one longer than `longest` comes in several."""
    with _open(part) as stream:
        offset = part.start
        line = b"\n"
        if part.start:
            # The line that reaches into this part belongs to the part before; it ends here if it ends just before.
            stream.seek(part.start - 1)
            offset -= 1
            line = stream.readline(longest)
            while line and not line.endswith(b"\n"):
                offset += len(line)
                line = stream.readline(longest)
            offset += len(line)
        while part.end is None or offset < part.end or not line.endswith(b"\n"):
            line = stream.readline(longest)
            if not line:
                return
            yield offset, line
            offset += len(line)


def _read_text(part: FilePart) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    pending, begins = "", part.start == 0
    offset = part.start
    for offset, line in _lines(part, longest=PIECE_CHARACTERS):
        text = _decode_line(part, offset, line, decoder)
        if len(pending) + len(text) > PIECE_CHARACTERS:
            yield pending, begins
            pending, begins = "", False
        pending += text
    pending += _decode_line(part, offset, b"", decoder, final=True)
    if pending:
        yield pending, begins


def _decode_line(part: FilePart, offset: int, line: bytes, decoder: Any, final: bool = False) -> str:
    try:
        return decoder.decode(line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line, final)
    except UnicodeDecodeError as error:
        # The decoder puts the bytes that it still held in front of the line.
        offset += max(0, error.start + len(line) - len(error.object))
        raise CorpusError(
            f"{part.path}, line {_line_number(part, offset)}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None


def _line_number(part: FilePart, offset: int) -> int:
    """The line, counted from 1, that the byte at `offset` is in. Reads the file again: only errors ask for it."""
    newlines = 0
    with _open(part) as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 20))):
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1


def read_json_lines(part: FilePart, take: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
    """Read the lines of a part that hold something.

    Args:
        part: of a JSON lines file.
        take: what to take of a line's object.

    Yields:
        the number of the line among those of the part, from 1, and what was taken.

    Raises:
        CorpusError: a line is malformed, or `take` raised one; names file and line.
    """
    for number, (offset, line) in enumerate(_lines(part, longest=LONGEST_JSON_LINE), 1):
        try:
            if len(line) >= LONGEST_JSON_LINE:
                raise CorpusError(f"longer than {LONGEST_JSON_LINE} bytes, which is no JSON line")
            if line.strip():
                text = (line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line).decode("utf-8")
                row = json.loads(text)
                if not isinstance(row, dict):
                    raise CorpusError(f"a JSON object is expected, this is a {type(row).__name__}")
                yield number, take(row)
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text ({error.reason})"
        except json.JSONDecodeError as error:
            problem = f"not a JSON object ({error.msg}, column {error.colno}); each line must hold one"
        except RecursionError:
            problem = "not a usable JSON object (nested too deeply)"
        except CorpusError as error:
            problem = str(error)
        else:
            continue
        raise CorpusError(f"{part.path}, line {_line_number(part, offset)}: {problem}")


def text_fields(text_field: str) -> tuple[str, ...]:
    """The fields of a JSON row that its text may be in. Spec-Bench's rows have `turns` in place of a `text`."""
    return (text_field, "turns") if text_field == "text" else (text_field,)


def find_turns(row: dict[str, Any], fields: Sequence[str], fix: str) -> tuple[str, tuple[str, ...]]:
    """The first of these fields that a JSON row has, and the texts that it holds.

    Args:
        row: the row.
        fields: where its text may be.
        fix: what to do where it has none of them.

    Raises:
        CorpusError: it has none of them, or something else than texts is there.
    """
    name = next((field for field in fields if field in row), None)
    if name is None:
        raise CorpusError(f"no field {' or '.join(map(repr, fields))}; there are {sorted(row)[:20]}: {fix}")
    return name, as_turns(row[name], name)


def as_turns(value: Any, name: str) -> tuple[str, ...]:
    """The texts that a field holds: one, several or none.

    Raises:
        CorpusError: something else is there.
    """
    turns = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for turn in turns:
        if not isinstance(turn, str):
            raise CorpusError(f"field {name!r} must hold text or a list of texts, it holds a {type(turn).__name__}")
    return turns


@contextmanager
def _parquet_file(part: FilePart, fields: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """The opened file, and the first of these columns that it has, which holds text."""
    pyarrow = _pyarrow(part.path)
    with pyarrow.parquet.ParquetFile(part.path, pre_buffer=False, buffer_size=1 << 20) as parquet:
        names = parquet.schema_arrow.names
        name = next((field for field in fields if field in names), None)
        if name is None:
            raise CorpusError(f"{part.path}: no column {' or '.join(map(repr, fields))}; there are {names}: {NAME_IT}")
        kind = found = parquet.schema_arrow.field(name).type
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise CorpusError(f"{part.path}: column {name!r} must hold text, it holds {found}")
        yield parquet, name


def read_parquet(part: FilePart, fields: Sequence[str], more: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Read the rows of a part of a Parquet file.

    Args:
        part: of the file.
        fields: the columns that the texts may be in; the first that there is is read.
        more: columns to read beside it, if there are any.

    Raises:
        CorpusError: there is no column of texts, or it holds something else.
    """
    with _parquet_file(part, fields) as (parquet, column):
        columns = [column, *(name for name in more if name in parquet.schema_arrow.names)]
        groups = range(part.start, parquet.num_row_groups if part.end is None else part.end)
        for batch in parquet.iter_batches(PARQUET_BATCH_ROWS, row_groups=list(groups), columns=columns):
            yield from batch.to_pylist()


def _pieces(text: str) -> Iterator[str]:
    """Cut a text before white space where it can be, which most tokenizers do anyway."""
    # JSON may carry half of a surrogate pair, which no tokenizer takes; the Unicode standard's stand-in is U+FFFD.
    text = _LONE_SURROGATE.sub("\ufffd", text)
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        longest = start + PIECE_CHARACTERS
        space = max(text.rfind(" ", start + 1, longest), text.rfind("\n", start + 1, longest))
        end = space if space > start else longest
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
