"""Settings and fixtures of all tests. Nothing is downloaded; each process has one thread, as several run at once."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest-xdist sets it for its workers; tests of tables choose a width themselves.
os.environ.pop("COLUMNS", None)

import functools
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Shells start background jobs with interrupts ignored, and the commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory holds NaN, so that reading it shows."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
    torch.use_deterministic_algorithms(was_deterministic)


@functools.cache
def has_compiler() -> bool:
    """Whether a C++ compiler makes a shared library here. Only if it does not are tests of compiled kernels skipped; a
    failure of the package to compile them is an error."""
    named = os.environ.get("CXX")
    found = [path for path in map(shutil.which, [named] if named else ["g++", "clang++"]) if path]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "one.cpp"), Path(folder, "one.so")
        source.write_text('extern "C" int one() { return 1; }\n')
        for compiler in found[:1]:
            command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(command, capture_output=True, check=False)
        return library.exists()


@pytest.fixture
def compiled_kernels():
    """The CPU's compiled kernels, which run in this test; it is skipped without a C++ compiler."""
    from hf_dynspec.kernels import cpu

    if not has_compiler():
        pytest.skip("needs a C++ compiler: install g++")
    kernels = cpu._kernels()
    assert kernels, "there is a C++ compiler, and it did not compile the kernels"
    return kernels


@pytest.fixture(scope="module")
def target():
    """A random target for tests that do not change it. Other targets override this fixture."""
    from models import tiny

    return tiny()


@pytest.fixture(scope="module")
def drafter(target):
    """A drafter that agrees with the target in most of its choices, for tests that do not change it."""
    from models import perturbed

    return perturbed(target)


@pytest.fixture
def rounds(monkeypatch) -> list:
    """Every chain and every tree that any session drafts."""
    from calls import Round

    from hf_dynspec.drafting.session import DraftSession

    recorded = []
    # The longest useful path is the second argument of a chain, and the third of a tree.
    for name, place in (("draft_chain", 0), ("draft_tree", 1)):
        draft = getattr(DraftSession, name)

        def recording(self, prefix, *arguments, draft=draft, place=place):
            candidates = draft(self, prefix, *arguments)
            recorded.append(Round(prefix.clone(), arguments[place], candidates))
            return candidates

        monkeypatch.setattr(DraftSession, name, recording)
    return recorded


@pytest.fixture
def graphs(monkeypatch) -> list:
    """The graphs that were recorded, on a device that is not there and has them."""
    pytest.importorskip("torch.utils.backend_registration", reason="torch knows no devices written in Python")
    from emulated_graphs import emulate

    return emulate(monkeypatch)
