"""CPU kernels compiled by torch's inductor, which needs a C++ compiler."""

import functools
import os
import shutil
import warnings

import torch

from . import reference


@functools.cache
def _has_compiler() -> bool:
    """Whether a C++ compiler is at hand. Says so once where none is."""
    found = any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name)
    if not found:
        warnings.warn(
            "no C++ compiler was found, so scattered rows of the LM head are scored by plain torch, several times "
            "slower. Install g++ or clang++ to compile the kernel.",
            stacklevel=2,
        )
    return found


@functools.cache
def _compiled_scores():
    """One loop over the rows that neither copies them nor writes them down: a row is read once and summed."""

    def scores(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (weight[ids].unsqueeze(0).float() * hidden.unsqueeze(1).float()).sum(-1)

    return torch.compile(scores, dynamic=True)


def scattered_scores(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`reference.scattered_scores`, compiled where a compiler is at hand, summed and returned in fp32."""
    if not _has_compiler():
        return reference.scattered_scores(hidden, weight, ids, bias).float()
    scores = _compiled_scores()(hidden, weight, ids)
    return scores if bias is None else scores + bias.index_select(0, ids).float()
