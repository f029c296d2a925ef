"""The benchmark: prompts, policies as texts, what is measured and written, and errors before models are loaded."""

import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

import pyarrow
import pytest
import torch
from command_line import invoke, shown, write_rows
from eagle_heads import random_head
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dynspec.artifacts import write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.drafters import EagleDrafter
from hf_dynspec.errors import ConfigurationError, DynSpecError
from hf_dynspec.evaluation import provenance
from hf_dynspec.evaluation.bench import systems
from hf_dynspec.evaluation.bench.benchmark import BenchmarkSettings, run_benchmark
from hf_dynspec.evaluation.bench.figures import summarize
from hf_dynspec.evaluation.bench.report import acceptance_table, round_table, speed_table, to_dict
from hf_dynspec.evaluation.bench.systems import COMPILED, HEAD_PRODUCT
from hf_dynspec.evaluation.head_product import head_product
from hf_dynspec.evaluation.pair import head_labels, load_models, open_pair
from hf_dynspec.evaluation.policy_text import parse_policy, shorten_paths
from hf_dynspec.evaluation.prompts import WorkloadError, WorkloadPrompt, encode_workload, read_workload
from hf_dynspec.evaluation.provenance import git_revision
from hf_dynspec.evaluation.suites.runner import Run
from hf_dynspec.evaluation.tree_text import parse_tree
from hf_dynspec.files import write_json
from hf_dynspec.kernels import cpu
from hf_dynspec.shortlists import FrequencyShortlist
from hf_dynspec.tree_config import TreeConfig
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[2]
POLICIES = ("full", "frequency:size=64", "in_context:window=32,eviction=lru")
RIVALS = ["transformers' defaults", "prompt lookup"]
SYSTEMS = ["plain", "transformers", *RIVALS, *POLICIES]
# Of targets whose head is small.
NO_HEAD_PRODUCT = "plain generate with this package's head product was left out: it is compiled for large heads"
NEW_TOKENS = 12
DRAFTED = 5
# The twin of the target is right every time, so that 12 tokens take two rounds of 5 drafts and one token more.
BEST_ACCEPTANCE = 6.0


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, rows: int) -> None:
    shape = {"vocab_size": rows, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    special = {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": True, "initializer_range": 0.5}
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**shape, **special)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, its twin, a drafter with padded rows, and two files of prompts."""
    root = tmp_path_factory.mktemp("bench")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["drafts are verified by the target", "the law of large numbers", "for index in range(10): print(index)"]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    make_model(root / "target", wrapped, seed=0, rows=len(wrapped))
    make_model(root / "twin", wrapped, seed=0, rows=len(wrapped))
    make_model(root / "padded", wrapped, seed=1, rows=len(wrapped) + 4)
    # The target has two layers, so that the head is told which hidden states there are to read.
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    random_head("eagle3", len(wrapped), draft_vocabulary=200, **layers).write(root / "eagle3")
    random_head("eagle2", len(wrapped)).write(root / "more" / "eagle2")
    random_head("eagle2", len(wrapped) + 4).write(root / "other-target")
    write_rows(root / "code.jsonl", [{"question_id": n, "category": "code", "turns": [text[2], "x"]} for n in (1, 2)])
    write_rows(root / "law.jsonl", [{"text": text[1]}, {"prompt": text[0]}])
    return root


def settings(folder: Path, **changes) -> BenchmarkSettings:
    prompts = [folder / "code.jsonl", folder / "law.jsonl"]
    given = {"target": str(folder / "target"), "drafter": str(folder / "twin"), "prompts": prompts}
    given |= {"policies": POLICIES, "max_new_tokens": NEW_TOKENS, "num_assistant_tokens": DRAFTED, "device": "cpu"}
    return BenchmarkSettings(**{**given, "repeats": 2, "profile_prompts": 1, "rivals": False, **changes})


# The shortest run: one policy, one prompt, once, and nothing else is measured.
SHORT = {"policies": ("full",), "repeats": 1, "limit": 1, "profile_prompts": 0}


def row_of(result, system: str, domain: str | None = None) -> dict:
    (row,) = (row for row in summarize(result) if (row["system"], row["domain"]) == (system, domain))
    return row


def run(*words: object, out: Path) -> tuple[str, dict]:
    """What the command prints and writes."""
    result = invoke("bench", *words, "--profile-prompts", 1, "--device", "cpu", "--threads", 1, "--json", out)
    assert result.exit_code == 0, result.exception
    return result.stdout, json.loads(out.read_text(encoding="utf-8"))


# The whole command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(folder) -> tuple[str, dict]:
    """What the command prints and writes for greedy decoding and sampling."""
    words = ["--target", folder / "target", "--drafter", folder / "twin", "--prompts", folder / "code.jsonl"]
    words += [word for policy in POLICIES for word in ("--policy", policy)]
    words += ["--temperature", 0, "--temperature", 0.8, "--max-new-tokens", NEW_TOKENS, "--repeats", 2]
    return run(*words, "--by-domain", folder / "law.jsonl", out=folder / "out.json")


def figures(written: dict, system: str, temperature: float, domain: str | None = None) -> dict:
    keys = {"system": system, "temperature": temperature, "domain": domain}
    (row,) = (row for row in written["results"] if keys.items() <= row.items())
    return row


def test_every_system_runs_every_prompt_in_every_repeat(reported):
    _, written = reported
    (note,) = written["notes"]
    assert written["complete"] and note.startswith(NO_HEAD_PRODUCT) and written["schema_version"] == 3
    runs = [(run["temperature"], run["repeat"], run["prompt"], run["system"]) for run in written["generations"]]
    prompts = ["code/1", "code/2", "law/line 1", "law/line 2"]
    assert sorted(runs) == sorted(product((0.0, 0.8), (0, 1), prompts, SYSTEMS))
    assert {run["domain"] for run in written["generations"]} == {"code", "law"}
    # Interleaved: all systems finish a prompt before any starts the next, and they take turns in going first.
    in_groups = [runs[start : start + len(SYSTEMS)] for start in range(0, len(runs), len(SYSTEMS))]
    assert all(len({run[:3] for run in group}) == 1 for group in in_groups)
    assert {group[0][3] for group in in_groups} == set(SYSTEMS[:5])  # four prompts, and one further in a repeat


def test_greedy_tokens_are_the_same_for_all_systems(reported):
    printed, written = reported
    for system in SYSTEMS:
        row = figures(written, system, 0.0)
        assert (row["identical"], row["compared"], row["mismatches"]) == (4, 4, {})
        assert "identical" not in figures(written, system, 0.8)
    assert printed.count("4/4") == len(SYSTEMS) - 1


def test_acceptance_coverage_and_active_vocabulary(reported, folder):
    _, written = reported
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "target"))
    for system in ("transformers", "full"):
        for domain in (None, "code", "law"):
            assert figures(written, system, 0.0, domain)["acceptance_length"] == BEST_ACCEPTANCE
    assert figures(written, "plain", 0.0)["acceptance_length"] == 1.0
    full, frequency, window = (figures(written, system, 0.0) for system in POLICIES)
    assert full["active_vocabulary"] == vocabulary
    assert full["coverage"] == pytest.approx(1.0, abs=1e-6)
    assert frequency["active_vocabulary"] == frequency["active_vocabulary_max"] == 64
    assert 0.0 < frequency["coverage"] < 1.0
    assert 1 < window["active_vocabulary"] <= 32 + 1
    assert frequency["acceptance_length"] < BEST_ACCEPTANCE


def test_speeds_and_ratios_follow_from_the_generations(reported):
    _, written = reported
    for temperature in (0.0, 0.8):
        speeds = {}
        for system in SYSTEMS:
            runs = [
                run for run in written["generations"] if (run["system"], run["temperature"]) == (system, temperature)
            ]
            by_repeat = [[run for run in runs if run["repeat"] == repeat] for repeat in (0, 1)]
            speeds[system] = [sum(r["tokens"] for r in part) / sum(r["seconds"] for r in part) for part in by_repeat]
            means = [fmean(run["tokens"] / run["seconds"] for run in part) for part in by_repeat]
            row = figures(written, system, temperature)
            assert row["tokens_per_second"]["per_repeat"] == pytest.approx(speeds[system])
            assert row["mean_tokens_per_second"]["per_repeat"] == pytest.approx(means)
            assert row["prompts"] == 4
        for system in SYSTEMS:
            ratios = figures(written, system, temperature)["ratios"]
            assert set(ratios) == {"plain", "transformers", *RIVALS, "full", "frequency:size=64"}
            for base, ratio in ratios.items():
                pairs = [ours / theirs for ours, theirs in zip(speeds[system], speeds[base], strict=True)]
                assert ratio["per_repeat"] == pytest.approx(pairs)
                found = (ratio["median"], ratio["min"], ratio["max"])
                assert found == pytest.approx((median(pairs), min(pairs), max(pairs)))


def test_profiles_say_where_a_round_goes(reported):
    printed, written = reported
    for system in POLICIES:
        row = figures(written, system, 0.0)
        sections = {"backbone", "head", "policy", "choice", "verification", "other"}
        assert set(row["ms_per_round"]) == set(row["share_of_round"]) == sections
        assert sum(row["share_of_round"].values()) == pytest.approx(1.0)
        layers = row["ms_per_round"]["backbone"] + row["ms_per_round"]["verification"]
        assert row["share_of_oracle"] == pytest.approx(layers / sum(row["ms_per_round"].values()))
        assert 0 < row["share_of_oracle"] < 1 and f"{row['share_of_oracle']:.1%}" in printed
        drafting = sum(row["ms_per_round"][name] for name in ("backbone", "head", "policy", "choice"))
        assert row["draft_ms_per_round"] == pytest.approx(drafting)
        assert row["profile"]["calls"] == 2  # one prompt of each domain
        assert row["drafting"]["calls"] == 8  # timed calls: four prompts, two repeats
        assert row["drafting"]["seconds"] == {}  # and they were not profiled


def test_the_file_says_where_it_comes_from_and_names_no_folders(reported, folder):
    _, written = reported
    text = json.dumps(written)
    assert str(folder.parent) not in text and str(Path.home()) + "/" not in text
    provenance = written["provenance"]
    assert provenance["command"][:4] == ["hf-dynspec", "bench", "--target", f"{folder.name}/target"]
    assert f"{folder.name}/law.jsonl" in provenance["command"]
    assert provenance["versions"]["torch"] == torch.__version__
    assert {"hf_dynspec", "transformers", "python"} <= set(provenance["versions"])
    hardware = provenance["hardware"]
    assert hardware["cpu"] and hardware["threads"] == 1 and hardware["memory_bytes"] > 0
    assert {"max_new_tokens": NEW_TOKENS, "top_k": 50}.items() <= written["settings"].items()
    assert written["settings"]["drafter_settings_of_all_systems"]["assistant_confidence_threshold"] == 0.0
    assert written["models"]["target"]["dtype"] == "float32"
    assert written["policies"]["frequency:size=64"]["settings"]["size"] == 64


def test_the_tables_show_all_systems(reported):
    printed, _ = reported
    assert "Greedy, 4 prompts" in printed and "Temperature 0.8, top-k 50, 4 prompts" in printed
    for heading in ("vs plain", "vs transformers", "vs frequency", "coverage", "draft ms", "identical"):
        assert heading in printed
    assert "vs full" not in printed and " · " not in printed
    for system in SYSTEMS:
        assert printed.count(f"│ {system} ") >= 2
    assert printed.count("Acceptance length, ") == 2


# Plain generation with this package's head product -------------------------------------------------------------------


@pytest.fixture
def small_heads_are_compiled(compiled_kernels, monkeypatch):
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)


def test_plain_generation_runs_with_this_packages_head_product(folder, small_heads_are_compiled):
    result = run_benchmark(settings(folder, temperatures=(0.0, 0.8)))
    written = json.loads(json.dumps(to_dict(result)))
    assert not result.notes and written["schema_version"] == 3
    row = figures(written, HEAD_PRODUCT, 0.0)
    assert (row["identical"], row["compared"], row["acceptance_length"]) == (4, 4, 1.0)
    speeds = (figures(written, one, 0.8)["tokens_per_second"]["per_repeat"] for one in ("full", HEAD_PRODUCT))
    ratio = figures(written, "full", 0.8)["ratios"][HEAD_PRODUCT]["per_repeat"]
    assert ratio == pytest.approx([ours / theirs for ours, theirs in zip(*speeds, strict=True)])
    printed = " ".join(shown(speed_table(result, 0.0)).split())
    assert "vs plain with" in printed and f"│ {HEAD_PRODUCT} │" in printed
    assert HEAD_PRODUCT not in shown(round_table(result, 0.0)) + shown(acceptance_table(result, 0.0))


def test_plain_generation_has_a_static_cache_where_it_is_compiled(folder, monkeypatch):
    """On a GPU; here the cache alone is static."""
    monkeypatch.setattr(systems, "has_graphs", lambda device: True)
    result = run_benchmark(settings(folder))
    row = figures(json.loads(json.dumps(to_dict(result))), COMPILED, 0.0)
    assert (row["identical"], row["compared"], row["acceptance_length"]) == (4, 4, 1.0)
    assert COMPILED in figures(to_dict(result), "full", 0.0)["ratios"]
    assert "vs compiled" in " ".join(shown(speed_table(result, 0.0)).split())


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_head_product_is_what_runs_and_leaves_nothing_behind(folder, small_heads_are_compiled, has_bias):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    projection = target.get_output_embeddings()
    if has_bias:
        projection.bias = torch.nn.Parameter(torch.randn(projection.weight.shape[0]))
    hidden = torch.randn(2, 3, 32)
    expected = projection(hidden)
    with watched_products() as products, torch.no_grad():
        with head_product(target):
            torch.testing.assert_close(projection(hidden), expected)
        assert products == [(6, 32)] and "forward" not in vars(projection)
        with pytest.raises(KeyboardInterrupt), head_product(target):
            raise KeyboardInterrupt
        assert "forward" not in vars(projection)
        projection(hidden)
        assert len(products) == 1
        own = projection.forward
        projection.forward = lambda one: own(one) + 1  # somebody else's
        theirs = projection.forward
        with head_product(target):
            pass
        assert projection.forward is theirs


@contextmanager
def watched_products():
    """The shapes of the hidden states that the compiled product was given."""
    shapes, run = [], cpu._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_run", lambda hidden, *more: (shapes.append(tuple(hidden.shape)), run(hidden, *more))[1])
        yield shapes


def test_only_the_calls_of_its_own_row_run_with_the_head_product(folder, small_heads_are_compiled, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    projection, own, current = target.get_output_embeddings(), Run._generate, [""]
    seen: dict[str, set[bool]] = {}
    hooked: dict[str, set[bool]] = {}

    def note(self, system, *others):
        current[0] = system.label
        return own(self, system, *others)

    def look(*_):
        seen.setdefault(current[0], set()).add("forward" in vars(projection))
        hooked.setdefault(current[0], set()).add(bool(target._forward_hooks))

    monkeypatch.setattr(Run, "_generate", note)
    target.get_decoder().layers[0].register_forward_pre_hook(look)
    run_benchmark(settings(folder, **{**SHORT, "profile_prompts": 1}), target=target)
    assert seen.pop(HEAD_PRODUCT) == {True}
    assert set(seen) >= {"plain", "transformers"} and all(one == {False} for one in seen.values())
    # A hook that counts a baseline's rounds would keep an assistant from the head product.
    assert hooked["full"] == {False} and hooked["plain"] == {True}


@pytest.mark.parametrize(("name", "is_larger"), [("padded", True), ("twin", False)])
def test_a_drafter_that_is_larger_than_its_target_is_warned_of(folder, name, is_larger):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_pair(settings(folder, drafter=str(folder / name))):
            load_models(settings(folder, drafter=str(folder / name)))
    assert sum("see whether they are swapped" in str(one.message) for one in caught) == 2 * is_larger


def test_kernels_are_compiled_before_the_first_call(folder, monkeypatch):
    events, own = [], Run._generate
    monkeypatch.setattr(systems, "prepare_kernels", lambda: events.append("compiled"))
    monkeypatch.setattr(Run, "_generate", lambda self, *given: (events.append("generated"), own(self, *given))[1])
    run_benchmark(settings(folder, **SHORT))
    assert events[:2] == ["compiled", "generated"] and events.count("compiled") == 1


# EAGLE heads and trees -----------------------------------------------------------------------------------------------

TREE = TreeConfig(total_tokens=8, depth=2, top_k=3)


@pytest.fixture(scope="module")
def compared(folder) -> tuple[str, dict]:
    """What the command prints and writes for three drafters in two shapes."""
    words = ["--target", folder / "target", "--drafter", folder / "twin", "--prompts", folder / "code.jsonl"]
    words += ["--eagle", folder / "eagle3", "--eagle", folder / "more" / "eagle2", "--tree", "8/2/3"]
    words += ["--policy", "full", "--policy", "frequency:size=64", "--policy", "frequency:size=32", "--no-rivals"]
    words += ["--max-new-tokens", 8, "--repeats", 1, "--skip-coverage", "--limit", 1]
    return run(*words, out=folder / "compared.json")


def test_every_drafter_runs_every_policy_in_every_shape(compared):
    _, written = compared
    (note,) = written["notes"]
    assert written["complete"] and note.startswith(NO_HEAD_PRODUCT)
    tree = {"total_tokens": 8, "depth": 2, "top_k": 3}
    expected = {
        f"{drafter} · {policy}{tail}": {"drafter": drafter, "policy": policy, "tree": shape}
        for drafter in ("drafter", "eagle3", "eagle2")
        for tail, shape in (("", None), (" · tree 8/2/3", tree))
        for policy in ("full", "frequency:size=64", "frequency:size=32")
    }
    assert written["systems"] == expected and list(written["systems"]) == list(expected)
    rows = [row["system"] for row in written["results"] if row["domain"] is None]
    assert rows == ["plain", "transformers", *expected]
    for system in expected:
        row = figures(written, system, 0.0)
        assert (row["identical"], row["compared"]) == (1, 1)


def test_ratios_are_to_the_policies_of_the_same_drafter_and_shape(compared):
    _, written = compared
    speeds = {run["system"]: run["tokens"] / run["seconds"] for run in written["generations"]}
    systems = written["systems"].items()
    for system, made_of in systems:
        ratios = figures(written, system, 0.0)["ratios"]
        own = [label for label, other in systems if {**other, "policy": ""} == {**made_of, "policy": ""}]
        assert list(ratios) == ["plain", "transformers", *own]
        for base, ratio in ratios.items():
            assert ratio["median"] == pytest.approx(speeds[system] / speeds[base])
    for baseline in ("plain", "transformers"):
        assert set(figures(written, baseline, 0.0)["ratios"]) == {"plain", "transformers"}


def test_rounds_of_chains_and_trees_are_told_apart(compared):
    _, written = compared
    for system, made_of in written["systems"].items():
        row = figures(written, system, 0.0)
        assert row["drafted_per_round"] == row["drafting"]["drafted"] / row["drafting"]["rounds"]
        assert row["drafted_per_round"] <= (DRAFTED if made_of["tree"] is None else TREE.total_tokens - 1)
        assert row["ms_per_round"]["verification"] > 0
    # The twin is right every time: a chain of 5 and the bonus token, then the 2 that are left. The prompt's round of a
    # tree drafts nothing, and the others nodes that a chain has not.
    assert figures(written, "drafter · full", 0.0)["drafting"]["tokens_per_round"] == [0, 0, 1, 0, 0, 0, 1]
    tree = figures(written, "drafter · full · tree 8/2/3", 0.0)["drafting"]
    assert sum(tree["tokens_per_round"][2:]) > 0 and tree["drafted"] > 2 * tree["accepted"]
    # A head with 200 tokens of its own never drafts from more.
    assert figures(written, "eagle3 · full", 0.0)["active_vocabulary_max"] <= 200


def test_the_file_names_heads_and_trees_and_no_folders(compared, folder):
    _, written = compared
    heads = written["models"]["eagle"]
    assert [heads[label]["class"] for label in ("eagle3", "eagle2")] == ["EAGLE-3", "EAGLE-2"]
    assert {"name": "eagle3", "head_rows": 200, "reads": [0, 1, 2]}.items() <= heads["eagle3"].items()
    assert written["models"]["drafter"]["class"] == "Qwen3ForCausalLM"
    given = {"eagle": [f"{folder.name}/eagle3", "more/eagle2"], "chains": True}
    given["trees"] = [{"total_tokens": 8, "depth": 2, "top_k": 3}]
    assert given.items() <= written["settings"].items()
    assert "8/2/3" in written["provenance"]["command"]
    assert str(folder.parent) not in json.dumps(written)


def test_the_tables_keep_drafters_and_shapes_apart(compared):
    printed, written = compared
    for heading in ("vs plain", "vs transformers", "vs full", "vs frequency", "drafted", "verification", "oracle"):
        assert heading in printed
    assert "of the same drafter and shape" in printed
    for system in written["systems"]:
        assert printed.count(f"│ {system}  ") + printed.count(f"│ {system} │") == 2
    # Two tables of six groups, one of them with a group of baselines: lines between groups.
    assert sum(line.startswith("├") for line in printed.splitlines()) == 6 + 5


def test_one_head_takes_the_drafters_place(folder):
    policies = ("full", "in_context:window=32")
    changes = {"eagle": [str(folder / "eagle3")], "chains": False, "trees": [TREE, "default"], "policies": policies}
    changes |= {"drafter": None, "temperatures": (0.0, 1.0), "max_new_tokens": 6}
    result = run_benchmark(settings(folder, **{**SHORT, **changes}))
    tails = [" · tree 8/2/3", " · tree 60/5/10"]
    assert list(result.combinations) == [f"{policy}{tail}" for tail in tails for policy in policies]
    _, note = result.notes
    assert "transformers' assisted generation was left out" in note and "there is none" in note
    assert "drafter" not in result.models and list(result.models["eagle"]) == ["eagle3"]
    assert all(row["identical"] == row["compared"] for row in summarize(result) if row["temperature"] == 0)
    table = shown(speed_table(result, 0.0))
    assert "vs full" in table and "vs transformers" not in table and "vs frequency" not in table


def test_heads_of_one_name_are_told_apart_by_their_folders(folder):
    twin, drafter = folder / "again" / "eagle2", folder / "again" / "drafter"
    for path in (twin, drafter):
        shutil.copytree(folder / "more" / "eagle2", path)
    heads = [str(folder / "more" / "eagle2"), f"{twin}/", str(drafter), "someone/eagle2-8b"]
    assert head_labels(heads) == ["more/eagle2", "again/eagle2", "again/drafter", "eagle2-8b"]
    with pytest.raises(ConfigurationError, match="two EAGLE heads would be shown as 'more/eagle2'"):
        BenchmarkSettings(eagle=heads[:1] * 2)


def test_models_that_do_not_fit_are_named(folder):
    head = EagleDrafter.from_pretrained(
        folder / "eagle3", target=AutoModelForCausalLM.from_pretrained(folder / "target")
    )
    for changes, given, problem in (
        ({"drafter": None, "eagle": [str(folder / "other-target")]}, {}, "the EAGLE head other-target: .*vocab_size"),
        ({}, {"drafter": head}, "drafter must be a small model, got EagleDrafter"),
        ({"drafter": str(folder / "law.jsonl")}, {}, r"the drafter .*law\.jsonl cannot be loaded"),
        ({"target": None}, {}, "name the target"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            run_benchmark(settings(folder, **changes), **given)


def test_heads_of_pickles_are_read_where_that_is_allowed(folder, tmp_path):
    random_head("eagle2", len(AutoTokenizer.from_pretrained(folder / "target"))).write(tmp_path / "old", pickled=True)
    given = settings(folder, drafter=None, eagle=[str(tmp_path / "old")], **SHORT)
    with pytest.raises(ConfigurationError, match=r"the EAGLE head old: .*pickle"):
        run_benchmark(given)
    assert run_benchmark(replace(given, allow_pickle=True)).complete


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("60/5/10", TreeConfig()),
        ("default", TreeConfig()),
        ("2/0/1", TreeConfig(2, 0, 1)),
        ("60/5", "write total_tokens/depth/top_k"),
        ("60/5/10/2", "write total_tokens/depth/top_k"),
        ("60 / 5 / 10", "write total_tokens/depth/top_k"),
        ("60/-5/10", "write total_tokens/depth/top_k"),
        ("", "write total_tokens/depth/top_k"),
        ("1/5/10", "total_tokens must be a whole number from 2"),
        ("60/5/0", "top_k must be a whole number from 1"),
    ],
)
def test_trees_are_read_from_texts(text, expected):
    if isinstance(expected, TreeConfig):
        assert parse_tree(text) == expected
    else:
        with pytest.raises(ConfigurationError, match=expected):
            parse_tree(text)


# From Python ---------------------------------------------------------------------------------------------------------


def test_loaded_models_are_left_as_they_were(folder):
    target, drafter = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "twin"))
    drafter.generation_config.num_assistant_tokens = 9
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    before, threads, state = drafter.generation_config.to_dict(), torch.get_num_threads(), torch.get_rng_state()
    seen = []

    def watch(activity: str, done: int, total: int) -> None:
        config = drafter.generation_config
        seen.append((done, total, config.num_assistant_tokens, config.assistant_confidence_threshold))

    result = run_benchmark(
        settings(folder, target=None, drafter=None, prompts=(), policies={"mine": parse_policy("full")}, threads=1),
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        prompts=[WorkloadPrompt("a", "letters", "a b c"), WorkloadPrompt("b", "letters", "d e f")],
        report=watch,
    )
    assert result.complete
    # Three systems: warm-up, two repeats of two prompts; profile and coverage of one of them on one prompt.
    assert [done for done, *_ in seen] == [0, 0, 0, *range(3 * 2 * 2 + 2 + 1)]
    # What transformers drafts by is set for its calls alone.
    assert {tuple(others) for _, *others in seen} == {(14, 9, None)}
    assert drafter.generation_config.to_dict() == before and "generate" not in vars(target)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    row = row_of(result, "mine")
    assert row["identical"] == row["compared"] == 2
    assert "letters" in shown(acceptance_table(result, 0.0))


def test_different_tokens_are_reported(folder, monkeypatch):
    generate, converse, current = Run._generate, Run._converse, []

    def note(self, kind, number, system, temperature, repeat):
        current[:] = [kind, number, system.label, repeat]
        return converse(self, kind, number, system, temperature, repeat)

    def change_one_token(self, *arguments):
        tokens, *others = generate(self, *arguments)
        if current == ["timed", 2, "full", 1]:
            tokens[3] += 1
        return tokens, *others

    monkeypatch.setattr(Run, "_converse", note)
    monkeypatch.setattr(Run, "_generate", change_one_token)
    result = run_benchmark(settings(folder, policies=("full",), profile_prompts=0))
    row = row_of(result, "full")
    assert (row["mismatches"], row["identical"], row["compared"]) == ({"law/line 1": 3}, 3, 4)
    assert row_of(result, "full", "code")["identical"] == 2 and row_of(result, "transformers")["identical"] == 4
    assert "3/4" in shown(speed_table(result, 0.0))


def test_sampling_repeats_itself_with_a_seed(folder):
    runs = []
    for seed in (3, 3, 4):
        changes = {"policies": ("frequency:size=64",), "temperatures": (1.5,), "limit": 1, "profile_prompts": 0}
        result = run_benchmark(settings(folder, seed=seed, transformers_assisted=False, **changes))
        runs.append([(run.system, run.prompt, run.repeat, run.tokens, run.rounds) for run in result.generations])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("after", [2, 4, 11])
def test_an_interrupted_run_keeps_what_it_has(folder, monkeypatch, after):
    generate, calls = Run._generate, []

    def interrupt(self, *arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(Run, "_generate", interrupt)
    out = folder / "interrupted.json"
    out.write_text("{}")  # of an earlier run
    words = ["--target", folder / "target", "--drafter", folder / "twin", "--prompts", folder / "code.jsonl"]
    result = invoke(
        "bench", *words, "--policy", "full", "--max-new-tokens", 4, "--no-rivals", "--device", "cpu", "--json", out
    )
    assert result.exit_code == 130
    kept = "nothing was measured yet" if after == 2 else f"what was measured until then is above and in {out}"
    assert result.stderr.splitlines()[-1] == f"interrupted: {kept}; the same command begins anew"
    if after == 2:
        assert out.read_text() == "{}"
        return
    written = json.loads(out.read_text())
    assert not written["complete"] and "interrupted" in written["notes"][-1]
    assert written["provenance"]["finished"] is None
    # Three warm-ups, then whole and unfinished prompts; figures count only prompts that all systems finished.
    assert len(written["generations"]) == after - 3
    if after == 11:
        assert {run["repeat"] for run in written["generations"]} == {0, 1}
        row = figures(written, "full", 0.0)
        assert len(row["tokens_per_second"]["per_repeat"]) == 1 and row["prompts"] == 2
        assert "one repeat" in result.stdout


@pytest.mark.parametrize("assisted", [True, False])
def test_transformers_is_left_out_where_it_cannot_run(folder, assisted):
    """Prompt lookup needs no drafter."""
    changes = {"policies": ("full",), "repeats": 1, "rivals": True, "transformers_assisted": assisted}
    result = run_benchmark(settings(folder, drafter=str(folder / "padded"), **changes))
    assert "transformers' assisted generation was left out" in result.notes[1]
    assert {run.system for run in result.generations} == {"plain", "prompt lookup", "full"}
    assert "vs transformers" not in shown(speed_table(result, 0.0))


def test_rivals_draft_by_their_own_settings_and_leave_none_behind(folder, monkeypatch):
    """The drafter of transformers' defaults keeps what it says itself, whatever the others draft by."""
    drafter = AutoModelForCausalLM.from_pretrained(folder / "twin")
    drafter.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.01)
    before, seen = drafter.generation_config.to_dict(), {}
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    generate = Run._generate

    def look(self, system, *others):
        with system.surroundings():
            seen[system.label] = tuple(getattr(drafter.generation_config, name) for name in names)
        seen[f"{system.label} looks up"] = self._configs[0.0, system.label].prompt_lookup_num_tokens
        return generate(self, system, *others)

    monkeypatch.setattr(Run, "_generate", look)
    result = run_benchmark(settings(folder, policies=("full",), repeats=1, limit=1, rivals=True), drafter=drafter)
    assert seen["transformers"] == (DRAFTED, "constant", 0.0)
    assert seen["transformers' defaults"] == seen["prompt lookup"] == (3, None, 0.01)
    lookups = {label.removesuffix(" looks up"): value for label, value in seen.items() if label.endswith("looks up")}
    assert lookups == {"prompt lookup": 10, **dict.fromkeys(("plain", "transformers", RIVALS[0], "full"))}
    assert drafter.generation_config.to_dict() == before
    rows = {row["system"]: row for row in summarize(result) if row["domain"] is None}
    # The twin is right and sure every time, and 3 drafts of it make rounds of 4 tokens.
    assert rows["transformers' defaults"]["acceptance_length"] == 4.0
    assert 1.0 <= rows["prompt lookup"]["acceptance_length"] <= NEW_TOKENS
    assert all(rows[rival]["identical"] == rows[rival]["compared"] == 2 for rival in RIVALS)


