"""The measurement of automatic drafting, at its smallest, on the embedded pair."""

import json
import sys
from pathlib import Path

import pytest
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from automatic_drafting import app

POCKET = Path(__file__).parents[1] / "examples/pocket"


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
@pytest.mark.parametrize(
    "added", [(), ("--random-weights",), ("--tree",)], ids=lambda added: "".join(added) or "chains"
)
def test_everything_is_timed_in_every_domain(added, tmp_path):
    pair = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", "--prompts", POCKET / "prompts.jsonl")
    small = ("--limit", "1", "--max-new-tokens", "8", "--repeats", "1", "--lengths", "2,5", "--temperature", "0.8")
    try:
        done = CliRunner().invoke(app, list(map(str, (*pair, *small, *added, "--out", tmp_path / "out.json"))))
    finally:
        logging.enable_progress_bar()
    assert done.exit_code == 0, done.exception or done.output
    assert "auto /" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]["0.8"]
    systems = {"plain", "the tree", "auto"} if "--tree" in added else {"plain", "2", "5", "auto"}
    assert "all" in result["tokens_per_second"]
    for speeds in result["tokens_per_second"].values():
        assert set(speeds) == systems
        assert min(speeds.values()) > 0
    assert all(len(calls) == 1 for domain in result["calls"].values() for calls in domain.values())
