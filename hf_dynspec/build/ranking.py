"""Rankings of a tokenizer's vocabulary by how often its tokens occur, ids that no shortlist should lack in front."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

# Added tokens whose names differ only in a number, such as <unused12>, <|reserved_special_token_3|> or <extra_id_7>,
# are placeholders or codes where there are more of them than this.
_LARGEST_NUMBERED_FAMILY = 16
_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def vocabulary_size(tokenizer: Any) -> int:
    """One past the largest token id of a tokenizer, added tokens included."""
    return max(tokenizer.get_vocab().values()) + 1


def rank(counts: np.ndarray, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> np.ndarray:
    """int64 `[n]`: each id of a tokenizer once, pinned ids first, then by falling count, equal counts by rising id.
    `counts` is int64 `[V]`; `n` is `V` if the ids have no gaps.

    FR-Spec forces in the end-of-sequence token only; a narrow corpus then drops bytes, and with them everything that
    is spelled out in bytes.
    """
    pinned = pinned_ids(tokenizer, eos_token_ids)
    known = np.array(sorted(set(tokenizer.get_vocab().values()) - set(pinned)), np.int64)
    # A stable sort of rising ids leaves equal counts in the order of their ids.
    by_count = known[np.argsort(-counts[known], kind="stable")]
    return np.concatenate([np.array(pinned, np.int64), by_count])


def pinned_ids(tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> list[int]:
    """The ids that stand in front of every ranking: EOS, with those that the model ends on besides the tokenizer's
    own; other special and added tokens; then single bytes. Each group is in the order of its ids.

    Large families of numbered tokens (`<unused12>`; some vocabularies have thousands) are left to their counts:
    pinned, they would fill a small shortlist.
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
    """int64 `[n]`: a list that is cut off (FR-Spec's are), continued to all ids: the pinned ids that it lacks, then
    the others by rising id, which is the order of merges and so roughly that of frequency."""
    rest = rank(np.zeros(vocabulary_size(tokenizer), np.int64), tokenizer)
    leading = np.array(leading_ids, np.int64)
    return np.concatenate([leading, rest[~np.isin(rest, leading)]])


def coverage(counts: np.ndarray, ranking: np.ndarray, sizes: Iterable[int]) -> dict[int, float]:
    """The share of counted tokens that the first `size` ids of a ranking cover, for each size up to the ranking's."""
    reached = np.cumsum(counts[ranking])
    total = max(1, int(counts.sum()))
    return {size: int(reached[size - 1]) / total for size in sizes if size <= len(ranking)}
