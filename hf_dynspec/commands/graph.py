"""`hf-dynspec build graph`: which tokens follow on which in text."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    tell_resumed,
)
from .common import progress_bar, wide_console
from .launched import Launched
from .running import keeps, raise_lost_interrupt, require_space

if TYPE_CHECKING:
    from ..build.bigram_counts import BigramCounts
    from ..build.cooccurrence import Pruning
    from ..build.corpus import Corpus
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
    processes: options.Processes = None,
    memory: Annotated[
        int,
        typer.Option(
            min=16,
            help="MiB that bigrams take while they are counted and merged, in all processes of a machine together; "
            "the rest goes to the disk. Python, its libraries and the tokenizer take their own besides: about 700 "
            "MiB, and 150 for each process.",
        ),
    ] = 1024,
    overwrite: options.OverwriteCounts = False,
) -> None:
    """Build the token co-occurrence graph: the likeliest successors of each token in text (EvoSpec).

    A bigram never reaches over the border of two documents, or of two turns of a conversation, and special tokens take
    no part. Kept are bigrams that were seen often enough, and the likeliest of each token. The same command run again
    continues what was stopped. `accelerate launch` (on CPUs with its --multi_gpu) runs it on several machines that see
    the same folders; the graph is the same whatever the number of machines and processes.
    """
    from .. import __version__
    from ..build.bigram_counts import BigramCounts
    from ..build.cooccurrence import Pruning
    from ..build.ranking import vocabulary_size
    from ..build.texts import CorpusError
    from ..loading import find_eos_token_ids, load_tokenizer

    paths = [*(text or []), *(more or [])]
    if not paths:
        raise typer.BadParameter("give --text the files and folders to count")
    pruning = Pruning(minimum_count, threshold, largest_degree)
    launched = Launched()
    if launched.is_main:
        require_free_folder(context, out, overwrite)
    loaded = load_tokenizer(tokenizer)
    size = vocabulary_size(loaded)
    corpus, job = find_text(paths, text_field, loaded)
    judged_by = _find_held_out(held_out, text_field, corpus, loaded)
    # Another version may cut text in other places.
    job = {**job, "hf_dynspec": __version__}
    units, folder = len(corpus.units), out / UNFINISHED
    counts = launched.main_first(lambda: BigramCounts(folder, units, job, fresh=overwrite, is_main=launched.is_main))
    processes = processes or max(1, min(8, os.cpu_count() or 1) // launched.local_count)
    work = _Work(loaded, size, text_field, processes, (memory << 20) // launched.local_count)
    if launched.is_main:
        keeps(context, lambda: _describe_kept(counts, going_on(out, overwrite)))
        tell_resumed(counts)
        _require_space(corpus, counts)
    work.count("counting", corpus, counts, (launched.index, launched.count))
    launched.wait()
    if not launched.is_main:
        return
    counts.refresh()
    if not counts.tokens:
        counts.delete()
        raise CorpusError(f"no tokens came of {', '.join(map(str, paths))}: all texts are empty")
    made = work.build(counts, pruning)
    figures = work.judge(made, counts, judged_by)
    provenance = {
        "command": command_text(context),
        **describe_inputs(corpus.files),
        "pruning": {"minimum_count": minimum_count, "threshold": threshold, "largest_degree": largest_degree},
        "edges": made.edges,
        "sources": made.sources,
        "metrics": {"successors": figures},
    }
    _write(out, made, loaded, find_eos_token_ids(tokenizer, loaded), provenance)
    shutil.rmtree(folder)
    _print_report(figures)
    work.tell_memory()
    typer.echo(f"{out}: {made.edges:,} edges from {made.sources:,} of {size:,} tokens")
    typer.echo(f"use it by --policy retrieval:core=RANKING,graph={out}")


class _Work:
    """What a command does with texts, in how many processes and how much memory.

    Args:
        tokenizer: of the texts.
        vocabulary_size: its.
        text_field: which holds the texts.
        processes: how many work at the same time.
        memory: bytes for bigrams.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, text_field: str, processes: int, memory: int):
        self._tokenizer, self._size, self._text_field = tokenizer, vocabulary_size, text_field
        self._effort = {"processes": processes, "memory": memory}
        self._taken = 0

    def count(self, title: str, corpus: "Corpus", counts: "BigramCounts", share: tuple[int, int] = (0, 1)) -> None:
        """Count a share of what is unfinished (see `count_bigrams`), below a bar in the process of the first share."""
        from ..build.bigram_counts import count_bigrams

        with _counting(title, counts, corpus, share) as report:
            taken = count_bigrams(
                self._tokenizer,
                corpus.units,
                counts,
                vocabulary_size=self._size,
                text_field=self._text_field,
                share=share,
                report=report,
                **self._effort,
            )
        self._taken = max(self._taken, taken)

    def build(self, counts: "BigramCounts", pruning: "Pruning") -> "CooccurrenceGraph":
        from ..build.cooccurrence import build_graph

        self._merge(counts)
        with progress_bar() as show:
            return build_graph(
                counts,
                self._size,
                pruning,
                memory=self._effort["memory"],
                report=lambda done, total: show("tokens in the graph", done, total),
            )

    def judge(
        self, graph: "CooccurrenceGraph", counts: "BigramCounts", held_out: "Corpus | None"
    ) -> list[dict[str, Any]]:
        """How much of the counted text leads along the graph's edges, and of text that was held out, which is counted
        for it: a row of figures each."""
        from ..build.bigram_counts import BigramCounts

        figures = [{"text": "counted", **self._judge_by(graph, counts)}]
        if held_out is not None:
            others = BigramCounts(counts.folder / "held-out", len(held_out.units), {}, fresh=True)
            self.count("counting held-out text", held_out, others)
            figures.append({"text": "held out", **self._judge_by(graph, others)})
        return figures

    def _judge_by(self, graph: "CooccurrenceGraph", counts: "BigramCounts") -> dict[str, Any]:
        from ..build.cooccurrence import graph_coverage

        self._merge(counts)
        found = graph_coverage(graph, counts, memory=self._effort["memory"])
        return {
            "documents": counts.documents,
            "tokens": counts.tokens,
            "bigrams": found.bigrams,
            "to 8 likeliest": round(found.in_expansion / max(1, found.bigrams), 4),
            "to all successors": round(found.in_graph / max(1, found.bigrams), 4),
        }

    def _merge(self, counts: "BigramCounts") -> None:
        from ..build.bigram_counts import merge_counts

        with progress_bar() as show:
            merge_counts(counts, report=lambda done, total: show("merging counts", done, total), **self._effort)

    def tell_memory(self) -> None:
        """Say what this process and those that it started took at most, where the system tells."""
        from ..build.bigram_counts import peak_memory

        if self._taken:
            most = (self._taken + peak_memory()) / 2**20
            typer.echo(f"memory: at most {most:,.0f} MiB in all processes together", err=True)


