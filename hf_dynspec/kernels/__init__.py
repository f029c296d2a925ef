"""The arithmetic of the dynamic head. `scattered_scores_for` and `block_scores_for` say which implementation runs."""

import importlib.util
from collections.abc import Callable

import torch

from .cpu import dense_scores, has_dense_kernel, prepare_kernels
from .reference import argmax_rows, block_scores, packed_scores, replace_rows, scattered_scores, top_k_ids

__all__ = [
    "argmax_rows",
    "block_scores",
    "block_scores_for",
    "dense_scores",
    "has_dense_kernel",
    "packed_scores",
    "prepare_kernels",
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


def block_scores_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.block_scores` for a device."""
    if device.type == "cpu":
        from .cpu import block_scores as compiled_scores

        return compiled_scores
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from .triton_blocks import block_scores as triton_scores

        return triton_scores
    return block_scores
