"""The `hf-dynspec` command line. Each file beside this one is one command or one group of commands,
but for `common`, which they share."""

import typer

from .bench import bench
from .build import build_app
from .clusters import clusters
from .convert import convert_app
from .coverage import coverage
from .push import push
from .train import train_app

app = typer.Typer(
    name="hf-dynspec",
    help="Dynamic drafter vocabularies for speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
build_app.command()(clusters)
app.add_typer(build_app, name="build")
app.add_typer(convert_app, name="convert")
app.add_typer(train_app, name="train")
app.command()(bench)
app.command()(coverage)
app.command()(push)


def main() -> None:
    """Run the command line; errors that this package raises on purpose end in one line and exit status 1."""
    from ..errors import DynSpecError

    try:
        app()
    except DynSpecError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
