"""What all commands have in common: tables that fit, how they end, what they refuse to write to, help and version."""

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import typer
from cases import representatives
from click.testing import Result
from command_line import invoke, shown
from full_disk import largest_file
from models import VOCABULARY, perturbed, tiny, word_tokenizer
from rich.cells import cell_len
from safetensors import SafetensorError
from stopped_commands import RUN_SLOWLY, RUN_WITH_SMALL_BATCHES
from typer.testing import CliRunner

import hf_dynspec
from hf_dynspec import DynSpecAssistant
from hf_dynspec.build.frequency import Tally
from hf_dynspec.commands import app
from hf_dynspec.commands.frequency import _describe_kept
from hf_dynspec.commands.running import Commands, describe_os_error
from hf_dynspec.errors import ConfigurationError, DynSpecError
from hf_dynspec.evaluation.tables import FittedTable, parameter_count
from hf_dynspec.files import replacing

ROOT = Path(__file__).parents[2]
PACKAGE = Path(hf_dynspec.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a drafter, prompts of three domains, and texts that take a while to count."""
    root = tmp_path_factory.mktemp("commands")
    target, tokenizer = tiny("llama"), word_tokenizer()
    for name, model in (("target", target), ("drafter", perturbed(target))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    rows = [f'{{"prompt": "t{n} t{n + 1} t5", "category": "{domain}"}}' for n, domain in ((5, "law"), (9, "code"))]
    (root / "prompts.jsonl").write_text("\n".join(rows))
    numbers = torch.randint(3, VOCABULARY, (4000, 60), generator=torch.Generator().manual_seed(0)).tolist()
    lines = "".join('{"text": "' + " ".join(f"t{number}" for number in row) + '"}\n' for row in numbers)
    (root / "texts.jsonl").write_text(lines)
    return root


def measure(command: str, folder: Path, *words: object) -> list[str]:
    models = ["--target", folder / "target", "--drafter", folder / "drafter", "--prompts", folder / "prompts.jsonl"]
    return list(map(str, [command, *models, "--device", "cpu", *words]))


def train(folder: Path, out: Path, *words: object) -> list[str]:
    models = ["--target", folder / "target", "--drafter", folder / "drafter", "--data", folder / "texts.jsonl"]
    sizes = "--window 24 --depth 4 --likeliest 5 --hidden 16 --batch-size 64 --num-clusters 12 --pinned 10 --share 0.4"
    return list(map(str, ["train", "router", *models, *sizes.split(), "--out", out, *words]))


def start(*words: object, program: Sequence[str] = ("-m", "hf_dynspec.commands")) -> subprocess.Popen:
    """The real command, in a process group of its own, as a terminal has it."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*words: object, **options: Sequence[str]) -> tuple[int, str, list[str]]:
    """The status of the real command, its output and the lines of its errors."""
    process = start(*words, **options)
    output, errors = process.communicate(timeout=600)
    return process.returncode, output, errors.splitlines()


# Tables --------------------------------------------------------------------------------------------------------------


def parsed(lines: list[str], columns: int) -> dict[tuple[str, str], str]:
    """The figures of a printed table by label and heading, however its columns and cells were folded."""
    figures: dict[tuple[str, str], str] = {}
    headings: list[str] = []
    row: list[str] = []

    def end() -> None:
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            figures[row[0], heading] = cell
        row.clear()

    for line in lines:
        if line.startswith("┏"):
            headings = []
        cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if line.startswith("┃"):
            headings = [
                f"{above} {cell}".strip() for above, cell in zip(headings or [""] * len(cells), cells, strict=True)
            ]
        elif line.startswith("│"):
            row[:] = [f"{above} {cell}".strip() for above, cell in zip(row or [""] * len(cells), cells, strict=True)]
        elif line.startswith(("├", "└")) and row:
            end()
    assert len({heading for _, heading in figures}) == columns
    return figures


LABELS = ("plain", "eagle3 · frequency:ranking=folder/ranking,size=64 · tree 60/5/10", "hybrid [of] markup")
HEADINGS = ("tokens/s", "vs plain with\nhead product", "vs transformers", "acceptance length", "recall\n@10", "same")


@pytest.mark.parametrize("width", [200, 80, 40])
def test_every_figure_stands_whole_under_its_heading_beside_its_label(width):
    table = FittedTable("A title", ["system", *HEADINGS], caption="a caption " * 20)
    expected = {}
    for number, label in enumerate(LABELS):
        cells = [f"{number}.{column}4×\n[{number}.{column}1, {number}.{column}9]" for column in range(len(HEADINGS))]
        table.add_row(label, *cells, ends_section=True)
        expected |= {
            (label, " ".join(heading.split())): " ".join(cell.split())
            for heading, cell in zip(HEADINGS, cells, strict=True)
        }
    lines = shown(table, width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0] == "A title" and " ".join(lines).count("a caption") + " ".join(lines).count("a  caption") >= 18
    found = parsed(lines, len(HEADINGS))
    # A label that is broken within a word was put together with a space.
    tight = {re.sub(r"\s", "", label): label for label in LABELS}
    assert {(tight[re.sub(r"\s", "", label)], heading): cell for (label, heading), cell in found.items()} == expected
    # No label letter by letter: none of its lines is shorter than a word, but for the last.
    assert max(line.count("│") for line in lines) >= 3 and not any(re.match(r"│ \S │", line) for line in lines)


@pytest.mark.parametrize("width", [80, 40])
def test_letters_that_take_two_columns_hide_no_figure(width):
    table, label = FittedTable("Title", ["système · 系统", "tokens/s"]), "漢字" * 20
    table.add_row(label, "12.5")
    lines = shown(table, width=width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    ((found, heading), figure) = parsed(lines, 1).popitem()
    assert (found.replace(" ", ""), heading.replace(" ", ""), figure) == (label, "tokens/s", "12.5")


@pytest.mark.parametrize(("count", "said"), [(8_190_735_360, "8.2B"), (45_200_000, "45.2M"), (14_592, "14.6k")])
def test_numbers_of_parameters(count, said):
    assert parameter_count(count) == said


def test_labels_of_two_columns_are_repeated_in_each_block():
    table = FittedTable("By depth", ["policy", "figure", *(f"depth {depth}" for depth in range(12))], labels=2)
    for name in ("size", "mass"):
        table.add_row("" if name == "mass" else "full", name, *(f"{depth}.{len(name)}000" for depth in range(12)))
    lines = shown(table, width=80).splitlines()
    blocks = sum(line.startswith("┏") for line in lines)
    assert blocks > 1 and sum("│ full   │ size" in line for line in lines) == blocks
    assert sum(re.match(r"│ +│ mass", line) is not None for line in lines) == blocks


def test_no_table_of_the_package_is_laid_out_by_anything_else():
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"rich\.table|rich import .*Table", path.read_text(encoding="utf-8"))
    ]
    assert users == ["evaluation/tables.py"]


