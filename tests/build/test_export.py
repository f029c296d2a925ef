"""`hf-dynspec export`: what SGLang, vLLM and transformers alone read. Each file is read here as they read it."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import representatives
from command_line import invoke
from eagle_heads import Head, random_head
from models import random_router
from pocket import EAGLE3_LAYER_IDS, LAYERS, POCKET, TARGET_SHAPE, VOCABULARY_SIZE, target_embedding
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_dynspec import (
    ArtifactError,
    ConfigurationError,
    DynSpecAssistant,
    DynSpecError,
    EagleDrafter,
    FrequencyShortlist,
    FullShortlist,
    HybridShortlist,
    InContextShortlist,
    RetrievalShortlist,
    RouterShortlist,
    ScreenShortlist,
    ShortlistPolicy,
    UnionShortlist,
)
from hf_dynspec.artifacts import write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.build.exports import shortlist_generate
from hf_dynspec.errors import counted
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[2]


def export(*arguments: Any) -> str:
    """Run a command; return what it printed, or raise what it raised."""
    result = invoke("export", *arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POCKET / "target")


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(POCKET / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def ranking(tokenizer) -> torch.Tensor:
    """All ids in an order that is not the tokenizer's, one that ends a text far behind."""
    ids = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(1))
    ends = ids == tokenizer.eos_token_id
    return torch.cat([ids[~ends], ids[ends]])


def write(folder: Path, policy: ShortlistPolicy, tokenizer: Any) -> Path:
    config = DynSpecConfig(
        PolicyConfig(policy.name, policy.settings()),
        tokenizer=None if tokenizer is None else fingerprint_tokenizer(tokenizer),
    )
    return write_artifact(folder, config, policy.tensors())


@pytest.fixture
def artifact(tmp_path, tokenizer, ranking) -> Path:
    return write(tmp_path / "ranking", FrequencyShortlist(ranking, size=700), tokenizer)


def small_model(vocabulary: int, **changes: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **{**shape, **changes})).eval()


@pytest.fixture
def other_target(tmp_path, tokenizer) -> Path:
    """A model of another size with another tokenizer."""
    folder = tmp_path / "other"
    small_model(len(tokenizer) + 64, hidden_size=64, num_hidden_layers=4).save_pretrained(folder)
    changed = AutoTokenizer.from_pretrained(POCKET / "target")
    changed.add_tokens(["<a token more>"])
    changed.save_pretrained(folder)
    return folder


# SGLang --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 5, VOCABULARY_SIZE])
def test_a_token_map_is_what_sglang_loads(tmp_path, artifact, tokenizer, ranking, size):
    out = tmp_path / "new folder" / "map.pt"
    printed = export("sglang", artifact, "--out", out, *([] if size is None else ["--size", size]))
    loaded = torch.load(out, weights_only=True)
    assert type(loaded) is list and all(type(one) is int for one in loaded)
    ids = torch.tensor(loaded, dtype=torch.int64)  # as SGLang goes on
    size = size or 700
    expected = ranking.tolist() if size == VOCABULARY_SIZE else [*ranking[: size - 1].tolist(), tokenizer.eos_token_id]
    assert ids.tolist() == expected and f"{counted(len(expected), 'token id')}, most" in printed
    assert f"--speculative-algorithm EAGLE --speculative-token-map {out}\n" in printed
    assert int(ids.min()) >= 0 and int(ids.max()) < len(tokenizer)
    assert [one.name for one in out.parent.iterdir()] == ["map.pt"]


def test_a_token_map_holds_every_id_that_ends_a_text_of_the_target(tmp_path, artifact, tokenizer):
    folder = tmp_path / "chat model"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 31000]}))
    export("sglang", artifact, "--out", tmp_path / "map.pt", "--target", folder)
    loaded = torch.load(tmp_path / "map.pt", weights_only=True)
    assert len(loaded) == 700 and {tokenizer.eos_token_id, 31000} <= set(loaded)


def test_the_same_list_gives_the_same_bytes(tmp_path, artifact):
    files = [tmp_path / name for name in ("a.pt", "another name.pt")]
    for file in files:
        export("sglang", artifact, "--out", file)
    assert files[0].read_bytes() == files[1].read_bytes()


