"""Starts commands in their own processes and stops them in the middle of their work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]

RUN_WITH_SMALL_UNITS = """
import functools, signal, sys
from hf_dynspec.build import corpus
from hf_dynspec.commands import main

if __name__ == "__main__":
    # A shell's background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    corpus.plan_corpus = functools.partial(corpus.plan_corpus, unit_bytes=4_000)
    main()
"""


# With a pause after each unit, so that a command does not end before it is stopped.
REST = """
import time
from hf_dynspec.build.bigram_counts import BigramCounts
from hf_dynspec.build.frequency import Tally

def resting(add):
    return lambda *arguments: (add(*arguments), time.sleep(SECONDS))[0]

if __name__ == "__main__":
    BigramCounts.add, Tally.add = resting(BigramCounts.add), resting(Tally.add)
"""
RUN_SLOWLY = REST.replace("SECONDS", "1.0") + RUN_WITH_SMALL_UNITS
# For few units, which are large.
RUN_VERY_SLOWLY = f"""{REST.replace("SECONDS", "60.0")}
from hf_dynspec.commands import main

if __name__ == "__main__":
    main()
"""


def start(script: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_when(is_time: Callable[[], bool], process: subprocess.Popen, how: signal.Signals) -> str:
    """Send a signal as soon as `is_time()`; return the command's stderr. No process that it started outlives it."""
    while not is_time():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    _, messages = process.communicate(timeout=600)
    assert process.returncode != 0, "the command ended before it could be stopped; give it more to do"
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "processes outlived the command"
    return messages
