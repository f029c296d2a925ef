"""Artifacts: a policy with all that it needs, as `config.json`, `model.safetensors` and a model card.

Artifacts are data, never code and never pickle. Of a repository only these files are ever fetched, all at one commit.
`model.safetensors` exists only where the policy has tensors; if they are large it is split into shards with an index,
as transformers splits a model. `config.json` holds the digest of each of these files.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants
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
from ..errors import ArtifactError, ConfigurationError
from ..files import is_there, open_file, parse_strict_json, read_file, require_own_file
from ..shortlists import ShortlistPolicy, policy_class
from ..shortlists.union import MOST_POLICIES
from ..vocabulary import TokenizerFingerprint, require_same_tokenizer
from .card import is_unedited_card, render_card
from .config import DEFAULT_SHARD_SIZE, INDEX_FILE, LIBRARY_NAME, WEIGHTS_FILE, DynSpecConfig, WeightsDigest
from .tensors import (
    digest_bytes,
    digest_file,
    is_weights_name,
    read_header,
    read_tensors,
    require_shard_size,
    require_weights_sizes,
    serialize_tensors,
)

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"

LARGEST_CONFIG = 2**20
LARGEST_CARD = 2**22

# While a save is between its files: where it writes them, and the weights that the old config.json was written with.
_STAGING_PREFIX = ".hf_dynspec-"
_PREVIOUS_PREFIX, _PREVIOUS_SUFFIX = ".", ".previous"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_FETCH_AGAIN = "Download or write the artifact again."
# All but the white space that text files have.
_CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")


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
    _require_policies(config)
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
        return config, read_tensors(opened, config.weights, _require_tokenizer(config), eos_token_ids)


def rebuild_policy(config: DynSpecConfig, tensors: Mapping[str, torch.Tensor]) -> ShortlistPolicy:
    """Build the policy of an artifact from what `read_artifact` returned.

    Raises:
        ArtifactError: a setting is unknown, mistyped or out of range, or a tensor belongs to no policy.
    """
    _require_policies(config)
    with _naming_settings():
        policy = policy_class(config.policy.name).from_settings(config.policy.settings, tensors)
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
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> Path:
    """Write an artifact. Even if the process is killed meanwhile, the folder holds either the old one or the new one.

    What `read_artifact` would refuse is not written. A model card that somebody edited is kept; one that `render_card`
    made is replaced.

    Args:
        directory: made if needed. Must not hold another library's `config.json` or `model.safetensors`.
        config: its `weights` and `hf_dynspec_version` are filled in here.
        tensors: CPU or device tensors by name; none are fine.
        card: the text of the model card (None: `render_card(config)`).
        max_shard_size: the most bytes of the tensors in one file, or a text such as `"500MB"`; beyond it they are
            split into shards. A single tensor is never split.

    Returns:
        The folder.

    Raises:
        ArtifactError: the tensors or the policy would be refused on reading, or the folder belongs to something else.
        ConfigurationError: `max_shard_size` is not a size.
    """
    directory = Path(directory)
    _require_own_folder(directory)
    _require_policies(config)
    weights = _serialize_checked(config, tensors, max_shard_size)
    digests = {name: digest_bytes(data) for name, data in weights.items()}
    config = replace(config, weights=digests, hf_dynspec_version=__version__)
    with _staged_texts(directory, config, card) as staging:
        for name, data in weights.items():
            _write_through(staging / name, data)
        _replace_files(staging, directory, config.weights)
    return directory


def annotate_artifact(
    directory: str | os.PathLike,
    *,
    results: Iterable[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
) -> DynSpecConfig:
    """Add measurements and provenance to an artifact that is on the disk already, and to its model card unless
    somebody edited it. The tensors stay as they are; `config.json` is replaced in one step.

    Args:
        directory: the folder.
        results: rows as in `DynSpecConfig`, see `merge_results`.
        provenance: JSON values, which replace those of the same name.

    Returns:
        The configuration that is in the folder now.

    Raises:
        ArtifactError: the folder does not hold a sound artifact, or there would be too much in its `config.json`.
        ConfigurationError: a row or a value is not as in `DynSpecConfig`.
    """
    config, _ = read_artifact(Path(directory))
    config = with_annotations(config, results=results, provenance=provenance)
    with _staged_texts(Path(directory), config) as staging:
        os.replace(staging / CONFIG_FILE, Path(directory, CONFIG_FILE))
    return config


def with_annotations(
    config: DynSpecConfig, *, results: Iterable[Mapping[str, Any]] = (), provenance: Mapping[str, Any] | None = None
) -> DynSpecConfig:
    """What `annotate_artifact` writes.

    Raises:
        ArtifactError: there would be too much in the `config.json`.
        ConfigurationError: a row or a value is not as in `DynSpecConfig`.
    """
    merged = merge_results(config.results, results)
    config = replace(config, results=merged, provenance={**config.provenance, **(provenance or {})})
    _require_config_size(len(config.to_json().encode("utf-8")))
    return config


def merge_results(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of both. A new row takes the place of an old one whose texts, which say what was measured, are the same."""
    rows: dict[tuple, dict[str, Any]] = {}
    for row in (*old, *new):
        conditions = tuple(sorted((key, value) for key, value in row.items() if isinstance(value, str)))
        rows[conditions] = dict(row)
    return list(rows.values())


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
        published = _PublishedFiles(api, repo_id, revision, token)
    published.require_own()
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in paths.items()]
    stale = sorted(name for name in published.names if is_weights_name(name) and name not in config.weights)
    operations += [CommitOperationDelete(name) for name in stale]
    if not (published.has_edited_card() and _may_replace_card(files.directory / CARD_FILE)):
        card = card_to_publish(files.directory, config, repo_id)
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


