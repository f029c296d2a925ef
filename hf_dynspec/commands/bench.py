"""`hf-dynspec bench`: what drafting with shortlists gains on your models and prompts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..evaluation.benchmark import BenchmarkResult

# The tables do not fit into the 80 columns that a file or a pipe is taken to have.
WIDTH_OF_FILES = 180
INTERRUPTED = 130


def bench(
    *,
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Folder or Hub id of the model to speed up.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub id of the small model.")],
    prompts: Annotated[
        list[Path], typer.Option(metavar="FILE...", help="JSON lines: Spec-Bench's `turns`, or `prompt` or `text`.")
    ],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompts, so that shells can expand *.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,...]",
            help="Repeatable. hybrid, frequency:size=32768, frequency:ranking=FOLDER, "
            "frequency:size=1024+in_context:eviction=lru. Default: full, frequency, in_context and hybrid.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens drafted per round, by transformers too.")] = 5,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0, the default, is greedy.")] = None,
    top_k: Annotated[int, typer.Option(help="For sampling, as in transformers; 0 draws from all tokens.")] = 50,
    repeats: Annotated[int, typer.Option(help="Times that each system runs each prompt.")] = 3,
    limit: Annotated[
        int | None, typer.Option(help="Take the first so many prompts of each category of each file.")
    ] = None,
    profile_prompts: Annotated[
        int, typer.Option(help="Prompts of each domain for draft time and coverage, measured apart from speed.")
    ] = 2,
    skip_coverage: Annotated[bool, typer.Option("--skip-coverage", help="Do not measure coverage.")] = False,
    transformers_assisted: Annotated[bool, typer.Option(help="Run transformers' assisted generation too.")] = True,
    chat_template: Annotated[
        bool, typer.Option(help="Make each prompt the user's turn of a chat, for models that expect one.")
    ] = False,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Keep the last so many tokens of longer prompts.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Such as bfloat16, or auto. Default: float32 on a CPU, else auto.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where both models run, such as cpu or cuda:0.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures and where they come from.")
    ] = None,
    by_domain: Annotated[bool, typer.Option("--by-domain", help="Show acceptance lengths by domain too.")] = False,
) -> None:
    """Measure plain generation, transformers' assisted generation and shortlist policies on the same prompts.

    All run in one process and take turns on every prompt, after a warm-up. Speeds include the prompt. A run that is
    interrupted shows and saves what it has.
    """
    from ..evaluation.benchmark import DEFAULT_POLICIES, BenchmarkSettings, run_benchmark
    from ..evaluation.report import write_json
    from ..evaluation.workloads import read_workload

    files = [*prompts, *(more or [])]
    settings = BenchmarkSettings(
        target=target,
        drafter=drafter,
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
        chat_template=chat_template,
        max_prompt_tokens=max_prompt_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    _require_writable(json_file)
    workload = read_workload(files, limit)
    words = _command_line(context)

    def save(result: "BenchmarkResult") -> None:
        if json_file is not None:
            write_json(json_file, result, words)

    with _progress_bar() as report:
        result = run_benchmark(settings, prompts=workload, report=report, save=save)
    _print(result, by_domain)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


def _require_writable(path: Path | None) -> None:
    """Refuse before hours of work a file that could not be written after them."""
    from ..errors import ConfigurationError

    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: --json takes a file in an existing folder")


def _command_line(context: typer.Context) -> list[str]:
    """The words of the command as it was given; `report.to_dict` shortens the paths."""
    words = ["hf-dynspec", context.info_name or "bench"]
    for parameter in sorted(context.command.params, key=lambda item: item.param_type_name == "argument"):
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else (parameter.secondary_opts or parameter.opts)[0])
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words.append(str(item))
    return words


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar that moves only when it is told to, so that nothing is drawn while a call is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as RemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), RemainingColumn())
    described = TextColumn("{task.description}", markup=False)
    progress = Progress(*columns, described, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("", total=None)

    def report(activity: str, done: int, total: int) -> None:
        # Not before the first report: while models are loaded, transformers shows bars of its own.
        progress.start()
        progress.update(task, description=activity, completed=done, total=total)
        progress.refresh()

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()


def _print(result: "BenchmarkResult", by_domain: bool) -> None:
    from rich.console import Console

    from ..evaluation.report import acceptance_table, hardware, speed_table

    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDTH_OF_FILES))
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if not result.generations:
        return
    target, where = result.models["target"], hardware()
    processor = where["gpus"][0] if target["device"].startswith("cuda") else where["cpu"]
    about: list[Any] = [processor, f"{result.threads} CPU threads", target["dtype"]]
    about += [
        f"{result.settings.max_new_tokens} new tokens",
        f"{result.settings.num_assistant_tokens} drafted a round",
    ]
    console.print(", ".join(about), highlight=False)
    for temperature in result.settings.temperatures:
        console.print(speed_table(result, temperature))
        if by_domain:
            console.print(acceptance_table(result, temperature))
