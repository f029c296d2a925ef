"""Frequency rankings of a tokenizer's vocabulary, from text or from what a target generates.

Sources: FR-Spec (Zhao et al., 2025) ranks tokens by their count in a text corpus; VocabTrim (Goel et al., 2025) finds
that counting what the target itself generates calibrates best.
"""

import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from ..files import replacing, scratch_files
from .text_workers import Job, flat, run_jobs, token_batches
from .texts import FilePart

# Added tokens whose names differ only in a number, such as <unused12>, <|reserved_special_token_3|> or <extra_id_7>,
# are placeholders or codes where there are more of them than this.
_LARGEST_NUMBERED_FAMILY = 16
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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
        with replacing(self._file) as scratch, open(scratch, "wb") as stream:
            np.savez(
                stream,
                counts=self.counts,
                finished=self.finished,
                documents=np.int64(self.documents),
                job=np.array(json.dumps(self._job)),
            )
        self._saved_at = time.monotonic()
        self._is_saved = True

    def delete(self) -> None:
        """Remove the saved state, and its directory if nothing else is in it."""
        if self._file is not None:
            for path in (self._file, *scratch_files(self._file)):
                path.unlink(missing_ok=True)
            if self._file.parent.is_dir() and not any(self._file.parent.iterdir()):
                self._file.parent.rmdir()

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


def vocabulary_size(tokenizer: Any) -> int:
    """One past the largest token id of a tokenizer, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


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


def rank(counts: np.ndarray, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> np.ndarray:
    """Rank all ids of a tokenizer: pinned ids first, then by falling count, equal counts by rising id.

    FR-Spec forces in the end-of-sequence token only; a narrow corpus then drops bytes, and with them everything that
    is spelled out in bytes.

    Args:
        counts: int64 `[V]`.
        tokenizer: whose ids they are.
        eos_token_ids: as in `pinned_ids`.

    Returns:
        int64 `[n]`, each id of the tokenizer once. `n` is `V` where the ids have no gaps.
    """
    pinned = pinned_ids(tokenizer, eos_token_ids)
    known = np.array(sorted(set(tokenizer.get_vocab().values()) - set(pinned)), np.int64)
    # A stable sort of rising ids leaves equal counts in the order of their ids.
    by_count = known[np.argsort(-counts[known], kind="stable")]
    return np.concatenate([np.array(pinned, np.int64), by_count])


def pinned_ids(tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> list[int]:
    """The ids that stand in front of every ranking: EOS, other special and added tokens, then single bytes.

    Large families of numbered tokens (`<unused12>`; some vocabularies have thousands) are left to their counts:
    pinned, they would fill a small shortlist. Each group is in the order of its ids.

    Args:
        tokenizer: a transformers tokenizer.
        eos_token_ids: ids that the model ends on besides the tokenizer's own.
    """
    eos = [*eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    names = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    names |= {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in tokenizer.all_special_ids}
    families = {token_id: re.sub(r"\d+", "#", name) for token_id, name in names.items()}
    members = Counter(family for family in families.values() if "#" in family)
    special = sorted(token_id for token_id in names if members[families[token_id]] <= _LARGEST_NUMBERED_FAMILY)
    return list(dict.fromkeys([*eos, *special, *byte_ids(tokenizer)]))


def byte_ids(tokenizer: Any) -> list[int]:
    """The ids of tokens that are one byte: `<0x0A>` in vocabularies that fall back to bytes, the 256 letters of the
    byte alphabet in byte-level ones. Empty where a tokenizer has neither."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tokenizer.get_vocab()
    fallback = sorted(token_id for piece, token_id in vocabulary.items() if _BYTE_FALLBACK.fullmatch(piece))
    if fallback:
        return fallback
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" not in str(backend.decoder):
        # Single letters such as "é" are letters here, not bytes.
        return []
    letters = ByteLevel.alphabet()
    found = sorted(vocabulary[letter] for letter in letters if letter in vocabulary)
    return found if backend is not None or len(found) == len(letters) else []


def complete_ranking(leading_ids: Sequence[int], tokenizer: Any) -> np.ndarray:
    """Continue a list that is cut off (FR-Spec's are) to a ranking of all ids: the pinned ids that it lacks, then the
    others by rising id, which is the order of merges and so roughly that of frequency.

    Returns:
        int64 `[n]`, each id of the tokenizer once.
    """
    rest = rank(np.zeros(vocabulary_size(tokenizer), np.int64), tokenizer)
    leading = np.array(leading_ids, np.int64)
    return np.concatenate([leading, rest[~np.isin(rest, leading)]])


def coverage(counts: np.ndarray, ranking: np.ndarray, sizes: Iterable[int]) -> dict[int, float]:
    """The share of counted tokens that the first `size` ids of a ranking cover, for each size up to the ranking's."""
    reached = np.cumsum(counts[ranking])
    total = max(1, int(counts.sum()))
    return {size: int(reached[size - 1]) / total for size in sizes if size <= len(ranking)}
