"""Artifacts, heads and lists that somebody made to do harm: all of them load, or end in an error of this package, soon
and without taking memory for what they claim.

`HF_DYNSPEC_FUZZ=10000` says how many files the fuzz tests mutate; `HF_DYNSPEC_FUZZ_SEED` begins with others.
"""

import ast
import errno
import io
import json
import os
import pickle
import random
import resource
import stat
import string
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same
from cases import representatives
from eagle_heads import LAYOUTS, random_head
from huggingface_hub import HfApi
from local_hub import Hub, Repository
from models import (
    POLICY_CASES,
    VOCABULARY,
    centroid_router,
    fitted_budgets,
    layer_router,
    perturbed,
    random_router,
    tiny,
    word_tokenizer,
)
from safetensors.torch import save_file
from test_artifact import container, edit_config, files_of, forge_weights

import hf_dynspec
from hf_dynspec import DynSpecAssistant
from hf_dynspec.artifacts import push_artifact, read_artifact, rebuild_policy, render_card, write_artifact
from hf_dynspec.artifacts.card import card_to_publish
from hf_dynspec.artifacts.config import DynSpecConfig, ModelReference, PolicyConfig
from hf_dynspec.artifacts.tensors import serialize_tensors
from hf_dynspec.build.corpus import CorpusError
from hf_dynspec.build.frequency_list import import_frequency_list
from hf_dynspec.drafters import EagleDrafter
from hf_dynspec.drafters.eagle.checkpoint import read_checkpoint
from hf_dynspec.drafters.eagle.conversion import read_output_rows
from hf_dynspec.errors import LONGEST_MESSAGE, ArtifactError, ConfigurationError, DynSpecError, shown_text
from hf_dynspec.fields import LARGEST_COUNT
from hf_dynspec.loading import load_tokenizer
from hf_dynspec.protocol import Prompt, Verdict, VocabularyInfo
from hf_dynspec.shortlists import (
    CompositePolicy,
    CoralShortlist,
    FrequencyShortlist,
    FullShortlist,
    HybridShortlist,
    InContextShortlist,
    RouterShortlist,
    ShortlistPolicy,
    UnionShortlist,
)
from hf_dynspec.shortlists.composite import DEEPEST, MOST_POLICIES
from hf_dynspec.vocabulary import TokenizerFingerprint

ROOT = Path(hf_dynspec.__file__).parent
EOS = (2, 77)
TOKENIZER = TokenizerFingerprint(size=VOCABULARY, sha256="ab" * 32, eos_token_ids=EOS)
INFO = VocabularyInfo(VOCABULARY, EOS, torch.device("cpu"), width=32)
RANKING = torch.arange(VOCABULARY).flip(0)
# What a terminal would obey, what turns the direction of writing, half a character, and rich's markup.
STEERING = "\x1b[2J\x1b]0;owned\x07\u202egpj.exe\u2066\x9b31m\r\n\ud800[red]"


def stored(folder: Path, policy: ShortlistPolicy, **changes: Any) -> Path:
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=TOKENIZER)
    return write_artifact(folder, config, policy.tensors(), **changes)


def use(policy: ShortlistPolicy) -> None:
    """Begin a session and take it through a call, with what the target can show: not more than it has tokens."""
    state, needs = policy.start(INFO), policy.needs
    features, token = torch.zeros(1, 32), torch.tensor([5])
    state.observe_prompt(Prompt(torch.arange(3, 20), 0))
    if needs.prompt_top_k:
        rows = min(17, needs.prompt_positions or 17)
        state.observe_prompt(Prompt(token[:0], 17, torch.arange(VOCABULARY)[: needs.prompt_top_k].repeat(rows, 1)))
    for depth in range(3):
        state.observe_draft_inputs(features, features)
        shortlist = state.select(depth, token, features)
        assert 0 < shortlist.width and int(shortlist.scored_slots.max()) < VOCABULARY
    top_ids = torch.arange(VOCABULARY)[: needs.verify_top_k].repeat(2, 1) if needs.verify_top_k else None
    state.observe(Verdict(torch.tensor([4, 9]), torch.tensor([4, 8]), 17, top_ids=top_ids))
    state.observe_draft_inputs(features, features)
    state.select(0, token, features)


@contextmanager
def within_limits(seconds: float = 5.0, mebibytes: int = 500) -> Iterator[None]:
    """Neither much work nor memory for what a file claims. The seconds are the processor's, as other work on the
    machine may hold a test up."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mebibytes * 1024


def refusal(act: Callable[[], Any]) -> DynSpecError:
    with within_limits(), pytest.raises(DynSpecError) as caught:
        act()
    text = str(caught.value)
    assert text.isprintable() and len(text) <= LONGEST_MESSAGE
    return caught.value


def load(folder: Path) -> ShortlistPolicy:
    return rebuild_policy(*read_artifact(folder))


# Code ----------------------------------------------------------------------------------------------------------------


def auto_loads(file: Path) -> Iterator[ast.Call]:
    """The calls in a file by which transformers could run code that comes with a model."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("from_"):
            if ast.unparse(node.func.value).startswith(("Auto", "transformers.Auto", "pipeline")):
                yield node


def test_code_that_comes_with_a_model_is_declined_wherever_one_is_loaded():
    calls = [(file, call) for file in ROOT.rglob("*.py") for call in auto_loads(file)]
    # There is one place that loads what may bring code, and this walk finds it.
    assert {file.name for file, _ in calls} == {"loading.py"} and len(calls) == 5
    for file, call in calls:
        declined = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert declined.get("trust_remote_code") == "False", f"{file.name}, line {call.lineno}"


