"""Writing artifacts, so that a folder holds the old one or the new one whenever the process is killed."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .. import __version__
from ..errors import ArtifactError
from ..files import DEFAULT_SHARD_SIZE, copy_through, is_there, open_file, write_through
from ..storable import TensorRule
from .card import render_card
from .card_file import may_replace_card
from .config import CARD_FILE, CONFIG_FILE, INDEX_FILE, LIBRARY_NAME, DynSpecConfig, WeightsDigest, require_config_size
from .folder import STAGING_PREFIX, FolderFiles, has_digest, is_own_config, previous_path, read_config
from .reading import read_artifact, require_policy, require_tokenizer
from .tensors import digest_bytes, is_weights_name, read_header, read_tensors, require_shard_size, serialize_tensors


def write_artifact(
    directory: str | os.PathLike,
    config: DynSpecConfig,
    tensors: Mapping[str, torch.Tensor],
    card: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> Path:
    """Write an artifact. Even if the process is killed meanwhile, the folder holds either the old one or the new one.

    What `read_artifact` would refuse is not written. A model card that somebody edited is kept; one that `render_card`
    made is replaced.

    Args:
        directory: made if needed. Must not hold another library's `config.json` or `model.safetensors`.
        config: its `weights` and `hf_dynspec_version` are filled in here.
        tensors: CPU or device tensors by name; none are fine.
        card: the text of the model card (None: `render_card(config)`).
        max_shard_size: the most bytes of the tensors in one file, or a text such as `"500MB"`; beyond it they are
            split into shards. A single tensor is never split.

    Returns:
        The folder.

    Raises:
        ArtifactError: the tensors or the policy would be refused on reading, or the folder belongs to something else.
        ConfigurationError: `max_shard_size` is not a size.
    """
    directory = Path(directory)
    _require_own_folder(directory)
    weights = _serialize_checked(config, require_policy(config), tensors, max_shard_size)
    digests = {name: digest_bytes(data) for name, data in weights.items()}
    config = replace(config, weights=digests, hf_dynspec_version=__version__)
    with _staged_texts(directory, config, card) as staging:
        for name, data in weights.items():
            write_through(staging / name, data)
        _replace_files(staging, directory, config.weights)
    return directory


def annotate_artifact(
    directory: str | os.PathLike,
    *,
    results: Iterable[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
) -> DynSpecConfig:
    """Add measurements and provenance to an artifact that is on the disk already, and to its model card unless
    somebody edited it. The tensors stay as they are; `config.json` is replaced in one step.

    Args:
        directory: the folder.
        results: rows as in `DynSpecConfig`, see `merge_results`.
        provenance: JSON values, which replace those of the same name.

    Returns:
        The configuration that is in the folder now.

    Raises:
        ArtifactError: the folder does not hold a sound artifact, or there would be too much in its `config.json`.
        ConfigurationError: a row or a value is not as in `DynSpecConfig`.
    """
    config, _ = read_artifact(Path(directory))
    config = with_annotations(config, results=results, provenance=provenance)
    with _staged_texts(Path(directory), config) as staging:
        os.replace(staging / CONFIG_FILE, Path(directory, CONFIG_FILE))
    return config


def with_annotations(
    config: DynSpecConfig, *, results: Iterable[Mapping[str, Any]] = (), provenance: Mapping[str, Any] | None = None
) -> DynSpecConfig:
    """What `annotate_artifact` writes.

    Raises:
        ArtifactError: there would be too much in the `config.json`.
        ConfigurationError: a row or a value is not as in `DynSpecConfig`.
    """
    merged = merge_results(config.results, results)
    config = replace(config, results=merged, provenance={**config.provenance, **(provenance or {})})
    require_config_size(len(config.to_json().encode("utf-8")))
    return config


def merge_results(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both. A new row takes the place of an old one whose texts, which say what was measured, are the same."""
    rows: dict[tuple, dict[str, Any]] = {}
    for row in (*old, *new):
        conditions = tuple(sorted((key, value) for key, value in row.items() if isinstance(value, str)))
        rows[conditions] = dict(row)
    return list(rows.values())


