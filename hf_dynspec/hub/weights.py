"""`model.safetensors`: everything that the file claims about itself is checked before memory is taken for it."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..configuration import LIBRARY_NAME, TokenizerFingerprint, WeightsDigest, parse_strict_json
from ..errors import ArtifactError

WEIGHTS_FILE = "model.safetensors"

LARGEST_FILE = 512 * 2**20
LONGEST_HEADER = 256 * 2**10
MOST_TENSORS = 64
WIDEST_HIDDEN = 32768  # of hidden states, about twice the widest in use
PREFIX_LENGTH = 8  # a safetensors file begins with the length of its header, a little-endian 64-bit number

ITEM_SIZES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}

_FETCH_AGAIN = "Download or write the artifact again."
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class TensorRule:
    """What a tensor of a certain name may be.

    Args:
        dtypes: the safetensors names of its dtypes.
        dimensions: how many dimensions it has.
        most_elements: its largest number of elements, for a tokenizer.
        check_contents: called with the tensor's field, the tensor, the tokenizer and the end-of-sequence ids to cover.
            Raises `ArtifactError`.
    """

    dtypes: tuple[str, ...]
    dimensions: int
    most_elements: Callable[[TokenizerFingerprint], int]
    check_contents: Callable[[str, torch.Tensor, TokenizerFingerprint, tuple[int, ...]], None]


def check_token_ranking(
    field: str, ranking: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that a ranking `[n]` holds unique ids of the tokenizer, the end-of-sequence ids among them.

    Raises:
        ArtifactError: it does not. Its `field` is `field`.
    """
    rebuild = "Build the ranking again with the tokenizer that config.json names."
    least, most = int(ranking.min()), int(ranking.max())
    if least < 0 or most >= tokenizer.size:
        outside = least if least < 0 else most
        raise ArtifactError(field, f"holds the id {outside}, and ids run from 0 to {tokenizer.size - 1}", rebuild)
    counts = torch.bincount(ranking, minlength=tokenizer.size)
    if int(counts.max()) > 1:
        raise ArtifactError(field, f"repeats the id {int(counts.argmax())}", rebuild)
    for token_id in eos_token_ids:
        if token_id >= tokenizer.size or not counts[token_id]:
            problem = f"lacks the end-of-sequence id {token_id}, so that no draft could ever end"
            raise ArtifactError(field, problem, "Append the id to the ranking and write the artifact again.")