def publish_drafter(hub: Hub, folder: Path, model: Any, branch: str = "main", **more: bytes) -> str:
    """A repository `acme/small`, with files that nothing may fetch beside the model."""
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    (folder / "modeling_small.py").write_text("raise SystemExit('code of the repository ran')")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps("a pickle"))
    (folder / ".gitattributes").write_text("")
    for name, data in more.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return hub.publish("acme/small", folder, branch)


def naming(folder: Path, **reference: Any) -> Path:
    config = DynSpecConfig(
        PolicyConfig("in_context", InContextShortlist(window=40).settings()),
        drafter=ModelReference("acme/small", **reference),
    )
    return write_artifact(folder, config, {})


def fetched(hub: Hub) -> set[str]:
    return {path.rpartition("/")[2] for method, path in hub.requests if "/resolve/" in path and method == "GET"}


def test_a_named_drafter_comes_from_the_hub_at_its_commit_and_not_from_a_folder(hub, target, tmp_path):
    drafter = perturbed(target)
    commit = publish_drafter(hub, tmp_path / "published", drafter)
    publish_drafter(hub, tmp_path / "newer", tiny(seed=9))
    # Today's main branch, and what lies in the working folder under the repository's name, are other models.
    tiny(seed=5).save_pretrained("acme/small")
    assistant = DynSpecAssistant.from_pretrained(naming(tmp_path / "artifact", commit=commit), target=target)
    assert torch.equal(assistant.drafter.model.lm_head.weight, drafter.lm_head.weight)
    assert assistant.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assert not fetched(hub) & {"modeling_small.py", "pytorch_model.bin", ".gitattributes"}
    # What is saved again names the repository and the commit, and no folder.
    saved = read_artifact(assistant.save_pretrained(tmp_path / "again"))[0].drafter
    assert (saved.name_or_path, saved.commit, saved.local) == ("acme/small", commit, False)
    assert_same(target, assistant)
    assistant.unbind()


def test_a_folder_is_not_taken_for_a_drafter_that_is_not_on_the_hub(hub, target, tmp_path):
    perturbed(target).save_pretrained("acme/small")
    for architecture in ("LlamaForCausalLM", "EagleDrafter"):
        random_head("eagle3").write(Path("acme/small"))
        artifact = naming(tmp_path / architecture, architecture=architecture)
        error = refusal(lambda artifact=artifact: DynSpecAssistant.from_pretrained(artifact, target=target))
        assert isinstance(error, ArtifactError) and "acme/small" in str(error)


def test_a_drafter_with_code_of_its_own_is_refused_without_a_question(hub, target, tmp_path, monkeypatch):
    code = {"model_type": "small", "auto_map": dict.fromkeys(("AutoConfig", "AutoModel"), "modeling_small.Small")}
    code["auto_map"]["AutoModelForCausalLM"] = "modeling_small.Small"
    publish_drafter(hub, tmp_path / "published", tiny(), config__json=json.dumps(code).encode())
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    artifact = naming(tmp_path / "artifact")
    error = refusal(lambda: DynSpecAssistant.from_pretrained(artifact, target=target))
    assert "code of its own" in str(error) and "drafter=…" in str(error)
    assert error.field == "config.json: drafter" and "modeling_small.py" not in fetched(hub)


