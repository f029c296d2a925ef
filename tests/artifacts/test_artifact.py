"""Artifacts on disk: what is written is read back, and what is damaged ends in an error that names the damage.

Every damage is done to the bytes of a real artifact. Unless a test is about the digest, the digest in `config.json` is
forged to match, as an attacker would do, so that the check behind it is what answers.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from hf_dynspec.artifacts import read_artifact, read_graph, reading, rebuild_policy, render_card, write_artifact
from hf_dynspec.artifacts import tensors as weights_module
from hf_dynspec.artifacts.card import is_unedited_card
from hf_dynspec.artifacts.config import DynSpecConfig, ModelReference, PolicyConfig, weights_files
from hf_dynspec.errors import ArtifactError, ConfigurationError
from hf_dynspec.shortlists import (
    FrequencyShortlist,
    FullShortlist,
    HybridShortlist,
    InContextShortlist,
    UnionShortlist,
)
from hf_dynspec.vocabulary import TokenizerFingerprint, fingerprint_tokenizer, require_same_tokenizer

SIZE = 50
TOKENIZER = TokenizerFingerprint(size=SIZE, sha256="ab" * 32, eos_token_ids=(2, 7))
RANKING = torch.arange(SIZE).flip(0)


def configuration(policy=None, **changes) -> DynSpecConfig:
    policy = policy or FrequencyShortlist(RANKING, size=20)
    fields = {
        "policy": PolicyConfig(policy.name, policy.settings()),
        "tokenizer": TOKENIZER,
        "drafter": ModelReference("acme/small", commit="1" * 40, architecture="SmallForCausalLM", vocab_size=64),
        "target": ModelReference("acme/large", commit="2" * 40, architecture="LargeForCausalLM", vocab_size=128),
        "num_assistant_tokens": 6,
        "assistant_confidence_threshold": 0.4,
        "provenance": {"license": "apache-2.0", "datasets": ["acme/texts"], "corpus": {"tokens": 10}},
    }
    return DynSpecConfig(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sound artifact with a ranking."""
    return write_artifact(tmp_path / "artifact", configuration(), {"ranking": RANKING})


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def forge_weights(folder: Path, data: bytes, name: str = "model.safetensors") -> None:
    """Put other weights, or another shard or index, in place, with a digest that fits."""
    (folder / name).write_bytes(data)
    digest = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    is_whole = name == "model.safetensors"
    edit_config(
        folder, lambda config: config.update(weights=digest if is_whole else {**config["weights"], name: digest})
    )


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, check=False, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def container(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list, start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(folder: Path, **options) -> ArtifactError:
    """The error that reading ends in, from the reader or from building the policy."""
    with pytest.raises(ArtifactError) as caught:
        rebuild_policy(*read_artifact(folder, **options))
    assert caught.value.field in str(caught.value)
    return caught.value


def test_errors_name_the_folder(folder):
    (folder / "config.json").write_text("{,}")
    message = f"^{re.escape(str(folder))}: config.json: is not strict JSON"
    for read in (read_artifact, FrequencyShortlist, HybridShortlist, read_graph):
        with pytest.raises(ArtifactError, match=message) as caught:
            read(folder)
        assert caught.value.field == "config.json"
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- What is written is read back ---


POLICIES = [
    FullShortlist(),
    FrequencyShortlist(size=12, position_aware=True),
    FrequencyShortlist(RANKING, size=12),
    FrequencyShortlist(RANKING.to(torch.int32), size=12),
    InContextShortlist(window=16),
    HybridShortlist(RANKING, core_size=8, window=16),
    UnionShortlist(FrequencyShortlist(RANKING), UnionShortlist(InContextShortlist(), FrequencyShortlist(RANKING))),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_round_trip(tmp_path, policy):
    config = configuration(policy)
    tensors = policy.tensors()
    assert write_artifact(tmp_path, config, tensors) == tmp_path
    names = {"config.json", "README.md"} | ({"model.safetensors"} if tensors else set())
    assert set(os.listdir(tmp_path)) == names
    read_config, read_tensors = read_artifact(tmp_path, tokenizer_fingerprint=TOKENIZER)
    assert read_config == config
    assert read_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read_tensors[name], tensor) and read_tensors[name].dtype == tensor.dtype
    rebuilt = rebuild_policy(read_config, read_tensors)
    assert type(rebuilt) is type(policy) and rebuilt.settings() == policy.settings()


def test_a_snapshot_of_links_is_read(folder, tmp_path):
    """The Hub's cache keeps files as links to blobs."""
    repository = tmp_path / "models--acme--dynspec"
    snapshot = repository / "snapshots" / ("3" * 40)
    snapshot.mkdir(parents=True)
    folder.rename(repository / "blobs")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(Path("../../blobs", name))
    assert torch.equal(read_artifact(snapshot)[1]["ranking"], RANKING)


# --- Models by reference, without anyone's folders ---


@pytest.mark.parametrize(
    ("given", "name", "commit", "local"),
    [
        ("acme/small", "acme/small", None, False),
        ("models/../small", "models/../small", None, False),
        ("./small", "./small", None, True),
        ("/home/jane/models/small/", "small", None, True),
        ("~/small", "small", None, True),
        ("C:\\Users\\jane\\small", "small", None, True),
        ("/x/hub/models--acme--small/snapshots/" + "3" * 40, "acme/small", "3" * 40, False),
    ],
)
def test_model_references_are_reduced(given, name, commit, local):
    reference = ModelReference(given)
    assert (reference.name_or_path, reference.commit, reference.local) == (name, commit, local)
    assert reference.hub_id == ("acme/small" if name == "acme/small" else None)


# --- A configuration that a user builds ---


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: TokenizerFingerprint(0, "ab" * 32, ()), "size"),
        (lambda: TokenizerFingerprint(True, "ab" * 32, ()), "size"),
        (lambda: TokenizerFingerprint(2**40, "ab" * 32, ()), "size"),
        (lambda: TokenizerFingerprint(5, "AB" * 32, ()), "sha256"),
        (lambda: TokenizerFingerprint(5, "ab" * 32, 2), "eos_token_ids"),
        (lambda: TokenizerFingerprint(5, "ab" * 32, (5,)), "eos_token_ids"),
        (lambda: TokenizerFingerprint(5, "ab" * 32, (2, 2)), "eos_token_ids"),
        (lambda: ModelReference(""), "name_or_path"),
        (lambda: ModelReference("a/b", commit="main"), "commit"),
        (lambda: ModelReference("a/b", vocab_size=1.5), "vocab_size"),
        (lambda: ModelReference("a/b", architecture=3), "architecture"),
        (lambda: ModelReference("a/b", local="yes"), "local"),
        (lambda: PolicyConfig(3), "name"),
        (lambda: PolicyConfig("full", {"size": float("nan")}), "settings"),
        (lambda: PolicyConfig("full", {"size": torch.tensor(3)}), "settings"),
        (lambda: PolicyConfig("full", {3: "size"}), "settings"),
        (lambda: PolicyConfig("full", {"text": "\ud800"}), "settings"),
        (lambda: configuration(num_assistant_tokens=0), "num_assistant_tokens"),
        (lambda: configuration(assistant_confidence_threshold=1.5), "assistant_confidence_threshold"),
        (lambda: configuration(assistant_confidence_threshold=float("nan")), "assistant_confidence_threshold"),
        (lambda: configuration(policy=None) and DynSpecConfig(policy="full"), "policy"),
        (lambda: configuration(tokenizer={"size": 5}), "tokenizer"),
        (lambda: configuration(results={"speedup": 2}), "results"),
        (lambda: configuration(results=[{"speedup": 2}]), "results"),
        (lambda: configuration(results=[{"workload": "code", "all": [1]}]), "results"),
        (lambda: configuration(provenance=[]), "provenance"),
        (lambda: configuration(format_version=2), "format_version"),
    ],
)
def test_a_user_is_told_which_field_is_wrong(build, field):
    with pytest.raises(ConfigurationError, match=f"^{field}"):
        build()


