"""The Hugging Face Hub: downloads of one commit, and the Hub's errors in this package's words."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from .config import CONFIG_FILE, LIBRARY_NAME, WeightsDigest, require_config_size
from .folder import missing_file


def usual_hub() -> HfApi:
    """The client of the Hub that the environment names."""
    return HfApi(library_name=LIBRARY_NAME, library_version=__version__)


def is_folder(directory_or_repo: str | os.PathLike) -> bool:
    """Whether to read a folder and not a repository. A name that is neither a folder's nor can be a repository's is
    refused."""
    if os.path.isdir(directory_or_repo):
        return True
    problem = f"there is no folder {str(directory_or_repo)!r}"
    fix = "Give an existing folder or the name of a repository on the Hub."
    if not isinstance(directory_or_repo, str):
        raise ArtifactError("directory", problem, fix)
    try:
        validate_repo_id(directory_or_repo)
    except HFValidationError as error:
        raise ArtifactError("directory", f"{problem}, and it cannot be a repository's name", fix) from error
    return False


def local_folder(directory_or_repo: str | os.PathLike, filenames: Sequence[str], **options: Any) -> Path:
    """The folder itself, or `download_snapshot` of a repository."""
    if is_folder(directory_or_repo):
        return Path(directory_or_repo)
    return download_snapshot(str(directory_or_repo), filenames, **options)


def download_snapshot(
    repo_id: str,
    filenames: Sequence[str],
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> Path:
    """Fetch files of a repository, all of one commit, into the Hub's cache (`cache_dir`, or the usual one). A folder
    of that name is never looked at. `filenames` are patterns of files at the repository's top. Returns the absolute
    path of the snapshot.

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
    """Name in this package's words what a user can mend about a repository and a requested file. Other network errors
    stay the Hub client's. If `or_folder`, the name may have been meant for a folder on this computer."""
    no_folder = or_folder and not os.path.isdir(repo_id)
    try:
        yield
    except HFValidationError as error:
        raise ArtifactError("repository", f"{repo_id!r} cannot be a name on the Hub", "Correct the name.") from error
    except RepositoryNotFoundError as error:
        problem = f"there is no folder {repo_id} here, and " * no_folder
        problem += f"{repo_id} does not exist on the Hub, or you may not see it"
        raise ArtifactError("repository", problem, "Correct the name, log in, or accept the terms.") from error
    except RevisionNotFoundError as error:
        raise ArtifactError("revision", f"{repo_id} has no such revision", "Correct the revision.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        problem = f"of {repo_id} is not in the cache, and the Hub cannot be reached"
        problem += f"; nor is there a folder {repo_id} here" * no_folder
        fix = "Give an existing folder, or load" if no_folder else "Load"
        raise ArtifactError(filename, problem, f"{fix} the repository once with a network.") from error
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        problem = f"of {repo_id} cannot be kept in the Hub's cache: {error}"
        raise ArtifactError(filename, problem, "Make the cache writable, or give another cache_dir.") from error


class Repository:
    """An artifact on the Hub. Its files are downloaded to the cache, and their sizes checked before. The options are
    `cache_dir` and `token`."""

    def __init__(self, repo_id: str, revision: str | None, api: HfApi, **options: Any):
        self._repo_id, self._revision, self._api, self._options = repo_id, revision, api, options

    def fetch_config(self) -> Path:
        """Download `config.json`, and resolve the revision to a commit for all files. Returns the folder."""
        found = self._download(CONFIG_FILE, dry_run=True)
        require_config_size(found.file_size)
        # Nothing is downloaded by the name of a branch: the Hub's client would mix commits if it moved meanwhile.
        branch, self._revision = self._revision or constants.DEFAULT_REVISION, found.commit_hash
        folder = Path(self._download(CONFIG_FILE)).parent
        if branch != self._revision:
            # As the client notes it, so that the branch is found without a network.
            reference = folder.parents[1] / "refs" / branch
            with suppress(OSError):  # a cache may be read-only
                reference.parent.mkdir(parents=True, exist_ok=True)
                reference.write_text(self._revision)
        return folder

    def fetch_weights(self, weights: Mapping[str, WeightsDigest]) -> None:
        """Download the files of tensors, once the sizes of all are found to be right."""
        for name, digest in weights.items():
            size = self._download(name, dry_run=True).file_size
            if size not in (None, digest.size):
                problem = f"has {size} bytes in {self._repo_id}, and {CONFIG_FILE} was written with {digest.size}"
                raise ArtifactError(name, problem, "Ask its author to publish the artifact again.")
        for name in weights:
            self._download(name)

    def _download(self, filename: str, **more: Any) -> Any:
        """A file's path, or with `dry_run=True` its size, None if the Hub does not say."""
        with naming_hub_errors(self._repo_id, filename, or_folder=True):
            options = {**self._options, **more, "revision": self._revision}
            try:
                return self._api.hf_hub_download(self._repo_id, filename, **options)
            except RemoteEntryNotFoundError as error:
                info = self._api.repo_info(self._repo_id, revision=self._revision, token=self._options["token"])
                names = [file.rfilename for file in info.siblings or ()]
                raise missing_file(filename, self._repo_id, names) from error
