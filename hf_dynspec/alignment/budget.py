"""What training may take of the time."""

import threading


class Budget:
    """Seconds that may be spent: a share of those that generation takes, which add up. Shareable between threads.

    Args:
        share: of the time of generation.

    Attributes:
        earned_on: seconds of generation so far.
        spent: seconds that were spent so far.
    """

    def __init__(self, share: float):
        self._share = share
        # Whoever ends a request may be the garbage collector, at any time.
        self._lock = threading.RLock()
        self.earned_on = self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """Count seconds of generation."""
        with self._lock:
            self.earned_on += seconds

    def spend(self, seconds: float) -> None:
        """Count seconds that were spent."""
        with self._lock:
            self.spent += seconds

    def affords(self, seconds: float) -> bool:
        """Whether so many seconds may be spent now."""
        with self._lock:
            return self.spent + seconds <= self._share * self.earned_on

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self.earned_on = self.spent = 0.0
