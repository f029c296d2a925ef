"""The `hf-dynspec` command line. Each file is one command or one group of commands, except for those that commands
share: `options`, `common`, `running`, `launched`, `building`, `training_job` and `drafter_card`."""

from typing import Annotated

import typer

from .bench import bench
from .clusters import clusters
from .convert import convert_app
from .coverage import coverage
from .doctor import doctor
from .evaluate import evaluate
from .export import export_app
from .frequency import frequency, frequency_import
from .graph import graph
from .launched import part_from_launched
from .plot import plot
from .push import push
from .running import CommandApp, Commands
from .trace import trace
from .train import train_app
from .train_drafter import drafter, eagle

build_app = CommandApp(help="Build artifacts from text, prompts and weights.")
# Whole sentences that fit into a line of the list of commands: click cuts longer ones off.
build_app.command(short_help="Rank tokens by how often they occur in text.")(frequency)
build_app.command("frequency-import", short_help="Make a ranking of a .pt frequency list.")(frequency_import)
build_app.command(short_help="Divide the vocabulary into clusters of tokens.")(clusters)
build_app.command(short_help="Count which token follows on which in text.")(graph)

train_app.command(short_help="Train an EAGLE head for any model.")(eagle)
train_app.command(short_help="Train an independent small drafter for any model.")(drafter)

app = CommandApp(name="hf-dynspec", help="Dynamic drafter vocabularies for speculative decoding.", cls=Commands)
app.add_typer(build_app, name="build")
app.add_typer(convert_app, name="convert")
app.add_typer(export_app, name="export")
app.add_typer(train_app, name="train")
app.command(short_help="Measure the speed of policies on prompts of yours.")(bench)
app.command(short_help="Measure how much of the target's mass shortlists hold.")(coverage)
app.command(short_help="Say beforehand whether drafting pays, and how.")(doctor)
app.command(short_help="Run whole suites, or measure a paper's table.")(evaluate)
app.command(short_help="Draw what bench or evaluate wrote, and run nothing.")(plot)
app.command(short_help="Publish what was made on the Hugging Face Hub.")(push)
app.command(short_help="Show what a policy did for one prompt.")(trace)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from .. import __version__

        typer.echo(f"hf-dynspec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Dynamic drafter vocabularies for speculative decoding."""


def main() -> None:
    """Run the command line. This package's own errors and those of the operating system end in one line and exit
    status 1, an interrupt in one line and 130."""
    import sys
    import warnings

    from ..errors import DynSpecError

    # If the terminal's encoding lacks a character, the rest is still printed.
    sys.stdout.reconfigure(errors="replace")
    # The line of source that warns means nothing to a user.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    try:
        app()
    except DynSpecError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise SystemExit(1) from None
    except SystemExit as end:
        # After a failure other processes may still wait in an exchange, and parting would wait for them.
        if not end.code:
            part_from_launched()
        raise
