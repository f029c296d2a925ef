"""`model.safetensors`, or its shards and their index: everything that the files claim about themselves is checked
before memory is taken for it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..errors import ArtifactError, ConfigurationError
from ..files import DEFAULT_SHARD_SIZE, parse_strict_json
from ..storable import TensorRule
from ..vocabulary import TokenizerFingerprint
from .config import INDEX_FILE, LIBRARY_NAME, WEIGHTS_FILE, WeightsDigest

# A shard holds at least one tensor, so that a tensor's size is limited by LARGEST_FILE too.
LARGEST_FILE = 2**31
LARGEST_TOTAL = 2**33
LONGEST_HEADER = 256 * 2**10
MOST_TENSORS = 64  # in all shards together
PREFIX_LENGTH = 8  # a safetensors file begins with the length of its header, a little-endian 64-bit number

ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}

_FETCH_AGAIN = "Download or write the artifact again."
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


_SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)
_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def is_weights_name(filename: str) -> bool:
    """Whether a file's name is one that `weights_files` gives for some number of shards."""
    return _WEIGHTS_NAME.fullmatch(filename) is not None


def serialize_tensors(
    tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = DEFAULT_SHARD_SIZE
) -> dict[str, bytes]:
    """Return the contents of the files that hold these tensors, by the names of `weights_files`. The same tensors give
    the same bytes, in whichever order they come and however they lie in memory.

    Args:
        tensors: by name.
        max_shard_size: the most bytes of the tensors in one file, or a text such as `"500MB"`. A tensor that is larger
            gets a file of its own.

    Raises:
        ArtifactError: a value is not a tensor that safetensors can hold.
        ConfigurationError: the limit is not a size.
    """
    require_shard_size(max_shard_size)
    copies = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ArtifactError(f"{WEIGHTS_FILE}: {name}", f"is a {type(tensor).__name__}", "Give a tensor by name.")
    for name, tensor in sorted(tensors.items()):
        # A clone: safetensors refuses tensors that share memory, and they would not be split.
        copies[name] = tensor.detach().cpu().contiguous().clone()
    files = {}
    metadata = {"format": "pt", "library_name": LIBRARY_NAME}
    try:
        split = split_torch_state_dict_into_shards(copies, max_shard_size=max_shard_size)
        for filename, names in split.filename_to_tensors.items():
            files[filename] = _canonical(save({name: copies[name] for name in names}, metadata=metadata))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ArtifactError(WEIGHTS_FILE, f"cannot hold these tensors: {error}", "Give dense tensors.") from error
    if split.is_sharded:
        index = _index(split.filename_to_tensors, split.metadata["total_size"])
        files[INDEX_FILE] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("utf-8")
    return files


def _canonical(data: bytes) -> bytes:
    """The same file with its header in one fixed order, as safetensors shuffles the metadata."""
    end = PREFIX_LENGTH + int.from_bytes(data[:PREFIX_LENGTH], "little")
    header = json.dumps(json.loads(data[PREFIX_LENGTH:end]), sort_keys=True, separators=(",", ":")).encode("utf-8")
    header += b" " * (-len(header) % PREFIX_LENGTH)  # so that the tensors stay aligned
    return len(header).to_bytes(PREFIX_LENGTH, "little") + header + data[end:]


def require_shard_size(max_shard_size: int | str) -> None:
    """Check what limits the size of a shard.

    Raises:
        ConfigurationError: it is neither a positive number of bytes nor a text such as `"500MB"`.
    """
    is_number = isinstance(max_shard_size, int) and not isinstance(max_shard_size, bool) and max_shard_size > 0
    if not is_number and not (isinstance(max_shard_size, str) and _SIZE.fullmatch(max_shard_size.strip())):
        problem = f"must be a number of bytes or a text such as '500MB', got {max_shard_size!r:.80}"
        raise ConfigurationError(f"max_shard_size {problem}")


