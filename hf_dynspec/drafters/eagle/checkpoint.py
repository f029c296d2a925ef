"""EAGLE checkpoints on disk: recognising, checking, reading and writing them.

Three layouts are known. They differ in names and settings, not in what the tensors mean:

- EAGLE-2 (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees"; EAGLE-1's heads are
  the same): `fc` of an embedding and a feature, then `layers.0`, a Llama layer without a norm before its attention.
- EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
  Test"), official: `fc` of several features, then `midlayer`, whose attention reads embedding and feature at once.
- EAGLE-3 as the speculators library writes it: `layers.0` in place of `midlayer`, and a nested configuration.

Inside the package every tensor has one name: the layer is `layer.…`, all else is called as in the files.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import ArtifactError, shown_value

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
# What is fetched of a repository.
HEAD_FILES = (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, "model-*.safetensors")

CheckpointFormat = Literal["official", "speculators"]

_LARGEST_JSON = 16 * 2**20
# All files of tensors together.
_LARGEST_TOTAL = 2**35
_MOST_TENSORS = 256
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.safetensors")
# Several times what the largest models have.
_MOST_COUNTS = {
    "vocab_size": 2**22,
    "draft_vocab_size": 2**22,
    "intermediate_size": 2**20,
    "hidden_size": 2**17,
    "target_hidden_size": 2**17,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
}
_MOST_LAYERS = 2**12
_MOST_LAYER_IDS = 64
_LONGEST_FACTORS = 2**12
_LARGEST_ROPE_NUMBER = 1e12
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_IDS = {"I32": torch.int32, "I64": torch.int64}
_FETCH_AGAIN = "Download or convert the checkpoint again."
_CANNOT_HONOUR = "Use a checkpoint without it; drafting as if it were not there would only lower acceptance."

# Switches that change what a head computes and that nothing here implements, with the values that mean "off".
_UNKNOWN_SWITCHES: dict[str, tuple[Any, ...]] = {
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "parallel_drafting": (None, False),
}
_UNKNOWN_EAGLE_SWITCHES: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
}
# What speculators and transformers write beside it that says nothing of what a head computes.
_NEUTRAL_SWITCHES = {"embed_requires_grad", "enable_sp_ulysses", "return_dict", "use_cache", "has_no_defaults_at_init"}


@dataclass(frozen=True)
class EagleSettings:
    """What a checkpoint's configuration says of the head, in one spelling for all formats.

    Args:
        generation: 2 or 3.
        hidden_size: `H`, the width of the head's own hidden states.
        target_hidden_size: the width of the target's.
        target_layer_ids: which of the target's hidden states are read, 0 being the embedding (None: the usual ones).
        vocab_size: `V`, the target's.
        draft_vocab_size: rows of the head's own output projection.
        fc_bias: whether `fc` has a bias.
        attention_bias: whether the projections to queries, keys and values have one.
        output_bias: whether the projection out of the attention has one.
        qk_norm: queries and keys are normalised per attention head, as in Qwen3.
        norm_before_residual: the residual around the attention is the normalised hidden state.
        norm_before_fc: the features are normalised before `fc`.
        own_embedding: the checkpoint must bring its own embedding.
        rope: the configuration's settings of the rotary embedding, as they were spelt.
    """

    generation: int
    hidden_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...] | None
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    fc_bias: bool
    attention_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    own_embedding: bool
    rope: Mapping[str, Any]

    @property
    def fc_inputs(self) -> int:
        """Columns of `fc`: embedding and feature in EAGLE-2, all features of a token in EAGLE-3."""
        if self.generation == 2:
            return 2 * self.hidden_size
        return self.target_hidden_size * (3 if self.target_layer_ids is None else len(self.target_layer_ids))


@dataclass(frozen=True, eq=False)
class EagleCheckpoint:
    """An EAGLE head as a file holds it.

    Args:
        format: the layout that it was read from and is written in.
        config: the contents of `config.json`, unchanged.
        settings: what the configuration means.
        tensors: CPU tensors by the package's names, in the dtypes of the file: floating point, but for `d2t` int32 or
            int64 `[draft_vocab_size]` (an offset: row `i` stands for token `i + d2t[i]`) and `t2d` bool `[V]`.
        folder: the absolute path that it was read from, which tells repository and commit of what came from the Hub.
    """

    format: CheckpointFormat
    config: Mapping[str, Any]
    settings: EagleSettings
    tensors: Mapping[str, torch.Tensor]
    folder: str | None = None

    @classmethod
    def from_parts(cls, config: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> "EagleCheckpoint":
        """Check a configuration and tensors under the names that a file of its format gives them.

        Raises:
            ArtifactError: as `read_checkpoint`.
        """
        headers = {name: _Header(tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
        checkpoint_format, settings, names = _recognise(config, headers, WEIGHTS_FILE)
        tensors = {name: named[given] for name, given in names.items()}
        _check_contents(settings, tensors, WEIGHTS_FILE)
        return cls(checkpoint_format, deepcopy(dict(config)), settings, tensors)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors under the names that a file of this format gives them."""
        layer = _layer_prefix(self.format, self.settings.generation)
        return {_rename(name, "layer.", layer): tensor for name, tensor in self.tensors.items()}

    def token_ids(self) -> torch.Tensor | None:
        """int64 `[draft_vocab_size]`: the target's id of each row of the head's own projection.

        None where row `i` is token `i`.
        """
        offsets = self.tensors.get("d2t")
        if offsets is None or (self.settings.draft_vocab_size == self.settings.vocab_size and not bool(offsets.any())):
            return None
        return offsets.to(torch.int64) + torch.arange(offsets.shape[0])


