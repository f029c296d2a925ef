"""How far systems are ahead of the first one on the same requests, from the JSON values of results.json."""

from collections.abc import Collection
from typing import Any

from hf_dynspec.evaluation.coverage.estimates import Estimate


def gains(measured: dict[str, Any], kinds: Collection[str] | None = None) -> dict[str, Estimate]:
    """By system: acceptance length relative to that of the first one on the same requests, with its standard error.

    Args:
        measured: by system what `serve` returned.
        kinds: requests of these kinds of text alone (None: all).
    """
    lengths = {
        name: [one["acceptance_length"] for one in result["requests"] if kinds is None or one["kind"] in kinds]
        for name, result in measured.items()
    }
    first = next(iter(lengths.values()))
    return {name: Estimate.of_ratio(ones, first) for name, ones in lengths.items()}


def shown(ratio: Estimate) -> str:
    """`+8.1% ± 2.0` for a ratio of 1.081, with its 95% interval."""
    interval = "" if ratio.standard_error is None else f" ± {196 * ratio.standard_error:.1f}"
    return f"{100 * (ratio.mean - 1):+.1f}%{interval}"
