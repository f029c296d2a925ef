"""The contents of an artifact's `config.json`, strictly validated."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from .. import __version__
from ..errors import ArtifactError, ConfigurationError, shown_value
from ..fields import Digits, FieldError, Share, Switch, WholeNumber, json_object, require_name
from ..tree_config import NUM_ASSISTANT_TOKENS, TreeConfig
from ..vocabulary import LARGEST_VOCABULARY, TokenizerFingerprint

LIBRARY_NAME = "hf_dynspec"
FORMAT_VERSION = 1
MOST_TREE_NODES = 2048

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LARGEST_CONFIG = 2**20
MOST_SHARDS = 64

# The artifact's own name in rows of results that also have a "system" for the baselines.
ARTIFACT_SYSTEM = "this artifact"

_COMMIT = Digits(40)
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?")
_WRITE_AGAIN = "Write the artifact again with save_pretrained(), or download it again"
_Section = TypeVar("_Section")


@dataclass(frozen=True)
class ModelReference:
    """The model that an artifact was made with.

    An artifact must not publish its author's folders. An absolute path is therefore reduced: a snapshot in the Hub's
    cache becomes repository id and commit, any other path its last component with `local=True`. The disk is not looked
    at: a relative folder whose name could be a Hub id needs an explicit `local=True`.

    Args:
        name_or_path: a Hub id, a relative path, or an absolute path (stored reduced).
        commit: the Hub commit, 40 hexadecimal digits, if known.
        architecture: the model's class name, if known.
        vocab_size: rows of the model's output projection, padding included, if known.
        local: the name is that of a local folder and not to be looked up on the Hub.
    """

    name_or_path: str
    commit: str | None = None
    architecture: str | None = None
    vocab_size: int | None = None
    local: bool = False

    def __post_init__(self):
        require_name("name_or_path", self.name_or_path)
        if self.architecture is not None:
            require_name("architecture", self.architecture)
        WholeNumber(1, LARGEST_VOCABULARY, optional=True).require("vocab_size", self.vocab_size)
        Switch().require("local", self.local)
        name, cached_commit, local = _without_folders(self.name_or_path)
        object.__setattr__(self, "name_or_path", name)
        object.__setattr__(self, "local", self.local or local)
        if self.commit is None:
            object.__setattr__(self, "commit", cached_commit)
        if self.commit is not None:
            _COMMIT.require("commit", self.commit)

    @property
    def hub_id(self) -> str | None:
        """The id on the Hub, or None for a model in a local folder."""
        return self.name_or_path if not self.local and _HUB_ID.fullmatch(self.name_or_path) else None


@dataclass(frozen=True)
class PolicyConfig:
    """A shortlist policy by name, with its `settings()`.

    Args:
        name: a key of `hf_dynspec.shortlists.POLICIES`, or of `POLICY_DATA` for data that policies read. The name is
            looked up when the policy is built.
        settings: JSON values. They are copied, and tuples become lists. The policy's class checks them
            (`ShortlistPolicy.setting_rules`).
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        require_name("name", self.name)
        object.__setattr__(self, "settings", json_object("settings", self.settings))


def weights_files(shards: int) -> tuple[str, ...]:
    """The names of an artifact's files of tensors, as transformers names them: one file, or shards and their index.
    Names are made from the number of shards and never taken from a file."""
    if shards < 2:
        return (WEIGHTS_FILE,) * shards
    return (*(f"model-{index:05d}-of-{shards:05d}.safetensors" for index in range(1, shards + 1)), INDEX_FILE)


@dataclass(frozen=True)
class WeightsDigest:
    """Ties a file of tensors to its `config.json`, by its bytes and their hexadecimal SHA-256, so that files of two
    artifacts are never mixed."""

    sha256: str
    size: int

    def __post_init__(self):
        Digits(64).require("sha256", self.sha256)
        WholeNumber(0, 2**63 - 1).require("size", self.size)


