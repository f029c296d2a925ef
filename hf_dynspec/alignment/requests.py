"""Requests leave what is learnt from, in their own threads or in one beside them; assistants come and go."""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from ..devices import compute_alone
from ..errors import ConfigurationError, shown_value, warn_user
from .adapter import Adapter
from .live_weights import DraftingLock
from .recording import Recorder
from .replay import Trajectory
from .settings import OnlineAlignment
from .training import Training

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Who aligns which model: two would take each other's weights for somebody's changes.
_aligned: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[RequestLearner]]" = weakref.WeakKeyDictionary()


def alone(method: _Method) -> _Method:
    """Run a method while nobody learns, with gradients, whatever mode of torch its caller is in."""

    @functools.wraps(method)
    def run(self: "RequestLearner", *args: Any, **kwargs: Any) -> Any:
        with self._learning, torch.inference_mode(False), torch.enable_grad():
            return method(self, *args, **kwargs)

    return run


class RequestLearner:
    """Learns from requests of the assistants that it serves, and keeps out of their way: what `aligner.Aligner`, which
    documents it, does by itself.
    """

    def __init__(self, drafter: Any, settings: OnlineAlignment, before: "RequestLearner | None" = None):
        if not isinstance(settings, OnlineAlignment):
            raise ConfigurationError(f"alignment must be an OnlineAlignment or None, got {shown_value(settings)}.")
        self.settings = settings
        self._module = drafter.module
        self._require_unclaimed(before)
        self._training = Training(drafter, settings)
        # Held by whoever trains, and by whoever changes what is trained.
        self._learning = threading.RLock()
        # With what the device has to have done before they can be read; or what went wrong while one was recorded.
        self._inbox: deque[tuple[Trajectory, Adapter, torch.cuda.Event | None] | Exception] = deque()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._target: Callable[[], nn.Module | None] = lambda: None
        # Serves until this one is attached.
        self._before: Callable[[], RequestLearner | None] = (lambda: None) if before is None else weakref.ref(before)
        self._is_paused = False
        self._error: str | None = None
        self._executor = None
        if settings.background:
            self._executor = ThreadPoolExecutor(1, "hf_dynspec alignment", initializer=compute_alone)
        self._job: Future[None] | None = None
        self._device = next(drafter.module.parameters()).device
        self._stream: torch.cuda.Stream | None = None
        # Not at exit: there is nobody left to draft.
        weakref.finalize(self, self._training.live.restore).atexit = False

    def _require_unclaimed(self, before: "RequestLearner | None" = None) -> None:
        claimed = _aligned.get(self._module, lambda: None)()
        if claimed not in (None, self, before):
            raise ConfigurationError(
                "another assistant aligns this drafter already. Use copy.deepcopy of that assistant, which shares "
                "what is learnt, unbind it, or give this one a copy of the drafter."
            )

    # Who uses it ---------------------------------------------------------------------------------------------------

    @property
    def drafting_lock(self) -> DraftingLock:
        """To be held by every draft."""
        return self._training.live.lock

    @alone
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
        try:
            self._training.follow_changes()
        except Exception as error:
            self._turn_off(error)
        self._serve()

    @contextmanager
    def standing_aside(self, user: Any) -> Iterator[None]:
        """The drafter has its own weights, while another aligner is made to take this one's place for an assistant.
        Others are served as before, and where that fails all are."""
        with self._learning:
            self._training.serves = False
            self._training.settle()
            try:
                yield
                self._users.discard(user)
            except BaseException:
                if self._users:
                    _aligned[self._module] = weakref.ref(self)
                raise
            finally:
                self._serve_users()

    def _serve_users(self) -> None:
        """Serve those that there are; nobody where another aligner serves the model by now."""
        if self._users and _aligned.get(self._module, lambda: None)() is self:
            self._serve()
        else:
            self._withdraw()

    def _serve(self) -> None:
        """Draft with what was learnt where it has earned that, unless nobody knows what state it is in."""
        self._training.serves = self._error is None
        self._training.settle()

    @alone
    def detach(self, user: Any) -> None:
        """Serve an assistant no longer. With the last one the drafter has its own weights again."""
        self._users.discard(user)
        if not self._users:
            self._withdraw()

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
        if not self._learns or (self.settings.goes_by_clock and not self._training.budget.affords(0.0)):
            return None
        return Recorder(self.settings.top_k, self.settings.context, self._training.active_adapter)

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
            # To turn learning off is to wait for drafts, which this thread may be in the middle of.
            self._inbox.append(error)
            return
        self._training.budget.spend(recorder.seconds)
        if trajectory is not None:
            self._inbox.append((trajectory, recorder.adapter, _work_given_to(self._device)))

    def _take_out(self) -> tuple[Trajectory, Adapter]:
        """The oldest request of the inbox, and what it is learnt into.

        Raises whatever went wrong while it was recorded.
        """
        oldest = self._inbox.popleft()
        if isinstance(oldest, Exception):
            raise oldest
        trajectory, adapter, given = oldest
        if given is not None:
            torch.cuda.current_stream(self._device).wait_event(given)
        return trajectory, adapter

    def learn(self) -> None:
        """Learn from the requests that are over, as far as the time for it was earned; or have it done beside."""
        if not self._inbox or not self._learns:
            return
        if self._executor is None:
            self._learn_from_inbox()
        elif self._job is None or self._job.done():
            with suppress(RuntimeError):  # the interpreter ends
                self._job = self._executor.submit(self._learn_beside)

    def _learn_beside(self) -> None:
        """Learn on this thread; on a GPU in a stream of the lowest priority."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=0)
        # Does nothing where there is no stream.
        with torch.cuda.stream(self._stream):
            self._learn_from_inbox()

    def _learn_from_inbox(self) -> None:
        """One thread at a time; others leave what they have to it, unless it is to be done when they return."""
        while self._inbox and self._learns and self._learning.acquire(blocking=self.settings.synchronous):
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    while self._inbox and self._learns:
                        self._training.learn_from(*self._take_out())
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
        warn_user(f"online alignment failed and is off from now on; generation goes on without it. {self._error}")


def _work_given_to(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that this thread gave to a GPU, None elsewhere."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