def _require_own_folder(directory: Path) -> None:
    """Refuse to replace the files of another library's model."""
    if is_there(directory) and not os.path.isdir(directory):
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    config = directory / CONFIG_FILE
    if is_there(config):
        own = is_own_config(config)
    else:
        weights = _weights_of_any_artifact(directory)
        shards = [path for path in weights if path.name != INDEX_FILE]
        own = all(_is_own_weights(path) for path in shards) and (bool(shards) or not weights)
    if not own:
        problem = f"{directory} holds a model that is not an hf_dynspec artifact"
        raise ArtifactError("directory", problem, "Save to a folder of its own.")


def _is_own_weights(path: Path) -> bool:
    """Whether a first save that was killed between its files left this one."""
    try:
        with open_file(path, path.name) as file:
            size = file.seek(0, os.SEEK_END)
            return read_header(file, size, path.name).metadata.get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _weights_of_any_artifact(directory: Path) -> list[Path]:
    """The files in a folder that are named as the weights of some artifact."""
    return [path for path in sorted(directory.glob("model*")) if is_weights_name(path.name)]


def _serialize_checked(
    config: DynSpecConfig,
    rules: Mapping[str, TensorRule],
    tensors: Mapping[str, torch.Tensor],
    max_shard_size: int | str,
) -> dict[str, bytes]:
    """The contents of the files of tensors, read back once, so that nothing is written that reading would refuse."""
    require_shard_size(max_shard_size)
    if not tensors:
        return {}
    tokenizer = require_tokenizer(config)
    files = serialize_tensors(tensors, max_shard_size)
    digests = {name: digest_bytes(data) for name, data in files.items()}
    contents = {name: BytesIO(data) for name, data in files.items()}
    read_tensors(contents, digests, rules, tokenizer, tokenizer.eos_token_ids)
    return files


@contextmanager
def _staged_texts(directory: Path, config: DynSpecConfig, card: str | None = None) -> Iterator[Path]:
    """A folder inside `directory` that holds a new `config.json`, to be put in place; the new card is put in place
    afterwards."""
    text = config.to_json().encode("utf-8")
    require_config_size(len(text))
    card = card or render_card(config)
    directory.mkdir(parents=True, exist_ok=True)
    abandoned = list(directory.glob(f"{STAGING_PREFIX}*"))
    with TemporaryDirectory(prefix=STAGING_PREFIX, dir=directory) as name:
        staging = Path(name)
        write_through(staging / CONFIG_FILE, text)
        write_through(staging / CARD_FILE, card.encode("utf-8"))
        yield staging
        if may_replace_card(directory / CARD_FILE):
            os.replace(staging / CARD_FILE, directory / CARD_FILE)
        for path in abandoned:
            shutil.rmtree(path, ignore_errors=True)


def _replace_files(staging: Path, directory: Path, weights: Mapping[str, WeightsDigest]) -> None:
    """Put finished files in place. No two names can change at once, so the old weights stay until the new
    `config.json` is there, and reading follows the digests in `config.json`."""
    committed = _committed_weights(directory)
    kept = {name for name, digest in weights.items() if has_digest(directory / name, digest)}
    endangered = {name for name, path in committed.items() if path == directory / name and name in weights} - kept
    for name in endangered:
        copy_through(directory / name, staging / previous_path(Path(name)))
        os.replace(staging / previous_path(Path(name)), previous_path(directory / name))
    try:
        for name in weights:
            if name not in kept:
                os.replace(staging / name, directory / name)
        os.replace(staging / CONFIG_FILE, directory / CONFIG_FILE)
    except BaseException:
        if not Path(staging, CONFIG_FILE).exists():
            raise  # interrupted, but the new artifact is complete
        for name in set(weights) - kept - set(committed):
            Path(directory, name).unlink(missing_ok=True)
        for name, path in committed.items():
            if name in endangered or path == previous_path(directory / name):
                os.replace(previous_path(directory / name), directory / name)
        raise
    stale = [path for path in _weights_of_any_artifact(directory) if path.name not in weights]
    previous = directory.glob(previous_path(Path("model*")).name)
    for path in (*stale, *previous):
        path.unlink(missing_ok=True)


def _committed_weights(directory: Path) -> dict[str, Path]:
    """The weights that belong to the `config.json` of a folder, empty where the folder holds no complete artifact."""
    files = FolderFiles(directory)
    try:
        weights = read_config(files.config_path()).weights
        paths = files.weights_paths(weights)
    except ArtifactError:
        return {}
    return paths if all(has_digest(path, weights[name]) for name, path in paths.items()) else {}
