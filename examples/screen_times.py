"""Time a draft step of the policy `screen` on the CPU against the full head, by the policy `full` and by torch.

A step of `screen` computes low-rank scores of all tokens, chooses the best, and scores these exactly. Heads are
random. The systems take turns, so that other load affects them alike. Run with `python examples/screen_times.py`; it
takes a minute or two.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from hf_dynspec import FullShortlist, ScreenShortlist, VocabularyInfo
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.protocol import HeadRows
from hf_dynspec.shortlists import ShortlistState
from hf_dynspec.shortlists.screen.factor import usual_rank

WARM_UP_CALLS = 3


def draft_step(state: ShortlistState, head: DynamicLMHead, queries: int) -> Callable[[], object]:
    """A draft step between the drafter's layers and the choice of a token."""
    rows, token_ids = PackedRows(), torch.zeros(queries, dtype=torch.int64)

    def step() -> object:
        hidden = torch.randn(queries, head.weight.shape[1]).to(head.weight)
        return head.scores(hidden, state.select(0, token_ids, hidden), rows)

    return step


def median_seconds(functions: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """The median seconds of a call of each function. They take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for call in range(WARM_UP_CALLS + calls):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if call >= WARM_UP_CALLS:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main(
    columns: Annotated[list[int], typer.Option("--columns", "-d")] = [256, 2048],  # noqa: B006
    queries: Annotated[list[int], typer.Option("--queries", "-m")] = [1],  # noqa: B006
    threads: Annotated[int | None, typer.Option(help="Default: torch's.")] = None,
    vocabulary: Annotated[int, typer.Option(help="Rows of the head.")] = 151_936,
    candidates: int = 2048,
    rank: Annotated[int | None, typer.Option(help="Default: the policy's.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    calls: int = 40,
    seed: int = 0,
) -> None:
    """Print the medians in microseconds, their ratios, and the seconds to compute the low-rank factor."""
    if min(*columns, *queries, calls) < 1:
        raise typer.BadParameter("columns, queries and calls must be at least 1.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter("dtype must be float32, bfloat16 or float16.")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    title = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}"
    table = Table("d", "rank", "m", "factor, s", "torch, µs", "full, µs", "choice, µs", "screen, µs", title=title)
    table.add_column("of torch")
    table.add_column("of full")
    for d in columns:
        weight = torch.randn(vocabulary, d).to(getattr(torch, dtype))
        info = VocabularyInfo(vocabulary, (0,), weight.device, None, d, drafter_rows=HeadRows(weight))
        head = DynamicLMHead(weight)
        start = time.perf_counter()
        state = ScreenShortlist(rank, candidates).start(info)
        made = time.perf_counter() - start
        for m in queries:
            steps = {
                "torch": lambda weight=weight, d=d, m=m: functional.linear(torch.randn(m, d).to(weight), weight),
                "full": draft_step(FullShortlist().start(info), head, m),
                "choice": lambda state=state, d=d, m=m: state.select(0, torch.zeros(m), torch.randn(m, d)),
                "screen": draft_step(state, head, m),
            }
            medians = median_seconds(steps, calls)
            shown = [f"{1e6 * seconds:.0f}" for seconds in medians.values()]
            shares = [f"{medians['screen'] / medians[name]:.3f}" for name in ("torch", "full")]
            table.add_row(str(d), str(rank or usual_rank(d)), str(m), f"{made:.1f}", *shown, *shares)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