def read_checkpoint(
    directory_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    allow_pickle: bool = False,
) -> EagleCheckpoint:
    """Read a checkpoint, of which nothing is believed: names and shapes are checked before tensors are loaded.

    Args:
        directory_or_repo: an existing folder, or a repository on the Hub.
        revision: the branch, tag or commit of a repository, resolved to one commit for all files.
        cache_dir: where downloads are kept (None: the Hub's usual cache).
        token: for a private repository (None: the one that you are logged in with).
        allow_pickle: read `pytorch_model.bin` where there are no safetensors, by `torch.load(weights_only=True)`.

    Raises:
        ArtifactError: a file is missing, damaged or a pickle that nobody allowed; a setting is missing, mistyped, out
            of range or asks for what this package does not do; a tensor is missing, unexpected, of another shape or
            dtype, not finite, or maps draft tokens to ids that are no tokens.
    """
    folder = _local_folder(directory_or_repo, revision, cache_dir, token, allow_pickle)
    config = read_json(folder, CONFIG_FILE)
    files = safetensors_files(folder)
    if files is None:
        checkpoint = EagleCheckpoint.from_parts(config, _load_pickle(folder, allow_pickle))
        return replace(checkpoint, folder=str(folder.absolute()))
    source = files[0].name if len(files) == 1 else INDEX_FILE
    headers = _read_headers(files)
    checkpoint_format, settings, names = _recognise(config, headers, source)
    loaded = _load_tensors(files)
    tensors = {name: loaded[given] for name, given in names.items()}
    _check_contents(settings, tensors, source)
    return EagleCheckpoint(checkpoint_format, config, settings, tensors, str(folder.absolute()))


def write_checkpoint(directory: str | os.PathLike, checkpoint: EagleCheckpoint) -> Path:
    """Write a checkpoint as `config.json` and `model.safetensors`, in its own format.

    A process that is killed meanwhile leaves the old checkpoint, the new one, or a folder without `config.json`; never
    one's settings with the other's tensors.

    Args:
        directory: made if needed.

    Returns:
        The folder.
    """
    import json

    directory = Path(directory)
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise ArtifactError("directory", f"{directory} is a file", "Give a folder.")
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".hf_dynspec-", dir=directory) as staging:
        weights, config = Path(staging, WEIGHTS_FILE), Path(staging, CONFIG_FILE)
        # Clones: safetensors refuses tensors that share memory.
        named = {name: tensor.contiguous().clone() for name, tensor in checkpoint.named_tensors().items()}
        save_file(named, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(checkpoint.config, indent=2) + "\n", encoding="utf-8")
        for path in (weights, config):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        (directory / CONFIG_FILE).unlink(missing_ok=True)
        os.replace(weights, directory / WEIGHTS_FILE)
        os.replace(config, directory / CONFIG_FILE)
    return directory


