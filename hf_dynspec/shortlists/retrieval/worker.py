"""One thread beside a session, which retrieves while the device decodes."""

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from ...devices import compute_alone
from ...forks import ForkSafe
from ...kernels.cpu_waiting import WaitForChange, wait_for_change
from ...protocol import BackgroundWork

# Nanoseconds between two looks for a job where the thread looks for them, and how often it does after the last one:
# for many rounds, as some settings have few jobs, and not for as long as people take between two calls.
_PAUSE, _MOST_LOOKS = 250_000, 8000

# Does something, and returns its result; None as the last one.
_Job = Callable[[], Any] | None


class _LookedFor:
    """A queue of jobs for one thread, which looks for them: to wake a thread whose core is idle takes tens of
    microseconds of the one that gives it a job.

    Args:
        wait: lets the thread wait.
    """

    def __init__(self, wait: WaitForChange):
        self._wait = wait
        self._jobs: deque[_Job] = deque()
        self._changes = ctypes.c_int64(0)
        # Whether the thread does not look any more, and what wakes it then.
        self._sleeps, self._wake = False, SimpleQueue()

    def put(self, job: _Job) -> None:
        self._jobs.append(job)
        self._changes.value += 1
        if self._sleeps:
            self._wake.put(None)

    def get(self) -> _Job:
        while True:
            seen = self._changes.value
            with suppress(IndexError):
                return self._jobs.popleft()
            if not self._wait(self._changes, seen, _PAUSE, _MOST_LOOKS):
                self._sleeps = True
                # What was put before that has woken nobody. A wake too many has it look once more.
                if not self._jobs:
                    self._wake.get()
                self._sleeps = False


# What a thread is given its jobs by.
_Jobs = SimpleQueue[_Job] | _LookedFor


class Worker(ForkSafe):
    """Does jobs one after the other, in the order in which they were given. A job's result waits until it is taken.

    The thread starts with the first job and ends with `close`, with the worker, or at the interpreter's exit. Used by
    one thread, which generates; a pair of queues is between the two, as they cost that thread microseconds, where a
    `ThreadPoolExecutor` would cost it a tenth of the time that retrieval takes.

    Args:
        is_synchronous: do each job at once, in the thread that gives it.
        looks: the thread looks for jobs in place of being woken for each, where there is a compiler. A core must be
            idle for it.
    """

    def __init__(self, is_synchronous: bool, looks: bool = False):
        super().__init__()
        self._is_synchronous = is_synchronous
        # Compiled here, as the thread's own errors would be nobody's, and what it does is waited for.
        wait = wait_for_change() if looks else None
        self._given: _Jobs = SimpleQueue() if wait is None else _LookedFor(wait)
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._running = 0
        self._ending: weakref.finalize | None = None
        self._is_closed = False
        self._jobs = self._late_rounds = 0
        self._seconds = self._exposed_seconds = 0.0

    def reset_after_fork(self) -> None:
        """In a forked process: closed, as what the thread was at has no result there."""
        if self._ending is not None:
            self._ending.detach()
        self._given, self._done = SimpleQueue(), SimpleQueue()
        self._running, self._ending, self._is_closed = 0, None, True

    def give(self, job: Callable[[], Any]) -> None:
        """Do a job. Does nothing after `close`."""
        start = time.perf_counter()
        if self._is_closed:
            return
        self._running += 1
        if self._is_synchronous:
            self._done.put(_do(job))
        else:
            if self._ending is None:
                self._start()
            self._given.put(job)
        self._exposed_seconds += time.perf_counter() - start

    def take(self) -> list[Any]:
        """The results of the jobs that are done, in their order. Waits for none.

        Raises whatever a job raised.
        """
        if not self._running:
            return []
        start = time.perf_counter()
        results: list[Any] = []
        while not self._done.empty():
            self._take_one(results)
        if self._running:
            self._late_rounds += 1
        self._exposed_seconds += time.perf_counter() - start
        return results

    def wait(self) -> None:
        """Wait for all jobs. Their results can be taken then."""
        done = [self._done.get() for _ in range(self._running)]
        for one in done:
            self._done.put(one)

    def finish(self) -> None:
        """Wait for all jobs, and forget the results that were not taken.

        Raises whatever a job raised.
        """
        start = time.perf_counter()
        while self._running:
            self._take_one([])
        self._exposed_seconds += time.perf_counter() - start

    def take_work(self) -> BackgroundWork:
        """What was done since this was last asked: the jobs whose results were taken."""
        work = BackgroundWork(self._jobs, self._seconds, self._exposed_seconds, self._late_rounds)
        self._jobs = self._late_rounds = 0
        self._seconds = self._exposed_seconds = 0.0
        return work

    def close(self) -> None:
        """End the thread. Jobs that were not begun are not done, and have no results."""
        self._is_closed = True
        if self._ending is not None:
            self._ending()

    def _start(self) -> None:
        # The thread must not hold the worker, which would keep it from being given up. The interpreter waits for
        # threads that are no daemons before it ends anything, and so would never come to end this one.
        is_ending = threading.Event()
        thread = threading.Thread(
            target=_work, args=(self._given, self._done, is_ending), name="hf_dynspec retrieval", daemon=True
        )
        thread.start()
        self._ending = weakref.finalize(self, _end, thread, self._given, is_ending)

    def _take_one(self, results: list[Any]) -> None:
        """Add a job's result to those there are, where it was done."""
        done = self._done.get()
        self._running -= 1
        if done is _NOT_DONE:
            return
        if done.error is not None:
            raise done.error
        self._jobs += 1
        self._seconds += done.seconds
        results.append(done.result)


class _Done(NamedTuple):
    """What became of a job: its result, or what it raised, and its processor time. Waiting is no work of its own."""

    result: Any
    error: BaseException | None
    seconds: float


# What becomes of a job that was not begun when the thread ended.
_NOT_DONE = _Done(None, None, 0.0)


def _do(job: Callable[[], Any]) -> _Done:
    start = time.thread_time()
    try:
        result, error = job(), None
    except BaseException as raised:  # for the thread that generates, whatever it is
        result, error = None, raised
    return _Done(result, error, time.thread_time() - start)


def _work(given: _Jobs, done: "SimpleQueue[_Done]", is_ending: threading.Event) -> None:
    compute_alone()
    while (job := given.get()) is not None:
        # Whoever waits for all jobs waits for these too.
        done.put(_NOT_DONE if is_ending.is_set() else _do(job))
        # Not held until the next one comes.
        job = None


def _end(thread: threading.Thread, given: _Jobs, is_ending: threading.Event) -> None:
    is_ending.set()
    given.put(None)
    # The garbage collector may give a session up within this very thread, which ends when its job is done.
    if thread is not threading.current_thread():
        thread.join()
