"""Safetensors files that may be damaged or hostile: headers are checked before memory is taken."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from ..errors import ArtifactError, ConfigurationError
from ..files import DEFAULT_SHARD_SIZE, open_file, parse_strict_json
from ..storable import TensorRule
from ..vocabulary import TokenizerFingerprint
from .config import INDEX_FILE, LIBRARY_NAME, WEIGHTS_FILE, WeightsDigest

LARGEST_FILE = 2**31
LARGEST_TOTAL = 2**33
LONGEST_INDEX = 256 * 2**10
LONGEST_HEADER = 16 * 2**20
MOST_TENSORS = 64  # in all shards together

# The dtypes that tensors may have, by the names that safetensors gives them.
DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_FETCH_AGAIN = "Download or write it again."
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]B", re.IGNORECASE)
_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def is_weights_name(filename: str) -> bool:
    """Whether a file's name is one that `weights_files` gives for some number of shards."""
    return _WEIGHTS_NAME.fullmatch(filename) is not None


# Headers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorHeader:
    """A tensor before it is loaded. The dtype is torch's, or the file's name of one that is not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file that may be anything. safetensors checks that the tensors fill the file exactly.

    Raises:
        ArtifactError: it is no file, a pickle, its header is damaged or too long, or it cannot be read, here or within
            the block.
    """
    with open_file(path, path.name) as file:
        prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if length > LONGEST_HEADER:
        if prefix.startswith(_PICKLE_STARTS):
            problem = "is a pickle or zip file under another name; pickles run code when they are loaded"
            raise ArtifactError(path.name, problem, "Get it from its author as real safetensors.")
        problem = f"claims {length} bytes, and {LONGEST_HEADER} are the most"
        raise ArtifactError(f"{path.name}: header", problem, _FETCH_AGAIN)
    try:
        with safe_open(path, "pt") as opened:
            yield opened
    except (SafetensorError, OSError, MemoryError) as error:
        raise ArtifactError(path.name, f"cannot be read: {error}", _FETCH_AGAIN) from error


def read_headers(files: Iterable[Path], most_tensors: int, most_bytes: int) -> dict[str, dict[str, TensorHeader]]:
    """Shapes and dtypes of all tensors by file and name, before any of them is loaded.

    Raises:
        ArtifactError: as `open_safetensors`; there are too many tensors or bytes, or two files have the same tensor.
    """
    headers: dict[str, dict[str, TensorHeader]] = {}
    places: dict[str, str] = {}
    total = 0
    for path in files:
        with open_safetensors(path) as file:
            total += path.stat().st_size
            names = file.keys()
            if len(places) + len(names) > most_tensors:
                problem = f"holds {len(places) + len(names)} tensors, and {most_tensors} are the most"
                raise ArtifactError(f"{path.name}: header", problem, _FETCH_AGAIN)
            if total > most_bytes:
                raise ArtifactError(path.name, f"{total} bytes in all, and {most_bytes} are the most", _FETCH_AGAIN)
            headers[path.name] = {}
            for name in names:
                if places.setdefault(name, path.name) != path.name:
                    raise ArtifactError(f"{path.name}: {name}", f"is in {places[name]} too", _FETCH_AGAIN)
                part = file.get_slice(name)
                dtype = part.get_dtype()
                headers[path.name][name] = TensorHeader(tuple(part.get_shape()), DTYPES.get(dtype, dtype))
    return headers


# Writing -------------------------------------------------------------------------------------------------------------


