"""Processes that cut text into tokens, for whatever counts them: started, fed, stopped and told of when they die."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from ..errors import DynSpecError
from .texts import PIECE_CHARACTERS, FilePart, Piece, read_pieces

# A process hands the tokenizer about this many characters at once, and looks up whether it should stop in between.
_BATCH_CHARACTERS = 8 * PIECE_CHARACTERS

# A function at the top of a file, which a process can import, and its arguments.
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def run_jobs(
    jobs: deque[Job],
    take: Callable[[Job, Any], None],
    *,
    tokenizer: Any,
    text_field: str = "text",
    processes: int = 2,
    report: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Run jobs in processes. They are spawned, so a script that calls this needs the `if __name__ == "__main__":`
    guard, and what they import should be little: neither torch nor transformers where it can be helped.

    Args:
        jobs: what to run, in this order; emptied. `take` may add to them.
        take: called in this process with each job that is done and what it returned.
        tokenizer: a transformers tokenizer; each process gets a copy once.
        text_field: as in `plan_corpus`.
        processes: how many jobs run at the same time.
        report: called a few times a second with the number of tokens that `token_batches` has given so far.

    Raises:
        CorpusError: a text cannot be read.
        DynSpecError: a process died.
    """
    try:
        with _started(min(processes, len(jobs)), tokenizer, text_field) as (pool, counted):
            running: dict[Any, Job] = {}
            while jobs or running:
                with _without_interrupts():  # of the processes that this starts, whose end the parent decides
                    while jobs and len(running) < 2 * processes:
                        function, arguments = job = jobs.popleft()
                        running[pool.submit(function, *arguments)] = job
                finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    take(running.pop(future), future.result())
                report(counted.value)
    except BrokenProcessPool as error:
        raise DynSpecError(
            "a counting process died, most often for want of memory. What was finished is saved: run the same command "
            "again with fewer --processes"
        ) from error


@contextmanager
def _started(processes: int, tokenizer: Any, text_field: str) -> Iterator[tuple[ProcessPoolExecutor, Any]]:
    """A pool of processes and their shared count of tokens. They stop soon after this block is left."""
    context = multiprocessing.get_context("spawn")
    counted, stop = context.Value("q", 0), context.Event()
    settings = (_without_transformers(tokenizer), text_field, counted, stop)
    with ProcessPoolExecutor(max(1, processes), context, _start_worker, settings) as pool:
        try:
            yield pool, counted
        except BaseException:
            stop.set()
            # They look up whether to stop several times a second. One that is only starting needs what is given back
            # at the end of this process.
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold back interrupts from the keyboard; processes that are started meanwhile never get one."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In a process --------------------------------------------------------------------------------------------------------

_worker: dict[str, Any] = {}


def _start_worker(tokenizer: Any, text_field: str, counted: Any, stop: Any) -> None:
    # The parent decides what an interrupt means, and a parent that was killed can no longer end its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # One thread for each process: the processes are what uses the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.update(tokenizer=tokenizer, text_field=text_field, counted=counted, stop=stop)


def _leave_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def stop_if_asked() -> None:
    """Leave a job that the parent process no longer wants.

    Raises:
        InterruptedError: it does not.
    """
    if _worker["stop"].is_set():
        raise InterruptedError("the parent process asked to stop")


def token_batches(unit: Iterable[FilePart]) -> Iterator[tuple[list[Piece], list[list[int]]]]:
    """Read a unit in a process: pieces of text, and the token ids of each, without special tokens of the tokenizer's
    own adding."""
    for pieces in _batches(read_pieces(unit, _worker["text_field"])):
        stop_if_asked()
        token_ids = _tokenize(_worker["tokenizer"], [piece.text for piece in pieces])
        with _worker["counted"].get_lock():
            _worker["counted"].value += sum(map(len, token_ids))
        yield pieces, token_ids


def flat(token_ids: Iterable[list[int]]) -> np.ndarray:
    """int64 `[n]`: the tokens of all pieces, in order."""
    return np.fromiter(chain.from_iterable(token_ids), np.int64)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _without_transformers(tokenizer: Any) -> Any:
    """A copy of a tokenizer that processes can load without importing transformers and torch, where it has one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    backend = type(backend).from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def _tokenize(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if hasattr(tokenizer, "encode_batch_fast"):
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