# --- Damaged config.json ---


MISSING = object()
# The place of the damage, the value there, and the field that errors name if that is another.
DAMAGED_CONFIGURATIONS = [
    ("library_name", "transformers"),
    ("library_name", MISSING),
    *(("format_version", value) for value in (2, True, MISSING)),
    ("auto_map", {"AutoModel": "evil.Model"}),
    ("policy.class", "os.system"),
    *(("policy.name", value) for value in ("os.system", ["full"], MISSING)),
    *(("policy", value) for value in ("full", None, MISSING)),
    ("policy.settings", [1]),
    *(("policy.settings.size", value, "policy.settings") for value in ("big", -1)),
    ("policy.settings.speed", 1, "policy.settings"),
    ("policy.settings.ranking", [1, 2], "policy.settings"),
    *(("tokenizer", value) for value in (None, MISSING)),
    ("tokenizer.sha256", MISSING),
    *(("tokenizer.size", value) for value in ("50", 10**15, int("9" * 500))),
    *(("tokenizer.eos_token_ids", value) for value in ([50], [-1])),
    ("drafter.name_or_path", 3),
    ("drafter.trust_remote_code", True),
    ("target.commit", "main"),
    *(("num_assistant_tokens", value) for value in (10**9, True)),
    ("assistant_confidence_threshold", "0.4"),
    ("results", [3]),
    ("weights.size", -1),
    ("weights.sha256", "short"),
    ("weights.file", "../../etc/passwd"),
]


