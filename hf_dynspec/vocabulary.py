"""Tokenizer fingerprints, which tie token ids to their tokenizer."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import ArtifactError, ConfigurationError, shown_value
from .fields import LARGEST_COUNT, Digits, FieldError, WholeNumber

# Bounds the memory for a file's claims about itself.
LARGEST_VOCABULARY = LARGEST_COUNT
MOST_EOS_TOKENS = 256


@dataclass(frozen=True)
class TokenizerFingerprint:
    """The tokenizer of an artifact's token ids.

    Args:
        size: one past the largest token id.
        sha256: hexadecimal digest of the pairs of token and id (`fingerprint_tokenizer`).
        eos_token_ids: the end-of-sequence ids, below `size`, without repeats, 256 at most. A list becomes a tuple.

    Raises:
        ConfigurationError: a value is mistyped or out of range.
    """

    size: int
    sha256: str
    eos_token_ids: tuple[int, ...]

    def __post_init__(self):
        WholeNumber(1, LARGEST_VOCABULARY).require("size", self.size)
        Digits(64).require("sha256", self.sha256)
        if not isinstance(self.eos_token_ids, list | tuple):
            problem = f"must be a list of ids, got {shown_value(self.eos_token_ids)}"
            raise FieldError("eos_token_ids", problem, "Give a list")
        if len(self.eos_token_ids) > MOST_EOS_TOKENS:
            problem = f"holds {len(self.eos_token_ids)} ids, and {MOST_EOS_TOKENS} are the most"
            raise FieldError("eos_token_ids", problem, "Give the ids that end a text")
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        for token_id in self.eos_token_ids:
            WholeNumber(0, self.size - 1).require("eos_token_ids", token_id)
        if len(set(self.eos_token_ids)) != len(self.eos_token_ids):
            raise FieldError("eos_token_ids", "repeats an id", "Give each id once")


def fingerprint_tokenizer(tokenizer: Any, eos_token_ids: Iterable[int] | None = None) -> TokenizerFingerprint:
    """Fingerprint a tokenizer by its vocabulary, added tokens included.

    Args:
        tokenizer: anything with transformers' `get_vocab()` and `eos_token_id`.
        eos_token_ids: the end-of-sequence ids, such as a chat model's generation configuration names (None: the
            tokenizer's own).

    Returns:
        A fingerprint whose `size` is one past the largest id. The tokenizer's length would cut off tokens if ids were
        skipped. Its `sha256` runs over the sorted pairs of token and id.

    Raises:
        ConfigurationError: the tokenizer has no vocabulary, or an end-of-sequence id is not one of its ids.
    """
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ConfigurationError("the tokenizer has no vocabulary; pass one that is loaded")
    if eos_token_ids is None:
        eos_token_ids = as_token_ids(tokenizer.eos_token_id)
    # The lengths keep the text unambiguous whatever characters the tokens hold.
    pairs = "".join([f"{len(token)}:{token}:{token_id}\n" for token, token_id in sorted(vocabulary.items())])
    return TokenizerFingerprint(
        size=max(vocabulary.values()) + 1,
        sha256=hashlib.sha256(pairs.encode("utf-8", "surrogatepass")).hexdigest(),
        eos_token_ids=tuple(dict.fromkeys(int(token_id) for token_id in eos_token_ids)),
    )


def require_same_tokenizer(
    expected: TokenizerFingerprint, actual: TokenizerFingerprint, source: str = "config.json: tokenizer"
) -> None:
    """Compare an artifact's tokenizer with the one in use. Their end-of-sequence ids may differ, as those of a base
    model and its chat model do.

    Args:
        expected: the artifact's.
        actual: the one in use.
        source: the artifact's fingerprint in errors.

    Raises:
        ArtifactError: the vocabularies differ.
    """
    fix = "Use the artifact with the models that its config.json names, or build one with this tokenizer."
    if expected.size != actual.size:
        problem = f"the artifact is for a tokenizer of {expected.size} ids, and this one has {actual.size}"
        raise ArtifactError(f"{source}.size", problem, fix)
    if expected.sha256 != actual.sha256:
        problem = "the artifact is for a tokenizer of the same size that gives other ids to some tokens"
        raise ArtifactError(f"{source}.sha256", problem, fix)


def require_tokenizer_of(fingerprints: Iterable[TokenizerFingerprint], tokenizer: Any) -> None:
    """Compare a policy's tokenizers with the one in use, if that is known (not None).

    Raises:
        ArtifactError: the policy was made for another vocabulary.
    """
    fingerprints = tuple(fingerprints)
    if tokenizer is not None and fingerprints:
        actual = fingerprint_tokenizer(tokenizer)
        for expected in fingerprints:
            require_same_tokenizer(expected, actual, "ranking")


def as_token_ids(eos_token_id: Any) -> tuple[int, ...]:
    """End-of-sequence ids from a tensor, a list, one id or None."""
    if eos_token_id is None:
        return ()
    given = eos_token_id.tolist() if hasattr(eos_token_id, "tolist") else eos_token_id
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)
