"""The weights that are drafted with: others are put in their place between drafts, and they come back."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

# Seconds that are spent waiting for a moment in which nobody drafts. After them nobody begins to.
_PATIENCE = 1.0


class ServedDrafter(Protocol):
    """What is used here of a drafter: see `drafters.base.Drafter`."""

    module: nn.Module

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Make ready to draft with other numbers; returns what puts them in place."""

    def weights_stamp(self) -> dict[str, tuple[nn.Parameter, list[Any]]]:
        """The parameters by name, and what tells each from a changed one."""


class DraftingLock:
    """Held by any number of drafts at once, or by one who changes what they read. A draft enters it as a context.

    Who changes it waits for a moment in which nobody drafts, as while the target verifies, and keeps nobody from
    drafting meanwhile: a draft waits for no more than the change.
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
        longest_swap: seconds that a draft may have had to wait for others, at most.
        longest_swap_work: seconds of processor time that one took, at most: what other processes do adds nothing.
    """

    def __init__(self, drafter: ServedDrafter):
        self.lock = DraftingLock()
        self.longest_swap = self.longest_swap_work = 0.0
        self._drafter = drafter
        self._stamp = drafter.weights_stamp()
        # By name: those that others stand in the place of, and these others.
        self._own: dict[str, torch.Tensor] = {}
        self._served: dict[str, torch.Tensor] = {}

    @property
    def is_served(self) -> bool:
        """Whether others than the drafter's own are drafted with."""
        return bool(self._own)

    def were_changed(self) -> bool:
        """Whether anybody but this has changed parameters, or put others in their place."""
        stamp = self._drafter.weights_stamp()
        return stamp.keys() != self._stamp.keys() or any(_differ(stamp[name], self._stamp[name]) for name in stamp)

    def serve(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Draft with others from the next draft on.

        Args:
            weights: by the names of parameters, of their dtypes and on their devices. They are not copied.
        """
        own = {name: self._stamp[name][0].data for name in weights if name not in self._own}
        self._put(weights)
        self._remember(weights)
        self._own |= own
        self._served = {name: self._stamp[name][0].data for name in self._own}

    # What was made in inference mode nobody could train any more, and the drafter's owner may want to.
    @torch.inference_mode(False)
    def restore(self) -> None:
        """Draft with the drafter's own again, in the dtype and where the others lie by now. What somebody else has
        written meanwhile stays."""
        own, served, self._own, self._served = self._own, self._served, {}, {}
        if not own:
            return
        # By the parameters themselves, as peft's layers change the names of those that they lie around.
        now = {id(parameter): (name, marks) for name, (parameter, marks) in self._drafter.weights_stamp().items()}
        back: dict[str, torch.Tensor] = {}
        untouched = set()
        for name, tensor in own.items():
            parameter, marks = self._stamp[name]
            name_now, marks_now = now.get(id(parameter), (name, None))
            if marks_now == marks and name_now == name:
                untouched.add(name)
            if marks_now == marks or (marks_now is not None and _was_moved(parameter.data, served[name])):
                back[name_now] = tensor.to(parameter.data)
        self._put(back)
        self._remember(untouched)

    def accept(self) -> None:
        """Take what is there now for the drafter's own."""
        self._own, self._served = {}, {}
        self._stamp = self._drafter.weights_stamp()

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        put = self._drafter.prepare_weights(weights)
        device = next(self._drafter.module.parameters()).device
        if device.type == "cuda":
            # Who drafts in another stream must find these numbers there.
            torch.cuda.current_stream(device).synchronize()
        # Held until nobody waits, as giving back much memory takes milliseconds.
        replaced = [parameter.data for parameter in self._drafter.module.parameters()]
        with self.lock.writing():
            start, work = time.perf_counter(), time.thread_time()
            put()
            self.longest_swap_work = max(self.longest_swap_work, time.thread_time() - work)
            self.longest_swap = max(self.longest_swap, time.perf_counter() - start)
        if device.type == "cuda":
            # What was given to the device before may read them still.
            torch.cuda.synchronize(device)
        del replaced

    def _remember(self, names: Iterable[str]) -> None:
        """Take what these parameters hold for known. What somebody has done to others stays a change."""
        now = self._drafter.weights_stamp()
        self._stamp |= {name: now[name] for name in names}


def _differ(one: tuple[nn.Parameter, list[Any]], other: tuple[nn.Parameter, list[Any]]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


def _was_moved(now: torch.Tensor, served: torch.Tensor) -> bool:
    """Whether these are the same numbers, moved or cast, and not written to where they lay."""
    return now.data_ptr() != served.data_ptr() and now.shape == served.shape and torch.equal(now, served.to(now))
