"""The tokenizer of two models, and which token ids they share."""

import warnings
from typing import Any

from transformers import PreTrainedModel

from .drafters import CausalLMDrafter, Drafter
from .errors import UnsupportedError
from .modeling.parts import output_rows

# Embeddings are padded to a multiple of at most this, so that siblings differ by less: Qwen2.5-7B has 152,064 rows,
# its 0.5B sibling 151,936, and their tokenizer 151,665 entries.
_LARGEST_PADDING = 1024
_ALTERNATIVE = (
    "Choose a drafter of the target's family, or use transformers' universal assisted generation: pass the drafter "
    "itself as assistant_model, with tokenizer and assistant_tokenizer."
)


def shared_tokenizer(target: PreTrainedModel, drafter: Drafter, given: Any = None) -> Any:
    """Return the tokenizer of both models: the one that is given, or the one found where either was loaded from, on
    this computer only.

    Warns where two models have sources of their own and their tokenizers cannot both be known.

    Args:
        target: the model that verifies.
        drafter: the model that drafts. A head that was made for the target has no tokenizer of its own.
        given: the tokenizer that the caller says both have.

    Returns:
        The tokenizer, or None where it is not known.

    Raises:
        UnsupportedError: the two have different tokenizers, or one of them has another than the given one.
    """
    known = {"the given tokenizer": given, "the target's tokenizer": local_tokenizer(target)}
    if isinstance(drafter, CausalLMDrafter):
        is_same_source = bool(target.name_or_path) and drafter.model.name_or_path == target.name_or_path
        its = "the target's tokenizer" if is_same_source else "the drafter's tokenizer"
        known[its] = known.get(its) or local_tokenizer(drafter.model)
        if known[its] is None or (given is None and known["the target's tokenizer"] is None):
            warnings.warn(
                "the tokenizers of target and drafter could not be compared, as they are not both known here. If they "
                "differ, hardly any draft is accepted. Load both models from folders that have their tokenizers.",
                stacklevel=3,
            )
    known = {name: tokenizer for name, tokenizer in known.items() if tokenizer is not None}
    vocabularies = {name: tokenizer.get_vocab() for name, tokenizer in known.items()}
    for name, vocabulary in vocabularies.items():
        first, expected = next(iter(vocabularies.items()))
        if _disagree(vocabulary, expected):
            raise UnsupportedError(
                f"{first} ({len(expected):,} entries) and {name} ({len(vocabulary):,}) differ. {_ALTERNATIVE}"
            )
    return next(iter(known.values()), None)


def _disagree(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether a token or an id means two things. One vocabulary may have more of them than the other, as that of a
    chat model has beside its base model's."""
    if one == other:
        return False
    by_id = {token_id: token for token, token_id in other.items()}
    return any(
        other.get(token, token_id) != token_id or by_id.get(token_id, token) != token
        for token, token_id in one.items()
    )


def shared_vocabulary_size(target: PreTrainedModel, drafter: Drafter, tokenizer: Any) -> int:
    """Return how many leading token ids are real tokens that both models can score.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        tokenizer: the tokenizer of both, or None where it is not known; padding then counts as tokens.

    Raises:
        UnsupportedError: the models' vocabularies differ by more than padding, or the drafter's holds other ids.
    """
    target_rows = output_rows(target)
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
