"""What the commands that measure a pair have in common: options, checks of files, the progress bar, the console."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

# Of tables in a file or a pipe, which are taken to have 80 columns where nothing says otherwise.
WIDTH_OF_FILES = 180
INTERRUPTED = 130

Target = Annotated[str, typer.Option(help="Folder or Hub id of the model to speed up.")]
DrafterModel = Annotated[str | None, typer.Option(help="Folder or Hub id of the small model.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read heads from a .bin where there are no safetensors.")
]
Prompts = Annotated[
    list[Path], typer.Option(metavar="FILE...", help="JSON lines: Spec-Bench's `turns`, or `prompt` or `text`.")
]
MorePrompts = Annotated[
    list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompts, so that shells can expand *.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:SETTING=VALUE,...]",
        help="Repeatable. hybrid, frequency:size=32768, frequency:ranking=FOLDER, "
        "frequency:size=1024+in_context:eviction=lru. Default: full, frequency, in_context and hybrid.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt.")]
Limit = Annotated[int | None, typer.Option(help="Take the first so many prompts of each category of each file.")]
ChatTemplate = Annotated[
    bool, typer.Option(help="Make each prompt the user's turn of a chat, for models that expect one.")
]
MaxPromptTokens = Annotated[int | None, typer.Option(help="Keep the last so many tokens of longer prompts.")]
Dtype = Annotated[str | None, typer.Option(help="Such as bfloat16, or auto. Default: float32 on a CPU, else auto.")]
Device = Annotated[str, typer.Option(help="Where both models run, such as cpu or cuda:0.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
Seed = Annotated[int, typer.Option(help="For sampling.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures and where they come from.")
]


def require_writable(path: Path | None, option: str) -> None:
    """Refuse before hours of work a file that could not be written after them."""
    from ..errors import ConfigurationError

    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: {option} takes a file in an existing folder")


def command_line(context: typer.Context) -> list[str]:
    """The words of the command as it was given; `provenance` shortens the paths."""
    words = ["hf-dynspec", context.info_name or ""]
    for parameter in sorted(context.command.params, key=lambda item: item.param_type_name == "argument"):
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else (parameter.secondary_opts or parameter.opts)[0])
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[0]] if parameter.param_type_name == "option" else []
            words.append(str(item))
    return words


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar that moves only when it is told to, so that nothing is drawn while a call is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as RemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), RemainingColumn())
    described = TextColumn("{task.description}", markup=False)
    progress = Progress(*columns, described, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("", total=None)

    def report(activity: str, done: int, total: int) -> None:
        # Not before the first report: while models are loaded, transformers shows bars of its own.
        progress.start()
        progress.update(task, description=activity, completed=done, total=total)
        progress.refresh()

    try:
        yield report
    finally:
        if progress.live.is_started:
            progress.stop()


def wide_console() -> "Console":
    """A console for tables: as wide as the terminal, as `COLUMNS` says, or wide where neither limits it."""
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(console.width, WIDTH_OF_FILES))


def about(models: dict, threads: int, max_new_tokens: int, chain_length: int | None) -> str:
    """One line that says on what and how it was measured; `chain_length` is None where no chains were drafted."""
    from ..evaluation.provenance import hardware

    target, where = models["target"], hardware()
    processor = where["gpus"][0] if target["device"].startswith("cuda") else where["cpu"]
    parts = [processor, f"{threads} CPU threads", target["dtype"]]
    parts.append(f"{max_new_tokens} new tokens")
    return ", ".join([*parts, *([] if chain_length is None else [f"chains of {chain_length}"])])
