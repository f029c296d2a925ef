"""The rejection rate as an objective: the total variation between draft and target."""

import torch

from .base import Horizon, Objective, ObjectiveSettings


class TotalVariation(Objective):
    """`1 − Σ min(p, q)`: the chance that speculative sampling rejects a token (Leviathan et al. 2023, "Fast Inference
    from Transformers via Speculative Decoding", theorem 3.5), over the horizon by the weights of EvoSpec."""

    def loss(self, horizon: Horizon, settings: ObjectiveSettings) -> torch.Tensor:
        target = horizon.target(settings.temperature)
        draft = horizon.draft_log_probabilities(settings.support, settings.temperature).exp()
        # If nothing can be proposed, target and loss are 0.
        return horizon.weigh(target.sum(-1) - torch.minimum(target, draft).sum(-1), settings)
