"""Files of alignment for other readers: a PEFT adapter, an EAGLE head, or a whole model."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from safetensors.torch import save_file

from ..artifacts.config import WEIGHTS_FILE
from ..artifacts.folder import missing_file
from ..artifacts.hub import is_folder, local_folder, naming_hub_errors, usual_hub
from ..artifacts.publishing import require_online
from ..drafters.causal_lm import CausalLMDrafter
from ..drafters.eagle.checkpoint import read_checkpoint
from ..drafters.eagle.checkpoint_files import load_tensors, read_json, safetensors_files
from ..drafters.eagle.drafter import EagleDrafter
from ..errors import ArtifactError, shown_value
from ..files import is_there, replacing, write_json
from .learner import Learner

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Users' text, written on request only.
REPLAY_BUFFER = "replay_buffer.safetensors"
_REQUEST_TENSOR = re.compile(r"(\d{1,6})\.(\w+)")
# Settings that change the meaning of an adapter's matrices.
_SAME = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
_PATTERNS = ("rank_pattern", "alpha_pattern")


def save_learnt(
    directory: str | os.PathLike, learner: Learner, requests: Sequence[Mapping[str, torch.Tensor]] | None = None
) -> Path:
    """Write the learnt weights: with LoRA a PEFT adapter for `peft.PeftModel.from_pretrained(model, directory)`, and
    of an EAGLE head also the head with the adapter merged; with all weights trained, the model, head or MTP layers.

    Args:
        directory: made if needed.
        learner: holds the weights.
        requests: `requests_state` of the requests to write. None: no text is written, and an earlier file of it is
            removed.

    Returns:
        The folder.

    Raises:
        ArtifactError: the folder is a file; a weight of an EAGLE head is not finite.
    """
    directory = Path(directory)
    if os.path.lexists(directory) and not directory.is_dir():
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    directory.mkdir(parents=True, exist_ok=True)
    drafter, config = learner.drafter, learner.adapter_config()
    (directory / REPLAY_BUFFER).unlink(missing_ok=True)
    if isinstance(drafter, EagleDrafter):
        drafter.save_pretrained(directory)
    elif config is None and isinstance(drafter, CausalLMDrafter):
        drafter.module.save_pretrained(directory)
    elif config is None:
        _write_tensors(directory / WEIGHTS_FILE, drafter.module.state_dict())
    if config is not None:
        # Tensors first: a folder without its configuration is no adapter.
        _write_tensors(directory / ADAPTER_WEIGHTS, learner.adapter_state())
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
        if isinstance(drafter, CausalLMDrafter):
            name = drafter.module.config.name_or_path or None
            values |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": name}
        write_json(directory / ADAPTER_CONFIG, values | {"inference_mode": True})
    if requests is not None:
        named = {f"{number}.{name}": one for number, held in enumerate(requests) for name, one in held.items()}
        _write_tensors(directory / REPLAY_BUFFER, named)
    return directory


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with replacing(path) as scratch:
        save_file({name: one.cpu().contiguous() for name, one in tensors.items()}, scratch, metadata={"format": "pt"})


def read_requests(directory: str | os.PathLike) -> list[dict[str, torch.Tensor]]:
    """The requests of `save_learnt`, for `requests_from`, which checks their contents.

    Raises:
        ArtifactError: it is no folder, it holds no requests, or the file is damaged.
    """
    if not is_folder(directory):
        problem = f"{shown_value(str(directory))} is no folder here, and requests are never published"
        raise ArtifactError("include_buffer", problem, "Leave it out, or give the folder.")
    path = Path(directory) / REPLAY_BUFFER
    if not is_there(path):
        raise missing_file(REPLAY_BUFFER, directory)
    requests: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_tensors([path]).items():
        parts = _REQUEST_TENSOR.fullmatch(name)
        if parts is None:
            raise ArtifactError(f"{REPLAY_BUFFER}: {shown_value(name)}", "is of no request", "Save the buffer again.")
        requests.setdefault(int(parts[1]), {})[parts[2]] = tensor
    return [requests[number] for number in sorted(requests)]


def read_learnt(
    directory_or_repo: str | os.PathLike,
    learner: Learner,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> dict[str, torch.Tensor]:
    """Read the weights of `save_learnt`. The files may be damaged or hostile.

    Args:
        directory_or_repo: a folder, or a repository on the Hub.
        learner: of the same settings, and of a drafter of the same shape.
        revision: the branch, tag or commit of a repository.
        cache_dir: the folder for downloads (None: the Hub's usual cache).
        token: for a private repository (None: your login).

    Returns:
        Tensors for `Learner.load_adapter_state`, which compares names and shapes.

    Raises:
        ArtifactError: a file is missing, damaged or a pickle, the adapter has other settings, or an option of
            repositories was given for a folder.
    """
    config, options = learner.adapter_config(), {"revision": revision, "cache_dir": cache_dir, "token": token}
    if is_folder(directory_or_repo):
        for name, value in options.items():
            if value is not None:
                problem = f"is of a repository, and {shown_value(str(directory_or_repo))} is a folder here"
                raise ArtifactError(name, problem, "Leave it out, or name a repository that is no folder.")
    if config is not None:
        folder = local_folder(directory_or_repo, [ADAPTER_CONFIG, ADAPTER_WEIGHTS], **options)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not is_there(folder / name):
                raise missing_file(name, folder)
        _require_same_settings(read_json(folder, ADAPTER_CONFIG), config.to_dict(), type(config)().to_dict())
        return load_tensors([folder / ADAPTER_WEIGHTS])
    if isinstance(learner.drafter, EagleDrafter):
        tensors: Mapping[str, torch.Tensor] = read_checkpoint(directory_or_repo, **options).tensors
    else:
        folder = local_folder(directory_or_repo, ["*.safetensors", "*.safetensors.index.json"], **options)
        files = safetensors_files(folder)
        if files is None:
            raise missing_file(WEIGHTS_FILE, folder)
        tensors = load_tensors(files)
    return {name: tensors[name] for name in learner.adapter_state() if name in tensors}


def _require_same_settings(stored: Mapping[str, Any], own: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Compare an adapter's settings (peft's usual ones by default) with a learner's."""
    fix = "Load the adapter with the rank, alpha and modules that it was learnt with."
    for name in _SAME:
        found = stored.get(name, usual[name])
        if found != own[name]:
            problem = f"is {shown_value(found)}, and this drafter learns with {shown_value(own[name])}"
            raise ArtifactError(f"{ADAPTER_CONFIG}: {name}", problem, fix)
    for name in _PATTERNS:
        if stored.get(name):
            raise ArtifactError(f"{ADAPTER_CONFIG}: {name}", "sets ranks or scales of single modules", fix)


def push_learnt(
    learner: Learner,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    api: HfApi | None = None,
) -> CommitInfo:
    """Write the learnt weights and publish them in one commit. The repository is made if needed.

    Args:
        learner: holds the weights.
        repo_id: the repository.
        private: whether a new repository is private (None: your account's default).
        token: the Hub token (None: your login).
        commit_message: for the history (None: a plain sentence).
        api: the client of another Hub.

    Raises:
        ArtifactError: as `save_learnt`, or HF_HUB_OFFLINE is set.
    """
    require_online()
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