# Files ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """What is known of a tensor before it is loaded. Dtypes are torch's, or the file's name of one we do not read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


def _local_folder(
    directory_or_repo: str | os.PathLike,
    revision: str | None,
    cache_dir: str | os.PathLike | None,
    token: str | bool | None,
    allow_pickle: bool,
) -> Path:
    """The folder itself, or a repository's files in the cache, all of one commit."""
    from ...artifacts.folder import is_folder
    from ...artifacts.models import download_snapshot

    if is_folder(directory_or_repo):
        return Path(directory_or_repo)
    patterns = [*HEAD_FILES, *[PICKLE_FILE] * allow_pickle]
    return download_snapshot(str(directory_or_repo), patterns, revision, cache_dir, token)


def read_json(folder: Path, filename: str) -> dict[str, Any]:
    from ...files import is_there, parse_strict_json, read_file

    path = folder / filename
    if not is_there(path):
        raise ArtifactError(filename, f"is not in {folder}", f"A checkpoint needs it. {_FETCH_AGAIN}")
    return parse_strict_json(read_file(path, filename, _LARGEST_JSON), filename)


def safetensors_files(folder: Path) -> list[Path] | None:
    """The one file, or those that an index names; None where there are no safetensors."""
    from ...files import is_there

    if is_there(folder / WEIGHTS_FILE):
        return [folder / WEIGHTS_FILE]
    if not is_there(folder / INDEX_FILE):
        return None
    shards = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ArtifactError(f"{INDEX_FILE}: weight_map", "must map tensors to files", _FETCH_AGAIN)
    for name in sorted(set(shards.values())):
        # A name with a folder in it could lead anywhere on the disk.
        if not _SHARD_NAME.fullmatch(name) or not is_there(folder / name):
            problem = f"names {shown_value(name)}, which is not there"
            raise ArtifactError(f"{INDEX_FILE}: weight_map", problem, _FETCH_AGAIN)
    return [folder / name for name in sorted(set(shards.values()))]


