"""What a drafter is trained to do, by name. Each objective is one file, and one line of the table."""

from dataclasses import replace

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
    "choose_places",
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
    return None if horizon is None else horizon.acceptance()


@torch.no_grad()
def choose_places(drafter: TrainableDrafter, trajectory: Trajectory, settings: ObjectiveSettings) -> Trajectory | None:
    """A request with the places that drafts are learnt from (`OnlineAlignment.fill`), by what the drafter says now.

    Returns:
        The trajectory itself where all of it is learnt from at once. None where it has no such place.
    """
    if settings.fill == "all" and not settings.waits_for_full_buffer:
        return trajectory
    horizon = unroll(drafter, trajectory, settings)
    if horizon is None:
        return None
    is_chosen = torch.zeros_like(trajectory.is_wrong)
    is_chosen[horizon.first_place :] = True if settings.fill == "all" else horizon.passes_gate(settings)
    return replace(trajectory, is_chosen=is_chosen) if bool(is_chosen.any()) else None