def serialize_tensors(
    tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = DEFAULT_SHARD_SIZE
) -> dict[str, bytes]:
    """The contents of the files for these tensors, by the names of `weights_files`. Equal tensors give equal bytes. A
    tensor larger than a shard gets a file of its own.

    Raises:
        ArtifactError: a value is not a tensor that safetensors can hold.
        ConfigurationError: the limit is not a size.
    """
    require_shard_size(max_shard_size)
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ArtifactError(f"{WEIGHTS_FILE}: {name}", f"is a {type(tensor).__name__}", "Give a tensor by name.")
    if len(tensors) > MOST_TENSORS:
        problem = f"holds {len(tensors)} tensors, and {MOST_TENSORS} are the most"
        raise ArtifactError(WEIGHTS_FILE, problem, "Join tensors of one kind.")
    files = {}
    try:
        # Clones: safetensors refuses tensors that share memory, and they would not be split.
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
        split = split_torch_state_dict_into_shards(copies, max_shard_size=max_shard_size)
        for filename, names in split.filename_to_tensors.items():
            # One entry only: safetensors writes several in any order.
            files[filename] = save({name: copies[name] for name in names}, metadata={"library_name": LIBRARY_NAME})
    except (SafetensorError, KeyError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ArtifactError(WEIGHTS_FILE, f"cannot hold these tensors: {error}", "Give dense tensors.") from error
    if split.is_sharded:
        index = _index(split.filename_to_tensors, split.metadata["total_size"])
        files[INDEX_FILE] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("utf-8")
    return files


def require_shard_size(max_shard_size: int | str) -> None:
    """Refuse a limit that is neither a positive number of bytes nor a text such as `"500MB"`."""
    is_number = isinstance(max_shard_size, int) and not isinstance(max_shard_size, bool) and max_shard_size > 0
    if not is_number and not (isinstance(max_shard_size, str) and _SIZE.fullmatch(max_shard_size.strip())):
        problem = f"must be a number of bytes or a text such as '500MB', got {max_shard_size!r:.80}"
        raise ConfigurationError(f"max_shard_size {problem}")


def _index(names_by_file: Mapping[str, Sequence[str]], total_size: int) -> dict[str, Any]:
    """The contents of `model.safetensors.index.json`."""
    weight_map = {name: filename for filename, names in names_by_file.items() for name in names}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


# Reading -------------------------------------------------------------------------------------------------------------


def digest_bytes(data: bytes) -> WeightsDigest:
    """The digest of a file's contents."""
    return WeightsDigest(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def digest_file(file: BinaryIO) -> WeightsDigest:
    """The digest of a file from its current position on, without holding it in memory."""
    digest, size = hashlib.sha256(), 0
    while chunk := file.read(2**20):
        digest.update(chunk)
        size += len(chunk)
    return WeightsDigest(sha256=digest.hexdigest(), size=size)


def require_weights_sizes(weights: Mapping[str, WeightsDigest]) -> None:
    """Check the sizes that a configuration gives its files of tensors, alone and together, before any of them is
    fetched."""
    for name, digest in weights.items():
        most = LONGEST_INDEX if name == INDEX_FILE else LARGEST_FILE
        if digest.size > most:
            raise ArtifactError(name, f"has {digest.size} bytes, and {most} are the most", _FETCH_AGAIN)
    total = sum(digest.size for digest in weights.values())
    if total > LARGEST_TOTAL:
        raise ArtifactError(INDEX_FILE, f"{total} bytes in all shards, and {LARGEST_TOTAL} are the most", _FETCH_AGAIN)


def read_tensors(
    paths: Mapping[str, Path],
    weights: Mapping[str, WeightsDigest],
    rules: Mapping[str, TensorRule],
    tokenizer: TokenizerFingerprint,
    eos_token_ids: tuple[int, ...],
) -> dict[str, torch.Tensor]:
    """Read all tensors of an artifact, in the dtypes of the files. No more memory is taken than tensors that follow
    the rules need.

    Args:
        paths: the files by the names of `weights_files`.
        weights: their digests, by the same names.
        rules: by tensor, see `Storable.tensor_rules_for`; a tensor without a rule is refused.
        tokenizer: the tokenizer of the token ids.
        eos_token_ids: the ids that every ranking has to hold.
    """
    for name, digest in weights.items():
        with open_file(paths[name], name) as file:
            size = file.seek(0, 2)
        if size != digest.size:
            problem = f"has {size} bytes, and config.json was written with a file of {digest.size}"
            raise ArtifactError(name, problem, _FETCH_AGAIN)
    shards = {name: path for name, path in paths.items() if name != INDEX_FILE}
    for name, headers in read_headers(shards.values(), MOST_TENSORS, LARGEST_TOTAL).items():
        for tensor, header in headers.items():
            _check_rule(f"{name}: {tensor[:80]}", tensor, header, rules, tokenizer)
    names_by_file, tensors = {}, {}
    for name, path in shards.items():
        # Whole, and not by tensors: the digest is of the bytes that are used, even if the file changes meanwhile.
        loaded = _load(name, _read_whole(path, name, weights[name]))
        check_tensors(name, loaded, rules, tokenizer, eos_token_ids)
        names_by_file[name] = list(loaded)
        tensors |= loaded
    if INDEX_FILE in weights:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = _read_whole(paths[INDEX_FILE], INDEX_FILE, weights[INDEX_FILE])
        if parse_strict_json(index, INDEX_FILE) != _index(names_by_file, total):
            raise ArtifactError(INDEX_FILE, "contradicts the shards", _FETCH_AGAIN)
    return tensors


def check_tensors(
    filename: str,
    tensors: Mapping[str, torch.Tensor],
    rules: Mapping[str, TensorRule],
    tokenizer: TokenizerFingerprint,
    eos_token_ids: tuple[int, ...],
) -> None:
    """Hold tensors against their rules, before they are written or after they were read."""
    for name, tensor in tensors.items():
        field = f"{filename}: {name[:80]}"
        _check_rule(field, name, TensorHeader(tuple(tensor.shape), tensor.dtype), rules, tokenizer)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(field, "holds NaN or infinity", "Train or build it again.")
        if rules[name].check_contents is not None:
            rules[name].check_contents(field, tensor, tokenizer, eos_token_ids)


def _read_whole(path: Path, name: str, digest: WeightsDigest) -> bytes:
    try:
        with open_file(path, name) as file:
            data = file.read(digest.size)
    except (OSError, MemoryError) as error:
        raise ArtifactError(name, f"cannot be read: {error}", _FETCH_AGAIN) from error
    if digest_bytes(data) != digest:
        problem = "is not the file that config.json was written with: their SHA-256 differ"
        raise ArtifactError(name, problem, _FETCH_AGAIN)
    return data


def _load(name: str, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise ArtifactError(name, f"cannot be read: {error}", _FETCH_AGAIN) from error


def _check_rule(
    field: str, name: str, header: TensorHeader, rules: Mapping[str, TensorRule], tokenizer: TokenizerFingerprint
) -> None:
    """Check a tensor's name, dtype and shape."""
    if name not in rules:
        problem = f"is not a tensor of the artifact's policy ({', '.join(rules) or 'which has none'})"
        fix = "Remove the tensor, or declare it in tensor_rules if the policy's class is yours."
        raise ArtifactError(field, problem, fix)
    rule, shape, largest = rules[name], header.shape, rules[name].largest_for(tokenizer)
    if header.dtype not in [DTYPES.get(one) for one in rule.dtypes]:
        fix = f"Store the tensor as {' or '.join(rule.dtypes)}."
        raise ArtifactError(f"{field}.dtype", f"is {header.dtype}", fix)
    if len(shape) != len(largest) or not all(1 <= n <= most for n, most in zip(shape, largest, strict=True)):
        problem = f"has shape {list(shape)}, not {len(largest)} dimensions of at least 1 and at most {list(largest)}"
        raise ArtifactError(f"{field}.shape", problem[:200], "Build the tensor again with this tokenizer.")
