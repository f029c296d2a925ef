"""What tests of artifacts share."""

import pytest
from local_hub import running_hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub that the usual client finds, and a working folder that has nothing to do with it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub
