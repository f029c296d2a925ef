"""One thread beside a session, which retrieves while the device decodes."""

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

    def give(self, job: Callable[[], Any]) -> None:
        """Do a job."""
        if self._executor is not None:
            self._running.append(self._executor.submit(job))
            return
        done: Future[Any] = Future()
        done.set_result(job())
        self._running.append(done)

    def take(self) -> list[Any]:
        """The results of the jobs that are done, in their order. Waits for none.

        Raises whatever a job raised.
        """
        results = []
        while self._running and self._running[0].done():
            results.append(self._running.popleft().result())
        return results

    def finish(self) -> None:
        """Wait for all jobs, and forget the results that were not taken."""
        for job in self._running:
            job.result()
        self._running.clear()

    def close(self) -> None:
        """End the thread. Jobs that were not begun are not done."""
        if self._executor is not None:
            # The garbage collector may give a session up within the session's own thread, which cannot wait for
            # itself, and ends when its job is done.
            with suppress(RuntimeError):
                self._executor.shutdown(wait=True, cancel_futures=True)
        self._running.clear()
