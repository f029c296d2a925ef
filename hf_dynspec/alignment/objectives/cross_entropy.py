"""The objective of OSD: the cross-entropy of wrong drafts against the target's distribution."""

import torch

from .base import Horizon, Objective, ObjectiveSettings


class CrossEntropy(Objective):
    """Distillation at wrong positions: Liu et al. 2024, "Online Speculative Decoding", section 3.2 and algorithm 2.

    It leaves out the target's entropy, which has no gradients."""

    def loss(self, horizon: Horizon, settings: ObjectiveSettings) -> torch.Tensor:
        draft = horizon.draft_log_probabilities(settings.support, settings.temperature)
        losses = -(horizon.target(settings.temperature) * draft).sum(-1)
        return horizon.weigh(settings.temperature**2 * losses * horizon.is_wrong, settings)
