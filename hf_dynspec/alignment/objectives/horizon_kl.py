"""The objective of EvoSpec: the divergence of the draft from the target, weighted by the draft's confidence."""

import torch

from .base import Horizon, Objective, ObjectiveSettings


class HorizonKL(Objective):
    """Equation 5 of Zhang et al. 2026, "EvoSpec", section 3.4: `Σ_j w_j · T_KD² · D_KL(p̂_j ‖ q̃_j)`."""

    def loss(self, horizon: Horizon, settings: ObjectiveSettings) -> torch.Tensor:
        divergence = horizon.divergence(settings.support, settings.temperature)
        return horizon.weigh(settings.temperature**2 * divergence, settings)
