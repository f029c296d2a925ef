"""The bar chart of a benchmark: after a run, and drawn again from its file."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import command_line
import pytest
from pocket import POCKET, has_head_product
from transformers import AutoModelForCausalLM

from hf_dynspec.errors import ConfigurationError
from hf_dynspec.evaluation.bench import chart
from hf_dynspec.evaluation.bench.chart import _without_paths, write_speed_chart
from hf_dynspec.evaluation.bench.systems import HEAD_PRODUCT
from hf_dynspec.evaluation.suites.runner import Run
from hf_dynspec.evaluation.tables import shown_speed

POLICIES = ("full", "frequency:size=64")
RIVALS = ("transformers", "transformers' defaults", "prompt lookup")
PANELS = {0.0: "greedy", 0.8: "temperature 0.8, top-k 50"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[dict[str, Any], bytes]:
    """What a run of three prompts on the pocket pair writes, and the chart that it draws."""
    folder = tmp_path_factory.mktemp("chart")
    rows = (POCKET / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (folder / "three.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    result = invoke(folder, "--repeats", 2)
    assert result.exit_code == 0, result.exception
    return json.loads((folder / "out.json").read_text(encoding="utf-8")), (folder / "chart.svg").read_bytes()


def invoke(folder: Path, *words: object):
    given = ["bench", "--target", POCKET / "target", "--drafter", POCKET / "drafter"]
    given += ["--prompts", folder / "three.jsonl", "--temperature", 0, "--temperature", 0.8]
    given += [word for policy in POLICIES for word in ("--policy", policy)]
    given += ["--max-new-tokens", 4, "--profile-prompts", 0, "--device", "cpu", "--threads", 1, "--dtype", "float32"]
    given += ["--json", folder / "out.json", "--plot", folder / "chart.svg", *words]
    return command_line.invoke(*given)


def row_of(data: dict[str, Any], system: str, temperature: float) -> dict[str, Any]:
    keys = {"system": system, "temperature": temperature, "domain": None}
    (row,) = (row for row in data["results"] if keys.items() <= row.items())
    return row


def drawn_axes(data: dict[str, Any], monkeypatch) -> tuple[Any, list[Any]]:
    drawn = []
    monkeypatch.setattr(chart, "save_figure", lambda figure, path: drawn.append(figure))
    write_speed_chart(Path("chart.svg"), data)
    return drawn[0], drawn[0].axes


def test_every_bar_ends_within_its_panel_if_a_later_one_is_faster(ran, monkeypatch):
    data = copy.deepcopy(ran[0])
    for row in data["results"]:
        if row["temperature"] and "tokens_per_second" in row:
            row["tokens_per_second"] = {name: 5 * speed for name, speed in row["tokens_per_second"].items()}
    for axes in drawn_axes(data, monkeypatch)[1]:
        assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > max(text.xy[0] for text in axes.texts)


def test_there_is_a_bar_for_each_system_and_a_panel_for_each_temperature(ran, monkeypatch):
    data, _ = ran
    figure, panels = drawn_axes(data, monkeypatch)
    assert [axes.get_title(loc="left") for axes in panels] == list(PANELS.values())
    for axes, temperature in zip(panels, PANELS, strict=True):
        bars, spreads = axes.patches, axes.containers[1].lines[2][0].get_segments()
        product = [HEAD_PRODUCT] if has_head_product() else []
        names = ["plain generate", *product, "transformers' assisted", *RIVALS[1:], *POLICIES]
        assert [" ".join(label.get_text().split()) for label in axes.get_yticklabels()] == names
        systems = ["plain", *product, *RIVALS, *POLICIES]
        for bar, spread, text, system in zip(bars, spreads, axes.texts, systems, strict=True):
            row = row_of(data, system, temperature)
            speed = row["tokens_per_second"]
            assert bar.get_width() == speed["median"]
            assert [x for x, _ in spread] == pytest.approx([speed["min"], speed["max"]])
            ratio = row["ratios"]["plain"]["median"] if system != "plain" else 1.0
            assert text.get_text() == f"{shown_speed(speed['median'])}  ({ratio:.2f}×)"
        colors = [bar.get_facecolor() for bar in bars]
        assert len(set(colors[:-2])) == len(set(colors[-2:])) == 1 and colors[0] != colors[-1]
    assert "three, 3 prompts; " in figure._supxlabel.get_text()


@pytest.mark.parametrize(("length", "said"), [(5, "chains of 5 unless"), ("auto", "chains as long as pays unless")])
def test_the_length_of_chains_is_told(ran, monkeypatch, length, said):
    data = {**ran[0], "settings": {**ran[0]["settings"], "num_assistant_tokens": length}}
    figure, _ = drawn_axes(data, monkeypatch)
    assert said in figure._supxlabel.get_text()


def test_a_system_that_ran_once_has_no_spread(ran, monkeypatch):
    data = json.loads(json.dumps(ran[0]))
    for row in data["results"]:
        speed = row["tokens_per_second"]
        speed["min"] = speed["max"] = speed["median"]
    _, panels = drawn_axes(data, monkeypatch)
    assert all(axes.containers[1].lines[2][0].get_segments() == [] for axes in panels)


def test_slow_systems_can_be_told_apart(ran, monkeypatch):
    data = json.loads(json.dumps(ran[0]))
    for speed in (1.94, 9.94, 9.96, 53.9):
        for row in data["results"]:
            row["tokens_per_second"] = dict.fromkeys(("median", "min", "max"), speed)
        _, panels = drawn_axes(data, monkeypatch)
        shown = {text.get_text().split()[0] for axes in panels for text in axes.texts}
        assert shown == {{1.94: "1.9", 9.94: "9.9", 9.96: "10", 53.9: "54"}[speed]}


def test_labels_of_several_lines_have_room(ran, monkeypatch):
    long = (
        json.dumps(ran[0])
        .replace('"full"', '"hybrid:ranking=a,core_size=9"')
        .replace(":size=64", ":ranking=b,size=64")
    )
    figure, panels = drawn_axes(json.loads(long), monkeypatch)
    figure.draw_without_rendering()
    for axes in panels:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert sum("\n" in label.get_text() for label in axes.get_yticklabels()) == 2 + has_head_product()
        assert not any(first.overlaps(second) for first, second in pairwise(boxes))


def test_the_same_chart_is_drawn_again_from_the_file(ran, tmp_path):
    data, first = ran
    (tmp_path / "results.json").write_text(json.dumps(data))
    result = command_line.invoke("plot", tmp_path / "results.json", tmp_path / "again.svg")
    assert result.exit_code == 0, result.exception
    assert (tmp_path / "again.svg").read_bytes() == first and b"plain generate" in first


@pytest.mark.parametrize(("after", "draws"), [(3, False), (16, True)])
def test_an_interrupted_run_draws_what_it_has(ran, tmp_path, monkeypatch, after, draws):
    (tmp_path / "three.jsonl").write_bytes((POCKET / "prompts.jsonl").read_bytes())
    generate, calls = Run._generate, []

    def interrupt(self, *arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(Run, "_generate", interrupt)
    result = invoke(tmp_path, "--repeats", 1)
    assert result.exit_code == 130 and (tmp_path / "chart.svg").exists() == draws


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no such file or directory"),
        ("{", "is no JSON"),
        ("[]", "is not what --json of hf-dynspec bench writes"),
        ('{"results": [], "measured": []}', "coverage --plot"),
        ('{"sentence": "", "measured": []}', "is of hf-dynspec doctor, which has no chart"),
        ('{"results": [{"domain": null}]}', "are not what --json of hf-dynspec bench writes"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused(tmp_path, text, problem):
    results = tmp_path / "results.json"
    if text is not None:
        results.write_text(text)
    result = command_line.invoke("plot", results, tmp_path / "chart.svg")
    assert isinstance(result.exception, ConfigurationError) and problem in str(result.exception)
    assert not (tmp_path / "chart.svg").exists()


def test_a_chart_of_no_finished_repeat_is_refused(ran, tmp_path):
    empty = {**ran[0], "results": [{"domain": None, "system": "plain", "prompts": 0}]}
    with pytest.raises(ConfigurationError, match="there is no speed to draw"):
        write_speed_chart(tmp_path / "chart.svg", empty)


def test_a_name_that_is_no_image_is_refused_before_models_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "three.jsonl").write_text('{"text": "a"}\n')
    result = invoke(tmp_path, "--plot", tmp_path / "chart.txt")
    assert isinstance(result.exception, ConfigurationError)
    assert "chart.txt has no suffix of an image" in str(result.exception)


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("retrieval:core=rank/without-none,graph=graph/without-none", "retrieval"),
        (
            "frequency:ranking=made/rank,size=1024+in_context:eviction=lru",
            "frequency:size=1024+in_context:eviction=lru",
        ),
        ("frequency:size=1024,ranking=made/rank+in_context", "frequency:size=1024+in_context"),
        ("hybrid, trees 60/5/10", "hybrid, trees 60/5/10"),
    ],
)
def test_labels_name_no_folders(label, shown):
    assert _without_paths(label) == shown
