"""Pictures of the experiments on online alignment, drawn from the JSON values of their results."""

from pathlib import Path
from statistics import fmean
from typing import Any

from alignment_gains import gains
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
    if name in ("switch", "noise", "harm", "clock"):
        _draw_stream(axes, measured, new)
    elif name == "memory":
        _draw_bytes(axes, measured)
    elif len(measured) > 1:
        _draw_gains(axes, measured, by_kind=name == "ablation")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    # Above the axes, where it hides nothing.
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=5, frameon=False)
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


def _draw_bytes(axes: Axes, measured: dict[str, Any]) -> None:
    """What gradients and optimizer state take, on a logarithmic scale, as they differ by orders of magnitude."""
    held = {system: result["alignment"]["training_bytes"] / 2**20 for system, result in measured.items()}
    axes.bar_label(axes.bar(list(held), list(held.values())), fmt="%.2f")
    axes.set_yscale("log")
    axes.set_ylabel("MiB of gradients and optimizer state")


def _draw_gains(axes: Axes, measured: dict[str, Any], by_kind: bool) -> None:
    """Gains over the first system with their paired 95% intervals: a group of bars for each kind of text, or one bar
    for each system."""
    first, *others = measured
    kinds = list(dict.fromkeys(one["kind"] for one in measured[first]["requests"])) if by_kind else ["all"]
    by_system = [gains(measured, [kind] if by_kind else None) for kind in kinds]
    width = 0.8 / len(others) if by_kind else 0.6
    for index, system in enumerate(others):
        ratios = [one[system] for one in by_system]
        shift = (index - (len(others) - 1) / 2) * width if by_kind else index
        axes.bar(
            [place + shift for place in range(len(kinds))],
            [100 * (one.mean - 1) for one in ratios],
            width,
            yerr=[100 * INTERVAL * (one.standard_error or 0.0) for one in ratios],
            capsize=3,
            ecolor="0.2",
            label=system if by_kind else None,
        )
    axes.set_xticks(*(range(len(kinds)), kinds) if by_kind else (range(len(others)), others))
    axes.axhline(0, color="0.2", linewidth=0.8)
    axes.set_ylabel(f"gain of acceptance length over {first}, %")
