"""Time a draft step of policies against the product of the full head by torch: random heads, on the CPU.

A step is the choice of a shortlist and its scores, without the drafter's layers. Policies that take tokens of the
context also take time once a round, which `hf-dynspec bench` measures. The systems take turns, so that other load
affects them alike. `python examples/head_times.py` takes a minute or two.
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

from hf_dynspec import VocabularyInfo
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.protocol import HeadRows
from hf_dynspec.shortlists import ShortlistState

WARM_UP_CALLS = 3
TORCH = "torch's product"


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
    policy: Annotated[list[str], typer.Option(help="Repeatable; the first is compared with.")] = ["full", "screen"],  # noqa: B006
    columns: Annotated[list[int], typer.Option("--columns", "-d")] = [256, 2048],  # noqa: B006
    queries: Annotated[list[int], typer.Option("--queries", "-m")] = [1],  # noqa: B006
    threads: Annotated[int | None, typer.Option(help="Default: torch's.")] = None,
    vocabulary: Annotated[int, typer.Option(help="Rows of the head.")] = 151_936,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    calls: int = 40,
    seed: int = 0,
) -> None:
    """Print the medians in microseconds, their ratios, and the seconds to start each policy."""
    if min(*columns, *queries, calls) < 1:
        raise typer.BadParameter("columns, queries and calls must be at least 1.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter("dtype must be float32, bfloat16 or float16.")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    title = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, {vocabulary:,} rows"
    table = Table("d", "m", "policy", "start, s", "step, µs", "of torch", f"of {policy[0]}", title=title)
    for d in columns:
        weight = torch.randn(vocabulary, d).to(getattr(torch, dtype))
        info = VocabularyInfo(vocabulary, (0,), weight.device, None, d, drafter_rows=HeadRows(weight))
        head, states, started = DynamicLMHead(weight), {}, {}
        for text in policy:
            start = time.perf_counter()
            states[text] = parse_policy(text).start(info)
            started[text] = f"{time.perf_counter() - start:.1f}"
        for m in queries:
            steps = {TORCH: lambda weight=weight, d=d, m=m: functional.linear(torch.randn(m, d).to(weight), weight)}
            medians = median_seconds(steps | {one: draft_step(states[one], head, m) for one in policy}, calls)
            for name, seconds in medians.items():
                shares = [f"{seconds / medians[one]:.3f}" for one in (TORCH, policy[0])]
                table.add_row(str(d), str(m), name, started.get(name, ""), f"{1e6 * seconds:.0f}", *shares)
            table.add_section()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