def _read_headers(files: Iterable[Path]) -> dict[str, _Header]:
    headers: dict[str, _Header] = {}
    total, count = 0, 0
    for path in files:
        with open_safetensors(path) as file:
            total += path.stat().st_size
            if total > _LARGEST_TOTAL:
                problem = f"{total} bytes in all, and {_LARGEST_TOTAL} are the most"
                raise ArtifactError(path.name, problem, _FETCH_AGAIN)
            names = file.keys()
            count += len(names)
            if count > _MOST_TENSORS:
                problem = f"holds {count} tensors, and {_MOST_TENSORS} are the most"
                raise ArtifactError(path.name, problem, "Give the folder or the repository of an EAGLE head.")
            for name in names:
                part = file.get_slice(name)
                dtype = part.get_dtype()
                known = {**_FLOATS, **_IDS, "BOOL": torch.bool}
                if name in headers:
                    raise ArtifactError(f"{path.name}: {name}", "is in two files", _FETCH_AGAIN)
                headers[name] = _Header(tuple(part.get_shape()), known.get(dtype, dtype))
    return headers


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file that may be anything; whatever goes wrong within the block names it.

    Raises:
        ArtifactError: it is no file, its header is damaged or too long, or it cannot be read.
    """
    from ...files import open_file

    with open_file(path, path.name) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST_JSON:
        problem = f"claims {length} bytes, and {_LARGEST_JSON} are the most"
        raise ArtifactError(f"{path.name}: header", problem, _FETCH_AGAIN)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, MemoryError) as error:
        raise ArtifactError(path.name, f"cannot be read: {error}", _FETCH_AGAIN) from error


def _load_tensors(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with open_safetensors(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def _load_pickle(folder: Path, allow_pickle: bool) -> dict[str, torch.Tensor]:
    """Load `pytorch_model.bin` without running code that it may hold, and only when told to."""
    from ...files import is_there, open_file

    path = folder / PICKLE_FILE
    if not allow_pickle or not is_there(path):
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        if allow_pickle or not pickles:
            problem = f"is not in {folder}"
            fix = (
                f"A checkpoint needs it. {_FETCH_AGAIN} A repository with {PICKLE_FILE} alone needs allow_pickle=True."
            )
            raise ArtifactError(WEIGHTS_FILE, problem, fix)
        fix = "If you trust its author, pass allow_pickle=True; it is loaded with weights_only=True."
        raise ArtifactError(pickles[0], f"is a pickle, and {folder} has no {WEIGHTS_FILE}", fix)
    with open_file(path, PICKLE_FILE) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            _require_sound_archive(file)
            file.seek(0)
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a hostile file can make the reader raise anything
            problem = next(iter(str(error).splitlines()), "") or type(error).__name__
            problem = f"holds more than tensors, or is damaged: {problem}"
            raise ArtifactError(PICKLE_FILE, problem, _FETCH_AGAIN) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ArtifactError(PICKLE_FILE, "is not a dictionary of tensors", _FETCH_AGAIN)
    if any(one.layout != torch.strided or one.device.type != "cpu" for one in tensors.values()):
        raise ArtifactError(PICKLE_FILE, "holds tensors without their values", _FETCH_AGAIN)
    # Views can make a few bytes look like any number of them.
    claimed = sum(one.numel() * one.element_size() for one in tensors.values())
    if claimed > size:
        problem = f"holds tensors of {claimed} bytes in a file of {size}"
        raise ArtifactError(PICKLE_FILE, problem, _FETCH_AGAIN)
    return tensors


def _require_sound_archive(file: BinaryIO) -> None:
    """Hold the members of an archive against their checksums, which torch does not look at. Compressed ones, which
    torch never writes, could unpack to anything.

    Raises:
        ValueError: a member is damaged or compressed.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} does not have its checksum")


# Settings ------------------------------------------------------------------------------------------------------------


