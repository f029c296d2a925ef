"""Artifacts: a policy with all that it needs, as `config.json`, `model.safetensors` and a model card.

Artifacts are data, never code and never pickle. Of a repository only these three files are ever fetched, all at one
commit. `model.safetensors` exists only where the policy has tensors, and `config.json` holds its digest.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.constants import DEFAULT_REVISION
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
from ..configuration import (
    LIBRARY_NAME,
    DynSpecConfig,
    TokenizerFingerprint,
    WeightsDigest,
    parse_strict_json,
)
from ..errors import ArtifactError, ConfigurationError
from ..shortlists import ShortlistPolicy, policy_class
from .card import is_unedited_card, render_card
from .fingerprint import require_same_tokenizer
from .weights import WEIGHTS_FILE, digest_bytes, digest_file, read_header, read_tensors, serialize_tensors

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"

LARGEST_CONFIG = 2**20

# The weights that an existing config.json was written with, kept while a save is between its two files.
_PREVIOUS_WEIGHTS_FILE = ".model.safetensors.previous"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_FETCH_AGAIN = "Download or write the artifact again."


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
    files: _FolderFiles | _RepositoryFiles
    if is_folder(directory_or_repo):
        files = _FolderFiles(Path(directory_or_repo))
    else:
        api = api or HfApi(library_name=LIBRARY_NAME, library_version=__version__)
        files = _RepositoryFiles(str(directory_or_repo), revision, api, cache_dir, token)
    config = _read_config(files.config_path())
    _require_known_policies(config)
    eos_token_ids = config.tokenizer.eos_token_ids if config.tokenizer else ()
    if tokenizer_fingerprint is not None and config.tokenizer is not None:
        require_same_tokenizer(config.tokenizer, tokenizer_fingerprint)
        eos_token_ids = tuple(dict.fromkeys(eos_token_ids + tokenizer_fingerprint.eos_token_ids))
    if config.weights is None:
        return config, {}
    with files.weights_path(config.weights).open("rb") as file:
        return config, read_tensors(file, config.weights, _require_tokenizer(config), eos_token_ids)


def rebuild_policy(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> ShortlistPolicy:
    """Build the policy of an artifact from what `read_artifact` returned.

    Raises:
        ArtifactError: a setting is unknown, mistyped or out of range, or a tensor belongs to no policy.
    """
    _require_known_policies(config)
    try:
        policy = policy_class(config.policy.name).from_settings(config.policy.settings, tensors)
    except ConfigurationError as error:
        raise ArtifactError(f"{CONFIG_FILE}: policy.settings", str(error), _FETCH_AGAIN) from error
    astray = set(tensors) ^ set(policy.tensors())
    if astray:
        problem = f"the policy {config.policy.name!r} with its settings does not match this tensor"
        raise ArtifactError(f"{WEIGHTS_FILE}: {min(astray)}", problem, _FETCH_AGAIN)
    return policy


def write_artifact(
    directory: str | os.PathLike,
    config: DynSpecConfig,
    tensors: Mapping[str, torch.Tensor],
    card: str | None = None,
) -> Path:
    """Write an artifact. Even if the process is killed meanwhile, the folder holds either the old one or the new one.

    What `read_artifact` would refuse is not written. A model card that somebody edited is kept; one that `render_card`
    made is replaced.

    Args:
        directory: made if needed. Must not hold another library's `config.json` or `model.safetensors`.
        config: its `weights` and `hf_dynspec_version` are filled in here.
        tensors: CPU or device tensors by name; none are fine.
        card: the text of the model card (None: `render_card(config)`).

    Returns:
        The folder.

    Raises:
        ArtifactError: the tensors or the policy would be refused on reading, or the folder belongs to something else.
    """
    directory = Path(directory)
    _require_own_folder(directory)
    _require_known_policies(config)
    weights = _serialize_checked(config, tensors)
    config = replace(config, weights=digest_bytes(weights) if weights else None, hf_dynspec_version=__version__)
    text = config.to_json().encode("utf-8")
    _require_config_size(len(text))
    card = card or render_card(config)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".hf_dynspec-", dir=directory) as staging:
        _write_through(Path(staging, CONFIG_FILE), text)
        _write_through(Path(staging, CARD_FILE), card.encode("utf-8"))
        if weights:
            _write_through(Path(staging, WEIGHTS_FILE), weights)
        _replace_files(Path(staging), directory, has_weights=bool(weights))
        if _may_replace_card(directory / CARD_FILE):
            os.replace(Path(staging, CARD_FILE), directory / CARD_FILE)
    return directory


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
    api = api or HfApi(library_name=LIBRARY_NAME, library_version=__version__)
    files = _FolderFiles(Path(directory))
    config, _ = read_artifact(files.directory)
    with naming_hub_errors(repo_id, CONFIG_FILE):
        repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        published = _PublishedFiles(api, repo_id, revision, token)
    published.require_own()
    operations: list[Any] = [CommitOperationAdd(CONFIG_FILE, files.config_path())]
    if config.weights is not None:
        operations.append(CommitOperationAdd(WEIGHTS_FILE, files.weights_path(config.weights)))
    elif WEIGHTS_FILE in published.names:
        operations.append(CommitOperationDelete(WEIGHTS_FILE))
    card = _card_to_publish(files.directory / CARD_FILE, config, published)
    if card is not None:
        operations.append(CommitOperationAdd(CARD_FILE, card.encode("utf-8")))
    return api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or f"Upload the {config.policy.name} shortlist policy with hf_dynspec",
        token=token,
        revision=revision,
        create_pr=create_pr,
        parent_commit=published.commit,  # the files looked at above are the ones that this commit replaces
    )


class _FolderFiles:
    """The files of a folder."""

    def __init__(self, directory: Path):
        self.directory = directory

    def config_path(self) -> Path:
        path = self.directory / CONFIG_FILE
        if not path.is_file():
            raise _missing(CONFIG_FILE, str(self.directory), os.listdir(self.directory))
        return path

    def weights_path(self, digest: WeightsDigest) -> Path:
        path, previous = self.directory / WEIGHTS_FILE, self.directory / _PREVIOUS_WEIGHTS_FILE
        # A save that was killed between its two files has left the weights of this configuration under another name.
        if previous.is_file() and not _has_digest(path, digest) and _has_digest(previous, digest):
            return previous
        if not path.is_file():
            raise _missing(WEIGHTS_FILE, str(self.directory), os.listdir(self.directory))
        return path


class _RepositoryFiles:
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
        _require_config_size(found.file_size)
        branch, self._revision = self._revision or DEFAULT_REVISION, found.commit_hash
        path = Path(self._download(CONFIG_FILE))
        if branch != self._revision:
            _remember_branch(path.parents[2] / "refs" / branch, self._revision)
        return path

    def weights_path(self, digest: WeightsDigest) -> Path:
        size = self._download(WEIGHTS_FILE, dry_run=True).file_size
        if size not in (None, digest.size):
            problem = f"has {size} bytes in {self._repo_id}, and {CONFIG_FILE} was written with {digest.size}"
            raise ArtifactError(WEIGHTS_FILE, problem, "Ask its author to publish the artifact again.")
        return Path(self._download(WEIGHTS_FILE))

    def _download(self, filename: str, **options: Any) -> Any:
        """A file's path, or with `dry_run=True` its commit and, where the Hub tells, its size."""
        with naming_hub_errors(self._repo_id, filename):
            try:
                return self._api.hf_hub_download(
                    self._repo_id, filename, revision=self._revision, **self._options, **options
                )
            except RemoteEntryNotFoundError as error:
                info = self._api.repo_info(self._repo_id, revision=self._revision, token=self._options["token"])
                raise _missing(filename, self._repo_id, [file.rfilename for file in info.siblings or []]) from error


