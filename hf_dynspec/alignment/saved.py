"""What alignment has learnt, in files that others read: a PEFT adapter, an EAGLE head, or a whole model."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, constants
from safetensors.torch import save_file

from ..artifacts.folder import is_folder, missing_file
from ..artifacts.hub import download_snapshot, naming_hub_errors, usual_hub
from ..drafters.eagle.checkpoint import read_checkpoint
from ..drafters.eagle.checkpoint_files import load_tensors, read_json, safetensors_files
from ..drafters.eagle.drafter import EagleDrafter
from ..errors import ArtifactError, shown_value
from ..files import is_there, replacing, write_json
from .learner import Learner

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Users' text, which is written where that is asked for and nowhere else.
REPLAY_BUFFER = "replay_buffer.safetensors"
_REQUEST_TENSOR = re.compile(r"(\d{1,6})\.(\w+)")
# What has to be the same for the matrices to mean the same.
_SAME = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
# What gives single modules a rank or a scale of their own.
_PATTERNS = ("rank_pattern", "alpha_pattern")


def save_learnt(
    directory: str | os.PathLike, learner: Learner, requests: Sequence[Mapping[str, torch.Tensor]] | None = None
) -> Path:
    """Write what was learnt.

    By LoRA: a PEFT adapter, which `peft.PeftModel.from_pretrained(model, directory)` puts on the drafter's model. Of
    an EAGLE head also the head with the adapter merged into it, in its own layout, which loads as any head. Where all
    weights are trained: the model, which transformers loads, or the head.

    Args:
        directory: made if needed.
        learner: whose weights are written.
        requests: `requests_state` of those that are to be kept. None: no text is written, and what lies there of it
            is removed.

    Returns:
        The folder.

    Raises:
        ArtifactError: it is a file; a weight of an EAGLE head is not finite.
    """
    directory = Path(directory)
    if os.path.lexists(directory) and not directory.is_dir():
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    directory.mkdir(parents=True, exist_ok=True)
    drafter, config = learner.drafter, learner.adapter_config()
    (directory / REPLAY_BUFFER).unlink(missing_ok=True)
    if isinstance(drafter, EagleDrafter):
        drafter.save_pretrained(directory)
    elif config is None:
        drafter.module.save_pretrained(directory)
    if config is not None:
        # First the tensors: a folder without its configuration is no adapter.
        tensors = {name: one.cpu().contiguous() for name, one in learner.adapter_state().items()}
        with replacing(directory / ADAPTER_WEIGHTS) as scratch:
            save_file(tensors, scratch, metadata={"format": "pt"})
        write_json(directory / ADAPTER_CONFIG, _config_values(config, drafter))
    if requests is not None:
        named = {f"{number}.{name}": one for number, held in enumerate(requests) for name, one in held.items()}
        with replacing(directory / REPLAY_BUFFER) as scratch:
            save_file({name: one.cpu().contiguous() for name, one in named.items()}, scratch)
    return directory


def read_requests(directory: str | os.PathLike) -> list[dict[str, torch.Tensor]]:
    """The requests that `save_learnt` wrote, for `requests_from`, which looks at what they hold.

    Raises:
        ArtifactError: it is no folder, there are none in it, or the file is damaged or no such file.
    """
    if not is_folder(directory):
        problem = f"{shown_value(str(directory))} is no folder here, and requests are never published"
        raise ArtifactError("include_buffer", problem, "Leave it out, or give the folder.")
    path = Path(directory) / REPLAY_BUFFER
    if not is_there(path):
        raise missing_file(REPLAY_BUFFER, str(directory), os.listdir(directory))
    requests: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_tensors([path]).items():
        parts = _REQUEST_TENSOR.fullmatch(name)
        if parts is None:
            raise ArtifactError(f"{REPLAY_BUFFER}: {shown_value(name)}", "is of no request", "Save the buffer again.")
        requests.setdefault(int(parts[1]), {})[parts[2]] = tensor
    return [requests[number] for number in sorted(requests)]


def _config_values(config: Any, drafter: Any) -> dict[str, Any]:
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    if not isinstance(drafter, EagleDrafter):
        name = drafter.module.config.name_or_path or None
        values |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": name}
    return values | {"inference_mode": True}


def read_learnt(
    directory_or_repo: str | os.PathLike,
    learner: Learner,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> dict[str, torch.Tensor]:
    """Read what `save_learnt` wrote, of which nothing is believed.

    Args:
        directory_or_repo: a folder, or a repository on the Hub.
        learner: of the same settings, and of a drafter of the same shape.
        revision: the branch, tag or commit of a repository.
        cache_dir: where downloads are kept (None: the Hub's usual cache).
        token: for a private repository (None: the one that you are logged in with).

    Returns:
        What `Learner.load_adapter_state` takes, which compares names and shapes.

    Raises:
        ArtifactError: a file is missing, damaged or a pickle, or the adapter has other settings, or something was said
            of a repository, and this is a folder. Names it.
    """
    config, is_here = learner.adapter_config(), is_folder(directory_or_repo)
    if is_here:
        _require_none_of_a_repository(directory_or_repo, revision=revision, cache_dir=cache_dir, token=token)
    if config is None and isinstance(learner.drafter, EagleDrafter):
        read = read_checkpoint(directory_or_repo, revision=revision, cache_dir=cache_dir, token=token)
        tensors = dict(read.tensors)
        return {name: tensors[name] for name in learner.adapter_state() if name in tensors}
    names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS] if config is not None else ["*.safetensors", "*.safetensors.index.json"]
    if is_here:
        folder = Path(directory_or_repo)
    else:
        folder = download_snapshot(str(directory_or_repo), names, revision, cache_dir, token)
    if config is None:
        files = safetensors_files(folder)
        if files is None:
            raise missing_file("model.safetensors", str(folder), os.listdir(folder))
        tensors = load_tensors(files)
        return {name: tensors[name] for name in learner.adapter_state() if name in tensors}
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not is_there(folder / name):
            raise missing_file(name, str(folder), os.listdir(folder))
    _require_same_settings(read_json(folder, ADAPTER_CONFIG), config.to_dict(), type(config)().to_dict())
    return load_tensors([folder / ADAPTER_WEIGHTS])


def _require_none_of_a_repository(folder: str | os.PathLike, **options: Any) -> None:
    """Who names a revision means a repository: a folder of its name would be taken for that revision."""
    for name, value in options.items():
        if value is not None:
            problem = f"is of a repository, and {shown_value(str(folder))} is a folder here"
            raise ArtifactError(name, problem, "Leave it out, or name a repository that is no folder.")


def _require_same_settings(stored: Mapping[str, Any], own: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Compare an adapter's settings, which are peft's usual ones where it says nothing, with those of a learner."""
    fix = "Load the adapter with the rank, alpha and modules that it was learnt with."
    for name in _SAME:
        said = stored.get(name, usual[name])
        if said != own[name]:
            problem = f"is {shown_value(said)}, and this drafter learns with {shown_value(own[name])}"
            raise ArtifactError(f"{ADAPTER_CONFIG}: {name}", problem, fix)
    for name in _PATTERNS:
        if stored.get(name):
            raise ArtifactError(f"{ADAPTER_CONFIG}: {name}", "tells modules apart, which are learnt alike here", fix)


def push_learnt(
    learner: Learner,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    api: HfApi | None = None,
) -> CommitInfo:
    """Write what was learnt and publish it in one commit. The repository is made if needed.

    Args:
        repo_id: the repository.
        private: whether a repository that is made is private (None: your account's default).
        token: the Hub token (None: the one that you are logged in with).
        commit_message: for the history (None: a plain sentence).
        api: the client of another Hub than the usual one.

    Raises:
        ArtifactError: as `save_learnt`, or the Hub is not to be asked.
    """
    if constants.HF_HUB_OFFLINE:
        raise ArtifactError("repository", "the Hub is not asked for anything", "Unset HF_HUB_OFFLINE to publish.")
    api = api or usual_hub()
    with TemporaryDirectory(prefix="hf_dynspec-") as folder:
        files = sorted(one for one in save_learnt(folder, learner).iterdir() if one.is_file())
        with naming_hub_errors(repo_id, ADAPTER_CONFIG):
            repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
            return api.create_commit(
                repo_id,
                [CommitOperationAdd(one.name, one) for one in files],
                commit_message=commit_message or "Upload a drafter's alignment with hf_dynspec",
                token=token,
            )
