"""Texts for tests of counting, and a tokenizer that was trained on such."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "speculative decoding drafts tokens Größe naïve 東京 🙂 return x 1024 ( )".split()


def make_documents(count: int, words: int = 40, seed: int = 0) -> list[str]:
    """Documents of several lines. Line breaks follow no white space, so that a text has the same tokens whether it is
    cut at them or not."""
    draw = np.random.default_rng(seed)
    share = np.arange(1, len(WORDS) + 1) ** -1.0
    return [
        "\n".join(" ".join(draw.choice(WORDS, 8, p=share / share.sum())) for _ in range(words // 8))
        for _ in range(count)
    ]


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer with about 400 ids, among them an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=400, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(make_documents(60), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.add_tokens(["<tool>"])
    wrapped.save_pretrained(folder)
    return folder


def write_texts(folder: Path, documents: list[str]) -> list[str]:
    """Write half of the documents to one plain text file, half to JSON lines; return the texts that this makes."""
    folder.mkdir(exist_ok=True)
    half = len(documents) // 2
    (folder / "a.txt").write_text("\n".join(documents[:half]), encoding="utf-8")
    rows = [json.dumps({"text": document}, ensure_ascii=False) for document in documents[half:]]
    (folder / "b.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return ["\n".join(documents[:half]), *documents[half:]]
