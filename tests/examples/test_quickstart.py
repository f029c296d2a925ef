"""The first minute: what `make quickstart` prints for the embedded pair and for others, at 80 columns."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cases import representatives
from eagle_heads import random_head
from pocket import POCKET, TARGET_SHAPE, VOCABULARY_SIZE, has_head_product
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SMALL = ("--max-new-tokens", "16", "--repeats", "1")
ROW = re.compile(
    r"^  (?P<name>\S.*?)  +(?P<speed>\d+)  +(?P<times>\d+\.\d\d)  +(?P<length>\d+\.\d\d) .* (?P<same>yes|NO)  $"
)
CLOSING = re.compile(
    r"^(?:EAGLE, )?hybrid: (\d+\.\d)× full, (?:(\d+\.\d)× transformers' assisted, )?(\d+\.\d)× plain, same tokens\.$"
)


def quickstart(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "default", str(ROOT / "examples" / "quickstart.py"), *map(str, words)],
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def table_of(run: subprocess.CompletedProcess) -> dict[str, dict[str, str]]:
    """The rows of the table by name, of a run that printed nothing on stderr and fits 80 columns."""
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    return {found["name"]: found.groupdict() for found in map(ROW.match, lines) if found}


@pytest.fixture
def examples(monkeypatch) -> None:
    """The examples can be imported, and change nothing of this process."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("quickstart.silence_libraries", lambda: None)


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    """A random EAGLE head for the pocket target."""
    return random_head("eagle2", VOCABULARY_SIZE, **TARGET_SHAPE).write(tmp_path_factory.mktemp("quickstart") / "head")


@pytest.mark.process
def test_it_shows_what_shortlists_are_for_and_no_library_warns():
    run = quickstart(*SMALL)
    table = table_of(run)
    ours = ["full", "frequency", "in_context", "hybrid"]
    plain = ["plain generate", *(["plain, our LM head"] if has_head_product() else [])]
    assert list(table) == [*plain, "transformers' assisted", *ours, "EAGLE, full", "EAGLE, hybrid"]
    assert ("our LM head: the product" in run.stdout) == has_head_product()
    assert all(row["same"] == "yes" for row in table.values())
    assert "def get_parent(self):" in run.stdout
    real = re.search(r"151,936 tokens × 1,024.* ([\d.]+) ms for all tokens and\s([\d.]+)\sms", run.stdout, re.DOTALL)
    assert float(real[1]) > float(real[2]) > 0
    (closing,) = filter(None, map(CLOSING.match, run.stdout.splitlines()))
    # What plain generation gains by the product is no merit of drafts.
    fastest_plain = max(plain, key=lambda name: float(table[name]["speed"]))
    for shown, other in zip(closing.groups(), ("full", "transformers' assisted", fastest_plain), strict=True):
        # Speeds in the table are rounded to whole tokens per second.
        speed, others = float(table["hybrid"]["speed"]), float(table[other]["speed"])
        assert (speed - 0.5) / (others + 0.5) - 0.051 <= float(shown)
        assert others < 1 or float(shown) <= (speed + 0.5) / (others - 0.5) + 0.051
    named = re.findall(r"^  ((?:docs|model_cards)?/?[\w-]+\.md)  ", run.stdout, re.MULTILINE)
    assert len(named) == 4 and all((ROOT / name).is_file() for name in named)


@pytest.mark.process
@pytest.mark.parametrize("has_drafter", [True, False])
def test_it_runs_the_pair_that_is_named(head, has_drafter):
    drafter = ("--drafter", POCKET / "drafter") if has_drafter else ()
    run = quickstart(*SMALL, "--target", POCKET / "target", "--eagle", head, *drafter, "--prompt", "import os\n")
    table = table_of(run)
    assert {"plain generate", "EAGLE, full", "EAGLE, hybrid"} <= set(table)
    assert ("hybrid" in table) == ("transformers' assisted" in table) == has_drafter
    assert run.stdout.startswith("import os\n")
    (closing,) = filter(None, map(CLOSING.match, run.stdout.splitlines()))
    assert closing[0].startswith("EAGLE") != has_drafter and (closing[2] is None) != has_drafter


REFUSED = {
    "no target": (("--drafter", POCKET / "drafter"), "name its target too"),
    "nothing drafts": (("--target", POCKET / "target"), "name a drafter"),
    "no folder": (("--target", "nowhere", "--drafter", POCKET / "drafter"), "the target nowhere cannot be loaded"),
    "no model": (("--target", POCKET / "target", "--drafter", POCKET), "the drafter"),
    "no head": (("--target", POCKET / "target", "--eagle", POCKET / "target"), "EAGLE head"),
}


@pytest.mark.parametrize("name", representatives("process", REFUSED, keep=3))
def test_what_cannot_run_is_refused_by_name(name, examples):
    words, message = REFUSED[name]
    import quickstart

    app = typer.Typer()
    app.command()(quickstart.main)
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_make_passes_the_pair_on(monkeypatch):
    monkeypatch.setenv("MAKELEVEL", "1")  # as under `make test`, in which make prints its folder too

    def recipe(*words: str) -> str:
        run = subprocess.run(
            ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/ready", "quickstart", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.splitlines()[-1]

    assert recipe() == "HF_HUB_OFFLINE=1 .venv/bin/python examples/quickstart.py"
    passed = '.venv/bin/python examples/quickstart.py --target "a b" --drafter "c" --eagle "d/e"'
    assert recipe("TARGET=a b", "DRAFTER=c", "EAGLE=d/e") == passed


def test_a_head_of_real_size_is_left_out_where_memory_is_short(examples, monkeypatch):
    import real_head

    monkeypatch.setattr(real_head, "available_bytes", lambda: 2**29)
    monkeypatch.setattr(real_head, "head_seconds", lambda: pytest.fail("memory was taken"))
    shown = io.StringIO()
    real_head.show_real_head(Console(file=shown, width=80))
    assert "was not measured" in shown.getvalue() and "0.5 GiB are free" in " ".join(shown.getvalue().split())
