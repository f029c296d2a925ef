"""`hf-dynspec build graph`: which tokens follow on which in text."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigurationError, DynSpecError
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
    write_policy,
)
from .common import progress_bar, wide_console
from .launched import Launched
from .running import keeps, require_space

if TYPE_CHECKING:
    from ..build.corpus import Corpus
    from ..build.graph import BigramCounts
    from ..shortlists import CooccurrenceGraph


def graph(
    *,
    context: typer.Context,
    tokenizer: options.Tokenizer,
    out: options.Out,
    text: options.Text = None,
    more: Annotated[list[Path] | None, options.more("files for --text", "PATH")] = None,
    text_field: options.TextField = "text",
    held_out: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Repeatable. Other files and folders, which the graph is only judged by."),
    ] = None,
    minimum_count: Annotated[int, typer.Option(min=1, help="How often an edge's bigram was seen at least.")] = 5,
    threshold: Annotated[float, typer.Option(help="The probability of an edge at least.")] = 1e-4,
    largest_degree: Annotated[int, typer.Option(min=1, max=1024, help="Edges of one token at most.")] = 64,
    memory: Annotated[
        int,
        typer.Option(
            min=64,
            help="MiB in which bigrams are added up; the rest goes to the disk. Python, its libraries, the tokenizer "
            "and the text in work take about 700 MiB besides.",
        ),
    ] = 1024,
    overwrite: options.OverwriteCounts = False,
) -> None:
    """Build the token co-occurrence graph: the likeliest successors of each token in text (EvoSpec).

    A bigram never reaches over the border of two documents, or of two turns of a conversation, and special tokens take
    no part. Kept are bigrams that were seen often enough, and the likeliest of each token. The same command run again
    continues what was stopped. `accelerate launch` (on CPUs with its --multi_gpu) runs it on several machines that see
    the same folders; the graph is the same whatever the number of machines.
    """
    from ..build.corpus import CorpusError
    from ..build.graph import DISK_BYTES_PER_TEXT_BYTE, BigramCounts, Pruning, build_graph
    from ..build.jobs import begin_job

    paths = [*(text or []), *(more or [])]
    if not paths:
        raise typer.BadParameter("give --text the files and folders to count")
    pruning = Pruning(minimum_count, threshold, largest_degree)
    launched = Launched()
    if launched.is_main:
        require_free_folder(context, out, overwrite)
    corpus = find_text(paths, text_field)
    judged_by = find_text(held_out, text_field) if held_out else None
    both = {file.path for file in corpus.files} & {file.path for file in (judged_by.files if judged_by else ())}
    if both:
        raise ConfigurationError(f"{min(both)} is in --text and in --held-out; give it to one of them")
    from ..build.ranking import vocabulary_size
    from ..loading import find_eos_token_ids, load_tokenizer
    from ..vocabulary import fingerprint_tokenizer

    loaded = load_tokenizer(tokenizer)
    size, folder, job = vocabulary_size(loaded), out / UNFINISHED, describe_text(corpus, loaded)
    launched.main_first(lambda: begin_job(folder, job, fresh=overwrite, is_main=launched.is_main))
    memory = (memory << 20) // launched.local_count
    counts = BigramCounts(folder, size, memory)
    if launched.is_main:
        keeps(context, lambda: _describe_kept(counts, going_on(out, overwrite)))
        needed = DISK_BYTES_PER_TEXT_BYTE * sum(file.text_bytes for file in corpus.files)
        require_space(folder, needed - sum(path.stat().st_size for path in folder.glob("*.parquet")), "the counts")
    _count("counting", corpus, loaded, counts, (launched.index, launched.count))
    launched.wait()
    if not launched.is_main:
        return
    counts.refresh()
    if not counts.tokens:
        shutil.rmtree(folder)
        raise CorpusError(f"no tokens came of {', '.join(map(str, paths))}: all texts are empty")
    with progress_bar() as show:
        made = build_graph(counts, pruning, lambda done, total: show("tokens in the graph", done, total))
    figures = [_judge("counted", made, counts)]
    if judged_by is not None:
        shutil.rmtree(folder / "held-out", ignore_errors=True)
        others = BigramCounts(folder / "held-out", size, memory)
        _count("counting held-out text", judged_by, loaded, others)
        figures.append(_judge("held out", made, others))
    provenance = {
        "command": command_text(context),
        **describe_inputs(corpus.files),
        "pruning": vars(pruning),
        "edges": made.edges,
        "sources": made.sources,
        "metrics": {"successors": figures},
    }
    fingerprint = fingerprint_tokenizer(loaded, find_eos_token_ids(tokenizer, loaded))
    write_policy(out, made.name, made.settings(), made.tensors(), fingerprint, provenance)
    shutil.rmtree(folder)
    _print_report(figures)
    typer.echo(f"{out}: {made.edges:,} edges from {made.sources:,} of {size:,} tokens")
    typer.echo(f"use it by --policy retrieval:core=RANKING,graph={out}")


def _count(
    title: str, corpus: "Corpus", tokenizer: Any, counts: "BigramCounts", share: tuple[int, int] = (0, 1)
) -> None:
    """Count this process's share of a corpus, below a bar in the first process."""
    with counting_bar(title, corpus.size, counts.tokens, is_shown=share[0] == 0) as report:
        counts.count(corpus, tokenizer, share=share, report=report)


def _judge(text: str, graph: "CooccurrenceGraph", counts: "BigramCounts") -> dict[str, Any]:
    """How much of a counted text leads along the graph's edges."""
    from ..build.graph import graph_coverage

    found = graph_coverage(graph, counts)
    return {
        "text": text,
        "documents": counts.documents,
        "tokens": counts.tokens,
        "bigrams": found["bigrams"],
        "to 8 likeliest": round(found["in_expansion"] / max(1, found["bigrams"]), 4),
        "to all successors": round(found["in_graph"] / max(1, found["bigrams"]), 4),
    }


def _describe_kept(counts: "BigramCounts", fix: str) -> str:
    # Another process may have just finished a part.
    with suppress(DynSpecError, OSError):
        counts.refresh()
    if not counts.parts:
        return "nothing was counted yet; run the same command to begin anew"
    return f"the counts of {counts.tokens:,} tokens are kept in {counts.folder}; {fix}"


def _print_report(figures: list[dict[str, Any]]) -> None:
    from ..evaluation.tables import FittedTable

    title = "Bigrams, and the share of them that lead from a token to one of its successors in the graph"
    table = FittedTable(title, list(figures[0]))
    for row in figures:
        shown = {int: "{:,}", float: "{:.2%}"}
        table.add_row(*(shown.get(type(value), "{}").format(value) for value in row.values()))
    wide_console().print(table)
