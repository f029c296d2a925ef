"""Learning from one request after the other, and what of it is drafted with. For one thread at a time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, warn_user
from .adapter import FIRST_ADAPTER, Adapter
from .budget import Budget
from .gate import Gate
from .learner import Learner
from .live_weights import LiveWeights
from .replay import FillingBuffer, ReplayBuffer, Trajectory
from .replay_state import requests_from, requests_state
from .settings import OnlineAlignment
from .statistics import AlignmentStatistics


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
        ConfigurationError: the drafter has no modules of the names in `settings.modules`, or has adapters already.
        NotImplementedError: the drafter cannot be copied.
    """

    def __init__(self, drafter: Any, settings: OnlineAlignment):
        self.settings = settings
        self._drafter = drafter
        self.live = LiveWeights(drafter)
        self.learner = _learner_of(drafter, settings)
        self.budget = Budget(settings.max_overhead)
        self.serves = False
        self._counts = AlignmentStatistics()
        # Seconds that learning from a request last took.
        self._last_cost = 0.0
        self.adapters = {FIRST_ADAPTER: self._new_adapter()}
        self.active = FIRST_ADAPTER

    @property
    def active_adapter(self) -> Adapter:
        """The adapter that is learnt and served."""
        return self.adapters[self.active]

    # Adapters ------------------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Add an adapter of which nothing is known yet."""
        self.adapters[name] = self._new_adapter()

    def _new_adapter(self) -> Adapter:
        settings = self.settings
        kind = FillingBuffer if settings.waits_for_full_buffer else ReplayBuffer
        buffer = kind(settings.buffer, settings.buffer_bytes)
        random = torch.Generator().manual_seed(settings.seed)
        return Adapter(buffer, Gate(settings.gate_window, settings.gate_least), random)

    def activate(self, name: str) -> None:
        """Learn and serve another adapter."""
        self.follow_changes()
        before, after = self.active_adapter, self.adapters[name]
        if before.updates:
            before.weights = self.learner.adapter_state()
        self._load_weights(after.weights)
        after.weights = None
        self.active = name
        self.settle()

    def state(self, include_buffer: bool = False) -> dict[str, Any]:
        """All that was learnt by adapter: tensors, how many updates it took, and how it did; requests where asked."""
        adapters = {}
        for name, adapter in self.adapters.items():
            weights = self.learner.adapter_state() if name == self.active else dict(adapter.weights or {})
            scores = [list(one) for one in adapter.gate.scores]
            adapters[name] = {
                "weights": weights if adapter.updates else {},
                "updates": adapter.updates,
                "scores": scores,
            }
            if include_buffer:
                adapters[name]["requests"] = requests_state(adapter.buffer)
        return {"active": self.active, "adapters": adapters}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; other requests than those that it holds are forgotten.

        Raises:
            ConfigurationError: it is of other settings or another drafter. Nothing was changed.
        """
        self.follow_changes()
        weights = self.learner.adapter_state()
        try:
            self._load(state)
        except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.learner.load_adapter_state(weights)
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"this is no state of an aligner: {error!r:.200}. Give state_dict()'s."
            ) from error
        self.settle()

    def _load(self, state: Mapping[str, Any]) -> None:
        adapters, active = dict(state["adapters"]), state["active"]
        # Each is tried, so that none turns out to be wrong when it is switched to.
        for name in sorted(adapters, key=lambda name: name == active):
            self._load_weights(adapters[name]["weights"])
        held: dict[str, Adapter] = {}
        for name, one in adapters.items():
            held[name] = self._new_adapter()
            held[name].updates = int(one["updates"])
            held[name].gate.scores = [(float(before), float(after)) for before, after in one["scores"]]
            held[name].weights = None if name == active else dict(one["weights"]) or None
            self.load_requests(one.get("requests", ()), held[name].buffer)
        if active not in held:
            raise KeyError(active)
        self.adapters, self.active = held, active

    def load_saved(
        self, weights: Mapping[str, torch.Tensor], requests: Sequence[Mapping[str, torch.Tensor]] | None = None
    ) -> None:
        """Go on from weights that were learnt before, in the active adapter.

        Args:
            weights: as `Learner.adapter_state`.
            requests: what `requests_state` gave, in the place of those that are remembered. None: these stay.

        Raises:
            ConfigurationError: they are of another drafter, or of other settings. Nothing was changed.
        """
        self.follow_changes()
        adapter, before = self.active_adapter, self.learner.adapter_state()
        self.learner.load_adapter_state(dict(weights))
        if requests is not None:
            buffer = self._new_adapter().buffer
            try:
                self.load_requests(requests, buffer)
            except ConfigurationError:
                self.learner.load_adapter_state(before)
                raise
            adapter.buffer = buffer
        adapter.gate.clear()
        adapter.updates = max(1, adapter.updates)
        self.settle()

    def load_requests(self, state: Sequence[Mapping[str, torch.Tensor]], buffer: ReplayBuffer) -> None:
        """Add what `requests_state` gave to a buffer.

        Raises:
            ConfigurationError: it is no such state, or of another drafter. Nothing was added.
        """
        drafter = self.learner.drafter
        device = next(drafter.module.parameters()).device
        requests = requests_from(state, drafter.num_embeddings, bool(drafter.reads), device)
        try:
            chosen = [self.learner.chosen_again(one) for one in requests]
        except RuntimeError as error:
            raise ConfigurationError(f"the requests are of another drafter: {error!s:.200}") from error
        for one in chosen:
            if one is not None:
                buffer.add(one)

    def _load_weights(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        if weights:
            self.learner.load_adapter_state(dict(weights))
        else:
            self.learner.reset()

    def forget(self) -> None:
        """Put back the drafter's own weights, and forget all that was learnt and all requests."""
        self.live.restore()
        self.learner.reset()
        self.adapters, self.active = {FIRST_ADAPTER: self._new_adapter()}, FIRST_ADAPTER
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
                    f"alignment would change {name} of the drafter, which is the target's too. Name other modules "
                    "in OnlineAlignment(modules=…), or give the drafter weights of its own."
                )

    # Learning ------------------------------------------------------------------------------------------------------

    def remember(self, trajectory: Trajectory, adapter: Adapter) -> bool:
        """Keep a request for an adapter, unless that was forgotten since the request began, or nothing of it is to be
        learnt from (`OnlineAlignment.fill`; by what the active adapter has learnt).

        Returns:
            Whether it is kept.
        """
        if not any(one is adapter for one in self.adapters.values()):
            return False
        chosen = self.learner.chosen(trajectory)
        is_kept = chosen is not None and adapter.buffer.add(chosen)
        self._counts.requests += is_kept
        return is_kept

    def learn_from(self, trajectory: Trajectory, adapter: Adapter) -> None:
        """Remember a request; and if an update is due, score what was learnt before on it, and learn from it.

        Args:
            trajectory: what the request left.
            adapter: what it is learnt into. Of another than the active one it is remembered alone.
        """
        start = time.perf_counter()
        self.follow_changes()
        if self.remember(trajectory, adapter) and self._is_due(adapter):
            self._score(adapter, trajectory)
            self.update()
            # One request may fill the buffer several times.
            while self.settings.waits_for_full_buffer and adapter.buffer.is_full:
                self.update()
            self._last_cost = time.perf_counter() - start
        self.budget.spend(time.perf_counter() - start)

    def _is_due(self, adapter: Adapter) -> bool:
        """Whether to update now: the buffer is full, or the time for it was earned, or nobody looks at the time."""
        if adapter is not self.active_adapter:
            return False
        if self.settings.waits_for_full_buffer:
            return adapter.buffer.is_full
        return self.settings.synchronous or self.budget.affords(self._last_cost)

    def _score(self, adapter: Adapter, trajectory: Trajectory) -> None:
        """Hold what was learnt against the drafter itself. Where nothing was, they say the same."""
        scores = self.learner.acceptance(trajectory) if self.settings.gate and adapter.updates else None
        if scores is not None:
            adapter.gate.record(*scores)

    def update(self) -> None:
        """Train on what is remembered, and settle what is served."""
        adapter, counts = self.active_adapter, self._counts
        dropped = self.learner.dropped
        taken = adapter.buffer.take() if self.settings.waits_for_full_buffer else None
        for _ in range(self.settings.steps):
            loss = self.learner.step(taken or adapter.buffer.batch(self.settings.batch, adapter.random))
            counts.loss = counts.loss if loss is None else loss
        counts.dropped += self.learner.dropped - dropped
        adapter.updates += 1
        counts.updates += 1
        counts.training_bytes = self.learner.nbytes
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
        adapter = self.active_adapter
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
        warn_user(
            "the drafter's weights were changed while it is being aligned: what was learnt is forgotten, and learning "
            "begins anew from what is there."
        )
        self.live.restore()
        self.live.accept()
        self.learner = _learner_of(self._drafter, self.settings)
        for adapter in self.adapters.values():
            adapter.weights, adapter.updates = None, 0
            adapter.gate.clear()

    @property
    def statistics(self) -> AlignmentStatistics:
        """What has been done. Another thread may ask while one learns."""
        means = self.active_adapter.gate.means
        return replace(
            self._counts,
            acceptance_before=means and means[0],
            acceptance_after=means and means[1],
            is_served=self.live.is_served,
            seconds=self.budget.spent,
            generation_seconds=self.budget.earned_on,
            longest_swap=self.live.longest_swap,
            longest_swap_work=self.live.longest_swap_work,
            buffer_bytes=sum(one.buffer.nbytes for one in list(self.adapters.values())),
        )


def _learner_of(drafter: Any, settings: OnlineAlignment) -> Learner:
    """What trains a copy of a drafter. Other adapters in it would be trained too, or lie between it and its own."""
    for name, module in drafter.module.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise ConfigurationError(
                f"the drafter has adapters of peft, as in {name}, and learns without. Merge them into it with peft's "
                "merge_and_unload() before it is aligned."
            )
    return Learner(drafter, settings)
