"""Images: what is there stays until a new one is whole, the same figure gives the same bytes, and what is missing is
told with what to do in the command that asks for it."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from full_disk import largest_file
from pocket import POCKET

import hf_dynspec
from hf_dynspec.errors import ConfigurationError
from hf_dynspec.evaluation.plots import plot_style, save_figure

PACKAGE = Path(hf_dynspec.__file__).parent
PAIR = ["--target", str(POCKET / "target"), "--drafter", str(POCKET / "drafter")]
PROMPTS = str(POCKET / "prompts.jsonl")
SUFFIXES = ["svg", "png", "pdf", "PNG"]


def figure() -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4, 3))
    drawn.add_subplot().plot([1, 2, 3], [3, 1, 2], label="a line")
    drawn.legend()
    return drawn


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_image_that_was_there_stays_where_the_disk_is_full(suffix, tmp_path):
    path = tmp_path / f"image.{suffix}"
    path.write_text("the one before")
    with plot_style():
        with largest_file(1000), pytest.raises(OSError, match="File too large"):
            save_figure(figure(), path)
        assert path.read_text() == "the one before" and list(tmp_path.iterdir()) == [path]
        save_figure(figure(), path)
    assert path.stat().st_size > 1000 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_figure_gives_the_same_bytes(suffix, tmp_path):
    paths = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for path in paths:
        with plot_style():
            save_figure(figure(), path)
    assert len({path.read_bytes() for path in paths}) == 1


def test_images_are_written_in_one_step_wherever_they_are():
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "savefig"
    }
    assert found == {"evaluation/plots.py"}


def test_results_that_are_not_there_are_told_to_be_missing():
    result = invoke("plot", "/no/results")
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception) == "/no/results: no such file or directory"


@pytest.mark.parametrize(
    ("words", "otherwise"),
    [
        (["bench", "--prompts", PROMPTS, "--plot", "out.png"], ", or leave --plot out"),
        (["coverage", "--prompts", PROMPTS, "--plot", "out.png"], ", or leave --plot out"),
        (["evaluate", "--data", PROMPTS, "--out", "out"], ", or give --no-figures"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_without_matplotlib_each_command_says_what_to_do(words, otherwise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setattr("hf_dynspec.evaluation.pair.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    result = invoke(words[0], *PAIR, *words[1:])
    assert isinstance(result.exception, ConfigurationError)
    assert str(result.exception).endswith(f"pip install 'hf-dynspec[plots]'{otherwise}")
