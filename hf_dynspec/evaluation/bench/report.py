"""What a benchmark found: figures with their spread, tables, and a JSON file that says where they come from."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from ...stats import DRAFT_SECTIONS, DraftingStatistics
from ..provenance import describe_policies, provenance
from ..tables import FittedTable
from .benchmark import BenchmarkResult, Generation
from .systems import CONSTANT_DRAFT_LENGTH, HEAD_PRODUCT, PLAIN, TRANSFORMERS

# 2: plain generation with this package's head product is one of the systems and one of the ratios, where it applies.
SCHEMA_VERSION = 2
# What each system is compared with, and the columns of these ratios.
_BASELINES = {PLAIN: "vs plain", HEAD_PRODUCT: "vs plain with\nhead product", TRANSFORMERS: "vs transformers"}
# Policies that the others of the same drafter and shape are compared with, besides the baselines.
BASELINE_POLICIES = ("full", "frequency")


# Figures -----------------------------------------------------------------------------------------------------------


def summarize(result: BenchmarkResult) -> list[dict[str, Any]]:
    """Figures for every temperature, domain and system; domain None is all of them together.

    Speeds count the prompts that every system has finished in a repeat, so that they are of the same work. A ratio is
    taken within each repeat, between runs that took turns; median, least and greatest are over the repeats. Systems
    are compared with the baselines and with `full` and `frequency` of the same drafter and shape.

    Returns:
        Dicts of plain numbers. `tokens_per_second` is all new tokens / all seconds, `mean_tokens_per_second` is the
        mean over prompts as Spec-Bench computes it. What was not measured is None or left out.
    """
    domains = [None, *dict.fromkeys(prompt["domain"] for prompt in result.prompts)]
    rows = []
    for temperature in result.settings.temperatures:
        for domain in domains:
            repeats = _repeats(result, temperature, domain)
            for label in _labels(result):
                rows.append({"temperature": temperature, "domain": domain, "system": label})
                rows[-1].update(_speed(repeats, label, _baselines(result, label)))
                rows[-1].update(_drafting(result, temperature, domain, label))
                if temperature == 0:
                    rows[-1].update(_identity(result, domain, label))
    return rows


def _labels(result: BenchmarkResult) -> list[str]:
    """The systems that ran, in the order of the tables."""
    ran = {generation.system for generation in result.generations}
    return [label for label in (*_BASELINES, *result.combinations) if label in ran]


def _groups(result: BenchmarkResult) -> list[Any]:
    """The pairs of a drafter and a shape, in the order of the tables."""
    return list(dict.fromkeys(combination.group for combination in result.combinations.values()))


def _policy(result: BenchmarkResult, label: str) -> str | None:
    """The name of the class of a system's policy; None for the baselines."""
    return result.policies[result.combinations[label].policy].name if label in result.combinations else None


def _baselines(result: BenchmarkResult, label: str) -> list[str]:
    """What a system is compared with: the baselines, and policies of its own drafter and shape.

    Where there is only one drafter and shape, the baselines are compared with its policies too.
    """
    groups = _groups(result)
    own = result.combinations[label].group if label in result.combinations else groups[0] if len(groups) == 1 else None
    named = [
        other
        for other, combination in result.combinations.items()
        if combination.group == own and _policy(result, other) in BASELINE_POLICIES
    ]
    ran = set(_labels(result))
    return [base for base in (*_BASELINES, *named) if base in ran]


def _repeats(result: BenchmarkResult, temperature: float, domain: str | None) -> list[dict[str, list[Generation]]]:
    """For each repeat, the generations of each system on the prompts that all of them have finished."""
    finished: dict[tuple[int, str], dict[str, Generation]] = {}
    for generation in result.generations:
        if generation.temperature == temperature and domain in (None, generation.domain):
            finished.setdefault((generation.repeat, generation.prompt), {})[generation.system] = generation
    labels = set(_labels(result))
    repeats: dict[int, dict[str, list[Generation]]] = {}
    for (repeat, _), by_system in finished.items():
        if set(by_system) == labels:
            for label, generation in by_system.items():
                repeats.setdefault(repeat, {}).setdefault(label, []).append(generation)
    return [repeats[repeat] for repeat in sorted(repeats)]


