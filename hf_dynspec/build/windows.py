"""Windows of a corpus, along which draft steps are recorded: a sample, taken while the texts are read."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ConfigurationError, counted
from ..files import replacing
from .recording import SHORTEST_WINDOW, RecordingSettings
from .texts import CorpusError, FilePart, read_unit

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, eq=False)
class Windows:
    """A sample of the windows of a corpus, in random order, and how often each token occurs in the corpus.

    Args:
        token_ids: int32 `[n]`: the windows, one after another.
        ends: int64 `[w]`: one past the last token of each.
        counts: int64 `[V]`: of all texts, also of what was not sampled.
    """

    token_ids: np.ndarray
    ends: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> torch.Tensor:
        """int64 `[n]`: the tokens of one window."""
        start = 0 if index == 0 else self.ends[index - 1]
        return torch.from_numpy(self.token_ids[start : self.ends[index]].astype(np.int64))

    def covering(self, steps: int, first: int = 0) -> int:
        """The end of the fewest windows from `first` on that have so many steps, or of all."""
        lengths = np.diff(self.ends, prepend=0)[first:] - 1
        return min(len(self), first + int(np.searchsorted(lengths.cumsum(), steps)) + 1)


def sample_windows(
    units: Sequence[tuple[FilePart, ...]],
    tokenizer: Any,
    vocabulary_size: int,
    settings: RecordingSettings,
    *,
    text_field: str = "text",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Windows:
    """Cut texts into windows and keep a uniform sample (reservoir sampling) with enough steps.

    Args:
        units: from `plan_corpus`.
        tokenizer: of both models.
        vocabulary_size: `V`.
        settings: what is going to be recorded.
        text_field: as in `plan_corpus`.
        report: called before each unit with how many are done and how many there are.

    Raises:
        CorpusError: a unit cannot be read, or no text is long enough for a window.
    """
    random = np.random.default_rng(settings.seed)
    most = (settings.steps + settings.held_out) // (SHORTEST_WINDOW - 1) + 2
    # Enough even if all windows were as short as can be; this many, and one text, are what is held.
    kept: list[np.ndarray] = []
    counts = np.zeros(vocabulary_size, np.int64)
    seen = 0
    for done, unit in enumerate(units):
        report(done, len(units))
        for token_ids in _tokenized(unit, tokenizer, text_field):
            counts += np.bincount(token_ids, minlength=vocabulary_size)
            for start in range(0, len(token_ids), settings.window):
                # A copy, which does not keep the whole text.
                window = token_ids[start : start + settings.window].copy()
                if len(window) < SHORTEST_WINDOW:
                    continue
                place = seen if len(kept) < most else int(random.integers(0, seen + 1))
                seen += 1
                if place < len(kept):
                    kept[place] = window
                elif place < most:
                    kept.append(window)
    report(len(units), len(units))
    if len(kept) < 2:
        raise CorpusError(
            f"the texts give {counted(len(kept), 'window')} of {SHORTEST_WINDOW} tokens or more; two are needed. "
            "Give more data."
        )
    order = random.permutation(len(kept))
    enough = np.cumsum([len(kept[index]) - 1 for index in order])
    order = order[: np.searchsorted(enough, settings.steps + settings.held_out + 2 * settings.window) + 1]
    lengths = [len(kept[index]) for index in order]
    return Windows(np.concatenate([kept[index] for index in order]), np.cumsum(lengths), counts)


def windows_of(file: Path, job: dict[str, Any], sample: Callable[[], Windows]) -> Windows:
    """The windows of a job, sampled now or when the job was begun.

    Args:
        file: where they are kept, in the folder of the steps that are recorded from them.
        job: JSON values that decide what is recorded. A folder of another job is not continued.
        sample: makes the windows.

    Raises:
        ConfigurationError: the folder holds another job.
    """
    described = json.dumps(job, sort_keys=True)
    if file.exists():
        with np.load(file, allow_pickle=False) as saved:
            if str(saved["job"]) != described:
                raise ConfigurationError(
                    f"{file.parent} holds draft steps that were recorded with other models, texts or settings. Run "
                    "with the same ones to continue, choose another folder, or remove it."
                )
            return Windows(saved["token_ids"], saved["ends"], saved["counts"])
    windows = sample()
    arrays = {"token_ids": windows.token_ids, "ends": windows.ends, "counts": windows.counts}
    with replacing(file) as scratch, open(scratch, "wb") as stream:
        np.savez(stream, **arrays, job=np.array(described))
    return windows


def _tokenized(unit: Sequence[FilePart], tokenizer: Any, text_field: str) -> Iterator[np.ndarray]:
    """int32 `[n]`: the tokens of each text of a unit; long texts come in several pieces."""
    texts: list[str] = []
    characters = 0
    for piece, _ in read_unit(unit, text_field):
        texts.append(piece)
        characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield from _tokenize(texts, tokenizer)
            texts, characters = [], 0
    if texts:
        yield from _tokenize(texts, tokenizer)


def _tokenize(texts: list[str], tokenizer: Any) -> Iterator[np.ndarray]:
    for token_ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield np.array(token_ids, np.int32)
