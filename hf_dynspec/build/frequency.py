"""How often tokens occur, in text or in what a target generates.

Sources: FR-Spec (Zhao et al., 2025) ranks tokens by their count in a text corpus; VocabTrim (Goel et al., 2025) finds
that counting what the target itself generates calibrates best.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from ..files import replacing, scratch_files
from .text_workers import Job, flat, run_jobs, token_batches
from .texts import FilePart


@dataclass(frozen=True)
class UnitCounts:
    """What was counted in one unit of work.

    Args:
        token_ids: int64 `[n]`, unique.
        counts: int64 `[n]`, how often each was seen.
        documents: documents that begin in the unit.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    documents: int


class Tally:
    """Counts of the finished units of one job. Kept on disk, so that a killed run goes on where it was.

    Args:
        vocabulary_size: one past the largest token id.
        units: how many units the job has.
        job: JSON values that say what is counted. A saved tally of another job is not continued.
        directory: where the tally is kept; None keeps it in memory only.
        save_every: seconds between two savings. 0 saves after each unit.
        fresh: drop what is saved in `directory` instead of continuing it.

    Attributes:
        counts: int64 `[V]`.
        finished: bool `[units]`.
        documents: documents counted so far.

    Raises:
        ConfigurationError: `directory` holds the counts of another job, or a damaged file.
    """

    FILE = "counts.npz"

    def __init__(
        self,
        vocabulary_size: int,
        units: int,
        job: dict[str, Any],
        directory: str | Path | None = None,
        *,
        save_every: float = 20.0,
        fresh: bool = False,
    ):
        self.counts = np.zeros(vocabulary_size, np.int64)
        self.finished = np.zeros(units, bool)
        self.documents = 0
        self._job = job
        self._file = None if directory is None else Path(directory, self.FILE)
        self._save_every = save_every
        self._saved_at = time.monotonic()
        self._is_saved = True
        if fresh:
            self.delete()
        if self._file is not None and self._file.exists():
            self._load()

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return int(self.counts.sum())

    def unfinished(self) -> list[int]:
        """The units that are left to do, in ascending order."""
        return np.flatnonzero(~self.finished).tolist()

    def add(self, index: int, unit: UnitCounts) -> None:
        """Add the counts of a finished unit, and save if it is time to."""
        self.counts[unit.token_ids] += unit.counts
        self.finished[index] = True
        self.documents += unit.documents
        self._is_saved = False
        if time.monotonic() - self._saved_at >= self._save_every:
            self.save()

    def save(self) -> None:
        """Write the counts. The file is replaced in one step, so that a kill leaves the old state or the new one."""
        if self._file is None or self._is_saved:
            return
        try:
            self._write()
        except OSError:  # such as of a full disk
            self._remove_empty_folder()
            raise
        self._saved_at = time.monotonic()
        self._is_saved = True

    def delete(self) -> None:
        """Remove the saved state, and its directory if nothing else is in it."""
        if self._file is not None:
            for path in (self._file, *scratch_files(self._file)):
                path.unlink(missing_ok=True)
            self._remove_empty_folder()

    def _write(self) -> None:
        with replacing(self._file) as scratch, open(scratch, "wb") as stream:
            np.savez(
                stream,
                counts=self.counts,
                finished=self.finished,
                documents=np.int64(self.documents),
                job=np.array(json.dumps(self._job)),
            )

    def _remove_empty_folder(self) -> None:
        folder = self._file.parent
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def _load(self) -> None:
        try:
            with np.load(self._file, allow_pickle=False) as saved:
                job = json.loads(str(saved["job"]))
                changed = [key for key in self._job if job.get(key) != self._job[key]]
                state = {} if changed else {key: saved[key] for key in ("counts", "finished", "documents")}
            if not changed and not self._fits(state):
                raise ValueError("its arrays do not have the sizes of this job")
        except Exception as error:  # whatever a damaged archive makes numpy and zipfile raise
            raise damaged_counts(self._file, error) from error
        if changed:
            raise another_job(self._file, changed)
        self.counts, self.finished, self.documents = state["counts"], state["finished"], int(state["documents"])

    def _fits(self, state: dict[str, np.ndarray]) -> bool:
        return all(
            state[key].shape == mine.shape and state[key].dtype == mine.dtype
            for key, mine in (("counts", self.counts), ("finished", self.finished))
        )


def another_job(file: Path, changed: Iterable[str]) -> ConfigurationError:
    """The error that counts on the disk are not of this job: what differs, and what to do."""
    return ConfigurationError(
        f"{file}: holds unfinished counts of another job (changed: {', '.join(changed)}). Run with the same inputs "
        "and settings to continue it, choose another directory, or pass --overwrite to drop it."
    )


