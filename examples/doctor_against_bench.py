"""Does `hf-dynspec bench` measure what `hf-dynspec doctor` expects? Runs both on one pair, one after the other, on the
same prompts, and prints the speed that was expected of each setting beside the one that was measured.

The pocket pair, with nothing else running, takes a few minutes:

    python examples/doctor_against_bench.py --target examples/pocket/target --drafter examples/pocket/drafter \\
        --prompts examples/pocket/prompts.jsonl --threads 2
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_dynspec import DynSpecAssistant
from hf_dynspec.commands.common import progress_bar
from hf_dynspec.evaluation import BenchmarkSettings, read_workload, run_benchmark
from hf_dynspec.evaluation.bench.figures import summarize
from hf_dynspec.evaluation.bench.systems import PLAIN
from hf_dynspec.evaluation.doctor.diagnosis import Diagnosis
from hf_dynspec.evaluation.doctor.expectations import Expectation
from hf_dynspec.evaluation.doctor.measure import diagnose_pair
from hf_dynspec.evaluation.doctor.settings import POLICIES, DoctorSettings
from hf_dynspec.evaluation.tables import FittedTable

# How far from what is measured an expectation may be.
TOLERANCE = 0.15


def measured_ratios(
    diagnosis: Diagnosis, prompts: list[Path], lengths: list[int], limit: int, repeats: int
) -> Iterator[tuple[Expectation, float]]:
    """Each expected setting with what the benchmark measures of it. Every length of chains is a run of its own, and
    trees are in the first."""
    asked = diagnosis.settings
    shared = ("target", "drafter", "temperature", "policies", "max_new_tokens", "top_k", "threads", "seed", "dtype")
    taken = {name: getattr(asked, name) for name in shared}
    taken["temperatures"] = [taken.pop("temperature")]
    for length in lengths:
        settings = BenchmarkSettings(
            **taken,
            eagle=[asked.eagle] if asked.eagle else [],
            trees=[asked.tree] if asked.tree and length == lengths[0] else [],
            prompts=prompts,
            limit=limit,
            num_assistant_tokens=length,
            repeats=repeats,
            profile_prompts=0,
            measure_coverage=False,
            transformers_assisted=False,
            rivals=False,
        )
        with progress_bar() as report:
            result = run_benchmark(settings, report=report)
        for row in summarize(result):
            combination = result.combinations.get(row["system"])
            if row["domain"] is not None or combination is None:
                continue
            (expected,) = (
                one
                for one in diagnosis.expectations
                if (one.policy, one.tree) == (combination.policy, combination.tree)
                and (one.tree is not None or one.steps == length)
            )
            yield expected, row["ratios"][PLAIN]["median"]


def main(
    target: Annotated[str, typer.Option()],
    prompts: Annotated[list[Path], typer.Option()],
    drafter: str | None = None,
    eagle: str | None = None,
    policy: Annotated[list[str] | None, typer.Option(help="The default is the doctor's.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Of chains. The default is 3, 5 and 8.")] = None,
    tree: str = "default",
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seconds: float = 90.0,
    limit: Annotated[int, typer.Option(help="Prompts of each category of each file.")] = 2,
    repeats: Annotated[int, typer.Option(help="Of the benchmark.")] = 2,
    threads: int | None = None,
) -> None:
    """Print expected and measured speeds, and how many are within 15% of one another."""
    settings = DoctorSettings(
        target=target,
        drafter=drafter,
        eagle=eagle,
        policies=policy or POLICIES,
        tree=None if tree == "none" else tree,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seconds=seconds,
        threads=threads,
    )
    with progress_bar() as report:
        workload = read_workload(prompts, limit)
        diagnosis = diagnose_pair(settings, DynSpecAssistant, prompts=workload, report=report)
    console = Console()
    console.print(diagnosis)
    table = FittedTable("Multiples of plain generate's speed", ["policy", "drafts", "expected", "measured", "off by"])
    off = []
    for expected, ratio in measured_ratios(diagnosis, prompts, length or [3, 5, 8], limit, repeats):
        off.append(expected.ratio / ratio - 1)
        error = "" if expected.error is None else f" ±{expected.error:.2f}"
        table.add_row(
            expected.policy, expected.shape, f"{expected.ratio:.2f}{error}", f"{ratio:.2f}", f"{off[-1]:+.0%}"
        )
    console.print(table)
    close = sum(abs(one) <= TOLERANCE for one in off)
    console.print(f"{close} of {len(off)} are within {TOLERANCE:.0%} of what was measured.")


if __name__ == "__main__":
    typer.run(main)
