"""The bar chart of a benchmark, drawn from the JSON values that it writes."""

import json
import re
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..plots import plot_style, require_plot_file, save_figure
from ..tables import decoding, shown_speed
from .published_rows import generation_of, hardware_of, workload
from .systems import BASELINES, PLAIN

# Readable on any page: the chart brings its own paper.
_PAPER, _INK, _BASELINE, _OURS = "white", "0.15", "0.65", "#2f6fb3"
_ROW, _WIDTH = 0.27, 8.0  # inches
# What a line of a label needs of the height of a row.
_LINE = 0.65


def read_benchmark(path: Path) -> dict[str, Any]:
    """What `--json` of `hf-dynspec bench` wrote. Raises `ConfigurationError` if that cannot be read in the file."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no JSON: {error!s:.100}") from error
    if isinstance(data, dict) and "measured" in data:
        own = "doctor, which has no chart" if "sentence" in data else "coverage, which draws its own: coverage --plot"
        raise ConfigurationError(f"{path} is of hf-dynspec {own}")
    if not isinstance(data, dict) or "results" not in data:
        raise ConfigurationError(f"{path} is not what --json of hf-dynspec bench writes")
    return data


def has_speeds(data: dict[str, Any]) -> bool:
    """Whether there is a speed to draw: of a run that was interrupted there may be none."""
    return any("tokens_per_second" in row for row in data["results"])


def write_speed_chart(path: Path, data: dict[str, Any]) -> None:
    """Draw tokens per second, a bar per system and a panel per temperature, with each bar's ratio to plain generate.

    Plain generation with this package's head product is a bar of its own where it was measured, and its ratio is what
    of the others' is not speculation's. Lines in the bars' ends reach from the slowest repeat to the fastest. The same
    values, see `read_benchmark` and `report.to_dict`, give the same bytes.

    Raises:
        ConfigurationError: see `require_plot_file`; or the values are not a benchmark's, or hold no speed.
        OSError: the file cannot be written.
    """
    require_plot_file(path)
    try:
        panels = _panels(data)
        conditions = f"{workload(data)}; {hardware_of(data)}; {generation_of(data)}"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError("the results are not what --json of hf-dynspec bench writes") from error
    if not panels:
        raise ConfigurationError("there is no speed to draw: no repeat was finished by all systems")
    _draw(path, panels, conditions)


def _panels(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By how was decoded: label, speed, slowest, fastest, ratio to plain generate and whether we draft, per system."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in data["results"]:
        if row["domain"] is not None or "tokens_per_second" not in row:
            continue
        speed, label = row["tokens_per_second"], row["system"]
        # The bars keep their width beside a policy with many settings.
        bar = {
            "label": _without_paths(BASELINES.get(label, label)).replace(",", ",\n"),
            "ours": label not in BASELINES,
        }
        bar |= {name: float(speed[name]) for name in ("median", "min", "max")}
        bar["ratio"] = 1.0 if label == PLAIN else float(row["ratios"][PLAIN]["median"])
        panels.setdefault(decoding(row["temperature"], data["settings"]["top_k"]), []).append(bar)
    return panels


def _without_paths(label: str) -> str:
    """The text of a policy without the settings that name folders, which mean nothing to a reader."""
    return re.sub(r"[:,](?=\+|$)", "", re.sub(r"(?<=[:,])\w+=[^,+]*/[^,+]*,?", "", label))


def _draw(path: Path, panels: dict[str, list[dict[str, Any]]], conditions: str) -> None:
    from matplotlib.figure import Figure

    with plot_style(font_size=9):
        # A label of several lines needs room for them.
        heights = [
            len(bars) * max(1.0, _LINE * max(1 + bar["label"].count("\n") for bar in bars)) for bars in panels.values()
        ]
        figure = Figure(figsize=(_WIDTH, _ROW * sum(heights) + 0.5 * len(heights) + 0.5), layout="constrained")
        figure.set_facecolor(_PAPER)
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
            _draw_panel(axes, title, bars)
        # Panels share their limits, and a limit that was set ends their choice: all bars are drawn first.
        all_axes[-1].set_xlim(left=0)
        all_axes[-1].set_xlabel("tokens per second (times plain generate)", color=_INK)
        figure.supxlabel(conditions, fontsize=7, color=_INK)
        save_figure(figure, path)


def _draw_panel(axes: Any, title: str, bars: list[dict[str, Any]]) -> None:
    speeds = [bar["median"] for bar in bars]
    spread = [[bar["median"] - bar["min"] for bar in bars], [bar["max"] - bar["median"] for bar in bars]]
    places = range(len(bars))
    axes.barh(places, speeds, height=0.7, color=[_OURS if bar["ours"] else _BASELINE for bar in bars])
    repeated = [place for place in places if bars[place]["max"] > bars[place]["min"]]
    axes.errorbar(
        [speeds[place] for place in repeated],
        repeated,
        xerr=[[side[place] for place in repeated] for side in spread],
        fmt="none",
        ecolor=_INK,
        elinewidth=1,
        capsize=2,
    )
    for place, bar in enumerate(bars):
        text = f"{shown_speed(bar['median'])}  ({bar['ratio']:.2f}×)"
        axes.annotate(text, (bar["max"], place), (4, 0), textcoords="offset points", va="center", color=_INK)
    axes.set_yticks(places, [bar["label"] for bar in bars], color=_INK)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.set_facecolor(_PAPER)
    axes.margins(x=0.18)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
