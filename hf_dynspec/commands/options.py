"""The options that several commands take, each with one help text."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

# Models --------------------------------------------------------------------------------------------------------------

_TARGET = typer.Option(help="Folder or Hub id of the model to speed up.")
Target = Annotated[str, _TARGET]
TargetIfMeasured = Annotated[str | None, _TARGET]
DrafterModel = Annotated[
    str | None, typer.Option(help="Folder or Hub id of what drafts, or mtp: the target's own MTP layers.")
]
EagleHead = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder or Hub id of an EAGLE head, in place of a drafter.")
]
EagleHeads = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR", help="Repeatable. Folder or Hub id of an EAGLE head, beside or without a drafter."),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read heads from a .bin where there are no safetensors, tensors only.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="Default: that of the weights, or float32 to train on a CPU slow in 16 bits."),
]
Device = Annotated[str, typer.Option(help="Where both models run, such as cpu or cuda:0.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]

# What is measured ----------------------------------------------------------------------------------------------------

# How the values of options are written, and what a file of prompts holds.
POLICY = "NAME[:SETTING=VALUE,...]"
TREE_SHAPE = "TOTAL_TOKENS/DEPTH/TOP_K"
PROMPT_LINES = "JSON lines: Spec-Bench's `turns`, or `prompt` or `text`."


def more(what: str, metavar: str = "FILE") -> Any:
    """The argument that takes the files that a shell's * stands for, but for the first, which the option before it
    took."""
    return typer.Argument(metavar=metavar, help=f"More {what}, so that shells can expand *.")


Prompts = Annotated[list[Path], typer.Option(metavar="FILE...", help=PROMPT_LINES)]
MorePrompts = Annotated[list[Path] | None, more("prompts")]
Limit = Annotated[int | None, typer.Option(help="Take the first so many prompts of each category of each file.")]
ChatTemplate = Annotated[
    bool, typer.Option(help="Make each prompt the user's turn of a chat, for models that expect one.")
]
MaxPromptTokens = Annotated[int | None, typer.Option(help="Keep the last so many tokens of longer prompts.")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        metavar=POLICY,
        help="Repeatable. hybrid, frequency:size=32768, frequency:ranking=FOLDER, "
        "frequency:size=1024+in_context:eviction=lru; a class of your own as package.module:Class. "
        "Default: full, frequency, in_context and hybrid.",
    ),
]
Chain = Annotated[bool, typer.Option(help="Draft chains.")]
Trees = Annotated[
    list[str] | None,
    typer.Option(metavar=TREE_SHAPE, help="Repeatable. Draft trees of this shape too; default means 60/5/10."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Temperatures = Annotated[list[float] | None, typer.Option(help="Repeatable; 0, the default, is greedy.")]
TopK = Annotated[int, typer.Option(help="For sampling, as in transformers; 0 draws from all tokens.")]
Repeats = Annotated[int, typer.Option(help="Times that each system runs each prompt.")]
TransformersAssisted = Annotated[bool, typer.Option(help="Run transformers' assisted generation too.")]
Rivals = Annotated[
    bool, typer.Option(help="Run transformers' assisted generation by its own defaults, and prompt lookup, too.")
]
Seed = Annotated[int, typer.Option(help="For sampling.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures and where they come from.")
]

# What is built -------------------------------------------------------------------------------------------------------

Tokenizer = Annotated[str, typer.Option(help="Folder or Hub id of the tokenizer, or of the model that it belongs to.")]
Out = Annotated[Path, typer.Option(help="Folder of the artifact.")]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH...",
        help="Files and folders: .txt, .md and other plain text, .jsonl, .parquet; .gz, .xz and .zst too.",
    ),
]
TextField = Annotated[str, typer.Option(help="JSON field or Parquet column that holds the text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the artifact in the folder.")]
OverwriteCounts = Annotated[
    bool, typer.Option("--overwrite", help="Replace the artifact and drop unfinished counts in the folder.")
]

Settings = TypeVar("Settings")


def settings_of(context: typer.Context, kind: type[Settings], **others: Any) -> Settings:
    """The settings of a measurement: a field that has the name of an option takes its value. Only plain values are
    taken in that way: what becomes a list or a path is still text in the context, and belongs to `others`."""
    names = {field.name for field in fields(kind)} - others.keys()
    return kind(**{name: value for name, value in context.params.items() if name in names}, **others)