@contextmanager
def _counting(
    title: str, counts: "BigramCounts", corpus: "Corpus", share: tuple[int, int]
) -> Iterator[Callable[[int], None]]:
    """What takes the number of tokens counted so far: for the first share a bar over the units in it."""
    from ..build.bigram_counts import is_in_share

    if share[0] != 0:
        yield lambda tokens: raise_lost_interrupt()
        return
    sizes = [corpus.unit_bytes(index) * is_in_share(index, share) for index in range(len(corpus.units))]
    with counting_bar(title, sizes, counts) as report:
        yield report


def _find_held_out(paths: list[Path] | None, text_field: str, corpus: "Corpus", tokenizer: Any) -> "Corpus | None":
    """The text to judge by, which must not be counted."""
    from ..errors import ConfigurationError

    if not paths:
        return None
    found, _ = find_text(paths, text_field, tokenizer)
    both = {path for path, _ in corpus.files} & {path for path, _ in found.files}
    if both:
        raise ConfigurationError(f"{min(both)} is in --text and in --held-out; give it to one of them")
    return found


def _require_space(corpus: "Corpus", counts: "BigramCounts") -> None:
    """Refuse a disk that is too small for what is left to count."""
    from ..build.bigram_counts import expected_bytes

    left = sum(corpus.text_bytes(index) for index in counts.unfinished())
    require_space(counts.folder, expected_bytes(left), "the counts")


def _describe_kept(counts: "BigramCounts", fix: str) -> str:
    from ..errors import DynSpecError

    # A part that another process had just finished may not have been heard of.
    with suppress(DynSpecError, OSError):
        counts.refresh()
    done, total = int(counts.finished.sum()), len(counts.finished)
    if not done:
        return "nothing was counted yet; run the same command to begin anew"
    return f"the counts of {done} of {counted(total, 'part')} are kept in {counts.folder}; {fix}"


def _write(out: Path, made: Any, tokenizer: Any, eos_token_ids: tuple[int, ...], provenance: dict[str, Any]) -> None:
    from ..artifacts import write_artifact
    from ..artifacts.config import DynSpecConfig, PolicyConfig
    from ..vocabulary import fingerprint_tokenizer

    config = DynSpecConfig(
        policy=PolicyConfig(name=made.name, settings=made.settings()),
        tokenizer=fingerprint_tokenizer(tokenizer, eos_token_ids),
        provenance=provenance,
    )
    write_artifact(out, config, tensors=made.tensors())


def _print_report(figures: list[dict[str, Any]]) -> None:
    from ..evaluation.tables import FittedTable

    table = FittedTable(
        "Bigrams, and the share of them that lead from a token to one of its successors in the graph", list(figures[0])
    )
    for row in figures:
        shown = {int: "{:,}", float: "{:.2%}"}
        table.add_row(*(shown.get(type(value), "{}").format(value) for value in row.values()))
    wide_console().print(table)
