"""An adapter: what is learned under one name. Its gate decides if it is served, a budget limits learning."""

import threading
from collections import deque
from collections.abc import Iterable

import torch

from .replay import ReplayBuffer
from .settings import OnlineAlignment

FIRST_ADAPTER = "default"
# Learned weights are served if they gain more than this share of the drafter's own acceptance. A smaller gain on so
# few requests may be chance.
WORTHWHILE = 0.03
# Learned weights are given up if they lose more than this share.
HOPELESS = 0.1


class Gate:
    """Compares the learned weights with the drafter's own, on requests before they are trained on.

    Args:
        window: the number of last requests to compare on.
        least: the number of requests before the gate can open.
    """

    def __init__(self, window: int, least: int):
        self._least = least
        self._scores: deque[tuple[float, float]] = deque(maxlen=window)

    def record(self, before: float, after: float) -> None:
        """Add the acceptance of a request, from 0 to 1, with the drafter's own weights and with the learned ones."""
        self._scores.append((before, after))

    def clear(self) -> None:
        """Forget all scores."""
        self._scores.clear()

    @property
    def scores(self) -> list[tuple[float, float]]:
        """The scores of the last requests."""
        return list(self._scores)

    @scores.setter
    def scores(self, scores: Iterable[tuple[float, float]]) -> None:
        self._scores.clear()
        self._scores.extend(scores)

    @property
    def means(self) -> tuple[float, float] | None:
        """The mean scores, before and after; None without any."""
        # A copy, as another thread may record meanwhile.
        scores = self.scores
        if not scores:
            return None
        before, after = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return before, after

    @property
    def is_open(self) -> bool:
        """Whether the learned weights are served."""
        return self.why_closed is None

    @property
    def why_closed(self) -> str | None:
        """Why the learned weights are not served; None if they are."""
        if len(self._scores) < self._least:
            return f"{len(self._scores)} of gate_least={self._least} requests are scored"
        before, after = self.means
        if after > (1 + WORTHWHILE) * before:
            return None
        return f"it is served from {1 + WORTHWHILE:g} times the acceptance"

    @property
    def is_hopeless(self) -> bool:
        """Whether learning should begin anew. Never before the window is full."""
        if len(self._scores) < self._scores.maxlen:
            return False
        before, after = self.means
        return not after >= (1 - HOPELESS) * before


class Adapter:
    """What is learned under one name, such as a domain's or a user's.

    Args:
        settings: of the gate and the seed.
        buffer: the remembered requests.

    Attributes:
        gate: decides whether it is served.
        random: draws requests from the buffer.
        updates: the number of updates.
        weights: `Learner.adapter_state` while another adapter is active; None without updates.
    """

    def __init__(self, settings: OnlineAlignment, buffer: ReplayBuffer):
        self.buffer = buffer
        self.gate = Gate(settings.gate_window, settings.gate_least)
        self.random = torch.Generator().manual_seed(settings.seed)
        self.updates = 0
        self.weights: dict[str, torch.Tensor] | None = None


class Budget:
    """Seconds that learning may take: a share of the seconds of generation. Shareable between threads.

    Args:
        share: the share of the seconds of generation.

    Attributes:
        earned_on: seconds of generation so far.
        spent: seconds of learning so far.
    """

    def __init__(self, share: float):
        self._share = share
        # The garbage collector may end a request at any time.
        self._lock = threading.RLock()
        self.earned_on = self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """Add seconds of generation."""
        with self._lock:
            self.earned_on += seconds

    def spend(self, seconds: float) -> None:
        """Add seconds of learning."""
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
