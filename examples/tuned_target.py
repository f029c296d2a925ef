"""A target that somebody has fine-tuned, so that its drafter is stale: what online alignment is for."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel

from hf_dynspec.build.corpus import CorpusError, find_corpus, read_pieces
from hf_dynspec.build.tokens import prefix_ids
from hf_dynspec.files import write_json
from hf_dynspec.loading import load_model

SETTINGS_FILE = "fine_tuning.json"
# Of every so many pieces of text one is kept for prompts.
HELD_OUT_EVERY = 5


@dataclass(frozen=True)
class Texts:
    """Pieces of text as token ids, all of one length.

    Args:
        training: int64 `[n, length]`: what the target is tuned on.
        held_out: int64 `[m, length]`: what prompts are cut from.
    """

    training: torch.Tensor
    held_out: torch.Tensor


def read_texts(paths: Sequence[Path], tokenizer: Any, length: int, seed: int, most: int = 4096) -> Texts:
    """Cut files and directories into pieces, in an order drawn at random, and keep every fifth for prompts. Each piece
    begins as the tokenizer begins texts.

    Args:
        paths: text, JSON lines or Parquet files, and directories of them.
        tokenizer: the target's.
        length: tokens of a piece.
        seed: of the order.
        most: pieces to take; no more text than they need is read.

    Raises:
        CorpusError: a path does not exist, or there are less than `HELD_OUT_EVERY` pieces of text.
    """
    files = list(find_corpus(paths).files)
    random.Random(seed).shuffle(files)
    prefix = prefix_ids(tokenizer)
    room = length - len(prefix)
    pieces: list[list[int]] = []
    for piece in read_pieces(files):
        token_ids = tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, len(token_ids) - room + 1, room)
        pieces += [[*prefix, *token_ids[start : start + room]] for start in starts]
        if len(pieces) >= most:
            break
    if len(pieces) < HELD_OUT_EVERY:
        raise CorpusError(f"{', '.join(map(str, paths))}: less than {HELD_OUT_EVERY} pieces of {length} tokens")
    random.Random(seed).shuffle(pieces)
    held_out = torch.tensor(pieces[::HELD_OUT_EVERY])
    training = torch.tensor([piece for index, piece in enumerate(pieces) if index % HELD_OUT_EVERY])
    return Texts(training, held_out)


def tuned_target(
    source: str, tokenizer: Any, texts: Texts, folder: Path, steps: int, batch: int, rate: float, seed: int
) -> PreTrainedModel:
    """The target after some steps on the texts; the one that lies in the folder, if it was made with these settings.

    Args:
        source: folder or Hub id of the target.
        tokenizer: the target's, which is kept with the tuned one.
        texts: what it is tuned on.
        folder: where the tuned one is kept.
        steps: optimizer steps.
        batch: pieces of text in each.
        rate: AdamW's learning rate, after a tenth of the steps.
        seed: of the order of the pieces.
    """
    digest = hashlib.sha256(texts.training.numpy().tobytes()).hexdigest()
    settings = {
        "target": source, "texts": digest, "steps": steps, "batch": batch, "learning_rate": rate, "seed": seed
    }  # fmt: skip
    written = folder / SETTINGS_FILE
    if written.exists() and json.loads(written.read_text(encoding="utf-8")) == settings:
        return load_model(folder, dtype=torch.float32, device="cpu", role="tuned target")
    target = load_model(source, dtype=torch.float32, device="cpu", role="target")
    _tune(target, texts.training, steps, batch, rate, seed)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(written, settings)
    return target


def _tune(target: PreTrainedModel, pieces: torch.Tensor, steps: int, batch: int, rate: float, seed: int) -> None:
    optimizer = torch.optim.AdamW(target.parameters(), lr=rate, weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    target.train()
    for step in track(range(steps), description="Fine-tuning the target"):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / max(1, steps // 10))
        token_ids = pieces[torch.randint(pieces.shape[0], (batch,), generator=order)]
        loss = target(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    target.eval().requires_grad_(False)