def test_a_benchmark_of_two_policies_alone(folder):
    policies = ("hybrid:core_size=16,window=8",)
    result = run_benchmark(settings(folder, policies=policies, transformers_assisted=False, profile_prompts=0))
    row = row_of(result, *policies)
    assert row["identical"] == 4 and "coverage" not in row and "ms_per_round" not in row
    assert "–" in shown(round_table(result, 0.0))


def test_a_ranking_is_read_from_an_artifact(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    ranking = torch.arange(len(tokenizer)).flip(0)
    policy = FrequencyShortlist(ranking, size=32)
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=fingerprint_tokenizer(tokenizer))
    write_artifact(folder / "ranking", config, policy.tensors())
    text = f"frequency:ranking={folder / 'ranking'},size=64"
    result = run_benchmark(settings(folder, policies=(text,), repeats=1, limit=1, transformers_assisted=False))
    (label,) = result.policies
    assert label == f"frequency:ranking={folder.name}/ranking,size=64"
    assert torch.equal(result.policies[label].ranking, ranking)
    (row,) = (row for row in summarize(result) if row["system"] == label and row["domain"] is None)
    assert row["active_vocabulary"] == 64 and row["identical"] == 2
    assert str(folder) not in json.dumps(to_dict(result))


def test_the_revision_is_that_of_this_checkout(tmp_path, monkeypatch):
    if (ROOT / ".git").exists():
        revision = git_revision()
        assert len(revision["commit"]) == 40 and isinstance(revision["changed"], bool)
    # Installed below somebody else's checkout, or in no checkout.
    monkeypatch.setattr(provenance, "_PACKAGE", tmp_path)
    assert git_revision() is None
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert git_revision() is None