@pytest.mark.parametrize("case", DAMAGED_CONFIGURATIONS, ids=lambda case: case[0])
def test_a_damaged_configuration_names_its_field(folder, case):
    place, value, field = (*case, case[0])[:3]

    def change(config):
        *parents, last = place.split(".")
        for key in parents:
            config = config[key]
        config[last] = value
        if value is MISSING:
            del config[last]

    edit_config(folder, change)
    assert refusal(folder).field == f"config.json: {field}"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe{}",
        b'{"library_name": "hf_dynspec", "num_assistant_tokens": NaN}',
        b'{"library_name": "hf_dynspec", "num_assistant_tokens": 1e999}',
        b'{"library_name": "hf_dynspec", "library_name": "hf_dynspec"}',
        b'{"library_name": "hf_dynspec", "provenance": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"library_name": "hf_dynspec", "provenance": ' + b"[" * 60 + b"]" * 60 + b"}",
        b'{"library_name": "\\ud800"}',
        b'{"library_name": ' + b"9" * 5000 + b"}",
        pickle.dumps({"library_name": "hf_dynspec"}),
    ],
    ids=range(13),
)
def test_a_configuration_that_is_not_strict_json(folder, text):
    (folder / "config.json").write_bytes(text)
    assert refusal(folder).field == "config.json"


# --- Shards ---


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A sound artifact whose three rankings are in three shards."""
    return write_lists(tmp_path / "sharded", 3)


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def test_tensors_beyond_a_limit_are_split_and_read_back(tmp_path):
    tensors = rankings(5)
    for limit, shards in ((8 * SIZE - 1, 5), (8 * SIZE * 2, 3), (8 * SIZE * 5, 1), ("1KB", 3), ("5GB", 1)):
        write_artifact(tmp_path, lists(5), tensors, max_shard_size=limit)
        # Files of the split before are gone.
        assert set(os.listdir(tmp_path)) == names_of(shards)
        config, read = read_artifact(tmp_path)
        assert config == lists(5) and read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert rebuild_policy(config, read).tensors().keys() == tensors.keys()


def test_shards_are_those_that_transformers_reads(sharded):
    """Their names and their index are those of any sharded model, which other tools read."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 * 8 * SIZE}
    assert index["weight_map"] == {f"{number - 1}.ranking": shard(number) for number in (1, 2, 3)}
    for name, filename in index["weight_map"].items():
        assert torch.equal(load_file(sharded / filename)[name], rankings(3)[name])


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None, "", "5", "5XB", "-5GB", "GB", "1.5.0GB"])
def test_a_limit_that_is_not_a_size_is_refused(tmp_path, limit):
    for tensors in (rankings(2), {}):
        with pytest.raises(ConfigurationError, match="max_shard_size must be"):
            write_artifact(tmp_path / "new", lists(len(tensors)), tensors, max_shard_size=limit)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [shard(1), shard(2), shard(3), "model.safetensors.index.json"])
def test_a_damaged_or_missing_shard_is_named(sharded, name):
    path = sharded / name
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    assert refusal(sharded).field == name and "SHA-256" in str(refusal(sharded))
    path.write_bytes(data[:-1])
    assert refusal(sharded).field == name and "bytes" in str(refusal(sharded))
    path.unlink()
    assert refusal(sharded).field == name


@pytest.mark.parametrize("name", ["model.safetensors", shard(1, 4), shard(4), "model-00001-of-00001.safetensors"])
def test_a_superfluous_shard_is_named(sharded, name):
    shutil.copy(sharded / shard(1), sharded / name)
    assert refusal(sharded).field == name


def test_a_tensor_in_two_shards_is_named(sharded):
    forge_weights(sharded, save({"0.ranking": RANKING}), shard(2))
    assert refusal(sharded).field == f"{shard(2)}: 0.ranking"


def test_an_index_that_contradicts_the_shards_is_refused(sharded):
    name = "model.safetensors.index.json"
    good = json.loads((sharded / name).read_text())
    moved, astray = ({**good["weight_map"], "0.ranking": place} for place in (shard(2), "../../etc/passwd"))
    wrong_maps = [{**good, "weight_map": one} for one in (moved, astray, {"0.ranking": shard(1)})]
    for index in (*wrong_maps, {**good, "metadata": {"total_size": 1}}, {}, [], {**good, "loader": "pickle"}):
        forge_weights(sharded, json.dumps(index).encode(), name)
        assert refusal(sharded).field == name
    forge_weights(sharded, json.dumps(good).encode(), name)
    assert read_artifact(sharded)[1].keys() == rankings(3).keys()


