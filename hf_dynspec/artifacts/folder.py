"""The files of an artifact that lies in a folder, also where a save was killed between them."""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..errors import ArtifactError
from ..files import is_there, open_file, parse_strict_json, read_file
from .config import CONFIG_FILE, LARGEST_CONFIG, LIBRARY_NAME, DynSpecConfig, WeightsDigest
from .tensors import digest_file, is_weights_name

# While a save is between its files: where it writes them, and the weights that the old config.json was written with.
STAGING_PREFIX = ".hf_dynspec-"
_PREVIOUS = ".{}.previous"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FETCH_AGAIN = "Download or write the artifact again."


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


class FolderFiles:
    """The files of a folder."""

    def __init__(self, directory: Path):
        self.directory = directory

    def config_path(self) -> Path:
        path = self.directory / CONFIG_FILE
        if not is_there(path):
            raise missing_file(CONFIG_FILE, str(self.directory), self._names())
        return path

    def weights_paths(self, weights: Mapping[str, WeightsDigest]) -> dict[str, Path]:
        """The files of these digests, which is where a save that was killed between its files has left them."""
        paths = {name: self._weights_path(name, digest) for name, digest in weights.items()}
        names = os.listdir(self.directory)
        if weights and not any(name.startswith(STAGING_PREFIX) for name in names):
            for name in sorted(names):
                if is_weights_name(name) and name not in weights:
                    problem = f"is not a part of this artifact, whose tensors are in {min(weights)}"
                    raise ArtifactError(name, problem, "Delete the file, or write the artifact again.")
        return paths

    def _weights_path(self, name: str, digest: WeightsDigest) -> Path:
        path, previous = self.directory / name, previous_path(self.directory / name)
        if is_there(previous) and not has_digest(path, digest) and has_digest(previous, digest):
            return previous
        if not is_there(path):
            raise missing_file(name, str(self.directory), self._names())
        return path

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except OSError as error:
            problem = f"{self.directory} cannot be looked into: {error.strerror}"
            raise ArtifactError("directory", problem, "Make the folder readable, or give another one.") from error


def previous_path(path: Path) -> Path:
    """Where a file of the old artifact lies while a save is between its files."""
    return path.with_name(_PREVIOUS.format(path.name))


def has_digest(path: Path, digest: WeightsDigest) -> bool:
    """Whether this is the file of a digest; what cannot be read is not."""
    try:
        with open_file(path, path.name) as file:
            return os.fstat(file.fileno()).st_size == digest.size and digest_file(file) == digest
    except (ArtifactError, OSError):
        return False


def missing_file(filename: str, place: str, names: list[str]) -> ArtifactError:
    """The error of a file that is not among the names of a folder or repository, which may hold pickles instead."""
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if not pickles:
        fix = f"An artifact needs it. {FETCH_AGAIN}"
        return ArtifactError(filename, f"is not in {place}", fix)
    problem = f"is a pickle, which runs code when it is loaded, and {place} has no {filename}"
    fix = (
        "If you trust its author, load it with torch.load(…, weights_only=True), build the policy from its tensors "
        "and write the artifact with save_pretrained()."
    )
    return ArtifactError(min(pickles), problem, fix)


def read_config(path: Path) -> DynSpecConfig:
    """Read a `config.json` that may be damaged or hostile.

    Raises:
        ArtifactError: it is too large, no strict JSON, or not an hf_dynspec configuration.
    """
    data = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
    return DynSpecConfig.from_dict(parse_strict_json(data, CONFIG_FILE), CONFIG_FILE)


def is_own_config(path: Path) -> bool:
    """Whether this is a `config.json` of this package, and not another library's."""
    try:
        text = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
        return parse_strict_json(text, CONFIG_FILE).get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False
