"""Writing artifacts: a folder holds the old artifact or the new one, whenever the process is killed."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .. import __version__
from ..errors import ArtifactError
from ..files import DEFAULT_SHARD_SIZE, is_there, write_through
from .card import may_replace_card, render_card
from .config import CARD_FILE, CONFIG_FILE, INDEX_FILE, LIBRARY_NAME, WEIGHTS_FILE, DynSpecConfig, WeightsDigest
from .folder import STAGING_PREFIX, has_digest, is_own_config, previous_path, read_config, weights_paths
from .reading import read_artifact, require_policy, require_tokenizer
from .tensors import (
    check_tensors,
    digest_bytes,
    is_weights_name,
    open_safetensors,
    require_shard_size,
    require_weights_sizes,
    serialize_tensors,
)


def write_artifact(
    directory: str | os.PathLike,
    config: DynSpecConfig,
    tensors: Mapping[str, torch.Tensor],
    card: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> Path:
    """Write an artifact, and return its folder. Even if the process is killed meanwhile, the folder holds either the
    old one or the new one.

    Nothing is written that `read_artifact` would refuse. An edited model card is kept, a generated one replaced.

    Args:
        directory: made if needed. Must not hold another library's `config.json` or `model.safetensors`.
        config: its `weights` and `hf_dynspec_version` are filled in here.
        tensors: CPU or device tensors by name; none are fine.
        card: the text of the model card (None: `render_card(config)`).
        max_shard_size: the most bytes of tensors in one file, or a text such as `"500MB"`. Larger artifacts are split
            into shards, but never a single tensor.

    Raises:
        ArtifactError: the tensors or the policy would be refused on reading, or the folder belongs to something else.
        ConfigurationError: `max_shard_size` is not a size.
    """
    directory = Path(directory)
    _require_own_folder(directory)
    rules, files = require_policy(config), {}
    require_shard_size(max_shard_size)
    if tensors:
        tokenizer = require_tokenizer(config)
        files = serialize_tensors(tensors, max_shard_size)
        check_tensors(WEIGHTS_FILE, tensors, rules, tokenizer, tokenizer.eos_token_ids)
    weights = {name: digest_bytes(data) for name, data in files.items()}
    require_weights_sizes(weights)
    config = replace(config, weights=weights, hf_dynspec_version=__version__)
    with _staged_texts(directory, config, card) as staging:
        for name, data in files.items():
            write_through(staging / name, data)
        _replace_files(staging, directory, weights)
    return directory


def annotate_artifact(
    directory: str | os.PathLike,
    *,
    results: Iterable[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
) -> DynSpecConfig:
    """Add measurements and provenance to an artifact in a folder, and to its model card unless somebody edited it.
    `config.json` is replaced in one step; the tensors stay. Returns the new configuration.

    Args:
        results: rows as in `DynSpecConfig`, see `merge_results`.
        provenance: JSON values, which replace earlier ones of the same name.

    Raises:
        ArtifactError: the folder does not hold a sound artifact, or its `config.json` would become too long.
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
    """The configuration that `annotate_artifact` writes. Raises as it does."""
    merged = merge_results(config.results, results)
    config = replace(config, results=merged, provenance={**config.provenance, **(provenance or {})})
    config.to_json()
    return config


def merge_results(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both. A new row replaces an old one with the same texts, which are the conditions of the measurement."""
    rows: dict[tuple, dict[str, Any]] = {}
    for row in (*old, *new):
        conditions = tuple(sorted((key, value) for key, value in row.items() if isinstance(value, str)))
        rows[conditions] = dict(row)
    return list(rows.values())


def _require_own_folder(directory: Path) -> None:
    """Refuse to replace the files of another library's model."""
    if is_there(directory) and not os.path.isdir(directory):
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    if is_there(directory / CONFIG_FILE):
        own = is_own_config(directory / CONFIG_FILE)
    else:
        weights = _weights_of_any_artifact(directory)
        shards = [path for path in weights if path.name != INDEX_FILE]
        own = all(map(_is_own_shard, shards)) and (bool(shards) or not weights)
    if not own:
        problem = f"{directory} holds a model that is not an hf_dynspec artifact"
        raise ArtifactError("directory", problem, "Save to a folder of its own.")


def _is_own_shard(path: Path) -> bool:
    """Whether a first save that was killed between its files left this one."""
    try:
        with open_safetensors(path) as file:
            return (file.metadata() or {}).get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _weights_of_any_artifact(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob("model*")) if is_weights_name(path.name)]


@contextmanager
def _staged_texts(directory: Path, config: DynSpecConfig, card: str | None = None) -> Iterator[Path]:
    """A folder inside `directory` with the new `config.json`, to be put in place. The card follows afterwards."""
    text, card = config.to_json(), card or render_card(config)
    directory.mkdir(parents=True, exist_ok=True)
    abandoned = list(directory.glob(f"{STAGING_PREFIX}*"))
    with TemporaryDirectory(prefix=STAGING_PREFIX, dir=directory) as name:
        staging = Path(name)
        write_through(staging / CONFIG_FILE, text.encode("utf-8"))
        write_through(staging / CARD_FILE, card.encode("utf-8"))
        yield staging
        if may_replace_card(directory):
            os.replace(staging / CARD_FILE, directory / CARD_FILE)
        for path in abandoned:
            shutil.rmtree(path, ignore_errors=True)


def _replace_files(staging: Path, directory: Path, weights: Mapping[str, WeightsDigest]) -> None:
    """Put finished files in place. Several names cannot change at once, so the old weights stay under other names
    until the new `config.json` is there, and reading follows the digests in `config.json`."""
    committed = _committed_weights(directory)
    try:
        for name, path in committed.items():
            os.replace(path, previous_path(directory / name))
        for name in weights:
            os.replace(staging / name, directory / name)
        os.replace(staging / CONFIG_FILE, directory / CONFIG_FILE)
    except BaseException:
        if is_there(staging / CONFIG_FILE):  # otherwise the new artifact is complete
            for name in set(weights) - set(committed):
                Path(directory, name).unlink(missing_ok=True)
            for name in committed:
                if is_there(previous_path(directory / name)):
                    os.replace(previous_path(directory / name), directory / name)
        raise
    stale = [path for path in _weights_of_any_artifact(directory) if path.name not in weights]
    for path in (*stale, *directory.glob(previous_path(Path("model*")).name)):
        path.unlink(missing_ok=True)


def _committed_weights(directory: Path) -> dict[str, Path]:
    """The weights of a folder's `config.json`; none if the artifact is not complete."""
    try:
        weights = read_config(directory).weights
        paths = weights_paths(directory, weights)
    except ArtifactError:
        return {}
    return paths if all(has_digest(path, weights[name]) for name, path in paths.items()) else {}
