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

# Nanoseconds between two polls, and the number of polls after the last job: enough for many rounds, since some
# settings have few jobs, but less than the time that people take between two calls.
_PAUSE, _MOST_POLLS = 250_000, 8000

# A function that returns a result; None ends the thread.
_Job = Callable[[], Any] | None


class _PolledQueue:
    """A queue of jobs that its one consumer polls: waking a thread on an idle core costs the producer tens of
    microseconds. `wait` lets the consumer wait."""

    def __init__(self, wait: WaitForChange):
        self._wait = wait
        self._jobs: deque[_Job] = deque()
        self._changes = ctypes.c_int64(0)
        # Whether the thread has stopped polling, and the queue that wakes it then.
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
            if not self._wait(self._changes, seen, _PAUSE, _MOST_POLLS):
                self._sleeps = True
                # A job put before this line woke nobody. A spurious wake-up only costs another poll.
                if not self._jobs:
                    self._wake.get()
                self._sleeps = False


_Jobs = SimpleQueue[_Job] | _PolledQueue


class Worker(ForkSafe):
    """Does jobs one after another, in order, and keeps their results until they are taken.

    The thread starts with the first job and ends with `close`, with the worker, or at the interpreter's exit. Only the
    generating thread may use the worker. Two queues connect the threads, at a cost of microseconds; a
    `ThreadPoolExecutor` would cost the generating thread a tenth of the retrieval time.

    Args:
        is_synchronous: do each job at once, in the calling thread.
        polls: poll for jobs instead of being woken for each, if there is a compiler. Needs an idle core.
    """

    def __init__(self, is_synchronous: bool, polls: bool = False):
        super().__init__()
        self._is_synchronous = is_synchronous
        # Compiled here, so that errors reach the caller and no job has to wait for the compiler.
        wait = wait_for_change() if polls else None
        self._given: _Jobs = SimpleQueue() if wait is None else _PolledQueue(wait)
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._running = 0
        self._ending: weakref.finalize | None = None
        self._is_closed = False
        self._jobs = self._late_rounds = 0
        self._seconds = self._exposed_seconds = 0.0

    def reset_after_fork(self) -> None:
        """Close the worker in a forked process, which has no such thread."""
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
        """The results of finished jobs, in order, without waiting. Raises the error of a job."""
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
        """Wait for all jobs and keep their results."""
        done = [self._done.get() for _ in range(self._running)]
        for one in done:
            self._done.put(one)

    def finish(self) -> None:
        """Wait for all jobs and drop their results. Raises the error of a job."""
        start = time.perf_counter()
        while self._running:
            self._take_one([])
        self._exposed_seconds += time.perf_counter() - start

    def take_work(self) -> BackgroundWork:
        """The work since the last such call: the jobs whose results were taken."""
        work = BackgroundWork(self._jobs, self._seconds, self._exposed_seconds, self._late_rounds)
        self._jobs = self._late_rounds = 0
        self._seconds = self._exposed_seconds = 0.0
        return work

    def close(self) -> None:
        """End the thread. Jobs that have not begun are dropped."""
        self._is_closed = True
        if self._ending is not None:
            self._ending()

    def _start(self) -> None:
        # The thread must not hold the worker, which would keep it alive. It must be a daemon: the interpreter waits
        # for other threads before it runs finalizers, and would never end this one.
        is_ending = threading.Event()
        thread = threading.Thread(
            target=_work, args=(self._given, self._done, is_ending), name="hf_dynspec retrieval", daemon=True
        )
        thread.start()
        self._ending = weakref.finalize(self, _end, thread, self._given, is_ending)

    def _take_one(self, results: list[Any]) -> None:
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
    """The result or the error of a job, and its processor time, which leaves out waiting."""

    result: Any
    error: BaseException | None
    seconds: float


# Stands for a job that had not begun when the thread ended.
_NOT_DONE = _Done(None, None, 0.0)


def _do(job: Callable[[], Any]) -> _Done:
    start = time.thread_time()
    try:
        result, error = job(), None
    except BaseException as raised:  # any error, for the generating thread
        result, error = None, raised
    return _Done(result, error, time.thread_time() - start)


def _work(given: _Jobs, done: "SimpleQueue[_Done]", is_ending: threading.Event) -> None:
    compute_alone()
    while (job := given.get()) is not None:
        # `wait` and `finish` count dropped jobs too.
        done.put(_NOT_DONE if is_ending.is_set() else _do(job))
        # Not kept alive until the next job.
        job = None


def _end(thread: threading.Thread, given: _Jobs, is_ending: threading.Event) -> None:
    is_ending.set()
    given.put(None)
    # The garbage collector may call this in the thread itself, which then ends after its job.
    if thread is not threading.current_thread():
        thread.join()