class _Section:
    """Typed access to one JSON object of the configuration; every error names the key."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self._where = where

    def fail(self, key: str, problem: str, fix: str = _FETCH_AGAIN) -> ArtifactError:
        return ArtifactError(f"{self._where}{key}", problem, fix)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        most = _MOST_COUNTS.get(key, 2**31 - 1)
        if type(value) is not int or not 1 <= value <= most:
            raise self.fail(key, f"must be a whole number from 1 to {most}, got {shown_value(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {shown_value(value)}")
        return value

    def section(self, key: str) -> "_Section":
        value = self.values.get(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.fail(key, "must be a JSON object")
        return _Section(value, f"{self._where}{key}.")

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not 1 <= len(value) <= _MOST_LAYER_IDS:
            raise self.fail(key, f"must be a list of 1 to {_MOST_LAYER_IDS} layers, got {shown_value(value)}")
        if not all(type(item) is int and 0 <= item <= _MOST_LAYERS for item in value):
            raise self.fail(key, f"must be a list of layers from 0 to {_MOST_LAYERS}, got {value!r:.60}")
        return tuple(value)

    def refuse(self, switches: Mapping[str, tuple[Any, ...]]) -> None:
        for key, off in switches.items():
            if not any(self.values.get(key) is value for value in off):
                raise self.fail(
                    key, f"is {shown_value(self.values[key])}, which this package does not do", _CANNOT_HONOUR
                )


def _recognise(
    config: Mapping[str, Any], headers: Mapping[str, _Header], source: str
) -> tuple[CheckpointFormat, EagleSettings, dict[str, str]]:
    """Tell the format, read the settings, and map the package's names to the file's.

    Raises:
        ArtifactError: no format fits, or the tensors are not those of the settings.
    """
    checkpoint_format: CheckpointFormat = "official"
    if "speculators_model_type" in config:
        checkpoint_format, generation = "speculators", 3
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            fix = "Use an EAGLE-3 head of speculators, or the official checkpoint of this one."
            raise ArtifactError(f"{CONFIG_FILE}: speculators_model_type", f"is {shown_value(kind)}", fix)
    elif any(name.startswith("midlayer.") for name in headers):
        generation = 3
    elif "fc.weight" in headers and any(name.startswith("layers.0.") for name in headers):
        generation = 2
    else:
        problem = "has neither `fc` and `layers.0` (EAGLE-2) nor `midlayer` (EAGLE-3)"
        raise ArtifactError(source, problem, "Give the folder or the repository of an EAGLE head.")
    prefix = _layer_prefix(checkpoint_format, generation)
    found = {_rename(name, prefix, "layer."): header for name, header in headers.items()}
    settings = _read_settings(config, checkpoint_format, generation, found)
    _check_headers(settings, found, prefix, source)
    return checkpoint_format, settings, {name: _rename(name, "layer.", prefix) for name in found}


def _layer_prefix(checkpoint_format: CheckpointFormat, generation: int) -> str:
    return "midlayer." if checkpoint_format == "official" and generation == 3 else "layers.0."


def _rename(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _read_settings(
    config: Mapping[str, Any], checkpoint_format: CheckpointFormat, generation: int, found: Mapping[str, _Header]
) -> EagleSettings:
    top = _Section(config, f"{CONFIG_FILE}: ")
    layer = top.section("transformer_layer_config") if checkpoint_format == "speculators" else top
    _refuse_unknown_switches(top, layer, checkpoint_format)
    hidden, heads = layer.count("hidden_size"), layer.count("num_attention_heads")
    kv_heads = layer.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise layer.fail("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
    if layer.values.get("head_dim") is None and hidden % heads:
        raise layer.fail("num_attention_heads", f"is {heads}, which does not divide hidden_size {hidden}")
    eps = layer.values.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise layer.fail("rms_norm_eps", f"must be a small number, got {shown_value(eps)}")
    vocab = layer.count("vocab_size")
    draft_vocab = top.count("draft_vocab_size", vocab) if generation == 3 else vocab
    if draft_vocab > vocab:
        raise top.fail("draft_vocab_size", f"is {draft_vocab}, more than the vocab_size {vocab}")
    tied = generation == 3 and layer.flag("tie_word_embeddings")
    if tied and "embed_tokens.weight" in found and "lm_head.weight" not in found:
        problem = "is true, so that the head's own embedding is its output projection"
        raise layer.fail("tie_word_embeddings", problem, "Store that projection as lm_head.weight.")
    attention_bias, output_bias = _biases(layer, checkpoint_format, generation, found)
    return EagleSettings(
        generation=generation,
        hidden_size=hidden,
        target_hidden_size=top.count("target_hidden_size", hidden) if generation == 3 else hidden,
        target_layer_ids=_target_layer_ids(top) if generation == 3 else None,
        intermediate_size=layer.count("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=layer.count("head_dim", hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=float(eps),
        hidden_act=_activation(layer),
        # EAGLE-2's code takes an absent key for true; EAGLE-3's `fc` never has a bias.
        fc_bias=generation == 2 and top.flag("bias", True),
        attention_bias=attention_bias,
        output_bias=output_bias,
        qk_norm=checkpoint_format == "speculators" and layer.values.get("model_type") == "qwen3",
        norm_before_residual=generation == 3 and top.flag("norm_before_residual"),
        norm_before_fc=generation == 3 and top.flag("norm_before_fc"),
        own_embedding=top.flag("has_own_embed_tokens"),
        rope=_rope_settings(layer),
    )


def _refuse_unknown_switches(top: _Section, layer: _Section, checkpoint_format: CheckpointFormat) -> None:
    """Name what would make the head compute something else than what is implemented here."""
    layers = layer.count("num_hidden_layers", 1)
    if layers != 1:
        raise layer.fail("num_hidden_layers", f"is {layers}", "Only heads of one layer can be used.")
    top.refuse(_UNKNOWN_SWITCHES)
    layer.refuse(_UNKNOWN_SWITCHES)
    top.section("eagle_config").refuse(_UNKNOWN_EAGLE_SWITCHES)
    kinds = layer.values.get("layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) - {"full_attention"}:
        raise layer.fail("layer_types", f"is {kinds!r:.60}, and only full attention is known", _CANNOT_HONOUR)
    if checkpoint_format != "speculators":
        return
    model_type = layer.values.get("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise layer.fail("model_type", f"is {shown_value(model_type)}, not llama or qwen3", _CANNOT_HONOUR)
    known = {"norm_before_residual", "norm_before_fc", "has_own_embed_tokens", "tie_word_embeddings"}
    for key, value in top.values.items():
        if value is True and key not in known | _NEUTRAL_SWITCHES:
            raise top.fail(key, "is a switch that this package does not know", _CANNOT_HONOUR)


def _target_layer_ids(top: _Section) -> tuple[int, ...] | None:
    """Which hidden states of the target are read, counted as transformers counts them: 0 is the embedding.

    Beside the other settings an id `k` stands for the input of layer `k` (vLLM, speculators), which is hidden state
    `k`. Inside `eagle_config` it stands for the output of layer `k` (SGLang), which is hidden state `k + 1`.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = top.layer_ids(key), top.section("eagle_config").layer_ids(key)
    if outputs is not None:
        outputs = tuple(layer_id + 1 for layer_id in outputs)
        if inputs not in (None, outputs):
            problem = (
                f"counts inputs of layers and gives {list(inputs or ())}, where eagle_config gives {list(outputs)}"
            )
            raise top.fail(key, problem, "Make them agree; eagle_config counts outputs, which is one less.")
    return inputs if outputs is None else outputs


