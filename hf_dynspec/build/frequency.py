"""How often tokens occur, in text or in what a target generates.

Sources: FR-Spec (Zhao et al., 2025) ranks tokens by their count in a text corpus; VocabTrim (Goel et al., 2025) finds
that counting what the target itself generates calibrates best.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..files import replacing
from .corpus import Corpus
from .jobs import damaged_work
from .tokens import text_batches, text_encoder

# Between two savings of counts.
SAVE_EVERY_SECONDS = 20.0


class Tally:
    """How often tokens were seen so far in a sequence of texts or prompts. `vocabulary_size` is one past the largest
    token id.

    Args:
        folder: where the counts are kept. If there are some, counting goes on after them. None: only in memory.
    """

    FILE = "counts.npz"

    def __init__(self, vocabulary_size: int, folder: Path | None = None):
        self.counts = np.zeros(vocabulary_size, np.int64)
        # Batches of text, or prompts, that were counted; documents in them; bytes of the corpus that were read for it.
        self.done = self.documents = self.read = 0
        self.file = None if folder is None else folder / self.FILE
        self._saved_at = time.monotonic()
        if self.file is not None and self.file.exists():
            self._load()

    @property
    def tokens(self) -> int:
        """Tokens that were counted."""
        return int(self.counts.sum())

    def add(self, counts: np.ndarray, documents: int, read: int = 0) -> None:
        """Add the counts of the next batch or prompt, int64 `[V]`, and save all if it is time to."""
        self.counts += counts
        self.done += 1
        self.documents += documents
        self.read = read
        if time.monotonic() - self._saved_at >= SAVE_EVERY_SECONDS:
            self.save()

    def save(self) -> None:
        """Write the counts. A kill leaves the old file or the new one."""
        if self.file is not None and self.done:
            state = np.array([self.done, self.documents, self.read])
            with replacing(self.file) as scratch, scratch.open("wb") as stream:
                np.savez(stream, counts=self.counts, state=state)
            self._saved_at = time.monotonic()

    def _load(self) -> None:
        try:
            with np.load(self.file, allow_pickle=False) as saved:
                counts, state = saved["counts"], saved["state"]
            if counts.shape != self.counts.shape or counts.dtype != np.int64:
                raise ValueError("its arrays do not have the sizes of this job")
            self.done, self.documents, self.read = state.tolist()
        except Exception as error:  # numpy's and zipfile's errors for damaged archives have no common class
            raise damaged_work(self.file, error) from error
        self.counts = counts


def count_tokens(
    corpus: Corpus, tokenizer: Any, tally: Tally, report: Callable[[int, int], None] = lambda read, tokens: None
) -> None:
    """Count the tokens of a corpus, without special tokens that the tokenizer would add. The tally is saved even when
    this raises, and batches that it has are skipped. `report` takes bytes that were read and tokens that were
    counted."""
    encode, size = text_encoder(tokenizer), len(tally.counts)
    try:
        for batch in islice(text_batches(corpus.pieces()), tally.done, None):
            token_ids = np.concatenate(encode(piece.text for piece in batch.pieces))
            tally.add(np.bincount(token_ids, minlength=size), batch.documents, batch.pieces[-1].read)
            report(tally.read, tally.tokens)
    finally:
        tally.save()


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
    report: Callable[[int, int], None] = lambda prompts, tokens: None,
) -> None:
    """Count what a target generates on prompts, which VocabTrim finds to be the best calibration. Batch size 1. The
    tally is saved even when this raises, and prompts that it has are skipped.

    Args:
        model: a transformers causal language model. Its own generation settings apply, temperature aside.
        prompts: the turns of each prompt, from `read_prompts`. Later turns follow on the target's own answers.
        max_new_tokens: limit for each turn. A conversation ends early when the model's context is full.
        temperature: 0 decodes greedily.
        seed: for sampling. Each prompt has a seed of its own, so that a run that goes on generates the same.
        use_chat_template: apply the tokenizer's chat template, if it has one. Say False for a base model.
        report: called after each turn with prompts that are done and tokens that were counted.
    """
    import torch

    size = len(tally.counts)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings["temperature"] = temperature
    is_chat = use_chat_template and bool(tokenizer.chat_template)
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        for index, turns in islice(enumerate(prompts), tally.done, None):
            counts = np.zeros(size, np.int64)
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed + index)
                for answer in _converse(model, tokenizer, turns, is_chat, settings):
                    # Rows past the tokenizer's last id are padding of the model's head and no tokens.
                    counts += np.bincount(answer[answer < size], minlength=size)
                    report(index, tally.tokens + int(counts.sum()))
            tally.add(counts, 1)
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
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            context = encoded["input_ids"]
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
