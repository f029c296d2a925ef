"""Where results come from: the commit, versions and hardware."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..devices import usable_cores
from ..errors import counted
from ..shortlists import ShortlistPolicy
from .policy_text import shorten_paths

_PACKAGE = Path(__file__).parents[1]


def provenance(command: Sequence[str] | None, started: str, finished: str | None, threads: int) -> dict[str, Any]:
    """What is written beside every result, as JSON values without paths beyond their last two parts.

    Args:
        command: the words of the command line (None: called from Python).
        started, finished: UTC times in ISO format; `finished` is None while the run is not complete.
        threads: CPU threads in use.
    """
    return {
        "command": None if command is None else [shorten_paths(word) for word in command],
        "started": started,
        "finished": finished,
        "git": git_revision(),
        "versions": versions(),
        "hardware": {**hardware(), "threads": threads},
    }


def cpu_threads(count: int) -> str:
    """How many threads computed, in words."""
    return counted(count, "CPU thread")


def describe_policies(policies: Mapping[str, ShortlistPolicy]) -> dict[str, dict[str, Any]]:
    """Each policy by its label: its name, its settings and the SHA-256 of each of its tensors, which tell whether a
    published artifact is what was measured."""
    return {
        label: {
            "name": policy.name,
            "settings": policy.settings(),
            "tensors": {name: _tensor_digest(tensor) for name, tensor in policy.tensors().items()},
        }
        for label, policy in policies.items()
    }


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    named = {"hf_dynspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**named, "python": platform.python_version(), "tokenizers": metadata.version("tokenizers")}


def git_revision() -> dict[str, Any] | None:
    """The commit of the checkout that this package is run from, and whether its files differ; None in no checkout."""
    # An installed package may lie below some other project's checkout, so git must know its files.
    if not _git("ls-files", "--", str(_PACKAGE)):
        return None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", str(_PACKAGE))
    return None if commit is None else {"commit": commit, "changed": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(_PACKAGE), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """CPU, cores, memory in bytes, GPUs, and how busy the computer has been over the last one and fifteen minutes."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "load_average": None if load is None else {"1_minute": load[0], "15_minutes": load[2]},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
