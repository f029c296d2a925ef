"""SVD-softmax: a low-rank factor of the drafter's head chooses the tokens that each draft step scores exactly."""

from .factor import ScreenFactor
from .policy import ScreenShortlist

__all__ = ["ScreenFactor", "ScreenShortlist"]
