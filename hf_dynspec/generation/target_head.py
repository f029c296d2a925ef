"""The target's output projection: its rows, and this package's faster product with them."""

import threading

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafters.weights_watch import WeightsWatch
from ..modeling.head import DynamicLMHead
from ..modeling.parts import decoder_of, projection_of
from ..protocol import HeadRows


class TargetHead:
    """Follows the output projection of one target. Shareable between calls.

    Args:
        wants_fast: use the faster product, where there is one.
    """

    def __init__(self, wants_fast: bool = True):
        self._wants_fast = wants_fast
        self._fast: DynamicLMHead | None = None
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._rows_lock = threading.Lock()
        self._rows: HeadRows | None = None
        self._rows_watch: WeightsWatch | None = None

    def prepare(self, model: PreTrainedModel) -> None:
        """Take up the output projection, where it is another one than before. Takes about two forwards then."""
        if not self._wants_fast:
            return
        projection = model.get_output_embeddings()
        weight, bias = getattr(projection, "weight", None), getattr(projection, "bias", None)
        is_same = weight is self._weight and bias is self._bias
        if not is_same or (self._fast is not None and not self._lies_where_it_did(weight)):
            self._fast, self._weight, self._bias = _fast_head(model), weight, bias

    def _lies_where_it_did(self, weight: torch.Tensor) -> bool:
        head = self._fast.weight
        return weight.data_ptr() == head.data_ptr() and weight.dtype == head.dtype

    def fast(self, model: PreTrainedModel) -> DynamicLMHead | None:
        """The faster product, where there is one and it may be used just now."""
        return self._fast if self._fast is not None and _may_be_taken_apart(model, self._fast) else None

    def rows(self, model: PreTrainedModel) -> HeadRows:
        """See `TargetForward.head_rows`."""
        projection = model.get_output_embeddings()
        with self._rows_lock:
            watch = self._rows_watch
            if watch is None or watch.module is not projection or watch.has_changed():
                self._rows_watch = None
                weight, bias = projection_of(model)
                self._rows = HeadRows(weight.detach(), None if bias is None else bias.detach())
                self._rows_watch = WeightsWatch(projection, samples=True)
            return self._rows


def _fast_head(model: PreTrainedModel) -> DynamicLMHead | None:
    """The target's output projection, where this package has a faster product for it."""
    projection = model.get_output_embeddings()
    if type(projection) is not nn.Linear or projection.weight.device.type != "cpu":
        return None
    # In a model of images and text, what comes before the decoder must run too.
    if decoder_of(model) is not model.base_model:
        return None
    head = DynamicLMHead.matching(model)
    return head if head is not None and head.can_speed_up_all_scores else None


def _may_be_taken_apart(model: PreTrainedModel, head: DynamicLMHead) -> bool:
    """Whether decoder and projection may run one after the other: nobody watches or changes what goes through the
    model or its projection, and the projection is still the one that the head was made from."""
    projection = model.get_output_embeddings()
    is_plain = not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or module._compiled_call_impl is not None
        for module in (model, projection)
    )
    is_same = type(projection) is nn.Linear and projection.weight.data_ptr() == head.weight.data_ptr()
    return is_plain and is_same and not nn.modules.module._has_any_global_hook()