class _PublishedFiles:
    """What a repository holds before it is pushed to."""

    def __init__(self, api: HfApi, repo_id: str, revision: str | None, token: str | bool | None):
        info = api.repo_info(repo_id, revision=revision, token=token)
        self.names = {file.rfilename for file in info.siblings or []}
        self.commit = info.sha
        self.repo_id = repo_id
        self._download = partial(api.hf_hub_download, repo_id, revision=info.sha, token=token)

    def read(self, filename: str) -> bytes | None:
        """The contents of a file, None where there is no such file."""
        return Path(self._download(filename)).read_bytes() if filename in self.names else None

    def require_own(self) -> None:
        """Refuse to replace the files of another library's model."""
        config = self.read(CONFIG_FILE)
        if (config is None and WEIGHTS_FILE in self.names) or (config is not None and not _is_own_config(config)):
            problem = f"{self.repo_id} holds a model that is not an hf_dynspec artifact"
            raise ArtifactError("repository", problem, "Push to a repository of its own.")


def is_folder(directory_or_repo: str | os.PathLike) -> bool:
    """Whether to read a folder and not a repository.

    Raises:
        ArtifactError: there is no such folder, and it cannot be a repository's name either.
    """
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


def _read_config(path: Path) -> DynSpecConfig:
    _require_config_size(path.stat().st_size)
    return DynSpecConfig.from_dict(parse_strict_json(path.read_bytes(), CONFIG_FILE), CONFIG_FILE)


