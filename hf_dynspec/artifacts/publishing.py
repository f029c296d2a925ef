"""Publishing artifacts on the Hugging Face Hub, in one commit."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants

from ..errors import ArtifactError
from ..files import require_own_file
from ..storable import POLICY_DATA
from .card_file import card_to_publish, may_replace_card
from .config import CARD_FILE, CONFIG_FILE, DynSpecConfig
from .folder import FolderFiles
from .hub import PublishedFiles, naming_hub_errors, usual_hub
from .reading import read_artifact
from .tensors import is_weights_name


def push_artifact(
    directory: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    api: HfApi | None = None,
) -> CommitInfo:
    """Publish a folder that `write_artifact` made, in one commit. The repository is made if needed.

    Only the artifact's own files are uploaded. A generated model card is rewritten to name the repository; a card that
    somebody edited, here or on the Hub, is kept (the one here if both were).

    Args:
        directory: the folder.
        repo_id: the repository, `"name"` or `"organisation/name"`. Must not hold another library's model.
        private: whether a repository that is made is private (None: your account's default).
        token: the Hub token (None: the one that you are logged in with).
        commit_message: for the history (None: a plain sentence).
        revision: the branch, made if needed (None: the main branch).
        create_pr: open a pull request instead of committing to the branch.
        api: the client of another Hub than the usual one.

    Returns:
        The commit, with `pr_url` set where a pull request was opened.

    Raises:
        ArtifactError: the folder does not hold a sound artifact, or the repository belongs to something else.
    """
    api = api or usual_hub()
    files = FolderFiles(Path(directory))
    config, _ = read_artifact(files.directory)
    paths = {CONFIG_FILE: files.config_path(), **files.weights_paths(config.weights)}
    for name, path in paths.items():
        require_own_file(path, name)
    card_to_publish(files.directory, config, repo_id)  # one that cannot be published is told before the Hub is asked
    if constants.HF_HUB_OFFLINE:
        raise ArtifactError("repository", "the Hub is not asked for anything", "Unset HF_HUB_OFFLINE to publish.")
    with naming_hub_errors(repo_id, CONFIG_FILE):
        repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        published = PublishedFiles(api, repo_id, revision, token)
    published.require_own()
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in paths.items()]
    stale = sorted(name for name in published.names if is_weights_name(name) and name not in config.weights)
    operations += [CommitOperationDelete(name) for name in stale]
    if not (published.has_edited_card() and may_replace_card(files.directory / CARD_FILE)):
        card = card_to_publish(files.directory, config, repo_id)
        operations.append(CommitOperationAdd(CARD_FILE, card.encode("utf-8")))
    return api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or f"Upload the {_title(config)} with hf_dynspec",
        token=token,
        revision=revision,
        create_pr=create_pr,
        parent_commit=published.commit,  # the files looked at above are the ones that this commit replaces
    )


def _title(config: DynSpecConfig) -> str:
    name = config.policy.name
    return name.replace("_", " ") if name in POLICY_DATA else f"{name} shortlist policy"


def published_sizes(config: DynSpecConfig) -> dict[str, int]:
    """The bytes of the files that `push_artifact` uploads beside the model card, by name."""
    sizes = {name: digest.size for name, digest in config.weights.items()}
    return {CONFIG_FILE: len(config.to_json().encode("utf-8")), **sizes}
