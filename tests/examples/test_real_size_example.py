"""The example that measures random models of given shapes, which agree as often as they should."""

import itertools
import sys
from pathlib import Path

import pytest
from cases import representatives
from transformers import LlamaConfig
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import real_size

SHAPE = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
    folders = {}
    for name, width in (("target", 256), ("drafter", 128)):
        folder = folders[name] = str(tmp_path_factory.mktemp(name))
        LlamaConfig(vocab_size=6000, hidden_size=width, tie_word_embeddings=True, **SHAPE).save_pretrained(folder)
    return folders


def run(*arguments: str, tokens: tuple[str, ...] = ("3",)) -> list[list[str]]:
    """The rows of the table that is printed."""
    words = [*arguments, "--dtype", "float32", "--new-tokens", "40", "--repeats", "1"]
    words += [word for length in tokens for word in ("--tokens", length)]
    result = CliRunner().invoke(real_size.app, words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]


LENGTHS = {"0.5": (1.2, 3.0), "1": (3.6, 4.0), "0": (1.0, 1.0)}


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
@pytest.mark.parametrize(
    ("agreement", "kind"), representatives("families", itertools.product(LENGTHS, ("eagle", "drafter")), keep=2)
)
def test_models_agree_as_often_as_they_should(agreement, kind, configs):
    drafter = ["--eagle"] if kind == "eagle" else ["--drafter", configs["drafter"]]
    plain, *policies = run("--target", configs["target"], *drafter, "--agreement", agreement)
    assert plain[0] == "plain generate" and [row[0] for row in policies] == ["full", "hybrid"]
    for row in policies:
        assert LENGTHS[agreement][0] <= float(row[3]) <= LENGTHS[agreement][1]
        assert row[5] == "yes"


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter", "ignore:drafting does not pay here")
def test_lengths_are_compared_automatic_ones_too(configs):
    models = ["--target", configs["target"], "--drafter", configs["drafter"], "--agreement", "1"]
    _, *rows = run(*models, "--policy", "hybrid", tokens=("2", "auto"))
    assert [row[0] for row in rows] == ["hybrid, 2", "hybrid, auto"]
    assert all(row[5] == "yes" for row in rows)
    assert 2.5 <= float(rows[0][3]) <= 3.0


@pytest.mark.parametrize("length", ["some", "0", "-2", "²"])
def test_other_lengths_are_refused(length, configs):
    words = ["--target", configs["target"], "--drafter", configs["drafter"], "--tokens", length]
    result = CliRunner().invoke(real_size.app, words)
    assert result.exit_code == 2 and "--tokens" in result.output


def test_exactly_one_drafter_must_be_named(configs):
    for drafter in ([], ["--eagle", "--drafter", configs["drafter"]]):
        result = CliRunner().invoke(real_size.app, ["--target", configs["target"], *drafter])
        assert result.exit_code == 2 and "--eagle" in result.output
