"""`hf-dynspec bench`: what drafting with shortlists gains on your models and prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    AllowPickle,
    ChatTemplate,
    Device,
    DrafterModel,
    Dtype,
    JsonFile,
    Limit,
    MaxNewTokens,
    MaxPromptTokens,
    MorePrompts,
    Policies,
    Prompts,
    ResultsFile,
    Seed,
    Target,
    Threads,
    about,
    command_line,
    progress_bar,
    wide_console,
)
from .running import claim_file

if TYPE_CHECKING:
    from ..evaluation.bench.result import BenchmarkResult


def _chain_length(value: Any) -> int | str:
    """What `--num-assistant-tokens` says, or its default."""
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a whole number nor auto.") from None


def bench(
    *,
    context: typer.Context,
    target: Target,
    drafter: DrafterModel = None,
    eagle: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", help="Repeatable. Folder or Hub id of an EAGLE head, beside or without a drafter."
        ),
    ] = None,
    allow_pickle: AllowPickle = False,
    prompts: Prompts,
    more: MorePrompts = None,
    policy: Policies = None,
    chain: Annotated[bool, typer.Option(help="Draft chains.")] = True,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOTAL_TOKENS/DEPTH/TOP_K",
            help="Repeatable. Draft trees of this shape too; the word default means 60/5/10.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    num_assistant_tokens: Annotated[
        Any,
        typer.Option(
            metavar="INTEGER|auto",
            parser=_chain_length,
            help="Tokens of a chain, of transformers' own too; auto chooses them round by round, and transformers' "
            "own then has 5.",
        ),
    ] = 5,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0, the default, is greedy.")] = None,
    top_k: Annotated[int, typer.Option(help="For sampling, as in transformers; 0 draws from all tokens.")] = 50,
    repeats: Annotated[int, typer.Option(help="Times that each system runs each prompt.")] = 3,
    limit: Limit = None,
    profile_prompts: Annotated[
        int, typer.Option(help="Prompts of each domain for draft time and coverage, measured apart from speed.")
    ] = 2,
    skip_coverage: Annotated[bool, typer.Option("--skip-coverage", help="Do not measure coverage.")] = False,
    transformers_assisted: Annotated[bool, typer.Option(help="Run transformers' assisted generation too.")] = True,
    rivals: Annotated[
        bool, typer.Option(help="Run transformers' assisted generation by its own defaults, and prompt lookup, too.")
    ] = True,
    chat_template: ChatTemplate = False,
    max_prompt_tokens: MaxPromptTokens = None,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
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
    from ..evaluation.bench.benchmark import run_benchmark
    from ..evaluation.bench.chart import has_speeds, write_speed_chart
    from ..evaluation.bench.report import to_dict
    from ..evaluation.bench.settings import BenchmarkSettings
    from ..evaluation.plots import require_plot_file
    from ..evaluation.policy_text import DEFAULT_POLICIES
    from ..evaluation.prompts import read_workload

    files = [*prompts, *(more or [])]
    settings = BenchmarkSettings(
        target=target,
        drafter=drafter,
        eagle=eagle or [],
        allow_pickle=allow_pickle,
        chains=chain,
        trees=tree or [],
        prompts=files,
        policies=policy or DEFAULT_POLICIES,
        max_new_tokens=max_new_tokens,
        num_assistant_tokens=num_assistant_tokens,
        temperatures=temperature or [0.0],
        top_k=top_k,
        repeats=repeats,
        limit=limit,
        profile_prompts=profile_prompts,
        measure_coverage=not skip_coverage,
        transformers_assisted=transformers_assisted,
        rivals=rivals,
        chat_template=chat_template,
        max_prompt_tokens=max_prompt_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    claim_file(context, json_file, "--json")
    claim_file(context, plot, "--plot")
    if plot is not None:
        require_plot_file(plot)
    workload = read_workload(files, limit)
    words = command_line(context)

    results = ResultsFile(json_file)

    with progress_bar() as report:
        result = run_benchmark(
            settings, prompts=workload, report=report, save=lambda one: results.save(lambda: to_dict(one, words))
        )
    _print(result, by_domain)
    if plot is not None:
        values = to_dict(result, words)
        if has_speeds(values):
            write_speed_chart(plot, values)
    results.require_saved()
    if not result.complete:
        results.end_interrupted(is_empty=not result.generations)


def _print(result: "BenchmarkResult", by_domain: bool) -> None:
    from ..evaluation.bench.report import acceptance_table, round_table, speed_table
    from ..evaluation.pair import INTERRUPTION

    for note in result.notes:
        if note != INTERRUPTION:  # which is said at the end, with what is kept
            typer.echo(f"note: {note}", err=True)
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
