"""Text corpora: which files hold text, and their texts in pieces of bounded length."""

import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import DynSpecError, shown_value

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
# A file must hold what these suffixes promise. Any other file is read as plain text, if it is plain text.
FORMATS = {".jsonl": "json lines", ".ndjson": "json lines", ".parquet": "parquet", ".txt": "text", ".md": "text"}
# Pictures, shapes and fonts that are written as text. They are left out of folders.
DRAWINGS = set(".svg .eps .ps .pbm .pgm .ppm .xbm .xpm .dae .gltf .obj .ply .stl .afm .bdf .ttx".split())
# A tokenizer never gets more than this many characters of a text at once.
PIECE_CHARACTERS = 1 << 16
LONGEST_LINE = 256 << 20
NAME_THE_FIELD = "name the one with the text (--text-field)"

_PARQUET_BATCH_ROWS = 256
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# About how many bytes of text there are in a byte of a compressed file.
_TEXT_BYTES_PER_PACKED_BYTE = 5


class CorpusError(DynSpecError, ValueError):
    """A corpus cannot be read: a path, a column, a line or an encoding is wrong. The message names the place."""


@dataclass(frozen=True)
class TextFile:
    """A file that holds text: its absolute path, its format (`"text"`, `"json lines"` or `"parquet"`), its compression
    (`"gzip"`, `"xz"`, `"zstd"` or None), and its bytes on disk."""

    path: str
    format: str
    compression: str | None
    size: int

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        is_packed = self.compression or self.format == "parquet"
        return self.size * _TEXT_BYTES_PER_PACKED_BYTE if is_packed else self.size


class Row(NamedTuple):
    """A row of a JSON lines or Parquet file."""

    file: Path
    number: int  # the line or row, from 1
    field: str  # the field that holds its text
    turns: tuple[str, ...]  # its texts: one, several turns of a conversation, or none. Any may be empty.
    values: Mapping[str, Any]  # its fields; of a Parquet file, the columns that were asked for
    read: int  # bytes of the file that were read so far

    @property
    def file_name(self) -> str:
        """The file's name without the suffixes that tell its format."""
        return self.file.with_suffix("").stem if self.file.suffix.lower() in COMPRESSIONS else self.file.stem

    @property
    def place(self) -> str:
        """The file, and the line in it."""
        return f"{self.file}, line {self.number}"


class Piece(NamedTuple):
    """A piece of text that is not empty."""

    text: str  # at most `PIECE_CHARACTERS` characters
    begins_text: bool  # a text begins with it. A plain text file is one text, and so is each turn of a conversation.
    begins_document: bool  # a document begins with it: a row, or a plain text file
    read: int  # bytes of all files that were read so far


@dataclass(frozen=True)
class Corpus:
    """Files that hold text, sorted by path; files of folders that were skipped as drawings or no text; and the JSON
    field or Parquet column with the text."""

    files: tuple[TextFile, ...]
    skipped: tuple[str, ...]
    text_field: str = "text"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)

    def pieces(self) -> Iterator[Piece]:
        """See `read_pieces`."""
        return read_pieces(self.files, self.text_field)


def find_corpus(paths: Iterable[str | Path], text_field: str = "text") -> Corpus:
    """Find the files that paths name or hold, each once and without hidden ones, and check the beginning of each.

    Raises:
        CorpusError: a path does not exist, a file is not what its suffix promises, the first row lacks the field, or
            there is no text at all.
    """
    files, skipped = [], []
    for path, is_named in find_files(paths):
        file = text_file(path)
        suffix = split_suffix(path)[0]
        if suffix in DRAWINGS and not is_named:
            skipped.append(path)
            continue
        try:
            _require_readable(file, text_field)
            files.append(file)
        except CorpusError:
            if is_named or suffix in FORMATS:
                raise
            skipped.append(path)
    if not any(file.size for file in files):
        raise CorpusError(f"there is no text in {', '.join(map(str, paths))}: name files or folders that hold text")
    return Corpus(tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(skipped)), text_field)


def find_files(paths: Iterable[str | Path]) -> Iterator[tuple[str, bool]]:
    """Yield the absolute path of each file once, and whether the caller named it (and not a folder around it). A path
    that does not exist is a `CorpusError`.

    A link keeps its own name, which tells the format: those in the Hub's cache lead to files without a suffix.
    """
    seen = set()
    for path in map(Path, paths):
        # pathlib's own checks raise if a path may not be looked at.
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


def text_file(path: str, default: str = "text") -> TextFile:
    """A file, whose format its suffix tells; `default` if it does not."""
    suffix, compression = split_suffix(path)
    # Many `.json` files hold one object a line. One that does not is no corpus.
    default = "json lines" if suffix == ".json" else default
    return TextFile(path, FORMATS.get(suffix, default), compression, os.path.getsize(path))


def _require_readable(file: TextFile, text_field: str) -> None:
    if file.format != "text":
        next(read_rows(file, text_fields(text_field)), None)
        return
    seen = 0
    for _, line, _ in _lines(file):
        if "\0" in line:
            raise CorpusError(f"{file.path}: not UTF-8 text (it holds zero bytes)")
        seen += len(line)
        if seen > 8192:
            break


# Reading -------------------------------------------------------------------------------------------------------------


def read_pieces(files: Iterable[TextFile], text_field: str = "text") -> Iterator[Piece]:
    """Read the texts of files in pieces.

    Raises:
        CorpusError: undecodable bytes, a malformed line, a missing field or a damaged file. Names file and line.
    """
    before = 0
    for file in files:
        if file.format == "text":
            begins = True
            for text, read in _text_pieces(file):
                yield Piece(text, begins, begins, before + read)
                begins = False
        else:
            for row in read_rows(file, text_fields(text_field)):
                begins_document = True
                for turn in row.turns:
                    begins_text = True
                    for text in _cut(turn):
                        yield Piece(text, begins_text, begins_document, before + row.read)
                        begins_text = begins_document = False
        before += file.size