def dynamic_policies(ranking: torch.Tensor) -> dict[str, tuple[ShortlistPolicy, int | None]]:
    """Policies that follow the text, and how many tokens their static core has."""
    return {
        "hybrid": (HybridShortlist(ranking, core_size=300), 300),
        "retrieval": (RetrievalShortlist(ranking, size=400), 400),
        "union": (UnionShortlist(InContextShortlist(), FrequencyShortlist(ranking, 200), HybridShortlist()), 1024),
        "position-aware": (FrequencyShortlist(ranking, 500, position_aware=True), 500),
        "core of no tokens": (RetrievalShortlist(size=0), None),
        "in_context": (InContextShortlist(), None),
        "screen": (ScreenShortlist(), None),
        "full": (FullShortlist(), None),
        "router": (RouterShortlist(random_router(16, 64, vocabulary=ranking.numel())), None),
    }


@pytest.mark.parametrize("name", list(dynamic_policies(torch.arange(64))))
def test_a_policy_that_follows_the_text_is_refused_with_the_nearest_static_thing(tmp_path, tokenizer, ranking, name):
    policy, core = dynamic_policies(ranking)[name]
    artifact = write(tmp_path / "artifact", policy, tokenizer)
    for command, out in (("sglang", tmp_path / "map.pt"), ("custom-generate", tmp_path / "folder")):
        with pytest.raises(ArtifactError) as refusal:
            export(command, artifact, "--out", out)
        assert f"{policy.name!r}" in str(refusal.value)
        offered = "hf-dynspec build frequency" if core is None else f"core of {core:,} tokens: give --static"
        assert offered in str(refusal.value)
        assert not out.exists()
    if core is None:
        with pytest.raises(ArtifactError, match=r"hf-dynspec build frequency"):
            export("sglang", artifact, "--out", tmp_path / "map.pt", "--static")
        return
    export("sglang", artifact, "--out", tmp_path / "map.pt", "--static")
    assert len(torch.load(tmp_path / "map.pt", weights_only=True)) == core


COMMANDS = ("sglang", "vllm", "custom-generate")


def words(command: str, tmp_path: Path, artifact: Path, target: Path) -> list[Any]:
    """An export that works, into `tmp_path / "out"`."""
    if command != "vllm":
        return [command, artifact, "--out", tmp_path / "out", "--target", target]
    head = random_head("eagle3", VOCABULARY_SIZE, **TARGET_SHAPE).write(tmp_path / "head")
    return ["vllm", head, "--ranking", artifact, "--target", target, "--out", tmp_path / "out"]


@pytest.mark.parametrize("command", COMMANDS)
def test_another_tokenizer_is_refused(tmp_path, artifact, other_target, command):
    told = f"vocab_size|tokenizer of {VOCABULARY_SIZE} ids, and this one has {VOCABULARY_SIZE + 1}"
    with pytest.raises(ArtifactError, match=told):
        export(*words(command, tmp_path, artifact, other_target))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_more_tokens_than_there_are_are_refused(tmp_path, artifact, command):
    size = VOCABULARY_SIZE + 1
    with pytest.raises(ConfigurationError, match=f"size is {size:,}, and the ranking holds {VOCABULARY_SIZE:,} ids"):
        export(*words(command, tmp_path, artifact, POCKET / "target"), "--size", size)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_replaced_unasked_or_by_an_export_that_fails(tmp_path, artifact, monkeypatch, command):
    arguments = words(command, tmp_path, artifact, POCKET / "target")
    export(*arguments)
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigurationError, match="is there already; give --overwrite"):
        export(*arguments, "--size", 100)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if command != "vllm":
        with monkeypatch.context() as patch, pytest.raises(DynSpecError, match="No space left"):
            patch.setattr(os, "replace", refuse)
            export(*arguments, "--size", 100, "--overwrite")
    assert contents(tmp_path / "out") == before
    export(*arguments, "--size", 100, "--overwrite")
    assert contents(tmp_path / "out") != before


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in files}


# vLLM ----------------------------------------------------------------------------------------------------------------


def with_target_rows(head: Head) -> Head:
    ids = torch.arange(head.tensors["d2t"].numel()) + head.tensors["d2t"]
    head.tensors["lm_head.weight"] = target_embedding()[ids]
    return head


HEADS = {
    "official": lambda: random_head("eagle3", VOCABULARY_SIZE, **TARGET_SHAPE),
    "official with its own tokens": lambda: random_head("eagle3", VOCABULARY_SIZE, 8192, **TARGET_SHAPE),
    "speculators with the target's rows": lambda: with_target_rows(
        random_head("speculators", VOCABULARY_SIZE, 8192, norm_before_residual=True, **TARGET_SHAPE)
    ),
    "speculators with its own rows": lambda: random_head(
        "speculators", VOCABULARY_SIZE, 8192, norm_before_residual=False, norm_before_fc=True, **TARGET_SHAPE
    ),
    "of other hidden states, with its own rows": lambda: random_head(
        "speculators", VOCABULARY_SIZE, 8192, eagle_aux_hidden_state_layer_ids=[0, 1, 3], **TARGET_SHAPE
    ),
}


