"""`hf-dynspec doctor`: whether drafting pays for your models, and with which settings."""

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    AllowPickle,
    ChatTemplate,
    Device,
    DrafterModel,
    Dtype,
    JsonFile,
    Limit,
    MaxPromptTokens,
    MorePrompts,
    ResultsFile,
    Seed,
    Threads,
    about,
    command_line,
    progress_bar,
    wide_console,
)
from .running import claim_file


def doctor(
    *,
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id of the model to speed up.")] = None,
    drafter: DrafterModel = None,
    eagle: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder or Hub id of an EAGLE head, in place of a drafter.")
    ] = None,
    allow_pickle: AllowPickle = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="JSON lines, as for bench. Default: a few texts of several kinds."),
    ] = None,
    more: MorePrompts = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,...]",
            help="Repeatable, as for bench. Default: full, frequency, in_context, hybrid and screen.",
        ),
    ] = None,
    tree: Annotated[
        str, typer.Option(metavar="TOTAL_TOKENS/DEPTH/TOP_K", help="The shape of the trees; none leaves them out.")
    ] = "default",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="For sampling, as in transformers; 0 draws from all tokens.")] = 50,
    num_assistant_tokens: Annotated[int, typer.Option(help="The longest chain to expect the speed of.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens for each prompt that speeds are expected for.")] = 128,
    seconds: Annotated[float, typer.Option(help="About how long to measure, after the models are loaded.")] = 90.0,
    limit: Limit = None,
    chat_template: ChatTemplate = False,
    max_prompt_tokens: MaxPromptTokens = None,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Say whether drafting pays for a target and a drafter on this computer, with which settings, and why.

    Costs and acceptance are measured on a few prompts; speeds are predicted from them, prompts included, as
    `bench` measures them.
    """
    from ..assistant import DynSpecAssistant
    from ..evaluation.doctor.measure import diagnose_pair
    from ..evaluation.doctor.settings import POLICIES, DoctorSettings
    from ..evaluation.prompts import read_workload

    files = [*(prompts or []), *(more or [])]
    settings = DoctorSettings(
        target=target,
        drafter=drafter,
        eagle=eagle,
        allow_pickle=allow_pickle,
        prompts=files,
        policies=policy or POLICIES,
        tree=None if tree == "none" else tree,
        temperature=temperature,
        top_k=top_k,
        num_assistant_tokens=num_assistant_tokens,
        max_new_tokens=max_new_tokens,
        seconds=seconds,
        limit=limit,
        chat_template=chat_template,
        max_prompt_tokens=max_prompt_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    claim_file(context, json_file, "--json")
    workload = read_workload(files, limit) if files else None
    words, results = command_line(context), ResultsFile(json_file)
    with progress_bar() as report:
        diagnosis = diagnose_pair(settings, DynSpecAssistant, prompts=workload, report=report)
    results.save(lambda: diagnosis.to_dict(words))
    console = wide_console()
    console.print(about(diagnosis.models, diagnosis.threads, max_new_tokens, None), highlight=False)
    console.print(diagnosis)
    results.require_saved()
