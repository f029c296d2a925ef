"""Assistants as artifacts: what is stored of one, and what one is made of that is loaded again."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..errors import naming_source
from ..generation.call import Assistant
from ..generation.refusals import check_target
from ..loading import local_tokenizer
from ..modeling.parts import unwrapped
from ..vocabulary import TokenizerFingerprint, as_token_ids, fingerprint_tokenizer
from .config import DynSpecConfig, PolicyConfig
from .models import drafter_reference, load_named_drafter, model_reference
from .publishing import push_artifact
from .reading import read_artifact, rebuild_policy
from .writing import write_artifact


def save_assistant(
    assistant: Assistant,
    directory: str | os.PathLike,
    *,
    provenance: Mapping[str, Any] | None,
    results: Sequence[Mapping[str, Any]],
    max_shard_size: int | str,
) -> Path:
    """See `DynSpecAssistant.save_pretrained`."""
    config = _config_of(assistant, provenance or {}, results)
    return write_artifact(directory, config, assistant.policy.tensors(), max_shard_size=max_shard_size)


def push_assistant(
    assistant: Assistant,
    repo_id: str,
    *,
    provenance: Mapping[str, Any] | None,
    results: Sequence[Mapping[str, Any]],
    max_shard_size: int | str,
    **options: Any,
) -> CommitInfo:
    """See `DynSpecAssistant.push_to_hub`."""
    with tempfile.TemporaryDirectory() as directory:
        save_assistant(assistant, directory, provenance=provenance, results=results, max_shard_size=max_shard_size)
        return push_artifact(directory, repo_id, **options)


def read_assistant(
    directory_or_repo: str | os.PathLike,
    *,
    target: PreTrainedModel,
    drafter: PreTrainedModel | Drafter | None,
    tokenizer: Any,
    revision: str | None,
    cache_dir: str | os.PathLike | None,
    token: str | bool | None,
) -> dict[str, Any]:
    """The constructor's arguments that an artifact stands for, see `DynSpecAssistant.from_pretrained`."""
    target = unwrapped(target)
    check_target(target)
    tokenizer = tokenizer if tokenizer is not None else local_tokenizer(target)
    config, tensors = read_artifact(
        directory_or_repo,
        revision=revision,
        tokenizer_fingerprint=_fingerprint(tokenizer, target),
        cache_dir=cache_dir,
        token=token,
    )
    with naming_source(directory_or_repo):
        policy = rebuild_policy(config, tensors)
    return {
        "drafter": drafter if drafter is not None else load_named_drafter(config.drafter, target, cache_dir, token),
        "policy": policy,
        "target": target,
        "tokenizer": tokenizer,
        "num_assistant_tokens": config.num_assistant_tokens,
        "assistant_confidence_threshold": config.assistant_confidence_threshold,
        "tree": config.tree or False,
    }


def _config_of(
    assistant: Assistant, provenance: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> DynSpecConfig:
    return DynSpecConfig(
        policy=PolicyConfig(assistant.policy.name, assistant.policy.settings()),
        tokenizer=_fingerprint(assistant.tokenizer, assistant.target),
        drafter=drafter_reference(assistant.drafter),
        target=model_reference(assistant.target),
        num_assistant_tokens=assistant.generation_config.num_assistant_tokens,
        assistant_confidence_threshold=assistant.generation_config.assistant_confidence_threshold,
        tree=assistant.tree,
        provenance=provenance,
        results=results if isinstance(results, str) else list(results),
    )


def _fingerprint(tokenizer: Any, target: PreTrainedModel | None) -> TokenizerFingerprint | None:
    """The tokenizer's fingerprint, with the end-of-sequence ids of the target where it has some."""
    if tokenizer is None:
        return None
    eos = () if target is None else as_token_ids(target.generation_config.eos_token_id)
    return fingerprint_tokenizer(tokenizer, eos or None)