def test_shards_that_are_too_large_together_are_refused_by_their_claims(sharded, monkeypatch):
    total = sum(path.stat().st_size for path in sharded.glob("model*"))
    monkeypatch.setattr(weights_module, "LARGEST_TOTAL", total)
    read_artifact(sharded)
    monkeypatch.setattr(weights_module, "LARGEST_TOTAL", total - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "weights_paths", lambda *_: pytest.fail("shards were looked for"))
        error = refusal(sharded)
    assert error.field == "model.safetensors.index.json" and f"{total - 1} are the most" in str(error)
    monkeypatch.setattr(weights_module, "LARGEST_FILE", (sharded / shard(1)).stat().st_size - 1)
    assert refusal(sharded).field == shard(1)
    with pytest.raises(ArtifactError, match="are the most"):
        write_lists(sharded.parent / "new", 3)
    assert not (sharded.parent / "new").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda weights: weights.pop(shard(3)), shard(1)),
        (lambda weights: weights.pop("model.safetensors.index.json"), shard(1)),
        (lambda weights: weights.update({"../evil": weights.pop(shard(1))}), "../evil"),
        (lambda weights: weights.update({shard(4): weights[shard(1)]}), shard(1)),
        (lambda weights: weights[shard(2)].update(size=-1), f"{shard(2)}.size"),
        (lambda weights: weights[shard(2)].update(url="http://evil"), f"{shard(2)}.url"),
        (lambda weights: weights.update({shard(2): None}), shard(2)),
        (lambda weights: weights.update(sha256="0"), shard(1)),
        (lambda weights: weights.clear(), "sha256"),
    ],
)
def test_damaged_digests_of_shards_are_named(sharded, change, field):
    edit_config(sharded, lambda config: change(config["weights"]))
    assert refusal(sharded).field == f"config.json: weights.{field}"


# --- Damaged model.safetensors ---

ids_64 = RANKING.numpy().tobytes()
VALID_ENTRY = entry("I64", [SIZE], 0, 8 * SIZE)

DAMAGED_FILES = {
    "empty": b"",
    "shorter than its prefix": b"\x08\x00",
    "header of 2**60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "header past the end": struct.pack("<Q", 1000) + b"{}",
    "header of negative length": struct.pack("<q", -1) + b"{}",
    "header not JSON": container(b"not json", b""),
    "header a list": container([], b""),
    "header nested": container(b"[" * 50_000 + b"]" * 50_000, b""),
    "tensor named twice": container(json.dumps({"ranking": VALID_ENTRY}).encode()[:-1] * 2 + b"}", ids_64),
    "metadata with numbers": container({"__metadata__": {"n": 3}, "ranking": VALID_ENTRY}, ids_64),
    "too many tensors": container({f"{index}.ranking": entry("I64", [0], 0, 0) for index in range(65)}, b""),
    "entry a list": container({"ranking": [1]}, b""),
    "dtype a list": container({"ranking": {**VALID_ENTRY, "dtype": ["I64"]}}, ids_64),
    "unknown dtype": container({"ranking": entry("U8", [8 * SIZE], 0, 8 * SIZE)}, ids_64),
    "shape of 10**12": container({"ranking": entry("I64", [10**12], 0, 8 * 10**12)}, ids_64),
    "shape of 10**12, honest offsets": container({"ranking": entry("I64", [10**12], 0, 8 * SIZE)}, ids_64),
    "shape that overflows 64 bits": container({"ranking": entry("I64", [2**32, 2**32, 50], 0, 8 * SIZE)}, ids_64),
    "shape of a huge number": container({"ranking": entry("I64", [10**300], 0, 8 * SIZE)}, ids_64),
    "shape negative": container({"ranking": entry("I64", [-SIZE], 0, 8 * SIZE)}, ids_64),
    "shape null": container({"ranking": entry("I64", None, 0, 8)}, ids_64[:8]),
    "shape a fraction": container({"ranking": entry("I64", [50.0], 0, 8 * SIZE)}, ids_64),
    "offsets reversed": container({"ranking": entry("I64", [SIZE], 8 * SIZE, 0)}, ids_64),
    "offsets three": container({"ranking": {**VALID_ENTRY, "data_offsets": [0, 8, 400]}}, ids_64),
    "offsets after a gap": container({"ranking": entry("I64", [SIZE], 8, 8 * SIZE + 8)}, b"\0" * 8 + ids_64),
    "offsets overlapping": container(
        {"0.ranking": VALID_ENTRY, "1.ranking": entry("I64", [SIZE], 8, 8 * SIZE + 8)}, ids_64 + b"\0" * 8
    ),
    "data cut short": container({"ranking": VALID_ENTRY}, ids_64[:-1]),
    "data left over": container({"ranking": VALID_ENTRY}, ids_64 + b"hidden"),
    "renamed zip": b"PK\x03\x04" + b"\0" * 100,
    "renamed pickle": pickle.dumps({"ranking": [1, 2, 3]}),
}


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_a_damaged_weights_file_is_named(folder, name):
    forge_weights(folder, DAMAGED_FILES[name])
    error = refusal(folder)
    assert error.field.partition(": ")[0] == "model.safetensors"
    assert name.startswith("renamed") == ("is a pickle" in str(error))


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_whose_length_looks_like_a_pickle_is_read(folder, length):
    text = json.dumps({"ranking": VALID_ENTRY}).encode()
    forge_weights(folder, container(text + b" " * (length - len(text)), ids_64))
    assert torch.equal(read_artifact(folder)[1]["ranking"], RANKING)


