"""`hf-dynspec build frequency` and `frequency-import`: the vocabulary by how often its tokens occur."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..fields import LARGEST_COUNT, LARGEST_SEED, WholeNumber
from . import options
from .building import (
    UNFINISHED,
    command_text,
    counting_bar,
    describe_inputs,
    describe_text,
    find_text,
    going_on,
    require_free_folder,
    shorten_name,
    write_policy,
)
from .common import wide_console
from .running import keeps

if TYPE_CHECKING:
    from ..build.frequency import Tally

_COVERAGE_SIZES = {"1k": 1024, "4k": 4096, "16k": 16384, "32k": 32768}


def frequency(
    *,
    context: typer.Context,
    out: options.Out,
    more: Annotated[list[Path] | None, options.more("files for --text or --prompts", "PATH")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the tokenizer; with --from-target, the target's own.")
    ] = None,
    text: options.Text = None,
    text_field: options.TextField = "text",
    from_target: Annotated[
        str | None, typer.Option(help="Count what this model generates on --prompts, instead of text (VocabTrim).")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE...", help=f"Prompts for --from-target. {options.PROMPT_LINES}")
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, help="Tokens in a shortlist, unless a user chooses another size.")
    ] = 32768,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each turn of a prompt.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="For --from-target; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For --temperature.")] = 0,
    chat_template: Annotated[
        bool, typer.Option(help="Apply the tokenizer's chat template to prompts, if it has one.")
    ] = True,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    overwrite: options.OverwriteCounts = False,
) -> None:
    """Rank the whole vocabulary by how often its tokens occur in text, or in what a target generates.

    The end-of-sequence token, other special tokens and single bytes come first, so that every shortlist has them. A
    run that was stopped continues where it was when the same command is run again.
    """
    from ..build.corpus import CorpusError
    from ..build.frequency import Tally, count_generated, count_tokens
    from ..build.jobs import begin_job, describe_model
    from ..build.prompts import read_prompts

    if (from_target is None) == (not text):
        raise typer.BadParameter("give either --text or --from-target with --prompts")
    if (from_target is None) != (not prompts):
        raise typer.BadParameter("--from-target and --prompts go together")
    if from_target is None and tokenizer is None:
        raise typer.BadParameter("--text needs --tokenizer, the folder or Hub id of the target's tokenizer")
    WholeNumber(1, LARGEST_COUNT).require("size", size)
    WholeNumber(0, LARGEST_SEED).require("seed", seed)
    require_free_folder(context, out, overwrite)
    name = tokenizer or str(from_target)
    paths, folder = [*(text or prompts or []), *(more or [])], out / UNFINISHED
    generation = {name: context.params[name] for name in ("max_new_tokens", "temperature", "seed")}
    generation["use_chat_template"] = chat_template
    # Read once, so that a malformed line is found before a target is loaded and anything generated.
    prompt_count = sum(1 for _ in read_prompts(paths, text_field)) if from_target else 0
    if from_target and not prompt_count:
        raise CorpusError(f"there are no prompts in {', '.join(map(str, paths))}")
    corpus = find_text(paths, text_field)
    from ..assistant.models import model_reference
    from ..build.ranking import rank, vocabulary_size
    from ..loading import find_eos_token_ids, load_model, load_tokenizer
    from ..vocabulary import fingerprint_tokenizer

    loaded = load_tokenizer(name)
    job = describe_text(corpus, loaded)
    inputs, models = describe_inputs(corpus.files), {}
    if from_target:
        model = load_model(from_target, device=device, dtype=dtype or "auto", role="target")
        job |= {"target": describe_model(model), "generation": {**generation, "dtype": str(model.dtype)}}
        inputs["prompts"], models["target"] = prompt_count, model_reference(model)
        if models["target"].local:
            # An artifact does not name its author's folders.
            models["target"] = replace(models["target"], name_or_path=shorten_name(from_target))
    begin_job(folder, job, fresh=overwrite)
    tally = Tally(vocabulary_size(loaded), folder)
    keeps(context, lambda: _describe_kept(tally, going_on(out, overwrite)))
    if from_target:
        with counting_bar("generating", prompt_count, tally.tokens) as report:
            count_generated(model, loaded, read_prompts(paths, text_field), tally, report=report, **generation)
    else:
        with counting_bar("counting", corpus.size, tally.tokens) as report:
            count_tokens(corpus, loaded, tally, report)
    if not tally.tokens:
        shutil.rmtree(folder)
        problem = "no prompt fits into the target's context" if from_target else "all texts are empty"
        raise CorpusError(f"no tokens came of {', '.join(map(str, paths))}: {problem}")
    eos_token_ids = find_eos_token_ids(from_target or name, loaded)
    ranking = rank(tally.counts, loaded, eos_token_ids)
    provenance = {
        "command": command_text(context),
        **inputs,
        "documents": tally.documents,
        "tokens_counted": tally.tokens,
        "distinct_tokens": int((tally.counts > 0).sum()),
    }
    _write(out, ranking, size, fingerprint_tokenizer(loaded, eos_token_ids), provenance, **models)
    shutil.rmtree(folder)
    _print_coverage(tally, ranking)
    _print_use(out, len(ranking), size)


def frequency_import(
    *,
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="LIST.pt", help="A .pt list of FR-Spec, SGLang or speculators.")],
    tokenizer: options.Tokenizer,
    out: options.Out,
    size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a shortlist. Default: the length of the list.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Make an artifact of a `.pt` frequency list. Tokens that the list lacks follow in the tokenizer's order."""
    WholeNumber(1, LARGEST_COUNT, optional=True).require("size", size)
    require_free_folder(context, out, overwrite)
    from ..build.frequency_list import import_frequency_list
    from ..build.ranking import complete_ranking, vocabulary_size
    from ..loading import find_eos_token_ids, load_tokenizer
    from ..vocabulary import fingerprint_tokenizer

    loaded = load_tokenizer(tokenizer)
    eos_token_ids = find_eos_token_ids(tokenizer, loaded)
    leading = import_frequency_list(file, vocabulary_size(loaded), eos_token_ids)
    provenance = {"command": command_text(context), "list": file.name, "tokens_listed": len(leading)}
    ranking = complete_ranking(leading, loaded)
    _write(out, ranking, size or len(leading), fingerprint_tokenizer(loaded, eos_token_ids), provenance)
    typer.echo(f"{out}: a ranking of {len(leading):,} listed tokens and all others after them")
    _print_use(out, len(ranking), size or len(leading))


