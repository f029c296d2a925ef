"""Estimates from what was measured on a sample of prompts: means over prompts, with their standard errors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from .draft_steps import expected_acceptance_length
from .result import CoverageResult, TextCoverage


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error, which is None where there is one prompt."""

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of these values, one for each prompt."""
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(fmean(values), error)

    @classmethod
    def of_ratio(cls, values: Sequence[float], baseline: Sequence[float]) -> "Estimate":
        """The ratio of the means of two paired lists of values, one pair for each prompt, and its standard error
        (Cochran, 1977, section 2.11): that of the mean of `value - ratio * base`, as a share of the baseline's mean.
        What prompts do to both lists in proportion is not in it."""
        mean = fmean(baseline)
        ratio = fmean(values) / mean
        residuals = cls.of([value - ratio * base for value, base in zip(values, baseline, strict=True)])
        error = None if residuals.standard_error is None else residuals.standard_error / mean
        return cls(ratio, error)


# The figures of texts that are summarised over prompts.
FIGURES = ("size", "mass", "oracle_mass", "recall", "oov", "acceptance", "acceptance_length")
DEPTH_FIGURES = ("size", "mass", "acceptance")


@dataclass(frozen=True)
class DepthSummary:
    """One policy at one draft depth, on those prompts of a domain on which it was verified. Each weighs the same.

    Args:
        depth: as for `DepthCoverage`.
        prompts: how many prompts.
        positions: expected number of positions.
        figures: the names of `DEPTH_FIGURES`.
    """

    depth: int
    prompts: int
    positions: float
    figures: dict[str, Estimate]


@dataclass(frozen=True)
class CoverageSummary:
    """One policy on the prompts of a domain. Every prompt weighs the same; the figures are those of `TextCoverage`.

    Args:
        policy: the policy's label.
        domain: the domain's label; None for all prompts.
        prompts: how many prompts.
        draws: as for `TextCoverage`.
        positions: expected number of positions.
        figures: the names of `FIGURES`.
        relative_acceptance_length: the mean acceptance length divided by that of the first policy on the same prompts,
            with the standard error of such a ratio, see `Estimate.of_ratio`. Where either of them is drawn, both are,
            with the same luck.
        expected_acceptance_length: equation 1 for the mean acceptance probability, as if it were the same at all
            positions and drafts were never cut short. `acceptance_length` assumes neither.
        by_depth: from the first draft of a round to the last that was verified on any prompt.
    """

    policy: str
    domain: str | None
    prompts: int
    draws: int
    positions: float
    figures: dict[str, Estimate]
    relative_acceptance_length: Estimate
    expected_acceptance_length: float
    by_depth: list[DepthSummary]


def summarize(result: CoverageResult) -> list[CoverageSummary]:
    """Each policy on all prompts and on those of each domain."""
    return [
        _summarize(result, label, domain)
        for domain in (None, *result.domains)
        for label in result.policies
        if _rows(result.measured, label, domain)
    ]


def oracle_curve(result: CoverageResult) -> list[tuple[int, float]]:
    """Pairs of a shortlist size and the mean oracle mass at that size, over prompts."""
    curves = result.oracle_curves
    sizes = [size for size, _ in next(iter(curves.values()), [])]
    masses = [
        _by_prompt((prompt, curve[index][1]) for (prompt, _), curve in curves.items()) for index in range(len(sizes))
    ]
    return list(zip(sizes, map(fmean, masses), strict=True))


def _summarize(result: CoverageResult, label: str, domain: str | None) -> CoverageSummary:
    rows = _rows(result.measured, label, domain)
    by_prompt = {name: _by_prompt((row.prompt, getattr(row, name)) for row in rows) for name in FIGURES}
    figures = {name: Estimate.of(values) for name, values in by_prompt.items()}
    return CoverageSummary(
        policy=label,
        domain=domain,
        prompts=len(by_prompt[FIGURES[0]]),
        draws=max(row.draws for row in rows),
        positions=sum(row.positions for row in rows),
        figures=figures,
        relative_acceptance_length=_relative_length(result, label, domain),
        expected_acceptance_length=expected_acceptance_length(
            figures["acceptance"].mean, result.settings.num_assistant_tokens
        ),
        by_depth=_summarize_depths(rows),
    )


def _relative_length(result: CoverageResult, label: str, domain: str | None) -> Estimate:
    """A policy's acceptance length relative to the first policy's: two expectations, or two that had the same luck."""
    both = [_rows(result.measured, one, domain) for one in (label, result.baseline)]
    if result.drawn and any(row.draws for rows in both for row in rows):
        both = [_rows(result.drawn, one, domain) for one in (label, result.baseline)]
    return Estimate.of_ratio(*(_by_prompt((row.prompt, row.acceptance_length) for row in rows) for rows in both))


def _rows(measured: Iterable[TextCoverage], label: str, domain: str | None) -> list[TextCoverage]:
    """One policy on each of the texts of a domain, which are the same for all policies."""
    return [one for one in measured if one.policy == label and domain in (None, one.domain)]


def _by_prompt(values: Iterable[tuple[str, float]]) -> list[float]:
    """The mean of each prompt's texts, which are too alike to count as so many prompts.

    Args:
        values: of each text: its prompt and a figure.
    """
    of_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        of_prompt.setdefault(prompt, []).append(value)
    return list(map(fmean, of_prompt.values()))


def _summarize_depths(rows: list[TextCoverage]) -> list[DepthSummary]:
    summaries = []
    for depth in range(max(len(row.by_depth) for row in rows)):
        parts = [(row.prompt, row.by_depth[depth]) for row in rows if depth < len(row.by_depth)]
        by_prompt = {
            name: _by_prompt((prompt, getattr(part, name)) for prompt, part in parts) for name in DEPTH_FIGURES
        }
        figures = {name: Estimate.of(values) for name, values in by_prompt.items()}
        prompts = len(by_prompt[DEPTH_FIGURES[0]])
        summaries.append(DepthSummary(depth, prompts, sum(part.positions for _, part in parts), figures))
    return summaries
