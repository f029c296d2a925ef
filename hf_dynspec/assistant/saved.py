"""Assistants as artifacts, as users see them: saved, loaded and published."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedModel

from ..drafters import Drafter
from ..files import DEFAULT_SHARD_SIZE
from ..generation.call import Assistant

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

_Self = TypeVar("_Self", bound="SavedAssistant")


class SavedAssistant(Assistant):
    """What an assistant is written to, and made of again. The room of artifacts is opened when it is called."""

    def save_pretrained(
        self,
        directory: str | os.PathLike,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    ) -> Path:
        """Write the policy, its tensors and a model card; the models themselves are named, not copied.

        Args:
            directory: made if needed; what it holds is replaced atomically.
            provenance: JSON values that say how the policy was made, for the model card.
            results: measurements for the model card, see `DynSpecConfig`.
            max_shard_size: the most bytes of the tensors in one file, or a text such as `"500MB"`; beyond it they are
                split into shards.

        Returns:
            The folder.

        Raises:
            ArtifactError: the policy has tensors and no tokenizer is known, or the folder belongs to something else.
            ConfigurationError: `max_shard_size` is not a size.
        """
        from ..artifacts.assistants import save_assistant

        return save_assistant(self, directory, provenance=provenance, results=results, max_shard_size=max_shard_size)

    @classmethod
    def from_pretrained(
        cls: type[_Self],
        directory_or_repo: str | os.PathLike,
        *,
        target: PreTrainedModel,
        drafter: PreTrainedModel | Drafter | None = None,
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
            drafter: the model that drafts (None: the one that the artifact names, in the target's dtype and on its
                device).
            tokenizer: as for the constructor.
            revision: branch, tag or commit of the repository. It is resolved once, for all files.
            cache_dir: where downloads are kept (None: the Hub's usual cache).
            token: for a private repository.
            settings: further arguments of the constructor; they take precedence over the artifact's.

        Raises:
            ArtifactError: the artifact is damaged, for another tokenizer, or names no drafter that can be loaded.
            UnsupportedError: as for the constructor.
        """
        from ..artifacts.assistants import read_assistant

        stored = read_assistant(
            directory_or_repo,
            target=target,
            drafter=drafter,
            tokenizer=tokenizer,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
        )
        return cls(**{**stored, **settings})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        **options: Any,
    ) -> "CommitInfo":
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
        from ..artifacts.assistants import push_assistant

        return push_assistant(
            self, repo_id, provenance=provenance, results=results, max_shard_size=max_shard_size, **options
        )