def _write(out: Path, ranking: Any, size: int, tokenizer: Any, provenance: dict[str, Any], **models: Any) -> None:
    import torch

    settings = {"size": size, "position_aware": False}
    tensors = {"ranking": torch.from_numpy(ranking).to(torch.int32)}
    write_policy(out, "frequency", settings, tensors, tokenizer, provenance, **models)


def _describe_kept(tally: "Tally", fix: str) -> str:
    if not tally.file.exists():
        what = "nothing of what was counted could be kept" if tally.done else "nothing was counted yet"
        return f"{what}; run the same command to begin anew"
    return f"the counts of {tally.tokens:,} tokens are kept in {tally.file.parent}; {fix}"


def _print_coverage(tally: "Tally", ranking: Any) -> None:
    from ..build.ranking import coverage
    from ..evaluation.tables import FittedTable

    shares = coverage(tally.counts, ranking, _COVERAGE_SIZES.values())
    sizes = {name: size for name, size in _COVERAGE_SIZES.items() if size in shares}
    title = "Counted tokens, and the share that the first ids of the ranking cover"
    table = FittedTable(title, ["documents", "tokens", "distinct", *sizes])
    counted = (tally.documents, tally.tokens, int((tally.counts > 0).sum()))
    table.add_row(*(f"{count:,}" for count in counted), *(f"{shares[size]:.2%}" for size in sizes.values()))
    wide_console().print(table)


def _print_use(out: Path, tokens: int, size: int) -> None:
    if size < tokens:
        typer.echo(f"{out}: of {tokens:,} tokens the first {size:,} are taken by --policy frequency:ranking={out}")
    else:
        smaller = f"--policy frequency:ranking={out},size={max(1, tokens // 4)}"
        typer.echo(f"{out}: all of its {tokens:,} tokens would be taken, so choose a size, as in {smaller}")
