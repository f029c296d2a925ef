"""Evaluations: what suites read, what a run leaves and how it goes on, tables, figures, and many processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from launched_processes import PARTED, launch, launch_command
from matplotlib.figure import Figure
from pocket import POCKET, has_head_product
from pyarrow import parquet
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_dynspec import loading
from hf_dynspec.commands import app
from hf_dynspec.errors import ArtifactError, ConfigurationError, DynSpecError
from hf_dynspec.evaluation import pair
from hf_dynspec.evaluation.bench.systems import HEAD_PRODUCT
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.evaluation.prompts import WorkloadError, WorkloadPrompt
from hf_dynspec.evaluation.suites import charts
from hf_dynspec.evaluation.suites.data import SUITES, read_suite, streams
from hf_dynspec.evaluation.suites.dialogue import Dialogue, require_room
from hf_dynspec.evaluation.suites.figures import Evaluation, by_turn, identity, summarize
from hf_dynspec.evaluation.suites.methods import make_methods
from hf_dynspec.evaluation.suites.paper_tables import GIVEN, PAPER_TABLES, Row, table_methods, why_left_out
from hf_dynspec.evaluation.suites.runner import Share
from hf_dynspec.evaluation.suites.runs import EXPECTED, RUNS, SETTINGS, TIMED, RunFolder, key_of
from hf_dynspec.files import append_json_line, read_whole_lines
from hf_dynspec.protocol import VocabularyInfo

ROOT = Path(__file__).parents[2]
PAIR = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", "--threads", 1)
FAST = ("--max-new-tokens", 6, "--profile-prompts", 1, "--no-rivals", "--no-transformers-assisted")
FREQUENCY, ALIGNED = "frequency:size=512", "frequency:size=512, aligned (default)"
TEXTS = (
    "def read_lines(filename):\n    with open(filename) as",
    "class Node:\n    def __init__(self, name",
    "import ",
)


def systems() -> list[str]:
    return ["plain", *([HEAD_PRODUCT] if has_head_product() else []), FREQUENCY, ALIGNED]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def evaluate(*words: object) -> Any:
    return invoke("evaluate", *PAIR, *FAST, *words)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two domains of two prompts each, and a conversation."""
    folder = tmp_path_factory.mktemp("data")
    for domain, shift in (("code", 0), ("more", 1)):
        rows = [{"question_id": n, "category": domain, "turns": [TEXTS[(n + shift) % len(TEXTS)]]} for n in range(2)]
        write_rows(folder / f"{domain}.jsonl", rows)
    turns = [
        {"question_id": n, "category": "code", "turns": [TEXTS[n], "\n    return ", "\n\ndef "]} for n in range(2)
    ]
    write_rows(folder / "turns.jsonl", turns)
    return folder


def words_of_run(data: Path, out: Path) -> list[object]:
    files = ("--data", data / "code.jsonl", data / "more.jsonl")
    return [
        *files,
        "--policy",
        FREQUENCY,
        "--align",
        "default",
        "--temperature",
        0,
        "--temperature",
        0.7,
        "--out",
        out,
    ]


