"""The weights that are drafted with: others are written in their place between drafts, and they come back."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

# Seconds in which a writer waits for a moment in which nobody drafts. After that nobody begins to, until it has written.
_PATIENCE = 1.0


class ServedDrafter(Protocol):
    """What is used here of a drafter: see `drafters.base.Drafter`."""

    module: nn.Module

    def write_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...

    def weights_stamp(self) -> dict[str, tuple[nn.Parameter, list[Any]]]: ...


class DraftingLock:
    """Held by any number of drafts at once, or by one who writes what they read. A draft is entered as a context.

    Who writes waits for a moment in which nobody drafts, as while the target verifies, and keeps nobody from drafting
    meanwhile: a draft waits for no more than the writing.
    """

    def __init__(self):
        self._condition = threading.Condition()
        self._drafts = 0
        self._is_closed = False

    def __enter__(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_closed)
            self._drafts += 1

    def __exit__(self, *raised: object) -> None:
        with self._condition:
            self._drafts -= 1
            if not self._drafts:
                self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._condition:
            try:
                self._is_closed = not self._condition.wait_for(lambda: not self._drafts, _PATIENCE)
                self._condition.wait_for(lambda: not self._drafts)
                yield
            finally:
                self._is_closed = False
                self._condition.notify_all()


class LiveWeights:
    """A drafter's own weights, and others that may stand in their place.

    Args:
        drafter: what drafts, with its own weights.

    Attributes:
        lock: to be held by every draft.
        longest_write: seconds that a draft may have had to wait for others, at most.
    """

    def __init__(self, drafter: ServedDrafter):
        self.lock = DraftingLock()
        self.longest_write = 0.0
        self._drafter = drafter
        self._stamp = drafter.weights_stamp()
        # By name: those that others stand in the place of.
        self._base: Mapping[str, torch.Tensor] = {}

    @property
    def is_served(self) -> bool:
        """Whether others than the drafter's own are drafted with."""
        return bool(self._base)

    def were_changed(self) -> bool:
        """Whether anybody but this has changed parameters, or put others in their place."""
        stamp = self._drafter.weights_stamp()
        return stamp.keys() != self._stamp.keys() or any(_differ(stamp[name], self._stamp[name]) for name in stamp)

    def write(self, weights: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> None:
        """Draft with others from the next draft on.

        Args:
            weights: by the names of parameters.
            base: the drafter's own of the same names, to be put back.
        """
        self._write(weights)
        self._base = base

    def restore(self) -> None:
        """Draft with the drafter's own again. What somebody else has written meanwhile stays."""
        base, self._base = self._base, {}
        if not base:
            return
        # By the parameters themselves, as peft's layers change the names of those that they lie around.
        now = {id(parameter): (name, marks) for name, (parameter, marks) in self._drafter.weights_stamp().items()}
        own: dict[str, torch.Tensor] = {}
        for name, tensor in base.items():
            parameter, marks = self._stamp[name]
            name_now, marks_now = now.get(id(parameter), (name, None))
            if marks_now == marks:
                own[name_now] = tensor
        if own:
            self._write(own)

    def accept(self) -> None:
        """Take what is there now for the drafter's own."""
        self._base = {}
        self._stamp = self._drafter.weights_stamp()

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        with self.lock.writing():
            start = time.perf_counter()
            self._drafter.write_weights(weights)
            self.longest_write = max(self.longest_write, time.perf_counter() - start)
            self._stamp = self._drafter.weights_stamp()


def _differ(one: tuple[nn.Parameter, list[Any]], other: tuple[nn.Parameter, list[Any]]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]
