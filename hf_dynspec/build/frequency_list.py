"""Frequency lists as other projects keep them: `.pt` files of token ids, most frequent first.

FR-Spec (Zhao et al., 2025) publishes `freq_32768.pt`, a list of ids; SGLang (`--speculative-token-map`) and vLLM read
the same; speculators keeps `token_freq.pt`, the count of each id.
"""

import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, shown_value
from ..files import is_there, read_file

# Bounds what a file can make this process allocate, which is up to sixty times as much. Real files hold at most one
# entry, of some ten bytes, for each id.
_MOST_BYTES_PER_ID = 24
_MOST_ENTRIES_PER_ID = 4
_MOST_MEMBERS = 64


def import_frequency_list(
    path: str | Path, vocabulary_size: int, eos_token_ids: Iterable[int] = (), *, field: str | None = None
) -> list[int]:
    """Read a `.pt` frequency list without running any code that the file may hold.

    Args:
        path: a file that holds a list of ids or an integer tensor `[n]`, most frequent first, or `{id: count}` as
            speculators writes it, which is sorted by falling count and rising id.
        vocabulary_size: every id must lie below it.
        eos_token_ids: ids that the list must hold. Those that it lacks are put in front, as FR-Spec forces them in.
        field: what errors call the file (None: its name).

    Returns:
        the ids without repeats (FR-Spec's lists can hold one), each where it stood first.

    Raises:
        ArtifactError: the file is missing, damaged, too large for the vocabulary, or tries to run code; it holds
            something else than ids and counts; an id is outside the vocabulary; the list is empty.
    """
    path = Path(path)
    field = field or path.name
    if not is_there(path):
        raise ArtifactError(field, f"there is no file {path}", "Give the path of a .pt file")
    data = _unpacked(read_file(path, field, _most_bytes(vocabulary_size)), vocabulary_size, field)
    ids = _as_ids(_load(data, field), vocabulary_size, field)
    if not ids:
        raise ArtifactError(field, "holds no token ids", "Give a list that was counted on some text")
    outside = next((token_id for token_id in ids if not 0 <= token_id < vocabulary_size), None)
    if outside is not None:
        raise ArtifactError(
            field,
            f"holds the id {shown_value(outside)}, but the tokenizer's ids are 0 … {vocabulary_size - 1}",
            "Give the list of this tokenizer, or the tokenizer of this list",
        )
    present = set(ids)
    return list(dict.fromkeys([*(token_id for token_id in eos_token_ids if token_id not in present), *ids]))


def _most_bytes(vocabulary_size: int) -> int:
    return _MOST_BYTES_PER_ID * vocabulary_size + (1 << 20)


def _unpacked(data: bytes, vocabulary_size: int, field: str) -> bytes:
    """The same file without compression, where it is an archive. Sizes are held against what a list can need before
    anything is unpacked, and every member against its checksum, which torch does not look at.

    What is loaded is made of what was checked, so that nothing depends on two readers finding the same members.
    """
    if not data.startswith(b"PK") and not zipfile.is_zipfile(BytesIO(data)):
        return data
    unpacked = BytesIO()
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive, zipfile.ZipFile(unpacked, "w") as copy:
            _refuse_oversized(archive.infolist(), vocabulary_size, field)
            for member in archive.infolist():
                copy.writestr(member.filename, archive.read(member))
    except ArtifactError:
        raise
    except Exception as error:  # what damaged archives make zipfile raise is not written down anywhere
        problem = f"is a damaged archive: {error}"
        raise ArtifactError(field, problem, "Download or write the file again") from error
    return unpacked.getvalue()


def _refuse_oversized(members: list[zipfile.ZipInfo], vocabulary_size: int, field: str) -> None:
    """Compare the unpacked size with what a list for this vocabulary can need."""
    size = sum(member.file_size for member in members)
    problem = None
    if size > _most_bytes(vocabulary_size):
        problem = f"unpacks to {size} bytes, too many for a list of {vocabulary_size} ids"
    elif len({member.filename for member in members}) < len(members) or len(members) > _MOST_MEMBERS:
        problem = f"holds {len(members)} parts, where a list has half a dozen of different names"
    if problem is not None:
        raise ArtifactError(field, problem, "Give a file that holds only the list")


def _load(data: bytes, field: str) -> Any:
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file can make the reader raise anything
        # What torch says advises to run what is in the file.
        raise ArtifactError(
            field,
            f"is not a plain list, tensor or dictionary of numbers ({type(error).__name__})",
            "Nothing in the file was run; ask whoever made it for a plain list written by torch.save",
        ) from error


def _as_ids(content: Any, vocabulary_size: int, field: str) -> list[int]:
    """The ids of a loaded file in frequency order, repeats included."""
    entries = content.numel() if isinstance(content, torch.Tensor) else len(content) if _is_container(content) else 0
    if entries > _MOST_ENTRIES_PER_ID * vocabulary_size:
        raise ArtifactError(
            field, f"holds {entries} entries for {vocabulary_size} ids", "Give a list that holds each id once"
        )
    if isinstance(content, torch.Tensor):
        if content.dim() != 1 or content.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            problem = f"holds a {content.dtype} tensor of shape {tuple(content.shape)}"
            raise ArtifactError(field, problem, "Give an integer tensor with one dimension")
        if content.layout != torch.strided or content.device.type != "cpu":
            raise ArtifactError(field, "holds a tensor without its values", "Write the values as a plain list")
        return content.tolist()
    if not _is_container(content):
        problem = f"holds a {type(content).__name__}, not a list of token ids"
        raise ArtifactError(field, problem, "Give a list, a tensor or a dictionary of counts")
    for token_id in content:
        if type(token_id) is not int:
            problem = f"holds a {type(token_id).__name__} where a token id is expected"
            raise ArtifactError(field, problem, "Give a list of whole numbers")
    if not isinstance(content, dict):
        return list(content)
    for count in content.values():
        if type(count) not in (int, float) or not 0 <= count < float("inf"):
            raise ArtifactError(
                field, f"holds {shown_value(count)} where a count is expected", "Give counts of zero or more"
            )
    return sorted(content, key=lambda token_id: (-content[token_id], token_id))


def _is_container(content: Any) -> bool:
    return isinstance(content, list | tuple | dict)
