"""The drafter's weights: other weights take their place between drafts, and the drafter's own come back."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..devices import has_graphs

# Seconds to wait for a moment without drafts. After that no draft may begin.
_PATIENCE = 1.0


class ServedDrafter(Protocol):
    """The part of `drafters.base.Drafter` that is used here."""

    module: nn.Module

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Prepare other weights; returns the function that puts them in place."""

    def weights_stamp(self) -> dict[str, tuple[nn.Parameter, list[Any]]]:
        """The parameters by name, each with marks that change with it."""


class DraftingLock:
    """A lock that any number of drafts hold at once, or one writer of weights. A draft enters it as a context.

    A writer waits for a moment without drafts, such as a verification, and lets drafts begin meanwhile. So a draft
    waits for the change of weights only.
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
    """A drafter's own weights, and others that may take their place.

    Args:
        drafter: the drafter, with its own weights.

    Attributes:
        lock: every draft must hold it.
        longest_swap: the most seconds that a draft may have waited for new weights.
        longest_swap_work: the most seconds of processor time of a swap, which other processes do not change.
    """

    def __init__(self, drafter: ServedDrafter):
        self.lock = DraftingLock()
        self.longest_swap = self.longest_swap_work = 0.0
        self._drafter = drafter
        self._stamp = drafter.weights_stamp()
        # By name: the replaced weights, and those that replace them.
        self._own: dict[str, torch.Tensor] = {}
        self._served: dict[str, torch.Tensor] = {}

    @property
    def is_served(self) -> bool:
        """Whether weights other than the drafter's own are in place."""
        return bool(self._own)

    def were_changed(self) -> bool:
        """Whether somebody else has changed or replaced parameters."""
        stamp = self._drafter.weights_stamp()
        return stamp.keys() != self._stamp.keys() or any(_differ(stamp[name], self._stamp[name]) for name in stamp)

    def serve(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put other weights in place, from the next draft on.

        Args:
            weights: by parameter name, with the parameters' dtypes and devices. They are not copied.
        """
        own = {name: self._stamp[name][0].data for name in weights if name not in self._own}
        if has_graphs(self._device):
            # Numbers are written to where the own ones lie.
            own = {name: tensor.clone() for name, tensor in own.items()}
        self._put(weights)
        self._remember(weights)
        self._own |= own
        self._served = {name: self._stamp[name][0].data for name in self._own}

    # Tensors of inference mode could not be trained any more.
    @torch.inference_mode(False)
    def restore(self) -> None:
        """Put the drafter's own weights back, with the present dtype and device. Weights that somebody else has
        written meanwhile stay."""
        own, served, self._own, self._served = self._own, self._served, {}, {}
        if not own:
            return
        # By identity, as peft's layers change the names of parameters.
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
        """Accept the present weights as the drafter's own."""
        self._own, self._served = {}, {}
        self._stamp = self._drafter.weights_stamp()

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        put, device = self._drafter.prepare_weights(weights), self._device
        on_cuda = device.type == "cuda"
        if on_cuda:
            # The new numbers may still be computed.
            torch.cuda.current_stream(device).synchronize()
        # Kept until nobody waits, as freeing much memory takes milliseconds.
        replaced = [parameter.data for parameter in self._drafter.module.parameters()]
        with self.lock.writing():
            start, work = time.perf_counter(), time.thread_time()
            if on_cuda:
                # Drafts may still read the old ones. No graph is being recorded, which would hold the lock, and which
                # a wait for the whole device would break.
                torch.cuda.synchronize(device)
            put()
            if on_cuda:
                torch.cuda.current_stream(device).synchronize()
            self.longest_swap_work = max(self.longest_swap_work, time.thread_time() - work)
            self.longest_swap = max(self.longest_swap, time.perf_counter() - start)
        del replaced

    @property
    def _device(self) -> torch.device:
        return next(self._drafter.module.parameters()).device

    def _remember(self, names: Iterable[str]) -> None:
        """Note the present values of these parameters. Changes of others still count as changes."""
        now = self._drafter.weights_stamp()
        self._stamp |= {name: now[name] for name in names}


def _differ(one: tuple[nn.Parameter, list[Any]], other: tuple[nn.Parameter, list[Any]]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


def _was_moved(now: torch.Tensor, served: torch.Tensor) -> bool:
    """Whether these are the same numbers, moved or cast, and not overwritten in place."""
    return now.data_ptr() != served.data_ptr() and now.shape == served.shape and torch.equal(now, served.to(now))