@pytest.fixture(scope="module")
def evaluated(data, tmp_path_factory) -> Path:
    """The folder of an evaluation that nobody stopped."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    result = evaluate(*words_of_run(data, out))
    assert result.exit_code == 0, result.exception
    return out


def lines_of(folder: Path) -> list[dict]:
    return [line for line in read_whole_lines(folder / RUNS) if line["kind"] != "session"]


def without_times(value: Any) -> Any:
    """A line with all that clocks say left out."""
    if isinstance(value, dict):
        timed = ("seconds", "generation_seconds", "overhead", "longest_swap")
        return {name: without_times(one) for name, one in value.items() if name not in timed}
    return [without_times(one) for one in value] if isinstance(value, list) else value


# What a run leaves ---------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_line_for_everything(evaluated):
    session, *_ = read_whole_lines(evaluated / RUNS)
    assert session["kind"] == "session" and session["provenance"]["command"][:2] == ["hf-dynspec", "evaluate"]
    assert [one["label"] for one in session["systems"]] == systems()
    lines = lines_of(evaluated)
    keys = [key_of(line) for line in lines]
    prompts = [f"{domain}/{n}" for domain in ("code", "more") for n in range(2)]
    timed = [(TIMED, p, s, t, 0) for t in (0.0, 0.7) for p in prompts for s in systems()]
    # What learns is not studied, as it would learn of that.
    studied = [(k, p, FREQUENCY, t, 0) for k in ("coverage", "profile") for t in (0.0, 0.7) for p in prompts[::2]]
    assert keys == [*timed, *studied]
    by_key = dict(zip(keys, lines, strict=True))
    for line in lines:
        (turn,) = line["turns"]
        assert len(turn["tokens"]) == 6 and turn["seconds"] > 0 and turn["rounds"] >= 1
    assert all(by_key[TIMED, p, "plain", 0.0, 0]["turns"][0]["rounds"] == 6 for p in prompts)
    assert all(("alignment" in line) == (line["system"] == ALIGNED) for line in lines)
    assert not list(evaluated.glob("runs-of-process-*"))


def test_greedy_tokens_are_those_of_plain_generate(evaluated):
    tokenizer, target = loading.load_tokenizer(POCKET / "target"), loading.load_model(POCKET / "target", device="cpu")
    first = lines_of(evaluated)[0]
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    output = target.float().generate(**inputs, max_new_tokens=6, do_sample=False)
    assert first["turns"][0]["tokens"] == output[0, inputs["input_ids"].shape[1] :].tolist()
    evaluation = Evaluation(evaluated)
    assert evaluation.is_complete and evaluation.domains == ["code", "more"]
    for system in systems():
        assert identity(evaluation, system) == (4, {})


def test_figures_are_those_of_the_lines(evaluated):
    evaluation = Evaluation(evaluated)
    lines = [one for one in lines_of(evaluated) if key_of(one)[0] == TIMED and one["temperature"] == 0]
    own = [line for line in lines if line["system"] == FREQUENCY]
    figures = summarize(evaluation, 0.0, FREQUENCY)
    seconds = sum(line["turns"][0]["seconds"] for line in own)
    assert figures["tokens_per_second"].mean == pytest.approx(24 / seconds)
    drafting = [line["drafting"] for line in own]
    length = sum(one["tokens"] for one in drafting) / sum(one["rounds"] for one in drafting)
    assert figures["acceptance_length"].mean == pytest.approx(length)
    assert figures["active_vocabulary"].mean == 512 and 0 < figures["coverage"].mean < 1
    assert figures["draft_ms"].mean > 0 and figures["verification_ms"].mean > 0
    assert summarize(evaluation, 0.0, "plain")["acceptance_length"].mean == 1.0
    assert summarize(evaluation, 0.0, ALIGNED)["training_bytes"].mean > 0
    text = (evaluated / "tables.md").read_text()
    assert f"| {FREQUENCY} | {24 / seconds:.1f} ± " in text and "## Temperature 0.7, all tokens" in text
    assert "### Acceptance length by domain" in text and "Not complete" not in text


def test_a_difference_from_plain_decoding_is_reported(evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "out")
    lines = read_whole_lines(tmp_path / "out" / RUNS)
    changed = next(line for line in lines if line.get("system") == FREQUENCY)
    changed["turns"][0]["tokens"][2] += 1
    write_rows(tmp_path / "out" / RUNS, lines)
    assert identity(Evaluation(tmp_path / "out"), FREQUENCY) == (4, {"code/0": 2})
    result = invoke("plot", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "differs from plain greedy decoding on code/0, from new token 2 on" in text and "| 3/4 |" in text


def test_plotting_runs_nothing_and_draws_the_same(evaluated, tmp_path, monkeypatch):
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    shutil.copytree(evaluated, tmp_path / "out")
    drawn = sorted([*(tmp_path / "out").glob("*.svg"), *(tmp_path / "out").glob("*.png"), tmp_path / "out/tables.md"])
    before = {path: path.read_bytes() for path in drawn}
    names = {path.stem for path in drawn}
    assert names == {
        "speed-by-domain",
        "acceptance-by-domain",
        "acceptance-by-size",
        "round-time",
        "coverage",
        "tables",
    }
    for path in drawn:
        path.unlink()
    result = invoke("plot", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    assert {path: path.read_bytes() for path in drawn} == before
    # Each is named once, however many formats it has.
    said = " ".join(result.output.split())
    assert all(said.count(name) == 1 for name in names - {"coverage"}) and "as .png and .svg" in said


class WithRival(Evaluation):
    """An evaluation whose first assistant is somebody else's, which is in figures of speed alone."""

    @property
    def assistants(self) -> list[str]:
        return super().assistants[1:]


def test_a_system_looks_the_same_in_all_figures(evaluated):
    looks: dict[str, set] = {}
    for draw in (charts._speed_by_domain, charts._acceptance_by_domain, charts._acceptance_by_size):
        figure = Figure()
        assert draw(figure, WithRival(evaluated)), draw.__name__
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                line = handle.lines[0]
                looks.setdefault(label, set()).add((line.get_color(), line.get_marker()))
    assert len(looks) >= 2 and all(len(found) == 1 for found in looks.values())
    assert len(set.union(*looks.values())) == len(looks)


# Going on ------------------------------------------------------------------------------------------------------------