def published_sizes(config: DynSpecConfig) -> dict[str, int]:
    """The bytes of the files that `push_artifact` uploads beside the model card, by name."""
    sizes = {name: digest.size for name, digest in config.weights.items()}
    return {CONFIG_FILE: len(config.to_json().encode("utf-8")), **sizes}


def card_to_publish(directory: str | os.PathLike, config: DynSpecConfig, repo_id: str) -> str:
    """The model card that `push_artifact` uploads, unless somebody edited the one on the Hub: the folder's own if that
    was edited, or a generated one.

    Raises:
        ArtifactError: the folder's own is a link, not a file, too large, not UTF-8, or holds what steers terminals.
    """
    path = Path(directory, CARD_FILE)
    text = _read_card(path) if is_there(path) else None
    return render_card(config, repo_id) if text is None or is_unedited_card(text) else text


def require_repository_name(name: str, field: str = "repository") -> None:
    """Check the name of a repository, or of a dataset, before anything is asked of the Hub.

    Raises:
        ArtifactError: it cannot be one. Its `field` is `field`.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ArtifactError(field, f"{name!r} cannot be a name on the Hub", "Correct the name.") from error


class _FolderFiles:
    """The files of a folder."""

    def __init__(self, directory: Path):
        self.directory = directory

    def config_path(self) -> Path:
        path = self.directory / CONFIG_FILE
        if not is_there(path):
            raise _missing(CONFIG_FILE, str(self.directory), self._names())
        return path

    def weights_paths(self, weights: Mapping[str, WeightsDigest]) -> dict[str, Path]:
        """The files of these digests, which is where a save that was killed between its files has left them."""
        paths = {name: self._weights_path(name, digest) for name, digest in weights.items()}
        names = os.listdir(self.directory)
        if weights and not any(name.startswith(_STAGING_PREFIX) for name in names):
            for name in sorted(names):
                if is_weights_name(name) and name not in weights:
                    problem = f"is not a part of this artifact, whose tensors are in {min(weights)}"
                    raise ArtifactError(name, problem, "Delete the file, or write the artifact again.")
        return paths

    def _weights_path(self, name: str, digest: WeightsDigest) -> Path:
        path, previous = self.directory / name, _previous(self.directory / name)
        if is_there(previous) and not _has_digest(path, digest) and _has_digest(previous, digest):
            return previous
        if not is_there(path):
            raise _missing(name, str(self.directory), self._names())
        return path

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except OSError as error:
            problem = f"{self.directory} cannot be looked into: {error.strerror}"
            raise ArtifactError("directory", problem, "Make the folder readable, or give another one.") from error


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
            own = path is not None and _is_own_config(path)
        else:
            own = not any(map(is_weights_name, self.names))
        if not own:
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
    data = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
    return DynSpecConfig.from_dict(parse_strict_json(data, CONFIG_FILE), CONFIG_FILE)


def _require_config_size(size: int | None) -> None:
    if size is not None and size > LARGEST_CONFIG:
        problem = f"has {size} bytes, and {LARGEST_CONFIG} are the most"
        raise ArtifactError(CONFIG_FILE, problem, "Keep the settings, provenance and results shorter.")


def _require_policies(config: DynSpecConfig) -> None:
    """Check the names and settings of the policy and of every policy inside it, before any of them is built."""
    pending: list[tuple[str, Any]] = [
        (f"{CONFIG_FILE}: policy", {"name": config.policy.name, "settings": config.policy.settings})
    ]
    while pending:
        field, value = pending.pop()
        if not isinstance(value, dict) or set(value) != {"name", "settings"}:
            continue
        _require_known_policy(field, value)
        parts = value["settings"].get("policies")
        for index, part in enumerate(parts[: MOST_POLICIES + 1] if isinstance(parts, list) else ()):
            pending.append((f"{field}.settings.policies[{index}]", part))
    with _naming_settings():
        policy_class(config.policy.name).require_settings(config.policy.settings)


@contextmanager
def _naming_settings() -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ArtifactError(f"{CONFIG_FILE}: policy.settings", str(error), _FETCH_AGAIN) from error


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
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        problem = f"of {repo_id} cannot be kept in the Hub's cache: {error}"
        raise ArtifactError(filename, problem, "Make the cache writable, or give another cache_dir.") from error


def _require_own_folder(directory: Path) -> None:
    """Refuse to replace the files of another library's model."""
    if is_there(directory) and not os.path.isdir(directory):
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    config = directory / CONFIG_FILE
    if is_there(config):
        own = _is_own_config(config)
    else:
        weights = _weights_of_any_artifact(directory)
        shards = [path for path in weights if path.name != INDEX_FILE]
        own = all(_is_own_weights(path) for path in shards) and (bool(shards) or not weights)
    if not own:
        problem = f"{directory} holds a model that is not an hf_dynspec artifact"
        raise ArtifactError("directory", problem, "Save to a folder of its own.")


