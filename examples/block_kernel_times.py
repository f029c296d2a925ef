"""Time the kernel that scores chosen blocks of an LM head on the CPU against a matrix product of packed rows.

The product is `torch.nn.functional.linear(hidden, packed)`, where `packed` holds the chosen rows already, so that
its time is that of a step without gathering rows. The two take turns, so that other load affects them alike. Run with
`python examples/block_kernel_times.py --threads 1`; it takes a few minutes.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hf_dynspec.kernels import block_scores_for, prepare_kernels

BLOCK_ROWS = 16
# A cluster of tokens fills a few adjacent blocks.
BLOCKS_IN_A_RUN = 5
# About a second of calls for each size, within the limits on their number.
PRODUCTS_TIMED = 4 * 10**9
FEWEST_CALLS, MOST_CALLS = 15, 300
WARM_UP_CALLS = 3


def random_blocks(count: int, chosen: int, generator: torch.Generator) -> torch.Tensor:
    """int64 `[chosen]`: distinct blocks among `count`, in runs of adjacent ones, in random order."""
    starts = BLOCKS_IN_A_RUN * torch.randperm(count // BLOCKS_IN_A_RUN, generator=generator)
    return (starts.unsqueeze(1) + torch.arange(BLOCKS_IN_A_RUN)).flatten()[:chosen]


def median_seconds(functions: list[Callable[[], object]], calls: int) -> list[float]:
    """The median seconds of a call of each function. They take turns."""
    seconds: list[list[float]] = [[] for _ in functions]
    for call in range(WARM_UP_CALLS + calls):
        for function, taken in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            if call >= WARM_UP_CALLS:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def main(
    queries: Annotated[list[int], typer.Option("--queries", "-m")] = [1, 2, 4, 8, 10, 16],  # noqa: B006
    rows: Annotated[list[int], typer.Option("--rows", "-n")] = [512, 1024, 3072, 8192, 32768],  # noqa: B006
    columns: Annotated[list[int], typer.Option("--columns", "-d")] = [128, 256, 1024],  # noqa: B006
    threads: Annotated[list[int], typer.Option("--threads")] = [1, 4],  # noqa: B006
    vocabulary: Annotated[int, typer.Option(help="Rows of the whole head.")] = 151_936,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: int = 0,
) -> None:
    """Print the medians in microseconds and their ratio, which is the cost of gathering rows."""
    if any(size < 1 for size in (*queries, *columns, *threads)):
        raise typer.BadParameter("queries, columns and threads must be at least 1.")
    if not all(BLOCK_ROWS <= n <= vocabulary and n % BLOCK_ROWS == 0 for n in rows):
        raise typer.BadParameter(f"rows must be multiples of {BLOCK_ROWS} up to the vocabulary, {vocabulary}.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter("dtype must be float32, bfloat16 or float16.")
    console = Console()
    generator = torch.Generator().manual_seed(seed)
    block_scores = block_scores_for(torch.device("cpu"))
    prepare_kernels()
    table = Table("threads", "d", "m", "n", "product, µs", "blocks, µs", "ratio", title=f"torch {torch.__version__}")
    ratios = []
    shape = (vocabulary // BLOCK_ROWS, BLOCK_ROWS)
    sizes = [(d, used, m, n) for d in columns for used in threads for m in queries for n in rows]
    weight = torch.empty(0, 0, 0)
    for d, used, m, n in track(sizes, "Timing", console=console, transient=True):
        if weight.shape[2] != d:
            weight = torch.randn(*shape, d, generator=generator).to(getattr(torch, dtype))
        torch.set_num_threads(used)
        hidden = torch.randn(m, d, generator=generator).to(weight)
        blocks = random_blocks(weight.shape[0], n // BLOCK_ROWS, generator)
        packed = weight[blocks].flatten(0, 1)
        product, scored = median_seconds(
            [
                lambda hidden=hidden, packed=packed: torch.nn.functional.linear(hidden, packed),
                lambda hidden=hidden, weight=weight, blocks=blocks: block_scores(hidden, weight, blocks, None),
            ],
            min(MOST_CALLS, max(FEWEST_CALLS, PRODUCTS_TIMED // (m * n * d))),
        )
        ratios.append(scored / product)
        figures = (f"{product * 1e6:.0f}", f"{scored * 1e6:.0f}", f"{ratios[-1]:.2f}")
        table.add_row(*map(str, (used, d, m, n)), *figures)
    console.print(table)
    console.print(f"ratio: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")


if __name__ == "__main__":
    typer.run(main)
