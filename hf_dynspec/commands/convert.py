"""`hf-dynspec convert`: checkpoints from one layout to another."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError, counted
from . import options
from .running import MODEL_FILES, CommandApp, claim_folder

convert_app = CommandApp(help="Convert checkpoints from one layout to another.")


class Layout(str, Enum):
    """What `--to` takes."""

    official = "official"
    speculators = "speculators"
    sglang = "sglang"


# Without a callback a group of one command would be that command.
@convert_app.callback()
def _group() -> None:
    pass


@convert_app.command()
def eagle(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or Hub id of an EAGLE head.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    to: Annotated[Layout, typer.Option(help="SafeAILab's layout, that of speculators and vLLM, or SGLang's.")],
    verifier: Annotated[
        str | None, typer.Option(help="For speculators: name or path of the target, as its configuration has it.")
    ] = None,
    architectures: Annotated[
        list[str] | None, typer.Option(help="For speculators, repeatable: the target's, such as LlamaForCausalLM.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(help="For speculators: folder of the target, to take rows of its head and --architectures from."),
    ] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=1, help="For speculators: tokens to draft, unless the server is told otherwise.")
    ] = 5,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    allow_pickle: options.AllowPickle = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in OUT.")] = False,
) -> None:
    """Convert an EAGLE head. What the other layout cannot express is refused.

    EAGLE-3 goes from the official layout to speculators and back with every bit of its tensors. For SGLang, an EAGLE-2
    head without fc.bias gets a zero one.
    """
    if not overwrite and any((out / name).exists() for name in MODEL_FILES):
        raise ConfigurationError(f"{out} holds a model already. Give --overwrite, or another folder.")
    claim_folder(context, out, "OUT", own=MODEL_FILES)
    from ..drafters.eagle.checkpoint import read_checkpoint, write_checkpoint
    from ..drafters.eagle.conversion import convert_checkpoint, read_output_rows

    checkpoint = read_checkpoint(source, revision=revision, allow_pickle=allow_pickle)
    rows, found = (None, ()) if target is None else read_output_rows(target)
    converted = convert_checkpoint(
        checkpoint,
        to.value,
        verifier=verifier,
        architectures=architectures or found,
        output_rows=rows,
        speculative_tokens=speculative_tokens,
    )
    write_checkpoint(out, converted)
    tensors = counted(len(converted.tensors), "tensor")
    typer.echo(f"{out}: an EAGLE-{converted.settings.generation} head in the {to.value} layout, {tensors}")