def check_clusters(
    field: str, clusters: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that clusters `[n]` part the tokenizer's ids: one for each id, numbered from 0 without gaps.

    Raises:
        ArtifactError: they do not. Its `field` is `field`.
    """
    rebuild = "Build the clusters again with the tokenizer that config.json names."
    if clusters.shape[0] != tokenizer.size:
        raise ArtifactError(field, f"holds {clusters.shape[0]} clusters for {tokenizer.size} ids", rebuild)
    least, most = int(clusters.min()), int(clusters.max())
    if least < 0 or most >= tokenizer.size:
        outside = least if least < 0 else most
        raise ArtifactError(field, f"holds the cluster {outside} of at most {tokenizer.size}", rebuild)
    sizes = torch.bincount(clusters)
    if int(sizes.min()) < 1:
        raise ArtifactError(field, f"leaves the cluster {int(sizes.argmin())} without tokens", rebuild)


def _accept_contents(
    field: str, tensor: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """For tensors of which nothing is asked but the finite numbers that are asked of all."""


# A tensor's rule is found by the last part of its dotted name; the parts before it say which nested policy owns it.
TENSOR_RULES = {
    "ranking": TensorRule(("I32", "I64"), 1, lambda tokenizer: tokenizer.size, check_token_ranking),
    "clusters": TensorRule(("I32", "I64"), 1, lambda tokenizer: tokenizer.size, check_clusters),
    "centroids": TensorRule(("F32",), 2, lambda tokenizer: tokenizer.size * WIDEST_HIDDEN, _accept_contents),
}


def serialize_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a `model.safetensors` that holds these tensors.

    Raises:
        ArtifactError: a value is not a tensor that safetensors can hold.
    """
    copies = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ArtifactError(f"{WEIGHTS_FILE}: {name}", f"is a {type(tensor).__name__}", "Give a tensor by name.")
        # A clone: safetensors refuses tensors that share memory.
        copies[name] = tensor.detach().cpu().contiguous().clone()
    try:
        return save(copies, metadata={"format": "pt", "library_name": LIBRARY_NAME})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ArtifactError(WEIGHTS_FILE, f"cannot hold these tensors: {error}", "Give dense tensors.") from error


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


def read_tensors(
    file: BinaryIO, digest: WeightsDigest, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Read all tensors of a file that may be damaged or hostile.

    No more memory is taken than tensors that follow `TENSOR_RULES` need, whatever the file claims.

    Args:
        file: seekable.
        digest: the file that the configuration was written with.
        tokenizer: whose ids the tensors speak of.
        eos_token_ids: the ids that every ranking has to hold.

    Returns:
        CPU tensors by name, in the dtypes of the file.

    Raises:
        ArtifactError: the file is not the one of the digest, its header breaks a limit or contradicts the file, or a
            tensor has an unknown name, a wrong dtype or shape, or contents that its rule refuses.
    """
    size = file.seek(0, 2)
    if size != digest.size:
        problem = f"has {size} bytes, and config.json was written with a file of {digest.size}"
        raise ArtifactError(WEIGHTS_FILE, problem, _FETCH_AGAIN)
    header = read_header(file, size)
    _check_layout(header, size)
    _check_rules(header, tokenizer)
    file.seek(0)
    data = file.read(size)
    if digest_bytes(data) != digest:
        problem = "is not the file that config.json was written with: their SHA-256 differ"
        raise ArtifactError(WEIGHTS_FILE, problem, _FETCH_AGAIN)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ArtifactError(WEIGHTS_FILE, f"cannot be read: {error}", _FETCH_AGAIN) from error
    for name, tensor in tensors.items():
        field = f"{WEIGHTS_FILE}: {name}"
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(field, "holds NaN or infinity", "Train or build it again.")
        _rule(name).check_contents(field, tensor, tokenizer, eos_token_ids)
    return tensors


@dataclass(frozen=True)
class _Header:
    """What the file says it holds: its metadata, the entry of each tensor, and where the tensors' bytes begin."""

    metadata: Mapping[str, Any]
    entries: Mapping[str, Any]
    data_start: int


def read_header(file: BinaryIO, size: int) -> _Header:
    """Parse the header of a file of `size` bytes, and check its length, keys and number of tensors.

    Raises:
        ArtifactError: one of them is wrong.
    """
    field = f"{WEIGHTS_FILE}: header"
    if size > LARGEST_FILE:
        raise ArtifactError(WEIGHTS_FILE, f"has {size} bytes, and {LARGEST_FILE} are the most", _FETCH_AGAIN)
    file.seek(0)
    prefix = file.read(PREFIX_LENGTH)
    if prefix.startswith(_PICKLE_STARTS):
        problem = "is a pickle or zip file under another name; pickles run code when they are loaded"
        raise ArtifactError(WEIGHTS_FILE, problem, "Get the artifact from its author as real safetensors.")
    length = int.from_bytes(prefix, "little")
    if len(prefix) < PREFIX_LENGTH or length > min(LONGEST_HEADER, size - PREFIX_LENGTH):
        problem = f"claims {length} bytes, in a file of {size} where {LONGEST_HEADER} are the most"
        raise ArtifactError(field, problem, _FETCH_AGAIN)
    header = parse_strict_json(file.read(length), field)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ArtifactError(f"{field}: __metadata__", "must map text to text", _FETCH_AGAIN)
    if len(header) > MOST_TENSORS:
        raise ArtifactError(field, f"lists {len(header)} tensors, and {MOST_TENSORS} are the most", _FETCH_AGAIN)
    return _Header(metadata, header, PREFIX_LENGTH + length)


def _check_layout(header: _Header, size: int) -> None:
    """Check that the tensors have known dtypes and fill the file from end to end: no gap, no overlap, no remainder."""
    spans = []
    for name, entry in header.entries.items():
        field = f"{WEIGHTS_FILE}: {name}"
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
        raise ArtifactError(f"{WEIGHTS_FILE}: header", problem, _FETCH_AGAIN)


def _check_rules(header: _Header, tokenizer: TokenizerFingerprint) -> None:
    """Check each tensor's name, dtype and shape against its rule."""
    for name, entry in header.entries.items():
        rule = _rule(name)
        field = f"{WEIGHTS_FILE}: {name}"
        if entry["dtype"] not in rule.dtypes:
            allowed = " or ".join(rule.dtypes)
            raise ArtifactError(f"{field}.dtype", f"is {entry['dtype']}", f"Store the tensor as {allowed}.")
        most = rule.most_elements(tokenizer)
        if len(entry["shape"]) != rule.dimensions or not 1 <= math.prod(entry["shape"]) <= most:
            problem = f"has shape {entry['shape']}, not {rule.dimensions} dimensions with 1 to {most} elements"
            raise ArtifactError(f"{field}.shape", problem[:200], "Build the tensor again with this tokenizer.")


def _rule(name: str) -> TensorRule:
    *owners, last = name.split(".")
    if last not in TENSOR_RULES or not all(owner.isascii() and owner.isdigit() for owner in owners):
        problem = f"is not a tensor that this version knows ({', '.join(TENSOR_RULES)})"
        raise ArtifactError(
            f"{WEIGHTS_FILE}: {name[:80]}", problem, "Remove the tensor, or install the hf_dynspec that wrote it."
        )
    return TENSOR_RULES[last]


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48 for value in values)
    )
