"""Which token ids both models and the tokenizer share."""

from typing import Any

from transformers import PreTrainedModel

from .drafters import CausalLMDrafter, Drafter
from .errors import UnsupportedError

# Embeddings are padded to a multiple of at most this, so that siblings differ by less: Qwen2.5-7B has 152,064 rows, its
# 0.5B sibling 151,936, and their tokenizer 151,665 entries.
_LARGEST_PADDING = 1024


def shared_vocabulary_size(target: PreTrainedModel, drafter: Drafter, tokenizer: Any) -> int:
    """Return how many leading token ids are real tokens that both models can score.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        tokenizer: the tokenizer of both; None looks it up, on this computer only, where each was loaded from.

    Raises:
        UnsupportedError: the two have different tokenizers, as far as can be told.
    """
    target_rows = target.get_output_embeddings().weight.shape[0]
    drafter_rows = drafter.head.weight.shape[0]
    if tokenizer is None:
        tokenizer = _local_tokenizer(target)
        own = _local_tokenizer(drafter.model) if isinstance(drafter, CausalLMDrafter) else None
        if tokenizer is not None and own is not None:
            _require_equal(tokenizer, own)
        tokenizer = tokenizer if tokenizer is not None else own
    if abs(target_rows - drafter_rows) >= _LARGEST_PADDING:
        raise UnsupportedError(
            f"the target scores {target_rows:,} token ids and the drafter {drafter_rows:,}, so they have different "
            "tokenizers. Choose a drafter of the target's family, or use transformers' universal assisted generation "
            "(pass the drafter itself as assistant_model, with tokenizer and assistant_tokenizer)."
        )
    rows = min(target_rows, drafter_rows)
    return rows if tokenizer is None else min(rows, len(tokenizer))


def _local_tokenizer(model: PreTrainedModel) -> Any:
    """The tokenizer beside the model's weights, or None where there is none on this computer."""
    from transformers import AutoTokenizer

    name = getattr(model, "name_or_path", "") or model.config.name_or_path
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None


def _require_equal(tokenizer: Any, other: Any) -> None:
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        raise UnsupportedError(
            f"the target's tokenizer ({len(ours):,} entries) and the drafter's ({len(theirs):,}) differ. Choose a "
            "drafter of the target's family, or use transformers' universal assisted generation (pass the drafter "
            "itself as assistant_model, with tokenizer and assistant_tokenizer)."
        )
