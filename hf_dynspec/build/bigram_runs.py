"""Sorted runs of counted bigrams on the disk, and merging them in as much memory as there shall be.

A bigram of the tokens `u` and `v` is the 64-bit number `u · V + v`. A run holds the bigrams of neighbouring work units
in ascending order, each once, with their counts, behind a short head that says which units these are and with which
tokens they begin and end. Runs of neighbours are merged into one run of both, the bigram across their border included,
so that it does not matter how a corpus was cut into units, nor in which order runs are merged. A run is put in place
when it is complete, and tells by its name what it holds: the folder itself is the state of a job.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from ..files import replacing

# Runs that are merged at once, which are open files.
FAN_IN = 16

_MAGIC = b"HFDSBG01"
_HEAD = struct.Struct("<8s7q")
_RECORD = np.dtype([("bigram", "<i8"), ("count", "<i8")])
BYTES_PER_BIGRAM = _RECORD.itemsize
_SUFFIX = ".bigrams"
# What a bigram takes at most while it is merged (as a record, as two numbers, and what sorting and adding up make of
# them) and while a buffer is sorted, in bytes.
_BYTES_PER_MERGED, _BYTES_PER_SORTED = 96, 64
_LEAST_BLOCK = 64
# Bigrams that are read or written at once at most; beyond that nothing gets faster.
_LARGEST_BLOCK = 1 << 20

# No token: where a text begins or ends, or a token that takes no part. And no place where one could be.
BREAK, NOTHING = -1, -2

# Ascending bigrams, each once: int64 `[n]`, and their counts: int64 `[n]`.
Block = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class RunHead:
    """What a run says of its units, besides its bigrams.

    Args:
        start: its first unit.
        end: the unit after its last.
        first: the token that its units begin with; `BREAK` where that is a break, `NOTHING` where they hold no token
            and no break.
        last: the one that they end with, likewise.
        tokens: how many tokens they hold.
        documents: how many documents begin in them.
        vocabulary_size: the `V` of the bigrams.
    """

    start: int
    end: int
    first: int
    last: int
    tokens: int
    documents: int
    vocabulary_size: int

    def joined(self, after: "RunHead") -> "RunHead":
        """The head of this run and the one of the units after it."""
        return RunHead(
            self.start,
            after.end,
            after.first if self.first == NOTHING else self.first,
            self.last if after.last == NOTHING else after.last,
            self.tokens + after.tokens,
            self.documents + after.documents,
            self.vocabulary_size,
        )

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.start:08d}-{self.end:08d}{_SUFFIX}"


@dataclass(frozen=True)
class Run:
    """A run on the disk.

    Args:
        path: its file.
        head: what it says of its units.
    """

    path: Path
    head: RunHead

    @property
    def bigrams(self) -> int:
        """How many distinct bigrams it holds."""
        return (self.path.stat().st_size - _HEAD.size) // _RECORD.itemsize

    def blocks(self, size: int) -> Iterator[Block]:
        """Read it, `size` bigrams at once."""
        with open(self.path, "rb") as file:
            file.seek(_HEAD.size)
            while len(records := np.fromfile(file, _RECORD, size)):
                yield records["bigram"].copy(), records["count"].copy()


def open_run(path: Path) -> Run:
    """Look at the head of a run.

    Raises:
        ValueError: the file is not one that `write_run` completed.
    """
    with open(path, "rb") as file:
        beginning = file.read(_HEAD.size)
        size = os.fstat(file.fileno()).st_size
    if len(beginning) < _HEAD.size or not beginning.startswith(_MAGIC):
        raise ValueError(f"{path.name} does not begin as counts do")
    head = RunHead(*_HEAD.unpack(beginning)[1:])
    if head.name != path.name or (size - _HEAD.size) % _RECORD.itemsize:
        raise ValueError(f"{path.name} is cut off, or another file's")
    return Run(path, head)


def write_run(
    folder: Path,
    blocks: Iterable[Block],
    head: RunHead,
    *,
    name: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Run:
    """Write a run, which is in its place when it is complete and on the disk.

    Args:
        folder: where to.
        blocks: ascending through all of them.
        head: what to say of its units.
        name: a name for what is no run of whole units yet.
        watch: called before each block; what it raises ends the writing.
    """
    path = folder / (name or head.name)
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.write(_HEAD.pack(_MAGIC, *astuple(head)))
        for bigrams, counts in blocks:
            watch()
            for start in range(0, len(bigrams), _LARGEST_BLOCK):
                part = slice(start, start + _LARGEST_BLOCK)
                records = np.empty(len(bigrams[part]), _RECORD)
                records["bigram"], records["count"] = bigrams[part], counts[part]
                records.tofile(file)
    return Run(path, head)


def merged_blocks(runs: Sequence[Run], memory: int) -> Iterator[Block]:
    """The bigrams of runs of neighbouring units, and those across their borders, with the sums of their counts.

    Args:
        runs: in the order of their units, `FAN_IN` at most.
        memory: bytes that this may take.
    """
    size = min(_LARGEST_BLOCK, max(_LEAST_BLOCK, memory // (_BYTES_PER_MERGED * max(1, len(runs)))))
    return _merge([run.blocks(size) for run in runs] + [iter([_border_bigrams([run.head for run in runs])])])


def joined_head(heads: Sequence[RunHead]) -> RunHead:
    """The head of runs of neighbouring units, at least one, in their order."""
    joined = heads[0]
    for head in heads[1:]:
        joined = joined.joined(head)
    return joined


def _border_bigrams(heads: Sequence[RunHead]) -> Block:
    """The bigrams of the last token before each border and the first after it."""
    found, before = [], heads[0]
    for head in heads[1:]:
        if before.last >= 0 and head.first >= 0:
            found.append(before.last * head.vocabulary_size + head.first)
        before = before.joined(head)
    return sum_equal(np.sort(np.array(found, np.int64)))


def _merge(sources: Iterable[Iterator[Block]]) -> Iterator[Block]:
    waiting = [(source, *block) for source in sources for block in [next(source, None)] if block is not None]
    waiting = [head for head in waiting if len(head[1])]
    while waiting:
        # No source has anything below this left but what is here.
        limit = min(bigrams[-1] for _, bigrams, _ in waiting)
        taken, left = [], []
        for source, bigrams, counts in waiting:
            end = int(np.searchsorted(bigrams, limit, side="right"))
            taken.append((bigrams[:end], counts[:end]))
            if end < len(bigrams):
                left.append((source, bigrams[end:], counts[end:]))
            elif (block := next(source, None)) is not None:
                left.append((source, *block))
        waiting = left
        bigrams = np.concatenate([part for part, _ in taken])
        counts = np.concatenate([part for _, part in taken])
        del taken
        # Stable, which for runs that are sorted already is a merge.
        order = np.argsort(bigrams, kind="stable")
        yield sum_equal(bigrams[order], counts[order])


def sum_equal(bigrams: np.ndarray, counts: np.ndarray | None = None) -> Block:
    """Put equal neighbours together.

    Args:
        bigrams: int64 `[n]`, ascending.
        counts: int64 `[n]`; None counts each as one.
    """
    is_first = np.ones(len(bigrams), bool)
    np.not_equal(bigrams[1:], bigrams[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    if counts is None:
        return bigrams[starts], np.diff(starts, append=len(bigrams))
    if not len(starts):
        return bigrams, counts
    return bigrams[starts], np.add.reduceat(counts, starts)


class BigramBuffer:
    """Counts the bigrams of one unit. What memory cannot hold is spilled to the disk as sorted runs.

    Args:
        folder: where the run goes.
        unit: the unit's number.
        vocabulary_size: the `V` of the bigrams.
        memory: bytes that this may take.
        watch: called now and then while files are written; what it raises ends the work.
    """

    def __init__(
        self, folder: Path, unit: int, vocabulary_size: int, memory: int, watch: Callable[[], None] = lambda: None
    ):
        self._folder, self._unit, self._size, self._memory, self._watch = folder, unit, vocabulary_size, memory, watch
        self._buffer = np.empty(max(_LEAST_BLOCK, memory // _BYTES_PER_SORTED), np.int64)
        self._used = 0
        self._spills: list[Run] = []
        self._spilled = 0
        self._first, self._last = NOTHING, NOTHING

    def add(self, tokens: np.ndarray) -> None:
        """Take in what follows in the unit.

        Args:
            tokens: int64 `[n]`: token ids, and `BREAK` between what does not follow on one another.
        """
        if not len(tokens):
            return
        if self._first == NOTHING:
            self._first = int(tokens[0])
        else:
            tokens = np.concatenate([[self._last], tokens])
        self._last = int(tokens[-1])
        before, after = tokens[:-1], tokens[1:]
        follows = (before >= 0) & (after >= 0)
        bigrams = before[follows] * self._size + after[follows]
        while len(bigrams):
            room = len(self._buffer) - self._used
            part, bigrams = bigrams[:room], bigrams[room:]
            self._buffer[self._used : self._used + len(part)] = part
            self._used += len(part)
            if self._used == len(self._buffer):
                self._spill()

    def finish(self, tokens: int, documents: int) -> Run:
        """Write the unit's run.

        Args:
            tokens: how many tokens the unit holds.
            documents: how many documents begin in it.
        """
        head = RunHead(self._unit, self._unit + 1, self._first, self._last, tokens, documents, self._size)
        if not self._spills:
            return write_run(self._folder, [self._sorted()], head, watch=self._watch)
        self._spill()
        self._buffer = np.empty(0, np.int64)  # makes room for merging
        while len(self._spills) > FAN_IN:
            self._write_spill(merged_blocks(self._spills[:FAN_IN], self._memory))
            for spill in self._spills[:FAN_IN]:
                spill.path.unlink()
            del self._spills[:FAN_IN]
        return write_run(self._folder, merged_blocks(self._spills, self._memory), head, watch=self._watch)

    def clear(self) -> None:
        """Remove what was spilled."""
        for spill in self._spills:
            spill.path.unlink(missing_ok=True)

    def _sorted(self) -> Block:
        used = self._buffer[: self._used]
        used.sort()
        return sum_equal(used)

    def _spill(self) -> None:
        if self._used:
            self._write_spill([self._sorted()])
            self._used = 0

    def _write_spill(self, blocks: Iterable[Block]) -> None:
        # Its bigrams are within the unit: it has no border to others.
        head = RunHead(self._unit, self._unit + 1, NOTHING, NOTHING, 0, 0, self._size)
        name = f"{self._unit:08d}.{self._spilled:06d}.spill"
        self._spilled += 1
        self._spills.append(write_run(self._folder, blocks, head, name=name, watch=self._watch))
