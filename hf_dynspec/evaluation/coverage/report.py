"""Tables of a coverage measurement, its plot and its JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import counted
from ...shortlists import ShortlistPolicy
from ..plots import MARKERS, plot_style, require_plot_file, save_figure
from ..provenance import describe_policies, provenance
from ..tables import FittedTable, decoding
from .estimates import FIGURES, CoverageSummary, oracle_curve, summarize
from .result import CoverageResult

# 4: rows have `draws`, and `drawn` has those of all policies; a policy may differ by domain.
SCHEMA_VERSION = 4

# How the figures are shown.
_FORMS = dict(zip(FIGURES, (",.0f", ".4f", ".4f", ".3f", ".4f", ".3f", ".2f"), strict=True))

# Below the mean, what stands before its standard error.
_ERROR = "\n±"


def coverage_table(result: CoverageResult) -> FittedTable:
    """One row per policy, over all prompts."""
    rows = _overall(result)
    headings = [
        "policy",
        "shortlist\nsize",
        "mass",
        "oracle\nmass",
        f"recall\n@{result.settings.recall_k}",
        "OOV\nrate",
        "acceptance\nprobability",
        "acceptance\nlength",
        f"of\n{result.baseline}",
        "by\nequation 1",
    ]
    caption = (
        "mean ± standard error over prompts; size: over all draft steps; oracle mass: of as many most probable "
        "tokens, the most that a shortlist of that size can have; acceptance lengths count the target's own token of "
        "a round, and are compared with the first policy's prompt by prompt"
    )
    draws = max((row.draws for row in rows), default=0)
    if draws:
        drawn = "once" if draws == 1 else f"{draws} times"
        caption += (
            f"; for policies that learn from verdicts, the rounds along each text are drawn {drawn}, and compared "
            "with rounds of the others that are drawn with the same luck"
        )
    table = FittedTable(title(result), headings, caption)
    for row in rows:
        cells = [row.figures[name].shown(form, _ERROR) for name, form in _FORMS.items()]
        table.add_row(row.policy, *cells, _relative(result, row), f"{row.expected_acceptance_length:.2f}")
    return table


def domain_tables(result: CoverageResult) -> list[FittedTable]:
    """Mass on the shortlist, and acceptance length relative to the first policy: one row per policy, one column per
    domain."""
    by_place = {(row.policy, row.domain): row for row in summarize(result)}
    tables = []
    for name in ("Mass on the shortlist", f"Acceptance length relative to {result.baseline}"):
        table = FittedTable(f"{name}, {decoding(result.settings.temperature)}", ["policy", *result.domains])
        for label in result.policies:
            rows = [by_place[label, domain] for domain in result.domains]
            masses = [row.figures["mass"].shown(_FORMS["mass"], _ERROR) for row in rows]
            table.add_row(label, *([_relative(result, row) for row in rows] if tables else masses))
        tables.append(table)
    return tables


def depth_table(result: CoverageResult) -> FittedTable:
    """A row per policy and draft depth at which a draft of it was verified, over all prompts."""
    table = FittedTable(
        f"By draft depth, {decoding(result.settings.temperature)}",
        ["policy", "depth", "positions", "shortlist size", "mass", "acceptance probability"],
        caption="depth: drafts of the round before it; positions: expected number of drafts verified there; means "
        "over the prompts on which it was verified",
        labels=2,
    )
    for row in _overall(result):
        for depth, one in enumerate(row.by_depth):
            figures = [f"{estimate.mean:{_FORMS[name]}}" for name, estimate in one.figures.items()]
            is_last = depth == len(row.by_depth) - 1
            label = "" if depth else row.policy
            table.add_row(label, str(depth), f"{one.positions:,.1f}", *figures, ends_section=is_last)
    return table


def title(result: CoverageResult) -> str:
    """What the measurement is of."""
    prompts = counted(len({prompt for prompt, _ in result.oracle_curves}), "prompt")
    texts = f", {len(result.oracle_curves)} texts" if result.settings.continuations > 1 else ""
    stream = ", as a stream" if result.settings.stream else ""
    return f"Coverage, {decoding(result.settings.temperature)}, {prompts}{texts}{stream}"


def write_plot(path: Path, result: CoverageResult) -> None:
    """Plot the mass on the shortlist against its mean size, a point per policy, below the oracle's curve. There must
    be a measured prompt. Raises as `require_plot_file`, and `OSError` if the file cannot be written."""
    require_plot_file(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    rows = _overall(result)
    with plot_style():
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        axes = figure.add_subplot()
        most = "oracle: the most that a shortlist of each size can have"
        axes.plot(*zip(*oracle_curve(result), strict=True), color="0.45", linewidth=1.5, label=most, zorder=1)
        for index, row in enumerate(rows):
            size, mass = row.figures["size"].mean, row.figures["mass"]
            style = {"fmt": MARKERS[index % len(MARKERS)], "color": f"C{index % 10}", "markersize": 7, "capsize": 3}
            axes.errorbar(size, mass.mean, yerr=mass.standard_error, label=row.policy, zorder=2, **style)
        axes.set_xscale("log")
        axes.set_xlim(left=max(1.0, min(row.figures["size"].mean for row in rows) / 3))
        lowest = min(row.figures["mass"].mean - (row.figures["mass"].standard_error or 0.0) for row in rows)
        # In proportion to the range, as good policies differ in the third decimal.
        margin = max(0.06 * (1.0 - lowest), 1e-4)
        axes.set_ylim(max(0.0, lowest - margin), 1.0 + margin)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("mean shortlist size (tokens)")
        axes.set_ylabel("target's probability mass on the shortlist")
        axes.set_title(title(result))
        axes.grid(alpha=0.25, which="both")
        # Outside of the axes, where it covers no point.
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        save_figure(figure, path)


def to_dict(result: CoverageResult, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that was measured and its provenance, see `provenance`, as JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": result.complete,
        "notes": result.notes,
        "provenance": provenance(command, result.started, result.finished, result.threads),
        "settings": result.settings.to_dict(),
        "models": result.models,
        "policies": {label: _describe(by_domain) for label, by_domain in result.policies.items()},
        "prompts": result.prompts,
        "results": [asdict(summary) for summary in summarize(result)],
        "oracle_curve": [{"size": size, "mass": mass} for size, mass in oracle_curve(result)],
        "measured": [asdict(one) for one in result.measured],
        "drawn": [asdict(one) for one in result.drawn],
    }


def _describe(by_domain: Mapping[str, ShortlistPolicy]) -> dict[str, Any]:
    """A policy as `describe_policies` does, or `by_domain` if it differs."""
    described = describe_policies(by_domain)
    is_one = len({id(policy) for policy in by_domain.values()}) == 1
    return described.popitem()[1] if is_one else {"by_domain": described}


def _overall(result: CoverageResult) -> list[CoverageSummary]:
    return [row for row in summarize(result) if row.domain is None]


def _relative(result: CoverageResult, row: CoverageSummary) -> str:
    return "100%" if row.policy == result.baseline else row.relative_acceptance_length.shown(".2%", _ERROR)