def test_the_file_is_replaced_in_one_step(folder, tmp_path, monkeypatch):
    values = to_dict(run_benchmark(settings(folder, **SHORT)))
    path = tmp_path / "out.json"
    path.write_text("before")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        write_json(path, values)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["out.json"]
    write_json(path, values)
    assert json.loads(path.read_text()) == json.loads(json.dumps(values)) and os.listdir(tmp_path) == ["out.json"]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("hybrid", "hybrid", {"core_size": 1024}),
        ("hybrid:core_size=1024,window=2048", "hybrid", {"core_size": 1024, "window": 2048}),
        ("frequency:size=8,position_aware=true", "frequency", {"size": 8, "position_aware": True}),
        ("in_context:eviction=lru,prompt_positions=none", "in_context", {"eviction": "lru", "prompt_positions": None}),
    ],
)
def test_policies_are_read_from_texts(text, name, expected):
    policy = parse_policy(text)
    assert policy.name == name and expected.items() <= policy.settings().items()


def test_a_plus_sign_makes_a_union():
    first, second = parse_policy("frequency:size=1024+in_context:window=3072,eviction=lru").policies
    assert (first.name, first.size) == ("frequency", 1024)
    assert (second.name, second.window, second.eviction) == ("in_context", 3072, "lru")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no policy ''"),
        ("nonsense", "no policy 'nonsense'"),
        ("frequency+nonsense", "no policy 'nonsense'"),
        ("full:size=3", "no setting 'size'; it has none"),
        ("frequency:sise=3", "no setting 'sise'; it has ranking, size, position_aware"),
        ("frequency:size", "name=value"),
        ("frequency:", "name=value"),
        ("frequency:size=", "name=value"),
        ("frequency:size=0", "size must be a whole number from 1"),
        ("frequency:size=1.5", "size must be a whole number from 1"),
        ("frequency:size=1,size=2", "given twice"),
        ("frequency:position_aware=1", "position_aware must be True or False"),
        ("in_context:eviction=mru", "eviction must be one of"),
        ("union", r"join policies with \+"),
        ("router", "cannot be made without router: .*--policy router:router=DIR"),
        ("router:pinned=3", "cannot be made without router"),
    ],
)
def test_texts_that_are_no_policy_are_refused(text, problem):
    with pytest.raises(ConfigurationError, match=problem):
        parse_policy(text)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policies": ("full", "full")}, "given twice"),
        ({"policies": ()}, "no policy to measure"),
        ({"policies": {"plain": parse_policy("full")}}, "one of the baselines"),
        ({"repeats": 0}, "repeats must be"),
        ({"max_new_tokens": None}, "max_new_tokens must be"),
        ({"temperatures": (-0.1,)}, "temperatures must be"),
        ({"temperatures": (0.0, 0.0)}, "given twice"),
        ({"temperatures": (float("nan"),)}, "temperatures must be"),
        ({"dtype": "float33"}, "dtype must be"),
        ({"device": "nowhere"}, "device 'nowhere'"),
        ({"threads": 10**8}, "threads must be at most 1,024, got 100000000"),
        ({"seed": 2**63}, "seed must be at most 9,223,372,036,854,775,807, got 9223"),
        ({"num_assistant_tokens": 1025}, "num_assistant_tokens must be at most 1,024, got 1025"),
        ({"trees": ("60/5",)}, "tree '60/5': write"),
        ({"trees": (60,)}, "a tree must be"),
        ({"trees": ("default", TreeConfig())}, "the tree 60/5/10 is given twice"),
        ({"chains": False}, "nothing to draft"),
    ],
)
def test_settings_out_of_range_are_refused(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        BenchmarkSettings(**changes)


@pytest.mark.parametrize(
    ("word", "shortened"),
    [
        ("/data/models/large/target", "large/target"),
        ("--json=/data/results/out.json", "--json=results/out.json"),
        ("../../models/target", "models/target"),
        ("~/secret/models/target", "models/target"),
        (f"{Path.home()}/target", "~/target"),
        ("frequency:ranking=/data/made/rank,size=3", "frequency:ranking=made/rank,size=3"),
        ("in_context+frequency:ranking=/data/a/b+full", "in_context+frequency:ranking=a/b+full"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("hybrid:core_size=3", "hybrid:core_size=3"),
    ],
)
def test_paths_are_shortened(word, shortened):
    assert shorten_paths(word) == shortened


# Prompts -------------------------------------------------------------------------------------------------------------


def test_prompts_are_read_and_grouped(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "more"]},
        {"question_id": 82, "category": "writing", "turns": ["two"]},
        {"question_id": "q", "category": "math", "turns": ["three"]},
    ]
    first, second = write_rows(tmp_path / "spec.jsonl", rows), tmp_path / "plain.jsonl"
    second.write_bytes(b'\xef\xbb\xbf{"text": "four"}\r\n\r\n{"prompt": "f\xc3\xbcnf", "category": "math"}\n')
    assert read_workload([first, second], limit=1) == [
        WorkloadPrompt("spec/81", "writing", "one", ("more",)),
        WorkloadPrompt("spec/q", "spec/math", "three"),
        WorkloadPrompt("plain/line 1", "plain", "four"),
        WorkloadPrompt("plain/line 3", "plain/math", "fünf"),
    ]
    assert len(read_workload([first])) == 3


