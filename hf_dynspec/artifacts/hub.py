"""The Hugging Face Hub: the files of repositories, all of one commit, and its errors in this package's words."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from ..errors import ArtifactError
from ..files import read_file
from .card import is_unedited_card
from .card_file import LARGEST_CARD
from .config import CARD_FILE, CONFIG_FILE, LARGEST_CONFIG, LIBRARY_NAME, WeightsDigest, require_config_size
from .folder import is_own_config, missing_file
from .tensors import is_weights_name


def usual_hub() -> HfApi:
    """The client of the Hub that the environment names."""
    return HfApi(library_name=LIBRARY_NAME, library_version=__version__)


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
    with naming_hub_errors(repo_id, CONFIG_FILE, or_folder=True):
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            allow_patterns=list(filenames),
            ignore_patterns=["*/*"],
        )
    return Path(folder).absolute()


@contextmanager
def naming_hub_errors(repo_id: str, filename: str, or_folder: bool = False) -> Iterator[None]:
    """Say in this package's words what a user can mend; other trouble with the network stays the Hub client's.

    Args:
        repo_id: the repository.
        filename: the file that is asked for.
        or_folder: the name might have been meant for a folder on this computer.

    Raises:
        ArtifactError: there is no such repository, revision or file, or it cannot be reached or kept.
    """
    is_no_folder = or_folder and not os.path.isdir(repo_id)
    try:
        yield
    except HFValidationError as error:
        raise ArtifactError("repository", f"{repo_id!r} cannot be a name on the Hub", "Correct the name.") from error
    except RepositoryNotFoundError as error:
        no_folder = f"there is no folder {repo_id} here, and " if is_no_folder else ""
        problem = f"{no_folder}{repo_id} does not exist on the Hub, or you may not see it"
        raise ArtifactError("repository", problem, "Correct the name, log in, or accept the terms.") from error
    except RevisionNotFoundError as error:
        raise ArtifactError("revision", f"{repo_id} has no such revision", "Correct the revision.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        problem, fix = (
            f"of {repo_id} is not in the cache, and the Hub cannot be reached",
            "Load it once with a network.",
        )
        if is_no_folder:
            problem = f"{problem}; nor is there a folder {repo_id} here"
            fix = "Give an existing folder, or load the repository once with a network."
        raise ArtifactError(filename, problem, fix) from error
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        problem = f"of {repo_id} cannot be kept in the Hub's cache: {error}"
        raise ArtifactError(filename, problem, "Make the cache writable, or give another cache_dir.") from error


def require_repository_name(name: str, field: str = "repository") -> None:
    """Check the name of a repository, or of a dataset, before anything is asked of the Hub.

    Raises:
        ArtifactError: it cannot be one. Its `field` is `field`.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ArtifactError(field, f"{name!r} cannot be a name on the Hub", "Correct the name.") from error


class RepositoryFiles:
    """The files of a Hub repository, downloaded to the cache when they are asked for."""

    def __init__(
        self,
        repo_id: str,
        revision: str | None,
        api: HfApi,
        cache_dir: str | os.PathLike | None,
        token: str | bool | None,
    ):
        self._repo_id = repo_id
        self._revision = revision
        self._api = api
        self._options = {"cache_dir": cache_dir, "token": token}

    def config_path(self) -> Path:
        """Also resolves the revision. Nothing is downloaded by the name of a branch, which may move meanwhile."""
        found = self._download(CONFIG_FILE, dry_run=True)
        require_config_size(found.file_size)
        branch, self._revision = self._revision or constants.DEFAULT_REVISION, found.commit_hash
        path = Path(self._download(CONFIG_FILE))
        if branch != self._revision:
            _remember_branch(path.parents[2] / "refs" / branch, self._revision)
        return path

    def weights_paths(self, weights: Mapping[str, WeightsDigest]) -> dict[str, Path]:
        """Nothing is downloaded before the sizes of all files are found to be right."""
        for name, digest in weights.items():
            size = self._download(name, dry_run=True).file_size
            if size not in (None, digest.size):
                problem = f"has {size} bytes in {self._repo_id}, and {CONFIG_FILE} was written with {digest.size}"
                raise ArtifactError(name, problem, "Ask its author to publish the artifact again.")
        return {name: Path(self._download(name)) for name in weights}

    def _download(self, filename: str, **options: Any) -> Any:
        """A file's path, or with `dry_run=True` its commit and, where the Hub tells, its size."""
        with naming_hub_errors(self._repo_id, filename, or_folder=True):
            try:
                return self._api.hf_hub_download(
                    self._repo_id, filename, revision=self._revision, **self._options, **options
                )
            except RemoteEntryNotFoundError as error:
                info = self._api.repo_info(self._repo_id, revision=self._revision, token=self._options["token"])
                raise missing_file(
                    filename, self._repo_id, [file.rfilename for file in info.siblings or []]
                ) from error


def _remember_branch(reference: Path, commit: str) -> None:
    """Note in the cache where a branch pointed, as the Hub's client does, so that it is found without a network."""
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    except OSError:
        pass  # a cache that may only be read still serves this artifact


class PublishedFiles:
    """What a repository holds before it is pushed to."""

    def __init__(self, api: HfApi, repo_id: str, revision: str | None, token: str | bool | None):
        info = api.repo_info(repo_id, revision=revision, token=token)
        self.names = {file.rfilename for file in info.siblings or []}
        self.commit = info.sha
        self.repo_id = repo_id
        self._download = partial(api.hf_hub_download, repo_id, revision=info.sha, token=token)

    def _path(self, filename: str, most: int) -> Path | None:
        """A file's path, None where it is too large to be one that this package wrote."""
        size = self._download(filename, dry_run=True).file_size
        return Path(self._download(filename)) if size is None or size <= most else None

    def has_edited_card(self) -> bool:
        """Whether there is a card that somebody edited, or wrote."""
        if CARD_FILE not in self.names:
            return False
        path = self._path(CARD_FILE, LARGEST_CARD)
        text = b"" if path is None else read_file(path, CARD_FILE, LARGEST_CARD)
        return not is_unedited_card(text.decode("utf-8", errors="replace"))

    def require_own(self) -> None:
        """Refuse to replace the files of another library's model."""
        if CONFIG_FILE in self.names:
            path = self._path(CONFIG_FILE, LARGEST_CONFIG)
            own = path is not None and is_own_config(path)
        else:
            own = not any(map(is_weights_name, self.names))
        if not own:
            problem = f"{self.repo_id} holds a model that is not an hf_dynspec artifact"
            raise ArtifactError("repository", problem, "Push to a repository of its own.")