def _biases(
    layer: _Section, checkpoint_format: CheckpointFormat, generation: int, found: Mapping[str, _Header]
) -> tuple[bool, bool]:
    """Whether queries, keys and values have a bias, and whether the attention's output has one."""
    if checkpoint_format == "speculators":
        both = layer.flag("attention_bias")
        return both, both
    if generation == 2:
        return layer.flag("qkv_bias"), False
    # EAGLE-3's code has no setting: configurations copied from a target speak of biases that its heads lack.
    return "layer.self_attn.q_proj.bias" in found, "layer.self_attn.o_proj.bias" in found


def _activation(layer: _Section) -> str:
    from transformers.activations import ACT2FN

    name = layer.values.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACT2FN:
        raise layer.fail("hidden_act", f"is {shown_value(name)}, which transformers does not know")
    return name


def _rope_settings(layer: _Section) -> dict[str, Any]:
    """Both spellings: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    rope: dict[str, Any] = {"max_position_embeddings": layer.count("max_position_embeddings", 2048)}
    theta = layer.values.get("rope_theta")
    if theta is not None:
        if not _is_rope_number(theta) or not theta > 0:
            raise layer.fail("rope_theta", f"must be a positive number, got {shown_value(theta)}")
        rope["rope_theta"] = theta
    for key in ("rope_parameters", "rope_scaling"):
        section = layer.section(key)
        for name, value in section.values.items():
            if not _is_rope_value(value):
                raise section.fail(name, f"must be a number, a name or a list of numbers, got {shown_value(value)}")
        if section.values:
            rope[key] = dict(section.values)
    return rope


def _is_rope_value(value: Any) -> bool:
    """Whether transformers can compute with it: whether it is the right one it says itself."""
    if isinstance(value, list):
        return len(value) <= _LONGEST_FACTORS and all(map(_is_rope_number, value))
    return value is None or isinstance(value, bool | str) or _is_rope_number(value)


def _is_rope_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_ROPE_NUMBER


# Tensors -------------------------------------------------------------------------------------------------------------


def _expected_shapes(
    settings: EagleSettings, found: Mapping[str, _Header]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The shapes of the tensors that must be there, and of those that may be."""
    hidden, vocab, draft_vocab = settings.hidden_size, settings.vocab_size, settings.draft_vocab_size
    inner, inputs = settings.intermediate_size, hidden * (settings.generation - 1)
    sizes = {"q": settings.num_attention_heads, "k": settings.num_key_value_heads, "v": settings.num_key_value_heads}
    attention = "layer.self_attn."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, settings.fc_inputs)}
    if settings.fc_bias:
        shapes["fc.bias"] = (hidden,)
    for letter, heads in sizes.items():
        shapes[f"{attention}{letter}_proj.weight"] = (heads * settings.head_dim, inputs)
        if settings.attention_bias:
            shapes[f"{attention}{letter}_proj.bias"] = (heads * settings.head_dim,)
    shapes[f"{attention}o_proj.weight"] = (hidden, settings.num_attention_heads * settings.head_dim)
    if settings.output_bias:
        shapes[f"{attention}o_proj.bias"] = (hidden,)
    if settings.qk_norm:
        shapes |= {f"{attention}{letter}_norm.weight": (settings.head_dim,) for letter in "qk"}
    shapes |= {f"layer.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["layer.mlp.down_proj.weight"] = (hidden, inner)
    shapes["layer.post_attention_layernorm.weight"] = (hidden,)
    optional = {} if settings.own_embedding else {"embed_tokens.weight": (vocab, hidden)}
    if settings.own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if settings.generation == 3:
        shapes |= {f"{name}.weight": (hidden,) for name in ("layer.hidden_norm", "layer.input_layernorm", "norm")}
        if settings.norm_before_fc:
            shapes["input_norm.weight"] = (settings.fc_inputs,)
        own = {"lm_head.weight": (draft_vocab, hidden)}
        maps = {"d2t": (draft_vocab,), "t2d": (vocab,)}
        trimmed = draft_vocab < vocab
        shapes |= own if trimmed or "d2t" in found else {}
        shapes |= maps if trimmed or any(name in found for name in maps) else {}
        optional |= own
    return shapes, optional


def _check_headers(settings: EagleSettings, found: Mapping[str, _Header], prefix: str, source: str) -> None:
    """Hold every tensor against the settings, and name all that is wrong at once."""

    def shown(name: str) -> str:
        return _rename(name, "layer.", prefix)

    required, optional = _expected_shapes(settings, found)
    shapes = {**optional, **required}
    problems = []
    missing = [shown(name) for name in required if name not in found]
    unexpected = [shown(name) for name in found if name not in shapes]
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unexpected:
        problems.append(f"unexpected {', '.join(sorted(unexpected))}")
    for name, header in found.items():
        if name not in shapes:
            continue
        if header.shape != shapes[name]:
            problems.append(f"{shown(name)} has shape {list(header.shape)}, expected {list(shapes[name])}")
        dtypes = {"d2t": tuple(_IDS.values()), "t2d": (torch.bool,)}.get(name, tuple(_FLOATS.values()))
        if header.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            problems.append(f"{shown(name)} has dtype {str(header.dtype).removeprefix('torch.')}, expected {allowed}")
    if problems:
        problem = f"does not fit {CONFIG_FILE}: {'; '.join(problems)}"
        raise ArtifactError(source, problem, f"Give the {CONFIG_FILE} that belongs to these tensors.")


def _check_contents(settings: EagleSettings, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Check that weights are finite, and that draft tokens are different tokens of the target."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(f"{source}: {name}", "holds NaN or infinity", _FETCH_AGAIN)
    if "d2t" not in tensors:
        return
    offsets, known = tensors["d2t"].to(torch.int64), tensors["t2d"]
    ids = offsets + torch.arange(offsets.shape[0])
    outside = ids[(ids < 0) | (ids >= settings.vocab_size)]
    if outside.numel():
        problem = f"leads to the id {int(outside[0])}, and ids run from 0 to {settings.vocab_size - 1}"
        raise ArtifactError(f"{source}: d2t", problem, "It must hold offsets: row i stands for token i + d2t[i].")
    counts = torch.bincount(ids, minlength=settings.vocab_size)
    if int(counts.max()) > 1:
        problem = f"leads to the id {int(counts.argmax())} more than once"
        raise ArtifactError(f"{source}: d2t", problem, "It must hold offsets: row i stands for token i + d2t[i].")
    if not torch.equal(counts > 0, known):
        astray = int(((counts > 0) != known).nonzero()[0])
        problem = f"says the opposite of d2t of the id {astray}"
        raise ArtifactError(f"{source}: t2d", problem, "It must be true for exactly the ids that d2t leads to.")
