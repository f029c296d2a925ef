"""Files that are replaced in one step, and the one place that does it."""

import ast
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import hf_dynspec
from hf_dynspec.files import replacing, scratch_files, write_json

PACKAGE = Path(hf_dynspec.__file__).parent


def test_a_file_is_whole_before_anybody_finds_it(tmp_path):
    path = tmp_path / "folder" / "file.bin"
    for text in ("first", "second"):
        before = path.read_text() if path.exists() else None
        with replacing(path) as scratch:
            scratch.write_text(text[:3])
            assert scratch.parent == path.parent and (path.read_text() if path.exists() else None) == before
            scratch.write_text(text)
        assert path.read_text() == text and os.listdir(path.parent) == ["file.bin"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file.bin"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as scratch:
            scratch.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.bin"]


def test_a_killed_process_leaves_the_old_file(tmp_path):
    code = """
        import os, pathlib, signal, sys
        from hf_dynspec.files import replacing
        with replacing(pathlib.Path(sys.argv[1])) as scratch:
            scratch.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "file.bin"
    path.write_text("old")
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    assert subprocess.run(command, cwd=PACKAGE.parent, timeout=600, check=False).returncode == -signal.SIGKILL
    (left,) = scratch_files(path)
    assert path.read_text() == "old" and left.read_text() == "half"
    # It may be another process's, that still writes. After an hour it is nobody's.
    write_json(path, {"new": 1})
    assert scratch_files(path) == [left]
    os.utime(left, (time.time() - 3700,) * 2)
    write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"new": 2} and os.listdir(tmp_path) == ["file.bin"]


def test_several_writers_leave_one_whole_file(tmp_path):
    path = tmp_path / "file.json"

    def write(index: int) -> None:
        for _ in range(20):
            write_json(path, {"values": [index] * 500})

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            seen.append(json.loads(path.read_text())["values"])
    for thread in threads:
        thread.join()
    assert seen and all(len(values) == 500 and len(set(values)) == 1 for values in seen)
    assert os.listdir(tmp_path) == ["file.json"]


def test_others_may_read_what_the_process_lets_them_read(tmp_path):
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "file.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.json").stat().st_mode) == 0o644


# What replaces files of its own accord, and why.
ELSEWHERE = {
    "artifacts/writing.py": "several files of an artifact change together, and readers follow config.json meanwhile",
    "drafters/eagle/checkpoint.py": "the settings and the tensors of a head change together",
}


def test_there_is_one_place_that_replaces_files():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.replace", "os.rename", "os.fsync"):
                found.add(file.relative_to(PACKAGE).as_posix())
    assert found == {"files.py", *ELSEWHERE}
