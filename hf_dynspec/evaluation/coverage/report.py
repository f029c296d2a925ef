"""What a coverage measurement found: tables, a JSON file that says where the figures come from, and a plot."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..provenance import describe_policies, provenance
from ..tables import FittedTable
from .coverage import DEPTH_FIGURES, CoverageResult, CoverageSummary, Estimate

# 2: sizes are means over all draft steps, counts are expectations, and policies are compared with the first.
# 3: a prompt has as many rows of a policy as it has continuations.
SCHEMA_VERSION = 3


# Tables ------------------------------------------------------------------------------------------------------------


def coverage_table(result: CoverageResult) -> FittedTable:
    """One row per policy, over all prompts: means, with standard errors over prompts where there are several."""
    settings = result.settings
    rows = [row for row in result.summaries() if row.domain is None]
    table = FittedTable(
        _title(result, rows),
        [
            "policy",
            "shortlist\nsize",
            "mass",
            "oracle\nmass",
            f"recall\n@{settings.recall_k}",
            "OOV\nrate",
            "acceptance\nprobability",
            "acceptance\nlength",
            f"of\n{result.baseline}",
            "by\nequation 1",
        ],
        caption="mean ± standard error over prompts; size: over all draft steps; oracle: mass of as many most "
        "probable tokens; acceptance lengths count the target's own token of a round, and are compared with the first "
        "policy's prompt by prompt",
    )
    for row in rows:
        cells = [_cell(row.figures[name], form) for name, form in _FORMS.items()]
        cells.append(_relative_cell(result, row))
        table.add_row(row.policy, *cells, f"{row.expected_acceptance_length:.2f}")
    return table


_FORMS = {
    "size": ",.0f",
    "mass": ".4f",
    "oracle_mass": ".4f",
    "recall": ".3f",
    "oov": ".4f",
    "acceptance": ".3f",
    "acceptance_length": ".2f",
}


def _relative_cell(result: CoverageResult, row: CoverageSummary) -> str:
    return "100%" if row.policy == result.baseline else _cell(row.relative_acceptance_length, ".2%")


def domain_tables(result: CoverageResult) -> list[FittedTable]:
    """Mass on the shortlist, and acceptance length relative to the first policy: one row per policy, one column per
    domain."""
    summaries = result.summaries()
    masses = {(row.policy, row.domain): _cell(row.figures["mass"], _FORMS["mass"]) for row in summaries}
    lengths = {(row.policy, row.domain): _relative_cell(result, row) for row in summaries}
    title = f"Acceptance length relative to {result.baseline}"
    return [_domain_table(result, "Mass on the shortlist", masses), _domain_table(result, title, lengths)]


def _domain_table(result: CoverageResult, title: str, cells: dict[tuple[str, str | None], str]) -> FittedTable:
    table = FittedTable(f"{title}, {_temperature_name(result)}", ["policy", *result.domains])
    for label in result.policies:
        table.add_row(label, *(cells[label, domain] for domain in result.domains))
    return table


# What the figures of a depth are called, in the order of `DEPTH_FIGURES`.
_DEPTH_LABELS = dict(zip(DEPTH_FIGURES, ("shortlist size", "mass", "acceptance probability"), strict=True))


def depth_table(result: CoverageResult) -> FittedTable:
    """How shortlists fare at each draft depth, for budgets that differ by depth: a row per policy and figure, over all
    prompts.

    A depth has fewer positions than the one before it, as only accepted drafts lead there. Sizes are over all rounds
    that draft there.
    """
    rows = [row for row in result.summaries() if row.domain is None]
    depths = max((len(row.by_depth) for row in rows), default=0)
    table = FittedTable(
        f"By draft depth, {_temperature_name(result)}",
        ["policy", "figure", *(f"depth {depth}" for depth in range(depths))],
        caption="depth: drafts of the round before it; positions: expected number of drafts verified there; means "
        "over the prompts on which it was verified",
        labels=2,
    )
    for row in rows:
        lines = [("positions", [f"{one.positions:,.1f}" for one in row.by_depth])]
        for name, label in _DEPTH_LABELS.items():
            lines.append((label, [f"{one.figures[name].mean:{_FORMS[name]}}" for one in row.by_depth]))
        # A policy that was verified at fewer depths has no figures at the others.
        missing = [""] * (depths - len(row.by_depth))
        for number, (label, figures) in enumerate(lines):
            ends_section = number == len(lines) - 1
            table.add_row("" if number else row.policy, label, *figures, *missing, ends_section=ends_section)
    return table


def _title(result: CoverageResult, rows: Sequence[CoverageSummary]) -> str:
    prompts = rows[0].prompts if rows else 0
    texts = f", {len(result.oracle_curves)} texts" if result.settings.continuations > 1 else ""
    return f"Coverage, {_temperature_name(result)}, {prompts} prompt{'' if prompts == 1 else 's'}{texts}"


def _temperature_name(result: CoverageResult) -> str:
    temperature = result.settings.temperature
    return f"temperature {temperature:g}" if temperature else "greedy"


def _cell(estimate: Estimate, form: str) -> str:
    text = f"{estimate.mean:{form}}"
    return text if estimate.standard_error is None else f"{text}\n±{estimate.standard_error:{form}}"


# The file ----------------------------------------------------------------------------------------------------------


def to_dict(result: CoverageResult, command: Sequence[str] | None = None) -> dict[str, Any]:
    """All that was measured and where it comes from, as JSON values. Holds no path beyond its last two parts.

    Args:
        result: what was measured.
        command: the words of the command line (None: the measurement was called from Python).
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": result.complete,
        "notes": result.notes,
        "provenance": provenance(command, result.started, result.finished, result.threads),
        "settings": result.settings.to_dict(),
        "models": result.models,
        "policies": describe_policies(result.policies),
        "prompts": result.prompts,
        "results": [asdict(summary) for summary in result.summaries()],
        "oracle_curve": [{"size": size, "mass": mass} for size, mass in result.oracle_curve()],
        "measured": [asdict(one) for one in result.measured],
    }


# The plot ----------------------------------------------------------------------------------------------------------


def require_plot_file(path: Path) -> None:
    """Refuse a plot that could not be drawn, before there is anything to draw.

    Raises:
        ConfigurationError: matplotlib is not installed, or the name's suffix is no image format that it writes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigurationError(
            "a plot needs matplotlib; install it with: pip install 'hf-dynspec[plots]', or leave --plot out"
        ) from error
    suffix, formats = path.suffix.removeprefix(".").lower(), FigureCanvasAgg.get_supported_filetypes()
    if suffix not in formats:
        raise ConfigurationError(f"{path} has no suffix of an image, such as .png, .pdf or .svg")


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
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in result.summaries() if row.domain is None]
    axes.plot(
        *zip(*result.oracle_curve(), strict=True), color="0.45", linewidth=1.5, label="oracle (lemma 2)", zorder=1
    )
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
    axes.set_title(_title(result, rows))
    axes.grid(alpha=0.25, which="both")
    # Outside of the axes, where it covers no point of a sweep.
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


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
