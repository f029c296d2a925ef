"""Moved to `hf_dynspec.storable`."""

from ..storable import (
    BUILD_AGAIN,
    ID_DTYPES,
    TOKENIZER_SIZE,
    WEIGHT_DTYPES,
    Storable,
    TensorRule,
    token_ids,
    token_ranking,
)

__all__ = [
    "BUILD_AGAIN",
    "ID_DTYPES",
    "TOKENIZER_SIZE",
    "WEIGHT_DTYPES",
    "Storable",
    "TensorRule",
    "token_ids",
    "token_ranking",
]
