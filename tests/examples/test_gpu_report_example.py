"""The script that checks and measures the package on a GPU runs with tiny models."""

import json
import sys
from pathlib import Path

import pytest
import typer

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import gpu_report


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
def test_a_page_with_every_section(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    gpu_report.main(tmp_path, small=True, agreement=0.75, minutes=5.0, repeats=1, tests=False)
    page, data = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert "**" not in page, page
    for drafter in ("EAGLE-2 head", "independent drafter"):
        found = {one["system"]: one for one in data[f"speeds, {drafter}"]}
        assert list(found)[:2] == [gpu_report.PLAIN, gpu_report.COMPILED] and len(found) == 8
        assert all(one["same_tokens"] == 1.0 and f"| {name} |" in page for name, one in found.items())
        assert found["hybrid, chains of 5"]["rounds"] < found[gpu_report.PLAIN]["rounds"]
    assert [one["texts"] for one in data["batches"]] == [1, 8] and len(data["contexts"]) == 3
    assert all(one["seconds"] > 0 for name in ("verification", "attention") for one in data[name]["measurements"])


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
def test_what_fails_and_what_comes_too_late_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    gpu_report.main(tmp_path, small=True, agreement=0.75, minutes=-1.0, repeats=1, tests=False)
    page = (tmp_path / "report.md").read_text()
    assert page.count("**TimeoutError:** left out, as the time did not suffice") == 7


@pytest.mark.skipif(gpu_report.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure(tmp_path):
    with pytest.raises(typer.BadParameter, match="no GPU: give --small"):
        gpu_report.main(tmp_path / "new", small=False, agreement=0.75, minutes=1.0, repeats=1, tests=False)
    assert not (tmp_path / "new").exists()
