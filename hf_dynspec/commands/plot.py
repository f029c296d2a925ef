"""`hf-dynspec plot`: the pictures of what was measured before, without running anything."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from .evaluate import write_results
from .running import claim_file, claim_folder


def plot(
    context: typer.Context,
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", help="What bench --json wrote, or the folder of evaluate --out.")
    ],
    image: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Of a benchmark, the chart: .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Draw the tokens per second of a benchmark as bars, as bench --plot does; or make the tables and figures of an
    evaluation anew, in its folder. Nothing is run."""
    if results.is_dir():
        if image is not None:
            raise ConfigurationError(f"{results} is a folder, whose figures are drawn in it; leave {image} out")
        claim_folder(context, results, "FOLDER")
        write_results(results)
        return
    if image is None:
        raise ConfigurationError(f"name the image to draw {results} into, such as speed.svg")
    claim_file(context, image, "FILE")
    from ..evaluation.bench.chart import read_benchmark, write_speed_chart

    write_speed_chart(image, read_benchmark(results))