def damaged_counts(file: Path, problem: object) -> ConfigurationError:
    """The error that counts on the disk cannot be used, and what to do."""
    return ConfigurationError(
        f"{file}: the saved counts are damaged ({problem}). Pass --overwrite to count from the beginning."
    )


def count_tokens(
    tokenizer: Any,
    units: Sequence[tuple[FilePart, ...]],
    tally: Tally,
    *,
    text_field: str = "text",
    processes: int = 2,
    report: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Count the tokens of all unfinished units into `tally`, without special tokens of the tokenizer's own adding.

    The counts depend on neither the number of processes nor on how often the job was interrupted. The processes are
    spawned, so a script that calls this needs the `if __name__ == "__main__":` guard.

    Args:
        tokenizer: a transformers tokenizer; each process gets a copy once.
        units: from `plan_corpus`.
        tally: takes the counts, and is saved even when this raises.
        text_field: as in `plan_corpus`.
        processes: how many units are counted at the same time.
        report: called a few times a second with the number of tokens counted so far, unfinished units included.

    Raises:
        CorpusError: a unit cannot be read.
        DynSpecError: a process died.
    """
    before = tally.tokens
    jobs: deque[Job] = deque((_count_unit, (index, units[index], len(tally.counts))) for index in tally.unfinished())
    try:
        run_jobs(
            jobs,
            lambda job, counts: tally.add(job[1][0], counts),
            tokenizer=tokenizer,
            text_field=text_field,
            processes=processes,
            report=lambda tokens: report(before + tokens),
        )
    finally:
        tally.save()


def _count_unit(index: int, unit: tuple[FilePart, ...], size: int) -> UnitCounts:
    """Runs in a process. The index is the parent's."""
    counts = np.zeros(size, np.int64)
    documents = 0
    for pieces, token_ids in token_batches(unit):
        counts += np.bincount(flat(token_ids), minlength=size)
        documents += sum(piece.begins_document for piece in pieces)
    seen = np.flatnonzero(counts)
    return UnitCounts(seen, counts[seen], documents)


def count_generated(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[tuple[str, ...]],
    tally: Tally,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    use_chat_template: bool = True,
    report: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Count what a target generates on prompts, which VocabTrim finds to be the best calibration. Batch size 1.

    Args:
        model: a transformers causal language model; its own generation settings apply, temperature aside.
        tokenizer: its tokenizer.
        prompts: the turns of each prompt, from `prompts.read_prompts`. Later turns follow on the target's own answers.
        tally: one unit for each prompt; takes the counts, and is saved even when this raises.
        max_new_tokens: limit for each turn. A conversation ends early where the model's context is full.
        temperature: 0 decodes greedily.
        seed: for sampling. Each prompt has a seed of its own, so that a continued run generates the same.
        use_chat_template: apply the tokenizer's chat template where it has one. Say False for a base model.
        report: called after each turn with the number of tokens counted so far.
    """
    import torch

    size = len(tally.counts)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings["temperature"] = temperature
    is_chat = use_chat_template and bool(tokenizer.chat_template)
    todo = set(tally.unfinished())
    devices = [model.device] if model.device.type == "cuda" else []
    tokens = tally.tokens
    try:
        for index, turns in enumerate(prompts):
            if index not in todo:
                continue
            counts = np.zeros(size, np.int64)
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed + index)
                for answer in _converse(model, tokenizer, turns, is_chat, settings):
                    # Rows past the tokenizer's last id are padding of the model's head; they are not tokens.
                    counts += np.bincount(answer[answer < size], minlength=size)
                    report(tokens + int(counts.sum()))
            seen = np.flatnonzero(counts)
            tally.add(index, UnitCounts(seen, counts[seen], 1))
            tokens += int(counts.sum())
    finally:
        tally.save()


def _converse(
    model: Any, tokenizer: Any, turns: tuple[str, ...], is_chat: bool, settings: dict[str, Any]
) -> Iterator[np.ndarray]:
    """Generate the answer to each turn: int64 `[n]`, the end-of-sequence token included."""
    import torch

    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    messages, context = [], []
    for turn in turns:
        if is_chat:
            messages.append({"role": "user", "content": turn})
            context = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        else:
            context = context + tokenizer(turn, add_special_tokens=not context, verbose=False)["input_ids"]
        room = settings["max_new_tokens"] if limit is None else min(settings["max_new_tokens"], limit - len(context))
        if room < 1 or not context:
            return
        input_ids = torch.tensor([context], device=model.device)
        output = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), **{**settings, "max_new_tokens": room}
        )
        answer = output[0, len(context) :].cpu().numpy()
        yield answer
        # An end-of-sequence token ends an answer, not the conversation.
        kept = answer[:-1] if len(answer) < room else answer
        context = context + kept.tolist()
        messages.append({"role": "assistant", "content": tokenizer.decode(kept, skip_special_tokens=True)})