def _speed(repeats: list[dict[str, list[Generation]]], label: str, baselines: Iterable[str]) -> dict[str, Any]:
    if not repeats:
        return {"prompts": 0}
    totals = [{name: _total_speed(runs) for name, runs in repeat.items()} for repeat in repeats]
    return {
        "prompts": max(len(repeat[label]) for repeat in repeats),
        "new_tokens": sum(run.tokens for repeat in repeats for run in repeat[label]),
        "seconds": sum(run.seconds for repeat in repeats for run in repeat[label]),
        "tokens_per_second": _spread([total[label] for total in totals]),
        "mean_tokens_per_second": _spread(
            [fmean(run.tokens / run.seconds for run in repeat[label]) for repeat in repeats]
        ),
        "ratios": {base: _spread([total[label] / total[base] for total in totals]) for base in baselines},
    }


def _total_speed(runs: list[Generation]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "per_repeat": list(values)}


def _drafting(result: BenchmarkResult, temperature: float, domain: str | None, label: str) -> dict[str, Any]:
    """Acceptance and active vocabulary and, over all domains, what was measured in passes of their own."""
    if label in (PLAIN, HEAD_PRODUCT):
        return {"acceptance_length": 1.0}
    if label == TRANSFORMERS:
        counts = [
            count for key, count in result.forwards.items() if key[0] == temperature and domain in (None, key[1])
        ]
        tokens, forwards = (sum(part) for part in zip(*counts, strict=True)) if counts else (0, 0)
        return {"acceptance_length": tokens / forwards} if forwards else {}
    stats = DraftingStatistics()
    for (at, system, of_domain), part in result.drafting.items():
        if (at, system) == (temperature, label) and domain in (None, of_domain):
            stats.add(part)
    figures: dict[str, Any] = {}
    if stats.rounds:
        figures["drafting"] = stats.to_dict()
        for name in ("acceptance_length", "acceptance_rate", "active_vocabulary", "active_vocabulary_max"):
            figures[name] = figures["drafting"][name]
        figures["drafted_per_round"] = stats.drafted / stats.rounds
    if domain is None:
        figures.update(_studied(result, temperature, label))
    return figures


