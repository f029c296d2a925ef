"""Training objectives by name. Each is one file and one line of the table."""

from dataclasses import replace

import torch

from ...drafters.base import Drafter
from ..replay import Trajectory
from .base import Horizon, Objective, ObjectiveSettings, unroll
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
    "acceptance_of",
    "choose_places",
    "loss_of",
    "unroll",
]


def loss_of(drafter: Drafter, trajectory: Trajectory, settings: ObjectiveSettings) -> torch.Tensor | None:
    """The loss of one request, a mean over the places where drafts could have begun.

    Args:
        drafter: the drafter whose module is trained.
        trajectory: the recorded request.
        settings: see `OnlineAlignment`.

    Returns:
        A scalar, with gradients if enabled (None: the trajectory has nothing to learn from).
    """
    horizon = unroll(drafter, trajectory, settings)
    return None if horizon is None else OBJECTIVES[settings.objective].loss(horizon, settings)


@torch.no_grad()
def acceptance_of(drafter: Drafter, trajectory: Trajectory, settings: ObjectiveSettings) -> float | None:
    """The expected acceptance of the drafter's drafts for a request: `Σ min(p, q)`, one minus the total variation, a
    mean over all places and steps, at the temperature of the request. `p` counts on the kept ids only and is
    normalised over the full vocabulary, `q` over the request's shortlist.

    Returns:
        From 0 to 1 (None: nothing can be scored).
    """
    horizon = unroll(drafter, trajectory, settings)
    return None if horizon is None else horizon.acceptance()


@torch.no_grad()
def choose_places(drafter: Drafter, trajectory: Trajectory, settings: ObjectiveSettings) -> Trajectory | None:
    """A request with its training places (`OnlineAlignment.fill`), chosen by the drafter's present outputs.

    Returns:
        The trajectory itself if all of it is used at once. None if it has no such place.
    """
    if settings.fill == "all" and not settings.waits_for_full_buffer:
        return trajectory
    horizon = unroll(drafter, trajectory, settings)
    if horizon is None:
        return None
    is_chosen = torch.zeros_like(trajectory.is_wrong)
    is_chosen[horizon.first_place :] = True if settings.fill == "all" else horizon.passes_gate(settings)
    return replace(trajectory, is_chosen=is_chosen) if bool(is_chosen.any()) else None
