"""What a coverage measurement found: tables, and a JSON file that says where the figures come from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...errors import counted
from ...shortlists import ShortlistPolicy
from ..provenance import describe_policies, provenance
from ..tables import FittedTable
from .estimates import DEPTH_FIGURES, CoverageSummary, Estimate, oracle_curve, summarize
from .result import CoverageResult

# 2: sizes are means over all draft steps, counts are expectations, and policies are compared with the first.
# 3: a prompt has as many rows of a policy as it has continuations.
# 4: rows say how many draws they are means of, `drawn` has the draws of all policies where those of some are needed,
# and a policy may differ by domain.
SCHEMA_VERSION = 4


# Tables ------------------------------------------------------------------------------------------------------------


def coverage_table(result: CoverageResult) -> FittedTable:
    """One row per policy, over all prompts: means, with standard errors over prompts where there are several."""
    settings = result.settings
    rows = [row for row in summarize(result) if row.domain is None]
    table = FittedTable(
        title(result, rows),
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
        caption="mean ± standard error over prompts; size: over all draft steps; oracle mass: of as many most "
        "probable tokens, the most that a shortlist of that size can have; acceptance lengths count the target's own "
        f"token of a round, and are compared with the first policy's prompt by prompt{_note_on_draws(rows)}",
    )
    for row in rows:
        cells = [_cell(row.figures[name], form) for name, form in _FORMS.items()]
        cells.append(_relative_cell(result, row))
        table.add_row(row.policy, *cells, f"{row.expected_acceptance_length:.2f}")
    return table


def _note_on_draws(rows: Sequence[CoverageSummary]) -> str:
    """What to add to the caption where rounds were drawn."""
    draws = max((row.draws for row in rows), default=0)
    if not draws:
        return ""
    courses = "one course of rounds is" if draws == 1 else f"{draws} courses of rounds are"
    return (
        f"; along each text, {courses} drawn for policies that learn from verdicts, which are compared with others "
        "drawn with the same luck"
    )


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
    summaries = summarize(result)
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
    """How shortlists fare at each draft depth, for budgets that differ by depth: a row per policy and depth at which a
    draft of it was verified, over all prompts.

    A depth has fewer positions than the one before it, as only accepted drafts lead there. Sizes are over all rounds
    that draft there.
    """
    rows = [row for row in summarize(result) if row.domain is None]
    table = FittedTable(
        f"By draft depth, {_temperature_name(result)}",
        ["policy", "depth", "positions", *_DEPTH_LABELS.values()],
        caption="depth: drafts of the round before it; positions: expected number of drafts verified there; means "
        "over the prompts on which it was verified",
        labels=2,
    )
    for row in rows:
        for depth, one in enumerate(row.by_depth):
            figures = [f"{one.figures[name].mean:{_FORMS[name]}}" for name in _DEPTH_LABELS]
            is_last = depth == len(row.by_depth) - 1
            label = "" if depth else row.policy
            table.add_row(label, str(depth), f"{one.positions:,.1f}", *figures, ends_section=is_last)
    return table


def title(result: CoverageResult, rows: Sequence[CoverageSummary]) -> str:
    prompts = rows[0].prompts if rows else 0
    texts = f", {len(result.oracle_curves)} texts" if result.settings.continuations > 1 else ""
    stream = ", as a stream" if result.settings.stream else ""
    return f"Coverage, {_temperature_name(result)}, {counted(prompts, 'prompt')}{texts}{stream}"


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
        "policies": {label: _describe(by_domain) for label, by_domain in result.policies.items()},
        "prompts": result.prompts,
        "results": [asdict(summary) for summary in summarize(result)],
        "oracle_curve": [{"size": size, "mass": mass} for size, mass in oracle_curve(result)],
        "measured": [asdict(one) for one in result.measured],
        "drawn": [asdict(one) for one in result.drawn],
    }


def _describe(by_domain: Mapping[str, ShortlistPolicy]) -> dict[str, Any]:
    """A policy as `describe_policies` does, or one for each domain, `by_domain`, where they differ."""
    if len({id(policy) for policy in by_domain.values()}) > 1:
        return {"by_domain": describe_policies(by_domain)}
    return describe_policies(dict([next(iter(by_domain.items()))])).popitem()[1]