def _is_own_config(path: Path) -> bool:
    try:
        text = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
        return parse_strict_json(text, CONFIG_FILE).get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _is_own_weights(path: Path) -> bool:
    """Whether a first save that was killed between its files left this one."""
    try:
        with open_file(path, path.name) as file:
            size = file.seek(0, os.SEEK_END)
            return read_header(file, size, path.name).metadata.get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def _weights_of_any_artifact(directory: Path) -> list[Path]:
    """The files in a folder that are named as the weights of some artifact."""
    return [path for path in sorted(directory.glob("model*")) if is_weights_name(path.name)]


def _serialize_checked(
    config: DynSpecConfig, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str
) -> dict[str, bytes]:
    """The contents of the files of tensors, read back once, so that nothing is written that reading would refuse."""
    require_shard_size(max_shard_size)
    if not tensors:
        return {}
    tokenizer = _require_tokenizer(config)
    files = serialize_tensors(tensors, max_shard_size)
    digests = {name: digest_bytes(data) for name, data in files.items()}
    read_tensors({name: BytesIO(data) for name, data in files.items()}, digests, tokenizer, tokenizer.eos_token_ids)
    return files


@contextmanager
def _staged_texts(directory: Path, config: DynSpecConfig, card: str | None = None) -> Iterator[Path]:
    """A folder inside `directory` that holds a new `config.json`, to be put in place; the new card is put in place
    afterwards."""
    text = config.to_json().encode("utf-8")
    _require_config_size(len(text))
    card = card or render_card(config)
    directory.mkdir(parents=True, exist_ok=True)
    abandoned = list(directory.glob(f"{_STAGING_PREFIX}*"))
    with TemporaryDirectory(prefix=_STAGING_PREFIX, dir=directory) as name:
        staging = Path(name)
        _write_through(staging / CONFIG_FILE, text)
        _write_through(staging / CARD_FILE, card.encode("utf-8"))
        yield staging
        if _may_replace_card(directory / CARD_FILE):
            os.replace(staging / CARD_FILE, directory / CARD_FILE)
        for path in abandoned:
            shutil.rmtree(path, ignore_errors=True)