def _index(names_by_file: Mapping[str, Sequence[str]], total_size: int) -> dict[str, Any]:
    """What `model.safetensors.index.json` says: which tensor is in which shard, and the bytes of all tensors."""
    weight_map = {name: filename for filename, names in names_by_file.items() for name in names}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def digest_bytes(data: bytes) -> WeightsDigest:
    """Return the digest of a file's contents."""
    return WeightsDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def digest_file(file: BinaryIO) -> WeightsDigest:
    """Return the digest of a file from its current position on, without holding it in memory."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(2**20):
        digest.update(chunk)
        size += len(chunk)
    return WeightsDigest(sha256=digest.hexdigest(), size=size)


def require_weights_sizes(weights: Mapping[str, WeightsDigest]) -> None:
    """Check the sizes that a configuration gives its files of tensors, before any of them is fetched.

    Raises:
        ArtifactError: a file, or all of them together, are larger than what is read.
    """
    for name, digest in weights.items():
        _require_file_size(name, digest.size)
    total = sum(digest.size for digest in weights.values())
    if total > LARGEST_TOTAL:
        raise ArtifactError(INDEX_FILE, f"{total} bytes in all shards, and {LARGEST_TOTAL} are the most", _FETCH_AGAIN)


def _require_file_size(name: str, size: int) -> None:
    most = LONGEST_HEADER if name == INDEX_FILE else LARGEST_FILE
    if size > most:
        raise ArtifactError(name, f"has {size} bytes, and {most} are the most", _FETCH_AGAIN)


def read_tensors(
    files: Mapping[str, BinaryIO],
    weights: Mapping[str, WeightsDigest],
    rules: Mapping[str, TensorRule],
    tokenizer: TokenizerFingerprint,
    eos_token_ids: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """Read all tensors of files that may be damaged or hostile.

    No more memory is taken than tensors that follow the rules need, whatever the files claim.

    Args:
        files: seekable, by the names of `weights_files`.
        weights: the files that the configuration was written with, by the same names.
        rules: what each tensor may be, see `Storable.tensor_rules_for`; a tensor without a rule is refused.
        tokenizer: whose ids the tensors speak of.
        eos_token_ids: the ids that every ranking has to hold.

    Returns:
        CPU tensors by name, in the dtypes of the files.

    Raises:
        ArtifactError: a file is not the one of its digest, its header breaks a limit or contradicts the file, a
            tensor is in two shards, the index contradicts the shards, or a tensor has an unknown name, a wrong dtype
            or shape, or contents that its rule refuses.
    """
    require_weights_sizes(weights)
    headers = {}
    for name, digest in weights.items():
        size = files[name].seek(0, 2)
        if size != digest.size:
            problem = f"has {size} bytes, and config.json was written with a file of {digest.size}"
            raise ArtifactError(name, problem, _FETCH_AGAIN)
        if name != INDEX_FILE:
            headers[name] = read_header(files[name], size, name)
            _check_layout(name, headers[name], size)
            _check_rules(name, headers[name], rules, tokenizer)
    if INDEX_FILE in weights:
        _check_shards(headers, _read_whole(files, INDEX_FILE, weights))
    tensors = {}
    for name, header in headers.items():
        # Whole, and not by tensors: the digest is of what is used, even if the file is changed meanwhile.
        tensors.update(_load(name, _read_whole(files, name, weights)))
        for tensor in header.entries:
            _check_contents(f"{name}: {tensor}", tensors[tensor], rules[tensor], tokenizer, eos_token_ids)
    return tensors


def _read_whole(files: Mapping[str, BinaryIO], name: str, weights: Mapping[str, WeightsDigest]) -> bytes:
    try:
        files[name].seek(0)
        data = files[name].read(weights[name].size)
    except (OSError, MemoryError) as error:
        raise ArtifactError(name, f"cannot be read: {error}", _FETCH_AGAIN) from error
    if digest_bytes(data) != weights[name]:
        problem = "is not the file that config.json was written with: their SHA-256 differ"
        raise ArtifactError(name, problem, _FETCH_AGAIN)
    return data


def _load(name: str, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise ArtifactError(name, f"cannot be read: {error}", _FETCH_AGAIN) from error


def _check_contents(
    field: str, tensor: torch.Tensor, rule: TensorRule, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ArtifactError(field, "holds NaN or infinity", "Train or build it again.")
    if rule.check_contents is not None:
        rule.check_contents(field, tensor, tokenizer, eos_token_ids)


def _check_shards(headers: Mapping[str, "_Header"], index: bytes) -> None:
    """Check that no tensor is in two shards, and that the index says where the tensors are."""
    seen: dict[str, str] = {}
    for filename, header in headers.items():
        for name in header.entries:
            if name in seen:
                raise ArtifactError(f"{filename}: {name}", f"is in {seen[name]} too", _FETCH_AGAIN)
            seen[name] = filename
    if len(seen) > MOST_TENSORS:
        problem = f"the shards hold {len(seen)} tensors, and {MOST_TENSORS} are the most"
        raise ArtifactError(INDEX_FILE, problem, _FETCH_AGAIN)
    total = sum(header.data_size for header in headers.values())
    expected = _index({filename: list(header.entries) for filename, header in headers.items()}, total)
    if parse_strict_json(index, INDEX_FILE) != expected:
        raise ArtifactError(INDEX_FILE, "does not say what the shards hold", _FETCH_AGAIN)


@dataclass(frozen=True)
class _Header:
    """What the file says it holds: its metadata, the entry of each tensor, and where the tensors' bytes lie."""

    metadata: Mapping[str, Any]
    entries: Mapping[str, Any]
    data_start: int
    data_size: int