DAMAGED_TENSORS = {
    "id at the size": ({"ranking": torch.cat([RANKING[1:], torch.tensor([SIZE])])}, "ranking"),
    "huge id": ({"ranking": torch.cat([RANKING[1:], torch.tensor([2**62])])}, "ranking"),
    "negative id": ({"ranking": torch.cat([RANKING[1:], torch.tensor([-1])])}, "ranking"),
    "repeated id": ({"ranking": torch.cat([RANKING[1:], torch.tensor([5])])}, "ranking"),
    "missing EOS": ({"ranking": RANKING[RANKING != 7]}, "ranking"),
    "float ids": ({"ranking": RANKING.float()}, "ranking.dtype"),
    "float ids with NaN": ({"ranking": torch.full((SIZE,), float("nan"))}, "ranking.dtype"),
    "half ids": ({"ranking": RANKING.half()}, "ranking.dtype"),
    "bytes": ({"ranking": RANKING.to(torch.uint8)}, "ranking.dtype"),
    "bool": ({"ranking": RANKING > 3}, "ranking.dtype"),
    "two dimensions": ({"ranking": RANKING.reshape(5, 10)}, "ranking.shape"),
    "no dimension": ({"ranking": torch.tensor(3)}, "ranking.shape"),
    "no ids": ({"ranking": RANKING[:0]}, "ranking.shape"),
    "more ids than tokens": ({"ranking": torch.arange(SIZE + 1)}, "ranking.shape"),
    "another tensor": ({"ranking": RANKING, "backdoor": RANKING + 0}, "backdoor"),
    "another's ranking": ({"ranking": RANKING, "7.ranking": RANKING + 0}, "7.ranking"),
    "a path for a name": ({"../ranking": RANKING}, "../ranking"),
    "an odd owner": ({"a.ranking": RANKING}, "a.ranking"),
}


@pytest.mark.parametrize("name", DAMAGED_TENSORS)
def test_a_damaged_tensor_is_named_and_not_written(folder, tmp_path, name):
    tensors, field = DAMAGED_TENSORS[name]
    forge_weights(folder, save(tensors))
    assert refusal(folder).field == f"model.safetensors: {field}"
    if name == "another's ranking":
        return  # which is one of two tensors of that name: the first in the file is told
    with pytest.raises(ArtifactError) as caught:
        write_artifact(tmp_path / "new", configuration(), tensors)
    assert caught.value.field == f"model.safetensors: {field}" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_float_weights_must_be_finite(folder, dtype, value):
    edit_config(folder, lambda config: config.update(policy={"name": "router", "settings": {}}))
    forge_weights(folder, save({"output_bias": torch.tensor([1.0, value], dtype=dtype)}))
    error = refusal(folder)
    assert error.field == "model.safetensors: output_bias" and "NaN or infinity" in str(error)
    forge_weights(folder, save({"output_bias": torch.tensor([1.0, 2.0], dtype=dtype)}))
    assert read_artifact(folder)[1]["output_bias"].tolist() == [1.0, 2.0]


def test_tensors_need_a_tokenizer(tmp_path):
    with pytest.raises(ArtifactError) as caught:
        write_artifact(tmp_path, configuration(tokenizer=None), {"ranking": RANKING})
    assert caught.value.field == "config.json: tokenizer"


def test_tensors_and_policies_must_match(tmp_path):
    policy = UnionShortlist(FrequencyShortlist(RANKING), InContextShortlist())
    for other in ("7.ranking", "ranking"):
        tensors = {"0.ranking": RANKING, other: RANKING + 0}
        write_artifact(tmp_path, configuration(policy), {"0.ranking": RANKING})
        with pytest.raises(ArtifactError) as caught:
            write_artifact(tmp_path, configuration(policy), tensors)
        assert caught.value.field == f"model.safetensors: {other}"
        forge_weights(tmp_path, save(tensors))
        assert refusal(tmp_path).field == f"model.safetensors: {other}"
    # A ranking among the settings would get past the checks of tensors, and one by name lead to another artifact.
    write_artifact(tmp_path, configuration(FrequencyShortlist()), {})
    for ranking in ([3, 1, 2], str(tmp_path), "acme/dynspec"):
        edit_config(tmp_path, lambda config, ranking=ranking: config["policy"]["settings"].update(ranking=ranking))
        assert refusal(tmp_path).field == "config.json: policy.settings"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