def _replace_files(staging: Path, directory: Path, weights: Mapping[str, WeightsDigest]) -> None:
    """Put finished files in place. No two names can change at once, so the old weights stay until the new
    `config.json` is there, and reading follows the digests in `config.json`."""
    committed = _committed_weights(directory)
    kept = {name for name, digest in weights.items() if _has_digest(directory / name, digest)}
    endangered = {name for name, path in committed.items() if path == directory / name and name in weights} - kept
    for name in endangered:
        _copy_through(directory / name, staging / _previous(Path(name)))
        os.replace(staging / _previous(Path(name)), _previous(directory / name))
    try:
        for name in weights:
            if name not in kept:
                os.replace(staging / name, directory / name)
        os.replace(staging / CONFIG_FILE, directory / CONFIG_FILE)
    except BaseException:
        if not Path(staging, CONFIG_FILE).exists():
            raise  # interrupted, but the new artifact is complete
        for name in set(weights) - kept - set(committed):
            Path(directory, name).unlink(missing_ok=True)
        for name, path in committed.items():
            if name in endangered or path == _previous(directory / name):
                os.replace(_previous(directory / name), directory / name)
        raise
    stale = [path for path in _weights_of_any_artifact(directory) if path.name not in weights]
    previous = directory.glob(f"{_PREVIOUS_PREFIX}model*{_PREVIOUS_SUFFIX}")
    for path in (*stale, *previous):
        path.unlink(missing_ok=True)


def _previous(path: Path) -> Path:
    """Where a file of the old artifact lies while a save is between its files."""
    return path.with_name(f"{_PREVIOUS_PREFIX}{path.name}{_PREVIOUS_SUFFIX}")


def _committed_weights(directory: Path) -> dict[str, Path]:
    """The weights that belong to the `config.json` of a folder, empty where the folder holds no complete artifact."""
    files = _FolderFiles(directory)
    try:
        weights = _read_config(files.config_path()).weights
        paths = files.weights_paths(weights)
    except ArtifactError:
        return {}
    return paths if all(_has_digest(path, weights[name]) for name, path in paths.items()) else {}


def _has_digest(path: Path, digest: WeightsDigest) -> bool:
    """Whether this is the file of a digest; what cannot be read is not."""
    try:
        with open_file(path, path.name) as file:
            return os.fstat(file.fileno()).st_size == digest.size and digest_file(file) == digest
    except (ArtifactError, OSError):
        return False


def _copy_through(source: Path, target: Path) -> None:
    """Copy a file and wait until the copy is on the disk."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 2**20)
        written.flush()
        os.fsync(written.fileno())


def _write_through(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk, so that a rename never makes half a file visible."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _may_replace_card(path: Path) -> bool:
    """Whether there is no card, or one that `render_card` made. What cannot be read as a card is somebody's own."""
    if not is_there(path):
        return True
    try:
        return is_unedited_card(_read_card(path))
    except ArtifactError:
        return False


def _read_card(path: Path) -> str:
    """The text of a card that somebody may have edited.

    Raises:
        ArtifactError: it is a link, not a file, too large, not UTF-8, or holds what steers terminals.
    """
    require_own_file(path, CARD_FILE)
    return _decoded_card(read_file(path, CARD_FILE, LARGEST_CARD))


def _decoded_card(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(CARD_FILE, f"is not UTF-8 text: {error.reason}", "Save it as UTF-8.") from error
    steering = _CONTROL_CHARACTER.search(text)
    if steering:
        problem = f"holds the control character {steering[0]!r}, which steers the terminals it is shown on"
        raise ArtifactError(CARD_FILE, problem, "Remove it.")
    return text
