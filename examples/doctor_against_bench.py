"""Does `hf-dynspec bench` measure what `hf-dynspec doctor` says? Runs both on one pair and the same prompts, and
prints the two speeds of each setting side by side.

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
from hf_dynspec.evaluation.doctor.diagnosis import Diagnosis, MeasuredSpeed
from hf_dynspec.evaluation.doctor.measure import diagnose_pair
from hf_dynspec.evaluation.doctor.settings import POLICIES, DoctorSettings
from hf_dynspec.evaluation.tables import FittedTable

# The doctor and the benchmark agree if their speeds differ by less.
TOLERANCE = 0.15


def measured_ratios(
    diagnosis: Diagnosis, prompts: list[Path], limit: int, repeats: int
) -> Iterator[tuple[MeasuredSpeed, float]]:
    """Each setting of the doctor with the benchmark's speed, as a multiple of plain generate's. Every length of chains
    is a run of its own; trees are in the last one."""
    asked = diagnosis.settings
    shared = ("target", "drafter", "max_new_tokens", "top_k", "threads", "seed", "dtype")
    for length in asked.lengths:
        speeds = [one for one in diagnosis.speeds if one.tree is None and one.steps == length]
        trees = [one for one in diagnosis.speeds if one.tree is not None and length == asked.lengths[-1]]
        settings = BenchmarkSettings(
            **{name: getattr(asked, name) for name in shared},
            policies={one.policy: diagnosis.policies[one.policy] for one in speeds},
            temperatures=[asked.temperature],
            eagle=[asked.eagle] if asked.eagle else [],
            trees=[one.tree for one in trees],
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
            if row["domain"] is None and combination is not None:
                key = combination.policy, combination.tree
                (one,) = (one for one in (*speeds, *trees) if (one.policy, one.tree) == key)
                yield one, row["ratios"][PLAIN]["median"]


def main(
    target: Annotated[str, typer.Option()],
    prompts: Annotated[list[Path], typer.Option()],
    drafter: str | None = None,
    eagle: str | None = None,
    policy: Annotated[list[str] | None, typer.Option(help="The default is the doctor's.")] = None,
    tree: str = "default",
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seconds: float = 90.0,
    limit: Annotated[int, typer.Option(help="Prompts of each category of each file.")] = 2,
    repeats: Annotated[int, typer.Option(help="Of the benchmark.")] = 2,
    threads: int | None = None,
) -> None:
    """Print the doctor's and the benchmark's speeds, and how many are within 15% of one another."""
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
        diagnosis = diagnose_pair(settings, DynSpecAssistant, prompts=read_workload(prompts, limit), report=report)
    console = Console()
    console.print(diagnosis)
    table = FittedTable("Multiples of plain generate's speed", ["policy", "drafts", "doctor", "bench", "off by"])
    off = []
    for one, ratio in measured_ratios(diagnosis, prompts, limit, repeats):
        off.append(one.ratio / ratio - 1)
        error = "" if one.error is None else f" ±{one.error:.2f}"
        table.add_row(one.policy, one.shape, f"{one.ratio:.2f}{error}", f"{ratio:.2f}", f"{off[-1]:+.0%}")
    console.print(table)
    close = sum(abs(one) <= TOLERANCE for one in off)
    console.print(f"{close} of {len(off)} are within {TOLERANCE:.0%} of the benchmark's.")


if __name__ == "__main__":
    typer.run(main)
