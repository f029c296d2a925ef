"""Which token ids both models and the tokenizer share."""

from typing import Any

from transformers import PreTrainedModel

from .drafters import CausalLMDrafter, Drafter
from .errors import UnsupportedError

# Embeddings are padded to a multiple of at most this, so that siblings differ by less: Qwen2.5-7B has 152,064 rows,
# its 0.5B sibling 151,936, and their tokenizer 151,665 entries.
_LARGEST_PADDING = 1024
_ALTERNATIVE = (
    "Choose a drafter of the target's family, or use transformers' universal assisted generation: pass the drafter "
    "itself as assistant_model, with tokenizer and assistant_tokenizer."
)


def shared_tokenizer(target: PreTrainedModel, drafter: Drafter) -> Any:
    """Return the tokenizer of both models, looked up where each was loaded from, on this computer only.

    Returns:
        The tokenizer, or None where neither model came with one.

    Raises:
        UnsupportedError: the two have different tokenizers.
    """
    ours = local_tokenizer(target)
    own_source = isinstance(drafter, CausalLMDrafter) and drafter.model.name_or_path != target.name_or_path
    theirs = local_tokenizer(drafter.model) if own_source else None
    if ours is None or theirs is None:
        return ours if theirs is None else theirs
    own_vocabulary, other_vocabulary = ours.get_vocab(), theirs.get_vocab()
    if own_vocabulary != other_vocabulary:
        raise UnsupportedError(
            f"the target's tokenizer ({len(own_vocabulary):,} entries) and the drafter's ({len(other_vocabulary):,}) "
            f"differ. {_ALTERNATIVE}"
        )
    return ours


def shared_vocabulary_size(target: PreTrainedModel, drafter: Drafter, tokenizer: Any) -> int:
    """Return how many leading token ids are real tokens that both models can score.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        tokenizer: the tokenizer of both, or None where it is not known; padding then counts as tokens.

    Raises:
        UnsupportedError: the models' vocabularies differ by more than padding, or the drafter's holds other ids.
    """
    target_rows = target.get_output_embeddings().weight.shape[0]
    draftable = drafter.head.token_ids
    # A head that leaves tokens out says which ones it has, and was made for this target.
    drafter_rows = drafter.head.weight.shape[0] if draftable is None else target_rows
    if abs(target_rows - drafter_rows) >= _LARGEST_PADDING:
        raise UnsupportedError(
            f"the target scores {target_rows:,} token ids and the drafter {drafter_rows:,}, so they have different "
            f"tokenizers. {_ALTERNATIVE}"
        )
    rows = min(target_rows, drafter_rows)
    # Ids may have gaps, so the length of the tokenizer could cut off real tokens.
    size = rows if tokenizer is None else min(rows, max(tokenizer.get_vocab().values()) + 1)
    if draftable is not None and int(draftable.max()) >= size:
        raise UnsupportedError(
            f"the drafter's head scores the token id {int(draftable.max()):,}, and the tokenizer's end at "
            f"{size - 1:,}. Load the head that was made for this target."
        )
    return size


def local_tokenizer(model: PreTrainedModel) -> Any:
    """The tokenizer beside the model's weights, or None where there is none on this computer."""
    from transformers import AutoTokenizer

    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False, local_files_only=True)
    except Exception:  # damaged tokenizers make the libraries below raise anything, bare exceptions too
        return None