def text_fields(text_field: str) -> tuple[str, ...]:
    """The fields in which a row's text may be. Spec-Bench's rows have `turns` in place of a `text`."""
    return (text_field, "turns") if text_field == "text" else (text_field,)


def read_rows(
    file: TextFile, fields: Sequence[str], fix: str = NAME_THE_FIELD, more: Sequence[str] = ()
) -> Iterator[Row]:
    """Read the rows of a JSON lines or Parquet file.

    Args:
        file: the file.
        fields: where the text may be. The first of these fields that a row has counts.
        fix: what to do if there is none of them.
        more: columns of a Parquet file to read besides, if there are any.

    Raises:
        CorpusError: as `read_pieces`.
    """
    return _parquet_rows(file, fields, fix, more) if file.format == "parquet" else _json_rows(file, fields, fix)


def _text_pieces(file: TextFile) -> Iterator[tuple[str, int]]:
    """Pieces that end with a line, if their lines are short, and the bytes that were read so far."""
    pending, read = "", 0
    for _, line, read in _lines(file):
        for text in _cut(line):
            if len(pending) + len(text) > PIECE_CHARACTERS:
                yield pending, read
                pending = ""
            pending += text
    if pending:
        yield pending, read


def _cut(text: str) -> Iterator[str]:
    """Cut a text into pieces, before white space if there is any: most tokenizers cut there too."""
    # JSON may carry half of a surrogate pair, which no tokenizer takes. The Unicode standard's stand-in is U+FFFD.
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


def _lines(file: TextFile) -> Iterator[tuple[int, str, int]]:
    """The lines of a file, with their numbers, from 1, and the bytes that were read so far."""
    with _naming_damage(file), open(file.path, "rb") as raw, _unpacked(raw, file) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), 1):
            place = f"{file.path}, line {number}"
            if len(line) == LONGEST_LINE:
                raise CorpusError(f"{place}: longer than {LONGEST_LINE} bytes; break it into lines")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise CorpusError(f"{place}: not UTF-8 text ({error.reason}); convert the file to UTF-8") from None
            yield number, text, raw.tell()


def _unpacked(raw: BinaryIO, file: TextFile) -> BinaryIO:
    if file.compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if file.compression == "xz":
        return lzma.LZMAFile(raw)
    if file.compression == "zstd":
        return io.BufferedReader(_pyarrow(file).input_stream(raw, compression="zstd"))
    return raw


def _json_rows(file: TextFile, fields: Sequence[str], fix: str) -> Iterator[Row]:
    for number, line, read in _lines(file):
        if line.isspace():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise CorpusError(f"a JSON object is expected, this is {shown_value(values)}")
            field = next((field for field in fields if field in values), None)
            if field is None:
                problem = f"no field {' or '.join(map(repr, fields))}; there are {sorted(values)[:20]}"
                raise CorpusError(f"{problem}: {fix}")
            yield Row(Path(file.path), number, field, _turns(values[field], field), values, read)
            continue
        except CorpusError as error:
            problem = str(error)
        except RecursionError:
            problem = "not a usable JSON object (nested too deeply)"
        except ValueError as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            problem = f"not a JSON object ({reason}); each line must hold one"
        raise CorpusError(f"{file.path}, line {number}: {problem}")


def _turns(value: Any, field: str) -> tuple[str, ...]:
    turns = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for turn in turns:
        if not isinstance(turn, str):
            raise CorpusError(f"field {field!r} must hold text or a list of texts, it holds {shown_value(turn)}")
    return turns


def _parquet_rows(file: TextFile, fields: Sequence[str], fix: str, more: Sequence[str]) -> Iterator[Row]:
    if file.compression:
        raise CorpusError(f"{file.path}: a Parquet file is compressed inside; unpack this one first")
    pyarrow = _pyarrow(file)
    with _naming_damage(file), pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=1 << 20) as table:
        names = table.schema_arrow.names
        field = next((field for field in fields if field in names), None)
        if field is None:
            raise CorpusError(f"{file.path}: no column {' or '.join(map(repr, fields))}; there are {names}: {fix}")
        kind = found = table.schema_arrow.field(field).type
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise CorpusError(f"{file.path}: column {field!r} must hold text, it holds {found}")
        columns = list(dict.fromkeys([field, *(name for name in more if name in names)]))
        batches = table.iter_batches(_PARQUET_BATCH_ROWS, columns=columns)
        for number, values in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            read = file.size * number // table.metadata.num_rows
            yield Row(Path(file.path), number, field, _turns(values[field], field), values, read)


def _pyarrow(file: TextFile) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # makes the submodule an attribute
    except ImportError as error:
        problem = "reading this file needs pyarrow; install it with: pip install 'hf-dynspec[build]'"
        raise CorpusError(f"{file.path}: {problem}") from error
    return pyarrow


@contextmanager
def _naming_damage(file: TextFile) -> Iterator[None]:
    """Raise what reading raises as a `CorpusError` that names the file."""
    try:
        yield
    except (CorpusError, GeneratorExit):
        raise
    except (PermissionError, FileNotFoundError) as error:
        raise CorpusError(f"{file.path}: cannot be opened: {error.strerror}") from error
    except Exception as error:  # pyarrow's and the decompressors' errors have no common class
        raise CorpusError(f"{file.path}: the file is damaged or not what its suffix says: {error}") from error
