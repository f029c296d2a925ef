"""The target's output projection: its rows, and this package's faster product with them."""

import operator
import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafters.weights_watch import WeightsWatch
from ..modeling.head import DynamicLMHead
from ..modeling.parts import decoder_of, is_plain, projection_of, scale_and_cap
from ..protocol import HeadRows


class TargetHead:
    """Follows the output projection of one target. Shareable between calls.

    Args:
        wants_fast: use the faster product if there is one.
    """

    def __init__(self, wants_fast: bool = True):
        self._wants_fast = wants_fast
        self._fast: DynamicLMHead | None = None
        # The weight and bias that it was made from, and everything else that logits depend on.
        self._tensors: tuple[torch.Tensor | None, ...] = (None, None)
        self._settings: tuple[Any, ...] = ()
        self._rows_lock = threading.Lock()
        self._rows: HeadRows | None = None
        self._rows_watch: WeightsWatch | None = None

    def prepare(self, model: PreTrainedModel) -> None:
        """Make the faster product anew if the output projection changed, or the model's use of it. That takes about
        two forwards."""
        if not self._wants_fast:
            return
        projection = model.get_output_embeddings()
        tensors = getattr(projection, "weight", None), getattr(projection, "bias", None)
        settings = _settings_of(model)
        is_same = all(map(operator.is_, tensors, self._tensors)) and settings == self._settings
        if not is_same or (self._fast is not None and not self._lie_where_they_did(tensors)):
            self._fast, self._tensors, self._settings = _fast_head(model), tensors, settings

    def _lie_where_they_did(self, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        of_head = (self._fast.weight, self._fast.bias)
        return all(
            now is None or (now.data_ptr(), now.dtype) == (then.data_ptr(), then.dtype)
            for now, then in zip(tensors, of_head, strict=True)
        )

    def fast(self, model: PreTrainedModel) -> DynamicLMHead | None:
        """The faster product; None if there is none, or it must not be used now."""
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


def _settings_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything besides tensors that a model's logits depend on: its class and the class's forward, which may be
    patched, the scale and cap of its configuration, and settings on the model itself, such as Cohere's scale."""
    own = {name: value for name, value in vars(model).items() if isinstance(value, int | float | str)}
    return type(model), type(model).forward, scale_and_cap(model), own


def _fast_head(model: PreTrainedModel) -> DynamicLMHead | None:
    """The target's output projection with this package's product; None if there is no faster one."""
    projection = model.get_output_embeddings()
    if type(projection) is not nn.Linear or not is_plain(projection) or projection.weight.device.type != "cpu":
        return None
    # In a model of images and text, other modules run before the decoder.
    if decoder_of(model) is not model.base_model:
        return None
    head = DynamicLMHead.matching(model)
    return head if head is not None and head.can_speed_up_all_scores else None


def _may_be_taken_apart(model: PreTrainedModel, head: DynamicLMHead) -> bool:
    """Whether decoder and projection may run one after the other: no hook or patch is on the model or its projection,
    and the projection is still the one that the head was made from."""
    if torch.is_autocast_enabled(head.weight.device.type):
        # The projection would compute in 16 bits.
        return False
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
