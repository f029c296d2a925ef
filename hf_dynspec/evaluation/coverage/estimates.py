"""Means over a sample of prompts, with their standard errors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from .result import CoverageResult, TextCoverage
from .rounds import DEPTH_MEANS, MEANS, expected_acceptance_length

# The figures of texts that are summarised over prompts.
FIGURES = (*MEANS, "acceptance_length")


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error, which is None for a single prompt."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of these values, one for each prompt."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error)

    @classmethod
    def of_ratio(cls, values: Sequence[float], baseline: Sequence[float]) -> "Estimate":
        """The ratio of the means of two lists with a pair of values for each prompt, and its standard error: that of
        the mean of `value - ratio * base`, divided by the baseline's mean (Cochran, 1977, section 2.11)."""
        mean = fmean(baseline)
        ratio = fmean(values) / mean
        residuals = cls.of([value - ratio * base for value, base in zip(values, baseline, strict=True)])
        error = None if residuals.standard_error is None else residuals.standard_error / mean
        return cls(ratio, error)

    def shown(self, form: str, before: str = " ± ") -> str:
        """The mean as text, with the standard error after `before`, if there is one."""
        error = "" if self.standard_error is None else f"{before}{self.standard_error:{form}}"
        return f"{self.mean:{form}}{error}"


@dataclass(frozen=True)
class DepthSummary:
    """One policy at one draft depth, over the prompts on which it was verified."""

    depth: int
    prompts: int
    positions: float  # expected number
    figures: dict[str, Estimate]  # by `DEPTH_MEANS`


@dataclass(frozen=True)
class CoverageSummary:
    """One policy on the prompts of a domain, which all weigh the same."""

    policy: str
    domain: str | None  # None for all prompts
    prompts: int
    draws: int  # as in `TextCoverage`
    positions: float  # expected number
    figures: dict[str, Estimate]  # by `FIGURES`
    # The ratio to the first policy's on the same prompts. If either is drawn, both are, with the same luck.
    relative_acceptance_length: Estimate
    # Equation 1 for the mean acceptance probability, as if it were the same at all positions and no draft were cut
    # short. `acceptance_length` assumes neither.
    expected_acceptance_length: float
    by_depth: list[DepthSummary]


def summarize(result: CoverageResult) -> list[CoverageSummary]:
    """Each policy on all prompts and on those of each domain."""
    domains = (None, *result.domains)
    summaries = [_summarize(result, label, domain) for domain in domains for label in result.policies]
    return [one for one in summaries if one is not None]


def oracle_curve(result: CoverageResult) -> list[tuple[int, float]]:
    """Pairs of a shortlist size and the mean oracle mass at that size, over prompts."""
    curves = [(prompt, point) for (prompt, _), curve in result.oracle_curves.items() for point in curve]
    sizes = dict.fromkeys(size for _, (size, _) in curves)
    return [(size, fmean(_by_prompt((prompt, y) for prompt, (x, y) in curves if x == size))) for size in sizes]


def _summarize(result: CoverageResult, label: str, domain: str | None) -> CoverageSummary | None:
    rows = _rows(result.measured, label, domain)
    if not rows:
        return None
    figures = _estimates([(row.prompt, row) for row in rows], FIGURES)
    both = [rows, _rows(result.measured, result.baseline, domain)]
    if result.drawn and any(row.draws for some in both for row in some):
        both = [_rows(result.drawn, one, domain) for one in (label, result.baseline)]
    lengths = [_by_prompt((row.prompt, row.acceptance_length) for row in some) for some in both]
    return CoverageSummary(
        policy=label,
        domain=domain,
        prompts=len({row.prompt for row in rows}),
        draws=max(row.draws for row in rows),
        positions=sum(row.positions for row in rows),
        figures=figures,
        relative_acceptance_length=Estimate.of_ratio(*lengths),
        expected_acceptance_length=expected_acceptance_length(
            figures["acceptance"].mean, result.settings.num_assistant_tokens
        ),
        by_depth=[_summarize_depth(rows, depth) for depth in range(max(len(row.by_depth) for row in rows))],
    )


def _summarize_depth(rows: list[TextCoverage], depth: int) -> DepthSummary:
    parts = [(row.prompt, row.by_depth[depth]) for row in rows if depth < len(row.by_depth)]
    prompts, positions = len({prompt for prompt, _ in parts}), sum(part.positions for _, part in parts)
    return DepthSummary(depth, prompts, positions, _estimates(parts, DEPTH_MEANS))


def _estimates(parts: list[tuple[str, Any]], names: Sequence[str]) -> dict[str, Estimate]:
    """The figures of pairs of a prompt and what has them."""
    return {name: Estimate.of(_by_prompt((prompt, getattr(part, name)) for prompt, part in parts)) for name in names}


def _rows(measured: Iterable[TextCoverage], label: str, domain: str | None) -> list[TextCoverage]:
    """One policy on each of the texts of a domain, which are the same for all policies."""
    return [one for one in measured if one.policy == label and domain in (None, one.domain)]


def _by_prompt(values: Iterable[tuple[str, float]]) -> list[float]:
    """The mean of each prompt's texts, which are too similar to count as so many prompts, from pairs of a prompt and a
    figure."""
    of_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        of_prompt.setdefault(prompt, []).append(value)
    return list(map(fmean, of_prompt.values()))
