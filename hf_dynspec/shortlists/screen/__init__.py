"""SVD-softmax: a low-rank factor of the drafter's head that tells at each draft step which tokens to score exactly."""

from .factor import ScreenFactor
from .policy import ScreenShortlist

__all__ = ["ScreenFactor", "ScreenShortlist"]
