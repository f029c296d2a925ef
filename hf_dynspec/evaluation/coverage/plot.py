"""A plot of a coverage measurement: mass on the shortlist against its size."""

from pathlib import Path
from typing import Any

from ..plots import plot_style, require_plot_file, save_figure
from .estimates import CoverageSummary, oracle_curve, summarize
from .report import title
from .result import CoverageResult


def write_plot(path: Path, result: CoverageResult) -> None:
    """Plot the mass on the shortlist against its mean size, a point per policy, below the oracle's curve.

    Args:
        path: the image; its suffix says the format.
        result: what was measured; on at least one prompt.

    Raises:
        ConfigurationError: see `require_plot_file`.
        OSError: the file cannot be written.
    """
    require_plot_file(path)
    with plot_style():
        save_figure(_drawn(result), path)


def _drawn(result: CoverageResult) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in summarize(result) if row.domain is None]
    most = "oracle: the most that a shortlist of each size can have"
    axes.plot(*zip(*oracle_curve(result), strict=True), color="0.45", linewidth=1.5, label=most, zorder=1)
    for index, row in enumerate(rows):
        _add_point(axes, row, index)
    axes.set_xscale("log")
    axes.set_xlim(left=max(1.0, min(row.figures["size"].mean for row in rows) / 3))
    lowest = min(row.figures["mass"].mean - (row.figures["mass"].standard_error or 0.0) for row in rows)
    # A margin in proportion to what is shown, as good policies differ in the third decimal.
    margin = max(0.06 * (1.0 - lowest), 1e-4)
    axes.set_ylim(max(0.0, lowest - margin), 1.0 + margin)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.set_xlabel("mean shortlist size (tokens)")
    axes.set_ylabel("target's probability mass on the shortlist")
    axes.set_title(title(result, rows))
    axes.grid(alpha=0.25, which="both")
    # Outside of the axes, where it covers no point of a sweep.
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


# Told apart by shape too, in black and white and by readers who do not see all colours.
_MARKERS = "osD^vP*X<>"


def _add_point(axes: Any, row: CoverageSummary, index: int) -> None:
    size, mass = row.figures["size"].mean, row.figures["mass"]
    axes.errorbar(
        size,
        mass.mean,
        yerr=mass.standard_error,
        fmt=_MARKERS[index % len(_MARKERS)],
        color=f"C{index % 10}",
        markersize=7,
        capsize=3,
        label=row.policy,
        zorder=2,
    )