@pytest.mark.parametrize("name", representatives("families", HEADS))
def test_a_trimmed_head_is_speculators_and_drafts_what_the_whole_one_does(
    tmp_path, artifact, target, tokenizer, ranking, name
):
    head, out = HEADS[name](), tmp_path / "out"
    source = head.write(tmp_path / "head")
    arguments = ["--ranking", artifact, "--size", 700, "--target", POCKET / "target", "--out", out]
    printed = export("vllm", source, *arguments, "--check", POCKET / "prompts.jsonl")
    told = json.loads(printed.rpartition("--speculative-config '")[2].rstrip("'\n"))
    assert told == {"model": str(out), "method": "eagle3", "num_speculative_tokens": 5}

    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert (
        layer["vocab_size"] == VOCABULARY_SIZE and layer["num_hidden_layers"] == 1 and layer["model_type"] == "llama"
    )
    assert config["draft_vocab_size"] == 700
    assert config["norm_before_residual"] is bool(head.config.get("norm_before_residual", False))
    layer_ids = head.config.get("eagle_aux_hidden_state_layer_ids", EAGLE3_LAYER_IDS)
    assert config["eagle_aux_hidden_state_layer_ids"] == layer_ids
    speculators = config["speculators_config"]
    assert speculators["algorithm"] == "eagle3" and speculators["default_proposal_method"] == "greedy"
    assert speculators["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    verifier = {"name_or_path": str(POCKET / "target"), "architectures": ["Qwen3ForCausalLM"]}
    assert speculators["verifier"] == verifier

    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = torch.arange(700) + tensors["d2t"]
    draftable = set(range(VOCABULARY_SIZE))
    if "own" in name:
        draftable = set((torch.arange(8192) + head.tensors["d2t"]).tolist())
    eos = tokenizer.eos_token_id
    chosen = [one for one in [eos, *(one for one in ranking.tolist() if one != eos)] if one in draftable][:700]
    assert ids.tolist() == sorted(chosen) and tensors["t2d"].nonzero().flatten().tolist() == sorted(chosen)
    rows = tensors["lm_head.weight"]
    if len(draftable) == VOCABULARY_SIZE:
        assert torch.equal(rows, target_embedding()[ids])
    else:
        places = {one: row for row, one in enumerate((torch.arange(8192) + head.tensors["d2t"]).tolist())}
        assert torch.equal(rows, head.tensors["lm_head.weight"][[places[one] for one in ids.tolist()]])
    kept = {key.removeprefix(head.prefix): one for key, one in head.tensors.items() if key.startswith(head.prefix)}
    assert kept and all(torch.equal(tensors[f"layers.0.{key}"], one) for key, one in kept.items())
    modes = {(out / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "a server that runs as somebody else can read one file and not the other"
    assert not any("midlayer" in key for key in tensors)

    texts = [json.loads(line) for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(text["turns"][0], return_tensors="pt").input_ids for text in texts]
    trimmed = EagleDrafter.from_pretrained(out, target=target, only_own_tokens=True)
    whole = EagleDrafter.from_pretrained(source, target=target)
    assert trimmed.head.weight.shape[0] == 700
    drafts = []
    for drafter, policy in ((trimmed, "full"), (whole, FrequencyShortlist(ranking, 700))):
        assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=4)
        drafts.append([assistant.draft_round(prompt).token_ids.tolist() for prompt in prompts])
        assistant.unbind()
    assert drafts[0] == drafts[1] and set().union(*drafts[0]) <= set(chosen)
    assert "are those of the whole head" in printed


def test_the_check_finds_a_head_that_drafts_otherwise(tmp_path, artifact, monkeypatch):
    from hf_dynspec.build.exports import vllm

    written = vllm.write_head

    def write_damaged(folder: Path, head: Any) -> None:
        written(folder, head)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(vllm, "write_head", write_damaged)
    with pytest.raises(DynSpecError, match="the head drafts"):
        export(*words("vllm", tmp_path, artifact, POCKET / "target"), "--check", POCKET / "prompts.jsonl")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("eagle2", VOCABULARY_SIZE, TARGET_SHAPE), "EAGLE-2 head.*hf-dynspec export sglang"),
        (("eagle3", VOCABULARY_SIZE, {}), r"hidden_size: of the head is 32, and the target's is \d+"),
        (("eagle3", 301, TARGET_SHAPE), f"vocab_size: of the head is 301, and the target's is {VOCABULARY_SIZE}"),
        (
            ("eagle3", VOCABULARY_SIZE, TARGET_SHAPE | {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}),
            f"num_hidden_layers: is {LAYERS} in the target",
        ),
        (
            ("eagle3", VOCABULARY_SIZE, TARGET_SHAPE | {"draft_vocabulary": 512}),
            "size is 700, and of the ranking the head can draft 51",
        ),
    ],
    ids=["EAGLE-2", "hidden size", "vocabulary", "layers", "few tokens"],
)
def test_heads_that_are_not_for_vllm_or_this_target_are_refused(tmp_path, artifact, given, told):
    layout, size, settings = given
    head = random_head(layout, size, **settings).write(tmp_path / "head")
    with pytest.raises((ArtifactError, ConfigurationError), match=told):
        export("vllm", head, "--ranking", artifact, "--target", POCKET / "target", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reads", [{}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}])
def test_a_target_that_does_not_tell_its_layers_is_refused(tmp_path, artifact, reads):
    target = shutil.copytree(POCKET / "target", tmp_path / "target")
    settings = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for name in ("num_hidden_layers", "layer_types"):
        del settings[name]
    (target / "config.json").write_text(json.dumps(settings))
    head = random_head("eagle3", VOCABULARY_SIZE, **reads, **TARGET_SHAPE).write(tmp_path / "head")
    with pytest.raises(ArtifactError, match="num_hidden_layers: is None in the target"):
        export("vllm", head, "--ranking", artifact, "--target", target, "--out", tmp_path / "out")


@pytest.mark.parametrize("layers", [1, 2])
def test_an_independent_drafter_needs_no_export_for_vllm(tmp_path, artifact, layers):
    small_model(512, num_hidden_layers=layers).save_pretrained(tmp_path / "drafter")
    arguments = ("--ranking", artifact, "--target", POCKET / "target", "--out", tmp_path / "out")
    with pytest.raises(ArtifactError, match=r"takes it as it is: there is nothing to export.*draft_model"):
        export("vllm", tmp_path / "drafter", *arguments)


def test_a_target_whose_head_has_a_bias_is_refused(tmp_path, artifact):
    folder = tmp_path / "biased"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((POCKET / "target" / name).read_bytes())
    tensors = {"lm_head.weight": target_embedding(), "lm_head.bias": torch.zeros(VOCABULARY_SIZE)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"lm_head\.bias"):
        export(*words("vllm", tmp_path, artifact, folder))


# transformers alone --------------------------------------------------------------------------------------------------

# Of a process that cannot import hf_dynspec.
_ALONE = """
import json, sys
sys.modules["hf_dynspec"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
target_folder, drafter_folder, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(target_folder)
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
drafter = AutoModelForCausalLM.from_pretrained(drafter_folder, dtype=torch.float32)
head = drafter.lm_head
inputs = tokenizer("def read_csv(path):", return_tensors="pt")
settings = {"max_new_tokens": 40, "do_sample": False}
plain = target.generate(**inputs, **settings)
forwards = []
target.register_forward_hook(lambda *_: forwards.append(1))
drafted = target.generate(
    **inputs, **settings, assistant_model=drafter, custom_generate=folder, trust_remote_code=True
)
assert drafter.lm_head is head and "forward" not in vars(head)
print(json.dumps({"plain": plain.tolist(), "drafted": drafted.tolist(), "forwards": len(forwards)}))
"""


def test_transformers_alone_generates_the_same_tokens_with_the_folder(tmp_path, tokenizer):
    artifact = write(tmp_path / "artifact", FrequencyShortlist(torch.arange(len(tokenizer)), size=8192), tokenizer)
    printed = export("custom-generate", artifact, "--out", tmp_path / "folder", "--repo-id", "me/shortlist")
    assert f"hf upload me/shortlist {tmp_path / 'folder'}\n" in printed
    command = [sys.executable, "-c", _ALONE, POCKET / "target", POCKET / "drafter", tmp_path / "folder"]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["drafted"] == found["plain"] and "deprecated" not in run.stderr
    assert found["forwards"] < 36, "next to nothing of the drafts was accepted"


@pytest.fixture
def loaded(tmp_path, tokenizer, monkeypatch):
    """Exports the lowest ids, loads the function as transformers does, and gives its module."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def load(size: int) -> Any:
        artifact = write(tmp_path / "artifact", FrequencyShortlist(torch.arange(len(tokenizer)), size), tokenizer)
        export("custom-generate", artifact, "--out", tmp_path / "folder")
        source = (tmp_path / "folder/custom_generate/generate.py").read_text()
        namespace = {"__name__": "exported"}
        exec(compile(source, "generate.py", "exec"), namespace)
        return namespace

    return load


@pytest.fixture(scope="module")
def drafter():
    return AutoModelForCausalLM.from_pretrained(POCKET / "drafter", dtype=torch.float32)


@pytest.mark.parametrize("more", [(0, 0), (0, 64), (128, 64)])
def test_the_drafter_scores_the_shortlist_and_nothing_else(loaded, drafter, tokenizer, more):
    """The target may have more rows or fewer, which transformers refuses by itself."""
    drafter_rows, target_rows = (VOCABULARY_SIZE + rows for rows in more)
    model = small_model(drafter_rows, tie_word_embeddings=False)
    view = loaded(1000)["shortlisted"](model, target_rows)
    ids = torch.tensor([[5, 70, 900]])
    with torch.no_grad():
        scores, whole = view(ids).logits, model(ids).logits
    assert scores.shape == (1, 3, target_rows) and whole.shape == (1, 3, drafter_rows)
    chosen = [tokenizer.eos_token_id, *(one for one in range(1000) if one != tokenizer.eos_token_id)][:1000]
    torch.testing.assert_close(scores[..., chosen], whole[..., chosen], rtol=1e-6, atol=1e-6)
    assert int(scores.isfinite().sum()) == 3 * 1000
    assert view.config.vocab_size == target_rows and model.config.vocab_size == drafter_rows


def test_weights_that_change_are_followed_and_others_are_packed_once(loaded, drafter):
    shortlisted, model = loaded(64)["shortlisted"], small_model(VOCABULARY_SIZE, tie_word_embeddings=False)
    first = shortlisted(model, VOCABULARY_SIZE)
    assert shortlisted(model, VOCABULARY_SIZE).lm_head is first.lm_head
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        after, ids = shortlisted(model, VOCABULARY_SIZE), torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(after(ids).logits[..., :60], model(ids).logits[..., :60], rtol=1e-6, atol=1e-6)


def test_models_that_the_shortlist_is_not_for_are_refused(loaded, target, drafter):
    namespace, replaced = loaded(64), copy.copy(drafter)
    replaced.forward = drafter.forward
    shortlisted = namespace["shortlisted"]
    for problem, act in (
        ("needs assistant_model", lambda: namespace["generate"](target)),
        (
            f"a tokenizer of {VOCABULARY_SIZE:,} tokens, and these models score 512",
            lambda: shortlisted(small_model(512), VOCABULARY_SIZE),
        ),
        ("cannot be cut to a shortlist", lambda: shortlisted(replaced, VOCABULARY_SIZE)),
        # The code in the package is for no tokenizer.
        ("a tokenizer of 0 tokens", lambda: shortlist_generate.shortlisted(drafter, VOCABULARY_SIZE)),
    ):
        with pytest.raises(ValueError, match=problem):
            act()


def test_the_folder_says_how_it_is_used_and_what_it_needs(tmp_path, artifact):
    out = tmp_path / "folder"
    export("custom-generate", artifact, "--out", out, "--repo-id", "me/shortlist")
    assert sorted(contents(out)) == [
        "folder/README.md",
        "folder/custom_generate/generate.py",
        "folder/custom_generate/requirements.txt",
    ]
    card = (out / "README.md").read_text()
    assert 'custom_generate="me/shortlist"' in card and f"700 tokens in place of all {VOCABULARY_SIZE:,}" in card
    assert "- custom_generate\n" in card
    needed = (out / "custom_generate/requirements.txt").read_text().split()
    assert [re.split("[<>=]", one)[0] for one in needed] == ["torch", "transformers"]
    assert f"    {needed[1]}," in (ROOT / "setup.cfg").read_text(), "not the transformers that this package asks for"
    code = (out / "custom_generate/generate.py").read_text()
    assert "hf_dynspec" not in code and max(map(len, code.splitlines())) <= 120
    imported = {line.split()[1].split(".")[0] for line in code.splitlines() if line.startswith(("import", "from"))}
    assert imported <= {"base64", "copy", "functools", "weakref", "zlib", "torch"}


def test_a_name_that_is_no_repositorys_is_refused(tmp_path, artifact):
    with pytest.raises(ConfigurationError, match="--repo-id"):
        export("custom-generate", artifact, "--out", tmp_path / "folder", "--repo-id", "not a name/of/one")
