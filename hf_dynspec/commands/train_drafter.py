"""`hf-dynspec train eagle` and `hf-dynspec train drafter`: a drafter for a model that has none."""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .building import UNFINISHED, command_text, describe_inputs, find_text, going_on, require_free_folder
from .common import progress_bar
from .launched import before_connecting
from .running import keeps

if TYPE_CHECKING:
    from ..build.drafter_job import MakeDrafter
    from ..build.drafter_losses import HeldOutFigures
    from ..build.drafter_training import DrafterTrainingState

_MINUTES = 30.0
_WORTH_IT = 1.5  # the expected acceptance length from which a drafter is worth trying
# Defaults on CPUs, where more batches are worth more than larger ones, and on GPUs.
_SIZES = {"window": (256, 512), "batch_tokens": (512, 4096), "scored_tokens": (4096, 24_576)}

Data = Annotated[
    list[Path],
    typer.Option(metavar="PATH...", help="Files and folders like your texts, as `build frequency --text` takes them."),
]
MoreData = Annotated[list[Path] | None, options.more("data", "PATH")]
Out = Annotated[Path, typer.Option(help="Folder of the drafter.")]
Minutes = Annotated[
    float | None, typer.Option(help="To work for, after models are loaded. Default: 30, unless --steps is given.")
]
Steps = Annotated[int | None, typer.Option(help="Batches to train on, at most.")]
SelfWritten = Annotated[float, typer.Option(metavar="SHARE", help="Share of the texts that the target writes itself.")]
Depth = Annotated[int, typer.Option(help="Draft steps of the chains that are trained on.")]
Decay = Annotated[float, typer.Option(help="Weight of each draft step beside the one before it.")]
Window = Annotated[
    int | None, typer.Option(help="Tokens of text that are read at a time. Default: 256, on a GPU 512.")
]
BatchTokens = Annotated[
    int | None, typer.Option(help="Tokens of a batch, at least, over all processes. Default: 512, on a GPU 4096.")
]
ScoredTokens = Annotated[
    int | None,
    typer.Option(help="Token ids that a batch is scored by, of larger vocabularies. Default: 4096, on a GPU 24576."),
]
LearningRate = Annotated[
    float | None, typer.Option(help="Of AdamW, at its highest. Default: by the width of the target.")
]
Schedule = Annotated[str, typer.Option(help="Of the learning rate, after it rose: cosine or constant.")]
SaveEvery = Annotated[int, typer.Option(help="Batches between two savings of the state; it is saved each minute too.")]
Seed = Annotated[int, typer.Option(min=0, help="Of samples, first weights and order.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the drafter, and drop unfinished work in the folder.")
]