MEASUREMENTS = {
    "bench": ["--tree", "8/2/3", "--repeats", 2, "--profile-prompts", 1, "--by-domain"],
    "coverage": ["--temperature", 0.8, "--by-depth", "--by-domain"],
}


@pytest.mark.parametrize("command", representatives("families", ["coverage", "bench"]))
def test_the_tables_of_measurements_fit_80_columns(folder, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    policies = ["full", "frequency:size=64", "hybrid:core_size=16,window=8,prompt_top_k=3,verify_top_k=3"]
    words = [word for policy in policies for word in ("--policy", policy)]
    result = invoke(*measure(command, folder, *words, "--max-new-tokens", 12, *MEASUREMENTS[command]))
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert sum(line.startswith("┏") for line in lines) > 3 and max(map(len, lines)) <= 80
    for line in lines:
        if line.startswith("│"):
            label, *figures = [cell.strip() for cell in line.split("│")[1:-1]]
            assert len(label) != 1 and not any("…" in cell for cell in (label, *figures))
            assert all(re.fullmatch(r"[\w .,:%×±–\[\]/-]*", cell) for cell in figures)


# Help and version ----------------------------------------------------------------------------------------------------


def all_commands() -> list[list[str]]:
    found, waiting = [], [([], typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        found.append(words)
        waiting += [([*words, name], one) for name, one in getattr(command, "commands", {}).items()]
    return sorted(found)


@pytest.mark.parametrize("words", all_commands(), ids=lambda words: " ".join(words) or "hf-dynspec")
def test_help_has_every_option_whole_in_80_columns(monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*words, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80 and "…" not in result.output
    # What click has no room for it cuts off.
    assert not re.search(r"[a-z']\.\.\.$", result.output, re.MULTILINE) and "[[" not in result.output
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert not option.startswith("-") or re.search(rf"(^|\s){option}(\s|$)", result.output), option


def test_the_version_is_told():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"hf-dynspec {hf_dynspec.__version__}\n")


# Interrupts ----------------------------------------------------------------------------------------------------------


def interrupt_when(process: subprocess.Popen, is_time) -> tuple[int, str, list[str]]:
    """Press Ctrl-C as soon as something holds: the whole group of processes hears it."""
    end = time.monotonic() + 600
    while not is_time():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=600)
    assert "Traceback" not in output + errors
    return process.returncode, output, errors.splitlines()


needs_signals = pytest.mark.skipif(os.name != "posix", reason="sends signals to a group of processes")


@pytest.mark.process
@needs_signals
def test_an_interrupted_training_is_kept_and_goes_on(folder, tmp_path):
    out = tmp_path / "router"
    # As many batches as are never reached, but by the run that goes on from a state near the end.
    words = train(folder, out, "--steps", 1200, "--held-out", 200, "--evaluate-every", 5, "--max-batches", 100_000)
    status, _, errors = interrupt_when(start(*words), (out / "partial" / "training.pt").exists)
    assert status == 130
    assert errors[-1] == (
        f"interrupted: what was finished is kept in {out}/partial (2 parts of the draft steps, the texts, the "
        "clusters, training); run the same command again to go on"
    )
    assert sorted(path.name for path in out.iterdir()) == ["partial"]
    training, recorded = out / "partial" / "training.pt", out / "partial" / "steps-00000.safetensors"
    before = [path.stat().st_mtime_ns for path in (training, recorded)]

    def looked_again() -> bool:
        # With --overwrite it is gone for a while.
        with suppress(FileNotFoundError):
            return training.stat().st_mtime_ns != before[0]
        return False

    status, _, _ = interrupt_when(start(*words), looked_again)
    assert status == 130 and recorded.stat().st_mtime_ns == before[1]
    before[0] = training.stat().st_mtime_ns
    status, _, errors = interrupt_when(start(*words, "--overwrite"), looked_again)
    assert status == 130 and recorded.stat().st_mtime_ns != before[1]
    assert errors[-1].endswith("run the same command without --overwrite to go on")


@pytest.mark.process
@needs_signals
def test_interrupted_counts_are_kept_and_the_same_command_ends_them(folder, tmp_path):
    out = tmp_path / "ranking"
    words = [*writers(folder)["frequency"], out]
    slowly = start(*words, program=("-c", RUN_SLOWLY))
    status, _, errors = interrupt_when(slowly, (out / "partial" / "counts.npz").exists)
    assert status == 130
    kept = rf"interrupted: the counts of [\d,]+ tokens are kept in {out}/partial; run the same command again to go on"
    assert re.fullmatch(kept, errors[-1])
    status, output, errors = run(*words, program=("-c", RUN_WITH_SMALL_BATCHES))
    assert status == 0 and any(line.startswith("continuing: ") for line in errors)
    assert f"{4000:,}" in output and not (out / "partial").exists()


@needs_signals
def test_interrupted_clusters_are_not_kept_and_that_is_said(folder, tmp_path):
    out = tmp_path / "clusters"
    words = ["build", "clusters", "--target", folder / "target", "--num-clusters", 200, "--iterations", 10_000]
    process = start(*words, "--out", out)
    # Not earlier: an interrupt while a compiled library starts aborts the process in that library.
    status, _, errors = interrupt_when(process, lambda: "rows of" in process.stderr.readline())
    assert status == 130 and not out.exists()
    assert errors[-1].startswith("interrupted: ") and errors[-1].endswith("run the same command to begin anew")


ENDLESS = ("--temperature", 1, "--continuations", 100_000, "--max-new-tokens", 8, "--policy", "full")


@pytest.mark.process
@needs_signals
def test_an_interrupted_measurement_says_where_its_figures_are(folder, tmp_path):
    out = tmp_path / "coverage.json"
    words = measure("coverage", folder, *ENDLESS, "--json", out)
    status, output, errors = interrupt_when(start(*words), out.exists)
    assert status == 130 and "│ full" in output
    said = f"interrupted: what was measured until then is above and in {out}; the same command begins anew"
    assert errors[-1] == said


@pytest.mark.process
def test_an_interrupt_that_a_destructor_swallows_is_not_lost():
    """Python drops exceptions that are raised in destructors; the next sign of progress raises this one."""
    code = """
import os, signal
from hf_dynspec.commands import app, main
from hf_dynspec.commands.common import progress_bar

@app.command()
def work() -> None:
    class Late:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100): pass
    with progress_bar() as report:
        report("working", 0, 2)
        late = Late()
        del late
        report("working", 1, 2)
    print("went on")

main()
"""
    done = subprocess.run([sys.executable, "-c", code, "work"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 130 and "went on" not in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("interrupted: ")


def interrupted_in_process(work) -> Result:
    """What comes of a command that hears an interrupt. It runs here, as tests are run by a main thread too."""
    commands = typer.Typer(cls=Commands)
    commands.callback()(lambda: None)
    commands.command("work")(work)
    result = CliRunner().invoke(commands, ["work"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return result


class Panic(BaseException):
    """Such as code compiled from Rust raises: no Exception."""


@needs_signals
@pytest.mark.parametrize(
    "error",
    [SafetensorError, OSError, RuntimeError, DynSpecError, Panic, lambda _: typer.Exit(1), lambda _: typer.Abort()],
)
def test_an_interrupt_that_a_library_takes_for_an_error_is_told_and_loses_nothing(tmp_path, error):
    """As code in other languages does with what Python raises within a call of it."""
    (tmp_path / "kept").write_text("whole")

    def work() -> None:
        with replacing(tmp_path / "kept") as scratch:
            scratch.write_text("half")
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException as raised:
                raise error(f"while writing: {raised!r}") from None

    result = interrupted_in_process(work)
    assert result.exit_code == 130 and result.stderr.splitlines()[-1].startswith("interrupted: ")
    assert [one.name for one in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "whole"


@needs_signals
def test_a_command_that_ends_well_in_spite_of_an_interrupt_has_ended_well():
    def work() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise typer.Exit

    assert interrupted_in_process(work).exit_code == 0


# Options -------------------------------------------------------------------------------------------------------------

_PAIR = "--target target --drafter drafter"
_WORDS = {
    "bench": f"{_PAIR} --prompts prompts.jsonl",
    "coverage": f"{_PAIR} --prompts prompts.jsonl",
    "doctor": f"{_PAIR} --prompts prompts.jsonl",
    "doctor --config target drafter": "--device-memory-bandwidth 100 --launch-latency 5",
    "evaluate": f"{_PAIR} --data prompts.jsonl --out out",
    "trace": f"{_PAIR} --prompts prompts.jsonl",
    "train router": f"{_PAIR} --data texts.jsonl --out out",
    "build frequency": "--tokenizer target --text texts.jsonl --out out",
    "build clusters": "--target target --num-clusters 5 --out out",
    "build graph": "--tokenizer target --text texts.jsonl --out out",
}


def numeric_options(command: str) -> list[str]:
    """The options of a command that take a number, but for those that `doctor` has for its other half alone."""
    found = typer.main.get_command(app)
    for word in command.split(" --", maxsplit=1)[0].split():
        found = found.commands[word]
    estimated = ("device_memory_bandwidth", "launch_latency", "device_flops", "acceptance", "cached_tokens")
    of_both = ("num_assistant_tokens", "temperature")
    types = get_type_hints(inspect.unwrap(found.callback))
    numbers = (int, float, int | None, float | None, list[float] | None)
    numeric = [one for one in found.params if types[one.name] in numbers]
    if "--config" in command:
        numeric = [one for one in numeric if one.name in (*estimated, *of_both)]
    elif command == "doctor":
        numeric = [one for one in numeric if one.name not in estimated]
    return [one.opts[0] for one in numeric]


@pytest.mark.parametrize("command", list(_WORDS))
def test_numbers_out_of_range_are_told_by_the_names_of_their_options(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    forbid_work(monkeypatch, "load_model", "find_eos_token_ids", "load_config")
    options = numeric_options(command)
    assert len(options) >= 2
    for option in options:
        result = invoke(*command.split(), *_WORDS[command].split(), f"{option}=-7")
        # Some are refused by click itself.
        said = result.stderr if result.exit_code == 2 else str(result.exception)
        if result.exit_code == 1:
            assert isinstance(result.exception, ConfigurationError), (option, result.exception)
        assert result.exit_code in (1, 2) and option in said, (option, said)
        assert "must be" in said or "Invalid value" in said, said
        assert option.lstrip("-").replace("-", "_") not in said or "-" not in option.lstrip("-"), said


# What the operating system refuses -----------------------------------------------------------------------------------


def writers(folder: Path) -> dict[str, list]:
    """Commands that write a folder, without the folder."""
    counted = ("--tokenizer", folder / "target", "--text", folder / "texts.jsonl")
    return {
        "frequency": ["build", "frequency", *counted, "--out"],
        "clusters": ["build", "clusters", "--target", folder / "target", "--num-clusters", 5, "--out"],
        "router": train(folder, Path("x"))[:-1],
    }


def forbid_work(monkeypatch, *loaders: str) -> None:
    for loader in loaders:
        monkeypatch.setattr(f"hf_dynspec.loading.{loader}", lambda *_, **__: pytest.fail("work was begun"))


@pytest.mark.parametrize("command", ["frequency", "clusters", "router"])
@pytest.mark.parametrize("place", ["file", "below a file", "nowhere"])
def test_folders_that_cannot_be_written_are_refused_before_work(folder, tmp_path, monkeypatch, command, place):
    (tmp_path / "file").write_text("mine")
    out = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "a" / "b", "nowhere": Path("/proc/nowhere")}
    if place == "nowhere" and not Path("/proc").is_dir():
        pytest.skip("needs a file system that nobody can write to")
    forbid_work(monkeypatch, "load_model", "find_eos_token_ids")
    result = invoke(*writers(folder)[command], out[place])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigurationError)
    assert str(out[place]) in str(result.exception) and "\n" not in str(result.exception)
    assert (tmp_path / "file").read_text() == "mine" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        "build frequency --tokenizer target --text texts.jsonl --out",
        "build frequency-import list.pt --tokenizer target --out",
        "build clusters --target target --num-clusters 5 --out",
        "build graph --tokenizer target --text texts.jsonl --out",
        "evaluate --target target --drafter drafter --data prompts.jsonl --out",
        "export vllm head --ranking ranking --target target --out",
        "export custom-generate ranking --out",
        "convert eagle head --to official",
        "train router --target target --drafter drafter --data texts.jsonl --out",
    ],
)
def test_a_folder_with_other_files_is_refused_before_work(folder, tmp_path, monkeypatch, words):
    for name in ("target", "drafter", "prompts.jsonl", "texts.jsonl"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "list.pt").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    forbid_work(monkeypatch, "load_model", "load_tokenizer", "find_eos_token_ids")
    result = invoke(*words.split(), "mine")
    assert isinstance(result.exception, ConfigurationError), result.output
    said = "mine holds files that are not of this command, such as notes.txt; name a new folder"
    assert said in str(result.exception) and os.listdir(tmp_path / "mine") == ["notes.txt"]


def test_hidden_files_are_nobodys(folder, tmp_path):
    (tmp_path / ".gitattributes").write_text("")
    assert invoke(*writers(folder)["clusters"], tmp_path).exit_code == 0


@pytest.mark.parametrize("command", ["bench", "coverage"])
@pytest.mark.parametrize("name", ["prompts.jsonl/out.json", ".", "no/such/folder/out.json", "/dev/null"])
def test_files_that_cannot_be_written_are_refused_before_work(folder, monkeypatch, command, name):
    monkeypatch.setattr("hf_dynspec.evaluation.prompts.read_workload", lambda *_: pytest.fail("work was begun"))
    result = invoke(*measure(command, folder, "--json", folder / name))
    assert isinstance(result.exception, ConfigurationError)
    assert "cannot be written: --json takes a file in an existing folder" in str(result.exception)


@contextmanager
def at_work(words: Sequence[object], written: Path) -> Iterator[None]:
    """A command in a process of its own that has begun to write, and is killed in the end."""
    process = start(*words)
    try:
        while not written.exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.process
def test_two_processes_do_not_write_one_folder_and_a_killed_one_is_no_obstacle(folder, tmp_path):
    out = tmp_path / "clusters"
    words = ["build", "clusters", "--target", folder / "target", "--out", out, "--num-clusters"]
    with at_work([*words, 200, "--iterations", 10_000], out / ".hf-dynspec.lock"):
        result = invoke(*words, 5)
        assert isinstance(result.exception, ConfigurationError)
        assert "is being written by another process; wait for it to end" in str(result.exception)
    assert (out / ".hf-dynspec.lock").exists()
    result = invoke(*words, 5)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.process
def test_two_measurements_do_not_write_one_file(folder, tmp_path):
    out = tmp_path / "out.json"
    words = measure("coverage", folder, *ENDLESS, "--json", out)
    with at_work(words, out):
        assert "is being written by another process" in str(invoke(*words).exception)


@needs_signals
@pytest.mark.parametrize(
    ("command", "limit"),
    representatives(
        "families", [("frequency", 1000), ("router", 60_000), ("clusters", 1000), ("router", 1000)], keep=2
    ),
)
def test_what_the_disk_refuses_meanwhile_ends_in_one_line(folder, tmp_path, command, limit):
    words = [*writers(folder)[command], tmp_path / "out"]
    words += ["--steps", 1200, "--held-out", 200] if command == "router" else []
    with largest_file(limit):
        result = invoke(*words)
    assert isinstance(result.exception, DynSpecError)
    line = str(result.exception)
    assert "\n" not in line and str(tmp_path / "out") in line
    assert "File too large; write to another disk" in line and "not lost: nothing" not in line


@needs_signals
def test_counts_that_a_full_disk_refuses_leave_no_file_and_are_said_to_be_lost(tmp_path):
    tally = Tally(1000, tmp_path)
    tally.add(np.ones(1000, np.int64), 1)
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        tally.save()
    assert not list(tmp_path.iterdir())
    assert _describe_kept(tally, "").startswith("nothing of what was counted could be kept; ")


def test_a_full_disk_does_not_end_a_measurement(folder, tmp_path, monkeypatch):
    out = tmp_path / "out.json"

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_dynspec.files.write_json", refuse)
    words = ["--policy", "full", "--max-new-tokens", 8, "--json", out]
    result = invoke(*measure("coverage", folder, *words))
    assert "│ full" in result.stdout and isinstance(result.exception, DynSpecError)
    assert str(result.exception).startswith(f"{out} lacks what was measured, which is above: No space left on device")


def test_a_recording_that_would_fill_the_disk_is_refused(folder, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=1000))
    result = invoke(*train(folder, tmp_path / "router", "--steps", 1200, "--held-out", 200))
    assert isinstance(result.exception, ConfigurationError)
    assert "1,200 draft steps take about 0.3 MiB" in str(result.exception)
    assert not list((tmp_path / "router").rglob("steps-*"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(28, "No space left on device", "/a/b"), "/a/b: No space left on device; free some space"),
        (OSError(17, "File exists", "/a", None, "/b"), "/b: File exists; a file stands where a folder should be"),
        (OSError("only\nwords"), "only words"),
        (RuntimeError("I/O error: Os { code: 28, kind: StorageFull }"), "No space left on device; free some space"),
    ],
)
def test_what_the_system_refused_is_said_in_one_line(error, says):
    assert describe_os_error(error).startswith(says)


# Policies by name ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router", "union"])
def test_policies_that_need_settings_say_so_wherever_they_are_named(folder, name):
    fix = {"router": r'RouterShortlist\("path"\).*--policy router:router=DIR', "union": r"UnionShortlist\(.*\+"}[name]
    with pytest.raises(ConfigurationError, match=fix):
        DynSpecAssistant(tiny("llama"), name)
    for command in ("bench", "coverage"):
        result = invoke(*measure(command, folder, "--policy", name))
        assert isinstance(result.exception, ConfigurationError) and re.search(fix, str(result.exception))


# Training ------------------------------------------------------------------------------------------------------------


def test_training_says_whose_figures_it_shows(folder, tmp_path):
    words = train(folder, tmp_path / "router", "--steps", 1200, "--held-out", 200)
    result = invoke(*words, "--max-batches", 40, "--evaluate-every", 10)
    assert result.exit_code == 0, result.output
    looks = [line for line in result.stderr.splitlines() if line.startswith("batch ")]
    assert len(looks) == 4
    losses = []
    for number, line in enumerate(looks, 1):
        start = rf"batch {10 * number} of at most 40: "
        found = re.match(start + r"loss \S+, held out (\S+); the best so far, of batch (\d+): ", line)
        losses.append(float(found[1]))
        assert int(found[2]) == 10 * (1 + losses.index(min(losses)))
    best = 10 * (1 + losses.index(min(losses)))
    assert f"the router of batch {best} is kept, whose held-out loss was the lowest" in result.stderr
