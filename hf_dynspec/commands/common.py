"""What commands share: the command as it was given, the file of results, the progress bar, the console."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DynSpecError, counted
from .running import claim_file, describe_os_error, end_interrupted, raise_lost_interrupt

if TYPE_CHECKING:
    from rich.console import Console

# Between two lines of progress, and how long a measurement may take without saying so beforehand.
_LINE_SECONDS, _LONG_SECONDS = 20.0, 120.0
# Columns of tables in a file or a pipe, which rich takes to have 80.
WIDTH_OF_FILES = 180


def claim_results(context: typer.Context, json_file: Path | None, plot: Path | None = None) -> "ResultsFile":
    """The file of a measurement's results. It and its plot are locked, or refused, before any work."""
    from ..evaluation.plots import require_plot_file

    claim_file(context, json_file, "--json")
    claim_file(context, plot, "--plot")
    if plot is not None:
        require_plot_file(plot, "leave --plot out")
    return ResultsFile(context, json_file)


class ResultsFile:
    """The file that holds what a command has measured so far; None keeps nothing. A full disk does not end a
    measurement."""

    def __init__(self, context: typer.Context, path: Path | None):
        self.words, self._path = command_line(context), path
        self._problem: OSError | None = None

    def save(self, to_dict: Callable[[list[str]], dict[str, Any]]) -> None:
        """Replace the file, if it can be written, by the JSON values of a function that takes the command's words."""
        from ..files import write_json

        if self._path is None:
            return
        try:
            write_json(self._path, to_dict(self.words))
            self._problem = None
        except OSError as error:
            self._problem = error

    def end(self, is_complete: bool = True, is_empty: bool = False) -> None:
        """Raise a `DynSpecError` if the last values could not be written. After an interrupt, say where the figures
        are, and exit with its status."""
        if self._problem is not None:
            problem = describe_os_error(self._problem)
            raise DynSpecError(f"{self._path} lacks what was measured, which is above: {problem}")
        if not is_complete:
            where = "above" if self._path is None else f"above and in {self._path}"
            kept = "nothing was measured yet" if is_empty else f"what was measured until then is {where}"
            end_interrupted(f"{kept}; the same command begins anew")


def command_line(context: typer.Context, shown: Callable[[Any], str] = str) -> list[str]:
    """The words of the command as it was given; `shown` turns the value of an option into a word."""
    group = context.parent.info_name if context.parent and context.parent.parent else None
    words = ["hf-dynspec", *([group] if group else []), context.info_name or ""]
    for parameter in sorted(context.command.params, key=lambda item: item.param_type_name == "argument"):
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        option = [parameter.opts[0]] if parameter.param_type_name == "option" else []
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else (parameter.secondary_opts or parameter.opts)[0])
        elif parameter.nargs > 1:
            words += [*option, *map(shown, value)]
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [*option, shown(item)]
    return words


@contextmanager
def progress_bar(is_shown: bool = True, shorter: str | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that is drawn only when it is moved, so that nothing is drawn while a call is timed; lines now and then,
    where the output is no terminal. Of several processes one shows it. `shorter` is said once if it takes minutes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as RemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), RemainingColumn())
    described = TextColumn("{task.description}", markup=False)
    progress = Progress(*columns, described, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("", total=None)
    before, first, began, told = 0, 0, 0.0, 0.0

    def report(activity: str, done: int, total: int) -> None:
        nonlocal before, first, began, told, shorter
        raise_lost_interrupt()
        if not is_shown:
            return
        now = time.monotonic()
        if done < before or not began:
            first, began, told = done, now, now
        left = (now - began) * (total - done) / max(1, done - first)
        if not progress.console.is_terminal and now - told > _LINE_SECONDS:
            told, less = now, f", about {left / 60:.1f} minutes left" if done > first else ""
            print(f"{activity}: {done:,} of {total:,}{less}", file=sys.stderr)
        if shorter and done > first and now - began > _LINE_SECONDS and left > _LONG_SECONDS:
            progress.console.print(f"about {left / 60:.0f} minutes more to go; {shorter}", highlight=False)
            shorter = None
        before = done
        # Not before the first report: while models are loaded, transformers shows bars of its own.
        progress.start()
        if began == now:
            # Another activity begins, with a pace of its own.
            progress.reset(task)
        progress.update(task, description=activity, completed=done, total=total)
        progress.refresh()

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()


def tell_notes(notes: Iterable[str]) -> None:
    """Print the notes of a measurement."""
    from ..evaluation.pair import INTERRUPTION

    for note in notes:
        if note != INTERRUPTION:  # said at the end
            typer.echo(f"note: {note}", err=True)


def wide_console() -> "Console":
    """A console for tables: as wide as the terminal or as `COLUMNS` says, else wide."""
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(console.width, WIDTH_OF_FILES))


def about(models: dict, threads: int, max_new_tokens: int, chain_length: int | str | None) -> str:
    """One line about the hardware and the settings of a measurement; `chain_length` is None without chains."""
    from ..evaluation.provenance import cpu_threads, hardware

    target, where = models["target"], hardware()
    processor = where["gpus"][0] if target["device"].startswith("cuda") else where["cpu"]
    parts = [processor, cpu_threads(threads), target["dtype"], counted(max_new_tokens, "new token")]
    if chain_length is not None:
        parts.append("chains as long as pays" if chain_length == "auto" else f"chains of {chain_length}")
    return ", ".join(parts)
