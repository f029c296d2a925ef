"""Saving, loading and publishing assistants."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitInfo
from transformers import PreTrainedModel

from ..artifacts import push_artifact, read_artifact, rebuild_policy, write_artifact
from ..artifacts.config import DynSpecConfig, PolicyConfig
from ..drafters import Drafter
from ..errors import naming_source
from ..files import DEFAULT_SHARD_SIZE
from ..generation.bindable import Assistant
from ..generation.refusals import check_target
from ..loading import local_tokenizer
from ..modeling.parts import unwrapped
from ..vocabulary import TokenizerFingerprint, as_token_ids, fingerprint_tokenizer
from .models import drafter_reference, load_named_drafter, model_reference

_Self = TypeVar("_Self", bound="SavedAssistant")


class SavedAssistant(Assistant):
    """An assistant that artifacts can hold."""

    def save_pretrained(
        self,
        directory: str | os.PathLike,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    ) -> Path:
        """Write the policy, its tensors and a model card. The models are named, not copied.

        Args:
            directory: made if needed; its contents are replaced atomically.
            provenance: JSON values about how the policy was made, for the model card.
            results: measurements for the model card, see `DynSpecConfig`.
            max_shard_size: the most bytes of tensors in one file, or a text such as `"500MB"`. Larger artifacts are
                split into shards.

        Returns:
            The folder.

        Raises:
            ArtifactError: the policy has tensors and no tokenizer is known, or the folder belongs to something else.
            ConfigurationError: `max_shard_size` is not a size.
        """
        options = self.generation_config
        config = DynSpecConfig(
            policy=PolicyConfig(self.policy.name, self.policy.settings()),
            tokenizer=_fingerprint(self.tokenizer, self.target),
            drafter=drafter_reference(self.drafter),
            target=model_reference(self.target),
            num_assistant_tokens=options.num_assistant_tokens,
            # Trees do not use it, and the drafter's own configuration may have one.
            assistant_confidence_threshold=None if self.tree else options.assistant_confidence_threshold,
            tree=self.tree,
            provenance=provenance or {},
            results=results if isinstance(results, str) else list(results),
        )
        return write_artifact(directory, config, self.policy.tensors(), max_shard_size=max_shard_size)

    @classmethod
    def from_pretrained(
        cls: type[_Self],
        directory_or_repo: str | os.PathLike,
        *,
        target: PreTrainedModel,
        drafter: PreTrainedModel | Drafter | str | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        **settings: Any,
    ) -> _Self:
        """Load an artifact and bind it.

        Args:
            directory_or_repo: a folder that `save_pretrained` wrote, or a repository on the Hub.
            target: the model to speed up.
            drafter: as for the constructor (None: the one that the artifact names, in the target's dtype and on its
                device).
            tokenizer: as for the constructor.
            revision: branch, tag or commit of the repository. It is resolved once, for all files.
            cache_dir: the folder for downloads (None: the Hub's usual cache).
            token: for a private repository.
            settings: further arguments of the constructor; they take precedence over the artifact's.

        Raises:
            ArtifactError: the artifact is damaged, for another tokenizer, or names no drafter that can be loaded.
            UnsupportedError: as for the constructor.
        """
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
        if drafter is None:
            drafter = load_named_drafter(config.drafter, target, cache_dir, token)
        stored = {
            "drafter": drafter,
            "policy": policy,
            "target": target,
            "tokenizer": tokenizer,
            "num_assistant_tokens": config.num_assistant_tokens,
            "assistant_confidence_threshold": config.assistant_confidence_threshold,
            "tree": config.tree or False,
        }
        return cls(**{**stored, **settings})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        **options: Any,
    ) -> CommitInfo:
        """Save and publish in one commit.

        Args:
            repo_id: the repository; made if needed.
            provenance: as for `save_pretrained`.
            results: as for `save_pretrained`.
            max_shard_size: as for `save_pretrained`.
            options: `private`, `token`, `commit_message`, `revision`, `create_pr`; see `artifacts.push_artifact`.

        Returns:
            The commit.

        Raises:
            ArtifactError: as for `save_pretrained`, or the repository belongs to something else.
        """
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory, provenance=provenance, results=results, max_shard_size=max_shard_size)
            return push_artifact(directory, repo_id, **options)


def _fingerprint(tokenizer: Any, target: PreTrainedModel | None) -> TokenizerFingerprint | None:
    """The tokenizer's fingerprint, with the target's end-of-sequence ids if it has some."""
    if tokenizer is None:
        return None
    eos = () if target is None else as_token_ids(target.generation_config.eos_token_id)
    return fingerprint_tokenizer(tokenizer, eos or None)
