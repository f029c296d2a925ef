"""A drafter learns from what verification said while it generates: replay, objectives, updates."""

from .learner import Learner
from .objectives import OBJECTIVES, acceptance_of, loss_of
from .replay import ReplayBuffer, Trajectory
from .settings import OnlineAlignment

__all__ = ["OBJECTIVES", "Learner", "OnlineAlignment", "ReplayBuffer", "Trajectory", "acceptance_of", "loss_of"]
