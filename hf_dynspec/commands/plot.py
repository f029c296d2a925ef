"""`hf-dynspec plot`: the bar chart of a benchmark that was run before."""

from pathlib import Path
from typing import Annotated

import typer

from .running import claim_file


def plot(
    context: typer.Context,
    results: Annotated[Path, typer.Argument(metavar="RESULTS.json", help="What bench --json wrote.")],
    image: Annotated[Path, typer.Argument(metavar="FILE", help="The chart: .svg, .png or .pdf.")],
) -> None:
    """Draw the tokens per second of a benchmark as bars, as bench --plot does, without running anything."""
    from ..evaluation.bench.chart import read_benchmark, write_speed_chart

    claim_file(context, image, "FILE")
    write_speed_chart(image, read_benchmark(results))
