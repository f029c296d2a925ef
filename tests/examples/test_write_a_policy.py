"""The page on policies of one's own: its Python runs as it stands, on the embedded pocket pair."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dynspec.shortlists import POLICIES

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "examples" / "pocket"
PAGE = ROOT / "docs" / "write-a-policy.md"


def python_blocks() -> list[tuple[int, str]]:
    """Fenced blocks of Python and the number of the line before each."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


@pytest.fixture
def pocket_pair(monkeypatch, tmp_path) -> dict:
    """What the page calls `target`, `drafter`, `tokenizer` and `inputs`, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    models = {
        name: AutoModelForCausalLM.from_pretrained(POCKET / name, dtype="float32") for name in ("target", "drafter")
    }
    return {**models, "tokenizer": tokenizer, "inputs": tokenizer("The court held that", return_tensors="pt")}


@pytest.mark.process
def test_the_python_of_the_page_runs(pocket_pair):
    before, namespace = dict(POLICIES), dict(pocket_pair)
    try:
        for line, source in python_blocks():
            exec(compile("\n" * line + source, PAGE, "exec"), namespace)
    finally:
        POLICIES.clear()
        POLICIES.update(before)
    plain = pocket_pair["target"].generate(**pocket_pair["inputs"], max_new_tokens=32, do_sample=False)
    assert namespace["output"].tolist() == plain.tolist()
    assert namespace["assistant"].policy.size == 512
    assert type(namespace["assistant"].policy).__name__ == "LikelyShortlist"


def test_its_policy_is_twenty_lines():
    """What is neither blank, nor imported, nor a signature."""
    _, source = python_blocks()[0]
    lines = [line.strip() for line in source.splitlines()]
    own = [one for one in lines if one and not one.startswith(("import", "from", "def", "class", "@", "#"))]
    assert len(own) <= 22
