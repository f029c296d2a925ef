"""Texts that the target writes itself, after the beginnings of windows: what a drafter meets when it drafts."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from ..files import replacing
from .jobs import damaged_work
from .windows import Windows

# Temperatures at which texts are written.
_COLDEST, _HOTTEST = 0.7, 1.0
# The share of a window that the target goes on from.
_BEGINNING = 4


class SelfWriter:
    """Writes texts batch by batch into a folder. Batches that are there are kept.

    Args:
        target: the model that writes.
        windows: the texts that it goes on from.
        indices: the windows that may be used, in this order.
        length: tokens of a text, its beginning included.
        folder: keeps the batches.
        size: texts of a batch.
        seed: with a batch's number, the seed of its temperature and draws.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        windows: Windows,
        indices: Sequence[int],
        length: int,
        folder: Path,
        size: int,
        seed: int,
    ):
        lengths = np.diff(windows.ends, prepend=0)[list(indices)]
        # One length, so that a batch needs no padding. Texts may be shorter than windows.
        self._beginning = max(2, min(length // _BEGINNING, int(np.median(lengths)) // 2))
        usable = [index for index, own in zip(indices, lengths, strict=True) if own >= self._beginning]
        self.batches = [usable[start : start + size] for start in range(0, len(usable), size)]
        self._target, self._windows, self._length = target, windows, length
        self._folder, self._seed = folder, seed

    def path(self, number: int) -> Path:
        """The file of one batch."""
        return self._folder / f"written-{number:05d}.npz"

    def read(self, number: int) -> tuple[list[torch.Tensor], float]:
        """The texts of a batch that is there, int64 `[n]` each, and the seconds that it took."""
        try:
            with np.load(self.path(number), allow_pickle=False) as saved:
                ends = np.cumsum(saved["lengths"])[:-1]
                texts = [torch.from_numpy(one.astype(np.int64)) for one in np.split(saved["token_ids"], ends)]
                return texts, float(saved["seconds"])
        except (OSError, ValueError, KeyError) as error:
            raise damaged_work(self.path(number), error) from error

    def written(self) -> list[torch.Tensor]:
        """All texts that are there."""
        there = [number for number in range(len(self.batches)) if self.path(number).exists()]
        return [text for number in there for text in self.read(number)[0]]

    def seconds(self) -> float:
        """How long all batches took that are there."""
        return sum(self.read(number)[1] for number in range(len(self.batches)) if self.path(number).exists())

    def write(self, numbers: Sequence[int], goes_on: Callable[[int], bool]) -> None:
        """Write some batches, as long as a function of the number that is next allows."""
        for number in numbers:
            if self.path(number).exists():
                continue
            if not goes_on(number):
                break
            started = time.monotonic()
            texts = self._texts(number)
            saved = {"token_ids": np.concatenate(texts), "lengths": np.array([len(text) for text in texts])}
            with replacing(self.path(number)) as scratch, scratch.open("wb") as stream:
                np.savez(stream, seconds=np.array(time.monotonic() - started), **saved)

    @torch.no_grad()
    def _texts(self, number: int) -> list[np.ndarray]:
        """int32 `[n]` each: beginnings with their continuations up to the end of a text."""
        target, seed = self._target, self._seed * 1_000_003 + number
        draw = torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
        beginnings = torch.stack([self._windows[index][: self._beginning] for index in self.batches[number]])
        beginnings = beginnings.to(target.device)
        eos = target.generation_config.eos_token_id
        ends = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
        config = GenerationConfig(
            do_sample=True,
            temperature=_COLDEST + draw * (_HOTTEST - _COLDEST),
            max_new_tokens=self._length - self._beginning,
            eos_token_id=eos,
            pad_token_id=ends[0] if ends else 0,
            **{"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
        )
        arguments: dict[str, Any] = {"attention_mask": torch.ones_like(beginnings), "generation_config": config}
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            texts = target.generate(beginnings, **arguments).cpu().numpy().astype(np.int32)
        return [_up_to_end(text, self._beginning, ends) for text in texts]


def _up_to_end(text: np.ndarray, beginning: int, ends: list[int]) -> np.ndarray:
    """The text with its first end token, without the padding after it."""
    found = np.isin(text[beginning:], ends).nonzero()[0]
    return text[: beginning + found[0] + 1] if len(found) else text
