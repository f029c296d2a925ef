"""What a drafter is trained to do, by name. Each objective is one file, and one line of the table."""

import torch

from ..replay import Trajectory
from .base import Horizon, Objective, ObjectiveSettings, TrainableDrafter, unroll
from .cross_entropy import CrossEntropy
from .horizon_kl import HorizonKL
from .total_variation import TotalVariation

OBJECTIVES: dict[str, Objective] = {
    "horizon_kl": HorizonKL(),
    "cross_entropy": CrossEntropy(),
    "total_variation": TotalVariation(),
}

__all__ = [
    "OBJECTIVES",
    "Horizon",
    "Objective",
    "ObjectiveSettings",
    "TrainableDrafter",
    "acceptance_of",
    "loss_of",
    "unroll",
]


def loss_of(drafter: TrainableDrafter, trajectory: Trajectory, settings: ObjectiveSettings) -> torch.Tensor | None:
    """The objective on one request, a mean over the places where drafts could have begun.

    Args:
        drafter: whose module is trained.
        trajectory: what the request left.
        settings: `objective`, how: see `OnlineAlignment`.

    Returns:
        A scalar with gradients where these are enabled. None where the trajectory has nothing to learn from.
    """
    horizon = unroll(drafter, trajectory, settings)
    return None if horizon is None else OBJECTIVES[settings.objective].loss(horizon, settings)


@torch.no_grad()
def acceptance_of(drafter: TrainableDrafter, trajectory: Trajectory, settings: ObjectiveSettings) -> float | None:
    """How much of what the drafter says of a request would be accepted: `Σ min(p, q)`, which is one less the total
    variation, a mean over all places and steps, at the temperature of the request. `p` counts on the kept ids only
    and is normalised over the full vocabulary, `q` over the request's shortlist.

    Returns:
        From 0 to 1. None where the trajectory has nothing that could be scored.
    """
    horizon = unroll(drafter, trajectory, settings)
    return None if horizon is None else float(horizon.acceptance())
