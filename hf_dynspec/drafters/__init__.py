"""Drafters: the models that propose tokens."""

from typing import Any

from ..errors import UnsupportedError
from ..modeling.parts import unwrapped
from .base import Drafter, DrafterState
from .beside_target import BesideTarget
from .causal_lm import CausalLMDrafter
from .dflash import DFlashDrafter
from .eagle.drafter import EagleDrafter
from .gemma4_assistant import Gemma4AssistantDrafter
from .mtp.drafter import MtpDrafter

__all__ = [
    "KINDS",
    "BesideTarget",
    "CausalLMDrafter",
    "Drafter",
    "DrafterState",
    "EagleDrafter",
    "MtpDrafter",
    "as_drafter",
]

# The kinds of models that draft beside a target. Any other model is an independent drafter.
KINDS: tuple[type[BesideTarget], ...] = (Gemma4AssistantDrafter, DFlashDrafter)


def as_drafter(drafter: Any) -> Drafter:
    """Return a drafter as it is, or make one of a model of transformers, bare or wrapped (`unwrapped`): of one of the
    `KINDS`, which its configuration tells, or of any causal language model.

    Raises:
        UnsupportedError: it is neither, or a model that cannot draft.
    """
    from transformers import PreTrainedModel

    if isinstance(drafter, Drafter):
        return drafter
    model = unwrapped(drafter)
    if isinstance(model, PreTrainedModel):
        kind = next((one for one in KINDS if one.is_kind_of(model.config)), CausalLMDrafter)
        return kind(model)
    raise UnsupportedError(
        f"a drafter must be a model of transformers that drafts, a Drafter, 'mtp' or a folder, got "
        f"{type(drafter).__name__}. Load it with AutoModelForCausalLM.from_pretrained or EagleDrafter.from_pretrained."
    )
