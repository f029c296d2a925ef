"""One thread beside a session, which retrieves while the device decodes."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


class Worker:
    """Does jobs one after the other, in the order in which they were given. A job's result waits until it is taken.

    The thread starts with the first job and ends with `close`, or with the worker.

    Args:
        is_synchronous: do each job at once, in the thread that gives it.
    """

    def __init__(self, is_synchronous: bool):
        self._executor = None if is_synchronous else ThreadPoolExecutor(1, thread_name_prefix="hf_dynspec retrieval")
        self._running: deque[Future[Any]] = deque()
        # Seconds that jobs took, and those of them that somebody waited for.
        self.seconds = 0.0
        self.waited_seconds = 0.0

    def give(self, job: Callable[[], Any]) -> None:
        """Do a job."""
        if self._executor is not None:
            self._running.append(self._executor.submit(self._timed, job))
            return
        done: Future[Any] = Future()
        done.set_result(self._timed(job))
        self.waited_seconds = self.seconds
        self._running.append(done)

    def take(self) -> list[Any]:
        """The results of the jobs that are done, in their order. Waits for none.

        Raises whatever a job raised.
        """
        results = []
        while self._running and self._running[0].done():
            results.append(self._running.popleft().result())
        return results

    def finish(self) -> list[Any]:
        """Wait for all jobs, and return the results that were not taken."""
        start = time.perf_counter()
        results = [job.result() for job in self._running]
        self._running.clear()
        if self._executor is not None:
            self.waited_seconds += time.perf_counter() - start
        return results

    def close(self) -> None:
        """End the thread. Jobs that were not begun are not done."""
        if self._executor is not None:
            # The garbage collector may give a session up within the session's own thread, which cannot wait for
            # itself, and ends when its job is done.
            with suppress(RuntimeError):
                self._executor.shutdown(wait=True, cancel_futures=True)
        self._running.clear()

    def _timed(self, job: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return job()
        finally:
            self.seconds += time.perf_counter() - start
