"""What is wrong with the words of a command is said before torch is imported, which takes seconds."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

import hf_dynspec
from hf_dynspec.commands import app, common
from hf_dynspec.commands.running import _ABOVE_0, _FOLDERS_OR_HUB_IDS, _FROM_0, _NAMES, _POLICIES, _READ, _problem
from hf_dynspec.evaluation.suites.data import SUITES
from hf_dynspec.evaluation.suites.methods import ALIGNMENTS
from hf_dynspec.evaluation.suites.paper_tables import PAPER_TABLES
from hf_dynspec.shortlists import POLICIES

_PAIR = "--target target --drafter drafter"
# Of every command, words with which it would begin its work.
COMMANDS = {
    "bench": f"{_PAIR} --prompts prompts.jsonl",
    "coverage": f"{_PAIR} --prompts prompts.jsonl",
    "doctor": f"{_PAIR} --prompts prompts.jsonl",
    "evaluate": f"{_PAIR} --data prompts.jsonl --out out",
    "trace": f"{_PAIR} --prompts prompts.jsonl",
    "plot": "file.json speed.svg",
    "push": "folder me/artifact",
    "build frequency": "--tokenizer target --text prompts.jsonl --out out",
    "build frequency-import": "file.json --tokenizer target --out out",
    "build clusters": "--target target --num-clusters 5 --out out",
    "build graph": "--tokenizer target --text prompts.jsonl --out out",
    "convert eagle": "folder out --to official",
    "export sglang": "folder --out out.pt",
    "export vllm": "folder --ranking folder --target target --out out",
    "export custom-generate": "folder --out out",
    "train router": f"{_PAIR} --data prompts.jsonl --out out",
    "train eagle": "--target target --data prompts.jsonl --out out",
    "train drafter": "--target target --data prompts.jsonl --out out",
}
POLICY = ["--policy hybird", "--policy frequencies:size=3", "--policy mine+hybrid"]
# What a command refuses besides, by itself or beside its other words.
OTHERS = {
    "bench": [
        "--json no/such/file.json",
        "--plot speed.txt",
        "--dtype tiny",
        "--tree 6/5",
        "--prompts broken.jsonl",
        *POLICY,
    ],
    "coverage": ["--json no/such/file.json", "--prompts broken.jsonl", *POLICY],
    "doctor": ["--acceptance 0.5", "--config a b", "--seconds 0", "--tree 60x5"],
    "evaluate": [
        *POLICY,
        "--suite all",
        "--table evospec-3",
        "--align well",
        "--router folder",
        "--table evospec-1 --policy full",
        "--expected-prompts 3",
    ],
    "trace": [*POLICY, "--prompt text", "--timeline profile.txt"],
    "plot": ["--nonsense"],
    "push": ["--dataset two%20words"],
    "build frequency": ["--from-target target"],
    "build graph": ["--held-out prompts.jsonl"],
    "export custom-generate": ["--repo-id a/b/c"],
    "train router": ["--method best", "--schedule mine", "--learning-rate 0", "--method coral --pinned 5"],
    "train eagle": ["--minutes 0", "--schedule mine", "--layout eagle4"],
}
# What is written, and need not exist.
WRITTEN = {"out", "json_file", "plot", "html", "timeline", "image"}

RUN = """
import os, sys
from hf_dynspec.commands import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["hf-dynspec", *(word.replace("%20", " ") for word in line.split())]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code
    heavy = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    print(status, *heavy, "|", line, flush=True)
    if heavy:
        break
"""


def found(name: str) -> Any:
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    return command


def kinds(name: str) -> dict[str, set]:
    """By the name of each parameter of a command, the kinds of its values."""
    hints = get_type_hints(inspect.unwrap(found(name).callback))
    return {one.name: {hints[one.name], *get_args(hints[one.name])} for one in found(name).params if one.name in hints}


def wrong(name: str) -> list[str]:
    """Lines of words of a command, each with one that is wrong."""
    lines = [*OTHERS.get(name, ())]
    for one in found(name).params:
        value, kind = None, kinds(name).get(one.name, set())
        if {int, float, list[float]} & kind:
            value = "0" if one.name in _ABOVE_0 or (int in kind and one.name not in _FROM_0) else "-1"
        elif one.name in _READ:
            value = "no/such/file"
        elif one.name in _FOLDERS_OR_HUB_IDS:
            value = "/no/such/folder"
        if value is not None and (one.param_type_name == "option" or one.name == "more") and one.name != "config":
            lines.append(f"{one.opts[0]} {value}" if one.param_type_name == "option" else value)
    return [f"{name} {COMMANDS[name]} {line}" for line in lines]


def names(command: Any, before: tuple[str, ...] = ()) -> list[str]:
    if not hasattr(command, "commands"):
        return [" ".join(before)]
    return [name for word, one in command.commands.items() for name in names(one, (*before, word))]


def test_every_command_is_tried():
    assert set(names(typer.main.get_command(app))) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_is_checked_by_its_kind(name):
    """So that the walk below finds a value that is wrong, also for parameters to come."""
    parameters = {one.name: one for one in found(name).params}
    for one, kind in kinds(name).items():
        if {Path, list[Path]} & kind and (name, one) != ("convert eagle", "target"):
            assert one in _READ | WRITTEN, one
        says = getattr(parameters[one], "help", None) or ""
        assert "Folder or Hub id" not in says or one in _FOLDERS_OR_HUB_IDS, one


def test_names_that_are_known_without_torch_are_all_that_there_are():
    assert list(_POLICIES) == list(POLICIES)
    assert set(_NAMES["suite"]) == set(SUITES) and set(_NAMES["table"]) == set(PAPER_TABLES)
    assert set(_NAMES["align"]) == set(ALIGNMENTS)
    for text in ("hybrid", "mine:Policy", "my.own:Policy:size=3", "frequency:ranking=a+b", "full+mine:Policy"):
        assert _problem("policy", text) is None


@pytest.mark.process
def test_errors_in_words_come_before_torch(tmp_path):
    for folder in ("target", "drafter", "folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "text": "a"}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "file.json").write_text("{}")
    lines = [line for name in COMMANDS for line in wrong(name)]
    assert len(lines) > 150
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(hf_dynspec.__file__).parents[1]), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        timeout=600,
        check=False,
    )
    tried = done.stdout.splitlines()
    assert [line for line in tried if line.split(" | ")[0] not in ("1", "2")] == [], done.stderr[-2000:]
    assert len(tried) == len(lines), done.stderr[-2000:]


def test_progress_is_told_without_a_terminal_and_long_work_beforehand(monkeypatch, capsys):
    monkeypatch.setattr(common, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(common, "_LONG_SECONDS", -1.0)
    with common.progress_bar(shorter="--limit makes it shorter") as report:
        for done in range(4):
            report("measuring", done, 10)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("measuring: 2 of 10, about 0.0 minutes left") for line in lines)
    assert sum("minutes more to go; --limit makes it shorter" in line for line in lines) == 1
