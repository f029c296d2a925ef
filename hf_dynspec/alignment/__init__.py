"""A drafter learns from what verification said while it generates: replay, objectives, updates."""

from .learner import Learner
from .objectives import OBJECTIVES, acceptance_of, choose_places, loss_of
from .replay import FillingBuffer, ReplayBuffer, Trajectory
from .settings import OnlineAlignment

__all__ = [
    "OBJECTIVES",
    "FillingBuffer",
    "Learner",
    "OnlineAlignment",
    "ReplayBuffer",
    "Trajectory",
    "acceptance_of",
    "choose_places",
    "loss_of",
]
