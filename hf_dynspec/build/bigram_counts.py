"""Bigrams of a corpus, counted in processes into sorted runs on the disk (`bigram_runs`): neither the corpus nor its
bigrams need fit into memory."""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from ..files import write_json
from .bigram_runs import (
    BREAK,
    BYTES_PER_BIGRAM,
    FAN_IN,
    BigramBuffer,
    Run,
    joined_head,
    merged_blocks,
    open_run,
    write_run,
)
from .frequency import another_job, damaged_counts
from .text_workers import Job, flat, run_jobs, stop_if_asked, token_batches
from .texts import FilePart, Piece

# Of mixed text in several languages and vocabularies of 150,000 tokens; others have fewer different bigrams.
_BYTES_PER_TOKEN, _HEAPS_FACTOR, _HEAPS_EXPONENT = 4, 13, 0.75


class BigramCounts:
    """The runs of one job in a folder, where a killed run goes on.

    Args:
        folder: where they are kept.
        units: how many units the job has.
        job: JSON values that say what is counted. Saved counts of another job are not continued.
        fresh: drop what is saved instead of continuing it.
        is_main: of several processes that share the folder the one that prepares it, before the others look at it.

    Attributes:
        finished: bool `[units]`.

    Raises:
        ConfigurationError: the folder holds the counts of another job, or damaged ones.
    """

    JOB = "job.json"

    def __init__(
        self, folder: str | Path, units: int, job: dict[str, Any], *, fresh: bool = False, is_main: bool = True
    ):
        self.folder = Path(folder)
        self.finished = np.zeros(units, bool)
        self._job = job
        self._runs: dict[int, Run] = {}
        if fresh and is_main:
            self.delete()
        self._require_own_job(is_main)
        if is_main:
            # What a killed run left half-written.
            for pattern in ("*.writing", "*.spill"):
                for path in self.folder.glob(pattern):
                    path.unlink()
        self.refresh()

    def _require_own_job(self, is_main: bool) -> None:
        file = self.folder / self.JOB
        if is_main and not file.exists():
            write_json(file, self._job)
        try:
            saved = json.loads(file.read_bytes())
            changed = [key for key in self._job if saved.get(key) != self._job[key]]
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{self.folder} is not the folder that the first process prepared: machines that work together need a "
                "folder that all of them see"
            ) from error
        except (ValueError, AttributeError) as error:
            raise damaged_counts(file, error) from error
        if changed:
            raise another_job(file, changed)

    def refresh(self) -> None:
        """Look at what is on the disk, where other processes may have worked too."""
        self._runs = {}
        found = []
        for path in self.folder.glob("*.bigrams"):
            try:
                found.append(open_run(path))
            except ValueError as error:
                raise damaged_counts(path, error) from error
        self.finished[:] = False
        for run in sorted(found, key=lambda one: (one.head.start, -one.head.end)):
            overlap = self.finished[run.head.start : run.head.end]
            if len(overlap) != run.head.end - run.head.start or (overlap.any() and not overlap.all()):
                raise damaged_counts(run.path, "its units are not those of this job")
            # A run whose units are in another one was merged into it when the process was killed.
            if overlap.all():
                run.path.unlink(missing_ok=True)
            else:
                self.add(run)

    def add(self, run: Run) -> None:
        """Take in a run that was put into the folder, in place of those that were merged into it."""
        self._runs = {start: one for start, one in self._runs.items() if not run.head.start <= start < run.head.end}
        self._runs[run.head.start] = run
        self.finished[run.head.start : run.head.end] = True

    def runs(self) -> list[Run]:
        """All runs, in the order of their units."""
        return [self._runs[start] for start in sorted(self._runs)]

    def siblings(self, run: Run) -> list[Run]:
        """The runs beside one that are merged with it while others are still counted, itself included: those of its
        width, `FAN_IN` when all of them are there."""
        width = run.head.end - run.head.start
        start = run.head.start // (width * FAN_IN) * (width * FAN_IN)
        found = [self._runs.get(start + index * width) for index in range(FAN_IN)]
        return [one for one in found if one is not None and one.head.end - one.head.start == width]

    def unfinished(self) -> list[int]:
        """The units that are left to do, in ascending order."""
        return np.flatnonzero(~self.finished).tolist()

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return sum(run.head.tokens for run in self._runs.values())

    @property
    def documents(self) -> int:
        """Documents counted so far."""
        return sum(run.head.documents for run in self._runs.values())

    def delete(self) -> None:
        """Remove what is saved, and the folder if nothing else is in it."""
        for pattern in ("*.bigrams", "*.spill", "*.writing", self.JOB):
            for path in self.folder.glob(pattern):
                path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def special_ids(tokenizer: Any) -> list[int]:
    """The ids of special tokens, which take no part in the graph: a text ends where one stands. They mark where
    documents and turns begin and end, and every shortlist holds those that matter anyway. Added tokens that are not
    special, such as `<tool_call>`, are tokens like any other."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))


def count_bigrams(
    tokenizer: Any,
    units: Sequence[tuple[FilePart, ...]],
    counts: BigramCounts,
    *,
    vocabulary_size: int,
    text_field: str = "text",
    processes: int = 2,
    memory: int = 1 << 30,
    share: tuple[int, int] = (0, 1),
    report: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Count the bigrams of unfinished units.

    A bigram is two tokens that follow on one another in a text. A text is a plain text file, however many units it is
    cut into, a document, or one turn of a conversation. It is tokenized in the pieces of `read_pieces`, without
    special tokens of the tokenizer's own adding.

    The counts depend on neither the number of processes or machines, nor on memory, nor on how often the job was
    interrupted. The processes are spawned, so a script that calls this needs the `if __name__ == "__main__":` guard.

    Args:
        tokenizer: a transformers tokenizer; each process gets a copy once.
        units: from `plan_corpus`.
        counts: takes the runs.
        vocabulary_size: one past the largest id; tokens with other ids take no part.
        text_field: as in `plan_corpus`.
        processes: how many units are counted at the same time.
        memory: bytes that the bigrams which all processes hold at once may take.
        share: where several processes share the folder, the number of this one and how many there are.
        report: called a few times a second with the number of tokens counted so far, unfinished units included.

    Returns:
        Bytes that the processes took at most, all together; 0 where the system does not tell.

    Raises:
        CorpusError: a unit cannot be read.
        DynSpecError: a process died.
    """
    before = counts.tokens
    each = memory // processes
    setting = (str(counts.folder), vocabulary_size, special_ids(tokenizer), each)
    mine = [index for index in counts.unfinished() if is_in_share(index, share)]
    jobs: deque[Job] = deque((_count_unit, (index, units[index], *setting)) for index in mine)
    peaks: dict[int, int] = {}

    def take(job: Job, result: tuple[Run, int, int]) -> None:
        run, process, peaks[process] = result
        counts.add(run)
        siblings = counts.siblings(run)
        if len(siblings) == FAN_IN:
            jobs.appendleft((_merge_runs, (siblings, each)))

    run_jobs(
        jobs,
        take,
        tokenizer=tokenizer,
        text_field=text_field,
        processes=processes,
        report=lambda tokens: report(before + tokens),
    )
    return sum(peaks.values())


