"""Runs scripts in two processes by accelerate's launcher. They must leave nothing running at their end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The processes check that they are two, as accelerate's launcher may start a single one on a CPU without a message.
# An interpreter sometimes aborts if it ends while gloo's threads are alive. Only Linux lists threads, and for a moment
# also those that have ended.
PARTED = """
import contextlib, time
from pathlib import Path

def exchanging_threads():
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]

def require_parted():
    from accelerate import PartialState
    from torch import distributed
    assert PartialState().num_processes == 2
    assert not distributed.is_initialized()
    for _ in range(20):
        if not exchanging_threads():
            return
        time.sleep(0.1)
    raise AssertionError(exchanging_threads())
"""
COMMAND = """
from hf_dynspec.commands import main

if __name__ == "__main__":
    try:
        main()
    finally:
        require_parted()
"""


def launch(script: Path, *words: object) -> subprocess.CompletedProcess:
    """Run a script in two processes."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    # This overrides the computer's configuration of accelerate; without "--multi_gpu" only one process starts.
    command += ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", str(script), *map(str, words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return run


def launch_command(folder: Path, *words: object, before: str = "") -> subprocess.CompletedProcess:
    """Run this package's command line in two processes, with a script that is written to `folder`.

    Args:
        before: lines that the script begins with.
    """
    script = folder / "command.py"
    script.write_text(before + PARTED + COMMAND)
    return launch(script, *words)
