"""Reading artifacts: a policy with all that it needs, as `config.json`, `model.safetensors` and a model card.

Artifacts are data, never code and never pickle. Of a repository only these files are ever fetched, all at one commit.
`model.safetensors` exists only where the policy has tensors; if they are large it is split into shards with an index,
as transformers splits a model. `config.json` holds the digest of each of these files.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from ..errors import ArtifactError, ConfigurationError, naming_source
from ..fields import FieldError
from ..files import open_file
from ..storable import POLICY_DATA, UNKNOWN_POLICY_FIX, Storable, TensorRule, stored_class
from ..vocabulary import TokenizerFingerprint, require_same_tokenizer
from .config import CONFIG_FILE, WEIGHTS_FILE, DynSpecConfig
from .folder import FETCH_AGAIN, FolderFiles, is_folder, read_config
from .hub import RepositoryFiles, usual_hub
from .tensors import read_tensors, require_weights_sizes


def read_artifact(
    directory_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    tokenizer_fingerprint: TokenizerFingerprint | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    api: HfApi | None = None,
) -> tuple[DynSpecConfig, dict[str, torch.Tensor]]:
    """Read an artifact that may be damaged or hostile.

    Args:
        directory_or_repo: an existing folder, or a repository on the Hub.
        revision: the branch, tag or commit of a repository (None: its main branch). It is resolved to a commit once,
            and every file comes from that commit. Has no meaning for a folder.
        tokenizer_fingerprint: the tokenizer that the artifact is about to be used with, to be checked against the
            artifact's own (None: not checked).
        cache_dir: where downloads are kept (None: the Hub's usual cache). A cached artifact is read without a network.
        token: for a private repository (None: the one that you are logged in with).
        api: the client of another Hub than the usual one.

    Returns:
        The configuration, and CPU tensors by name: a ranking is int32 or int64 `[n]`.

    Raises:
        ArtifactError: a file is missing, too large, damaged, a pickle, or for another tokenizer. Its `field` names
            the file and the part of it that is at fault.
    """
    with naming_source(directory_or_repo):
        source = _opened(directory_or_repo, revision, cache_dir, token, api)
        return _read(source, tokenizer_fingerprint)


def _opened(
    directory_or_repo: str | os.PathLike,
    revision: str | None,
    cache_dir: str | os.PathLike | None,
    token: str | bool | None,
    api: HfApi | None,
) -> FolderFiles | RepositoryFiles:
    if is_folder(directory_or_repo):
        return FolderFiles(Path(directory_or_repo))
    return RepositoryFiles(str(directory_or_repo), revision, api or usual_hub(), cache_dir, token)


def _read(
    files: FolderFiles | RepositoryFiles, tokenizer_fingerprint: TokenizerFingerprint | None
) -> tuple[DynSpecConfig, dict[str, torch.Tensor]]:
    config = read_config(files.config_path())
    rules = require_policy(config)
    eos_token_ids = config.tokenizer.eos_token_ids if config.tokenizer else ()
    if tokenizer_fingerprint is not None and config.tokenizer is not None:
        require_same_tokenizer(config.tokenizer, tokenizer_fingerprint)
        eos_token_ids = tuple(dict.fromkeys(eos_token_ids + tokenizer_fingerprint.eos_token_ids))
    if not config.weights:
        return config, {}
    require_weights_sizes(config.weights)
    with ExitStack() as stack:
        paths = files.weights_paths(config.weights)
        opened = {name: stack.enter_context(open_file(path, name)) for name, path in paths.items()}
        return config, read_tensors(opened, config.weights, rules, require_tokenizer(config), eos_token_ids)


def rebuild_policy(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Build the policy of an artifact from what `read_artifact` returned.

    Raises:
        ArtifactError: a setting is unknown, mistyped or out of range, a tensor belongs to no policy, or the artifact
            holds what policies read and none of them.
    """
    if config.policy.name in POLICY_DATA:
        problem = f"is {config.policy.name!r}, which is no policy by itself but what policies read"
        raise ArtifactError(f"{CONFIG_FILE}: policy", problem, "Give the artifact to a policy that reads it.")
    return rebuild(config, tensors)


def rebuild(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> Storable:
    """Build what an artifact holds, a policy or what policies read, from what `read_artifact` returned.

    Raises:
        ArtifactError: a setting is unknown, mistyped or out of range, or a tensor does not belong to it.
    """
    require_policy(config)
    with _naming_settings():
        built = stored_class(config.policy.name).from_settings(config.policy.settings, tensors)
    astray = set(tensors) ^ set(built.tensors())
    if astray:
        problem = f"the policy {config.policy.name!r} with its settings does not match this tensor"
        raise ArtifactError(f"{WEIGHTS_FILE}: {min(astray)}", problem, FETCH_AGAIN)
    return built


def read_graph(directory_or_repo: str | os.PathLike, **options: Any) -> tuple[Any, TokenizerFingerprint | None]:
    """Read a co-occurrence graph from an artifact that may be damaged or hostile.

    Args:
        directory_or_repo: as in `read_artifact`.
        options: those of `read_artifact`.

    Returns:
        The `CooccurrenceGraph`, and the tokenizer whose ids it speaks of.

    Raises:
        ArtifactError: as in `read_artifact`, or it is another kind of artifact.
    """
    config, tensors = read_artifact(directory_or_repo, **options)
    if config.policy.name != "cooccurrence_graph":
        problem = f"is {config.policy.name!r}, which holds no co-occurrence graph"
        fix = "Name an artifact that hf-dynspec build graph made."
        raise ArtifactError(f"{CONFIG_FILE}: policy", problem, fix, str(directory_or_repo))
    with naming_source(directory_or_repo):
        return rebuild(config, tensors), config.tokenizer


def require_policy(config: DynSpecConfig) -> Mapping[str, TensorRule]:
    """Check the name and settings of the policy and of every policy inside it, before any of them is built. A name
    stands for a class that somebody imported and registered here; a file never causes an import.

    Returns:
        The rules of the tensors that the policy may have.

    Raises:
        ArtifactError: no class of such a name is registered, or a setting is unknown, mistyped or out of range.
    """
    try:
        policy = stored_class(config.policy.name)
    except ConfigurationError as error:
        raise ArtifactError(f"{CONFIG_FILE}: policy.name", str(error), f"{UNKNOWN_POLICY_FIX}.") from error
    with _naming_settings():
        policy.require_settings(config.policy.settings)
    return policy.tensor_rules_for(config.policy.settings)


@contextmanager
def _naming_settings() -> Iterator[None]:
    try:
        yield
    except FieldError as error:
        field = f"{CONFIG_FILE}: policy.settings.{error.field}"
        raise ArtifactError(field, error.problem, f"{error.fix}.") from error
    except ConfigurationError as error:
        raise ArtifactError(f"{CONFIG_FILE}: policy.settings", str(error), FETCH_AGAIN) from error


def require_tokenizer(config: DynSpecConfig) -> TokenizerFingerprint:
    """The tokenizer of an artifact that has tensors.

    Raises:
        ArtifactError: the configuration does not say which.
    """
    if config.tokenizer is None:
        problem = "is missing, so that nothing says whose ids the tensors hold"
        fix = "Write the artifact with the tokenizer's fingerprint (fingerprint_tokenizer)."
        raise ArtifactError(f"{CONFIG_FILE}: tokenizer", problem, fix)
    return config.tokenizer
