"""Online alignment of an assistant's drafter: when it learns, in which thread, and what users may ask of it."""

import functools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..errors import ConfigurationError, shown_value
from ..fields import require_name
from .live_weights import DraftingLock
from .recording import Recorder
from .replay import Trajectory
from .settings import OnlineAlignment
from .statistics import AlignmentStatistics
from .training import Training

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Who aligns which model: two would take each other's weights for somebody's changes.
_aligned: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Aligner]]" = weakref.WeakKeyDictionary()


def _alone(method: _Method) -> _Method:
    """Run a method while nobody learns, with gradients, whatever mode of torch its caller is in."""

    @functools.wraps(method)
    def run(self: "Aligner", *args: Any, **kwargs: Any) -> Any:
        with self._learning, torch.inference_mode(False), torch.enable_grad():
            return method(self, *args, **kwargs)

    return run


class Aligner:
    """Aligns a drafter with its target on what requests leave. Made by `DynSpecAssistant(…, alignment=…)`.

    What is learnt is learnt by a copy of the drafter, in fp32. While it has been measured to draft better than the
    drafter itself (`OnlineAlignment.gate`), its weights stand in the place of the drafter's own, in the drafter's
    model: between two drafts, all at once. `reset`, unbinding the assistant and dropping it put back the drafter's
    own, bit for bit. A drafter of 16 bits rounds what it is given, so that small changes count when they have added
    up in the copy. The target is never written to. Requests may run in several threads, and copies of an assistant
    share its aligner.

    An adapter is what is learnt under one name, such as a domain's or a user's: with its own requests and its own
    gate. What goes wrong while learning is warned of once and turns learning off; generation goes on.

    Args:
        drafter: what drafts. Its weights are read once, for the copy.
        settings: what is learnt, and when.
        before: the aligner in whose place this one comes, if any.

    Attributes:
        settings: as given.

    Raises:
        ConfigurationError: the drafter has no such modules, or another assistant aligns its model already.
    """

    def __init__(self, drafter: Any, settings: OnlineAlignment, before: "Aligner | None" = None):
        if not isinstance(settings, OnlineAlignment):
            raise ConfigurationError(f"alignment must be an OnlineAlignment or None, got {shown_value(settings)}.")
        self.settings = settings
        self._module = drafter.module
        self._require_unclaimed(before)
        self._training = Training(drafter, settings)
        # Held by whoever trains, and by whoever changes what is trained.
        self._learning = threading.RLock()
        self._inbox: deque[tuple[Trajectory, str]] = deque()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._target: Callable[[], nn.Module | None] = lambda: None
        # Serves until this one is attached.
        self._before: Callable[[], Aligner | None] = (lambda: None) if before is None else weakref.ref(before)
        self._is_paused = False
        self._error: str | None = None
        self._executor = ThreadPoolExecutor(1, "hf_dynspec alignment") if settings.background else None
        self._job: Future[None] | None = None
        self._device = next(drafter.module.parameters()).device
        self._stream: torch.cuda.Stream | None = None
        # Not at exit: there is nobody left to draft.
        weakref.finalize(self, self._training.live.restore).atexit = False

    def _require_unclaimed(self, before: "Aligner | None" = None) -> None:
        claimed = _aligned.get(self._module, lambda: None)()
        if claimed not in (None, self, before):
            raise ConfigurationError(
                "another assistant aligns this drafter already. Use copy.deepcopy of that assistant, which shares "
                "what is learnt, unbind it, or give this one a copy of the drafter."
            )

    # What users may ask --------------------------------------------------------------------------------------------

    @property
    def stats(self) -> AlignmentStatistics:
        """What has been done so far, and what it cost."""
        stats = self._training.statistics
        stats.error = self._error
        return stats

    def pause(self) -> None:
        """Record and learn nothing until `resume`. What is served stays."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    @_alone
    def reset(self) -> None:
        """Forget all that was learnt, all adapters, and every request. The drafter has its own weights again. Where an
        error has turned learning off, it begins anew."""
        self._inbox.clear()
        self._training.forget()
        self._training.serves, self._error = bool(self._users), None

    @_alone
    def update_now(self) -> float | None:
        """Learn from the requests that are over, whatever it takes. Errors are the caller's.

        Returns:
            The loss before the last step; None where there was nothing to learn from.
        """
        training = self._training
        training.follow_changes()
        while self._inbox:
            trajectory, name = self._inbox.popleft()
            if name in training.adapters:
                training.adapters[name].buffer.add(trajectory)
        if not len(training.adapters[training.active].buffer):
            return None
        start = time.perf_counter()
        training.update()
        training.budget.spend(time.perf_counter() - start)
        return training.statistics.loss

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return tuple(self._training.adapters)

    @property
    def active_adapter(self) -> str:
        """The name of the adapter that is learnt and served."""
        return self._training.active

    @_alone
    def add_adapter(self, name: str) -> None:
        """Add an adapter of which nothing is learnt yet. `set_adapter` switches to it.

        Raises:
            ConfigurationError: there is one of that name, or it is no name.
        """
        require_name("adapter", name)
        if name in self._training.adapters:
            raise ConfigurationError(f"there is an adapter {shown_value(name)} already. Call set_adapter.")
        self._training.add(name)

    @_alone
    def set_adapter(self, name: str) -> None:
        """Learn and serve another adapter, from the next request on: requests that run now are learnt into the one
        that was active when they began.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name not in self._training.adapters:
            names = ", ".join(map(shown_value, self._training.adapters))
            raise ConfigurationError(f"there is no adapter {shown_value(name)} among {names}. Call add_adapter first.")
        if name != self.active_adapter:
            self._training.activate(name)

    @_alone
    def delete_adapter(self, name: str) -> None:
        """Forget an adapter and its requests.

        Raises:
            ConfigurationError: there is none of that name, or it is the active one.
        """
        if name == self.active_adapter or name not in self._training.adapters:
            raise ConfigurationError(f"adapter {shown_value(name)} cannot be deleted: name one that is not active.")
        del self._training.adapters[name]

    # Keeping it ----------------------------------------------------------------------------------------------------

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, and how it did; no request, and no optimizer's state. Tensors are copies."""
        return self._training.state()

    @_alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave. Requests are forgotten.

        Raises:
            ConfigurationError: it is of other settings or another drafter; names what differs. Nothing was changed.
        """
        self._training.load_state(state)
        self._inbox.clear()

    @_alone
    def save_pretrained(self, directory: str | os.PathLike) -> Path:
        """Write what the active adapter has learnt; users' texts are never written.

        An independent drafter's is a PEFT adapter: `peft.PeftModel.from_pretrained(model, directory)`. An EAGLE head's
        is the head with what was learnt in it, in its own layout, and beside it the adapter, for `load`. Where all
        weights are trained, it is the model or the head.

        Args:
            directory: made if needed.

        Returns:
            The folder.

        Raises:
            ArtifactError: it is a file.
        """
        from ..artifacts.adapters import save_learnt

        return save_learnt(directory, self._training.learner)

    @_alone
    def load(self, directory_or_repo: str | os.PathLike, **options: Any) -> None:
        """Take up what `save_pretrained` wrote, into the active adapter. With the gate it is served when it has earned
        that on the next requests.

        Args:
            directory_or_repo: a folder, or a repository on the Hub.
            options: `revision`, `cache_dir` and `token`, for a repository.

        Raises:
            ArtifactError: a file is missing, damaged or a pickle, or the adapter was learnt with other settings.
            ConfigurationError: it is of another drafter; names what differs. Nothing was changed.
        """
        from ..artifacts.adapters import read_learnt

        self._training.take_up(read_learnt(directory_or_repo, self._training.learner, **options))

    @_alone
    def push_to_hub(self, repo_id: str, **options: Any) -> "CommitInfo":
        """Publish what `save_pretrained` writes, in one commit.

        Args:
            repo_id: the repository; made if needed.
            options: `private`, `token`, `commit_message`.

        Raises:
            ArtifactError: there is no such place, or the Hub is not to be asked.
        """
        from ..artifacts.adapters import push_learnt

        return push_learnt(self._training.learner, repo_id, **options)

    # Who uses it ---------------------------------------------------------------------------------------------------

    @property
    def drafting_lock(self) -> DraftingLock:
        """To be held by every draft."""
        return self._training.live.lock

    @_alone
    def attach(self, user: Any, target: nn.Module) -> None:
        """Serve an assistant that is bound to a target.

        Raises:
            ConfigurationError: what would be written to is the target's, or another aligner serves this drafter.
        """
        self._require_unclaimed(self._before())
        self._training.require_apart(target)
        if self._target() is not target:
            # What another target said is nothing to go by.
            self._inbox.clear()
            self._training.forget_requests()
            self._target = weakref.ref(target)
        _aligned[self._module] = weakref.ref(self)
        self._users.add(user)
        self._training.serves = True
        self._training.settle()

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """The drafter has its own weights, while another aligner is made to take this one's place. Where that fails,
        all is as before."""
        with self._learning:
            serves, self._training.serves = self._training.serves, False
            self._training.settle()
            try:
                yield
            except BaseException:
                if serves:
                    _aligned[self._module] = weakref.ref(self)
                self._training.serves = serves
                self._training.settle()
                raise

    @_alone
    def detach(self, user: Any) -> None:
        """Serve an assistant no longer. With the last one the drafter has its own weights again."""
        self._users.discard(user)
        if not self._users:
            self._withdraw()

    @_alone
    def close(self) -> None:
        """Learn and serve nothing any more."""
        self._is_paused = True
        self._users.clear()
        self._withdraw()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _withdraw(self) -> None:
        self._training.serves = False
        self._training.live.restore()
        if _aligned.get(self._module, lambda: None)() is self:
            del _aligned[self._module]

    # Requests ------------------------------------------------------------------------------------------------------

    @property
    def _learns(self) -> bool:
        return not self._is_paused and self._error is None

    def recorder(self) -> Recorder | None:
        """What records a request that begins now; None where nothing is to be recorded, as recording would cost more
        time than may be spent."""
        if not self._learns or not (self.settings.synchronous or self._training.budget.affords(0.0)):
            return None
        return Recorder(self.settings.top_k, self.settings.context, self.active_adapter)

    def take(self, recorder: Recorder | None, seconds: float) -> None:
        """Take in a request that is over. Nothing is learnt yet: this may be the garbage collector's call.

        Args:
            recorder: what recorded it, if anything did.
            seconds: that it took.
        """
        self._training.budget.earn(seconds)
        if recorder is None or not self._learns:
            return
        try:
            trajectory = recorder.finish()
        except Exception as error:
            self._turn_off(error)
            return
        self._training.budget.spend(recorder.seconds)
        if trajectory is not None:
            self._inbox.append((trajectory, recorder.adapter))

    def learn(self) -> None:
        """Learn from the requests that are over, as far as the time for it was earned; or have it done beside."""
        if not self._inbox or not self._learns:
            return
        if self._executor is None:
            self._learn_from_inbox()
        elif self._job is None or self._job.done():
            with suppress(RuntimeError):  # the interpreter ends
                self._job = self._executor.submit(self._learn_beside, _work_given_to(self._device))

    def _learn_beside(self, given: torch.cuda.Event | None) -> None:
        """Learn on this thread; on a GPU in a stream of the lowest priority, after what was given to it before."""
        if given is None:
            self._learn_from_inbox()
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=0)
        self._stream.wait_event(given)
        with torch.cuda.stream(self._stream):
            self._learn_from_inbox()

    def _learn_from_inbox(self) -> None:
        """One thread at a time; others leave what they have to it, unless it is to be done when they return."""
        while self._inbox and self._learns and self._learning.acquire(blocking=self.settings.synchronous):
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    while self._inbox and self._learns:
                        self._training.learn_from(*self._inbox.popleft())
            except Exception as error:
                self._turn_off(error)
            finally:
                self._learning.release()

    def _turn_off(self, error: Exception) -> None:
        """Nothing is learnt any more, and nothing served, as nobody knows what state it is in."""
        self._error = f"{type(error).__name__}: {error!s:.500}"
        self._inbox.clear()
        self._training.serves = False
        with suppress(Exception):
            self._training.live.restore()
        warnings.warn(
            f"online alignment failed and is off from now on; generation goes on without it. {self._error}",
            stacklevel=2,
        )


def _work_given_to(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that this thread gave to a GPU, None elsewhere."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
