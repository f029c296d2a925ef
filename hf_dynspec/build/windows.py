"""Windows of a corpus, along which draft steps are recorded: a sample, taken while the texts are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import counted
from ..files import replacing
from .corpus import Corpus, CorpusError
from .recording import SHORTEST_WINDOW, RecordingSettings
from .tokens import prefix_ids, text_batches, text_encoder


@dataclass(frozen=True, eq=False)
class Windows:
    """A sample of the windows of a corpus, in random order, and how often each token occurs in the corpus."""

    token_ids: np.ndarray  # int32 `[n]`: the windows, one after another
    ends: np.ndarray  # int64 `[w]`: one past the last token of each
    counts: np.ndarray  # int64 `[V]`: of all texts, sampled or not

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
    corpus: Corpus,
    tokenizer: Any,
    vocabulary_size: int,
    settings: RecordingSettings,
    report: Callable[[int, int], None] = lambda read, total: None,
) -> Windows:
    """Cut texts into windows and keep a uniform sample (reservoir sampling) with enough steps for the settings. Each
    begins with the ids that the tokenizer puts before a text, which are not counted. `report` takes bytes that were
    read and bytes that there are.

    Raises:
        CorpusError: a file cannot be read, or the texts do not give two windows.
    """
    encode, random = text_encoder(tokenizer), np.random.default_rng(settings.seed)
    # Enough even if all windows are as short as can be.
    most = (settings.steps + settings.held_out) // (SHORTEST_WINDOW - 1) + 2
    kept: list[np.ndarray] = []
    counts = np.zeros(vocabulary_size, np.int64)
    seen = 0
    for batch in text_batches(corpus.pieces()):
        for token_ids in encode(piece.text for piece in batch.pieces):
            counts += np.bincount(token_ids, minlength=vocabulary_size)
            for start in range(0, len(token_ids), settings.window):
                # A copy, which does not keep the whole text.
                window = token_ids[start : start + settings.window].astype(np.int32)
                if len(window) < SHORTEST_WINDOW:
                    continue
                place = seen if len(kept) < most else int(random.integers(0, seen + 1))
                seen += 1
                if place < len(kept):
                    kept[place] = window
                elif place < most:
                    kept.append(window)
        report(batch.pieces[-1].read, corpus.size)
    if len(kept) < 2:
        raise CorpusError(
            f"the texts give {counted(len(kept), 'window')} of {SHORTEST_WINDOW} tokens or more; two are needed. "
            "Give more data."
        )
    order = random.permutation(len(kept))
    enough = np.cumsum([len(kept[index]) - 1 for index in order])
    order = order[: np.searchsorted(enough, settings.steps + settings.held_out + 2 * settings.window) + 1]
    prefix = np.array(prefix_ids(tokenizer), np.int32)
    begun = [np.concatenate([prefix, kept[index]]) for index in order]
    return Windows(np.concatenate(begun), np.cumsum([len(window) for window in begun]), counts)


def kept_windows(file: Path, sample: Callable[[], Windows]) -> Windows:
    """The windows of a file. If there is none, they are sampled and written there."""
    if file.exists():
        with np.load(file, allow_pickle=False) as saved:
            return Windows(saved["token_ids"], saved["ends"], saved["counts"])
    windows = sample()
    with replacing(file) as scratch, scratch.open("wb") as stream:
        np.savez(stream, **vars(windows))
    return windows
