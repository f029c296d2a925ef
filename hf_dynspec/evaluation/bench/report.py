"""What a benchmark found: tables, and a JSON file that says where they come from."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...errors import counted
from ..provenance import describe_policies, provenance
from ..tables import FittedTable, cell, decoding_title
from .benchmark import BenchmarkResult
from .figures import BASELINE_POLICIES, summarize
from .systems import (
    COMPILED,
    CONSTANT_DRAFT_LENGTH,
    HEAD_PRODUCT,
    PLAIN,
    PROMPT_LOOKUP_SETTINGS,
    TRANSFORMERS,
    WITHOUT_DRAFTS,
)

# 2: plain generation with this package's head product is one of the systems and one of the ratios, where it applies.
# 3: so are transformers' defaults and prompt lookup.
SCHEMA_VERSION = 3
# The columns of the ratios to the baselines.
_HEADINGS = {
    PLAIN: "vs plain",
    HEAD_PRODUCT: "vs plain with\nhead product",
    COMPILED: "vs compiled\nstatic cache",
    TRANSFORMERS: "vs transformers",
}


def speed_table(result: BenchmarkResult, temperature: float) -> FittedTable:
    """One row per system: speed, ratios, acceptance length and, if greedy, whether the tokens are plain's."""
    rows = _rows_of_all_domains(result, temperature)
    compared = _compared(result)
    repeats = max((len(row["tokens_per_second"]["per_repeat"]) for row in rows if row["prompts"]), default=0)
    spread = f"median [least, greatest] of {repeats} repeats" if repeats > 1 else "one repeat"
    prompts = rows[0]["prompts"] if rows else 0
    same = "; full and frequency are those of the same drafter and shape" if len(result.groups) > 1 else ""
    headings = ["system", "tokens/s", *(_HEADINGS.get(base, f"vs {base}") for base in compared), "acceptance\nlength"]
    table = FittedTable(
        f"{decoding_title(temperature, result.settings.top_k)}, {counted(prompts, 'prompt')}",
        headings + ["identical"] * (temperature == 0),
        caption=f"{spread}; the acceptance length counts the target's own token of a round{same}",
    )
    for row in rows:
        bases = _first_by_name(result, row)
        cells = [row["system"], _spread_cell(row.get("tokens_per_second"), ".1f")]
        cells += [
            "" if bases.get(name) in (None, row["system"]) else _spread_cell(row["ratios"][bases[name]], ".2f", "×")
            for name in compared
        ]
        cells.append(cell(row.get("acceptance_length"), ".2f"))
        if temperature == 0:
            cells.append("" if row["system"] == PLAIN else f"{row['identical']}/{row['compared']}")
        table.add_row(*cells, ends_section=_ends_group(result, row["system"]))
    return table


def round_table(result: BenchmarkResult, temperature: float) -> FittedTable:
    """One row per assistant: what a round drafts and from how many tokens, and where its time goes."""
    headings = ["system", "drafted\ntokens", "acceptance\nlength", "active\nvocabulary", "coverage", "draft ms"]
    table = FittedTable(
        f"{decoding_title(temperature, result.settings.top_k)}, one round",
        [*headings, "verification\nms", "of the\noracle"],
        caption="times are of profiled calls; the oracle's rounds take no time but that of both models' layers",
    )
    for row in _rows_of_all_domains(result, temperature):
        if row["system"] not in result.combinations:
            continue
        cells = [
            cell(row.get("drafted_per_round"), ".1f"),
            cell(row.get("acceptance_length"), ".2f"),
            cell(row.get("active_vocabulary"), ",.0f"),
            cell(row.get("coverage"), ".4f"),
            cell(row.get("draft_ms_per_round"), ".2f"),
            cell(row.get("ms_per_round", {}).get("verification"), ".2f"),
            cell(row.get("share_of_oracle"), ".1%"),
        ]
        table.add_row(row["system"], *cells, ends_section=_ends_group(result, row["system"]))
    return table


def _rows_of_all_domains(result: BenchmarkResult, temperature: float) -> list[dict[str, Any]]:
    return [row for row in summarize(result) if row["temperature"] == temperature and row["domain"] is None]


def _compared(result: BenchmarkResult) -> list[str]:
    """The names of the columns of ratios."""
    names = {*result.labels, *(result.policy_name(label) for label in result.combinations)}
    # Transformers' assisted generation drafts chains from all tokens, so that beside the one drafter that it drafts
    # with too, that drafter's `full` says little more.
    says_little = {"full"} if TRANSFORMERS in names and len(result.groups) == 1 else set()
    return [name for name in (*_HEADINGS, *BASELINE_POLICIES) if name in names - says_little]


def _first_by_name(result: BenchmarkResult, row: dict[str, Any]) -> dict[str, str]:
    """Which system each column of ratios compares a row with: of several sizes of one policy, the first."""
    bases: dict[str, str] = {}
    for base in row.get("ratios", {}):
        bases.setdefault(result.policy_name(base) or base, base)
    return bases


def _ends_group(result: BenchmarkResult, label: str) -> bool:
    """Whether the systems of another drafter or shape follow, so that a line is drawn between them."""
    if len(result.groups) == 1:
        return False
    labels = result.labels
    following = labels[labels.index(label) + 1 :][:1]
    groups = [result.combinations[one].group if one in result.combinations else None for one in (label, *following)]
    return len(set(groups)) > 1


def acceptance_table(result: BenchmarkResult, temperature: float) -> FittedTable:
    """Acceptance lengths: one row per system that drafts, one column per domain."""
    domains = list(dict.fromkeys(prompt["domain"] for prompt in result.prompts))
    lengths = {
        (row["system"], row["domain"]): row.get("acceptance_length")
        for row in summarize(result)
        if row["temperature"] == temperature
    }
    table = FittedTable(
        f"Acceptance length, {decoding_title(temperature, result.settings.top_k)}", ["system", *domains]
    )
    for label in result.labels:
        if label not in WITHOUT_DRAFTS:
            table.add_row(label, *(cell(lengths[label, domain], ".2f") for domain in domains))
    return table


def _spread_cell(spread: dict[str, Any] | None, form: str, unit: str = "") -> str:
    if spread is None:
        return "–"
    text = f"{spread['median']:{form}}{unit}"
    if len(spread["per_repeat"]) > 1:
        text += f"\n[{spread['min']:{form}}, {spread['max']:{form}}]"
    return text


def to_dict(result: BenchmarkResult, command: Sequence[str] | None = None) -> dict[str, Any]:
    """All that was measured and where it comes from, see `provenance`, as JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": result.complete,
        "notes": result.notes,
        "provenance": provenance(command, result.started, result.finished, result.threads),
        "settings": {
            **result.settings.to_dict(),
            "temperatures": list(result.settings.temperatures),
            "drafter_settings_of_all_systems": CONSTANT_DRAFT_LENGTH,  # but of the rivals
            "prompt_lookup_settings": PROMPT_LOOKUP_SETTINGS,
        },
        "models": result.models,
        "policies": describe_policies(result.policies),
        "systems": {label: asdict(combination) for label, combination in result.combinations.items()},
        "prompts": result.prompts,
        "results": summarize(result),
        "generations": [asdict(generation) for generation in result.generations],
    }
