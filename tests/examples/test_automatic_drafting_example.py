"""The measurement of automatic drafting, at its smallest, on the embedded pair."""

import json
import math
import random
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from automatic_drafting import app, speed, standard_error

from hf_dynspec.commands import app as commands
from hf_dynspec.errors import ConfigurationError
from hf_dynspec.evaluation.bench.benchmark import BenchmarkSettings
from hf_dynspec.evaluation.coverage.settings import CoverageSettings

POCKET = Path(__file__).parents[2] / "examples/pocket"


PAIR = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", "--prompts", POCKET / "prompts.jsonl")


def run(app: typer.Typer, *arguments: object) -> Result:
    try:
        return CliRunner().invoke(app, list(map(str, arguments)))
    finally:
        logging.enable_progress_bar()


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
@pytest.mark.parametrize(
    "added",
    [(), ("--random-weights",), ("--tree",), ("--policy", "full", "--policy", "hybrid")],
    ids=lambda added: "".join(added) or "chains",
)
def test_everything_is_timed_in_every_domain(added, tmp_path):
    small = ("--limit", "1", "--max-new-tokens", "8", "--repeats", "1", "--lengths", "2,5", "--temperature", "0.8")
    done = run(app, *PAIR, *small, *added, "--out", tmp_path / "out.json")
    assert done.exit_code == 0, done.exception or done.output
    assert "auto /" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]["0.8"]
    policies = [text for text in added if text in ("full", "hybrid")] or ["hybrid"]
    lengths = ["tree"] if "--tree" in added else ["2", "5"]
    systems = {"plain", "auto", *(f"{policy}, {length}" for policy in policies for length in lengths)}
    assert "all" in result["tokens_per_second"]
    for speeds in result["tokens_per_second"].values():
        assert set(speeds) == systems
        assert min(speeds.values()) > 0
    assert all(len(calls) == 1 for domain in result["calls"].values() for calls in domain.values())


def test_the_error_of_a_ratio_is_what_leaving_out_prompts_tells():
    """The jackknife's, over prompts that differ in length and are all measured twice."""
    rng, prompts = random.Random(0), range(40)

    def calls(spread: float) -> list[dict]:
        rng.seed(0)
        tokens = [rng.randint(5, 60) for _ in prompts]
        rng.seed(spread)
        pace = [rng.lognormvariate(0, spread) for _ in prompts]
        return 2 * [{"prompt": one, "tokens": tokens[one], "seconds": tokens[one] * pace[one]} for one in prompts]

    auto, fixed = calls(0.2), calls(0.1)
    ratios = [
        math.log(speed([call for call in auto if call["prompt"] != one]))
        - math.log(speed([call for call in fixed if call["prompt"] != one]))
        for one in prompts
    ]
    mean = sum(ratios) / len(ratios)
    jackknife = math.sqrt((len(ratios) - 1) / len(ratios) * sum((one - mean) ** 2 for one in ratios))
    assert standard_error(auto, fixed) == pytest.approx(jackknife, rel=0.05)
    assert standard_error(auto, auto) == 0
    assert math.isnan(standard_error(auto[:1], fixed[:1]))


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
def test_the_benchmark_takes_it_too(tmp_path):
    few = ("--limit", "1", "--repeats", "1", "--max-new-tokens", "12", "--profile-prompts", "0", "--no-rivals")
    out = ("--json", tmp_path / "bench.json")
    done = run(commands, "bench", *PAIR, *few, "--policy", "full", "--num-assistant-tokens", "auto", *out)
    assert done.exit_code == 0, done.exception or done.output
    assert "chains as long as pays" in done.stdout
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert result["settings"]["num_assistant_tokens"] == "auto"
    refused = run(commands, "bench", *PAIR, "--num-assistant-tokens", "sometimes")
    assert refused.exit_code == 2
    assert "neither a whole number nor auto" in " ".join(refused.output.replace("│", " ").split())


def test_only_what_can_choose_takes_it():
    assert BenchmarkSettings(num_assistant_tokens="auto").num_assistant_tokens == "auto"
    for settings, wrong in ((BenchmarkSettings, "sometimes"), (BenchmarkSettings, 0), (CoverageSettings, "auto")):
        with pytest.raises(ConfigurationError, match="num_assistant_tokens must be a whole number"):
            settings(num_assistant_tokens=wrong)
