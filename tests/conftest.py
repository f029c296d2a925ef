"""Settings for all tests: nothing is downloaded, and one thread each, as several tests run side by side."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def poisoned_memory():
    """Memory that torch hands out empty holds NaN, so that reading it shows."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was_filled
    torch.use_deterministic_algorithms(was_deterministic)