# So that it is killed there and not later, however long whoever kills it is held up.
WRITE_NO_MORE_THAN_SEVENTEEN_LINES = """
import itertools, time
from hf_dynspec.commands import main
from hf_dynspec.evaluation.suites import runs

append, written = runs.append_json_line, itertools.count(1)

def append_and_stop(*arguments):
    append(*arguments)
    if next(written) == 17:
        time.sleep(1e6)

runs.append_json_line = append_and_stop
main()
"""


@pytest.mark.process
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been_killed(data, evaluated, tmp_path):
    words = [*PAIR, *FAST, *words_of_run(data, tmp_path / "out")]
    command = [sys.executable, "-c", WRITE_NO_MORE_THAN_SEVENTEEN_LINES, "evaluate", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        part = tmp_path / "out" / "runs-of-process-0.jsonl"
        until = time.monotonic() + 900
        # Into the second temperature, where the aligned drafter has learnt something.
        while not part.exists() or part.read_bytes().count(b"\n") < 17:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    done = part.read_bytes().count(b"\n") - 1
    assert done == 16
    with part.open("ab") as file:
        file.write(b'{"kind":"timed","prompt":"code/1","sys')
    kept = {key_of(line): line for line in read_whole_lines(part)[1:]}
    result = evaluate(*words_of_run(data, tmp_path / "out"))
    assert result.exit_code == 0, result.exception
    assert f"out: goes on after {len(kept)} measurements" in result.stderr
    after = {key_of(line): line for line in lines_of(tmp_path / "out")}
    # What was done is not done again, but for what a drafter learnt and lost.
    again = [key for key in kept if after[key] != kept[key]]
    assert {key[2] for key in again} <= {ALIGNED} and len(again) < len(kept) / 2
    expected = {key_of(line): without_times(line) for line in lines_of(evaluated)}
    assert {key: without_times(line) for key, line in after.items()} == expected


def test_a_run_that_is_over_loads_nothing_and_is_drawn_anew(data, evaluated, tmp_path, monkeypatch):
    shutil.copytree(evaluated, tmp_path / "out")
    before = (tmp_path / "out" / RUNS).read_bytes()
    (tmp_path / "out" / "coverage.png").unlink()
    with monkeypatch.context() as patches:
        patches.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
        result = evaluate(*words_of_run(data, tmp_path / "out"))
    assert result.exit_code == 0, result.exception
    assert "all of it was measured before; nothing is run" in result.stderr and "0/0" not in result.stderr
    assert (tmp_path / "out" / RUNS).read_bytes() == before
    assert (tmp_path / "out" / "coverage.png").exists()


def test_a_line_that_was_deleted_is_measured_again(data, evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "out")
    session, *lines = read_whole_lines(tmp_path / "out" / RUNS)
    write_rows(tmp_path / "out" / RUNS, [session, *lines[1:]])
    result = evaluate(*words_of_run(data, tmp_path / "out"))
    assert result.exit_code == 0, result.exception
    assert list(map(key_of, lines_of(tmp_path / "out"))) == list(map(key_of, lines))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--max-new-tokens", 7), "--max-new-tokens was 6 and is 7; choose"),
        (("--temperature", 0.1), "--temperature was 0.0, 0.7 and is 0.0, 0.7, 0.1; choose"),
        (("--seed", 1), "--seed was 0 and is 1; choose"),
        (("--policy", "full"), "--policy changed; choose"),
        (("--limit", 1), "--limit was not given and is 1; choose"),
    ],
)
def test_a_folder_of_other_settings_is_refused(data, evaluated, monkeypatch, changed, said):
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    before = (evaluated / RUNS).read_bytes()
    result = evaluate(*words_of_run(data, evaluated), *changed)
    assert isinstance(result.exception, ConfigurationError)
    assert "holds an evaluation with other settings: " in str(result.exception) and said in str(result.exception)
    assert (evaluated / RUNS).read_bytes() == before


def test_changed_prompts_are_other_settings(data, evaluated, tmp_path):
    for path in data.iterdir():
        shutil.copy(path, tmp_path)
    with (tmp_path / "code.jsonl").open("a") as file:
        file.write("\n")
    result = evaluate(*words_of_run(tmp_path, evaluated))
    assert "--data changed" in str(result.exception)


def test_a_torn_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / RUNS
    line = {"kind": TIMED, "prompt": "a", "system": "plain", "temperature": 0.0, "repeat": 0, "turns": []}
    append_json_line(path, {"kind": "session", "systems": [{"label": "plain"}]})
    append_json_line(path, line)
    whole = path.read_bytes()
    for torn in (b'{"kind":"ti', b"\xff\xfe", b"{}x\n"):
        path.write_bytes(whole + torn)
        folder = RunFolder(tmp_path)
        folder.put_together(["a"])
        assert list(folder.lines.values()) == [line] and path.read_bytes() == whole
    path.write_bytes(b"no JSON\n" + whole)
    with pytest.raises(ArtifactError, match=r"runs\.jsonl, line 1.*delete that line"):
        RunFolder(tmp_path).read()