def test_hostile_files_take_no_memory(folder, tmp_path):
    """Read in a process that may not grow by more than 64 MiB, less than any of the files claims."""
    hostile = [container({"ranking": entry("I64", [10**12], 0, 8 * 10**12)}, ids_64)]
    hostile.append(struct.pack("<Q", 2**60) + b"{}")
    hostile.append(container({"ranking": entry("I64", [2**25], 0, 2**28)}, b""))  # the file is grown to fit below
    hostile.append(container({"ranking": entry("F32", [2**26], 0, 2**28)}, b""))
    folders = [tmp_path / str(index) for index in range(5)]
    for index, copy in enumerate(folders):
        write_artifact(copy, configuration(), {"ranking": RANKING} if index < 4 else {})
    for index, (copy, data) in enumerate(zip(folders, hostile, strict=False)):
        forge_weights(copy, data)
        if index >= 2:
            size = len(data) + 2**28
            os.truncate(copy / "model.safetensors", size)
            edit_config(copy, lambda config, size=size: config["weights"].update(size=size))
    os.truncate(folders[4] / "config.json", 2**38)
    code = """
        import resource, sys
        from hf_dynspec.errors import ArtifactError
        from hf_dynspec.artifacts import read_artifact
        read_artifact(sys.argv[1])
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + 64 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for folder in sys.argv[2:]:
            try:
                read_artifact(folder)
            except ArtifactError as error:
                print(error.field.partition(":")[0])
    """
    ran = run_python(code, str(folder), *map(str, folders))
    assert ran.stdout.split() == ["model.safetensors"] * 4 + ["config.json"], ran.stderr


# --- Pickles and other strangers ---


class Bomb:
    """Leaves a trace if anything unpickles it."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "policy.pt", "ranking.pkl"])
def test_a_pickle_is_refused_and_never_opened(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "trace")))
    error = refusal(folder)
    assert error.field == name and "weights_only=True" in str(error)
    (folder / "config.json").unlink()
    assert refusal(folder).field == name
    assert not (tmp_path / "trace").exists()
    pickle.loads((folder / name).read_bytes())
    assert (tmp_path / "trace").exists()  # the bomb was live


def test_what_is_missing_is_named(folder):
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        assert refusal(folder).field == name
    for place in ("./missing", "/missing/folder", "a/b/c", Path("missing")):
        assert refusal(place).field == "directory"


@pytest.mark.parametrize(("first", "text"), [("model-00001-of-00002.safetensors", "{}"), ("config.json", None)])
def test_another_librarys_model_is_neither_read_nor_replaced(tmp_path, first, text):
    """Neither shards with an index or a model with its configuration, nor the index or the weights alone."""
    save_file({"weight": torch.ones(3)}, tmp_path / (first if text else "model.safetensors"))
    (tmp_path / ("model.safetensors.index.json" if text else first)).write_text(text or '{"model_type": "llama"}')
    if not text:
        assert refusal(tmp_path).field == "config.json: library_name"
    before = files_of(tmp_path)
    for _ in range(2):
        with pytest.raises(ArtifactError) as caught:
            write_artifact(tmp_path, configuration(), {"ranking": RANKING})
        assert caught.value.field == "directory" and files_of(tmp_path) == before
        (tmp_path / first).unlink(missing_ok=True)
        before.pop(first, None)


def test_a_file_is_no_folder_to_write_into(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError):
        write_artifact(tmp_path / "file", configuration(), {})


# --- Tokenizers ---


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int], eos_token_id=None):
        self.vocabulary = vocabulary
        self.eos_token_id = eos_token_id

    def get_vocab(self):
        return self.vocabulary


def test_fingerprints_tell_vocabularies_apart():
    words = {"a": 0, "b": 1, "</s>": 2}
    fingerprint = fingerprint_tokenizer(Tokenizer(words, 2))
    assert (fingerprint.size, fingerprint.eos_token_ids) == (3, (2,))
    assert fingerprint_tokenizer(Tokenizer(dict(reversed(words.items())), [2])) == fingerprint
    others = [
        {"a": 1, "b": 0, "</s>": 2},
        {"a": 0, "c": 1, "</s>": 2},
        {"a": 0, "b": 1, "</s>": 3},
        {"a:0\n1:b": 0, "x": 1, "</s>": 2},
        {"a": 0, "\ud800": 1, "</s>": 2},
    ]
    digests = {fingerprint_tokenizer(Tokenizer(other, 2)).sha256 for other in others} | {fingerprint.sha256}
    assert len(digests) == len(others) + 1
    # One token that looks like two lines is not two tokens.
    pair, lookalike = ({"a": 0, "b": 1}, {"a:0\nb": 1})
    assert fingerprint_tokenizer(Tokenizer(pair)).sha256 != fingerprint_tokenizer(Tokenizer(lookalike)).sha256
    assert fingerprint_tokenizer(Tokenizer(others[2])).size == 4  # ids may be skipped; the size covers the last one
    assert fingerprint_tokenizer(Tokenizer(words), [2, 1, 2]).eos_token_ids == (2, 1)
    for broken in (Tokenizer({}), Tokenizer(words, 3)):
        with pytest.raises(ConfigurationError):
            fingerprint_tokenizer(broken)


def test_another_tokenizer_is_refused_before_the_weights_are_looked_at(folder):
    (folder / "model.safetensors").write_bytes(b"never read")
    larger = TokenizerFingerprint(SIZE + 1, "ab" * 32, (2, 7))
    assert refusal(folder, tokenizer_fingerprint=larger).field == "config.json: tokenizer.size"
    shuffled = TokenizerFingerprint(SIZE, "cd" * 32, (2, 7))
    assert refusal(folder, tokenizer_fingerprint=shuffled).field == "config.json: tokenizer.sha256"
    require_same_tokenizer(TOKENIZER, TokenizerFingerprint(SIZE, "ab" * 32, (3,)))


def test_the_eos_ids_at_hand_must_be_covered_too(tmp_path):
    write_artifact(tmp_path, configuration(), {"ranking": RANKING[RANKING != 9]})
    read_artifact(tmp_path, tokenizer_fingerprint=TokenizerFingerprint(SIZE, "ab" * 32, (8,)))
    ends_differently = TokenizerFingerprint(SIZE, "ab" * 32, (9,))
    assert refusal(tmp_path, tokenizer_fingerprint=ends_differently).field == "model.safetensors: ranking"


# --- Writing is atomic ---

NEW_RANKING = torch.arange(SIZE)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("exists", [True, False])
def test_a_failed_save_leaves_the_old_artifact(tmp_path, monkeypatch, failing, exists):
    folder = tmp_path / "artifact"
    if exists:
        write_artifact(folder, configuration(), {"ranking": RANKING})
    before = files_of(folder) if exists else {}
    calls, replace = [], os.replace

    def fail(source, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError("the disk is full")
        replace(source, target)

    config = configuration(num_assistant_tokens=9)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", fail)
        write_artifact(folder, config, {"ranking": NEW_RANKING})
    if not exists and failing == 3:
        # The third file of a first save is the model card: by then the artifact is complete.
        assert read_artifact(folder)[0] == config
        return
    assert {name: data for name, data in files_of(folder).items() if not name.endswith(".previous")} == before
    assert [path for path in folder.iterdir() if path.is_dir()] == []
    write_artifact(folder, config, {"ranking": NEW_RANKING})
    assert read_artifact(folder)[0] == config
    assert set(files_of(folder)) == {"config.json", "model.safetensors", "README.md"}


def rankings(count: int, shift: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a union of so many static lists, each of which becomes a shard of its own in `write_lists`."""
    return {f"{index}.ranking": torch.roll(RANKING, index + shift) for index in range(count)}