@dataclass(frozen=True)
class DynSpecConfig:
    """Everything about an artifact but its tensors.

    Args:
        policy: the shortlist policy and its settings.
        tokenizer: the tokenizer of the artifact's token ids. Required if the artifact holds tensors.
        drafter: the model that drafts.
        target: the model that verifies.
        num_assistant_tokens: draft length, `"auto"`, or None for the default: see `DynSpecAssistant`.
        assistant_confidence_threshold: a draft stops early below this probability, or None for the default.
        tree: the shape of draft trees, or None for chains; at most 2,048 nodes, `top_k` at each depth.
        provenance: JSON values about how the artifact was made. The model card lists all of them and reads four:
            `"datasets"` (a list of Hub ids), `"license"`, `"command"` and `"metrics"` (an object of training's
            measurements: numbers by name, or lists of objects, the rows of a table).
        results: measurements, one JSON object for each row of the card's tables. `"workload"` names the prompts,
            every other number is a metric, every string a condition. Rows of the same `"measurement"` share a table.
            Rows of baselines have a `"system"`, which is `"this artifact"` for the artifact's own.
        weights: the digests of the files of tensors, by the names of `weights_files`; filled in by `write_artifact`.
            In `config.json` a single file's digest stands without its name. Left out of comparisons.
        hf_dynspec_version: the version that wrote the artifact.
        format_version: the version of this layout.

    Raises:
        ConfigurationError: a value is mistyped or out of range.
    """

    policy: PolicyConfig
    tokenizer: TokenizerFingerprint | None = None
    drafter: ModelReference | None = None
    target: ModelReference | None = None
    num_assistant_tokens: int | str | None = None
    assistant_confidence_threshold: float | None = None
    tree: TreeConfig | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, WeightsDigest] = field(default_factory=dict, compare=False)
    hf_dynspec_version: str = field(default=__version__, compare=False)
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        for name, kind in _SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (name == "policy" or value is not None):
                problem = f"must be a {kind.__name__}, got {shown_value(value)}"
                raise FieldError(name, problem, f"Give a {kind.__name__}")
        _require_format_version(self.format_version)
        if self.num_assistant_tokens is not None:
            NUM_ASSISTANT_TOKENS.require("num_assistant_tokens", self.num_assistant_tokens)
        if self.tree is not None and self.tree.top_k * (self.tree.depth + 1) > MOST_TREE_NODES:
            nodes = self.tree.top_k * (self.tree.depth + 1)
            problem = f"drafts {nodes} nodes a round, and {MOST_TREE_NODES} are the most"
            raise FieldError("tree", problem, "Give a smaller top_k or depth")
        if self.assistant_confidence_threshold is not None:
            Share(or_nothing=True).require("assistant_confidence_threshold", self.assistant_confidence_threshold)
        require_name("hf_dynspec_version", self.hf_dynspec_version)
        object.__setattr__(self, "provenance", json_object("provenance", self.provenance))
        object.__setattr__(self, "results", _checked_results(self.results))
        object.__setattr__(self, "weights", _checked_weights(self.weights))

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` reads back. Shares nothing with this configuration."""
        values = asdict(self)
        values["weights"] = values["weights"].get(WEIGHTS_FILE, values["weights"]) or None
        return {"library_name": LIBRARY_NAME, **values}

    def to_json(self) -> str:
        """The text of `config.json`. One longer than `LARGEST_CONFIG`, which nobody would read, is refused."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        require_config_size(len(text.encode("utf-8")))
        return text

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = CONFIG_FILE) -> "DynSpecConfig":
        """Read a parsed `config.json`. Errors call it `source`.

        Raises:
            ArtifactError: not an hf_dynspec configuration; or a key is unknown or missing, a value mistyped or out of
                range. Its `field` is `"<source>: <dotted key>"`.
        """
        if not isinstance(data, Mapping):
            raise ArtifactError(source, f"must hold a JSON object, got {shown_value(data)}", f"{_WRITE_AGAIN}.")
        values = dict(data)
        library = values.pop("library_name", None)
        if library != LIBRARY_NAME:
            problem = f"is {shown_value(library)} and not {LIBRARY_NAME!r}: no artifact of hf_dynspec"
            fix = "Give a folder or repository that DynSpecAssistant.save_pretrained() or push_to_hub() made."
            raise ArtifactError(f"{source}: library_name", problem, fix)
        with _naming_the_path(f"{source}: "):  # first, as a newer layout may have other sections
            _require_format_version(values.get("format_version"))
        for name, kind in _SECTIONS.items():
            if values.get(name) is not None:
                values[name] = _read_section(kind, values[name], f"{source}: {name}", ".")
        values["weights"] = _read_weights(values.get("weights"), f"{source}: weights")
        return _read_section(cls, values, source, ": ")


_SECTIONS: dict[str, type] = {
    "policy": PolicyConfig,
    "tokenizer": TokenizerFingerprint,
    "drafter": ModelReference,
    "target": ModelReference,
    "tree": TreeConfig,
}


def _read_weights(data: Any, where: str) -> dict[str, WeightsDigest]:
    if data is None:
        return {}
    if not isinstance(data, Mapping) or not data or not {"sha256", "size"}.isdisjoint(data):
        return {WEIGHTS_FILE: _read_section(WeightsDigest, data, where, ".")}
    names = weights_files(len(data) - 1) if 2 < len(data) <= MOST_SHARDS + 1 else ()
    for name in data:
        if name not in names:
            problem = "is not among the names of so many shards and their index"
            raise ArtifactError(f"{where}.{name[:80]}", problem, f"{_WRITE_AGAIN}.")
    return {name: _read_section(WeightsDigest, data[name], f"{where}.{name}", ".") for name in names}


def _read_section(kind: type[_Section], data: Any, where: str, separator: str) -> _Section:
    """Build one section from exactly its keys."""
    if not isinstance(data, Mapping):
        raise ArtifactError(where, f"must be a JSON object, got {shown_value(data)}", f"{_WRITE_AGAIN}.")
    known = {item.name: item for item in fields(kind)}
    for key in data:
        if key not in known:
            fix = f"Remove the key. {_WRITE_AGAIN}."
            raise ArtifactError(f"{where}{separator}{key}", "is not a key of this section", fix)
    for key, item in known.items():
        if key not in data and item.default is MISSING and item.default_factory is MISSING:
            raise ArtifactError(f"{where}{separator}{key}", "is missing", f"{_WRITE_AGAIN}.")
    with _naming_the_path(where + separator):
        return kind(**data)


@contextmanager
def _naming_the_path(prefix: str) -> Iterator[None]:
    """Turn a constructor's refusal into an `ArtifactError` that names the place in the file."""
    try:
        yield
    except FieldError as error:
        raise ArtifactError(prefix + error.field, error.problem, f"{error.fix}. {_WRITE_AGAIN}.") from error
    except ConfigurationError as error:
        raise ArtifactError(prefix.rstrip(".: "), str(error), f"{_WRITE_AGAIN}.") from error


def _without_folders(name: str) -> tuple[str, str | None, bool]:
    """A model's name without the folders above it, its commit if it is a snapshot of the Hub's cache, and whether it
    is a local folder."""
    path = PureWindowsPath(name) if "\\" in name or PureWindowsPath(name).drive else PurePosixPath(name)
    if not (path.is_absolute() or path.drive or name.startswith("~")):
        return name, None, name.startswith(".")
    for folder, snapshots, commit in zip(path.parts, path.parts[1:], path.parts[2:], strict=False):
        if folder.startswith("models--") and snapshots == "snapshots" and _COMMIT.allows(commit):
            return folder.removeprefix("models--").replace("--", "/"), commit, False
    return path.name or "model", None, True


def _checked_results(results: Any) -> list[dict[str, Any]]:
    if not isinstance(results, list | tuple):
        raise FieldError("results", f"must be a list of rows, got {shown_value(results)}", "Give a list")
    rows = [json_object("results", row) for row in results]
    for row in rows:
        if not isinstance(row.get("workload"), str):
            raise FieldError("results", "a row does not name its workload", 'Give each row a text "workload"')
        if any(isinstance(value, dict | list) for value in row.values()):
            raise FieldError("results", "a row holds a list or an object", "Give each row only numbers and text")
    return rows


def _checked_weights(weights: Any) -> dict[str, WeightsDigest]:
    """The digests in the order of `weights_files`."""
    given = dict(weights) if isinstance(weights, Mapping) else {"": weights}
    names = weights_files(len(given) - (len(given) > 1))
    if set(given) != set(names) or not all(isinstance(digest, WeightsDigest) for digest in given.values()):
        raise FieldError("weights", "must be digests by the names of weights_files()", "Leave it to write_artifact()")
    return {name: given[name] for name in names}


def _require_format_version(value: Any) -> None:
    if isinstance(value, bool) or value != FORMAT_VERSION:
        problem = f"is {shown_value(value)}, and hf_dynspec {__version__} reads only {FORMAT_VERSION}"
        raise FieldError("format_version", problem, "Install the hf_dynspec that wrote the artifact")


def require_config_size(size: int | None) -> None:
    """Refuse a `config.json` of more bytes than are read. None: not known yet."""
    if size is not None and size > LARGEST_CONFIG:
        problem = f"has {size} bytes, and {LARGEST_CONFIG} are the most"
        raise ArtifactError(CONFIG_FILE, problem, "Keep the settings, provenance and results shorter.")
