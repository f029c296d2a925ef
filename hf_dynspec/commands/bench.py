"""`hf-dynspec bench`: what drafting with shortlists gains on your models and prompts."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .common import about, claim_results, progress_bar, tell_notes, wide_console

if TYPE_CHECKING:
    from ..evaluation.bench.benchmark import BenchmarkResult


def _chain_length(value: Any) -> int | str:
    """What `--num-assistant-tokens` says, or its default."""
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a whole number nor auto.") from None


def bench(
    *,
    context: typer.Context,
    target: options.Target,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHeads = None,
    allow_pickle: options.AllowPickle = False,
    prompts: options.Prompts,
    more: options.MorePrompts = None,
    policy: options.Policies = None,
    chain: options.Chain = True,
    tree: options.Trees = None,
    max_new_tokens: options.MaxNewTokens = 128,
    num_assistant_tokens: Annotated[
        Any,
        typer.Option(
            metavar="INTEGER|auto",
            parser=_chain_length,
            help="Tokens of a chain, of transformers' own too; auto chooses them round by round, and transformers' "
            "own then has 5.",
        ),
    ] = 5,
    temperature: options.Temperatures = None,
    top_k: options.TopK = 50,
    repeats: options.Repeats = 3,
    limit: options.Limit = None,
    profile_prompts: Annotated[
        int, typer.Option(help="Prompts of each domain for draft time and coverage, measured apart from speed.")
    ] = 2,
    skip_coverage: Annotated[bool, typer.Option("--skip-coverage", help="Do not measure coverage.")] = False,
    transformers_assisted: options.TransformersAssisted = True,
    rivals: options.Rivals = True,
    chat_template: options.ChatTemplate = False,
    max_prompt_tokens: options.MaxPromptTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw tokens per second as bars: .svg, .png or .pdf.")
    ] = None,
    by_domain: Annotated[bool, typer.Option("--by-domain", help="Show acceptance lengths by domain too.")] = False,
) -> None:
    """Measure plain generation, transformers' assisted generation and shortlist policies on the same prompts.

    Every drafter and EAGLE head runs with every policy, in chains and in trees of every shape that is named. All run
    in one process and take turns on every prompt, after a warm-up. Speeds include the prompt. A run that is
    interrupted shows and saves what it has.
    """
    files = [*prompts, *(more or [])]
    results = claim_results(context, json_file, plot)
    from ..evaluation.prompts import read_workload

    workload = read_workload(files, limit)
    from ..evaluation.bench.benchmark import BenchmarkSettings, run_benchmark
    from ..evaluation.bench.chart import has_speeds, write_speed_chart
    from ..evaluation.bench.report import to_dict
    from ..evaluation.policy_text import DEFAULT_POLICIES

    settings = options.settings_of(
        context,
        BenchmarkSettings,
        eagle=eagle or [],
        chains=chain,
        trees=tree or [],
        prompts=files,
        policies=policy or DEFAULT_POLICIES,
        temperatures=temperature or [0.0],
        measure_coverage=not skip_coverage,
    )

    def save(measured: "BenchmarkResult") -> None:
        # An earlier run's results are worth more than none.
        if measured.generations:
            results.save(partial(to_dict, measured))

    with progress_bar(shorter="fewer prompts (--limit), policies and --repeats make it shorter") as report:
        result = run_benchmark(settings, prompts=workload, report=report, save=save)
    _print(result, by_domain)
    if plot is not None and has_speeds(values := to_dict(result, results.words)):
        write_speed_chart(plot, values)
    results.end(result.complete, is_empty=not result.generations)


def _print(result: "BenchmarkResult", by_domain: bool) -> None:
    from ..evaluation.bench.report import acceptance_table, round_table, speed_table

    tell_notes(result.notes)
    if not result.generations:
        return
    console, settings = wide_console(), result.settings
    chain_length = settings.num_assistant_tokens if settings.chains or settings.transformers_assisted else None
    line = about(result.models, result.threads, settings.max_new_tokens, chain_length)
    console.print(line, highlight=False)
    for temperature in settings.temperatures:
        console.print(speed_table(result, temperature))
        console.print(round_table(result, temperature))
        if by_domain:
            console.print(acceptance_table(result, temperature))
