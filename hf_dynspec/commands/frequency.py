"""`hf-dynspec build frequency` and `frequency-import`: the vocabulary by how often its tokens occur."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import counted
from . import options
from .building import (
    UNFINISHED,
    command_text,
    counting_bar,
    describe_inputs,
    find_text,
    going_on,
    require_free_folder,
    shorten_name,
    tell_resumed,
)
from .common import wide_console
from .running import keeps

if TYPE_CHECKING:
    from ..artifacts.config import ModelReference
    from ..build.frequency import Tally
    from ..vocabulary import TokenizerFingerprint

COVERAGE_SIZES = {"1k": 1024, "4k": 4096, "16k": 16384, "32k": 32768}


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
        list[Path] | None,
        typer.Option(metavar="FILE...", help=f"Prompts for --from-target. {options.PROMPT_LINES}"),
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, help="Tokens in a shortlist, unless a user chooses another size.")
    ] = 32768,
    processes: options.Processes = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each turn of a prompt.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="For --from-target; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For --temperature.")] = 0,
    chat_template: Annotated[
        bool, typer.Option(help="Apply the tokenizer's chat template to prompts, if it has one.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where the target runs, such as cpu or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="The target's dtype, such as float32 or bfloat16.")] = "auto",
    save_every: Annotated[float, typer.Option(min=0.0, help="Seconds between two savings of unfinished counts.")] = 20,
    overwrite: options.OverwriteCounts = False,
) -> None:
    """Rank the whole vocabulary by how often its tokens occur in text, or in what a target generates.

    The end-of-sequence token, other special tokens and single bytes come first, so that every shortlist has them. A
    run that was stopped continues where it was when the same command is run again.
    """
    from .. import __version__
    from ..build.frequency import Tally
    from ..build.ranking import rank, vocabulary_size
    from ..build.texts import CorpusError
    from ..loading import find_eos_token_ids, load_model, load_tokenizer
    from ..vocabulary import fingerprint_tokenizer

    _require_one_source(text, from_target, prompts, tokenizer)
    _require_settings(size, seed)
    require_free_folder(context, out, overwrite)
    name = tokenizer or str(from_target)
    loaded = load_tokenizer(name)
    target = None

    def start_tally(units: int, job: dict[str, Any]) -> Tally:
        # Another version may cut text in other places.
        job = {**job, "hf_dynspec": __version__}
        folder = out / UNFINISHED
        tally = Tally(vocabulary_size(loaded), units, job, folder, save_every=save_every, fresh=overwrite)
        keeps(context, lambda: _describe_kept(tally, folder, going_on(out, overwrite)))
        return tally

    if from_target is None:
        paths = [*(text or []), *(more or [])]
        tally, inputs = _count_text(loaded, paths, start_tally, text_field=text_field, processes=processes)
    else:
        paths = [*(prompts or []), *(more or [])]
        settings = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "use_chat_template": chat_template,
        }
        _require_prompts(paths, text_field)
        model = load_model(from_target, device=device, dtype=dtype, role="target")
        tally, inputs = _count_generated(model, loaded, paths, start_tally, text_field=text_field, settings=settings)
        target = _reference(from_target, model)
    if not tally.tokens:
        problem = "all texts are empty" if from_target is None else "no prompt fits into the target's context"
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
    _write(out, ranking, size, fingerprint_tokenizer(loaded, eos_token_ids), provenance, target=target)
    tally.delete()
    _print_coverage(tally, ranking)
    _tell_how_to_use(out, len(ranking), size)


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
    from ..build.frequency_list import import_frequency_list
    from ..build.ranking import complete_ranking, vocabulary_size
    from ..loading import find_eos_token_ids, load_tokenizer
    from ..vocabulary import fingerprint_tokenizer

    _require_settings(size)
    require_free_folder(context, out, overwrite)
    loaded = load_tokenizer(tokenizer)
    eos_token_ids = find_eos_token_ids(tokenizer, loaded)
    leading = import_frequency_list(file, vocabulary_size(loaded), eos_token_ids)
    provenance = {"command": command_text(context), "list": file.name, "tokens_listed": len(leading)}
    ranking = complete_ranking(leading, loaded)
    _write(out, ranking, size or len(leading), fingerprint_tokenizer(loaded, eos_token_ids), provenance)
    typer.echo(f"{out}: a ranking of {len(leading):,} listed tokens and all others after them")
    _tell_how_to_use(out, len(ranking), size or len(leading))


def _tell_how_to_use(out: Path, tokens: int, size: int) -> None:
    """Say how many tokens of a ranking are taken, and by which policy."""
    if size < tokens:
        typer.echo(f"{out}: of {tokens:,} tokens the first {size:,} are taken by --policy frequency:ranking={out}")
    else:
        smaller = f"--policy frequency:ranking={out},size={max(1, tokens // 4)}"
        typer.echo(f"{out}: all of its {tokens:,} tokens would be taken, so choose a size, as in {smaller}")


def _require_one_source(
    text: list[Path] | None, from_target: str | None, prompts: list[Path] | None, tokenizer: str | None
) -> None:
    if (from_target is None) == (not text):
        raise typer.BadParameter("give either --text or --from-target with --prompts")
    if (from_target is None) != (not prompts):
        raise typer.BadParameter("--from-target and --prompts go together")
    if from_target is None and tokenizer is None:
        raise typer.BadParameter("--text needs --tokenizer, the folder or Hub id of the target's tokenizer")


def _require_settings(size: int | None, seed: int = 0) -> None:
    """Refuse before anything is counted what no shortlist may have and no generator takes.

    Raises:
        ConfigurationError: one of them is out of range.
    """
    from ..fields import LARGEST_COUNT, LARGEST_SEED, WholeNumber

    WholeNumber(1, LARGEST_COUNT, optional=True).require("size", size)
    WholeNumber(0, LARGEST_SEED).require("seed", seed)


def _count_text(
    tokenizer: Any,
    paths: list[Path],
    start_tally: Callable[[int, dict[str, Any]], "Tally"],
    *,
    text_field: str,
    processes: int | None,
) -> tuple["Tally", dict[str, Any]]:
    """Count text; return the counts and what provenance says of the inputs."""
    from ..build.frequency import count_tokens

    corpus, job = find_text(paths, text_field, tokenizer)
    tally = start_tally(len(corpus.units), job)
    tell_resumed(tally)
    sizes = [corpus.unit_bytes(index) for index in range(len(corpus.units))]
    with counting_bar("counting", sizes, tally) as report:
        count_tokens(
            tokenizer,
            corpus.units,
            tally,
            text_field=text_field,
            processes=processes or min(8, os.cpu_count() or 1),
            report=report,
        )
    return tally, describe_inputs(corpus.files)


def _require_prompts(paths: list[Path], text_field: str) -> None:
    """Read all prompts once, so that a malformed line is told before a target is loaded and anything generated."""
    from ..build.prompts import read_prompts
    from ..build.texts import CorpusError

    if not sum(1 for _ in read_prompts(paths, text_field)):
        raise CorpusError(f"there are no prompts in {', '.join(map(str, paths))}")


def _count_generated(
    model: Any,
    tokenizer: Any,
    paths: list[Path],
    start_tally: Callable[[int, dict[str, Any]], "Tally"],
    *,
    text_field: str,
    settings: dict[str, Any],
) -> tuple["Tally", dict[str, Any]]:
    """Count what a target generates; return the counts and what provenance says of the inputs."""
    from ..build.corpus import plan_corpus
    from ..build.frequency import count_generated
    from ..build.inputs import describe_files, describe_model, describe_tokenizer
    from ..build.prompts import read_prompts

    files = plan_corpus(paths, text_field).files
    total = sum(1 for _ in read_prompts(paths, text_field))
    job = {
        "inputs": describe_files(files),
        "text field": text_field,
        "tokenizer": describe_tokenizer(tokenizer),
        "target": describe_model(model),
        "generation": {**settings, "dtype": str(model.dtype)},
    }
    tally = start_tally(total, job)
    tell_resumed(tally)
    with counting_bar("generating", [1] * total, tally) as report:
        count_generated(model, tokenizer, read_prompts(paths, text_field), tally, report=report, **settings)
    return tally, {**describe_inputs(files), "prompts": total}


def _reference(name: str, model: Any) -> "ModelReference":
    from ..artifacts.config import ModelReference

    return ModelReference(
        shorten_name(name),
        commit=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
        vocab_size=model.config.get_text_config().vocab_size,
        local=os.path.isdir(name),
    )


def _write(
    out: Path,
    ranking: Any,
    size: int,
    tokenizer: "TokenizerFingerprint",
    provenance: dict[str, Any],
    *,
    target: "ModelReference | None" = None,
) -> None:
    import torch

    from ..artifacts import write_artifact
    from ..artifacts.config import DynSpecConfig, PolicyConfig

    config = DynSpecConfig(
        policy=PolicyConfig(name="frequency", settings={"size": size, "position_aware": False}),
        tokenizer=tokenizer,
        target=target,
        provenance=provenance,
    )
    write_artifact(out, config, tensors={"ranking": torch.from_numpy(ranking).to(torch.int32)})


def _describe_kept(tally: "Tally", folder: Path, fix: str) -> str:
    done, total = int(tally.finished.sum()), len(tally.finished)
    if not (folder / tally.FILE).exists():
        what = "nothing of what was counted could be kept" if done else "nothing was counted yet"
        return f"{what}; run the same command to begin anew"
    return f"the counts of {done} of {counted(total, 'part')} are kept in {folder}; {fix}"


def _print_coverage(tally: "Tally", ranking: Any) -> None:
    from ..build.ranking import coverage
    from ..evaluation.tables import FittedTable

    shares = coverage(tally.counts, ranking, COVERAGE_SIZES.values())
    sizes = {name: size for name, size in COVERAGE_SIZES.items() if size in shares}
    table = FittedTable(
        "Counted tokens, and the share that the first ids of the ranking cover",
        ["documents", "tokens", "distinct", *sizes],
    )
    counted = (tally.documents, tally.tokens, int((tally.counts > 0).sum()))
    table.add_row(*(f"{count:,}" for count in counted), *(f"{shares[size]:.2%}" for size in sizes.values()))
    wide_console().print(table)