def test_lines_of_many_processes_are_put_together_in_one_order(tmp_path):
    def line(prompt: str, system: str, seed: int = 0) -> dict:
        return {"kind": TIMED, "prompt": prompt, "system": system, "temperature": 0.0, "repeat": 0, "seed": seed}

    folder = RunFolder(tmp_path)
    folder.writer(1)(line("b", "plain"))
    folder.writer(0)({"kind": "session", "systems": [{"label": "plain"}, {"label": "full"}]})
    folder.writer(0)(line("a", "full"))
    folder.writer(0)(line("a", "plain"))
    # What was measured anew counts.
    folder.writer(0)(line("a", "plain", seed=1))
    folder.put_together(["a", "b"])
    _, *found = read_whole_lines(tmp_path / RUNS)
    assert found == [line("a", "plain", seed=1), line("a", "full"), line("b", "plain")]
    assert [path.name for path in tmp_path.iterdir()] == [RUNS]


# Many processes ------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_number_of_processes_changes_nothing_but_times(data, evaluated, tmp_path):
    run = launch_command(tmp_path, "evaluate", *PAIR, *FAST, *words_of_run(data, tmp_path / "out"))
    assert run.stdout.count("tables.md") == 1, "only the first process reports"
    assert list(map(without_times, lines_of(tmp_path / "out"))) == list(map(without_times, lines_of(evaluated)))
    (session,) = Evaluation(tmp_path / "out").folder.sessions
    assert session["processes"] == 2


@pytest.mark.process
def test_a_batch_is_the_same_whatever_the_number_of_processes(tmp_path):
    script = ROOT / "examples" / "batch_generation.py"
    words = ("--max-new-tokens", 6, "--temperature", 0.8, "--out")
    run = launch(script, *words, tmp_path / "two.jsonl")
    assert "6 prompts, 2 processes" in run.stdout
    command = [sys.executable, str(script), *map(str, words), str(tmp_path / "one.jsonl")]
    subprocess.run(command, check=True, capture_output=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    lines = read_whole_lines(tmp_path / "one.jsonl")
    assert [line["prompt"] for line in lines] == [f"prompts/{n}" for n in range(1, 7)]
    assert all(line["tokens"] == 6 for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"]


# What is imported after the processes are connected can hold on to what connects them.
IMPORTS_LATE = """
from hf_dynspec.commands.launched import Launched, part_from_launched

launched = Launched()
import torch.distributed.nn
launched.wait()
part_from_launched()
require_parted()
"""


def test_what_is_imported_late_does_not_keep_processes_connected(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PARTED + IMPORTS_LATE)
    launch(script)


def test_shares_are_everything_once():
    units = list(range(11))
    for count in (1, 2, 3, 20):
        dealt = [list(Share(index, count).of(units)) for index in range(count)]
        assert sorted(unit for one in dealt for unit in one) == units


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("domains", [[0, 2], [1, 3]]),
        ("spec-bench", [[0, 2], [1, 3]]),
        ("topic-switch", [[0, 1, 2, 3]]),
        ("multi-turn", [[0], [1], [2], [3]]),
    ],
)
def test_what_is_learnt_reaches_as_far_as_the_suite_says(suite, expected):
    prompts = [WorkloadPrompt(str(n), "ab"[n % 2], "text") for n in range(4)]
    assert streams(suite, prompts) == expected


# Conversations -------------------------------------------------------------------------------------------------------


def test_the_models_own_answers_are_put_back_in(data, tmp_path):
    words = ("--suite", "multi-turn", "--data", data / "turns.jsonl", "--policy", FREQUENCY, "--out", tmp_path / "out")
    result = evaluate(*words)
    assert result.exit_code == 0, result.exception
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    line = lines_of(tmp_path / "out")[0]
    text = tokenizer(TEXTS[0])["input_ids"]
    turns = [TEXTS[0], "\n    return ", "\n\ndef "]
    for number, turn in enumerate(line["turns"]):
        if number:
            text = [*text, *tokenizer(turns[number])["input_ids"]]
        assert turn["read"] == len(text)
        text = [*text, *turn["tokens"]]
    evaluation = Evaluation(tmp_path / "out")
    assert identity(evaluation, FREQUENCY) == (2, {})
    assert len(by_turn(evaluation, 0.0, FREQUENCY)) == 3 and by_turn(evaluation, 0.0, "plain") == [1.0] * 3
    assert "### Acceptance length by turn" in (tmp_path / "out/tables.md").read_text()
    assert (tmp_path / "out/course.png").stat().st_size > 0


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_chat_template_holds_every_turn_and_answer():
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    tokenizer.chat_template = CHAT
    prompt = WorkloadPrompt("a", "code", "import os", ("and sys",))
    dialogue = Dialogue(prompt, tokenizer, [5], use_chat_template=True)
    assert tokenizer.decode(dialogue.next_turn()) == "<user>import os<a>" and not dialogue.is_over
    dialogue.answer([*tokenizer("def f")["input_ids"], 5])
    assert tokenizer.decode(dialogue.next_turn()) == "<user>import os<assistant>def f<user>and sys<a>"
    assert dialogue.is_over