def test_prompts_are_read_from_tables_folders_and_links(tmp_path):
    (tmp_path / "some").mkdir()
    rows = {"question_id": [7, None], "category": ["law", None], "turns": [["one", "more"], ["two"]]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "some" / "a.parquet")
    (tmp_path / "some" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "three"}'))
    expected = [
        WorkloadPrompt("a/7", "law", "one", ("more",)),
        WorkloadPrompt("a/line 2", "a", "two"),
        WorkloadPrompt("b/line 1", "b", "three"),
    ]
    assert read_workload([tmp_path / "some"]) == expected
    # In the Hub's cache names are links.
    (tmp_path / "some" / "a.parquet").rename(tmp_path / "0123")
    (tmp_path / "a.parquet").symlink_to(tmp_path / "0123")
    assert read_workload([tmp_path / "a.parquet", tmp_path / "some"]) == expected


MALFORMED = [
    (b'{"text": "a"}\n{"text": \n', "line 2: not a JSON object"),
    (b'{"text": "\xff"}\n', "line 1: not UTF-8"),
    (b"[1]\n", "line 1: a JSON object is expected, this is a list"),
    (b'{"body": "a"}\n', "line 1: no field 'turns' or 'prompt' or 'text'; there are ['body']: a row needs turns"),
    (b'{"turns": []}\n', "line 1: turns must hold a text that is not empty"),
    (b'{"turns": [3]}\n', "line 1: field 'turns' must hold text or a list of texts, it holds 3"),
    (b'{"text": ""}\n', "line 1: text must hold a text that is not empty"),
    (b'{"text": "\\ud800"}\n', "line 1: text holds half of a surrogate pair"),
    (b'{"text": "a", "category": 3}\n', "line 1: category must be text"),
    (b'{"text": "a", "question_id": [1]}\n', "line 1: question_id must be"),
    (b'{"text": "a", "question_id": 1}\n{"text": "b", "question_id": 1}\n', "line 2: a second prompt"),
    (b"[" * 100_000 + b"\n", "line 1: "),
    (b"\n \n", "holds no prompts"),
]


