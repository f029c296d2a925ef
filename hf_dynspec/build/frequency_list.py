"""Frequency lists of other projects: `.pt` files of token ids, most frequent first.

FR-Spec (Zhao et al., 2025) publishes `freq_32768.pt`, a list of ids; SGLang (`--speculative-token-map`) and vLLM read
the same; speculators keeps `token_freq.pt`, the count of each id.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..artifacts.pickles import load_pickle
from ..errors import ArtifactError, shown_value
from ..files import is_there

# Bounds of the memory for a file, which may be sixty times its size. Real files hold at most one entry, of some ten
# bytes, for each id.
_MOST_BYTES_PER_ID = 24
_MOST_ENTRIES_PER_ID = 4


def import_frequency_list(
    path: str | Path, vocabulary_size: int, eos_token_ids: Iterable[int] = (), *, field: str | None = None
) -> list[int]:
    """Read a `.pt` frequency list without running any code of the file: a list of ids or an integer tensor `[n]`, most
    frequent first, or speculators' `{id: count}`, which is sorted by falling count and rising id. Returns the ids
    without repeats (FR-Spec's lists can hold one), each at its first place. Errors call the file `field`.

    Args:
        vocabulary_size: every id must lie below it.
        eos_token_ids: ids that the list must hold. Missing ones are put in front, as FR-Spec forces them in.

    Raises:
        ArtifactError: the file is missing, damaged, too large for the vocabulary, or tries to run code; it holds
            something else than ids and counts; an id is outside the vocabulary; the list is empty.
    """
    path = Path(path)
    field = field or path.name
    if not is_there(path):
        raise ArtifactError(field, f"there is no file {path}", "Give the path of a .pt file")
    content = load_pickle(path, field, _MOST_BYTES_PER_ID * vocabulary_size + (1 << 20))
    ids = _as_ids(content, vocabulary_size, field)
    if not ids:
        raise ArtifactError(field, "holds no token ids", "Give a list that was counted on some text")
    outside = next((token_id for token_id in ids if not 0 <= token_id < vocabulary_size), None)
    if outside is not None:
        problem = f"holds the id {shown_value(outside)}, but the tokenizer's ids are 0 … {vocabulary_size - 1}"
        raise ArtifactError(field, problem, "Give the list of this tokenizer, or the tokenizer of this list")
    present = set(ids)
    return list(dict.fromkeys([*(token_id for token_id in eos_token_ids if token_id not in present), *ids]))


def _as_ids(content: Any, vocabulary_size: int, field: str) -> list[int]:
    """The ids of a loaded file in frequency order, repeats included."""
    is_container = isinstance(content, list | tuple | dict)
    if not is_container and not isinstance(content, torch.Tensor):
        problem = f"holds a {type(content).__name__}, not a list of token ids"
        raise ArtifactError(field, problem, "Give a list, a tensor or a dictionary of counts")
    entries = len(content) if is_container else content.numel()
    if entries > _MOST_ENTRIES_PER_ID * vocabulary_size:
        problem = f"holds {entries} entries for {vocabulary_size} ids"
        raise ArtifactError(field, problem, "Give a list that holds each id once")
    if not is_container:
        if content.dim() != 1 or content.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            problem = f"holds a {content.dtype} tensor of shape {tuple(content.shape)}"
            raise ArtifactError(field, problem, "Give an integer tensor with one dimension")
        if content.layout != torch.strided or content.device.type != "cpu":
            raise ArtifactError(field, "holds a tensor without its values", "Write the values as a plain list")
        return content.tolist()
    for token_id in content:
        if type(token_id) is not int:
            problem = f"holds a {type(token_id).__name__} where a token id is expected"
            raise ArtifactError(field, problem, "Give a list of whole numbers")
    if not isinstance(content, dict):
        return list(content)
    for count in content.values():
        if type(count) not in (int, float) or not 0 <= count < float("inf"):
            problem = f"holds {shown_value(count)} where a count is expected"
            raise ArtifactError(field, problem, "Give counts of zero or more")
    return sorted(content, key=lambda token_id: (-content[token_id], token_id))