def test_conversations_that_may_grow_too_long_are_refused():
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    prompt = WorkloadPrompt("a/1", "code", "import os", ("import sys", "import re"))
    parts = [len(tokenizer(turn)["input_ids"]) for turn in prompt.turns]
    needed = sum(parts) + 2 * 10
    require_room(Dialogue(prompt, tokenizer, ()), "a/1", needed, 10)
    with pytest.raises(WorkloadError, match=rf"a/1 may grow to {needed} tokens in 3 turns"):
        require_room(Dialogue(prompt, tokenizer, ()), "a/1", needed - 1, 10)
    require_room(Dialogue(prompt, tokenizer, (), truncate_to=8), "a/1", 8, 10)


# Reading -------------------------------------------------------------------------------------------------------------


def test_spec_bench_is_read_with_its_turns_and_mt_bench_as_one(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 91, "category": "stem", "turns": ["c", "d"]},
        {"question_id": 241, "category": "translation", "turns": ["e"], "reference": ["f"]},
    ]
    prompts = read_suite("spec-bench", [write_rows(tmp_path / "question.jsonl", rows)])
    assert [(one.identifier, one.domain, one.turns) for one in prompts] == [
        ("question/81", "mt_bench", ("a", "b")),
        ("question/91", "mt_bench", ("c", "d")),
        ("question/241", "translation", ("e",)),
    ]


SPEED_BENCH = {
    "question_id": ["x1", "x2"],
    "category": ["coding", "rag"],
    "sub_category": [None, "hybrid"],
    "turns": [["a"], ["b", "c"]],
    "source": ["s", "s"],
    "src_id": ["1", "2"],
    "difficulty": [None, None],
    "multiturn": [False, True],
}


def test_speed_bench_is_read_from_its_parquet_files(tmp_path):
    parquet.write_table(pyarrow.table(SPEED_BENCH), tmp_path / "test.parquet")
    prompts = read_suite("speed-bench", [tmp_path])
    assert [(one.identifier, one.domain, one.turns) for one in prompts] == [
        ("test/x1", "coding", ("a",)),
        ("test/x2", "rag", ("b", "c")),
    ]


def test_texts_that_speed_bench_has_not_fetched_are_refused(tmp_path):
    missing = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{article}"
    parquet.write_table(pyarrow.table({**SPEED_BENCH, "turns": [["a"], [missing]]}), tmp_path / "test.parquet")
    with pytest.raises(WorkloadError, match=r"test\.parquet, line 2: holds a placeholder.*prepare_data\.py"):
        read_suite("speed-bench", [tmp_path / "test.parquet"])


@pytest.mark.parametrize(
    ("suite", "row", "problem"),
    [
        ("spec-bench", {"question_id": 1, "turns": ["a"]}, "line 2: lacks the field 'category', which Spec-Bench has"),
        ("spec-bench", {"category": "qa", "prompt": "a"}, "lacks the fields 'question_id', 'turns', which Spec-Bench"),
        ("spec-bench", {"question_id": 1, "category": "qa", "turns": "a"}, "line 2: 'turns' is a list of texts"),
        (
            "spec-bench",
            {"question_id": 1, "category": "qa", "turns": ["a"], "source": "b", "multiturn": False},
            "line 2: is a row of SPEED-Bench; read it with --suite speed-bench",
        ),
        ("spec-bench", {"question_id": 1, "category": "qa", "turns": ["a", ""]}, "line 2: a turn is empty"),
        ("domains", {"question_id": 1, "category": "qa", "turns": "a", "x": 1}, None),
        ("domains", {"question": "a"}, "line 2.*a row needs turns"),
        ("domains", {"question_id": 0, "category": "qa", "turns": ["a"]}, "line 2: a second prompt"),
        ("multi-turn", {"question_id": 1, "category": "qa", "turns": ["a"]}, "line 2: turns has 1 turn"),
        ("topic-switch", {"question_id": 1, "category": "qa", "turns": ["a"]}, "needs prompts of 2 categories"),
    ],
)
def test_rows_of_another_kind_are_refused_by_their_line(tmp_path, suite, row, problem):
    first = {"question_id": 0, "category": "qa", "turns": ["a", "b"]}
    path = write_rows(tmp_path / "rows.jsonl", [first, row])
    if problem is None:
        assert len(read_suite(suite, [path])) == 2
        return
    with pytest.raises(WorkloadError, match=problem):
        read_suite(suite, [path])


