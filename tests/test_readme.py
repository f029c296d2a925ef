"""The README's Python runs as it stands, on the embedded pocket pair, and its commands exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import typer
from eagle_heads import random_head
from models import random_router
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dynspec import DynSpecAssistant
from hf_dynspec import artifacts as hub
from hf_dynspec.artifacts import push_artifact, write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.commands import app
from hf_dynspec.shortlists import FrequencyShortlist, RouterShortlist
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
POCKET = ROOT / "examples" / "pocket"
# The only thing that is changed: where these names on the Hub are read from. Models keep the names that they were
# asked for by, as they do when they come from the Hub.
LOCAL = {
    "Qwen/Qwen3-8B": POCKET / "target",
    "Qwen/Qwen3-0.6B": POCKET / "drafter",
    "me/qwen3-8b-dynspec": Path("pushed"),
}
NEW_TOKENS = 128


def blocks(language: str) -> list[tuple[int, str]]:
    """Fenced blocks of the README and the number of the line before each."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def run(line: int, source: str, namespace: dict[str, Any]) -> None:
    """Run a block; a traceback shows the README's line."""
    exec(compile("\n" * line + source, README, "exec"), namespace)


@pytest.fixture
def hub_on_disk(monkeypatch, tmp_path) -> Path:
    """A working folder with what the README calls `path/to/…`, in which the Hub is what `LOCAL` says."""
    monkeypatch.chdir(tmp_path)
    for loader in (AutoModelForCausalLM, AutoTokenizer, DynSpecAssistant):

        def load(name: Any, *, original: Any = loader.from_pretrained, **options: Any) -> Any:
            loaded = original(LOCAL.get(name, name), **options)
            if hasattr(loaded, "name_or_path"):
                loaded.name_or_path = name
            return loaded

        monkeypatch.setattr(loader, "from_pretrained", load)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(LOCAL[name]))

    def push(directory: str, repo_id: str, **_: Any) -> None:
        shutil.copytree(directory, LOCAL[repo_id])

    monkeypatch.setattr(hub, "push_artifact", create_autospec(push_artifact, side_effect=push))
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    policy = FrequencyShortlist(torch.arange(len(tokenizer)))
    config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=fingerprint_tokenizer(tokenizer))
    write_artifact(tmp_path / "path/to/ranking", config, policy.tensors())
    router = RouterShortlist(random_router(64, 64, vocabulary=len(tokenizer)))
    config = DynSpecConfig(PolicyConfig(router.name, router.settings()), tokenizer=fingerprint_tokenizer(tokenizer))
    write_artifact(tmp_path / "router", config, router.tensors())
    shape = {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5}
    random_head("eagle3", len(tokenizer), draft_vocabulary=8192, **shape).write(tmp_path / "path/to/eagle-head")
    return tmp_path


def test_the_python_blocks_run_and_the_first_writes_what_plain_generate_writes(hub_on_disk, capsys):
    (first, *others), namespace = blocks("python"), {}
    run(*first, namespace)
    target, inputs, output = (namespace[name] for name in ("target", "inputs", "output"))
    plain = target.generate(**inputs, max_new_tokens=NEW_TOKENS)
    assert output.tolist() == plain.tolist()
    assert namespace["tokenizer"].decode(plain[0]) in capsys.readouterr().out
    assert namespace["assistant"].stats.accepted > 0
    assert len(others) >= 3
    for block in others:
        # Every section goes on from the first one.
        own = dict(namespace)
        run(*block, own)
        if "EagleDrafter" in block[1]:
            assert own["output"].tolist() == plain.tolist()
            assert own["candidates"].token_ids.shape == own["candidates"].parents.shape
        if "push_to_hub" in block[1]:
            assert own["assistant"] is not namespace["assistant"] and own["assistant"].target is target
    hub.push_artifact.assert_called_once()


def commands() -> list[list[str]]:
    """The words of each `hf-dynspec` command of the README."""
    lines = [line for _, block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("hf-dynspec ")]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:3]))
def test_the_commands_take_what_they_are_given(words):
    command, rest = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    # Parses and converts the arguments, and calls nothing.
    command.make_context(words[0], rest)


def test_there_are_commands_to_test():
    assert {words[1] for words in commands()} == {"bench", "build", "convert", "coverage", "push", "train"}


def test_the_quickstart_fits_80_columns_and_no_library_warns():
    run = subprocess.run(
        [sys.executable, "-W", "default", str(ROOT / "examples" / "quickstart.py")],
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if line and "Loading weights: " not in line] == []
    table = [line for line in run.stdout.splitlines() if line.startswith("│")]
    assert len(table) == 6 and all(line.endswith("│ yes         │") and len(line) <= 80 for line in table)
