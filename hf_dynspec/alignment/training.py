"""Learning from one request after the other, and what of it is drafted with. For one thread at a time."""

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from .budget import Budget
from .gate import Gate
from .learner import Learner
from .live_weights import LiveWeights
from .replay import ReplayBuffer, Trajectory
from .settings import OnlineAlignment
from .statistics import AlignmentStatistics

FIRST_ADAPTER = "default"


@dataclass(eq=False)
class Adapter:
    """What was learnt under one name, from which requests, and what came of it.

    Args:
        buffer: the requests.
        gate: whether what was learnt has earned to be served.
        random: draws requests of the buffer.
        updates: of what was learnt.
        weights: `Learner.adapter_state` while another one is learnt; None where there were no updates.
    """

    buffer: ReplayBuffer
    gate: Gate
    random: torch.Generator = field(repr=False)
    updates: int = 0
    weights: dict[str, torch.Tensor] | None = None


class Training:
    """Trains a copy of a drafter on requests, and writes what is learnt into the drafter while it has earned that.

    Args:
        drafter: what drafts; see `Drafter`.
        settings: what is learnt, and when.

    Attributes:
        adapters: by name, in the order in which they were added.
        active: the name of the one that is learnt and served.
        budget: what learning may cost.
        live: the drafter's weights.
        learner: trains.
        serves: whether what was learnt may be drafted with at all.

    Raises:
        ConfigurationError: the drafter has no modules of the names in `settings.modules`.
        NotImplementedError: the drafter cannot be copied.
    """

    def __init__(self, drafter: Any, settings: OnlineAlignment):
        self.settings = settings
        self._drafter = drafter
        self.live = LiveWeights(drafter)
        self.learner = Learner(drafter, settings)
        self.budget = Budget(settings.max_overhead)
        self.serves = False
        self._counts = AlignmentStatistics()
        # Seconds that learning from a request last took.
        self._last_cost = 0.0
        self.adapters: dict[str, Adapter] = {}
        self.active = FIRST_ADAPTER
        self.add(FIRST_ADAPTER)

    # Adapters ------------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Add an adapter of which nothing is known yet."""
        settings = self.settings
        self.adapters[name] = Adapter(
            ReplayBuffer(settings.buffer, settings.buffer_bytes),
            Gate(settings.gate_window, settings.gate_least),
            torch.Generator().manual_seed(settings.seed),
        )

    def activate(self, name: str) -> None:
        """Learn and serve another adapter."""
        before, after = self.adapters[self.active], self.adapters[name]
        if before.updates:
            before.weights = self.learner.adapter_state()
        self._take_up(after)
        self.active = name
        self.settle()

    def _take_up(self, adapter: Adapter) -> None:
        if adapter.weights is None:
            self.learner.reset()
        else:
            self.learner.load_adapter_state(adapter.weights)
        adapter.weights = None

    def forget(self) -> None:
        """Put back the drafter's own weights, and forget all that was learnt and all requests."""
        self.live.restore()
        self.learner.reset()
        self.adapters.clear()
        self.active = FIRST_ADAPTER
        self.add(FIRST_ADAPTER)
        self._counts = AlignmentStatistics()
        self.budget.clear()

    def forget_requests(self) -> None:
        """Forget all requests, and how what was learnt did on them."""
        for adapter in self.adapters.values():
            adapter.buffer.clear()
            adapter.gate.clear()

    def require_apart(self, target: nn.Module) -> None:
        """Make sure that nothing would be written to that is the target's, such as an embedding that it lends.

        Raises:
            ConfigurationError: something would be. Names it.
        """
        theirs = {one.untyped_storage().data_ptr() for one in target.parameters()}
        own = dict(self._drafter.module.named_parameters())
        for name in self.learner.base_weights():
            if own[name].untyped_storage().data_ptr() in theirs:
                raise ConfigurationError(
                    f"alignment would write to {name} of the drafter, which is the target's too. Name other modules in "
                    "OnlineAlignment(modules=…), or give the drafter weights of its own."
                )

    # Learning ------------------------------------------------------------------------------------------------------

    def learn_from(self, trajectory: Trajectory, name: str) -> None:
        """Remember a request; and if the time for it was earned, or nobody looks at the time, score what was learnt
        before on it, and learn from it.

        Args:
            trajectory: what the request left.
            name: the adapter that it is for. Of another than the active one it is remembered alone.
        """
        start = time.perf_counter()
        self.follow_changes()
        adapter = self.adapters.get(name)
        if adapter is None or not adapter.buffer.add(trajectory):
            return
        self._counts.requests += 1
        if name == self.active and (self.settings.synchronous or self.budget.affords(self._last_cost)):
            self._score(adapter, trajectory)
            self.update()
            self._last_cost = time.perf_counter() - start
        self.budget.spend(time.perf_counter() - start)

    def _score(self, adapter: Adapter, trajectory: Trajectory) -> None:
        """Hold what was learnt against the drafter itself. Where nothing was, they say the same."""
        scores = self.learner.acceptance(trajectory) if self.settings.gate and adapter.updates else None
        if scores is not None:
            adapter.gate.record(*scores)

    def update(self) -> None:
        """Train on what is remembered, and settle what is served."""
        adapter, counts = self.adapters[self.active], self._counts
        dropped = self.learner.dropped
        for _ in range(self.settings.steps):
            loss = self.learner.step(adapter.buffer.batch(self.settings.batch, adapter.random))
            counts.loss = counts.loss if loss is None else loss
        counts.dropped += self.learner.dropped - dropped
        adapter.updates += 1
        counts.updates += 1
        was_served = self.live.is_served
        if self.settings.gate and adapter.gate.is_hopeless:
            self._give_up(adapter)
        self.settle()
        counts.kept += self.live.is_served
        counts.rolled_back += was_served and not self.live.is_served

    def _give_up(self, adapter: Adapter) -> None:
        """Begin anew, with the requests that there are."""
        self.learner.reset()
        adapter.gate.clear()
        adapter.updates = 0
        self._counts.rolled_back += not self.live.is_served

    def settle(self) -> None:
        """Draft with what was learnt where it has earned that, and otherwise with the drafter's own weights."""
        adapter = self.adapters[self.active]
        has_earned = adapter.updates > 0 and (adapter.gate.is_open or not self.settings.gate)
        weights = self.learner.weights() if has_earned and self.serves else {}
        # Numbers that are none would spoil the drafts, and in 16 bits some are too large.
        if weights and all(bool(one.isfinite().all()) for one in weights.values()):
            self.live.serve(weights)
        else:
            self.live.restore()

    def follow_changes(self) -> None:
        """Begin anew where somebody has changed the drafter's weights."""
        if not self.live.were_changed():
            return
        warnings.warn(
            "the drafter's weights were changed while it is being aligned: what was learnt is forgotten, and learning "
            "begins anew from what is there.",
            stacklevel=2,
        )
        self.live.restore()
        self.live.accept()
        self.learner = Learner(self._drafter, self.settings)
        for adapter in self.adapters.values():
            adapter.weights, adapter.updates = None, 0
            adapter.gate.clear()

    @property
    def statistics(self) -> AlignmentStatistics:
        """What has been done."""
        means = self.adapters[self.active].gate.means
        return replace(
            self._counts,
            acceptance_before=means and means[0],
            acceptance_after=means and means[1],
            is_served=self.live.is_served,
            seconds=self.budget.spent,
            generation_seconds=self.budget.earned_on,
            longest_swap=self.live.longest_swap,
            buffer_bytes=sum(one.buffer.nbytes for one in self.adapters.values()),
            training_bytes=self.learner.nbytes,
        )
