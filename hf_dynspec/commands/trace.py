"""`hf-dynspec trace`: what a policy did for one prompt, token by token."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .common import ResultsFile, about, progress_bar
from .running import claim_file


def trace(
    *,
    context: typer.Context,
    target: options.Target,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHead = None,
    allow_pickle: options.AllowPickle = False,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=options.PROMPT_LINES)] = None,
    prompt_id: Annotated[
        str | None, typer.Option(metavar="FILE/QUESTION_ID", help="Which of the prompts. Default: the first.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt itself, instead of a file.")] = None,
    policy: Annotated[str, typer.Option(metavar=options.POLICY, help="The policy, as for bench.")] = "retrieval",
    tree: Annotated[
        str | None, typer.Option(metavar=options.TREE_SHAPE, help="Draft trees of this shape; default means 60/5/10.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    num_assistant_tokens: Annotated[int, typer.Option(help="Tokens of a chain.")] = 5,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 50,
    chat_template: options.ChatTemplate = False,
    max_prompt_tokens: options.MaxPromptTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything to one HTML page.")] = None,
    json_file: options.JsonFile = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a profile of the rounds: .json, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Generate once and show what the policy did: which tokens were out of vocabulary, what was retrieved there and
    how, and which of these tokens were drafted and accepted later. The tokens are those of a call without a trace.
    """
    from ..errors import ConfigurationError
    from ..evaluation.prompts import WorkloadPrompt, read_workload

    if (prompts is None) == (prompt is None):
        raise ConfigurationError("name one prompt: a file with --prompts, or a text with --prompt")
    if prompt == "":
        raise ConfigurationError("--prompt is empty: give it the text that is to go on")
    for path, option in ((html, "--html"), (json_file, "--json"), (timeline, "--timeline")):
        claim_file(context, path, option)
    if timeline is not None and timeline.suffix != ".json":
        raise ConfigurationError(f"--timeline writes the JSON of a profile: name a .json file, not {timeline}")
    given = read_workload([prompts]) if prompt is None else [WorkloadPrompt("prompt/1", "prompt", prompt)]
    from rich.console import Console

    from ..evaluation.trace.measure import trace_prompt
    from ..evaluation.trace.report import text_report, to_dict, write_page
    from ..evaluation.trace.settings import TraceSettings

    settings = options.settings_of(context, TraceSettings, prompts=[prompts] if prompts else [], policies=(policy,))
    with progress_bar() as report:
        result = trace_prompt(settings, prompts=given, timeline=timeline, report=report)
    console, chain_length = Console(), None if tree is not None else num_assistant_tokens
    console.print(about(result.models, result.threads, max_new_tokens, chain_length), highlight=False)
    for part in text_report(result):
        console.print(part)
    results = ResultsFile(context, json_file)
    results.save(partial(to_dict, result))
    if html is not None:
        write_page(html, result)
    results.end()
