"""What tests of fast kernels share. A Triton kernel runs on a GPU if there is one, and everywhere in triton's
interpreter, which must be chosen before triton is imported: a test runs its file once more in a process of its own."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
runs_triton = pytest.mark.skipif(
    not HAS_TRITON or not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU or TRITON_INTERPRET=1"
)
needs_compiled_triton = pytest.mark.skipif(
    not HAS_TRITON or INTERPRETED or sys.platform != "linux", reason="triton's compiler is for Linux"
)


def must_not_run(*args):
    raise AssertionError("the plain twin ran in place of the fast kernel")


def run(words: list[object], **environment: str) -> str:
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def interpret(file: str, passed: int) -> None:
    """Run the tests of Triton kernels in a file by the interpreter; so many pass."""
    words = ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", file, "-k", "test_triton"]
    output = run(words, TRITON_INTERPRET="1")
    assert re.search(rf"\b{passed} passed\b", output) and "skipped" not in output, output[-2000:]
