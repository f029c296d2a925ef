"""`hf-dynspec push`: what is measured goes with the artifact, and what cannot be right is refused beforehand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import invoke
from huggingface_hub import HfApi, ModelCard
from local_hub import Hub, Repository
from models import perturbed, tiny, word_tokenizer
from test_artifact import files_of

from hf_dynspec import DynSpecAssistant
from hf_dynspec.artifacts import annotate_artifact, push_artifact, read_artifact, write_artifact
from hf_dynspec.artifacts.card import render_card
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig, weights_files
from hf_dynspec.artifacts.writing import merge_results
from hf_dynspec.errors import ArtifactError, ConfigurationError, DynSpecError
from hf_dynspec.evaluation.bench.published_rows import read_published_rows
from hf_dynspec.shortlists import FrequencyShortlist, InContextShortlist, UnionShortlist
from hf_dynspec.vocabulary import fingerprint_tokenizer

REPO = "acme/dynspec"
SIZE = 64
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> SimpleNamespace:
    """An artifact with a ranking, and what the two commands measured with it on a tiny pair."""
    root = tmp_path_factory.mktemp("push")
    tokenizer, target = word_tokenizer(SIZE), tiny(vocabulary=SIZE)
    for name, model in (("target", target), ("drafter", perturbed(target))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    policy = FrequencyShortlist(torch.arange(SIZE).flip(0), size=32)
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=fingerprint_tokenizer(tokenizer))
    write_artifact(root / "artifact", config, {"ranking": policy.ranking.to(torch.int32)})
    rows = [{"prompt": "t5 t6 t7 t8"}, {"prompt": "t15 t16 t17 t18"}]
    (root / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["--target", root / "target", "--drafter", root / "drafter", "--prompts", root / "words.jsonl"]
    common += ["--max-new-tokens", 8, "--threads", 1]
    ranking = f"frequency:ranking={root / 'artifact'}"
    policies = ["full", f"{ranking},size=32", f"{ranking},size=16", "frequency:size=32"]
    common += [word for policy in policies for word in ("--policy", policy)]
    bench = ["--temperature", 0, "--temperature", 0.8, "--tree", "8/2/3", "--repeats", 1]
    for command, more in (("bench", bench), ("coverage", [])):
        words = [command, *common, *more, "--json", root / f"{command}.json"]
        done = invoke(*words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    return SimpleNamespace(root=root, bench=root / "bench.json", coverage=root / "coverage.json", policy=policy)


@pytest.fixture
def artifact(measured, tmp_path) -> Path:
    config, tensors = read_artifact(measured.root / "artifact")
    return write_artifact(tmp_path / "artifact", config, tensors)


def published(hub: Hub, branch: str = "main", repo_id: str = REPO) -> dict[str, bytes]:
    repository = hub.repositories[repo_id]
    return repository.commits[repository.branches[branch]]


# --- The command, against the local Hub ---


def test_an_artifact_is_pushed_with_its_measurements(hub, measured, artifact):
    words = ["--results", measured.bench, "--results", measured.coverage, "--dataset", "acme/texts"]
    done = invoke("push", artifact, REPO, *words, "--license", "apache-2.0", "--private", "--commit-message", "First")
    assert done.exit_code == 0, done.output
    commit = hub.repositories[REPO].branches["main"]
    assert done.stdout == f"{hub.endpoint}/{REPO}/commit/{commit}\n"
    for name in ("config.json", "model.safetensors"):
        assert f"{name}: {(artifact / name).stat().st_size:,} bytes" in done.stderr
        assert published(hub)[name] == (artifact / name).read_bytes()
    assert hub.repositories[REPO].private and hub.commit_headers[-1]["summary"] == "First"
    config, _ = read_artifact(REPO, api=HfApi(endpoint=hub.endpoint, token="secret"))
    own = [row for row in config.results if row["system"] == "this artifact"]
    assert {(row["measurement"], row["decoding"]) for row in own} == {
        ("benchmark", "greedy"),
        ("benchmark", "temperature 0.8, top-k 50"),
        ("coverage", "greedy"),
    }
    assert config.provenance == {"datasets": ["acme/texts"], "license": "apache-2.0"}
    metadata = ModelCard(published(hub)["README.md"].decode()).data
    assert metadata.datasets == ["acme/texts"] and metadata.license == "apache-2.0"
    assert {"frequency", "fr-spec", "speculative-decoding"} <= set(metadata.tags)


def test_pull_requests_and_branches(hub, artifact):
    assert invoke("push", artifact, REPO).exit_code == 0
    before = published(hub)
    annotate_artifact(artifact, provenance={"note": "second"})
    done = invoke("push", artifact, REPO, "--create-pr")
    assert done.exit_code == 0 and done.stdout == f"{hub.endpoint}/{REPO}/discussions/1\n"
    assert invoke("push", artifact, REPO, "--revision", "experiment").exit_code == 0
    assert published(hub) == before != published(hub, "refs/pr/1")
    assert published(hub, "experiment")["config.json"] == (artifact / "config.json").read_bytes()


def test_a_dry_run_prints_the_card_and_changes_nothing(hub, measured, artifact):
    before = files_of(artifact)
    words = ["--results", measured.coverage, "--dataset", "acme/texts"]
    done = invoke("push", artifact, REPO, *words, "--dry-run")
    assert done.exit_code == 0 and hub.requests == [] and files_of(artifact) == before
    # Nothing but the card, and the one that is then published.
    assert invoke("push", artifact, REPO, *words).exit_code == 0
    assert done.stdout == published(hub)["README.md"].decode()
    assert "| this artifact |" in done.stdout and f"would go to {REPO}" in done.stderr
    (artifact / "README.md").write_text("edited here")
    assert invoke("push", artifact, REPO, "--dry-run").stdout == "edited here"


@pytest.mark.process
def test_the_installed_command_ends_in_one_line(hub, measured, artifact, tmp_path):
    """As it is really run: another process, told of the Hub and the token by its environment."""
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}

    def run(*words) -> subprocess.CompletedProcess:
        code = "from hf_dynspec.commands import main; main()"
        command = [sys.executable, "-c", code, "push", *map(str, words)]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)

    done = run(artifact, REPO)
    assert done.returncode == 0 and done.stdout.strip().startswith(f"{hub.endpoint}/{REPO}/commit/"), done.stderr
    hub.repositories[REPO] = Repository()
    hub.repositories[REPO].commit({"model.safetensors": b"another library's"})
    done = run(artifact, REPO)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: repository: acme/dynspec holds a")


def test_what_the_hub_refuses_is_said_in_one_line(hub, artifact):
    assert invoke("push", artifact, REPO).exit_code == 0
    theirs = []

    def move_the_branch(path):
        if "/preupload/" in path and not theirs:
            theirs.append(hub.repositories[REPO].commit({"config.json": b"{}"}))

    hub.before_answer = move_the_branch
    done = invoke("push", artifact, REPO)
    assert done.exit_code == 1 and done.stdout == "" and hub.repositories[REPO].branches["main"] == theirs[0]
    assert done.stderr.splitlines()[-1].startswith("error: the Hub did not take the artifact: ")


# --- What cannot be right is refused before anything is uploaded ---


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["{root}/missing", REPO], "missing: no such file or directory"),
        (["{root}/target", REPO], "library_name"),
        (["{artifact}", "a/b/c"], "cannot be a name on the Hub"),
        (["{artifact}", REPO, "--dataset", "white space"], "--dataset"),
        (["{artifact}", REPO, "--results", "{root}/missing.json"], "missing.json: no such file or directory"),
        (["{artifact}", REPO, "--results", "{root}"], "cannot be read"),
        (["{artifact}", REPO, "--results", "{root}/words.jsonl"], "is not what --json"),
        (["{artifact}", REPO, "--results", "{artifact}/config.json"], "is not what --json"),
    ],
)
def test_bad_input_is_refused(hub, measured, artifact, words, problem):
    before = files_of(artifact)
    done = invoke("push", *(word.format(root=measured.root, artifact=artifact) for word in words))
    assert isinstance(done.exception, DynSpecError) and problem in str(done.exception)
    assert "\n" not in str(done.exception)
    assert hub.requests == [] and files_of(artifact) == before


def test_an_exported_folder_is_left_to_the_hubs_own_command(hub, artifact, tmp_path):
    folder = tmp_path / "exported"
    words = ["export", "custom-generate", str(artifact), "--out", str(folder)]
    assert invoke(*words).exit_code == 0
    done = invoke("push", folder, REPO)
    assert isinstance(done.exception, ConfigurationError)
    assert f"hf upload {REPO} {folder}" in str(done.exception) and hub.requests == []


def test_a_measurement_of_another_artifact_is_refused(measured):
    """By its tensors: another ranking has the same name and settings."""
    for other in (
        FrequencyShortlist(torch.arange(SIZE).roll(1), size=32),
        InContextShortlist(),
        FrequencyShortlist(torch.arange(SIZE), size=32),
    ):
        for path in (measured.bench, measured.coverage):
            with pytest.raises(ConfigurationError, match="does not measure this artifact"):
                read_published_rows(path, other)


# --- Rows ---


def test_rows_say_what_the_files_say(measured):
    rows = read_published_rows(measured.bench, measured.policy)
    data = json.loads(measured.bench.read_text())
    expected = {(row["temperature"], row["system"]): row for row in data["results"] if row["domain"] is None}
    assert len(rows) == len(expected) == 2 * (4 + 2 * 4)
    names = [row["system"] for row in rows[: len(rows) // 2]]
    with_settings = "this artifact with size=16"
    assert names == [
        "plain generate",
        "transformers' assisted",
        "transformers' defaults",
        "prompt lookup",
        *("full", "this artifact", with_settings, "frequency:size=32"),
        *(f"{name} · tree 8/2/3" for name in ("full", "this artifact", with_settings, "frequency:size=32")),
    ]
    for row, source in zip(rows, expected.values(), strict=True):
        assert row["tokens_per_second"] == source["tokens_per_second"]["median"]
        assert row["speedup"] == source["ratios"]["plain"]["median"]
        assert row["acceptance_length"] == source["acceptance_length"]
        assert row["workload"] == "words, 2 prompts" and "float32" in row["hardware"]
    (own,) = [
        row for row in read_published_rows(measured.coverage, measured.policy) if row["system"] == "this artifact"
    ]
    (source,) = [
        row
        for row in json.loads(measured.coverage.read_text())["results"]
        if row["domain"] is None and "ranking" in row["policy"] and row["policy"].endswith("size=32")
    ]
    assert own["mass"] == source["figures"]["mass"]["mean"] and own["shortlist_size"] == 32
    assert own["recall_at_10"] == source["figures"]["recall"]["mean"]


def test_a_new_row_replaces_the_one_of_the_same_conditions():
    old = [{"workload": "code", "system": "a", "speedup": 1.0}, {"workload": "code", "system": "b", "speedup": 2.0}]
    new = [{"workload": "code", "system": "a", "speedup": 3.0, "coverage": 0.5}, {"workload": "chat", "speedup": 4.0}]
    assert merge_results(old, new) == [new[0], old[1], new[1]]


def test_annotating_keeps_the_tensors_and_replaces_the_configuration_in_one_step(artifact, monkeypatch):
    before = files_of(artifact)
    replaced = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda source, target: (replaced.append(Path(target).name), replace(source, target))
    )
    config = annotate_artifact(artifact, results=[{"workload": "code", "speedup": 2.0}], provenance={"seed": 3})
    assert replaced == ["config.json", "README.md"]
    assert read_artifact(artifact)[0] == config and config.results == [{"workload": "code", "speedup": 2.0}]
    assert "| code | 2 |" in (artifact / "README.md").read_text()
    assert (artifact / "model.safetensors").read_bytes() == before["model.safetensors"]
    for results, provenance in (([{"speedup": 1}], None), ([], {"log": "x" * 2**20}), ([], {"at": float("nan")})):
        after = files_of(artifact)
        with pytest.raises((ArtifactError, ConfigurationError)):
            annotate_artifact(artifact, results=results, provenance=provenance)
        assert files_of(artifact) == after


# --- The card ---


def test_training_metrics_have_tables_and_places_in_the_metadata():
    metrics = {
        "cluster_recall": 0.934,
        "expected_shortlist_size": 10231.5,
        "by_budget": [{"clusters": 8, "mass": 0.95}, {"clusters": 16, "mass": 0.985}],
        "compared": [],
    }
    provenance = {"command": "hf-dynspec train router ```\n# x", "metrics": metrics, "seed": 0}
    card = render_card(DynSpecConfig(PolicyConfig("router"), provenance=provenance))
    assert "| cluster recall | 0.934 |\n| expected shortlist size | 10,232 |" in card
    assert "By budget:\n\n| clusters | mass |\n| --- | --- |\n| 8 | 0.95 |\n| 16 | 0.985 |" in card
    assert "```bash\nhf-dynspec train router # x\n```" in card and card.count("```") % 2 == 0
    assert "| seed | 0 |" in card and "metrics." not in card and "compared" not in card
    metadata = ModelCard(card).data.to_dict()
    assert {"router", "dynaspec"} <= set(metadata["tags"])
    (held_out,) = metadata["model-index"][0]["results"]
    assert {metric["type"]: metric["value"] for metric in held_out["metrics"]} == {
        "cluster_recall": 0.934,
        "expected_shortlist_size": 10232,
    }


def test_the_metadata_claims_only_what_the_artifact_did(measured):
    rows = read_published_rows(measured.bench, measured.policy)
    card = render_card(DynSpecConfig(PolicyConfig("frequency"), results=rows))
    results = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    claimed = [metric["value"] for result in results for metric in result["metrics"] if metric["type"] == "speedup"]
    own = [row["speedup"] for row in rows if row["system"].split(" · ")[0] == "this artifact"]
    assert sorted(claimed) == sorted(float(f"{value:.4g}") for value in own) and len(own) == 4
    # What all rows share stands above the table once.
    assert card.count("words, 2 prompts; ") == 1 and "### Benchmark" in card and "| plain generate |" in card


def test_tags_name_the_policies_inside_a_union():
    policy = UnionShortlist(FrequencyShortlist(), UnionShortlist(InContextShortlist()))
    tags = ModelCard(render_card(DynSpecConfig(PolicyConfig(policy.name, policy.settings())))).data.tags
    assert {"union", "frequency", "fr-spec", "in-context", "microspec"} <= set(tags) and len(tags) == len(set(tags))


# --- From an assistant ---


def test_an_assistant_is_saved_and_pushed_in_shards(hub, measured, tmp_path, monkeypatch):
    target = tiny(vocabulary=SIZE)
    policy = UnionShortlist(*(FrequencyShortlist(torch.arange(SIZE).roll(shift), size=16) for shift in (1, 2)))
    options = {"target": target, "tokenizer": word_tokenizer(SIZE)}
    assistant = DynSpecAssistant(perturbed(target), policy, **options)
    assistant.save_pretrained(tmp_path / "saved", max_shard_size=1)
    api = HfApi(endpoint=hub.endpoint, token="secret")
    assistant.push_to_hub(REPO, max_shard_size=1, api=api)
    for folder in (tmp_path / "saved", push_target := tmp_path / "pushed"):
        if folder == push_target:
            folder.mkdir()
            for name, data in published(hub).items():
                (folder / name).write_bytes(data)
        assert set(weights_files(2)) <= set(os.listdir(folder))
        assistant.unbind()
        loaded = DynSpecAssistant.from_pretrained(folder, drafter=perturbed(target), **options)
        assert loaded.policy.tensors().keys() == policy.tensors().keys()
        loaded.unbind()
    with pytest.raises(ArtifactError):
        push_artifact(tmp_path / "nothing", REPO, api=api)


@pytest.mark.parametrize(
    "wrong", [{"provenance": "some texts"}, {"provenance": [1]}, {"results": "fast"}, {"results": [3]}], ids=str
)
def test_what_is_no_provenance_or_result_is_refused(wrong, tmp_path):
    assistant = DynSpecAssistant(tiny("llama"), target=tiny("llama"), tokenizer=word_tokenizer())
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        assistant.save_pretrained(tmp_path / "saved", **wrong)
    assert not (tmp_path / "saved").exists()