SPEED_BENCH_ROW = {name: column[0] for name, column in SPEED_BENCH.items()}


@pytest.mark.parametrize("field", ["question_id", "category", "turns", "source", "multiturn"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_no_speed_bench_is_refused_by_the_field_that_it_lacks(tmp_path, kind, field):
    whole = [SPEED_BENCH_ROW, {**SPEED_BENCH_ROW, "question_id": "x2"}]
    lacking = [{("text" if name == field == "turns" else name): one[name] for name in one} for one in whole]
    for one in lacking:
        one.pop(field, None)
    path, number = tmp_path / f"rows.{kind}", 2
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(lacking), path)
        number = 1
    else:
        write_rows(path, [whole[0], lacking[1]])
    problem = rf"rows\.{kind}, line {number}: lacks the field '{field}', which SPEED-Bench has in every row"
    with pytest.raises(WorkloadError, match=problem):
        read_suite("speed-bench", [path])


def test_files_of_another_suite_are_refused_before_models_are_loaded(data, tmp_path, monkeypatch):
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    result = evaluate("--suite", "speed-bench", "--data", data / "code.jsonl", "--out", tmp_path / "out")
    problem = "code.jsonl, line 1: lacks the fields 'source', 'multiturn', which SPEED-Bench has"
    assert problem in str(result.exception)
    assert not (tmp_path / "out").exists()


# Tables of papers ----------------------------------------------------------------------------------------------------


def test_every_table_says_what_it_runs():
    given = {name: f"path/to/{name}" for name in GIVEN}
    for name, table in PAPER_TABLES.items():
        assert table.suite in SUITES and (table.by_domain or table.overall), name
        labels = {row.label for row in table.rows}
        assert len(labels) == len(table.rows) and table.compared_with in {None, *labels}, name
        bare = table_methods(table, {})
        assert bare and all(parse_policy(one.policy) is not None for one in bare if "index" not in one.policy), name
        full = table_methods(table, given)
        left = [row.label for row in table.rows if row.policy and why_left_out(row, {}) is not None]
        assert {one.label for one in full} == {*(one.label for one in bare), *left}, name
        assert all("path/to" in one.policy for one in full if re.match("frequency|retrieval|router|coral", one.policy))


def test_a_table_is_measured_and_says_what_it_left_out(data, tmp_path):
    words = ("--table", "dynaspec-1", "--data", data / "code.jsonl", data / "more.jsonl", "--limit", 1)
    words += ("--expected-prompts", 2)
    result = evaluate(*words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    text = (tmp_path / "out/tables.md").read_text()
    assert text.startswith("# DynaSpec, table 1\n")
    assert "- DynaSpec: no --router was given." in text
    assert "DynaSpec is left out: no --router was given" in result.stderr
    assert "FR-Spec, 32k goes by the tokenizer's merge order: no --ranking was given" in result.stderr
    assert "goes on after" not in result.stderr
    full = re.search(r"^\| full vocabulary \|.*\|$", text, re.MULTILINE)[0].split(" | ")
    headings = re.search(r"^\| method \|.*\|$", text, re.MULTILINE)[0].split(" | ")
    assert headings[1:4] == ["code, acceptance length", "more, acceptance length", "average acceptance length"]
    assert headings[-1] == "vs full vocabulary |" and full[-1] == "1.000 |"
    # Acceptance lengths are of more prompts than speeds.
    assert "2 timed prompts and 4 with expectations of code, more;" in text and "†" not in text
    evaluation = Evaluation(tmp_path / "out")
    own, listed = (
        [summarize(evaluation, 0.0, label, one)["expected_length"].mean for one in ("code", "more")]
        for label in ("full vocabulary", "FR-Spec, 32k")
    )
    of_code = [one for one in lines_of(tmp_path / "out") if one["kind"] == EXPECTED and one["domain"] == "code"]
    of_full = [one for one in of_code if one["system"] == "full vocabulary"]
    assert len({one["prompt"] for one in of_full}) == len(of_full) == 2
    assert own[0] == pytest.approx(sum(one["acceptance_length"] for one in of_full) / 2)
    assert full[1:3] == [f"{one:.2f}" for one in own] and full[3].startswith(f"{sum(own) / 2:.2f} ± ")
    assert re.search(rf"\| FR-Spec, 32k \|.* {sum(listed) / sum(own):.3f} ± \d\.\d{{3}} \|$", text, re.MULTILINE)


def test_counted_lengths_are_means_over_prompts_as_expected_ones_are(evaluated):
    evaluation = Evaluation(evaluated)
    label = evaluation.assistants[0]
    drafting = [line["drafting"] for line in evaluation.compared(0.0, label)]
    lengths = [one["tokens"] / one["rounds"] for one in drafting]
    figures = summarize(evaluation, 0.0, label)
    assert len(lengths) > 2 and figures["counted_length"].mean == pytest.approx(sum(lengths) / len(lengths))
    assert figures["acceptance_length"].mean != pytest.approx(figures["counted_length"].mean)


def test_texts_that_end_at_once_are_left_out_and_aligned_rows_are_marked(data, evaluated, tmp_path, monkeypatch):
    texts = {one["prompt"]: one["turns"][0]["tokens"] for one in reversed(lines_of(evaluated)) if one["kind"] == TIMED}
    ends = next(token for token in texts["more/1"] if sum(token in text for text in texts.values()) == 1)

    def load(*words: object, **settings: object) -> Any:
        model = loading.load_model(*words, **settings)
        model.generation_config.eos_token_id = ends
        return model

    monkeypatch.setattr(pair, "load_model", load)
    rows = (Row("full vocabulary", "full"), Row("aligned", FREQUENCY, alignment="default"))
    table = replace(PAPER_TABLES["evospec-2"], rows=rows)
    monkeypatch.setitem(PAPER_TABLES, "evospec-2", table)
    rows = [{"question_id": n, "category": "short", "turns": [TEXTS[2 - n]]} for n in range(2)]
    words = ("--table", "evospec-2", "--data", data / "code.jsonl", write_rows(tmp_path / "short.jsonl", rows))
    words += ("--limit", 1, "--expected-prompts", 2, "--profile-prompts", 0, "--no-figures")
    result = evaluate(*words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    lines = lines_of(tmp_path / "out")
    assert {line["prompt"] for line in lines if line["kind"] == TIMED} == {"code/0"}
    expected = [(line["prompt"], line["system"]) for line in lines if line["kind"] == EXPECTED]
    assert expected == [(prompt, "full vocabulary") for prompt in ("code/0", "code/1", "short/1")]
    text = (tmp_path / "out/tables.md").read_text()
    assert "\n- 1 prompt of short: the text ends within 8 tokens.\n" in text
    assert "| method | code, tokens/s | short, tokens/s | average tokens/s |" in text
    # The acceptance length is the last column but one.
    lengths = {
        row: re.search(rf"^\| {row} \|.*\|$", text, re.MULTILINE)[0].split(" | ")[-2]
        for row in ("full vocabulary", "aligned")
    }
    assert "†" not in lengths["full vocabulary"] and lengths["aligned"].endswith(" †")
    assert "\n† counted in the timed runs" in text


def test_vocabtrim_is_a_row_where_what_the_target_generates_was_counted(data, tmp_path):
    counted = ("--from-target", POCKET / "target", "--prompts", data / "code.jsonl", "--max-new-tokens", 20)
    assert invoke("build", "frequency", *counted, "--out", tmp_path / "generated").exit_code == 0
    words = ("--table", "dynaspec-1", "--data", data / "more.jsonl", "--limit", 1, "--profile-prompts", 0)
    result = evaluate(*words, "--vocabtrim", tmp_path / "generated", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    methods = {one["label"]: one["policy"] for one in Evaluation(tmp_path / "out").settings["methods"]}
    assert "generated" in methods["VocabTrim, 32k"] and "generated" not in methods["FR-Spec, 32k"]
    assert "\n| VocabTrim, 32k | " in (tmp_path / "out/tables.md").read_text()


def test_position_aware_lists_are_as_large_on_average_as_in_the_paper():
    fixed, position_aware = table_methods(PAPER_TABLES["dynaspec-2"], {})
    vocabulary = VocabularyInfo(151_665, (151_643,), torch.device("cpu"))
    state = parse_policy(position_aware.policy).start(vocabulary)
    token, features = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1)
    sizes = [len(state.select(depth, token, features).ids()) for depth in range(5)]
    assert sum(sizes) / 5 == pytest.approx(31_739, rel=0.001)
    assert parse_policy(fixed.policy).size == 32_768


def test_recall_is_measured_along_given_texts(data, tmp_path, monkeypatch):
    table = PAPER_TABLES["evospec-6"]
    small = tuple(row for row in table.rows if row.policy is None or row.policy.startswith(("frequency", "hybrid")))
    monkeypatch.setitem(PAPER_TABLES, "evospec-6", type(table)(**{**vars(table), "rows": small, "recall_k": (10, 50)}))
    words = ("--table", "evospec-6", "--data", data / "code.jsonl", "--limit", 1, "--out", tmp_path / "out")
    words += ("--temperature", 0, "--temperature", 0.7)
    result = evaluate(*words)
    assert result.exit_code == 0, result.exception
    lines = read_whole_lines(tmp_path / "out" / RUNS)
    expected = [line for line in lines if line["kind"] == EXPECTED]
    assert sorted({line["repeat"] for line in expected}) == [10, 50]
    # Rounds are drawn for a policy that learns from them, and for the others with the same luck, to compare.
    draws = {(line["temperature"], line["system"]): (line["draws"], "drawn_length" in line) for line in expected}
    hybrid = "hybrid (this package's default)"
    assert draws[0.7, "FR-Spec, 32k"] == (0, True) and draws[0.7, hybrid] == (4, True)
    assert draws[0.0, "FR-Spec, 32k"] == draws[0.0, hybrid] == (0, False)
    # What a stopped run lacks is measured as it would have been.
    write_rows(tmp_path / "out" / RUNS, [line for line in lines if line is not expected[-1]])
    assert not Evaluation(tmp_path / "out").is_complete
    result = evaluate(*words)
    assert result.exit_code == 0, result.exception
    assert [line for line in lines_of(tmp_path / "out") if line["kind"] == EXPECTED] == expected
    figures = summarize(Evaluation(tmp_path / "out"), 0.0, "FR-Spec, 32k")
    assert 0 < figures["mass"].mean <= figures["oracle_mass"].mean <= 1 and 0 < figures["recall@10"].mean <= 1
    assert "- EvoSpec, full system: policies are led along given texts" in (tmp_path / "out/tables.md").read_text()


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--suite", "mmlu"), "--suite must be one of spec-bench"),
        (("--table", "evospec-3"), "--table must be one of microspec-2"),
        (("--table", "evospec-1", "--policy", "full"), "the table says what is run; leave --policy out"),
        (("--policy", "frequncy"), "there is no policy 'frequncy'"),
        (("--policy", "full", "--policy", "full"), "given twice"),
        (("--policy", "plain"), "there is no policy 'plain'"),
        (("--align", "fast"), "--align must be one of default, paper, osd"),
        (("--router", "name/of-router"), "--router is for --table; name it in a --policy"),
        (("--expected-prompts", 4), "--expected-prompts is for --table"),
        (("--table", "dynaspec-1", "--router", "path/to/nothing"), "path/to/nothing"),
        (("--policy", "frequency:ranking=path/to/without-{domain}"), "path/to/without-code"),
        (("--no-chain",), "there is nothing to draft"),
        (("--tree", "6/5"), "write total_tokens/depth/top_k"),
        (("--temperature", -1), "--temperature must be a number of at least 0, got -1.0"),
        (("--repeats", 0), "--repeats must be a whole number"),
        (("--data", "path/to/nothing.jsonl"), "path/to/nothing.jsonl"),
    ],
)
def test_bad_input_is_refused_before_models_are_loaded(data, tmp_path, monkeypatch, words, problem):
    monkeypatch.setattr(pair, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    result = evaluate("--data", data / "code.jsonl", "--out", tmp_path / "out", *words)
    assert isinstance(result.exception, DynSpecError), result.output
    assert problem in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_other_folders_are_refused(data, tmp_path):
    (tmp_path / SETTINGS).write_text('{"a": 1}')
    result = evaluate("--data", data / "code.jsonl", "--out", tmp_path)
    assert "is not of hf-dynspec evaluate; choose another folder" in str(result.exception)
    result = invoke("plot", tmp_path / "nothing")
    assert isinstance(result.exception, ConfigurationError)
    (tmp_path / "empty").mkdir()
    result = invoke("plot", tmp_path / "empty")
    assert "holds no evaluation" in str(result.exception)
    assert list((tmp_path / "empty").iterdir()) == []
    result = invoke("plot", tmp_path / "empty", tmp_path / "a.png")
    assert "whose figures are drawn in it" in str(result.exception)


def test_every_policy_is_aligned_beside_itself():
    methods = make_methods(["full", "hybrid"], ["default", "osd"])
    assert [one.label for one in methods] == [
        *("full", "hybrid", "full, aligned (default)", "hybrid, aligned (default)"),
        *("full, aligned (osd)", "hybrid, aligned (osd)"),
    ]
    assert all(one.online_alignment().synchronous for one in methods[2:]) and methods[0].online_alignment() is None
