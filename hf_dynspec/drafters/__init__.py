"""Drafters: the models that propose tokens."""

from typing import Any

from ..errors import ConfigurationError, NotBoundError, UnsupportedError, shown_value
from ..modeling.parts import unwrapped
from .base import Drafter, DrafterState
from .causal_lm import CausalLMDrafter
from .eagle.drafter import EagleDrafter
from .mtp.drafter import MtpDrafter

__all__ = [
    "CausalLMDrafter",
    "Drafter",
    "DrafterState",
    "EagleDrafter",
    "MtpDrafter",
    "as_drafter",
    "require_drafter_name",
]

# The drafters that a target's own checkpoint holds, by name.
_OF_TARGETS = {"mtp": MtpDrafter.from_pretrained}


def require_drafter_name(name: str) -> str:
    """Return the name of a drafter that targets bring with them; another one is a `ConfigurationError`."""
    if name not in _OF_TARGETS:
        raise ConfigurationError(
            f"there is no drafter named {shown_value(name)}: there is {', '.join(_OF_TARGETS)}. Load a model by "
            "AutoModelForCausalLM.from_pretrained or EagleDrafter.from_pretrained."
        )
    return name


def as_drafter(drafter: Any, target: Any = None) -> Drafter:
    """Return a drafter as it is, or make one of a transformers causal language model, bare or wrapped (`unwrapped`),
    or of the name of one that the target brings with it (`"mtp"`).

    Raises:
        UnsupportedError: it is none of these, or a model that cannot draft.
        ConfigurationError: there is no such name.
        NotBoundError: there is no target for the name.
        ArtifactError: the target's checkpoint has no such drafter.
    """
    from transformers import PreTrainedModel

    if isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, str):
        make = _OF_TARGETS[require_drafter_name(drafter)]
        if target is None:
            raise NotBoundError(
                f"the drafter {drafter!r} is read from the target's checkpoint: bind the assistant first"
            )
        return make(target)
    model = unwrapped(drafter)
    if isinstance(model, PreTrainedModel):
        return CausalLMDrafter(model)
    raise UnsupportedError(
        "a drafter must be a transformers causal language model, an EagleDrafter or 'mtp', got "
        f"{type(drafter).__name__}. Load it with AutoModelForCausalLM.from_pretrained or EagleDrafter.from_pretrained."
    )
