"""The experiments on online alignment, at their smallest, on the embedded pair."""

import json
import logging as python_logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from models import BOS, tiny, word_tokenizer
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from alignment_experiments import EXPERIMENTS
from alignment_figures import write_figure
from alignment_gains import gains, shown
from online_alignment import POCKET, app, read_conversations, table_of
from tuned_target import read_texts

from hf_dynspec.errors import DynSpecError

CARD = Path(__file__).parents[2] / "model_cards" / "online-alignment.md"
NEW = "new texts"
SMALL = ("--requests", "2", "--new-tokens", "8", "--tuning-steps", "1")


def run(*arguments: str) -> Result:
    try:
        return CliRunner().invoke(app, arguments)
    finally:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where two experiments have been run."""
    out = tmp_path_factory.mktemp("alignment")
    done = run("--out", str(out), *SMALL, "--experiment", "switch", "--experiment", "memory")
    assert done.exit_code == 0, done.exception or done.output
    assert "acceptance length relative to frozen" in done.stdout
    assert f"{out}: results.json, and switch, memory as .png" in done.stdout
    assert not done.stderr
    return out


def experiments(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["experiments"]


def test_every_system_answers_every_request_and_is_drawn(folder):
    measured = experiments(folder)
    assert set(measured["switch"]) == {"frozen", "default", "paper()", "osd()"}
    for result in measured["switch"].values():
        assert [one["kind"] for one in result["requests"]] == ["known texts"] * 2 + [NEW] * 2
        assert all(1 <= one["acceptance_length"] <= 8 for one in result["requests"])
    assert measured["switch"]["frozen"]["alignment"] is None
    assert measured["switch"]["default"]["alignment"]["updates"] == 4
    for name in ("switch", "memory"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_low_rank_training_holds_less_than_that_of_all_weights(folder):
    held = {name: result["alignment"]["training_bytes"] for name, result in experiments(folder)["memory"].items()}
    assert 0 < held["paper()"] < held["default"] < held["osd()"]


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(folder):
    before = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    kept = before["experiments"]["memory"].pop("default")
    (folder / "results.json").write_text(json.dumps(before), encoding="utf-8")
    tuned = (folder / "tuned-target" / "model.safetensors").stat().st_mtime_ns
    assert run("--out", str(folder), *SMALL, "--experiment", "memory").exit_code == 0
    after = experiments(folder)
    assert after["switch"] == before["experiments"]["switch"]
    assert after["memory"]["osd()"] == before["experiments"]["memory"]["osd()"]
    lengths = [[one["acceptance_length"] for one in run["requests"]] for run in (kept, after["memory"]["default"])]
    assert lengths[0] == lengths[1]
    assert (folder / "tuned-target" / "model.safetensors").stat().st_mtime_ns == tuned


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_drawn_also_before_its_second_system(folder, name, tmp_path):
    measured = experiments(folder)["memory" if name == "memory" else "switch"]
    alone = dict(list(measured.items())[:1])
    sizes = []
    for index, systems in enumerate((alone, measured)):
        write_figure(tmp_path / f"{index}.png", name, systems, NEW)
        sizes.append((tmp_path / f"{index}.png").stat().st_size)
    assert sizes[0] < sizes[1]


def test_tables_show_every_figure_whole_at_80_columns(folder):
    measured = experiments(folder)["switch"]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table_of("switch", measured))
    shown_table = capture.get()
    for result in measured.values():
        if result["alignment"] is not None:
            assert f"{result['alignment']['training_bytes']:,}" in shown_table
    assert "…" not in shown_table and max(map(len, shown_table.splitlines())) <= 80


def test_every_request_begins_as_the_tokenizer_begins_texts(tmp_path):
    """Targets such as Gemma say nothing of use without the token that their texts begin with."""
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    (tmp_path / "text.txt").write_text(" ".join(f"t{number}" for number in range(3, 213)))
    pieces = read_texts([tmp_path / "text.txt"], tokenizer, 16, seed=0)
    whole = torch.cat([pieces.training, pieces.held_out])
    assert whole.shape == (14, 16) and (whole[:, 0] == BOS).all()
    assert sorted(whole[:, 1:].flatten().tolist()) == list(range(3, 213))
    (tmp_path / "turns.jsonl").write_text(json.dumps({"turns": ["t3 t4", "t5"]}))
    for file in (None, tmp_path / "turns.jsonl"):
        for talk in read_conversations(file, tokenizer, whole):
            assert [BOS in turn for turn in talk] == [True, *(False for _ in talk[1:])]


def test_long_texts_are_cut_without_a_warning_of_the_tokenizer(tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target", model_max_length=8)
    (tmp_path / "text.txt").write_text("a text of many words, " * 40)
    logger = python_logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(read_texts([tmp_path], tokenizer, 16, seed=0).training)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


# What was measured ---------------------------------------------------------------------------------------------------


def results_on_the_card() -> Iterator[dict]:
    """What each experiment measured, as `gains` takes it."""
    for run in json.loads(CARD.with_suffix(".json").read_text(encoding="utf-8")).values():
        for experiment in run["experiments"].values():
            yield {
                name: {
                    "requests": [
                        {"kind": kind, "acceptance_length": length}
                        for kind, length in zip(experiment["kinds"], system["acceptance_length"], strict=True)
                    ]
                }
                for name, system in experiment["systems"].items()
            }


def test_the_gains_on_the_card_are_those_of_its_results():
    """Each of them: of all requests, of those of one kind of text, or of the kinds that both models know."""
    measured_gains = set()
    for measured in results_on_the_card():
        kinds = {one["kind"] for one in next(iter(measured.values()))["requests"]}
        for chosen in (None, kinds - {NEW}, *({kind} for kind in kinds)):
            if chosen != set():
                measured_gains |= {shown(one) for one in gains(measured, chosen).values()}
    told = re.findall(r"[+-]\d+\.\d% ± \d+\.\d", CARD.read_text(encoding="utf-8").replace("−", "-"))
    assert len(told) > 20 and not set(told) - measured_gains


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--experiment", "swtich"), "swtich is none of switch, ablation"),
        (("--drafter", "nowhere/drafter"), "the drafter nowhere/drafter cannot be loaded"),
        (("--texts", "nowhere/texts"), "nowhere/texts"),
        (("--prompts", "nowhere/prompts"), "nowhere/prompts"),
        (("--turns", "nowhere/turns"), "nowhere/turns"),
        (("--ranking", "nowhere/ranking"), "nowhere/ranking"),
        (("--requests", "1"), "--requests"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_tuned(tmp_path, arguments, problem):
    done = run("--out", str(tmp_path / "out"), *arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, (SystemExit, DynSpecError))
    said = f"{done.output} {done.exception}".replace("│", " ")
    assert problem in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def test_a_drafter_of_another_family_is_refused_before_anything_is_tuned(tmp_path):
    tiny().save_pretrained(tmp_path / "drafter")
    word_tokenizer().save_pretrained(tmp_path / "drafter")
    done = run("--out", str(tmp_path / "out"), *SMALL, "--drafter", str(tmp_path / "drafter"))
    assert isinstance(done.exception, DynSpecError) and "tokenizer" in str(done.exception)
    assert not (tmp_path / "out").exists()
