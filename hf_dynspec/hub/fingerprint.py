"""Tokenizer fingerprints: token ids mean something only beside the tokenizer that they come from."""

import hashlib
from collections.abc import Iterable
from typing import Any

from ..configuration import TokenizerFingerprint
from ..errors import ArtifactError, ConfigurationError


def fingerprint_tokenizer(tokenizer: Any, eos_token_ids: Iterable[int] | None = None) -> TokenizerFingerprint:
    """Fingerprint a tokenizer by its vocabulary, added tokens included.

    Args:
        tokenizer: anything with transformers' `get_vocab()` and `eos_token_id`.
        eos_token_ids: the end-of-sequence ids where they are known better than the tokenizer does, as a model's
            generation configuration does where a chat model ends on several (None: the tokenizer's own).

    Returns:
        A fingerprint whose `size` is one past the largest id. That is the tokenizer's length, unless ids were skipped,
        in which case the length would cut off real tokens. Its `sha256` runs over the sorted pairs of token and id.

    Raises:
        ConfigurationError: the tokenizer has no vocabulary, or an end-of-sequence id is not one of its ids.
    """
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ConfigurationError("the tokenizer has no vocabulary; pass one that is loaded")
    if eos_token_ids is None:
        eos_token_ids = _as_ids(tokenizer.eos_token_id)
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
    """Check that an artifact's ids mean the same tokens to the tokenizer at hand.

    The end-of-sequence ids may differ, because a base model and its chat model share a vocabulary and end differently:
    `read_artifact` asks its rankings to cover both.

    Args:
        expected: what the artifact was made with.
        actual: the tokenizer at hand.
        source: what errors call the artifact's fingerprint.

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


def _as_ids(eos_token_id: int | list[int] | None) -> list[int]:
    if eos_token_id is None:
        return []
    return list(eos_token_id) if isinstance(eos_token_id, list | tuple) else [eos_token_id]
