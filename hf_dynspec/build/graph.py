"""The token co-occurrence graph: which tokens follow on which in text, and how likely.

Source: EvoSpec, section 3.3 and appendices A.2 and A.3: an edge leads from `u` to `v` if `v` immediately follows `u`,
weighted with the empirical probability `p(v | u)`; kept are edges that were seen at least 5 times, with a probability
of at least τ = 10⁻⁴, and at most 64 for each source.

Bigrams are counted part by part into Parquet files, which DuckDB adds up and prunes. What its memory limit does not
hold goes to the disk.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigurationError, DynSpecError
from ..fields import SettingError, WholeNumber
from ..files import replacing
from .corpus import Corpus
from .jobs import damaged_work
from .tokens import TextBatch, text_batches, text_encoder

if TYPE_CHECKING:
    import duckdb
    import pyarrow

    from ..shortlists.retrieval.graph import CooccurrenceGraph

# How many successors of each seed the paper takes (appendix A.3).
EXPANSION = 8
# Batches of text whose bigrams are in one file: what a killed run loses at most.
BATCHES_OF_A_PART = 8
# About how many bytes of bigrams on the disk a byte of text makes.
DISK_BYTES_PER_TEXT_BYTE = 0.3
# Sources are added up in so many slices.
_SLICES = 16
_BYTES_PER_THREAD = 32 << 20
# Where a text begins, or where a token takes no part.
_BREAK = -1


@dataclass(frozen=True)
class Pruning:
    """Which bigrams become edges."""

    minimum_count: int = 5  # how often one was seen at least
    threshold: float = 1e-4  # its probability `p(v | u)` at least
    # Edges of one source at most: the likeliest; of equally likely ones those with the lower ids.
    largest_degree: int = 64

    def __post_init__(self):
        WholeNumber(1).require("minimum_count", self.minimum_count)
        WholeNumber(1).require("largest_degree", self.largest_degree)
        if not 0 <= self.threshold < 1:
            raise SettingError("threshold", f"must be a probability of at least 0 and below 1, got {self.threshold}")


class BigramCounts:
    """The bigrams of a corpus, in a folder. Counting goes on after the parts that are there.

    A bigram is two tokens that follow on one another in a text: a plain text file, a document, or one turn of a
    conversation. Neither memory, nor the number of machines, nor interruptions change the counts.

    Args:
        folder: holds a Parquet file for each part of the corpus.
        vocabulary_size: one past the largest id. Tokens with other ids take no part.
        memory: bytes that DuckDB may take.
    """

    def __init__(self, folder: Path, vocabulary_size: int, memory: int = 1 << 30):
        self.folder, self.vocabulary_size = folder, vocabulary_size
        # Tokens and documents of the finished parts, by their numbers.
        self.parts: dict[int, tuple[int, int]] = {}
        self._database = _database(folder, memory)
        self.refresh()

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.parts.values())

    @property
    def documents(self) -> int:
        return sum(documents for _, documents in self.parts.values())

    def refresh(self) -> None:
        """Look up which parts are there. Other processes may have finished some."""
        from pyarrow import parquet

        self.parts = {}
        for path in self.folder.glob("*.parquet"):
            try:
                metadata = parquet.read_metadata(path).metadata
                self.parts[int(path.stem)] = (int(metadata[b"tokens"]), int(metadata[b"documents"]))
            except Exception as error:  # pyarrow's errors for damaged files have no common class
                raise damaged_work(path, error) from error

    def count(
        self,
        corpus: Corpus,
        tokenizer: Any,
        *,
        share: tuple[int, int] = (0, 1),
        report: Callable[[int, int], None] = lambda read, tokens: None,
    ) -> None:
        """Count the bigrams of all parts that are not finished. Special tokens take no part. `share` is the number of
        this process among those that share the folder, and how many there are; `report` takes bytes that were read and
        tokens that were counted."""
        encode = text_encoder(tokenizer)
        takes_part = np.ones(self.vocabulary_size + 1, bool)  # the last one stands for all ids past the vocabulary
        takes_part[[*special_ids(tokenizer), self.vocabulary_size]] = False
        numbered = enumerate(text_batches(corpus.pieces()))
        for part, batches in groupby(numbered, lambda one: one[0] // BATCHES_OF_A_PART):
            if part % share[1] != share[0] or part in self.parts:
                continue
            bigrams, tokens, documents = [], 0, 0
            for _, batch in batches:
                before = encode([batch.before])[0] if batch.before else np.empty(0, np.int64)
                token_ids = encode(piece.text for piece in batch.pieces)
                found = _with_breaks(batch, before, token_ids, takes_part)
                follows = (found[:-1] >= 0) & (found[1:] >= 0)
                bigrams.append(np.stack([found[:-1][follows], found[1:][follows]]).astype(np.int32))
                tokens += sum(map(len, token_ids))
                documents += batch.documents
                report(batch.pieces[-1].read, self.tokens + tokens)
            self._write(part, np.concatenate(bigrams, axis=1), tokens, documents)

    def _write(self, part: int, bigrams: np.ndarray, tokens: int, documents: int) -> None:
        import pyarrow

        pairs = pyarrow.table({"source": bigrams[0], "follower": bigrams[1]})
        with replacing(self.folder / f"{part:08d}.parquet") as scratch:
            place = str(scratch).replace("'", "''")
            self._query(
                f"COPY (SELECT *, count(*) AS count FROM pairs GROUP BY ALL ORDER BY ALL) TO '{place}' "
                f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{tokens: {tokens}, documents: {documents}}})",
                pairs=pairs,
            )
        self.parts[part] = tokens, documents

    def slices(self, report: Callable[[int, int], None] = lambda done, total: None) -> Iterator["Query"]:
        """Add up the counts of all parts, for some sources at a time. Yields a function that runs SQL on the table
        `counts` with the columns `source`, `follower` and `count`."""
        files = [str(self.folder / f"{part:08d}.parquet") for part in self.parts]
        step = -(-self.vocabulary_size // _SLICES)
        for start in range(0, self.vocabulary_size, step):
            report(start, self.vocabulary_size)
            self._query(
                "CREATE OR REPLACE TEMP TABLE counts AS SELECT source, follower, sum(count)::BIGINT AS count "
                "FROM read_parquet(?) WHERE source BETWEEN ? AND ? GROUP BY ALL",
                [files, start, start + step - 1],
            )
            yield self._query
        report(self.vocabulary_size, self.vocabulary_size)

    def _query(self, sql: str, values: list[Any] | None = None, **tables: "pyarrow.Table") -> dict[str, np.ndarray]:
        """Run SQL, with tables by their names. Returns its columns by their names."""
        import duckdb

        try:
            for name, table in tables.items():
                self._database.register(name, table)
            return self._database.execute(sql, values).fetchnumpy()
        except duckdb.OutOfMemoryException as error:
            raise DynSpecError(
                f"the memory does not suffice to add up bigrams; give more by --memory: {error}"
            ) from error
        finally:
            for name in tables:
                self._database.unregister(name)


Query = Callable[..., dict[str, np.ndarray]]


def special_ids(tokenizer: Any) -> list[int]:
    """The ids of special tokens, which mark where documents and turns begin and end. Other added tokens, such as
    `<tool_call>`, are tokens like any other."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))


