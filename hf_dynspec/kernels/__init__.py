"""The arithmetic of the dynamic head and of screens, and the choice of top tokens. The `…_for` functions return the
implementation for a device."""

import importlib.util
import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch

from ..devices import is_host_memory
from . import cpu, cpu_best_rows, cpu_top_k, reference
from .attention import QueryRows, RoundAttention, host_round_attention, round_attention
from .cpu import dense_scores, has_dense_kernel, has_packed_kernel, lossless_dtype, most_queries, prepare_kernels
from .cpu_best_rows import prepare_best_rows
from .cpu_few_rows import few_rows_for
from .reference import (
    TILE_COLUMNS,
    TILE_ROWS,
    Screen,
    TiledFactor,
    block_scores,
    norm_from_one,
    packed_scores,
    replace_rows,
    rotated,
    scattered_scores,
    tiled,
)

__all__ = [
    "TILE_COLUMNS",
    "TILE_ROWS",
    "QueryRows",
    "RoundAttention",
    "Screen",
    "TiledFactor",
    "argmax_rows",
    "argmax_rows_for",
    "best_ids",
    "best_rows_for",
    "block_scores",
    "block_scores_for",
    "dense_scores",
    "few_rows_for",
    "given_way",
    "has_dense_kernel",
    "has_packed_kernel",
    "in_plain_torch",
    "lossless_dtype",
    "most_queries",
    "norm_from_one",
    "norm_from_one_for",
    "packed_scores",
    "packed_scores_for",
    "prepare_best_rows",
    "prepare_kernels",
    "replace_rows",
    "rotated",
    "rotation_for",
    "round_attention_for",
    "scattered_scores",
    "scattered_scores_for",
    "tiled",
    "top_k_ids",
    "top_k_ids_for",
]


# By thread, what `given_way` returns.
_given_way = threading.local()


def given_way() -> dict[str, str]:
    """The Triton kernels in whose place plain torch has computed in this thread since this was last called, each with
    the reason."""
    return vars(_given_way).pop("reasons", {})


def in_plain_torch(reasons: dict[str, str]) -> str:
    """What `given_way` has returned as the end of a sentence."""
    return "".join(f"; {name} in plain torch: {reason}" for name, reason in reasons.items())


class KernelOrPlain:
    """A Triton kernel, or plain torch for what it cannot be launched for: it may need more shared memory than the GPU
    has, or Triton may not be able to compile it.

    Args:
        module: the file of the kernel, `triton_<module>`.
        plain: its plain twin of the same name.
    """

    def __init__(self, module: str, plain: Callable[..., Any]):
        self._module, self._plain, self._name = module, plain, plain.__name__
        # By the dtype and the shape of the first tensor.
        self._failures: dict[tuple[torch.dtype, torch.Size], str] = {}

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """What launches the kernel."""
        return getattr(importlib.import_module(f".triton_{self._module}", __package__), self._name)

    def __call__(self, first: torch.Tensor, *others: Any, **settings: Any) -> Any:
        kind = first.dtype, first.shape
        if kind not in self._failures:
            try:
                return self.kernel(first, *others, **settings)
            except torch.OutOfMemoryError:
                raise
            # Triton, its compiler and the driver have errors of many classes.
            except Exception as error:
                self._failures[kind] = f"{type(error).__name__}: {error!s:.200}"
        vars(_given_way).setdefault("reasons", {})[self._name] = self._failures[kind]
        return self._plain(first, *others, **settings)


_or_plain = cache(KernelOrPlain)


def packed_scores_for(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.packed_scores` for rows of a head, `[V, d]`."""
    return cpu.packed_scores if has_packed_kernel(weight) else reference.packed_scores


def round_attention_for(device: torch.device) -> RoundAttention:
    """Return the fastest `RoundAttention` for a device."""
    if _has_triton(device):
        return _or_plain("attention", round_attention)
    return host_round_attention if is_host_memory(device) else round_attention


def rotation_for(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """Return the implementation of `reference.rotated` that is faster than transformers' own on a device (None: there
    is none)."""
    return _or_plain("layers", rotated) if _has_triton(device) else None


def norm_from_one_for(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None:
    """Likewise of `reference.norm_from_one`."""
    return _or_plain("layers", norm_from_one) if _has_triton(device) else None


def scattered_scores_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.scattered_scores` for a device."""
    return cpu.scattered_scores if device.type == "cpu" else reference.scattered_scores


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def block_scores_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.block_scores` for a device."""
    if device.type == "cpu":
        return cpu.block_scores
    return _or_plain("blocks", block_scores) if _has_triton(device) else block_scores


def best_rows_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the fastest implementation of `reference.best_rows` for a device."""
    if device.type == "cpu":
        return cpu_best_rows.best_rows
    return _or_plain("best_rows", reference.best_rows) if _has_triton(device) else reference.best_rows


def top_k_ids_for(device: torch.device) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return the fastest implementation of `reference.top_k_ids` for a device."""
    return cpu_top_k.top_k_ids if device.type == "cpu" else reference.top_k_ids


def argmax_rows_for(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the fastest implementation of `reference.argmax_rows` for a device."""
    return cpu_top_k.argmax_rows if device.type == "cpu" else reference.argmax_rows


def top_k_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`reference.top_k_ids`, by the implementation for the scores' device."""
    return top_k_ids_for(scores.device)(scores, k)


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """`reference.argmax_rows`, by the implementation for the scores' device."""
    return argmax_rows_for(scores.device)(scores)


def best_ids(scores: torch.Tensor, k: int) -> torch.Tensor:
    """`reference.best_ids`, by the implementation for the scores' device."""
    return (cpu_top_k if scores.device.type == "cpu" else reference).best_ids(scores, k)
