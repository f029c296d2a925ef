"""Every file of tests runs: a folder or a name that pytest overlooks would hide its tests without a word."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_file_of_tests_is_collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--numprocesses=0"]
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    collected = {line.partition("::")[0] for line in listed.stdout.splitlines()}
    files = {file.relative_to(TESTS.parent).as_posix() for file in TESTS.rglob("test_*.py")}
    assert files - collected == set(), listed.stdout[-2000:] + listed.stderr[-2000:]