def eagle(
    *,
    context: typer.Context,
    target: options.Target,
    data: Data,
    out: Out,
    more: MoreData = None,
    text_field: options.TextField = "text",
    layout: Annotated[
        str | None,
        typer.Option(
            help="eagle3: reads three hidden states, for vLLM and SGLang too. eagle2: one. Default: as fits."
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="Width of the layer's MLP. Default: the target's.")
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    self_written: SelfWritten = 0.5,
    depth: Depth = 5,
    decay: Decay = 0.85,
    window: Window = None,
    batch_tokens: BatchTokens = None,
    scored_tokens: ScoredTokens = None,
    learning_rate: LearningRate = None,
    schedule: Schedule = "cosine",
    save_every: SaveEvery = 100,
    seed: Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    overwrite: Overwrite = False,
) -> None:
    """Train an EAGLE head for any decoder-only model.

    The head learns to say what the target says along your texts, and along texts that the target writes itself after
    their beginnings. It has one layer of the target's width, and shares the target's embedding and projection. The
    same command run again continues what was stopped. `accelerate launch` (on CPUs with its --multi_gpu) runs it on
    several processes.
    """
    from ..build.new_drafters import FEWEST_LAYERS, LAYOUTS, hidden_states_read, new_eagle_head
    from ..fields import OneOf

    OneOf(LAYOUTS).require("layout", layout or LAYOUTS[0])
    if layout != "eagle2":
        layers = _require_target(target).num_hidden_layers
        if layout is None and layers < FEWEST_LAYERS:
            layout = "eagle2"
            typer.echo(
                f"the target's {layers} layers are too few for an EAGLE-3 head: this is an EAGLE-2 head", err=True
            )
        else:
            layout, _ = "eagle3", hidden_states_read(layers)
    shape = {"layout": layout, "intermediate_size": intermediate_size, "seed": seed}
    _train(context, {"kind": "eagle", **shape}, lambda model: partial(new_eagle_head, model, **shape))


def drafter(
    *,
    context: typer.Context,
    target: options.Target,
    data: Data,
    out: Out,
    more: MoreData = None,
    text_field: options.TextField = "text",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 2,
    width: Annotated[
        int | None, typer.Option(min=1, help="Width of its hidden states. Default: half of the target's.")
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    self_written: SelfWritten = 0.5,
    depth: Depth = 5,
    decay: Decay = 0.85,
    window: Window = None,
    batch_tokens: BatchTokens = None,
    scored_tokens: ScoredTokens = None,
    learning_rate: LearningRate = None,
    schedule: Schedule = "cosine",
    save_every: SaveEvery = 100,
    seed: Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    overwrite: Overwrite = False,
) -> None:
    """Train an independent small drafter with the target's own tokenizer.

    For targets that heads cannot draft for. The drafter is a Llama model; its embedding begins at the target's
    projection, made narrower. It is trained in the same way as an EAGLE head (`train eagle`).
    """
    from ..build.new_drafters import new_small_drafter

    _require_target(target)
    shape = {"layers": layers, "width": width, "seed": seed}
    _train(context, {"kind": "drafter", **shape}, lambda model: lambda states: new_small_drafter(model, **shape))


def _require_target(name: str) -> Any:
    """The configuration of a target's text model, before its weights are loaded."""
    from ..build.drafter_job import require_trainable
    from ..loading import load_config

    config = load_config(name, "target")
    require_trainable(config, name)
    return config.get_text_config()


def _train(context: typer.Context, job: dict[str, Any], maker: "Callable[[Any], MakeDrafter]") -> None:
    """Both commands; `job` describes the drafter, and `maker` gives what makes it for a target."""
    given = context.params
    out, overwrite = Path(given["out"]), given["overwrite"]
    corpus = find_text([Path(path) for path in (*given["data"], *(given["more"] or ()))], given["text_field"])
    import torch
    from accelerate import Accelerator

    from ..build.drafter_job import train_drafter
    from ..build.drafter_training import DrafterTrainingSettings
    from ..build.recording import RecordingSettings
    from ..devices import dtype_for_training
    from ..evaluation.settings import PairSettings
    from ..loading import load_model, load_tokenizer
    from .drafter_card import digest_of, write_drafter

    where = PairSettings(given["target"], **{name: given[name] for name in ("device", "dtype", "threads")})
    device = where.resolved_device()
    dtype, kind = where.dtype or dtype_for_training(device), device.type
    sizes = {name: both[kind != "cpu"] if given[name] is None else given[name] for name, both in _SIZES.items()}
    window = sizes.pop("window")
    minutes = _MINUTES if given["minutes"] is None and given["steps"] is None else given["minutes"]
    settings = options.settings_of(context, DrafterTrainingSettings, minutes=minutes, **sizes)
    RecordingSettings(window=window)
    before_connecting()
    accelerator = Accelerator(cpu=kind == "cpu")
    work, is_main = out / UNFINISHED, accelerator.is_main_process
    if is_main:
        require_free_folder(context, out, overwrite)
        if overwrite:
            shutil.rmtree(work, ignore_errors=True)
        keeps(context, lambda: f"what was finished is kept in {work}; {going_on(out, overwrite)}")
    if where.threads is not None:
        torch.set_num_threads(where.threads)
    target = load_model(given["target"], device=accelerator.device, dtype=dtype, role="target")
    tokenizer = load_tokenizer(given["target"])

    def look(state: "DrafterTrainingState", figures: "HeldOutFigures") -> None:
        if is_main:
            shares = " ".join(f"{share:.0%}" for share in figures.agreement)
            # typer's echo would write into the line of the bar.
            print(
                f"after {state.seconds / 60:.1f} minutes, batch {state.step:,}: loss {state.loss:.3f}, held out "
                f"{figures.loss:.3f}; agreement by draft step {shares}; expected acceptance length "
                f"{figures.acceptance_length:.2f}",
                file=sys.stderr,
            )

    with progress_bar(is_main) as report:
        arguments = {"window": window, "accelerator": accelerator, "job": job, "report": report, "look": look}
        arguments["say"] = partial(print, file=sys.stderr) if is_main else lambda text: None
        trained = train_drafter(target, tokenizer, corpus, maker(target), settings, work, **arguments)
    if not is_main:
        return
    described = describe_inputs(corpus.files)
    described["inputs"] = ", ".join(described["inputs"])
    provenance = {**described, "SHA-256 of the inputs": digest_of(corpus)}
    write_drafter(out, trained, target, tokenizer, command_text(context), provenance)
    shutil.rmtree(work)
    figures = trained.figures
    typer.echo(f"{out}: expected acceptance length {figures.acceptance_length:.2f} in chains of {settings.depth}")
    option = f"--{'eagle' if job['kind'] == 'eagle' else 'drafter'} {out}"
    if figures.acceptance_length >= _WORTH_IT:
        typer.echo(f"use it by {option}")
    else:
        typer.echo(f"hardly worth it: below {_WORTH_IT:g}, drafting rarely pays. Train for longer, or on more texts")
        typer.echo(f"to measure it: doctor {option}")
