"""The models that an artifact names: fetched from the Hub, from nowhere else, and without any code of theirs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError
from ..files import is_there, read_file
from .config import INDEX_FILE, WEIGHTS_FILE, ModelReference
from .folder import CONFIG_FILE, naming_hub_errors

# A model and its tokenizer. Neither code nor pickles are ever fetched.
_MODEL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    WEIGHTS_FILE,
    INDEX_FILE,
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
_ADAPTER_FILE = "adapter_config.json"
_LARGEST_CONFIG = 2**24
_FIELD = f"{CONFIG_FILE}: drafter"
_LOAD_IT_YOURSELF = "Load the drafter yourself and pass it as drafter=…."


def download_snapshot(
    repo_id: str,
    filenames: Sequence[str],
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> Path:
    """Fetch files of a repository, all of one commit, into the Hub's cache. A folder of that name is never looked at.

    Args:
        repo_id: the repository.
        filenames: which files, as patterns; only those at its top.
        revision: branch, tag or commit (None: the main branch).
        cache_dir: where downloads are kept (None: the Hub's usual cache).
        token: for a private repository.

    Returns:
        The absolute path of the snapshot.

    Raises:
        ArtifactError: there is no such repository or revision, or it can neither be reached nor is in the cache.
    """
    from huggingface_hub import snapshot_download

    with naming_hub_errors(repo_id, CONFIG_FILE):
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            allow_patterns=list(filenames),
            ignore_patterns=["*/*"],
        )
    return Path(folder).absolute()


def drafter_repository(reference: ModelReference | None) -> str:
    """The repository of the drafter that an artifact names.

    Raises:
        ArtifactError: it names none, or one that only its author has.
    """
    if reference is None or reference.hub_id is None:
        problem = "names no drafter" if reference is None else f"{reference.name_or_path!r} is not on the Hub"
        raise ArtifactError(_FIELD, problem, _LOAD_IT_YOURSELF)
    return reference.hub_id


def load_named_drafter(
    reference: ModelReference,
    dtype: torch.dtype,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> Any:
    """Load a causal language model that an artifact names, at the commit that it names.

    Raises:
        ArtifactError: it is not on the Hub, brings code of its own, is an adapter, or transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    repo_id = drafter_repository(reference)
    folder = download_snapshot(repo_id, _MODEL_FILES, reference.commit, cache_dir, token)
    # transformers would go on to the model that the adapter names, wherever that is.
    if is_there(folder / _ADAPTER_FILE):
        raise ArtifactError(_FIELD, f"{repo_id} is an adapter of another model", _LOAD_IT_YOURSELF)
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
    except Exception as error:  # what transformers raises for models that it cannot load is not written down anywhere
        problem = f"{repo_id} cannot be loaded: {next(iter(str(error).splitlines()), type(error).__name__)}"
        if _brings_code(folder):
            problem = f"{repo_id} needs code of its own to be loaded, and code from an artifact's models is never run"
        raise ArtifactError(_FIELD, problem, _LOAD_IT_YOURSELF) from error


def _brings_code(folder: Path) -> bool:
    path = folder / CONFIG_FILE
    return is_there(path) and b'"auto_map"' in read_file(path, CONFIG_FILE, _LARGEST_CONFIG)
