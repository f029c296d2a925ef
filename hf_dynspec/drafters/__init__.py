"""Drafters: the models that propose tokens. One file each; a drafter is recognised by what it is made from."""

from typing import Any

from ..errors import UnsupportedError
from ..modeling.parts import unwrapped
from .base import Drafter, DrafterState
from .causal_lm import CausalLMDrafter
from .eagle.drafter import EagleDrafter

__all__ = ["CausalLMDrafter", "Drafter", "DrafterState", "EagleDrafter", "as_drafter"]


def as_drafter(drafter: Any) -> Drafter:
    """Return a drafter as it is, or wrap a transformers causal language model, also one in a wrapper (`unwrapped`).

    Raises:
        UnsupportedError: neither of the two, or a model that cannot draft.
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
