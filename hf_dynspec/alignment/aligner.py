"""Online alignment of an assistant's drafter: requests leave trajectories, a copy of the drafter learns from them, and
its weights are served while they have proved to draft better."""

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..devices import compute_alone
from ..errors import ConfigurationError, shown_value, warn_user
from ..fields import require_name
from ..modeling.parts import is_memory
from .adapter import FIRST_ADAPTER, Adapter, Budget
from .learner import Learner
from .live_weights import DraftingLock, LiveWeights
from .recording import Recorder
from .replay import FillingBuffer, ReplayBuffer, Trajectory, requests_from, requests_state
from .saved import push_learnt, read_learnt, read_requests, save_learnt
from .settings import OnlineAlignment
from .statistics import AlignmentStatistics

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

_Method = TypeVar("_Method", bound=Callable[..., Any])

# The aligner of each model: two aligners would take each other's weights for changes by the user.
_aligner_of: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Aligner]]" = weakref.WeakKeyDictionary()


def _alone(method: _Method) -> _Method:
    """Run a method while nobody learns, with gradients, whatever mode of torch its caller is in."""

    @functools.wraps(method)
    def run(self: "Aligner", *args: Any, **kwargs: Any) -> Any:
        with self._learning, torch.inference_mode(False), torch.enable_grad():
            return method(self, *args, **kwargs)

    return run


