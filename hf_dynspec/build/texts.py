"""The texts of a part of a file, streamed: plain text, JSON lines and Parquet, packed or not."""

import codecs
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ..errors import DynSpecError, shown_value

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


def require_readable(part: FilePart, text_field: str) -> None:
    """Look at the beginning of a whole file.

    Raises:
        CorpusError: it is not of its format, or has no such field.
    """
    with naming_damage(part):
        if part.format == "parquet":
            if part.compression:
                raise CorpusError(f"{part.path}: a Parquet file is compressed inside; unpack this one first")
            with _parquet_file(part, (text_field,)):
                pass
        elif part.format == "json lines":
            next(read_documents(part, text_field), None)
        else:
            with _open(part) as stream:
                beginning = stream.read(8192)
            if b"\0" in beginning:
                raise CorpusError(f"{part.path}: not UTF-8 text (it holds zero bytes)")
            _decode_line(part, 0, beginning, codecs.getincrementaldecoder("utf-8")())


def row_group_bytes(part: FilePart, text_field: str) -> list[int]:
    """The size of each row group of a Parquet file, unpacked.

    Raises:
        CorpusError: the file is damaged, or has no such column.
    """
    with naming_damage(part), _parquet_file(part, (text_field,)) as (parquet, _):
        return [parquet.metadata.row_group(index).total_byte_size for index in range(parquet.num_row_groups)]


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
                    raise CorpusError(f"a JSON object is expected, this is {shown_value(row)}")
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
            raise CorpusError(f"field {name!r} must hold text or a list of texts, it holds {shown_value(turn)}")
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
