"""Commands in processes of their own, which are stopped in the middle of their work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]

# Batches are small, and everything that was counted is saved at once.
SMALL_BATCHES = """
import signal
from hf_dynspec.build import corpus, frequency, graph, tokens

corpus.PIECE_CHARACTERS, tokens.BATCH_CHARACTERS, graph.BATCHES_OF_A_PART = 500, 2_000, 2
frequency.SAVE_EVERY_SECONDS = 0
"""
_MAIN = """
from hf_dynspec.commands import main

# What a shell starts in the background is to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
# With a rest after each saving, so that a command does not end while whoever is to stop it is held up.
_REST = """
import time

def resting(save):
    return lambda *arguments: (save(*arguments), time.sleep(1.0))[0]

frequency.Tally.save = resting(frequency.Tally.save)
graph.BigramCounts._write = resting(graph.BigramCounts._write)
"""
RUN_WITH_SMALL_BATCHES = SMALL_BATCHES + _MAIN
RUN_SLOWLY = SMALL_BATCHES + _REST + _MAIN


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
    """Send a signal as soon as something holds; return what the command said. Nothing that it started outlives it."""
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
