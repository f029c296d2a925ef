"""The files of an artifact in a folder, even if a save was killed between them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import ArtifactError
from ..files import is_there, open_file, parse_strict_json, read_file
from .config import CONFIG_FILE, LARGEST_CONFIG, LIBRARY_NAME, DynSpecConfig, WeightsDigest
from .tensors import digest_file, is_weights_name

# A save in progress: the folder of its new files, and the old config.json's weights.
STAGING_PREFIX = ".hf_dynspec-"
_PREVIOUS = ".{}.previous"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FETCH_AGAIN = "Download or write the artifact again."


def read_config(folder: Path) -> DynSpecConfig:
    """Read a `config.json` that may be damaged or hostile."""
    path = folder / CONFIG_FILE
    if not is_there(path):
        raise missing_file(CONFIG_FILE, folder)
    data = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
    return DynSpecConfig.from_dict(parse_strict_json(data, CONFIG_FILE))


def is_own_config(path: Path) -> bool:
    """Whether this is a `config.json` of this package, and not another library's."""
    try:
        data = read_file(path, CONFIG_FILE, LARGEST_CONFIG)
        return parse_strict_json(data, CONFIG_FILE).get("library_name") == LIBRARY_NAME
    except ArtifactError:
        return False


def weights_paths(folder: Path, weights: Mapping[str, WeightsDigest]) -> dict[str, Path]:
    """The files of these digests. A save that was killed between its files has left some under their previous names.

    Raises:
        ArtifactError: a file is missing, or the folder holds weights that are no part of the artifact.
    """
    paths = {}
    for name, digest in weights.items():
        path, previous = folder / name, previous_path(folder / name)
        if is_there(previous) and not has_digest(path, digest) and has_digest(previous, digest):
            path = previous
        elif not is_there(path):
            raise missing_file(name, folder)
        paths[name] = path
    names = sorted(os.listdir(folder))
    if weights and not any(name.startswith(STAGING_PREFIX) for name in names):
        for name in names:
            if is_weights_name(name) and name not in weights:
                problem = f"is not a part of this artifact, whose tensors are in {min(weights)}"
                raise ArtifactError(name, problem, "Delete the file, or write the artifact again.")
    return paths


def previous_path(path: Path) -> Path:
    """The name of an old artifact's file while a save is between its files."""
    return path.with_name(_PREVIOUS.format(path.name))


def has_digest(path: Path, digest: WeightsDigest) -> bool:
    """Whether this is the file of a digest. An unreadable file is not."""
    try:
        with open_file(path, path.name) as file:
            return os.fstat(file.fileno()).st_size == digest.size and digest_file(file) == digest
    except (ArtifactError, OSError):
        return False


def missing_file(filename: str, place: str | os.PathLike, names: Iterable[str] | None = None) -> ArtifactError:
    """The error for a file that the folder, or the repository with these names, lacks. If there are pickles instead,
    it says why they are not read."""
    try:
        names = os.listdir(place) if names is None else names
    except OSError as error:
        problem = f"{place} cannot be looked into: {error.strerror}"
        return ArtifactError("directory", problem, "Make the folder readable, or give another one.")
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if not pickles:
        return ArtifactError(filename, f"is not in {place}", f"An artifact needs it. {FETCH_AGAIN}")
    problem = f"is a pickle, which runs code when it is loaded, and {place} has no {filename}"
    fix = (
        "If you trust its author, load it with torch.load(…, weights_only=True), build the policy from its tensors "
        "and write the artifact with save_pretrained()."
    )
    return ArtifactError(min(pickles), problem, fix)
