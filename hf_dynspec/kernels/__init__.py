"""The arithmetic of the dynamic head. `scattered_scores_for` says which implementation runs on a device."""

from collections.abc import Callable

import torch

from .cpu import can_compile_dense_scores, dense_scores, prepare_dense_scores
from .reference import argmax_rows, packed_scores, replace_rows, scattered_scores, top_k_ids

__all__ = [
    "argmax_rows",
    "block_scores_for",
    "can_compile_dense_scores",
    "dense_scores",
    "packed_scores",
    "prepare_dense_scores",
    "replace_rows",
    "scattered_scores",
    "scattered_scores_for",
    "top_k_ids",
]


def scattered_scores_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.scattered_scores` for a device."""
    if device.type == "cpu":
        from .cpu import scattered_scores as compiled_scores

        return compiled_scores
    return scattered_scores


def block_scores_for(device):
    return block_scores


def block_scores(hidden, weight, blocks, bias):
    rows = weight.index_select(0, blocks).flatten(0, 1)
    scores = (rows.float() @ hidden.float().T).T
    return scores if bias is None else scores + bias.index_select(0, blocks).flatten().float()
