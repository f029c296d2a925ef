"""Publishing artifacts on the Hugging Face Hub, in one commit."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants

from ..errors import ArtifactError
from ..files import read_file, require_own_file
from ..storable import POLICY_DATA
from .card import LARGEST_CARD, card_to_publish, is_unedited_card, may_replace_card
from .config import CARD_FILE, CONFIG_FILE, LARGEST_CONFIG, DynSpecConfig
from .folder import is_own_config, weights_paths
from .hub import naming_hub_errors, usual_hub
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
    """Publish a folder that `write_artifact` made, in one commit. The repository is made if needed. Returns the
    commit, with `pr_url` set for a pull request.

    Only the artifact's own files are uploaded. A generated model card is rewritten to name the repository. An edited
    card is kept, the folder's rather than the Hub's.

    Args:
        directory: the folder.
        repo_id: the repository, `"name"` or `"organisation/name"`. Must not hold another library's model.
        private: whether a new repository is private (None: your account's default).
        token: the Hub token (None: your login).
        commit_message: for the history (None: a plain sentence).
        revision: the branch, made if needed (None: the main branch).
        create_pr: open a pull request instead of committing to the branch.
        api: the client of another Hub.

    Raises:
        ArtifactError: the folder does not hold a sound artifact, or the repository belongs to something else.
    """
    api, folder = api or usual_hub(), Path(directory)
    config, _ = read_artifact(folder)
    paths = {CONFIG_FILE: folder / CONFIG_FILE, **weights_paths(folder, config.weights)}
    for name, path in paths.items():
        require_own_file(path, name)
    card_to_publish(folder, config, repo_id)  # one that cannot be published is refused before the Hub is asked
    require_online()
    with naming_hub_errors(repo_id, CONFIG_FILE):
        repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        commit, published, has_edited_card = _published(api, repo_id, revision, token)
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in paths.items()]
    stale = sorted(name for name in published if is_weights_name(name) and name not in config.weights)
    operations += [CommitOperationDelete(name) for name in stale]
    if not (has_edited_card and may_replace_card(folder)):
        operations.append(CommitOperationAdd(CARD_FILE, card_to_publish(folder, config, repo_id).encode("utf-8")))
    name = config.policy.name
    title = name.replace("_", " ") if name in POLICY_DATA else f"{name} shortlist policy"
    return api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or f"Upload the {title} with hf_dynspec",
        token=token,
        revision=revision,
        create_pr=create_pr,
        parent_commit=commit,  # fails if somebody else pushed meanwhile
    )


def require_online() -> None:
    """Refuse to publish if the environment forbids to ask the Hub."""
    if constants.HF_HUB_OFFLINE:
        raise ArtifactError("repository", "the Hub is not asked for anything", "Unset HF_HUB_OFFLINE to publish.")


def published_sizes(config: DynSpecConfig) -> dict[str, int]:
    """The bytes of the files that `push_artifact` uploads beside the model card, by name."""
    sizes = {name: digest.size for name, digest in config.weights.items()}
    return {CONFIG_FILE: len(config.to_json().encode("utf-8")), **sizes}


def _published(api: HfApi, repo_id: str, revision: str | None, token: str | bool | None) -> tuple[str, set[str], bool]:
    """The commit of a repository before it is pushed to, its files, and whether somebody edited its card. The files of
    another library's model are not replaced."""
    info = api.repo_info(repo_id, revision=revision, token=token)
    names = {file.rfilename for file in info.siblings or ()}

    def fetch(filename: str, most: int) -> Path | None:
        """A file's path; None if it is too large for a file of this package."""
        options = {"revision": info.sha, "token": token}
        size = api.hf_hub_download(repo_id, filename, dry_run=True, **options).file_size
        return Path(api.hf_hub_download(repo_id, filename, **options)) if (size or 0) <= most else None

    if CONFIG_FILE in names:
        config = fetch(CONFIG_FILE, LARGEST_CONFIG)
        is_own = config is not None and is_own_config(config)
    else:
        is_own = not any(map(is_weights_name, names))
    if not is_own:
        problem = f"{repo_id} holds a model that is not an hf_dynspec artifact"
        raise ArtifactError("repository", problem, "Push to a repository of its own.")
    card = fetch(CARD_FILE, LARGEST_CARD) if CARD_FILE in names else None
    text = b"" if card is None else read_file(card, CARD_FILE, LARGEST_CARD)
    is_edited = CARD_FILE in names and not is_unedited_card(text.decode("utf-8", errors="replace"))
    return info.sha, names, is_edited
