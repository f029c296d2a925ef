"""Reading artifacts: a policy with its tensors, as `config.json`, `model.safetensors` and a model card.

Artifacts are data, never code and never pickle. Only these files of a repository are ever fetched, all of one commit.
Large tensors are split into shards with an index, as transformers splits a model. `config.json` holds the digest of
each file of tensors.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from ..errors import ArtifactError, ConfigurationError, naming_source
from ..fields import FieldError
from ..storable import POLICY_DATA, UNKNOWN_POLICY_FIX, Storable, TensorRule, stored_class
from ..vocabulary import TokenizerFingerprint, require_same_tokenizer
from .config import CONFIG_FILE, WEIGHTS_FILE, DynSpecConfig
from .folder import FETCH_AGAIN, read_config, weights_paths
from .hub import Repository, is_folder, usual_hub
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
        revision: the branch, tag or commit of a repository (None: its main branch), resolved once for all files.
        tokenizer_fingerprint: the tokenizer in use, compared with the artifact's (None: not compared).
        cache_dir: the folder for downloads (None: the Hub's usual cache). A cached artifact needs no network.
        token: for a private repository (None: your login).
        api: the client of another Hub.

    Returns:
        The configuration, and CPU tensors by name: a ranking is int32 or int64 `[n]`.

    Raises:
        ArtifactError: a file is missing, too large, damaged, a pickle, or for another tokenizer. Its `field` names
            the file and the faulty part of it.
    """
    with naming_source(directory_or_repo):
        repository = None
        if is_folder(directory_or_repo):
            folder = Path(directory_or_repo)
        else:
            options = {"cache_dir": cache_dir, "token": token}
            repository = Repository(str(directory_or_repo), revision, api or usual_hub(), **options)
            folder = repository.fetch_config()
        config = read_config(folder)
        rules = require_policy(config)
        eos_token_ids = config.tokenizer.eos_token_ids if config.tokenizer else ()
        if tokenizer_fingerprint is not None and config.tokenizer is not None:
            require_same_tokenizer(config.tokenizer, tokenizer_fingerprint)
            eos_token_ids = tuple(dict.fromkeys(eos_token_ids + tokenizer_fingerprint.eos_token_ids))
        if not config.weights:
            return config, {}
        require_weights_sizes(config.weights)
        if repository is not None:
            repository.fetch_weights(config.weights)
        paths = weights_paths(folder, config.weights)
        return config, read_tensors(paths, config.weights, rules, require_tokenizer(config), eos_token_ids)


def rebuild_policy(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Build the policy of an artifact that `read_artifact` returned.

    Raises:
        ArtifactError: a setting is unknown, mistyped or out of range, a tensor belongs to no policy, or the artifact
            holds data for policies and no policy.
    """
    if config.policy.name in POLICY_DATA:
        problem = f"is {config.policy.name!r}, which is no policy by itself but what policies read"
        raise ArtifactError(f"{CONFIG_FILE}: policy", problem, "Give the artifact to a policy that reads it.")
    return rebuild(config, tensors)


def rebuild(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> Storable:
    """Build the policy, or the data for policies, of an artifact that `read_artifact` returned.

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
    """Read a co-occurrence graph from an artifact that may be damaged or hostile, with the options of `read_artifact`.
    Returns the `CooccurrenceGraph` and the tokenizer of its ids. Another kind of artifact is an `ArtifactError`."""
    config, tensors = read_artifact(directory_or_repo, **options)
    if config.policy.name != "cooccurrence_graph":
        problem = f"is {config.policy.name!r}, which holds no co-occurrence graph"
        fix = "Name an artifact that hf-dynspec build graph made."
        raise ArtifactError(f"{CONFIG_FILE}: policy", problem, fix, str(directory_or_repo))
    with naming_source(directory_or_repo):
        return rebuild(config, tensors), config.tokenizer


def require_policy(config: DynSpecConfig) -> Mapping[str, TensorRule]:
    """Check the names and settings of the policy and its parts before any of them is built. Returns the rules for the
    policy's tensors."""
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
    """The tokenizer of an artifact with tensors. A configuration that does not name it is refused."""
    if config.tokenizer is None:
        problem = "is missing, so that nothing says whose ids the tensors hold"
        fix = "Write the artifact with the tokenizer's fingerprint (fingerprint_tokenizer)."
        raise ArtifactError(f"{CONFIG_FILE}: tokenizer", problem, fix)
    return config.tokenizer
