"""`hf-dynspec coverage`: what shortlists cover of your target's distribution, and the acceptance that follows."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .common import about, claim_results, progress_bar, tell_notes, wide_console

if TYPE_CHECKING:
    from ..evaluation.coverage.result import CoverageResult


def coverage(
    *,
    context: typer.Context,
    target: options.Target,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHead = None,
    allow_pickle: options.AllowPickle = False,
    prompts: options.Prompts,
    more: options.MorePrompts = None,
    policy: options.Policies = None,
    temperature: Annotated[float, typer.Option(help="Of both models; 0 is greedy.")] = 0.0,
    max_new_tokens: options.MaxNewTokens = 128,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens drafted per round.")] = 5,
    recall_k: Annotated[int, typer.Option(help="k of Recall@k.")] = 10,
    continuations: Annotated[int, typer.Option(help="Texts for each prompt, at a temperature above 0.")] = 1,
    draws: Annotated[int, typer.Option(help="Draws of the rounds, for policies that learn from verdicts.")] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Keep the policies' states from prompt to prompt.")] = False,
    limit: options.Limit = None,
    chat_template: options.ChatTemplate = False,
    max_prompt_tokens: options.MaxPromptTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json_file: options.JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot mass against shortlist size: .png, .pdf or .svg.")
    ] = None,
    by_domain: Annotated[bool, typer.Option("--by-domain", help="Show mass and acceptance length by domain.")] = False,
    by_depth: Annotated[bool, typer.Option("--by-depth", help="Show size, mass and acceptance by depth.")] = False,
) -> None:
    """Measure the target's probability mass on the shortlists, and how often drafts are accepted.

    The target continues each prompt, and all policies follow its text. Acceptance lengths are compared with that of
    the first policy. To compare sizes of a policy, name it several times. In a policy, {domain} stands for the domain
    of a prompt: frequency:ranking=rankings/without-{domain} uses a folder for each. An interrupted run shows and saves
    what it has.
    """
    from ..evaluation.prompts import read_workload

    files = [*prompts, *(more or [])]
    results = claim_results(context, json_file, plot)
    workload = read_workload(files, limit)
    from ..evaluation.coverage.measure import measure_coverage
    from ..evaluation.coverage.report import coverage_table, depth_table, domain_tables, to_dict, write_plot
    from ..evaluation.coverage.settings import CoverageSettings
    from ..evaluation.policy_text import DEFAULT_POLICIES

    settings = options.settings_of(context, CoverageSettings, prompts=files, policies=policy or DEFAULT_POLICIES)

    def save(measured: "CoverageResult") -> None:
        # An earlier run's results are worth more than none.
        if measured.measured:
            results.save(partial(to_dict, measured))

    with progress_bar() as report:
        result = measure_coverage(settings, prompts=workload, report=report, save=save)
    tell_notes(result.notes)
    if result.measured:
        console = wide_console()
        line = about(result.models, result.threads, settings.max_new_tokens, settings.num_assistant_tokens)
        console.print(line, highlight=False)
        by_domains = domain_tables(result) if by_domain else []
        for table in (coverage_table(result), *by_domains, *([depth_table(result)] if by_depth else [])):
            console.print(table)
        if plot is not None:
            write_plot(plot, result)
    results.end(result.complete, is_empty=not result.measured)