@pytest.mark.parametrize("damage", ["weights", "config", "pickle alone", "adapter"])
def test_a_drafter_that_cannot_be_loaded_is_told(hub, target, tmp_path, damage):
    more = {
        "weights": {"model__safetensors": b"\xff" * 100},
        "config": {"config__json": b'{"model_type": "llama", "hidden_size": "wide"}'},
    }
    publish_drafter(hub, tmp_path / "published", tiny(), **more.get(damage, {}))
    if damage == "pickle alone":
        (tmp_path / "published" / "model.safetensors").unlink()
        hub.publish("acme/small", tmp_path / "published")
    artifact = naming(tmp_path / "artifact")
    if damage == "adapter":
        # As it lies in the cache where somebody fetched the whole repository before.
        DynSpecAssistant.from_pretrained(artifact, target=target).unbind()
        (snapshot,) = (tmp_path / "cache").glob("models--acme--small/snapshots/*")
        (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/other"}')
    error = refusal(lambda: DynSpecAssistant.from_pretrained(artifact, target=target))
    assert error.field == "config.json: drafter" and "drafter=…" in str(error)


def test_a_named_eagle_head_comes_from_the_hub(hub, tmp_path):
    head = random_head("eagle3")
    commit = hub.publish("acme/small", head.write(tmp_path / "head"))
    hub.publish("acme/small", random_head("eagle2").write(tmp_path / "newer"))
    random_head("eagle2").write(Path("acme/small"))
    artifact = naming(tmp_path / "artifact", architecture="EagleDrafter", commit=commit)
    assistant = DynSpecAssistant.from_pretrained(artifact, target=tiny(num_hidden_layers=8))
    assert assistant.drafter.checkpoint.settings.generation == 3
    assistant.unbind()


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", POLICY_CASES.values(), ids=POLICY_CASES)
def test_every_setting_of_every_policy_has_a_rule(make):
    """By the constructor and by the loader: a policy without rules cannot be loaded with settings at all."""
    policy = make()
    settings, tensors = policy.settings(), policy.tensors()
    if isinstance(policy, CompositePolicy) and "policies" in settings:
        return  # of other policies' settings
    assert set(settings) == set(type(policy).setting_rules)
    hostile = [2**31, 2**70, -1, 10**5000, 1.5, float("nan"), "acme/model", "/etc/passwd", [1], {"a": 1}, STEERING]
    for name in settings:
        for value in hostile:
            refusal(lambda name=name, value=value: type(policy).from_settings({**settings, name: value}, tensors))
    for name in ("ranking", "router", "no_such_setting", STEERING):
        refusal(lambda name=name: type(policy).from_settings({**settings, name: "acme/model"}, tensors))


@pytest.mark.parametrize("eviction", ["stream", "lru"])
def test_a_window_takes_no_more_room_than_the_vocabulary(eviction):
    with within_limits():
        state = InContextShortlist(LARGEST_COUNT, 3, 3, eviction).start(INFO)
        shortlist = state.select(0, torch.tensor([5]), torch.zeros(1, 32))
    assert shortlist.width == VOCABULARY


def nested(depth: int, leaf: dict | None = None) -> dict:
    policy = leaf or {"name": "full", "settings": {}}
    for _ in range(depth):
        policy = {"name": "union", "settings": {"policies": [policy]}}
    return policy


def test_nested_policies_are_counted_before_any_is_built(tmp_path):
    leaf = {"name": "in_context", "settings": {"window": LARGEST_COUNT}}
    many = {
        "side by side": {"name": "union", "settings": {"policies": [nested(0)] * 20_000}},
        "all together": {"name": "union", "settings": {"policies": [nested(1, leaf)] * (MOST_POLICIES // 2 + 1)}},
        "within each other": nested(DEEPEST + 1),
        "in a union of unions": {"name": "union", "settings": {"policies": [nested(2)] * 11}},
    }
    for policy in many.values():
        stored(tmp_path, FullShortlist())
        edit_config(tmp_path, lambda config, policy=policy: config.update(policy=policy))
        assert refusal(lambda: load(tmp_path)).field == "config.json: policy.settings"
    # What is allowed can be written, loaded and used.
    parts = [InContextShortlist(9, 1, 1) for _ in range(MOST_POLICIES)]
    use(load(stored(tmp_path, UnionShortlist(*parts))))
    refusal(lambda: UnionShortlist(*parts, FullShortlist()))
    deepest = UnionShortlist(UnionShortlist(UnionShortlist(UnionShortlist(FullShortlist()))))
    use(load(stored(tmp_path, deepest)))
    refusal(lambda: UnionShortlist(deepest))


def test_clusters_that_claim_a_huge_number_take_no_memory():
    clusters = torch.zeros(VOCABULARY, dtype=torch.int64)
    clusters[3] = 2**40
    refusal(lambda: RouterShortlist(hf_dynspec.shortlists.Router(clusters, torch.zeros(1, 4))))


def test_an_artifact_does_not_ask_for_endless_trees(tmp_path):
    stored(tmp_path, FullShortlist())
    edit_config(tmp_path, lambda config: config.update(tree={"total_tokens": 4096, "depth": 128, "top_k": 512}))
    assert refusal(lambda: read_artifact(tmp_path)).field == "config.json: tree"
    edit_config(tmp_path, lambda config: config.update(tree={"total_tokens": 60, "depth": 5, "top_k": 10}))
    assert read_artifact(tmp_path)[0].tree == hf_dynspec.TreeConfig()


@pytest.mark.parametrize("setting", ["num_assistant_tokens", "assistant_confidence_threshold"])
@pytest.mark.parametrize("value", ["many", 2**70, -1, [1], True])
def test_what_a_drafters_own_file_says_of_drafting_is_checked(setting, value):
    drafter = tiny()
    setattr(drafter.generation_config, setting, value)
    assert str(refusal(lambda: DynSpecAssistant(drafter))).startswith(f"{setting} must be")


@pytest.mark.parametrize(
    ("item", "place"),
    representatives(
        "families",
        product(('{"a": 1}', "[]", "{}", '""', "7", '[""]'), ("provenance", "results", "settings", "eos_token_ids")),
        keep=4,
    ),
)
def test_many_small_values_take_little_time_and_memory(tmp_path, item, place):
    stored(tmp_path, FullShortlist())
    items = ",".join([item] * (1_000_000 // (len(item) + 1)))
    data = json.loads((tmp_path / "config.json").read_text())
    holder = {"results": data, "settings": data["policy"], "eos_token_ids": data["tokenizer"]}.get(place, data)
    holder[place] = "HERE"
    text = json.dumps(data).replace('"HERE"', f'{{"log": [{items}]}}' if place == "provenance" else f"[{items}]")
    for kept in (text, text.replace(items, items[: len(items) // 8].rpartition(",")[0])):
        (tmp_path / "config.json").write_text(kept)
        with within_limits():
            try:
                render_card(read_artifact(tmp_path)[0])
            except ArtifactError as error:
                assert str(error).isprintable()


# Files ---------------------------------------------------------------------------------------------------------------


def put_link_out(path: Path) -> None:
    outside = path.parent.parent / f"outside {path.name}"
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


STRANGERS = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link out": put_link_out,
    "link nowhere": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file_of_the_folder_is_not_read(tmp_path, stranger, name):
    for kind, folder, act in (
        ("artifact", stored(tmp_path / "artifact", FrequencyShortlist(RANKING)), load),
        ("head", random_head("eagle3").write(tmp_path / "head"), read_checkpoint),
        ("target", random_head("eagle3").write(tmp_path / "target"), read_output_rows),
    ):
        (folder / name).unlink()
        STRANGERS[stranger](folder / name)
        assert refusal(lambda act=act, folder=folder: act(folder)).field == name, kind


@contextmanager
def as_nobody() -> Iterator[None]:
    """As somebody who may not read everything, which the superuser may."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_what_may_not_be_read_is_told(tmp_path, name):
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)
    for folder, act in (
        (stored(tmp_path / "artifact", FrequencyShortlist(RANKING)), load),
        (random_head("eagle3").write(tmp_path / "head"), read_checkpoint),
    ):
        folder.chmod(0o755)
        (folder / name).chmod(0)
        with as_nobody():
            error = refusal(lambda act=act, folder=folder: act(folder))
        (folder / name).chmod(0o755)
        assert isinstance(error, ArtifactError)
    frequency_list = tmp_path / "freq.pt"
    torch.save([1, 2], frequency_list)
    frequency_list.chmod(0)
    with as_nobody():
        error = refusal(lambda: import_frequency_list(frequency_list, 10))
    assert os.strerror(errno.EACCES) in str(error)


@pytest.mark.parametrize("stranger", ["pipe", "folder", "link out"])
def test_an_artifact_is_not_saved_over_what_is_no_file(tmp_path, stranger):
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / f"{name} is none"
        folder.mkdir()
        STRANGERS[stranger](folder / name)
        assert refusal(lambda folder=folder: stored(folder, FullShortlist())).field == "directory"
    # A card that is none is left alone.
    STRANGERS[stranger](tmp_path / "README.md")
    before = os.lstat(tmp_path / "README.md")
    with within_limits():
        stored(tmp_path, FullShortlist())
    assert stat.S_IFMT(os.lstat(tmp_path / "README.md").st_mode) == stat.S_IFMT(before.st_mode)


# Publishing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_no_link_is_published(hub, tmp_path, name):
    """Not even within the folder: what is published is what lies there under its name."""
    folder = stored(tmp_path / "artifact", FrequencyShortlist(RANKING))
    (tmp_path / "secret").write_bytes((folder / name).read_bytes())
    for place in (tmp_path / "secret", folder / "kept"):
        (folder / name).unlink()
        if place.parent == folder:
            place.write_bytes((tmp_path / "secret").read_bytes())
        (folder / name).symlink_to(place)
        error = refusal(lambda: push_artifact(folder, "acme/dynspec", api=HfApi(endpoint=hub.endpoint, token="x")))
        assert error.field == name and "link" in str(error)
    assert hub.requests == []


CARDS = {
    "pipe": (os.mkfifo, "a pipe"),
    "folder": (Path.mkdir, "a folder"),
    "huge": (lambda path: path.write_bytes(b"a" * (2**22 + 1)), "bytes"),
    "endless": (lambda path: os.truncate(path.open("w").name, 2**40), "bytes"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff\xfe my own words"), "UTF-8"),
    "steering": (lambda path: path.write_text("my own \x1b[2J words"), "terminals"),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_that_is_none_is_not_published(hub, tmp_path, case):
    folder = stored(tmp_path / "artifact", FrequencyShortlist(RANKING))
    (folder / "README.md").unlink()
    put, words = CARDS[case]
    put(folder / "README.md")
    api = HfApi(endpoint=hub.endpoint, token="x")
    error = refusal(lambda: push_artifact(folder, "acme/dynspec", api=api))
    assert error.field == "README.md" and words in str(error)
    assert hub.requests == []
    (folder / "README.md").rename(folder / "before")
    (folder / "README.md").write_text("Meine eigenen Wörter, 自分の言葉 \U0001f468\u200d\U0001f469\u200d\U0001f467\n")
    push_artifact(folder, "acme/dynspec", api=api)
    repository = hub.repositories["acme/dynspec"]
    files = repository.commits[repository.branches["main"]]
    assert files["README.md"] == (folder / "README.md").read_bytes()


def test_a_huge_card_on_the_hub_is_neither_fetched_nor_replaced(hub, tmp_path):
    folder = stored(tmp_path / "artifact", FrequencyShortlist(RANKING))
    published = hub.repositories.setdefault("acme/dynspec", Repository())
    published.commit({"README.md": b"a" * (2**22 + 1)})
    push_artifact(folder, "acme/dynspec", api=HfApi(endpoint=hub.endpoint, token="x"))
    assert "README.md" not in fetched(hub)
    assert len(published.commits[published.branches["main"]]["README.md"]) == 2**22 + 1
    published.commit({"config.json": b" " * (2**20 + 1)})
    refusal(lambda: push_artifact(folder, "acme/dynspec", api=HfApi(endpoint=hub.endpoint, token="x")))


# Bytes ---------------------------------------------------------------------------------------------------------------


def test_the_same_tensors_are_the_same_bytes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "ranking": RANKING.to(torch.int32),
        "clusters": RANKING % 12,
        "input_weight": torch.randn(24, 64, generator=generator),
        "output_weight": torch.randn(12, 24, generator=generator).half(),
        "output_bias": torch.randn(12, generator=generator),
    }
    # The same numbers as parts of others, transposed, and in another order.
    strided = {
        "ranking": torch.stack([tensors["ranking"]] * 2, 1)[:, 0],
        "clusters": (RANKING % 12).flip(0).flip(0),
        "input_weight": tensors["input_weight"].t().contiguous().t(),
        "output_weight": torch.cat([tensors["output_weight"], torch.zeros(12, 3).half()], 1)[:, :24],
        "output_bias": tensors["output_bias"].repeat_interleave(3)[::3],
    }
    for limit in ("1GB", 1, 5000):
        first = serialize_tensors(tensors, limit)
        for _ in range(10):
            assert serialize_tensors(dict(reversed(strided.items())), limit) == first
    config = DynSpecConfig(PolicyConfig("router"), tokenizer=TOKENIZER)
    digests = [
        json.loads((write_artifact(tmp_path / str(n), config, kept) / "config.json").read_text())["weights"]
        for n, kept in enumerate([tensors, strided] * 3)
    ]
    assert all(digest == digests[0] for digest in digests)
    # And they are the numbers, at places that a reader can map.
    read = read_artifact(tmp_path / "1")[1]
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert struct.unpack("<Q", (tmp_path / "1" / "model.safetensors").read_bytes()[:8])[0] % 8 == 0


# Text ----------------------------------------------------------------------------------------------------------------


def test_text_from_files_is_shown_escaped_and_bounded():
    shown = shown_text(STEERING)
    assert shown.isprintable() and shown.startswith(
        "\\x1b[2J\\x1b]0;owned\\x07\\u202egpj.exe\\u2066\\x9b31m\\r\\n\\ud800"
    )
    assert shown_text(shown) == shown
    assert shown_text("Wörter, 言葉 …") == "Wörter, 言葉 …"
    assert len(shown_text("\x1b" * 10**6, 100)) == 100 == len(shown_text("a" * 10**6, 100))
    assert shown_text("a" * 100, 100) == "a" * 100
    error = ArtifactError(STEERING * 1000, STEERING * 1000, "Fix it.")
    assert str(error).isprintable() and len(str(error)) <= LONGEST_MESSAGE and str(error).endswith(". Fix it.")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.field == error.field
    for kind in (ConfigurationError, DynSpecError, CorpusError):
        error = kind(f"{STEERING} is in {STEERING * 10**4}")
        assert str(error).isprintable() and len(str(error)) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update({STEERING * 2000: 1}),
        lambda config: config["policy"].update(name=STEERING),
        lambda config: config["policy"].update(name="x" * 10**5),
        lambda config: config["policy"].update(settings={STEERING: 1}),
        lambda config: config["policy"].update(settings={"size": STEERING * 2000}),
        lambda config: config["tokenizer"].update(sha256=STEERING),
        lambda config: config.update(library_name=STEERING),
        lambda config: config.update(weights={STEERING: {}, "b": {}, "c": {}}),
        lambda config: config.update(drafter={"name_or_path": "a", STEERING: 1}),
    ],
)
def test_what_a_configuration_says_does_not_steer_a_terminal(tmp_path, change):
    stored(tmp_path, FrequencyShortlist(RANKING))
    edit_config(tmp_path, change)
    # Escaped in the file, so that the reader makes the characters.
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("\\ud800", ""))
    refusal(lambda: load(tmp_path))


def test_names_of_tensors_and_files_do_not_steer_a_terminal(tmp_path):
    name = STEERING.replace("\ud800", "")
    stored(tmp_path / "artifact", FrequencyShortlist(RANKING))
    entry = {"dtype": "I64", "shape": [VOCABULARY], "data_offsets": [0, 8 * VOCABULARY]}
    forge_weights(tmp_path / "artifact", container({name * 50: entry}, RANKING.numpy().tobytes()))
    refusal(lambda: load(tmp_path / "artifact"))
    head = random_head("eagle3")
    head.tensors[name] = torch.zeros(3)
    save_file(head.tensors, head.write(tmp_path / "head") / "model.safetensors")
    refusal(lambda: read_checkpoint(tmp_path / "head"))
    (tmp_path / "head" / "model.safetensors").unlink()
    for file in (f"{name}.safetensors", "../secret.safetensors", "\0.safetensors", "a" * 5000 + ".safetensors"):
        (tmp_path / "head" / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"fc.weight": file}})
        )
        refusal(lambda: read_checkpoint(tmp_path / "head"))
    refusal(lambda: DynSpecAssistant.from_pretrained(tmp_path / name, target=tiny()))


def test_a_card_does_not_steer_a_terminal_and_stays_short():
    text = STEERING.replace("\ud800", "")
    config = DynSpecConfig(
        PolicyConfig("full"),
        drafter=ModelReference(text),
        target=ModelReference(text, local=True),
        provenance={"license": text, "datasets": [text], "command": text, text: text, "metrics": {text: 1, "n": text}},
        results=[{"workload": text, "measurement": text, "system": text, text: 1.5}],
    )
    card = render_card(config)
    assert card.replace("\n", "").isprintable()


WIDE = {
    "kinds": {"results": [{"workload": "a", "measurement": f"b{n}", "x": n} for n in range(15_000)]},
    "columns": {"results": [{"workload": "a", f"b{n}": n} for n in range(15_000)]},
    "one row": {"results": [{"workload": "a", **{f"b{n}": n for n in range(30_000)}}]},
    "long paths": {"provenance": {"k" * 400_000: {f"a{n}": 1 for n in range(30_000)}}},
    "tables": {"provenance": {"metrics": {f"k{m}": [{f"a{n}": 1} for n in range(60)] for m in range(500)}}},
    "a table": {"provenance": {"metrics": {"k": [{f"a{n}": 1} for n in range(30_000)]}}},
}


@pytest.mark.parametrize("case", WIDE)
def test_a_card_is_made_soon_whatever_the_configuration_holds(case):
    config = DynSpecConfig(PolicyConfig("full"), **WIDE[case])
    with within_limits():
        assert len(render_card(config)) < 2**22


# Frequency lists and heads in pickles --------------------------------------------------------------------------------


def rezipped(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Change the members of an archive, with checksums that fit."""
    with zipfile.ZipFile(path) as archive:
        members = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def pickled_list(path: Path) -> Path:
    torch.save(torch.tensor([5, 3, 9]), path)
    return path


def spoil_checksum(path: Path) -> None:
    data, content = bytearray(path.read_bytes()), torch.load(path)
    tensor = content["fc.weight"] if isinstance(content, dict) else content
    data[bytes(data).index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    torch.load(path)  # does not look at it


def compress(path: Path) -> None:
    """It could unpack to anything, and torch writes no such archive."""
    rezipped(path, lambda name, data: data, zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(("change", "problem"), [(spoil_checksum, "checksum"), (compress, "compressed")])
def test_changed_archives_are_refused(tmp_path, change, problem):
    path = pickled_list(tmp_path / "freq.pt")
    head = random_head("eagle3").write(tmp_path / "head", pickled=True)
    for archive in (path, head / "pytorch_model.bin"):
        change(archive)
    for read in (lambda: import_frequency_list(path, 10), lambda: read_checkpoint(head, allow_pickle=True)):
        assert problem in str(refusal(read))


def billion_laughs() -> list:
    laughs: list = [1]
    for _ in range(40):
        laughs = [laughs] * 10
    return laughs


PICKLES = {
    "cut off": pickle.dumps([1, 2, 3], protocol=2)[:-3],
    "only a beginning": b"\x80\x02",
    "unknown opcode": b"\x80\x02\xff.",
    "unpacks from an empty stack": b"\x80\x02a.",
    "a huge text that is not there": b"\x80\x02X\xff\xff\xff\x7f",
    "a memo far away": b"\x80\x02]r\xff\xff\xff\x7f.",
    "nested deeply": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a count that is a billion laughs": pickle.dumps({1: billion_laughs()}, protocol=2),
    "an id that is a billion laughs": pickle.dumps([billion_laughs()], protocol=2),
    "a huge id": pickle.dumps([10**9000], protocol=2),
    "a huge count": pickle.dumps({1: -(10**9000)}, protocol=2),
    "an unknown class": pickle.dumps([Path("a")], protocol=2),
}


@pytest.mark.parametrize("form", ["plain", "zip"])
@pytest.mark.parametrize("case", PICKLES)
def test_damaged_pickles_are_told(tmp_path, case, form):
    path = tmp_path / "freq.pt"
    path.write_bytes(PICKLES[case])
    if form == "zip":
        torch.save([1], path)
        rezipped(path, lambda name, data: PICKLES[case] if name.endswith("data.pkl") else data)
    refusal(lambda: import_frequency_list(path, 1000))
    head = random_head("eagle3").write(tmp_path / "head", pickled=True)
    (head / "pytorch_model.bin").write_bytes(path.read_bytes())
    refusal(lambda: read_checkpoint(head, allow_pickle=True))


def test_archives_that_claim_too_much_are_refused(tmp_path):
    path = tmp_path / "freq.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("freq/data.pkl", "w") as member:
        for _ in range(600):
            member.write(b"\0" * (1 << 20))
    refusal(lambda: import_frequency_list(path, VOCABULARY))
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(5000):
            archive.writestr(f"freq/data/{n}", b"")
    refusal(lambda: import_frequency_list(path, VOCABULARY))
    # A tensor of five numbers that claims fifty million.
    torch.save(torch.arange(5), path)
    claim = b"J" + struct.pack("<i", 50_000_000)
    rezipped(path, lambda _, data: data.replace(b"K\x05t", claim + b"t").replace(b"K\x05\x85", claim + b"\x85"))
    refusal(lambda: import_frequency_list(path, 50_000_000))


def test_a_head_of_countless_tensors_is_refused_before_they_are_looked_at(tmp_path):
    folder = random_head("eagle3").write(tmp_path)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (folder / "model.safetensors").write_bytes(container({f"t{n}": entry for n in range(150_000)}, b""))
    assert "150000 tensors" in str(refusal(lambda: read_checkpoint(folder)))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    assert refusal(lambda: read_checkpoint(folder)).field == "model.safetensors: header"


@pytest.mark.parametrize(
    "text", ['{"model": 3}', "[]", "", '{"version": "1.0", "model": {"type": "BPE"}}', "\x00", None]
)
def test_a_damaged_or_missing_tokenizer_is_told(tmp_path, text):
    if text is not None:
        word_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text(text)
    error = refusal(lambda: load_tokenizer(tmp_path if text is not None else tmp_path / "missing"))
    assert text is None or isinstance(error, ConfigurationError)


# Fuzz ----------------------------------------------------------------------------------------------------------------

CASES = int(os.environ.get("HF_DYNSPEC_FUZZ", "1000"))
SEED = int(os.environ.get("HF_DYNSPEC_FUZZ_SEED", "0"))

Files = dict[str, bytes]

NUMBERS = [0, 1, -1, 2, 3, 7, 301, 302, 2**15, 2**16, 2**22, 2**22 + 1, 2**31 - 1, 2**31, 2**48, 2**63, 2**64, 2**70]
NUMBERS += [-(2**63), 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e308, -1e308, float("nan"), float("inf")]
TEXTS = "full union hybrid router lru fitted dynaspec I64 F32 BF16 U8 silu gelu".split()
TEXTS += "yarn llama3 longrope eagle3 qwen3 config.json __class__ model.safetensors".split()
TEXTS += "acme/model ../.. /etc/passwd ~ C:\\model file:///etc/passwd http://localhost:1/".split()
TEXTS += "[bold] |`<b> NaN 1 true".split()
TEXTS += ["", STEERING, "x" * 70_000, "\u202e" * 100, "{{ card_data }}", "---\n---\n", "\0", "a\tb"]


def hostile_value(rng: random.Random, donor: Any) -> Any:
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice([None, True, False, [], {}, [[]], {"": {}}])
    if kind == 6:
        return [hostile_value(rng, donor) for _ in range(rng.choice([1, 2, 5]))]
    if kind == 7:
        value: Any = rng.choice(NUMBERS)
        for _ in range(rng.choice([3, 40, 400])):
            value = rng.choice([[value], {"policies": [value]}, {"name": "union", "settings": value}])
        return value
    places = list(walk(donor))
    holder, key = rng.choice(places)
    return json.loads(json.dumps(holder[key]))


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and under which key or index."""
    pending = [value]
    while pending:
        holder = pending.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                pending.append(holder[key])


def mutated_json(rng: random.Random, data: Any) -> str:
    """Text of a JSON value with one to four changes that know its structure, and perhaps one that does not."""
    data = json.loads(json.dumps(data))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = list(walk(data))
        if not 0 < len(places) < 5000:
            break
        if isinstance(data, dict) and isinstance(data.get("policy"), dict | list) and rng.random() < 0.5:
            places = list(walk(data["policy"])) or places  # what is built of an artifact
        holder, key = rng.choice(places)
        change = rng.randrange(8)
        if change < 4:
            holder[key] = hostile_value(rng, data)
        elif change == 4:
            del holder[key]
        elif change == 5 and isinstance(holder, dict):
            holder[rng.choice([*TEXTS, "trust_remote_code", "auto_map", "settings"])] = hostile_value(rng, data)
        elif change == 6 and isinstance(holder, dict):
            holder[f"{key}{rng.choice(string.ascii_letters)}"] = holder.pop(key)
        elif isinstance(holder, list):
            holder.extend(list(holder) * rng.choice([1, 3, 300]))
        else:
            other_holder, other_key = rng.choice(places)
            holder[key] = json.loads(json.dumps(other_holder[other_key]))
    text = json.dumps(data, ensure_ascii=rng.random() < 0.9)
    if rng.random() < 0.1:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "}", "[" * 3000, '"', ",", "\x00", "1e999", "NaN", text]) + text[place:]
    return text


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        if not data:
            break
        place = rng.randrange(len(data))
        change = rng.randrange(7)
        if change == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif change == 6:
            data += data[place:]
        else:
            number = struct.pack("<q", rng.choice([-1, 0, 2**31, 2**40, 2**62, VOCABULARY]))
            run = rng.choice([b"\0", b"\xff", b"\x7f"]) * rng.choice([4, 8, 64])
            removed = rng.choice([1, 16, 200])
            # The length of what is replaced, and what takes its place.
            length, new = (
                (len(data), b""),
                (8, number),
                (0, rng.randbytes(rng.choice([1, 8, 100]))),
                (removed, b""),
                (len(run), run),
            )[change - 1]
            data[place : place + length] = new
    return bytes(data)


def mutated_tensors(rng: random.Random, data: bytes) -> bytes:
    """Another header over the same numbers, or other numbers below the same header."""
    length = struct.unpack("<Q", data[:8])[0]
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    change = rng.randrange(4)
    if change == 0:
        return data[: 8 + length] + mutated_bytes(rng, numbers)
    if change == 1:
        return mutated_bytes(rng, data)
    text = mutated_json(rng, header).encode("utf-8", "replace")
    claimed = len(text) if change == 2 or rng.random() < 0.7 else rng.choice([0, 1, 2**20, 2**40, 2**63])
    return struct.pack("<Q", claimed) + text + numbers


def mutated_archive(rng: random.Random, data: bytes) -> bytes:
    """Changed members with checksums that fit, so that what reads them is reached; or a changed file."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # no archive, or one that was damaged before
        members = {}
    if not members or rng.random() < 0.3:
        return mutated_bytes(rng, data)
    changed, victim = io.BytesIO(), rng.choice(sorted(members))
    with zipfile.ZipFile(changed, "w") as copy:
        for name, member in members.items():
            is_victim = name == victim or (name.endswith("data.pkl") and rng.random() < 0.7)
            copy.writestr(name, mutated_bytes(rng, member) if is_victim else member)
    return changed.getvalue()


def mutated_files(rng: random.Random, files: Files) -> Files:
    """One to three changed files, each by what knows its kind."""
    files = dict(files)
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(sorted(files))
        data = files[name]
        try:
            if name.endswith(".json"):
                files[name] = mutated_json(rng, json.loads(data)).encode("utf-8", "replace")
            elif name.endswith(".safetensors") and len(data) > 8 and data[8:9] == b"{":
                files[name] = mutated_tensors(rng, data)
            else:
                files[name] = (mutated_archive if name.endswith((".bin", ".pt")) else mutated_bytes)(rng, data)
        except (ValueError, RecursionError):
            files[name] = mutated_bytes(rng, data)
    if rng.random() < 0.05:
        del files[rng.choice(sorted(files))]
    return files


def forged(files: Files) -> Files:
    """With digests that fit, so that the checks behind them answer."""
    import hashlib

    try:
        config = json.loads(files["config.json"])
        weights = config["weights"]
        named = {"model.safetensors": weights} if "sha256" in weights else weights
        for name, digest in named.items():
            digest.update(sha256=hashlib.sha256(files[name]).hexdigest(), size=len(files[name]))
        return {**files, "config.json": json.dumps(config).encode("utf-8", "replace")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return files


def write_files(folder: Path, files: Files, rng: random.Random) -> None:
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if files and rng.random() < 0.02:
        victim = folder / rng.choice(sorted(files))
        victim.unlink()
        STRANGERS[rng.choice(sorted(STRANGERS))](victim)


def outcome(act: Callable[[], Any]) -> str | None:
    """None where it went as it may: it worked, or ended in an error of this package, soon."""
    start = time.process_time()
    try:
        act()
    except DynSpecError as error:
        if not str(error).isprintable() or len(str(error)) > LONGEST_MESSAGE:
            return f"a message that is not fit to be shown: {str(error)!r:.300}"
    except Exception as error:
        place = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        return f"{type(error).__name__}: {error!s:.200} ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})"
    seconds = time.process_time() - start
    return None if seconds < 5 else f"{seconds:.1f} seconds"


def fuzz(tmp_path: Path, sources: list[Files], share: float, act: Callable[[Path, random.Random], None]) -> None:
    folder = tmp_path / "inner" / "folder"
    folder.mkdir(parents=True)
    write_files(folder, sources[0], random.Random(1))
    for source in sources:
        write_files(folder, source, random.Random(1))
        act(folder, random.Random(0))  # each is sound, and what is loaded once is loaded
    memory, slowest, worked, failures = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, 0, []
    count = round(CASES * share)
    for case in range(SEED, SEED + count):
        rng = random.Random(case)
        files = mutated_files(rng, rng.choice(sources))
        write_files(folder, forged(files) if rng.random() < 0.8 else files, rng)
        start = time.process_time()
        done = []
        problem = outcome(lambda rng=rng, done=done: done.append(act(folder, rng)))
        slowest = max(slowest, time.process_time() - start)
        worked += bool(done)
        if problem is not None:
            failures.append(f"case {case}: {problem}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    print(f"{count} cases, {worked} loaded, slowest {slowest:.2f} s, memory grew by {grown:.0f} MiB")
    assert not failures, "\n".join(failures[:20]) + f"\n{len(failures)} of {count}"
    assert grown < 500
    assert 0 < worked < count


def test_mutated_artifacts_load_or_end_in_an_error_of_ours(tmp_path):
    policies = [
        FrequencyShortlist(RANKING, size=40),
        HybridShortlist(RANKING.to(torch.int32), core_size=30, window=20),
        InContextShortlist(window=30),
        UnionShortlist(UnionShortlist(FrequencyShortlist(RANKING), FullShortlist()), InContextShortlist(20)),
        RouterShortlist(random_router(), 3, ranking=RANKING, pinned=9, mass=0.9, budgets=fitted_budgets()),
        RouterShortlist(centroid_router(), 3),
        UnionShortlist(InContextShortlist(15), RouterShortlist(random_router(), 2)),
        CoralShortlist(layer_router(), 3),
    ]
    fields = {
        "tokenizer": TOKENIZER,
        "drafter": ModelReference("acme/small", commit="1" * 40),
        "target": ModelReference("acme/large", vocab_size=512),
        "num_assistant_tokens": 5,
        "tree": hf_dynspec.TreeConfig(),
        "provenance": {"license": "mit", "datasets": ["a/b"], "command": "x", "metrics": {"a": 1, "b": [{"c": 2}]}},
        "results": [{"workload": "code", "measurement": "benchmark", "speedup": 1.5, "system": "this artifact"}],
    }
    sources = []
    for number, policy in enumerate(policies):
        config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), **fields)
        limit = 1 if number % 3 == 0 else "1GB"
        folder = write_artifact(tmp_path / str(number), config, policy.tensors(), max_shard_size=limit)
        sources.append(files_of(folder))

    def act(folder: Path, rng: random.Random) -> None:
        config, tensors = read_artifact(folder, tokenizer_fingerprint=TOKENIZER if rng.random() < 0.5 else None)
        policy = rebuild_policy(config, tensors)
        card = render_card(config)
        assert card.replace("\n", "").isprintable() and len(card) < 2**22
        use(policy)
        assert len(card_to_publish(folder, config, "acme/dynspec")) < 2**22
        if rng.random() < 0.1:
            write_artifact(folder, config, tensors)

    fuzz(tmp_path, sources, 0.6, act)


def test_mutated_heads_load_or_end_in_an_error_of_ours(tmp_path):
    sources, target = [], tiny(num_hidden_layers=8)
    changes = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rms_norm_eps": 1e-6}
    for layout in LAYOUTS:
        trimmed = {} if layout == "eagle2" else {"draft_vocabulary": 100}
        for number, options in enumerate(({}, changes, trimmed)):
            folder = tmp_path / f"{layout} {number}"
            sources.append(files_of(random_head(layout, **options).write(folder)))
        sources.append(files_of(random_head(layout).write(tmp_path / f"{layout} pickled", pickled=True)))
    whole = random_head("eagle3")
    shards = tmp_path / "shards"
    whole.write(shards)
    names = sorted(whole.tensors)
    (shards / "model.safetensors").unlink()
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: whole.tensors[name] for name in part}, shards / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    sources.append(files_of(shards))

    def act(folder: Path, rng: random.Random) -> None:
        drafter = EagleDrafter.from_pretrained(folder, target=target, allow_pickle=True)
        drafter.start()

    fuzz(tmp_path, sources, 0.25, act)


def test_mutated_lists_load_or_end_in_an_error_of_ours(tmp_path):
    sources = []
    for content in ([5, 3, 9, 200], RANKING, RANKING.to(torch.int32), {4: 2, 1: 9, 3: 10**12}):
        for is_zip in (True, False):
            torch.save(content, tmp_path / "freq.pt", _use_new_zipfile_serialization=is_zip)
            sources.append({"freq.pt": (tmp_path / "freq.pt").read_bytes()})

    def act(folder: Path, rng: random.Random) -> None:
        ids = import_frequency_list(folder / "freq.pt", VOCABULARY, EOS)
        use(FrequencyShortlist(ids, size=20))

    fuzz(tmp_path, sources, 0.15, act)