def _require_config_size(size: int | None) -> None:
    if size is not None and size > LARGEST_CONFIG:
        problem = f"has {size} bytes, and {LARGEST_CONFIG} are the most"
        raise ArtifactError(CONFIG_FILE, problem, "Keep the settings, provenance and results shorter.")


def _require_known_policies(config: DynSpecConfig) -> None:
    """Check the names of the policy and of every policy nested in its settings, which are stored in the same shape."""
    pending: list[tuple[str, Any]] = [(f"{CONFIG_FILE}: policy", config.to_dict()["policy"])]
    while pending:
        field, value = pending.pop()
        if isinstance(value, list):
            pending += [(f"{field}[{index}]", item) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            continue
        pending += [(f"{field}.{key}", item) for key, item in value.items()]
        if set(value) == {"name", "settings"}:
            _require_known_policy(field, value)


def _require_known_policy(field: str, policy: dict[str, Any]) -> None:
    try:
        policy_class(policy["name"])
    except ConfigurationError as error:
        fix = "Install the hf_dynspec that wrote the artifact."
        raise ArtifactError(f"{field}.name", str(error), fix) from error
    if not isinstance(policy["settings"], dict):
        raise ArtifactError(f"{field}.settings", "must be a JSON object", _FETCH_AGAIN)


def _require_tokenizer(config: DynSpecConfig) -> TokenizerFingerprint:
    if config.tokenizer is None:
        problem = "is missing, so that nothing says whose ids the tensors hold"
        fix = "Write the artifact with the tokenizer's fingerprint (fingerprint_tokenizer)."
        raise ArtifactError(f"{CONFIG_FILE}: tokenizer", problem, fix)
    return config.tokenizer


def _remember_branch(reference: Path, commit: str) -> None:
    """Note in the cache where a branch pointed, as the Hub's client does, so that it is found without a network."""
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    except OSError:
        pass  # a cache that may only be read still serves this artifact


def _missing(filename: str, place: str, names: list[str]) -> ArtifactError:
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if not pickles:
        fix = f"An artifact needs it. {_FETCH_AGAIN}"
        return ArtifactError(filename, f"is not in {place}", fix)
    problem = f"is a pickle, which runs code when it is loaded, and {place} has no {filename}"
    fix = (
        "If you trust its author, load it with torch.load(…, weights_only=True), build the policy from its tensors "
        "and write the artifact with save_pretrained()."
    )
    return ArtifactError(min(pickles), problem, fix)


@contextmanager
def naming_hub_errors(repo_id: str, filename: str) -> Iterator[None]:
    """Say in this package's words what a user can mend; other trouble with the network stays the Hub client's."""
    try:
        yield
    except HFValidationError as error:
        raise ArtifactError("repository", f"{repo_id!r} cannot be a name on the Hub", "Correct the name.") from error
    except RepositoryNotFoundError as error:
        problem = f"{repo_id} does not exist, or you may not see it"
        raise ArtifactError("repository", problem, "Correct the name, log in, or accept the terms.") from error
    except RevisionNotFoundError as error:
        raise ArtifactError("revision", f"{repo_id} has no such revision", "Correct the revision.") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        problem = f"of {repo_id} is not in the cache, and the Hub cannot be reached"
        raise ArtifactError(filename, problem, "Load the artifact once with a network.") from error


def _require_own_folder(directory: Path) -> None:
    """Refuse to replace the files of another library's model."""
    if directory.exists() and not directory.is_dir():
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if config.is_file():
        own = config.stat().st_size <= LARGEST_CONFIG and _is_own_config(config.read_bytes())
    else:
        own = not weights.is_file() or _is_own_weights(weights)
    if not own:
        problem = f"{directory} holds a model that is not an hf_dynspec artifact"
        raise ArtifactError("directory", problem, "Save to a folder of its own.")


def _is_own_config(text: bytes) -> bool:
    try:
        return parse_strict_json(text, CONFIG_FILE).get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _is_own_weights(path: Path) -> bool:
    """Whether a first save that was killed between its two files left this one."""
    try:
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size).metadata.get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _serialize_checked(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> bytes | None:
    """The bytes of `model.safetensors`, read back once, so that nothing is written that reading would refuse."""
    if not tensors:
        return None
    tokenizer = _require_tokenizer(config)
    data = serialize_tensors(tensors)
    read_tensors(BytesIO(data), digest_bytes(data), tokenizer, tokenizer.eos_token_ids)
    return data


def _replace_files(staging: Path, directory: Path, has_weights: bool) -> None:
    """Put finished files in place. No two names can change at once, so the old weights stay until the new
    `config.json` is there, and reading follows the digest in `config.json`."""
    weights, previous = directory / WEIGHTS_FILE, directory / _PREVIOUS_WEIGHTS_FILE
    committed = _committed_weights(directory)
    if committed == weights:
        _write_through(staging / previous.name, weights.read_bytes())
        os.replace(staging / previous.name, previous)
    try:
        if has_weights:
            os.replace(staging / WEIGHTS_FILE, weights)
        os.replace(staging / CONFIG_FILE, directory / CONFIG_FILE)
    except BaseException:
        if committed is not None:
            os.replace(previous, weights)
        elif has_weights:
            weights.unlink(missing_ok=True)
        raise
    if not has_weights:
        weights.unlink(missing_ok=True)
    previous.unlink(missing_ok=True)


def _committed_weights(directory: Path) -> Path | None:
    """The weights that belong to the `config.json` of a folder, None where the folder holds no complete artifact."""
    files = _FolderFiles(directory)
    try:
        digest = _read_config(files.config_path()).weights
        path = files.weights_path(digest) if digest else None
    except ArtifactError:
        return None
    return path if path and _has_digest(path, digest) else None


def _has_digest(path: Path, digest: WeightsDigest) -> bool:
    if not path.is_file() or path.stat().st_size != digest.size:
        return False
    with path.open("rb") as file:
        return digest_file(file) == digest


def _write_through(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk, so that a rename never makes half a file visible."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _may_replace_card(path: Path) -> bool:
    return not path.exists() or is_unedited_card(path.read_text(encoding="utf-8", errors="replace"))


def _card_to_publish(path: Path, config: DynSpecConfig, published: _PublishedFiles) -> str | None:
    """The text of the card to upload, None where the one on the Hub was edited and is kept."""
    if not _may_replace_card(path):
        return path.read_text(encoding="utf-8")
    there = published.read(CARD_FILE)
    if there is not None and not is_unedited_card(there.decode("utf-8", errors="replace")):
        return None
    return render_card(config, published.repo_id)
