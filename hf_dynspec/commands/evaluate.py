"""`hf-dynspec evaluate`: whole suites over drafters, policies and temperatures, and the tables of the papers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError, counted
from . import options
from .common import command_line, progress_bar, wide_console
from .launched import Launched
from .running import claim_folder, keeps

if TYPE_CHECKING:
    from ..evaluation.suites.paper_tables import PaperTable


def evaluate(
    *,
    context: typer.Context,
    target: options.Target,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHeads = None,
    allow_pickle: options.AllowPickle = False,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="spec-bench, speed-bench, domains, topic-switch or multi-turn. Default: domains, or the table's.",
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Measure the rows of a paper's table: microspec-2, microspec-3, evospec-1, -2, -4, -6, -7 or -10, "
            "dynaspec-1 or dynaspec-2.",
        ),
    ] = None,
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="The suite's files, from where you have them: JSON lines or Parquet."),
    ],
    more: Annotated[list[Path] | None, options.more("files")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of results; a stopped run goes on in it.")],
    policy: options.Policies = None,
    align: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Repeatable. Run every policy with an aligned drafter too: default, paper or osd."
        ),
    ] = None,
    ranking: Annotated[str | None, typer.Option(metavar="DIR", help="For --table: the static lists' ranking.")] = None,
    vocabtrim: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="For --table: a ranking that `build frequency --from-target` wrote."),
    ] = None,
    router: Annotated[str | None, typer.Option(metavar="DIR", help="For --table: DynaSpec's router.")] = None,
    coral: Annotated[str | None, typer.Option(metavar="DIR", help="For --table: CORAL's router.")] = None,
    graph: Annotated[str | None, typer.Option(metavar="DIR", help="For --table: the co-occurrence graph.")] = None,
    chain: options.Chain = True,
    tree: options.Trees = None,
    max_new_tokens: options.MaxNewTokens = 128,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens of a chain, of transformers' own too.")] = 5,
    temperature: options.Temperatures = None,
    top_k: options.TopK = 0,
    repeats: options.Repeats = 1,
    limit: options.Limit = None,
    expected_prompts: Annotated[
        int | None,
        typer.Option(
            help="For --table: acceptance lengths are computed along texts of the first so many prompts of each "
            "category of each file; 0 measures them in the timed runs.  [default: 16]"
        ),
    ] = None,
    profile_prompts: Annotated[
        int, typer.Option(help="Prompts of each domain for a round's time and coverage, measured apart from speed.")
    ] = 2,
    transformers_assisted: options.TransformersAssisted = True,
    rivals: options.Rivals = True,
    chat_template: options.ChatTemplate = False,
    max_prompt_tokens: options.MaxPromptTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    figures: Annotated[bool, typer.Option(help="Draw figures too.")] = True,
) -> None:
    """Run a suite of prompts, or measure a paper's table, and write raw lines, tables and figures into a folder.

    Every drafter and EAGLE head runs with every policy, and all systems take turns on every prompt. In a conversation
    the model's own answers are put back in. A run that is stopped, however it is, goes on where it was when the same
    command is given again. In a policy, and in what --table takes, {domain} stands for the domain of a prompt.
    `accelerate launch` (on CPUs with its --multi_gpu) shards the prompts over processes; all results but times are the
    same whatever their number. `hf-dynspec plot FOLDER` makes the tables and figures anew and runs nothing.
    """
    from ..evaluation.plots import require_plot_file
    from ..evaluation.suites.runs import RUNS, SETTINGS, RunFolder

    folders = {"ranking": ranking, "vocabtrim": vocabtrim, "router": router, "coral": coral, "graph": graph}
    given = {name: folder for name, folder in folders.items() if folder}
    if table is None and given:
        raise ConfigurationError(f"--{next(iter(given))} is for --table; name it in a --policy")
    if table is not None and (policy or align):
        raise ConfigurationError(f"the table says what is run; leave {'--policy' if policy else '--align'} out")
    if table is None and expected_prompts is not None:
        raise ConfigurationError("--expected-prompts is for --table; coverage measures policies along texts")
    if figures:
        require_plot_file(out / "figure.png", "give --no-figures")
    from ..evaluation.policy_text import DEFAULT_POLICIES
    from ..evaluation.suites.methods import make_methods
    from ..evaluation.suites.paper_tables import paper_table, table_methods
    from ..evaluation.suites.runner import Share, run_suite
    from ..evaluation.suites.settings import SuiteSettings

    spec = None if table is None else paper_table(table)
    launched = Launched()
    settings = options.settings_of(
        context,
        SuiteSettings,
        eagle=eagle or [],
        suite=suite or (spec.suite if spec else "domains"),
        given=given,
        prompts=[*data, *(more or [])],
        methods=table_methods(spec, given) if spec else make_methods(policy or DEFAULT_POLICIES, align or []),
        chains=chain,
        trees=tree or [],
        temperatures=temperature or (spec.temperatures if spec else [0.0]),
        expected_prompts=16 if spec and expected_prompts is None else expected_prompts,
        recall_k=spec.recall_k if spec else (),
        transformers_assisted=transformers_assisted and spec is None,
        rivals=rivals and spec is None,
        device=launched.own_device(device),
    )
    if launched.is_main:
        claim_folder(context, out, own=(SETTINGS, RUNS))
        keeps(context, f"what was measured until then is in {out}; the same command goes on")
        if spec is not None:
            _tell_what_is_left_out(spec, given)
    with progress_bar(launched.is_main) as report:
        had_to_run = run_suite(
            settings,
            RunFolder(out),
            settings.read_prompts(),
            share=Share(launched.index, launched.count, launched.wait),
            command=command_line(context),
            report=report,
            go_on=lambda done: typer.echo(f"{out}: goes on after {counted(done, 'measurement')}", err=True),
        )
    if not launched.is_main:
        return
    if not had_to_run:
        typer.echo(f"{out}: all of it was measured before; nothing is run", err=True)
    write_results(out, figures)


def _tell_what_is_left_out(table: "PaperTable", given: dict[str, str]) -> None:
    """Before hours go by: which rows of a table are not measured, and which are by less than they could be."""
    from ..evaluation.suites.paper_tables import why_left_out

    for row in table.rows:
        reason = why_left_out(row, given)
        if reason is not None:
            typer.echo(f"{row.label} is left out: {reason}", err=True)
        elif "ranking" not in given and any(name in (row.policy or "") for name in ("${ranking}", "${core}")):
            typer.echo(f"{row.label} goes by the tokenizer's merge order: no --ranking was given", err=True)


def write_results(folder: Path, figures: bool = True) -> None:
    """Write and show the tables of an evaluation, and draw its figures."""
    from ..evaluation.suites.charts import write_charts
    from ..evaluation.suites.figures import Evaluation
    from ..evaluation.suites.report import shown_tables, write_tables

    evaluation = Evaluation(folder)
    tables = write_tables(evaluation)
    drawn = write_charts(evaluation) if figures else []
    console = wide_console()
    for shown in shown_tables(evaluation):
        console.print(shown)
    names, kinds = (dict.fromkeys(getattr(path, part) for path in drawn) for part in ("stem", "suffix"))
    pictures = f", and {', '.join(names)} as {' and '.join(kinds)}" if drawn else ""
    console.print(f"{folder}: {tables.name}{pictures}", markup=False, highlight=False)
