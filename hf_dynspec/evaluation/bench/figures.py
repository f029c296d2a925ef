"""The figures of a benchmark: all systems, with their spread over repeats."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from ...stats import DRAFT_SECTIONS, LAYER_SECTIONS, DraftingStatistics
from ..suites.figures import compare_with_plain
from ..suites.runs import COVERAGE, PROFILE, TIMED
from .benchmark import BenchmarkResult, Generation
from .systems import BASELINES, PLAIN, WITHOUT_DRAFTS

# Policies that the others of the same drafter and shape are compared with, besides the baselines.
BASELINE_POLICIES = ("full", "frequency")


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
            for label in result.labels:
                place = {"temperature": temperature, "domain": domain, "system": label}
                rows.append(
                    {**place, **_speed(repeats, label, _baselines(result, label)), **_drafting(result, **place)}
                )
                if temperature == 0:
                    plain = result.lines(TIMED, temperature=0.0, system=PLAIN)
                    compared, mismatches = compare_with_plain(result.lines(TIMED, **place), plain)
                    prompts = len(set(compared))
                    rows[-1] |= {"compared": prompts, "identical": prompts - len(mismatches), "mismatches": mismatches}
    return rows


def _baselines(result: BenchmarkResult, label: str) -> list[str]:
    """The baselines and the policies of a system's own drafter and shape, which it is compared with. If there is only
    one drafter and shape, the baselines are compared with its policies too."""
    groups = result.groups
    own = result.combinations[label].group if label in result.combinations else groups[0] if len(groups) == 1 else None
    named = [
        other
        for other, combination in result.combinations.items()
        if combination.group == own and result.policy_name(other) in BASELINE_POLICIES
    ]
    ran = set(result.labels)
    return [base for base in (*BASELINES, *named) if base in ran]


def _repeats(result: BenchmarkResult, temperature: float, domain: str | None) -> list[dict[str, list[Generation]]]:
    """For each repeat, the generations of each system on the prompts that all of them have finished."""
    finished: dict[tuple[int, str], dict[str, Generation]] = {}
    for generation in result.generations:
        if generation.temperature == temperature and domain in (None, generation.domain):
            finished.setdefault((generation.repeat, generation.prompt), {})[generation.system] = generation
    labels = set(result.labels)
    repeats: dict[int, dict[str, list[Generation]]] = {}
    for (repeat, _), by_system in finished.items():
        if set(by_system) == labels:
            for label, generation in by_system.items():
                repeats.setdefault(repeat, {}).setdefault(label, []).append(generation)
    return [repeats[repeat] for repeat in sorted(repeats)]


def _speed(repeats: list[dict[str, list[Generation]]], label: str, baselines: Iterable[str]) -> dict[str, Any]:
    if not repeats:
        return {"prompts": 0}
    totals = [
        {name: sum(run.tokens for run in runs) / sum(run.seconds for run in runs) for name, runs in repeat.items()}
        for repeat in repeats
    ]
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


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "per_repeat": list(values)}


def _drafting(result: BenchmarkResult, temperature: float, domain: str | None, system: str) -> dict[str, Any]:
    """Acceptance and active vocabulary and, over all domains, the figures of profiled calls."""
    if system in WITHOUT_DRAFTS:
        return {"acceptance_length": 1.0}
    lines = result.lines(TIMED, temperature=temperature, domain=domain, system=system)
    if system in BASELINES:
        turns = [turn for line in lines for turn in line["turns"]]
        rounds = sum(turn["rounds"] for turn in turns)
        return {"acceptance_length": sum(len(turn["tokens"]) for turn in turns) / rounds} if rounds else {}
    stats = _summed(lines)
    figures: dict[str, Any] = {}
    if stats.rounds:
        figures["drafting"] = stats.to_dict()
        for name in ("acceptance_length", "acceptance_rate", "active_vocabulary", "active_vocabulary_max"):
            figures[name] = figures["drafting"][name]
        figures["drafted_per_round"] = stats.drafted / stats.rounds
    if domain is not None:
        return figures
    place = {"temperature": temperature, "system": system}
    profile, coverage = (_summed(result.lines(kind, **place)) for kind in (PROFILE, COVERAGE))
    if profile.rounds:
        total = sum(profile.seconds.values())
        per_round = {name: 1e3 * seconds / profile.rounds for name, seconds in profile.seconds.items()}
        figures["profile"] = profile.to_dict()
        figures["ms_per_round"] = per_round
        figures["draft_ms_per_round"] = sum(per_round[name] for name in DRAFT_SECTIONS)
        figures["share_of_round"] = {name: seconds / total for name, seconds in profile.seconds.items()}
        figures["share_of_oracle"] = sum(figures["share_of_round"][name] for name in LAYER_SECTIONS)
    if coverage.calls:
        figures["coverage"] = coverage.coverage
    return figures


def _summed(lines: Iterable[dict[str, Any]]) -> DraftingStatistics:
    stats = DraftingStatistics()
    for line in lines:
        stats.add(line["drafting"])
    return stats