def lists(count: int, **changes) -> DynSpecConfig:
    parts = [FrequencyShortlist(RANKING) for _ in range(count)] or [FullShortlist()]
    return configuration(UnionShortlist(*parts), **changes)


def write_lists(folder: Path, count: int, shift: int = 0, **changes) -> Path:
    return write_artifact(folder, lists(count, **changes), rankings(count, shift), max_shard_size=1)


def names_of(count: int) -> set[str]:
    return {"config.json", "README.md", *weights_files(count)}


# How many files of tensors the old artifact has, and how many the new one.
KILLED_SAVES = [(1, 1), (1, 0), (0, 2), (1, 3), (3, 1), (2, 3), (3, 3)]


@pytest.mark.process
def test_a_killed_save_leaves_the_old_artifact_or_the_new_one(tmp_path, monkeypatch):
    """Really killed, right before each rename and each removal in turn. One test for all, because a process takes long
    to start. What a killed process has written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    code = """
        import os, pathlib, signal, sys
        sys.path[:0] = ["tests", "tests/artifacts"]
        from test_artifact import KILLED_SAVES, write_lists

        os.fsync = lambda file: None
        for before, after in KILLED_SAVES:
            kill_at, exit_code = 0, None
            while exit_code != 0:
                kill_at += 1
                folder = write_lists(pathlib.Path(sys.argv[1], f"{before}-{after}-{kill_at}"), before)
                child = os.fork()
                if child == 0:
                    calls = []
                    def fatal(done):
                        def do(*arguments, **options):
                            calls.append(arguments)
                            if len(calls) == kill_at:
                                os.kill(os.getpid(), signal.SIGKILL)
                            return done(*arguments, **options)
                        return do
                    os.replace, pathlib.Path.unlink = fatal(os.replace), fatal(pathlib.Path.unlink)
                    write_lists(folder, after, shift=9, num_assistant_tokens=9)
                    os._exit(0)
                exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                assert exit_code in (0, -signal.SIGKILL)
            print(kill_at)
    """
    ran = run_python(code, str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    for (before, after), kills in zip(KILLED_SAVES, map(int, ran.stdout.split()), strict=True):
        # Each new file of tensors, the configuration and the card are put in place, and each old file of tensors is
        # kept under another name, which is removed at the end, or removed under its own.
        assert kills - 1 >= 2 + len(weights_files(before)) + len(weights_files(after))
        folders = [tmp_path / f"{before}-{after}-{kill_at}" for kill_at in range(1, kills + 1)]
        are_new = [check_killed_save(folder, before, after) for folder in folders]
        assert are_new == sorted(are_new) and not are_new[0] and are_new[-1]


def check_killed_save(folder: Path, before: int, after: int) -> bool:
    """Check that a folder holds one of the two artifacts, that the next saves start from it, and say which it is."""
    config, read = read_artifact(folder)
    is_new = config.num_assistant_tokens == 9
    expected = rankings(after, 9) if is_new else rankings(before)
    assert read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in read)
    # The next save fails between its files, and still leaves what was there.
    replace = os.replace

    def fail(source, target):
        if Path(target).name == "config.json":
            raise OSError("the disk is full")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="full"):
            write_lists(folder, 3, shift=5)
    again, read_again = read_artifact(folder)
    assert again == config and read_again.keys() == read.keys()
    assert all(torch.equal(read_again[name], read[name]) for name in read)
    # The one after that succeeds and tidies up.
    write_lists(folder, 2, shift=7)
    assert torch.equal(read_artifact(folder)[1]["1.ranking"], rankings(2, 7)["1.ranking"])
    assert set(os.listdir(folder)) == names_of(2)
    return is_new


def test_a_first_save_that_was_killed_can_be_repeated(folder):
    (folder / "config.json").unlink()  # what is left when the process dies between the two files
    write_artifact(folder, configuration(), {"ranking": NEW_RANKING})
    assert torch.equal(read_artifact(folder)[1]["ranking"], NEW_RANKING)


# --- Model cards ---


def metadata_of(card: str) -> dict:
    from huggingface_hub import ModelCard

    return ModelCard(card).data.to_dict()


def test_the_card_says_what_the_configuration_says():
    results = [
        {"workload": "code", "speedup": 1.5, "acceptance_length": 3.25, "device": "cpu"},
        {"workload": "chat", "speedup": 1.25},
    ]
    card = render_card(configuration(results=results), "acme/dynspec")
    metadata = metadata_of(card)
    assert metadata["library_name"] == "hf_dynspec" and metadata["license"] == "apache-2.0"
    assert metadata["base_model"] == ["acme/large", "acme/small"] and metadata["datasets"] == ["acme/texts"]
    assert {"speculative-decoding", "assisted-generation", "dynamic-vocabulary", "frequency"} <= set(metadata["tags"])
    measured = {
        (result["dataset"]["name"], metric["type"]): metric["value"]
        for result in metadata["model-index"][0]["results"]
        for metric in result["metrics"]
    }
    assert measured == {("code", "speedup"): 1.5, ("code", "acceptance_length"): 3.25, ("chat", "speedup"): 1.25}
    assert 'DynSpecAssistant.from_pretrained("acme/dynspec", target=target)' in card
    assert "| workload | device | speedup | acceptance length |" in card and "| chat | - | 1.25 | - |" in card
    assert "| size | 20 |" in card and "| corpus.tokens | 10 |" in card and "1" * 40 in card
    assert metadata["base_model_relation"] == "adapter"


def test_a_card_without_measurements_claims_none():
    metadata = metadata_of(render_card(DynSpecConfig(PolicyConfig("full"))))
    assert "model-index" not in metadata and "base_model" not in metadata
    card = render_card(configuration(drafter=ModelReference("/models/small")))
    assert "Nothing was measured" in card
    assert "target=target, drafter=drafter)" in card  # a local drafter cannot be looked up
    assert metadata_of(card)["base_model"] == "acme/large" or metadata_of(card)["base_model"] == ["acme/large"]


def test_values_cannot_break_out_of_the_card():
    hostile = "x | y\n\n<script>alert(1)</script>\n<!-- `{{ card_data }}`"
    card = render_card(configuration(provenance={"note": hostile}))
    assert "<script>" not in card
    assert "| note | x &#124; y &lt;script&gt;alert(1)&lt;/script&gt; &lt;!-- &#96;{{ card_data }}&#96; |" in card


def test_an_edited_card_is_kept_and_a_generated_one_replaced(folder):
    path = folder / "README.md"
    assert is_unedited_card(path.read_text()) and "| size | 20 |" in path.read_text()
    write_artifact(folder, configuration(FrequencyShortlist(RANKING, size=30)), {"ranking": RANKING})
    assert "| size | 30 |" in path.read_text()
    edited = path.read_text().replace("## Usage", "## How I use it")
    for text in (edited, "my own words"):
        path.write_text(text)
        assert not is_unedited_card(text)
        write_artifact(folder, configuration(), {"ranking": RANKING}, card="something else")
        assert path.read_text() == text
