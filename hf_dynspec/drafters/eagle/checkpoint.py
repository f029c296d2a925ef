"""EAGLE checkpoints on disk: recognising, checking, reading and writing them.

There are three layouts, which differ in names and settings:

- EAGLE-2 (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees"; EAGLE-1's heads are
  the same): `fc` of an embedding and a feature, then `layers.0`, a Llama layer without a norm before its attention.
- EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
  Test"), official: `fc` of several features, then `midlayer`, whose attention reads embedding and feature at once.
- EAGLE-3 of the speculators library: `layers.0` in place of `midlayer`, and a nested configuration.

Inside the package the layer is always `layer.…`; all other names are those of the files.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from ...artifacts.hub import local_folder
from ...errors import ArtifactError, shown_value
from .checkpoint_files import (
    CONFIG_FILE,
    HEAD_FILES,
    INDEX_FILE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    TensorHeader,
    load_pickle,
    load_tensors,
    read_headers,
    read_json,
    safetensors_files,
)
from .checkpoint_tensors import check_contents, check_headers, layer_prefix, renamed
from .settings import CheckpointFormat, EagleSettings, read_settings

# The error for tensors of anything but a head.
NO_HEAD = "has neither `fc` and `layers.0` (EAGLE-2) nor `midlayer` (EAGLE-3)"


@dataclass(frozen=True, eq=False)
class EagleCheckpoint:
    """The contents of an EAGLE checkpoint.

    Args:
        format: the layout.
        config: the contents of `config.json`, unchanged.
        settings: the settings of the configuration.
        tensors: CPU tensors by the package's names, in the dtypes of the file: floating point, except `d2t` int32 or
            int64 `[draft_vocab_size]` (row `i` stands for token `i + d2t[i]`) and `t2d` bool `[V]`.
        folder: the absolute path of the checkpoint, which for the Hub contains repository and commit.
    """

    format: CheckpointFormat
    config: Mapping[str, Any]
    settings: EagleSettings
    tensors: Mapping[str, torch.Tensor]
    folder: str | None = None

    @classmethod
    def from_parts(cls, config: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> "EagleCheckpoint":
        """Check a configuration and tensors by their names in files of its format.

        Raises:
            ArtifactError: as `read_checkpoint`.
        """
        headers = {name: TensorHeader(tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
        return cls._checked(config, headers, lambda: named, WEIGHTS_FILE)

    @classmethod
    def _checked(
        cls,
        config: Mapping[str, Any],
        headers: Mapping[str, TensorHeader],
        load: Callable[[], Mapping[str, torch.Tensor]],
        source: str,
    ) -> "EagleCheckpoint":
        """Check a configuration and headers, and only then load and check the tensors."""
        checkpoint_format, settings, names = _recognise(config, headers, source)
        named = load()
        tensors = check_contents(settings, {name: named[given] for name, given in names.items()}, source)
        return cls(checkpoint_format, deepcopy(dict(config)), settings, tensors)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in files of this format."""
        layer = layer_prefix(self.format, self.settings.generation)
        return {renamed(name, "layer.", layer): tensor for name, tensor in self.tensors.items()}

    def token_ids(self) -> torch.Tensor | None:
        """int64 `[draft_vocab_size]`: the target's id of each row of the head's own projection (None: row `i` is token
        `i`)."""
        offsets = self.tensors.get("d2t")
        if offsets is None or (self.settings.draft_vocab_size == self.settings.vocab_size and not bool(offsets.any())):
            return None
        return offsets.to(torch.int64) + torch.arange(offsets.shape[0], device=offsets.device)


def read_checkpoint(
    directory_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
) -> EagleCheckpoint:
    """Read a checkpoint and check all of it; names and shapes before any tensor is loaded. The arguments are those of
    `EagleDrafter.from_pretrained`.

    Raises:
        ArtifactError: a file is missing, damaged or a pickle that was not allowed; a setting is missing, mistyped, out
            of range or not supported; a tensor is missing, unexpected, of another shape or dtype, not finite, or maps
            draft tokens to ids that are no tokens.
    """
    patterns = [*HEAD_FILES, *[PICKLE_FILE] * allow_pickle]
    folder = local_folder(directory_or_repo, patterns, revision=revision, cache_dir=cache_dir, token=token)
    config = read_json(folder, CONFIG_FILE)
    files = safetensors_files(folder)
    if files is None:
        checkpoint = EagleCheckpoint.from_parts(config, load_pickle(folder, allow_pickle))
    else:
        source = files[0].name if len(files) == 1 else INDEX_FILE
        checkpoint = EagleCheckpoint._checked(config, read_headers(files), lambda: load_tensors(files), source)
    return replace(checkpoint, folder=str(folder.absolute()))


def holds_a_head(folder: str | os.PathLike) -> bool:
    """Whether a folder holds an EAGLE head, and not a model: by the names of its tensors, if these are in
    safetensors, and otherwise by its configuration."""
    folder = Path(folder)
    try:
        config, files = read_json(folder, CONFIG_FILE), safetensors_files(folder)
        headers = {} if files is None else read_headers(files)
    except ArtifactError:
        return False
    is_named = "speculators_model_type" in config or "draft_vocab_size" in config
    return is_named or any(name == "fc.weight" or name.startswith("midlayer.") for name in headers)


def write_checkpoint(directory: str | os.PathLike, checkpoint: EagleCheckpoint) -> Path:
    """Write a checkpoint as `config.json` and `model.safetensors`, in its own format, and return the folder, which is
    made if needed.

    A process killed meanwhile leaves the old checkpoint, the new one, or a folder without `config.json`, never the
    settings of one with the tensors of the other.
    """
    import json

    directory = Path(directory)
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".hf_dynspec-", dir=directory) as staging:
        weights, config = Path(staging, WEIGHTS_FILE), Path(staging, CONFIG_FILE)
        # Clones: safetensors refuses tensors that share memory.
        named = {name: tensor.contiguous().clone() for name, tensor in checkpoint.named_tensors().items()}
        save_file(named, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(checkpoint.config, indent=2) + "\n", encoding="utf-8")
        # safetensors makes files private, and a server may run as another user.
        shutil.copymode(config, weights)
        for path in (weights, config):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        (directory / CONFIG_FILE).unlink(missing_ok=True)
        os.replace(weights, directory / WEIGHTS_FILE)
        os.replace(config, directory / CONFIG_FILE)
    return directory


def _recognise(
    config: Mapping[str, Any], headers: Mapping[str, TensorHeader], source: str
) -> tuple[CheckpointFormat, EagleSettings, dict[str, str]]:
    """Find the format, read the settings, check the headers, and map the package's names to the file's."""
    checkpoint_format: CheckpointFormat = "official"
    if "speculators_model_type" in config:
        checkpoint_format, generation = "speculators", 3
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            fix = "Use an EAGLE-3 head of speculators, or the official checkpoint of this one."
            raise ArtifactError(f"{CONFIG_FILE}: speculators_model_type", f"is {shown_value(kind)}", fix)
    elif any(name.startswith("midlayer.") for name in headers):
        generation = 3
    elif "fc.weight" in headers and any(name.startswith("layers.0.") for name in headers):
        generation = 2
    else:
        raise ArtifactError(source, NO_HEAD, "Give the folder or the repository of an EAGLE head.")
    prefix = layer_prefix(checkpoint_format, generation)
    found = {renamed(name, prefix, "layer."): header for name, header in headers.items()}
    settings = read_settings(config, checkpoint_format, generation, found)
    check_headers(settings, found, prefix, source)
    return checkpoint_format, settings, {name: renamed(name, "layer.", prefix) for name in found}
