"""Pictures of the experiments on online alignment, drawn from the JSON values of their results."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Requests that a point of a running mean covers.
WINDOW = 8
# Half of a 95% interval, in standard errors.
INTERVAL = 1.96


def write_figure(path: Path, name: str, measured: dict[str, Any], new: str) -> None:
    """Draw one experiment.

    Args:
        path: the image; its suffix says the format.
        name: the experiment's.
        measured: for each system its requests and what its alignment says, as they are in results.json.
        new: the kind of text that the target was fine-tuned on.
    """
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if name in ("switch", "decay", "noise", "harm", "clock"):
        _draw_stream(axes, measured, new)
    elif name == "memory":
        _draw_bytes(axes, measured)
    else:
        _draw_kinds(axes, measured, by_kind=name == "ablation")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_stream(axes: Axes, measured: dict[str, Any], new: str) -> None:
    """Running means over the stream, and a line where the kind of text changes."""
    for index, (system, result) in enumerate(measured.items()):
        lengths = [one["acceptance_length"] for one in result["requests"]]
        means = [fmean(lengths[max(0, end - WINDOW) : end]) for end in range(1, len(lengths) + 1)]
        axes.plot(range(1, len(means) + 1), means, label=system, color=f"C{index}")
    kinds = [one["kind"] for one in next(iter(measured.values()))["requests"]]
    if new in kinds[1:] and kinds[0] != new:
        axes.axvline(kinds.index(new) + 0.5, color="0.4", linestyle="--", label="new texts begin")
    axes.set_xlabel("request")
    axes.set_ylabel(f"acceptance length, mean of {WINDOW} requests")
    axes.legend(fontsize="small")


def _draw_bytes(axes: Axes, measured: dict[str, Any]) -> None:
    """What gradients and optimizer state take, on a logarithmic scale, as they differ by orders of magnitude."""
    held = {system: result["alignment"]["training_bytes"] / 2**20 for system, result in measured.items()}
    axes.bar_label(axes.bar(list(held), list(held.values())), fmt="%.2f")
    axes.set_yscale("log")
    axes.set_ylabel("MiB of gradients and optimizer state")


def _draw_kinds(axes: Axes, measured: dict[str, Any], by_kind: bool) -> None:
    """Acceptance lengths with 95% intervals, a group of bars for each kind of text, or one for all."""
    kinds = (
        list(dict.fromkeys(one["kind"] for one in next(iter(measured.values()))["requests"])) if by_kind else [None]
    )
    width = 0.8 / len(measured)
    for index, (system, result) in enumerate(measured.items()):
        groups = [
            [one["acceptance_length"] for one in result["requests"] if kind in (None, one["kind"])] for kind in kinds
        ]
        places = [place + (index - (len(measured) - 1) / 2) * width for place in range(len(kinds))]
        axes.bar(places, [fmean(group) for group in groups], width, yerr=list(map(_half, groups)), label=system)
    axes.set_xticks(range(len(kinds)), ["all turns" if kind is None else kind for kind in kinds])
    axes.set_ylabel("acceptance length")
    axes.set_ylim(bottom=1.0)
    axes.legend(fontsize="small")


def _half(values: Sequence[float]) -> float:
    return INTERVAL * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