def _database(folder: Path, memory: int) -> "duckdb.DuckDBPyConnection":
    try:
        import duckdb
        import pyarrow  # noqa: F401
    except ImportError as error:
        problem = f"counting bigrams needs {error.name}; install it with: pip install 'hf-dynspec[build]'"
        raise DynSpecError(problem) from error
    # Each thread needs some memory of its own.
    threads = max(1, min(os.cpu_count() or 1, memory // _BYTES_PER_THREAD))
    settings = {"memory_limit": f"{memory}B", "threads": threads, "temp_directory": str(folder / "spilled")}
    return duckdb.connect(config=settings)


def _with_breaks(
    batch: TextBatch, before: np.ndarray, token_ids: list[np.ndarray], takes_part: np.ndarray
) -> np.ndarray:
    """int64 `[n]`: the tokens of a batch, after the last token of the text that it goes on with. A break stands before
    each text and in place of each token that takes no part."""
    found = [before[-1:]]
    for piece, ids in zip(batch.pieces, token_ids, strict=True):
        found += [[_BREAK], ids] if piece.begins_text else [ids]
    tokens = np.concatenate(found)
    tokens[~takes_part[np.minimum(tokens, len(takes_part) - 1)]] = _BREAK
    return tokens


def build_graph(
    counts: BigramCounts, pruning: Pruning, report: Callable[[int, int], None] = lambda done, total: None
) -> "CooccurrenceGraph":
    """Make the graph of a corpus that is counted. `p(v | u)` is the share of `v` among all bigrams that begin with
    `u`, pruned ones included. `report` takes how many of how many sources are done.

    Raises:
        ConfigurationError: there would be no edge.
    """
    import torch

    from ..shortlists.retrieval.graph import CooccurrenceGraph

    sql = (
        "SELECT source, follower, count / total AS share FROM counts "
        "JOIN (SELECT source, sum(count) AS total FROM counts GROUP BY source) USING (source) "
        "WHERE count >= ? AND share >= ? "
        "QUALIFY row_number() OVER (PARTITION BY source ORDER BY count DESC, follower) <= ? "
        "ORDER BY source, count DESC, follower"
    )
    edges, distinct = [], 0
    for query in counts.slices(report):
        distinct += int(query("SELECT count(*) AS count FROM counts")["count"][0])
        edges.append(query(sql, [pruning.minimum_count, pruning.threshold, pruning.largest_degree]))
    sources, followers, shares = (
        np.concatenate([columns[name] for columns in edges]) for name in ("source", "follower", "share")
    )
    if not len(sources):
        raise ConfigurationError(
            f"none of {distinct:,} different bigrams was seen {pruning.minimum_count} times and has a "
            f"probability of {pruning.threshold:g}: give more text, or lower --minimum-count or --threshold"
        )
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=counts.vocabulary_size))])
    arrays = (offsets, followers.astype(np.int32), shares.astype(np.float32))
    return CooccurrenceGraph(*map(torch.from_numpy, arrays))


def graph_coverage(graph: "CooccurrenceGraph", counts: BigramCounts) -> dict[str, int]:
    """The numbers of all `bigrams` of a text, of those that lead to one of the `EXPANSION` likeliest successors
    (`in_expansion`), and of edges (`in_graph`). The graph is of the same vocabulary."""
    import pyarrow

    offsets = graph.offsets.numpy()
    sources = np.repeat(np.arange(graph.vocabulary_size), np.diff(offsets))
    places = np.arange(len(sources)) - offsets[sources]
    edges = pyarrow.table({"source": sources, "follower": graph.successors.numpy(), "place": places})
    sql = (
        "SELECT coalesce(sum(count), 0)::BIGINT AS bigrams, coalesce(sum(count) FILTER (place < ?), 0)::BIGINT AS "
        "in_expansion, coalesce(sum(count) FILTER (place IS NOT NULL), 0)::BIGINT AS in_graph "
        "FROM counts LEFT JOIN edges USING (source, follower)"
    )
    rows = [query(sql, [EXPANSION], edges=edges) for query in counts.slices()]
    return {name: sum(int(row[name][0]) for row in rows) for name in rows[0]}