@pytest.mark.parametrize(("data", "problem"), MALFORMED)
def test_malformed_prompts_are_refused_by_file_and_line(tmp_path, data, problem):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    with pytest.raises(WorkloadError) as caught:
        read_workload([path])
    assert str(caught.value).startswith(str(path)) and problem in str(caught.value)


def test_long_prompts_are_refused_or_shortened(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    prompt = WorkloadPrompt("law/7", "law", "the law of large numbers " * 9)
    (whole,) = encode_workload([prompt], tokenizer, None)
    with pytest.raises(WorkloadError, match=f"prompt law/7 has {len(whole)} tokens, and the models have room for 20"):
        encode_workload([prompt], tokenizer, 20)
    assert encode_workload([prompt], tokenizer, 20, truncate_to=20) == [whole[-20:]]
    with pytest.raises(WorkloadError, match="no chat template"):
        encode_workload([prompt], tokenizer, None, use_chat_template=True)
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (chat,) = encode_workload([prompt], tokenizer, None, use_chat_template=True)
    assert tokenizer.decode(chat).startswith("<user>the law")
    with pytest.raises(WorkloadError, match="room for 16"):
        run_benchmark(settings(folder, max_new_tokens=112), prompts=[prompt])
    with pytest.raises(ConfigurationError, match="max_new_tokens is 128, and the models have room for 128 tokens"):
        run_benchmark(settings(folder, max_new_tokens=128), prompts=[prompt])


# Errors of the command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--policy", "nonsense"], "no policy 'nonsense'"),
        (["--policy", "frequency:size=none"], "size must be"),
        (["--policy", "frequency:ranking=./no/such/folder"], "no/such/folder"),
        (["--temperature", "-1"], "--temperature must be"),
        (["--repeats", "0"], "repeats must be"),
        (["--dtype", "tiny"], "dtype must be"),
        (["--json", "no/such/folder/out.json"], "--json takes a file in an existing folder"),
        (["missing.jsonl"], "missing.jsonl: no such file or directory"),
        (["bad.jsonl"], "bad.jsonl, line 1: not a JSON object"),
        (["--tree", "60x5"], "tree '60x5': write total_tokens/depth/top_k, such as 60/5/10, or default"),
        (["--tree", "60/5/10", "--tree", "default"], "the tree 60/5/10 is given twice"),
        (["--no-chain"], "nothing to draft"),
        (["--eagle", "./no/such/head"], "--eagle ./no/such/head: there is no such folder"),
        (["--eagle", "empty"], "the EAGLE head empty: config.json: is not in empty"),
    ],
)
def test_bad_input_ends_before_models_are_loaded(tmp_path, monkeypatch, words, problem):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{")
    write_rows(Path("good.jsonl"), [{"text": "a"}])
    Path("empty").mkdir()
    result = invoke("bench", "--target", "no-model", "--drafter", "no-model", "--prompts", "good.jsonl", *words)
    assert result.exit_code != 0 and isinstance(result.exception, DynSpecError)
    assert problem in str(result.exception) and "\n" not in str(result.exception)


def test_something_must_draft(folder):
    result = invoke("bench", "--target", folder / "target", "--prompts", folder / "code.jsonl")
    assert isinstance(result.exception, ConfigurationError) and str(result.exception).startswith("name the drafter")


def test_errors_take_one_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    words = ["bench", "--target", "no-model", "--drafter", "no-model", "--prompts", str(path)]
    command = [sys.executable, "-c", "from hf_dynspec.commands import main; main()", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and done.stdout == ""
    assert line.startswith(f"error: {path}, line 2: not a JSON object")
