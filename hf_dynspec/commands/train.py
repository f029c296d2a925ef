"""`hf-dynspec train`: what is trained offline, before anything is drafted."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigurationError
from ..fields import OneOf, Share
from . import options
from .building import UNFINISHED, command_text, describe_inputs, find_text, require_free_folder, shorten_name
from .common import wide_console
from .launched import before_connecting
from .running import CommandApp, keeps

if TYPE_CHECKING:
    from ..build.recording import Recording
    from ..shortlists.router import Router
    from ..shortlists.router.clusters import ClusterShortlist

train_app = CommandApp(help="Train drafters, and what policies need.")

_SCHEDULES = ("fitted", "dynaspec", "fixed")
# Groups are whole, so that few of them may hold much less than was asked for.
_MUCH_LESS = 0.8
# Options that CORAL's router lacks.
_NOT_CORAL = ("pinned", "schedule", "mass", "hidden")


@train_app.callback()
def train() -> None:
    """Train drafters, and what policies need."""


@train_app.command(short_help="Train a router for a pair (DynaSpec, CORAL).")
def router(
    *,
    context: typer.Context,
    target: options.Target,
    data: Annotated[
        list[Path], typer.Option(metavar="PATH...", help="Files and folders, as `build frequency --text` takes them.")
    ],
    out: options.Out,
    more: Annotated[list[Path] | None, options.more("data", "PATH")] = None,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHead = None,
    allow_pickle: options.AllowPickle = False,
    method: Annotated[
        str,
        typer.Option(
            help="dynaspec: a network that reads what a draft step starts from. coral: one layer that reads its "
            "hidden state, over groups of equal size; --pinned, --schedule, --mass and --hidden are not for it."
        ),
    ] = "dynaspec",
    text_field: options.TextField = "text",
    clusters: Annotated[
        str | None,
        typer.Option(
            help="Artifact of `build clusters`; for coral, made with --balanced. Default: clusters are built here, "
            "for coral of equal size."
        ),
    ] = None,
    num_clusters: Annotated[int, typer.Option(min=1, metavar="M", help="How many clusters to build.")] = 1024,
    pinned: Annotated[
        int, typer.Option(min=0, help="How many of the data's most frequent tokens are on every shortlist.")
    ] = 2048,
    share: Annotated[
        float,
        typer.Option(help="Share of the vocabulary that the mean shortlist holds; decides how many clusters it has."),
    ] = 0.03,
    schedule: Annotated[
        str, typer.Option(help="Clusters at later draft steps: fitted here, by dynaspec's formula, or fixed.")
    ] = "fitted",
    mass: Annotated[
        float, typer.Option(help="Choose no more clusters than reach this share of the router's probability.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(help="Draft steps to train on.")] = 300_000,
    held_out: Annotated[int, typer.Option(help="Draft steps to judge by, from other texts.")] = 16_384,
    window: Annotated[int, typer.Option(help="Tokens of text that are read at a time.")] = 384,
    depth: Annotated[int, typer.Option(help="Draft steps of a round.")] = 5,
    top_k: Annotated[
        int, typer.Option("--likeliest", help="The drafter's so many likeliest tokens are to be covered.")
    ] = 10,
    rounds: Annotated[
        bool,
        typer.Option("--rounds", help="Record rounds in which the target continues the data, not the data itself."),
    ] = False,
    temperature: Annotated[
        float,
        typer.Option(
            help="At which the pair is going to sample: budgets are fitted to it (0: to 1), and --rounds draw."
        ),
    ] = 0.8,
    hidden: Annotated[int, typer.Option(help="Width of the router's hidden layer.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Draft steps of a batch, over all processes.")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at first.")] = 2e-3,
    max_batches: Annotated[int, typer.Option(help="Batches to train on, at most.")] = 20_000,
    evaluate_every: Annotated[int, typer.Option(help="Batches between two looks at the held-out steps.")] = 200,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="ROUTER", help="Repeatable. Judge this trained router too, at the same held-out steps."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of clusters, samples, first weights and order.")] = 0,
    keep_steps: Annotated[bool, typer.Option("--keep-steps", help="Keep the recorded steps when done.")] = False,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the artifact, and drop unfinished work in the folder.")
    ] = False,
) -> None:
    """Train a router for a pair (DynaSpec, CORAL): which token clusters does a draft step need?

    The draft steps of the pair along the data are recorded with the drafter's whole vocabulary, and the router learns
    which clusters hold the likely tokens. With --rounds the target continues the beginnings of the data's texts, and
    every draft step of that is recorded, as in the paper; it takes many times as long. The same command run again
    continues what was stopped. `accelerate launch` (on CPUs with its --multi_gpu) runs it on several processes,
    with the same result.
    """
    _require_options(context, method, schedule, share, mass)
    corpus = find_text([*data, *(more or [])], text_field)
    import torch
    from accelerate import Accelerator

    from ..build.clusters import require_balanced, require_cluster_settings, require_faiss
    from ..build.recording import RecordingSettings
    from ..build.router_judging import HeldOutSteps
    from ..build.router_training import TrainingSettings
    from ..evaluation.pair import PairSettings, load_models
    from ..shortlists.coral import CoralShortlist
    from ..shortlists.router.policy import RouterShortlist
    from .training_job import TrainingJob, describe_kept

    is_coral = method == "coral"
    recording_settings = options.settings_of(context, RecordingSettings, of_hidden=is_coral)
    hidden = None if is_coral else hidden
    training_settings = options.settings_of(context, TrainingSettings, hidden=hidden, max_steps=max_batches)
    stored = None if clusters is None else RouterShortlist(clusters).router.clusters
    if stored is not None and is_coral:
        require_balanced(stored)
    others = {name: _trained(name) for name in compare or ()}
    if stored is None and not is_coral:
        require_faiss()
    settings = PairSettings(target, drafter, device=device, dtype=dtype, threads=threads)
    before_connecting()
    accelerator = Accelerator(cpu=settings.resolved_device().type == "cpu")
    work = out / UNFINISHED
    if accelerator.is_main_process:
        require_free_folder(context, out, overwrite)
        if overwrite:
            shutil.rmtree(work, ignore_errors=True)
        keeps(context, lambda: describe_kept(work, out, overwrite))
    if threads is not None:
        torch.set_num_threads(threads)
    job = TrainingJob(accelerator, *load_models(settings.on(accelerator.device), eagle, allow_pickle), work, seed)
    # Everything that can be refused is refused before hours of recording.
    if stored is None:
        require_cluster_settings(num_clusters, seed, 1, job.vocabulary_size)
    size = share * job.vocabulary_size
    if not is_coral and pinned >= size:
        raise ConfigurationError(
            f"--pinned {pinned:,} leaves no room for clusters on shortlists of {size:,.0f} tokens, which is what "
            "--share allows: pin fewer tokens, or allow a larger share"
        )
    parts = None if stored is None else job.stored_clusters(stored)
    for name, other in others.items():
        job.require_trained_for(name, other)
    windows, recording = job.record(corpus, recording_settings, rounds)
    recorded = _require_enough(recording, batch_size)
    if job.is_main and recorded < steps:
        typer.echo(f"the data gives {recorded:,} draft steps to train on, and not {steps:,}", err=True)
    parts = job.clusters(num_clusters, balanced=is_coral) if parts is None else parts
    ranking = job.rank(windows)
    judging = HeldOutSteps(recording, job.drafter.embed, job.drafter.head.token_ids)
    # The same share of the clusters as of the vocabulary, until a trained router tells the right budget.
    first_budget = max(1, round(share * (int(parts.max()) + 1)))

    def policy_of(one: "Router") -> "ClusterShortlist":
        if is_coral:
            return CoralShortlist(one, first_budget)
        return RouterShortlist(one, first_budget, "fixed", mass, ranking, pinned)

    pinned_ids = ranking[: 0 if is_coral else pinned]
    trained = job.train(recording, parts, pinned_ids, training_settings, lambda one: judging.figures(policy_of(one)))
    if not job.is_main:
        return
    judged = [(shorten_name(name), other) for name, other in others.items()]
    policy, metrics = judging.settle(policy_of(trained), schedule, size, judged)
    inputs = {"command": command_text(context), **describe_inputs(corpus.files)}
    job.save(policy, out, {**inputs, "draft_steps": recorded, "metrics": metrics})
    if not keep_steps:
        shutil.rmtree(work)
    _print_figures(str(out), metrics, job.vocabulary_size)
    what = "groups" if is_coral else "clusters"
    typer.echo(f"{out}: a router over {trained.num_clusters:,} {what}, {policy.budget(0):,} chosen at most")
    held = policy.budget(0) / trained.num_clusters
    if is_coral and held < _MUCH_LESS * share:
        typer.echo(
            f"that is {held:.1%} of the tokens, and --share asks for {share:.1%}: more groups come closer to it"
        )
    typer.echo(f"use it by --policy {policy.name}:router={out}")


def _require_options(context: typer.Context, method: str, schedule: str, share: float, mass: float) -> None:
    """Raise a `ConfigurationError` if options are out of range, or not for the method."""
    OneOf(_SCHEDULES).require("schedule", schedule)
    given = [name for name in _NOT_CORAL if context.get_parameter_source(name).name != "DEFAULT"]
    if method == "coral" and given:
        raise ConfigurationError(
            f"--{given[0]} is not for --method coral: its router is one layer, which chooses as many groups at every "
            "draft step, and pins no token. Leave it out"
        )
    Share().require("share", share)
    Share().require("mass", mass)


def _require_enough(recording: "Recording", batch_size: int) -> int:
    """The number of draft steps to train on. Raises a `ConfigurationError` if they do not make a batch, or if there
    are none to judge by."""
    recorded = recording.count(recording.train)
    if recorded < batch_size:
        raise ConfigurationError(
            f"--batch-size {batch_size:,} is more than the {recorded:,} draft steps that were recorded: the texts are "
            "few, or end early. Give more data, or smaller batches."
        )
    if not recording.count(recording.held_out):
        raise ConfigurationError("no draft step is held out to judge by: the texts end at once. Give more data.")
    return recorded


def _trained(name: str) -> "ClusterShortlist":
    """The router of an artifact, of either method."""
    from ..shortlists import CoralShortlist, RouterShortlist
    from ..shortlists.registry import read_stored_policy

    is_coral = read_stored_policy(name, tensor="clusters").name == CoralShortlist.name
    return CoralShortlist(name) if is_coral else RouterShortlist(name)


def _print_figures(name: str, metrics: dict[str, Any], vocabulary_size: int) -> None:
    from ..evaluation.tables import FittedTable

    shares = {
        "cluster_recall": "cluster\nrecall",
        "likeliest_recall": "drafter's\nlikeliest token",
        "target_mass": "target's\nmass",
        "relative_acceptance_length": "acceptance length,\nof full",
    }
    title = f"At {metrics['held_out_steps']:,} held-out draft steps"
    caption = "with the budgets that were fitted when training was over; while it went on, all steps had one"
    table = FittedTable(title, ["router", "mean shortlist", *shares.values()], caption=caption)
    for figures in ({"router": name, **metrics}, *metrics["compared"]):
        size = f"{figures['size']:,.0f} ({figures['size'] / vocabulary_size:.1%})"
        table.add_row(figures["router"], size, *(f"{figures[share]:.2%}" for share in shares))
    wide_console().print(table)
