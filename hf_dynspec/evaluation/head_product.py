"""Plain generation with the product that verifications compute the target's logits by."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels import dense_scores, has_dense_kernel


@contextmanager
def head_product(target: PreTrainedModel) -> Iterator[None]:
    """Let the target's output projection, whose weight has a dense kernel, be computed as verifications compute it."""
    projection = target.get_output_embeddings()
    before = vars(projection).get("forward")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        scores = dense_scores(hidden.flatten(0, -2), projection.weight)
        if projection.bias is not None:
            scores += projection.bias
        return scores.view(*hidden.shape[:-1], -1)

    projection.forward = forward
    try:
        yield
    finally:
        if before is None:
            del projection.forward
        else:
            projection.forward = before


def why_not_head_product(target: PreTrainedModel) -> str | None:
    """Why the target's output projection is not computed by this package's product; None where it is."""
    projection = target.get_output_embeddings()
    if type(projection) is not nn.Linear:
        return f"the target's output projection is {type(projection).__name__}, and not a plain linear layer"
    weight = projection.weight
    if has_dense_kernel(weight):
        return None
    kind = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)} on {weight.device}"
    return f"it is compiled for large heads in float32 on CPUs, where there is a C++ compiler; the target's is {kind}"
