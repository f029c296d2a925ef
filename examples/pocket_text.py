"""The text that the pocket models are trained on: the standard library's source, its tokenizer, and windows of it."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCABULARY_SIZE = 98_304
END_OF_TEXT = "<|endoftext|>"
# In bytes: a long identifier. Longer ones would occur in one file alone.
LONGEST_TOKEN = 24

# Packages that hf_dynspec needs anyway. Their source widens the vocabulary and is not trained on, so that most entries
# are rare or never seen in the training text, as with the large vocabularies of real models.
VOCABULARY_PACKAGES = ("torch", "transformers", "sympy", "numpy", "networkx")

# Character tables, bundled tools, help topics and deliberately broken files teach a code model nothing.
SKIPPED_FOLDERS = {
    "site-packages",
    "__pycache__",
    "cjkencodings",
    "distutils",
    "encoded_modules",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "tokenizedata",
    "turtledemo",
}
TEST_FOLDERS = {"test", "tests"}

# Single digits, line breaks with the indentation after them, names with the sign or space before them, other signs,
# and other white space. Digits stay apart so that numeric tables in the source do not fill the vocabulary.
WORD_PATTERN = r"\p{N}|\s*\n\s*|[^\n\p{L}\p{N}_]?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s+"


@dataclass(frozen=True)
class Sources:
    """Source files, each as its whole text: the library proper and its test suite, apart."""

    library: list[str]
    tests: list[str]


def is_held_out(relative_path: str, seed: int, share: float = 0.04) -> bool:
    """Whether a file is kept from training, decided by a hash of its path and the seed."""
    digest = hashlib.sha256(f"{seed}:{relative_path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def is_table(text: str) -> bool:
    """Whether a file holds data rather than code: fewer than two thirds of it are letters and white space."""
    return sum(character.isalpha() or character.isspace() for character in text) < 2 / 3 * len(text)


def read_texts(root: Path, skipped: set[str]) -> Iterator[tuple[Path, str]]:
    """The Python files of code under `root` that lie in no skipped folder: relative paths and texts."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not is_table(text):
            yield relative, text


def read_sources(root: Path, seed: int) -> tuple[Sources, Sources]:
    """The standard library's files under `root` as (training, held out)."""
    training, held_out = Sources([], []), Sources([], [])
    for relative, text in read_texts(root, SKIPPED_FOLDERS):
        split = held_out if is_held_out(relative.as_posix(), seed) else training
        (split.tests if TEST_FOLDERS & set(relative.parts) else split.library).append(text)
    if not training.library or not held_out.library:
        raise SystemExit(
            f"{root} holds too few Python files. Run this with a Python that ships its library as source."
        )
    return training, held_out


def read_packages() -> Iterator[str]:
    """The texts of the packages that only the vocabulary is made of."""
    for name in VOCABULARY_PACKAGES:
        package = find_spec(name)
        if package is None or not package.submodule_search_locations:
            raise SystemExit(f"The vocabulary is made of the source of {name}, among others. Install {name}.")
        for _, text in read_texts(Path(package.submodule_search_locations[0]), set()):
            yield text


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer; ids ascend with the order of the merges, the end-of-text token comes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise SystemExit(f"The text suffices for {tokenizer.get_vocab_size()} tokens only, not {VOCABULARY_SIZE}.")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one row of token ids, with the end-of-text token before, between and after them."""
    separator = [tokenizer.token_to_id(END_OF_TEXT)]
    token_ids = list(separator)
    for encoding in tokenizer.encode_batch(texts):
        token_ids += encoding.ids + separator
    return torch.tensor(token_ids)


def cut(row: Tensor, window: int, offset: int = 0) -> Tensor:
    """Cuts a row of token ids into consecutive windows, shape `[windows, window]`."""
    row = row[offset:]
    count = len(row) // window
    return row[: count * window].view(count, window)


class Batches:
    """An endless, seeded stream of training windows.

    Each epoch holds the whole library and half as much of the test suite, cut at a fresh offset. Test code is
    plentiful and repetitive, and should widen the vocabulary in use without setting the tone.
    """

    def __init__(self, library: Tensor, tests: Tensor, window: int, batch: int, seed: int):
        self.library, self.tests, self.window, self.batch = library, tests, window, batch
        self.generator = torch.Generator().manual_seed(seed)

    def epoch(self) -> Tensor:
        """The windows of one epoch in random order."""
        offset = int(torch.randint(self.window, (), generator=self.generator))
        library = cut(self.library, self.window, offset)
        tests = cut(self.tests, self.window, offset)
        chosen = torch.randperm(len(tests), generator=self.generator)[: len(library) // 2]
        windows = torch.cat([library, tests[chosen]])
        return windows[torch.randperm(len(windows), generator=self.generator)]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from (batch for batch in self.epoch().split(self.batch) if len(batch) == self.batch)
