"""The files of EAGLE checkpoints, which are not trusted: JSON, safetensors in one or more files, and pickles if
allowed."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...artifacts import pickles, tensors
from ...artifacts.tensors import TensorHeader, open_safetensors
from ...errors import ArtifactError, shown_value
from ...files import is_there, parse_strict_json, read_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
# The files to download.
HEAD_FILES = (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, "model-*.safetensors")

FETCH_AGAIN = "Download or convert the checkpoint again."
# The dtypes of weights and token ids, by their names in safetensors.
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
IDS = {"I32": torch.int32, "I64": torch.int64}

_LARGEST_JSON = 16 * 2**20
# All files of tensors together.
_LARGEST_TOTAL = 2**35
_MOST_TENSORS = 256
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.safetensors")


def read_json(folder: Path, filename: str) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        ArtifactError: the file is missing, too large, or not strict JSON.
    """
    path = folder / filename
    if not is_there(path):
        raise ArtifactError(filename, f"is not in {folder}", f"A checkpoint needs it. {FETCH_AGAIN}")
    return parse_strict_json(read_file(path, filename, _LARGEST_JSON), filename)


def safetensors_files(folder: Path) -> list[Path] | None:
    """The single file, or the files that an index names (None: there are no safetensors)."""
    if is_there(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if not is_there(folder / INDEX_FILE):
        return None
    return shards_of(folder, set(read_weight_map(folder).values()))


def read_weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index of a checkpoint says. Raises `ArtifactError` if it is damaged."""
    shards = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ArtifactError(f"{INDEX_FILE}: weight_map", "must map tensors to files", FETCH_AGAIN)
    return shards


def shards_of(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of these names, in order. Raises `ArtifactError` if one is no name of safetensors, or not there."""
    for name in sorted(names):
        # A path could lead anywhere on the disk.
        if not _SHARD_NAME.fullmatch(name) or not is_there(folder / name):
            problem = f"names {shown_value(name)}, which is not there"
            raise ArtifactError(f"{INDEX_FILE}: weight_map", problem, FETCH_AGAIN)
    return [folder / name for name in sorted(names)]


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Read shapes and dtypes of all tensors without loading them.

    Raises:
        ArtifactError: a file cannot be read, there are too many bytes or tensors, or a tensor is in two files.
    """
    headers = tensors.read_headers(files, _MOST_TENSORS, _LARGEST_TOTAL)
    return {name: header for held in headers.values() for name, header in held.items()}


def load_tensors(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """All tensors on the CPU, by their names in the files. Raises `ArtifactError` if a file cannot be read."""
    loaded: dict[str, torch.Tensor] = {}
    for path in files:
        with open_safetensors(path) as file:
            loaded |= {name: file.get_tensor(name) for name in file.keys()}
    return loaded


def load_pickle(folder: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """Load `pytorch_model.bin`, if allowed, without running code in it.

    Raises:
        ArtifactError: it is missing, not allowed, damaged, or holds anything but tensors with their values.
    """
    path = folder / PICKLE_FILE
    if not allow_pickle or not is_there(path):
        found = sorted(file.name for file in folder.glob("*.bin"))
        if allow_pickle or not found:
            problem = f"is not in {folder}"
            fix = (
                f"A checkpoint needs it. {FETCH_AGAIN} A repository with {PICKLE_FILE} alone needs allow_pickle=True."
            )
            raise ArtifactError(WEIGHTS_FILE, problem, fix)
        fix = "If you trust its author, pass allow_pickle=True; it is loaded with weights_only=True."
        raise ArtifactError(found[0], f"is a pickle, and {folder} has no {WEIGHTS_FILE}", fix)
    loaded = pickles.load_pickle(path, PICKLE_FILE, _LARGEST_TOTAL)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise ArtifactError(PICKLE_FILE, "is not a dictionary of tensors", FETCH_AGAIN)
    if any(one.layout != torch.strided or one.device.type != "cpu" for one in loaded.values()):
        raise ArtifactError(PICKLE_FILE, "holds tensors without their values", FETCH_AGAIN)
    # Views can claim any size for a few bytes.
    claimed, size = sum(one.numel() * one.element_size() for one in loaded.values()), path.stat().st_size
    if claimed > size:
        problem = f"holds tensors of {claimed} bytes in a file of {size}"
        raise ArtifactError(PICKLE_FILE, problem, FETCH_AGAIN)
    return loaded