class Aligner:
    """Aligns a drafter with its target on finished requests. Made by `DynSpecAssistant(…, alignment=…)`.

    A copy of the drafter in fp32 learns. While it has been measured to draft better than the drafter itself
    (`OnlineAlignment.gate`), its weights take the place of the drafter's own, in the drafter's model: between two
    drafts, all at once. `reset`, unbinding the assistant and dropping it put back the drafter's own weights, bit for
    bit. A drafter of 16 bits rounds the weights, so small changes show once they have added up in the copy. The target
    is never written to. Requests may run in several threads, and copies of an assistant share its aligner.

    An adapter is what is learned under one name, such as a domain's or a user's, with its own requests and its own
    gate. An error while learning is warned of once and turns learning off; generation goes on.

    Args:
        drafter: the drafter. Its weights are read once, for the copy.
        settings: what is learned, and when.
        before: the aligner that this one replaces, if any.

    Attributes:
        settings: as given.
        learner: trains the copy.
        live: the drafter's weights.
        budget: the time that learning may take.

    Raises:
        ConfigurationError: the drafter has no such modules or has adapters already, or another assistant aligns it.
        NotImplementedError: the drafter cannot be copied.
    """

    def __init__(self, drafter: Any, settings: OnlineAlignment, before: "Aligner | None" = None):
        if not isinstance(settings, OnlineAlignment):
            raise ConfigurationError(f"alignment must be an OnlineAlignment or None, got {shown_value(settings)}.")
        self.settings = settings
        self._drafter, self._module = drafter, drafter.module
        self._require_unclaimed(before)
        self.live = LiveWeights(drafter)
        self.learner = _learner_of(drafter, settings)
        self.budget = Budget(settings.max_overhead)
        self._counts = AlignmentStatistics()
        # Seconds that scoring a request and the first step of an update took last.
        self._least_cost = 0.0
        self._adapters = {FIRST_ADAPTER: self._new_adapter()}
        self._active = FIRST_ADAPTER
        # Whether learned weights may be served at all.
        self._serves = False
        # Held while training, and while anything that is trained changes.
        self._learning = threading.RLock()
        # Finished requests, each with a GPU event to wait for; or the error of a recording.
        self._inbox: deque[tuple[Trajectory, Adapter, torch.cuda.Event | None] | Exception] = deque()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._target: Callable[[], nn.Module | None] = lambda: None
        # Serves until this one is attached.
        self._before: Callable[[], Aligner | None] = (lambda: None) if before is None else weakref.ref(before)
        self._is_paused = False
        self._error: str | None = None
        self._executor = None
        if settings.background:
            self._executor = ThreadPoolExecutor(1, "hf_dynspec alignment", initializer=compute_alone)
        self._job: Future[None] | None = None
        self._device = next(drafter.module.parameters()).device
        self._stream: torch.cuda.Stream | None = None
        # Not at exit: nobody drafts any more.
        weakref.finalize(self, self.live.restore).atexit = False

    # For users -----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> AlignmentStatistics:
        """What has been done so far, and what it cost. Another thread may ask while one learns."""
        means = self.adapter.gate.means
        return replace(
            self._counts,
            acceptance_before=means and means[0],
            acceptance_after=means and means[1],
            is_served=self.live.is_served,
            why_not_served=self.adapter.gate.why_closed if self.settings.gate and not self.live.is_served else None,
            seconds=self.budget.spent,
            generation_seconds=self.budget.earned_on,
            longest_swap=self.live.longest_swap,
            longest_swap_work=self.live.longest_swap_work,
            buffer_bytes=sum(one.buffer.nbytes for one in list(self._adapters.values())),
            error=self._error,
        )

    def pause(self) -> None:
        """Record and learn nothing until `resume`. Served weights stay."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    @_alone
    def reset(self) -> None:
        """Forget everything that was learned, all adapters and all requests. The drafter has its own weights again. If
        an error has turned learning off, it begins anew."""
        self._inbox.clear()
        self.live.restore()
        self.learner.reset()
        self._adapters, self._active = {FIRST_ADAPTER: self._new_adapter()}, FIRST_ADAPTER
        self._counts = AlignmentStatistics()
        self.budget.clear()
        self._serves, self._error = bool(self._users), None

    @_alone
    def update_now(self) -> float | None:
        """Learn from the finished requests, whatever it costs. Errors are raised.

        Returns:
            The loss before the last step; None if there was nothing to learn from.
        """
        self._follow_changes()
        while self._inbox:
            self._remember(*self._take_out())
        if not len(self.adapter.buffer):
            return None
        start = time.perf_counter()
        self._update()
        while self.settings.waits_for_full_buffer and len(self.adapter.buffer):
            self._update()
        self.budget.spend(time.perf_counter() - start)
        return self._counts.loss

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of all adapters, in the order in which they were added."""
        return tuple(self._adapters)

    @property
    def active_adapter(self) -> str:
        """The name of the adapter that learns and is served."""
        return self._active

    @property
    def adapter(self) -> Adapter:
        """The adapter that learns and is served."""
        return self._adapters[self._active]

    @_alone
    def add_adapter(self, name: str) -> None:
        """Add an adapter that has learned nothing yet. `set_adapter` switches to it.

        Raises:
            ConfigurationError: there is one of that name, or it is no name.
        """
        require_name("adapter", name)
        if name in self._adapters:
            raise ConfigurationError(f"there is an adapter {shown_value(name)} already. Call set_adapter.")
        self._adapters[name] = self._new_adapter()

    @_alone
    def set_adapter(self, name: str) -> None:
        """Learn and serve another adapter from the next request on. Running requests are learned into the adapter that
        was active when they began.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in self._adapters:
            names = ", ".join(map(shown_value, self._adapters))
            raise ConfigurationError(f"there is no adapter {shown_value(name)} among {names}. Call add_adapter first.")
        if name == self._active:
            return
        self._follow_changes()
        before, after = self.adapter, self._adapters[name]
        if before.updates:
            before.weights = self.learner.adapter_state()
        self._load_weights(after.weights)
        after.weights = None
        self._active = name
        self._settle()

    @_alone
    def delete_adapter(self, name: str) -> None:
        """Forget an adapter and its requests.

        Raises:
            ConfigurationError: there is none of that name, or it is the active one.
        """
        if name == self._active or name not in self._adapters:
            raise ConfigurationError(f"adapter {shown_value(name)} cannot be deleted: name one that is not active.")
        del self._adapters[name]

    # Saving and loading --------------------------------------------------------------------------------------------

    @_alone
    def state_dict(self, include_buffer: bool = False) -> dict[str, Any]:
        """Everything that was learned, by adapter, and its scores; no optimizer state. Tensors are copies.

        Args:
            include_buffer: add the remembered requests, which are users' text.
        """
        adapters = {}
        for name, adapter in self._adapters.items():
            weights = self.learner.adapter_state() if name == self._active else dict(adapter.weights or {})
            adapters[name] = {
                "weights": weights if adapter.updates else {},
                "updates": adapter.updates,
                "scores": [list(one) for one in adapter.gate.scores],
            }
            if include_buffer:
                adapters[name]["requests"] = requests_state(adapter.buffer)
        return {"active": self._active, "adapters": adapters}

    @_alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Requests that it does not hold are forgotten.

        Raises:
            ConfigurationError: it is of other settings or another drafter; names what differs. Nothing was changed.
        """
        self._follow_changes()
        before = self.learner.adapter_state()
        try:
            self._adapters, self._active = self._adapters_of(state)
        except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.learner.load_adapter_state(before)
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"this is no state of an aligner: {error!r:.200}. Give state_dict()'s."
            ) from error
        self._settle()
        self._inbox.clear()

    def _adapters_of(self, state: Mapping[str, Any]) -> tuple[dict[str, Adapter], str]:
        """The adapters of a state, and the name of the active one, whose weights are loaded into the learner."""
        states, active = dict(state["adapters"]), state["active"]
        # All weights are tried now, the active ones last, so that no later switch can fail.
        for name in sorted(states, key=lambda name: name == active):
            self._load_weights(states[name]["weights"])
        adapters: dict[str, Adapter] = {}
        for name, one in states.items():
            adapter = adapters[name] = self._new_adapter()
            adapter.updates = int(one["updates"])
            adapter.gate.scores = [(float(before), float(after)) for before, after in one["scores"]]
            adapter.weights = None if name == active else dict(one["weights"]) or None
            self._load_requests(one.get("requests", ()), adapter.buffer)
        if active not in adapters:
            raise KeyError(active)
        return adapters, active

    @_alone
    def save_pretrained(self, directory: str | os.PathLike, include_buffer: bool = False) -> Path:
        """Write what the active adapter has learned, and no user's text unless asked.

        For an independent drafter it is a PEFT adapter: `peft.PeftModel.from_pretrained(model, directory)`. For an
        EAGLE head it is the head with the learned weights, in its own layout, and beside it the adapter, for `load`.
        If all weights are trained, it is the model or the head.

        Args:
            directory: made if needed.
            include_buffer: write the adapter's remembered requests too, to `replay_buffer.safetensors`. Otherwise a
                file of earlier requests is removed.

        Returns:
            The folder.

        Raises:
            ArtifactError: it is a file.
        """
        return save_learnt(directory, self.learner, requests_state(self.adapter.buffer) if include_buffer else None)

    @_alone
    def load(
        self,
        directory_or_repo: str | os.PathLike,
        *,
        include_buffer: bool = False,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
    ) -> None:
        """Load what `save_pretrained` wrote into the active adapter. With the gate, it is served once requests have
        shown its gain.

        Args:
            directory_or_repo: a folder, or a repository on the Hub.
            include_buffer: replace the remembered requests by those in the folder.
            revision: the branch, tag or commit of a repository.
            cache_dir: the folder for downloads (None: the Hub's usual cache).
            token: for a private repository (None: your login).

        Raises:
            ArtifactError: a file is missing, damaged or a pickle, the adapter was learned with other settings, or an
                option does not fit a folder or a repository.
            ConfigurationError: it is of another drafter; names what differs. Nothing was changed.
        """
        requests = read_requests(directory_or_repo) if include_buffer else None
        weights = read_learnt(directory_or_repo, self.learner, revision, cache_dir, token)
        self._follow_changes()
        adapter, before = self.adapter, self.learner.adapter_state()
        self.learner.load_adapter_state(dict(weights))
        if requests is not None:
            buffer = self._new_adapter().buffer
            try:
                self._load_requests(requests, buffer)
            except ConfigurationError:
                self.learner.load_adapter_state(before)
                raise
            adapter.buffer = buffer
        adapter.gate.clear()
        adapter.updates = max(1, adapter.updates)
        self._settle()

    @_alone
    def push_to_hub(self, repo_id: str, **options: Any) -> "CommitInfo":
        """Publish what `save_pretrained` writes, in one commit. Requests are never published.

        Args:
            repo_id: the repository; made if needed.
            options: `private`, `token`, `commit_message` and `api`, the client of another Hub.

        Raises:
            ArtifactError: there is no such place, or HF_HUB_OFFLINE is set.
        """
        return push_learnt(self.learner, repo_id, **options)

    def _new_adapter(self) -> Adapter:
        kind = FillingBuffer if self.settings.waits_for_full_buffer else ReplayBuffer
        return Adapter(self.settings, kind(self.settings.buffer, self.settings.buffer_bytes))

    def _load_weights(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        if weights:
            self.learner.load_adapter_state(dict(weights))
        else:
            self.learner.reset()

    def _load_requests(self, state: Sequence[Mapping[str, torch.Tensor]], buffer: ReplayBuffer) -> None:
        """Add the requests of `requests_state` to a buffer.

        Raises:
            ConfigurationError: it is no such state, or of another drafter. Nothing was added.
        """
        drafter = self.learner.drafter
        device = next(drafter.module.parameters()).device
        requests = requests_from(state, drafter.num_embeddings, bool(drafter.reads), device)
        try:
            cut = [one.up_to(self._drafter.most_positions) for one in requests]
            chosen = [one and self.learner.chosen_again(one) for one in cut]
        except RuntimeError as error:
            raise ConfigurationError(f"the requests are of another drafter: {error!s:.200}") from error
        for one in chosen:
            if one is not None:
                buffer.add(one)

    # Assistants ----------------------------------------------------------------------------------------------------

    @property
    def drafting_lock(self) -> DraftingLock:
        """Every draft must hold it."""
        return self.live.lock

    def _require_unclaimed(self, before: "Aligner | None" = None) -> None:
        claimed = _aligner_of.get(self._module, lambda: None)()
        if claimed not in (None, self, before):
            raise ConfigurationError(
                "another assistant aligns this drafter already. Use copy.deepcopy of that assistant, which shares "
                "what is learnt, unbind it, or give this one a copy of the drafter."
            )

    @_alone
    def attach(self, user: Any, target: nn.Module) -> None:
        """Serve an assistant that is bound to a target.

        Raises:
            ConfigurationError: alignment would change weights of the target, or another aligner has this drafter.
        """
        self._require_unclaimed(self._before())
        self._require_apart(target)
        if self._target() is not target:
            # Requests and scores with another target tell nothing.
            self._inbox.clear()
            for adapter in self._adapters.values():
                adapter.buffer.clear()
                adapter.gate.clear()
            self._target = weakref.ref(target)
        _aligner_of[self._module] = weakref.ref(self)
        self._users.add(user)
        try:
            self._follow_changes()
        except Exception as error:
            self._turn_off(error)
        self._serve()

    def _require_apart(self, target: nn.Module) -> None:
        """Refuse to learn weights that are the target's too, such as an embedding that it lends."""
        theirs = {one.untyped_storage().data_ptr() for one in target.parameters() if is_memory(one)}
        own = dict(self._module.named_parameters())
        for name in self.learner.base_weights():
            if own[name].untyped_storage().data_ptr() in theirs:
                raise ConfigurationError(
                    f"alignment would change {name} of the drafter, which is the target's too. Name other modules "
                    "in OnlineAlignment(modules=…), or give the drafter weights of its own."
                )

    @contextmanager
    def standing_aside(self, user: Any) -> Iterator[None]:
        """In this block the drafter has its own weights, while another aligner takes this one's place for a user.
        Other users are served afterwards as before, and all of them if the block raises."""
        with self._learning:
            self._serves = False
            self._settle()
            try:
                yield
                self._users.discard(user)
            except BaseException:
                if self._users:
                    _aligner_of[self._module] = weakref.ref(self)
                raise
            finally:
                # Nobody is served if another aligner has the model by now.
                if self._users and _aligner_of.get(self._module, lambda: None)() is self:
                    self._serve()
                else:
                    self._withdraw()

    @_alone
    def detach(self, user: Any) -> None:
        """Serve an assistant no longer. After the last one the drafter has its own weights again."""
        self._users.discard(user)
        if not self._users:
            self._withdraw()

    def _serve(self) -> None:
        self._serves = self._error is None
        self._settle()

    def _withdraw(self) -> None:
        self._serves = False
        self.live.restore()
        if _aligner_of.get(self._module, lambda: None)() is self:
            del _aligner_of[self._module]

    # Requests ------------------------------------------------------------------------------------------------------

    @property
    def _learns(self) -> bool:
        return not self._is_paused and self._error is None

    def recorder(self) -> Recorder | None:
        """The recorder of a request that begins now; None if nothing is recorded, or there is no time left for it."""
        if not self._learns or (self.settings.goes_by_clock and not self.budget.affords(0.0)):
            return None
        return Recorder(self.settings.top_k, self.settings.context, self.adapter)

    def take(self, recorder: Recorder | None, seconds: float) -> None:
        """Take a finished request. Nothing is learned yet, as the garbage collector may call this.

        Args:
            recorder: its recorder, if it was recorded.
            seconds: the duration of the request.
        """
        self.budget.earn(seconds)
        if recorder is None or not self._learns:
            return
        try:
            trajectory = recorder.finish()
        except Exception as error:
            # Turning learning off waits for drafts, and this thread may be drafting.
            self._inbox.append(error)
            return
        self.budget.spend(recorder.seconds)
        # Nothing is drafted past the drafter's positions, so nothing is learned there.
        most = self._drafter.most_positions
        trajectory = trajectory and trajectory.up_to(None if most is None else most - recorder.start)
        if trajectory is not None:
            is_cuda = self._device.type == "cuda"
            event = torch.cuda.current_stream(self._device).record_event() if is_cuda else None
            self._inbox.append((trajectory, recorder.adapter, event))

    def _take_out(self) -> tuple[Trajectory, Adapter]:
        """The oldest request of the inbox, and its adapter. Raises the error of its recording, if there was one."""
        oldest = self._inbox.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        trajectory, adapter, event = oldest
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return trajectory, adapter

    def learn(self) -> None:
        """Learn from finished requests, here or in the background, as far as the budget allows."""
        if not self._inbox or not self._learns:
            return
        if self._executor is None:
            self._learn_from_inbox()
        elif self._job is None or self._job.done():
            with suppress(RuntimeError):  # the interpreter ends
                self._job = self._executor.submit(self._learn_in_background)

    def _learn_in_background(self) -> None:
        if self._stream is None and self._device.type == "cuda":
            # The lowest priority.
            self._stream = torch.cuda.Stream(self._device, priority=0)
        # Does nothing without a stream.
        with torch.cuda.stream(self._stream):
            self._learn_from_inbox()

    def _learn_from_inbox(self) -> None:
        """One thread learns at a time. Others leave their requests to it, unless learning is synchronous."""
        while self._inbox and self._learns and self._learning.acquire(blocking=self.settings.synchronous):
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    while self._inbox and self._learns:
                        self._learn_from(*self._take_out())
            except Exception as error:
                self._turn_off(error)
            finally:
                self._learning.release()

    def _turn_off(self, error: Exception) -> None:
        """Learn and serve nothing any more, as the state is undefined."""
        self._error = f"{type(error).__name__}: {error!s:.500}"
        self._inbox.clear()
        self._serves = False
        with suppress(Exception):
            self.live.restore()
        warn_user(f"online alignment failed and is off from now on; generation goes on without it. {self._error}")

    # Learning ------------------------------------------------------------------------------------------------------

    def _remember(self, trajectory: Trajectory, adapter: Adapter) -> bool:
        """Keep a request, unless its adapter was deleted or `OnlineAlignment.fill` chooses none of its places. Returns
        whether it is kept."""
        if not any(one is adapter for one in self._adapters.values()):
            return False
        chosen = self.learner.chosen(trajectory)
        is_kept = chosen is not None and adapter.buffer.add(chosen)
        self._counts.requests += is_kept
        return is_kept

    def _learn_from(self, trajectory: Trajectory, adapter: Adapter) -> None:
        """Remember a request. If an update is due, score the learned weights on the request first, then learn from it.
        Requests of an adapter that is not active are remembered only."""
        start = time.perf_counter()
        self._follow_changes()
        if self._remember(trajectory, adapter) and self._is_due(adapter):
            if self.settings.gate and adapter.updates:
                scores = self.learner.acceptance(trajectory)
                if scores is not None:
                    adapter.gate.record(*scores)
            self._update(start)
            # One request may fill the buffer several times.
            while self.settings.waits_for_full_buffer and adapter.buffer.is_full:
                self._update()
        self.budget.spend(time.perf_counter() - start)

    def _is_due(self, adapter: Adapter) -> bool:
        """Whether to update now: the buffer is full, the budget allows it, or time does not count."""
        if adapter is not self.adapter:
            return False
        if self.settings.waits_for_full_buffer:
            return adapter.buffer.is_full
        return self.settings.synchronous or self.budget.affords(self._least_cost)

    def _update(self, start: float | None = None) -> None:
        """Train on remembered requests, and decide which weights are served.

        Args:
            start: when learning from the request began; None: no step is left out for want of time.
        """
        adapter, counts, settings = self.adapter, self._counts, self.settings
        dropped = self.learner.dropped
        for batch in self._batches(start):
            loss = self.learner.step(batch)
            counts.loss = counts.loss if loss is None else loss
        counts.dropped += self.learner.dropped - dropped
        adapter.updates += 1
        counts.updates += 1
        counts.training_bytes = self.learner.nbytes
        was_served = self.live.is_served
        if settings.gate and adapter.gate.is_hopeless:
            # Begin anew, with the remembered requests.
            self.learner.reset()
            adapter.gate.clear()
            adapter.updates = 0
            counts.rolled_back += not was_served
        self._settle()
        counts.kept += self.live.is_served
        counts.rolled_back += was_served and not self.live.is_served

    def _batches(self, start: float | None) -> Iterator[Sequence[Trajectory]]:
        """The requests of each step of an update, the newest one first. Steps after the first one are left out if the
        budget does not allow them. See `_update`."""
        settings, buffer = self.settings, self.adapter.buffer
        if settings.waits_for_full_buffer:
            batches = [buffer.take()]
        else:
            drawn = buffer.batch(settings.steps * settings.batch, self.adapter.random)
            batches = [drawn[at : at + settings.batch] for at in range(0, len(drawn), settings.batch)]
        for number, batch in enumerate(islice(cycle(batches), settings.steps)):
            step_start = time.perf_counter()
            yield batch
            if start is not None and settings.goes_by_clock:
                now = time.perf_counter()
                if number == 0:
                    self._least_cost = now - start
                if not self.budget.affords(2 * now - start - step_start):
                    return

    def _settle(self) -> None:
        """Serve the learned weights if the gate is open, and the drafter's own otherwise."""
        adapter = self.adapter
        is_open = adapter.updates > 0 and (adapter.gate.is_open or not self.settings.gate)
        weights = self.learner.weights() if is_open and self._serves else {}
        # NaN would spoil drafts, and some weights may be too large for 16 bits.
        if weights and all(bool(one.isfinite().all()) for one in weights.values()):
            self.live.serve(weights)
        else:
            self.live.restore()

    def _follow_changes(self) -> None:
        """Begin anew if the user has changed the drafter's weights."""
        if not self.live.were_changed():
            return
        warn_user(
            "the drafter's weights were changed while it is being aligned: what was learnt is forgotten, and learning "
            "begins anew from what is there."
        )
        self.live.restore()
        self.live.accept()
        self.learner = _learner_of(self._drafter, self.settings)
        for adapter in self._adapters.values():
            adapter.weights, adapter.updates = None, 0
            adapter.gate.clear()


def _learner_of(drafter: Any, settings: OnlineAlignment) -> Learner:
    """A learner with a copy of a drafter, which must not have adapters already: they would be trained too."""
    for name, module in drafter.module.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise ConfigurationError(
                f"the drafter has adapters of peft, as in {name}, and learns without. Merge them into it with peft's "
                "merge_and_unload() before it is aligned."
            )
    return Learner(drafter, settings)