def _studied(result: BenchmarkResult, temperature: float, label: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    profile, coverage = (passes.get((temperature, label)) for passes in (result.profiles, result.coverages))
    if profile is not None and profile.rounds:
        total = sum(profile.seconds.values())
        per_round = {name: 1e3 * seconds / profile.rounds for name, seconds in profile.seconds.items()}
        figures["profile"] = profile.to_dict()
        figures["ms_per_round"] = per_round
        figures["draft_ms_per_round"] = sum(per_round[name] for name in DRAFT_SECTIONS)
        figures["share_of_round"] = {name: seconds / total for name, seconds in profile.seconds.items()}
    if coverage is not None:
        figures["coverage"] = coverage.coverage
    return figures


def _identity(result: BenchmarkResult, domain: str | None, label: str) -> dict[str, Any]:
    of_domain = {prompt["identifier"] for prompt in result.prompts if domain in (None, prompt["domain"])}
    compared = result.compared.get(label, set()) & of_domain
    mismatches = {name: position for name, position in result.mismatches.get(label, {}).items() if name in of_domain}
    return {"compared": len(compared), "identical": len(compared) - len(mismatches), "mismatches": mismatches}


# Tables ------------------------------------------------------------------------------------------------------------


def speed_table(result: BenchmarkResult, temperature: float) -> FittedTable:
    """One row per system: speed, ratios, acceptance length and, if greedy, whether the tokens are plain's."""
    rows = _rows_of_all_domains(result, temperature)
    compared = _compared(result)
    repeats = max((len(row["tokens_per_second"]["per_repeat"]) for row in rows if row["prompts"]), default=0)
    spread = f"median [least, greatest] of {repeats} repeats" if repeats > 1 else "one repeat"
    prompts = rows[0]["prompts"] if rows else 0
    same = "; full and frequency are those of the same drafter and shape" if len(_groups(result)) > 1 else ""
    headings = ["system", "tokens/s", *(_BASELINES.get(base, f"vs {base}") for base in compared), "acceptance\nlength"]
    table = FittedTable(
        f"{_temperature_name(result, temperature)}, {prompts} prompt{'' if prompts == 1 else 's'}",
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
        cells.append(_cell(row.get("acceptance_length"), ".2f"))
        if temperature == 0:
            cells.append("" if row["system"] == PLAIN else f"{row['identical']}/{row['compared']}")
        table.add_row(*cells, ends_section=_ends_group(result, row["system"]))
    return table


def round_table(result: BenchmarkResult, temperature: float) -> FittedTable:
    """One row per assistant: what a round drafts and from how many tokens, and where its time goes."""
    headings = ["system", "drafted\ntokens", "acceptance\nlength", "active\nvocabulary", "coverage", "draft ms"]
    table = FittedTable(
        f"One round, {_temperature_name(result, temperature)}",
        [*headings, "verification\nms", "other"],
        caption="times are of profiled calls; other is what is neither drafting nor the target's forward",
    )
    for row in _rows_of_all_domains(result, temperature):
        if row["system"] not in result.combinations:
            continue
        cells = [
            _cell(row.get("drafted_per_round"), ".1f"),
            _cell(row.get("acceptance_length"), ".2f"),
            _cell(row.get("active_vocabulary"), ",.0f"),
            _cell(row.get("coverage"), ".4f"),
            _cell(row.get("draft_ms_per_round"), ".2f"),
            _cell(row.get("ms_per_round", {}).get("verification"), ".2f"),
            _cell(row.get("share_of_round", {}).get("other"), ".1%"),
        ]
        table.add_row(row["system"], *cells, ends_section=_ends_group(result, row["system"]))
    return table


def _rows_of_all_domains(result: BenchmarkResult, temperature: float) -> list[dict[str, Any]]:
    return [row for row in summarize(result) if row["temperature"] == temperature and row["domain"] is None]


def _compared(result: BenchmarkResult) -> list[str]:
    """The names of the columns of ratios."""
    names = {*_labels(result), *(_policy(result, label) for label in result.combinations)}
    # Transformers' assisted generation drafts chains from all tokens, so that beside the one drafter that it drafts
    # with too, that drafter's `full` says little more.
    says_little = {"full"} if TRANSFORMERS in names and len(_groups(result)) == 1 else set()
    return [name for name in (*_BASELINES, *BASELINE_POLICIES) if name in names - says_little]


def _first_by_name(result: BenchmarkResult, row: dict[str, Any]) -> dict[str, str]:
    """Which system each column of ratios compares a row with: of several sizes of one policy, the first."""
    bases: dict[str, str] = {}
    for base in row.get("ratios", {}):
        bases.setdefault(_policy(result, base) or base, base)
    return bases


def _ends_group(result: BenchmarkResult, label: str) -> bool:
    """Whether the systems of another drafter or shape follow, so that a line is drawn between them."""
    if len(_groups(result)) == 1:
        return False
    labels = _labels(result)
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
    table = FittedTable(f"Acceptance length, {_temperature_name(result, temperature)}", ["system", *domains])
    for label in _labels(result):
        if label not in (PLAIN, HEAD_PRODUCT):
            table.add_row(label, *(_cell(lengths[label, domain], ".2f") for domain in domains))
    return table


def _temperature_name(result: BenchmarkResult, temperature: float) -> str:
    if temperature == 0:
        return "Greedy"
    top_k = result.settings.top_k
    return f"Temperature {temperature:g}, " + (f"top-k {top_k}" if top_k else "all tokens")


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _spread_cell(spread: dict[str, Any] | None, form: str, unit: str = "") -> str:
    if spread is None:
        return "–"
    text = f"{spread['median']:{form}}{unit}"
    if len(spread["per_repeat"]) > 1:
        text += f"\n[{spread['min']:{form}}, {spread['max']:{form}}]"
    return text


# The file ----------------------------------------------------------------------------------------------------------


def to_dict(result: BenchmarkResult, command: Sequence[str] | None = None) -> dict[str, Any]:
    """All that was measured and where it comes from, as JSON values. Holds no path beyond its last two parts.

    Args:
        result: what was measured.
        command: the words of the command line (None: the measurement was called from Python).
    """
    settings = result.settings.to_dict()
    settings["temperatures"] = list(settings["temperatures"])
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": result.complete,
        "notes": result.notes,
        "provenance": provenance(command, result.started, result.finished, result.threads),
        "settings": {**settings, "drafter_settings_of_all_systems": CONSTANT_DRAFT_LENGTH},
        "models": result.models,
        "policies": describe_policies(result.policies),
        "systems": {label: asdict(combination) for label, combination in result.combinations.items()},
        "prompts": result.prompts,
        "results": summarize(result),
        "generations": [asdict(generation) for generation in result.generations],
    }
