"""Trains a copy of a drafter, which drafts nothing, on what requests left."""

from collections.abc import Sequence

import torch

from .objectives.base import TrainableDrafter
from .replay import Trajectory
from .settings import OnlineAlignment

ADAPTER = "default"
LARGEST_GRADIENT_NORM = 1.0
# What peft puts before the names of a model's modules in an adapter's file.
PEFT_PREFIX = "base_model.model."


class Learner:
    """Trains a copy of a drafter: LoRA on some of its modules, or all of its weights.

    The drafter itself is read once, here, and never written to; what was learnt is `weights`, to be copied into it by
    whoever drafts with it. The copy's weights are fp32 where the drafter's have 16 bits. Not for several threads at
    once.

    Args:
        drafter: what it is a copy of.
        settings: of training: see `OnlineAlignment`.

    Attributes:
        drafter: the copy.
        dropped: how many steps were dropped, as loss or gradients were not finite.

    Raises:
        ConfigurationError: the drafter has no modules of the names in `settings.modules`.
        NotImplementedError: the drafter cannot be copied.
    """

    def __init__(self, drafter: TrainableDrafter, settings: OnlineAlignment):
        self.settings = settings
        self.drafter = drafter.copy()
        self.dropped = 0
        ...

    def step(self, trajectories: Sequence[Trajectory]) -> float | None:
        """One optimizer step on the mean loss of some trajectories, gradients clipped to a norm of 1.

        Returns:
            The loss before the step; None where there was nothing to learn from, or the step was dropped as loss or
            gradients were not finite, which leaves the weights as they were.
        """
        raise NotImplementedError

    def acceptance(self, trajectory: Trajectory) -> tuple[float, float] | None:
        """`acceptance_of` a trajectory before anything was learnt, and with what has been learnt: what a gate
        compares. None where nothing could be scored."""
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """What a drafter that is to draft with what was learnt holds, by the names of its `module`'s parameters: those
        that are trained or adapted and no others, adapters merged into them, in the drafter's dtypes. New tensors."""
        raise NotImplementedError

    def base_weights(self) -> dict[str, torch.Tensor]:
        """What the drafter held before anything was learnt: the names of `weights`, and the very bits."""
        raise NotImplementedError

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """Copies of the LoRA matrices by the names that peft has in an adapter's file, fp32; of all trained weights by
        their own names where there is no LoRA."""
        raise NotImplementedError

    def load_adapter_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take up what `adapter_state` gave, and begin with a new optimizer.

        Raises:
            ConfigurationError: names or shapes are not those of this learner; names them. Nothing was changed.
        """
        raise NotImplementedError

    def adapter_config(self):
        """The `peft.LoraConfig` of the adapter, whose `target_modules` are full names; None where there is no LoRA."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything that was learnt, and the optimizer's state; `weights` are `base_weights` again."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that gradients and the optimizer's state take now, at most `12 ·` trained parameters with AdamW."""
        raise NotImplementedError

    def base_digest(self) -> str:
        """SHA-256 of all weights of the copy that are not trained, by name: unchanged for as long as it learns."""
        raise NotImplementedError