def read_header(file: BinaryIO, size: int, filename: str) -> _Header:
    """Parse the header of a file of `size` bytes, and check its length, keys and number of tensors.

    Raises:
        ArtifactError: one of them is wrong.
    """
    field = f"{filename}: header"
    _require_file_size(filename, size)
    file.seek(0)
    prefix = file.read(PREFIX_LENGTH)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_LENGTH or length > min(LONGEST_HEADER, size - PREFIX_LENGTH):
        # Only here: the length of a sound header may begin with the same two bytes, and a pickle's are never one.
        if prefix.startswith(_PICKLE_STARTS):
            problem = "is a pickle or zip file under another name; pickles run code when they are loaded"
            raise ArtifactError(filename, problem, "Get the artifact from its author as real safetensors.")
        problem = f"claims {length} bytes, in a file of {size} where {LONGEST_HEADER} are the most"
        raise ArtifactError(field, problem, _FETCH_AGAIN)
    header = parse_strict_json(file.read(length), field)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ArtifactError(f"{field}: __metadata__", "must map text to text", _FETCH_AGAIN)
    if len(header) > MOST_TENSORS:
        raise ArtifactError(field, f"lists {len(header)} tensors, and {MOST_TENSORS} are the most", _FETCH_AGAIN)
    return _Header(metadata, header, PREFIX_LENGTH + length, size - PREFIX_LENGTH - length)


def _check_layout(filename: str, header: _Header, size: int) -> None:
    """Check that the tensors have known dtypes and fill the file from end to end: no gap, no overlap, no remainder."""
    spans = []
    for name, entry in header.entries.items():
        field = f"{filename}: {name}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ArtifactError(field, "must have exactly a dtype, a shape and data_offsets", _FETCH_AGAIN)
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in ITEM_SIZES:
            known = ", ".join(ITEM_SIZES)
            raise ArtifactError(f"{field}.dtype", f"is none of {known}", f"Store the tensor as one of {known}.")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise ArtifactError(field, "its shape or data_offsets are not lists of whole numbers", _FETCH_AGAIN)
        claimed = math.prod(shape) * ITEM_SIZES[entry["dtype"]]
        if claimed != offsets[1] - offsets[0]:
            problem = "claims a shape whose bytes are not those between its offsets"
            raise ArtifactError(f"{field}.shape", problem, _FETCH_AGAIN)
        spans.append((*offsets, field))
    position = 0
    for start, end, field in sorted(spans):
        if start != position:
            raise ArtifactError(f"{field}.data_offsets", "overlap another tensor or leave a gap", _FETCH_AGAIN)
        position = end
    if header.data_start + position != size:
        problem = f"the tensors claim {position} bytes, and {size - header.data_start} follow the header"
        raise ArtifactError(f"{filename}: header", problem, _FETCH_AGAIN)


def _check_rules(
    filename: str, header: _Header, rules: Mapping[str, TensorRule], tokenizer: TokenizerFingerprint
) -> None:
    """Check each tensor's name, dtype and shape against its rule."""
    for name, entry in header.entries.items():
        if name not in rules:
            problem = f"is not a tensor of the artifact's policy ({', '.join(rules) or 'which has none'})"
            fix = "Remove the tensor, or declare it in tensor_rules if the policy's class is yours."
            raise ArtifactError(f"{filename}: {name[:80]}", problem, fix)
        rule = rules[name]
        field = f"{filename}: {name}"
        if entry["dtype"] not in rule.dtypes:
            allowed = " or ".join(rule.dtypes)
            raise ArtifactError(f"{field}.dtype", f"is {entry['dtype']}", f"Store the tensor as {allowed}.")
        shape, largest = entry["shape"], rule.largest_for(tokenizer)
        if len(shape) != len(largest) or not all(1 <= n <= most for n, most in zip(shape, largest, strict=True)):
            problem = f"has shape {shape}, not {len(largest)} dimensions of at least 1 and at most {list(largest)}"
            raise ArtifactError(f"{field}.shape", problem[:200], "Build the tensor again with this tokenizer.")


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48 for value in values)
    )