def expected_bytes(text_bytes: int) -> float:
    """About how many bytes on the disk the counts of so much text take while they are merged: the number of different
    bigrams grows with a power of that of all (Heaps' law)."""
    tokens = text_bytes / _BYTES_PER_TOKEN
    return 2 * BYTES_PER_BIGRAM * _HEAPS_FACTOR * tokens**_HEAPS_EXPONENT


def is_in_share(unit: int, share: tuple[int, int]) -> bool:
    """Whether a unit is one that the process counts which has this `share` (see `count_bigrams`). Neighbours, whose
    runs are merged, are counted by the same process."""
    return unit // FAN_IN % share[1] == share[0]


def merge_counts(
    counts: BigramCounts,
    *,
    processes: int = 2,
    memory: int = 1 << 30,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Merge the runs of a job that is counted until they can be read all at once. Goes on where it was killed.

    Args:
        counts: all of whose units are finished.
        processes: how many merge at the same time.
        memory: bytes that all processes may take.
        report: called with how many of how many groups of runs are merged.

    Raises:
        DynSpecError: a process died.
    """
    while len(runs := counts.runs()) > FAN_IN:
        groups = [runs[start : start + FAN_IN] for start in range(0, len(runs), FAN_IN)]
        _merge_groups(counts, [group for group in groups if len(group) > 1], processes, memory, report)


def _merge_groups(
    counts: BigramCounts,
    groups: list[list[Run]],
    processes: int,
    memory: int,
    report: Callable[[int, int], None],
) -> None:
    merged = 0

    def take(job: Job, result: tuple[Run, int, int]) -> None:
        nonlocal merged
        counts.add(result[0])
        merged += 1

    jobs: deque[Job] = deque((_merge_runs, (group, memory // processes)) for group in groups)
    run_jobs(jobs, take, tokenizer=None, processes=processes, report=lambda _: report(merged, len(groups)))


# In a process --------------------------------------------------------------------------------------------------------


def _count_unit(
    index: int, unit: tuple[FilePart, ...], folder: str, vocabulary_size: int, excluded: list[int], memory: int
) -> tuple[Run, int, int]:
    """Count a unit; return its run, this process, and the bytes that it took at most."""
    takes_part = np.ones(vocabulary_size + 1, bool)  # the last one stands for all ids past the vocabulary
    takes_part[[*excluded, vocabulary_size]] = False
    buffer = BigramBuffer(Path(folder), index, vocabulary_size, memory, stop_if_asked)
    tokens = documents = 0
    try:
        for pieces, token_ids in token_batches(unit):
            tokens += sum(map(len, token_ids))
            documents += sum(piece.begins_document for piece in pieces)
            buffer.add(_with_breaks(pieces, token_ids, takes_part))
        return buffer.finish(tokens, documents), os.getpid(), peak_memory()
    finally:
        buffer.clear()


def _with_breaks(pieces: Sequence[Piece], token_ids: list[list[int]], takes_part: np.ndarray) -> np.ndarray:
    """int64 `[n]`: the tokens of pieces in order, a break before each text and in place of what takes no part."""
    tokens = flat(token_ids)
    tokens[~takes_part[np.minimum(tokens, len(takes_part) - 1)]] = BREAK
    ends = np.cumsum(np.fromiter(map(len, token_ids), np.int64))
    begins = np.fromiter((piece.begins_text for piece in pieces), bool)
    return np.insert(tokens, np.concatenate([[0], ends[:-1]])[begins], BREAK)


def _merge_runs(runs: list[Run], memory: int) -> tuple[Run, int, int]:
    """Put one run in the place of several; return it, this process, and the bytes that it took at most."""
    head = joined_head([run.head for run in runs])
    merged = write_run(runs[0].path.parent, merged_blocks(runs, memory), head, watch=stop_if_asked)
    for run in runs:
        run.path.unlink()
    return merged, os.getpid(), peak_memory()


def peak_memory() -> int:
    """Bytes that this process took at most so far; 0 where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
