"""What tests of commands share: a command within this process, and what a terminal would show."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from hf_dynspec.commands import app


def invoke(*words: object, **options: Any) -> Result:
    """The command in this process; an error is in `exception`."""
    return CliRunner().invoke(app, list(map(str, words)), **options)


def shown(*parts: Any, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(*parts)
    return capture.get()


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
