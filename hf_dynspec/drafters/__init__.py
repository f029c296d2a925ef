"""Drafters: the models that propose tokens."""

from typing import Any

from ..errors import UnsupportedError
from ..modeling.parts import unwrapped
from .base import Drafter, DrafterState
from .causal_lm import CausalLMDrafter
from .eagle.drafter import EagleDrafter
from .mtp.drafter import MtpDrafter

__all__ = ["CausalLMDrafter", "Drafter", "DrafterState", "EagleDrafter", "MtpDrafter", "as_drafter"]


def as_drafter(drafter: Any) -> Drafter:
    """Return a drafter as it is, or make one of a transformers causal language model, bare or wrapped (`unwrapped`).

    Raises:
        UnsupportedError: it is neither, or a model that cannot draft.
    """
    from transformers import PreTrainedModel

    if isinstance(drafter, Drafter):
        return drafter
    model = unwrapped(drafter)
    if isinstance(model, PreTrainedModel):
        return CausalLMDrafter(model)
    raise UnsupportedError(
        f"a drafter must be a transformers causal language model or an EagleDrafter, got {type(drafter).__name__}. "
        "Load it with AutoModelForCausalLM.from_pretrained or EagleDrafter.from_pretrained."
    )
