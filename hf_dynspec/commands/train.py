"""`hf-dynspec train`: what is trained offline, before anything is drafted."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .build import Out, command_text, describe_inputs, describe_model, going_on, require_free_folder, shorten_name
from .common import Device, Dtype, Pace, Target, Threads, progress_bar, wide_console
from .running import keeps, require_space

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from ..build.corpus import Corpus
    from ..build.draft_steps import Recording, RecordingSettings, StepRecorder, Windows
    from ..build.router_judging import HeldOutFigures
    from ..build.router_training import TrainingSettings, TrainingState
    from ..drafters import Drafter
    from ..shortlists.router import Router, RouterShortlist
    from ..shortlists.router.clusters import ClusterShortlist

train_app = typer.Typer(help="Train what policies need.", no_args_is_help=True, rich_markup_mode=None)

# Where unfinished work is kept, in the folder of the artifact.
_WORK = "partial"
_TRAINING = "training.safetensors"
_METHODS = ("dynaspec", "coral")
# Options of what CORAL's router does not have.
_NOT_CORAL = ("pinned", "schedule", "mass", "hidden")


@train_app.callback()
def train() -> None:
    """Train what policies need."""


@train_app.command()
def router(
    *,
    context: typer.Context,
    target: Target,
    data: Annotated[
        list[Path], typer.Option(metavar="PATH...", help="Files and folders, as `build frequency --text` takes them.")
    ],
    out: Out,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="More data, so that shells can expand *.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Folder or Hub id of the small model.")] = None,
    eagle: Annotated[
        str | None, typer.Option(help="Folder or Hub id of an EAGLE head, in place of a drafter.")
    ] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read an EAGLE head from a .bin file.")] = False,
    method: Annotated[
        str,
        typer.Option(
            help="dynaspec: a network that reads what a draft step starts from. coral: one layer that reads its "
            "hidden state, over groups of equal size; --pinned, --schedule, --mass and --hidden are not for it."
        ),
    ] = "dynaspec",
    text_field: Annotated[str, typer.Option(help="JSON field or Parquet column that holds the text.")] = "text",
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
    top_k: Annotated[int, typer.Option(help="The drafter's so many most probable tokens are to be covered.")] = 10,
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
    device: Device = "auto",
    dtype: Dtype = None,
    threads: Threads = None,
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
    import torch
    from accelerate import Accelerator

    from ..build.clusters import require_balanced, require_cluster_settings, require_faiss
    from ..build.corpus import plan_corpus
    from ..build.draft_steps import RecordingSettings
    from ..build.router_judging import held_out_figures
    from ..build.router_training import TrainingSettings
    from ..errors import ConfigurationError
    from ..evaluation.pair import PairSettings, load_models
    from ..shortlists.coral import CoralShortlist
    from ..shortlists.router.policy import RouterShortlist

    _require_options(context, method, schedule, share, mass)
    is_coral = method == "coral"
    recording_settings = RecordingSettings(
        steps, held_out, window, depth, top_k, temperature=temperature, seed=seed, of_hidden=is_coral
    )
    training_settings = TrainingSettings(
        None if is_coral else hidden, batch_size, learning_rate, max_batches, evaluate_every, seed=seed
    )
    corpus = plan_corpus([*data, *(more or [])], text_field)
    stored = None if clusters is None else RouterShortlist(clusters).router.clusters
    if stored is not None and is_coral:
        require_balanced(stored)
    others = {name: _trained(name) for name in compare or ()}
    if stored is None and not is_coral:
        require_faiss(torch.device("cpu"))
    settings = PairSettings(target, drafter, device=device, dtype=dtype, threads=threads)
    accelerator = Accelerator(cpu=settings.resolved_device().type == "cpu")
    if accelerator.is_main_process:
        require_free_folder(context, out, overwrite)
        if overwrite:
            shutil.rmtree(out / _WORK, ignore_errors=True)
        keeps(context, lambda: _describe_kept(out / _WORK, going_on(out, overwrite)))
    if threads is not None:
        torch.set_num_threads(threads)
    pair = _Pair(*load_models(settings.on(accelerator.device), eagle, allow_pickle))
    job = _Job(accelerator, pair, out / _WORK, seed)
    # What would stop the clusters is told before hours of recording.
    if stored is None:
        require_cluster_settings(num_clusters, seed, 1, pair.vocabulary_size)
    parts = None if stored is None else pair.clusters(stored)
    for name, other in others.items():
        pair.require_trained_for(name, other)
    windows, recording = job.record(corpus, text_field, recording_settings, rounds)
    recorded = recording.count(recording.train)
    if recorded < batch_size:
        raise ConfigurationError(
            f"--batch-size {batch_size:,} is more than the {recorded:,} draft steps that were recorded: the texts are "
            "few, or end early. Give more data, or smaller batches."
        )
    if not recording.count(recording.held_out):
        raise ConfigurationError("no draft step is held out to judge by: the texts end at once. Give more data.")
    parts = job.clusters(num_clusters, balanced=is_coral) if parts is None else parts
    ranking = pair.rank(windows)
    # As many of the clusters as of the vocabulary, until the router is there and its budget can be found.
    first_budget = max(1, round(share * (int(parts.max()) + 1)))

    def policy_of(one: "Router") -> "ClusterShortlist":
        if is_coral:
            return CoralShortlist(one, first_budget)
        return RouterShortlist(one, first_budget, "fixed", mass, ranking, pinned)

    def judge(one: "Router") -> "HeldOutFigures":
        return held_out_figures(recording, policy_of(one), pair.drafter.embed, pair.drafter.head.token_ids)

    trained = job.train(recording, parts, ranking[: 0 if is_coral else pinned], training_settings, judge)
    if not accelerator.is_main_process:
        return
    size = share * pair.vocabulary_size
    policy, metrics = _settle(recording, policy_of(trained), schedule, size, others, pair.drafter)
    provenance = {
        "command": command_text(context),
        **describe_inputs(corpus.files),
        "draft_steps": recorded,
        "metrics": metrics,
    }
    pair.save(policy, out, provenance)
    if not keep_steps:
        shutil.rmtree(out / _WORK)
    _print_figures(str(out), metrics, pair.vocabulary_size)
    what = "groups" if is_coral else "clusters"
    typer.echo(f"{out}: a router over {trained.num_clusters:,} {what}, {policy.budget(0):,} chosen at most")


def _describe_kept(work: Path, fix: str) -> str:
    """What a run that is stopped leaves, which the next one goes on with."""
    shards = len(list(work.glob("steps-*.safetensors")))
    kept = [f"{shards} part{'' if shards == 1 else 's'} of the draft steps"] if shards else []
    files = {"the texts": "windows.npz", "the clusters": "clusters.safetensors", "training": _TRAINING}
    kept += [what for what, name in files.items() if (work / name).exists()]
    if not kept:
        return "nothing was finished yet; run the same command to begin anew"
    return f"what was finished is kept in {work} ({', '.join(kept)}); {fix}"


def _require_options(context: typer.Context, method: str, schedule: str, share: float, mass: float) -> None:
    """Refuse options that are out of range, or not for the method."""
    from ..errors import ConfigurationError
    from ..shortlists.router.policy import SCHEDULES

    if method not in _METHODS:
        raise ConfigurationError(f"--method must be one of {', '.join(_METHODS)}, got {method!r}")
    given = [name for name in _NOT_CORAL if context.get_parameter_source(name).name != "DEFAULT"]
    if method == "coral" and given:
        raise ConfigurationError(
            f"--{given[0]} is not for --method coral: its router is one layer, which chooses as many groups at every "
            "draft step, and pins no token. Leave it out"
        )
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"--schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    for option, value in (("--share", share), ("--mass", mass)):
        if not 0 < value <= 1:
            raise ConfigurationError(f"{option} must be a share above 0 and up to 1, got {value}")


def _trained(name: str) -> "ClusterShortlist":
    """The router of an artifact, whichever method trained it."""
    from ..shortlists import CoralShortlist, RouterShortlist
    from ..shortlists.registry import read_stored_policy

    is_coral = read_stored_policy(name, tensor="clusters").name == CoralShortlist.name
    return CoralShortlist(name) if is_coral else RouterShortlist(name)


def _settle(
    recording: "Recording",
    policy: "ClusterShortlist",
    schedule: str,
    size: float,
    others: "dict[str, ClusterShortlist]",
    drafter: "Drafter",
) -> "tuple[ClusterShortlist, dict[str, Any]]":
    """The policy with budgets, and as many clusters as shortlists of a mean size allow; and what it then does at the
    held-out steps, beside its other schedules and other routers with as large shortlists."""
    from ..build.router_judging import held_out_figures, largest_budget
    from ..shortlists.router.policy import RouterShortlist

    draftable = drafter.head.token_ids

    def fill(one: "ClusterShortlist") -> "ClusterShortlist":
        return one.with_budget(largest_budget(recording, one, drafter.embed, size, draftable))

    compared = []
    if isinstance(policy, RouterShortlist):
        schedules = {name: fill(one) for name, one in _with_schedules(recording, policy, drafter).items()}
        policy = schedules.pop(schedule)
        compared = [(f"schedule {name}", other) for name, other in schedules.items()]
    else:
        policy = fill(policy)
    compared += [(shorten_name(name), fill(other)) for name, other in others.items()]
    metrics: dict[str, Any] = {"held_out_steps": recording.count(recording.held_out)}
    metrics |= vars(held_out_figures(recording, policy, drafter.embed, draftable))
    metrics["compared"] = [
        {"router": name, **vars(held_out_figures(recording, other, drafter.embed, draftable))}
        for name, other in compared
    ]
    return policy, metrics


def _with_schedules(
    recording: "Recording", policy: "RouterShortlist", drafter: "Drafter"
) -> "dict[str, RouterShortlist]":
    """The policy with fitted budgets, by each of the schedules."""
    from ..build.router_judging import fit_budgets
    from ..shortlists.router.policy import SCHEDULES, RouterShortlist

    budgets = fit_budgets(recording, policy, drafter.embed, drafter.head.token_ids)
    return {
        one: RouterShortlist(
            policy.router, ranking=policy.ranking, budgets=budgets, **{**policy.settings(), "schedule": one}
        )
        for one in SCHEDULES
    }


class _Pair:
    """The models, and what follows from them."""

    def __init__(self, target: Any, drafter: "Drafter", tokenizer: Any):
        from ..loading import shared_vocabulary_size

        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.vocabulary_size = shared_vocabulary_size(target, drafter, tokenizer)

    def described(self) -> list[str | None]:
        """Tells whether the models are still the same."""
        from ..drafters import CausalLMDrafter

        drafter = self.drafter
        if isinstance(drafter, CausalLMDrafter):
            return [describe_model(self.target), describe_model(drafter.model)]
        return [describe_model(self.target), str(drafter.checkpoint.folder)]

    def clusters(self, stored: "torch.Tensor") -> "torch.Tensor":
        """int64 `[V]`: stored clusters, of the tokens that both models score."""
        from ..errors import ConfigurationError

        clusters = stored.long()[: self.vocabulary_size]
        if clusters.shape[0] < self.vocabulary_size:
            problem = f"has {clusters.shape[0]:,} tokens in its clusters, and the pair {self.vocabulary_size:,}"
            raise ConfigurationError(f"--clusters {problem}. Build clusters with the tokenizer of these models.")
        # A cluster of tokens that only one of the models scores is left out.
        return clusters.unique(return_inverse=True)[1]

    def require_trained_for(self, name: str, policy: "ClusterShortlist") -> None:
        """Refuse a router that cannot be judged at this pair's draft steps."""
        from ..errors import ConfigurationError
        from ..vocabulary import fingerprint_tokenizer, require_same_tokenizer

        router, width = policy.router, self.drafter.head.weight.shape[1]
        if router.centroids is not None:
            raise ConfigurationError(f"--compare {name}: holds clusters and no trained router.")
        for made_with in policy.tokenizer_fingerprints:
            require_same_tokenizer(made_with, fingerprint_tokenizer(self.tokenizer), f"--compare {name}: tokenizer")
        for what, theirs, ours in (
            ("reads hidden states of {:,} numbers, and the drafter's have {:,}", router.reads, width),
            ("has clusters of {:,} tokens, and the pair {:,}", router.clusters.shape[0], self.vocabulary_size),
        ):
            if theirs != ours:
                problem = what.format(theirs, ours)
                raise ConfigurationError(f"--compare {name}: {problem}. Name a router that was trained for this pair.")

    def rank(self, windows: "Windows") -> "torch.Tensor":
        """int64 `[n]`: the tokens, those most frequent in the data first."""
        import torch

        from ..build.frequency import rank

        ranking = torch.from_numpy(rank(windows.counts, self.tokenizer))
        return ranking[ranking < self.vocabulary_size]

    def save(self, policy: "ClusterShortlist", out: Path, provenance: dict[str, Any]) -> None:
        """Write the artifact."""
        from ..assistant import DynSpecAssistant

        assistant = DynSpecAssistant(self.drafter, policy, target=self.target, tokenizer=self.tokenizer)
        assistant.save_pretrained(out, provenance=provenance)


class _Job:
    """The stages of one training, each of which goes on where it was stopped."""

    def __init__(self, accelerator: "Accelerator", pair: _Pair, work: Path, seed: int):
        self._accelerator, self._pair, self._work, self._seed = accelerator, pair, work, seed
        self._pace = Pace(self._say)

    def _progress(self) -> AbstractContextManager[Callable[[str, int, int], None]]:
        return progress_bar() if self._accelerator.is_main_process else nullcontext(lambda *_: None)

    def record(
        self, corpus: "Corpus", text_field: str, settings: "RecordingSettings", rounds: bool
    ) -> "tuple[Windows, Recording]":
        """Sample the texts and record the draft steps along them, or of rounds after their beginnings."""
        from ..build.draft_steps import STEPS_FORMAT, sample_windows, windows_of
        from ..build.frequency import describe_files, describe_tokenizer

        pair = self._pair
        size = settings.bytes_on_disk(pair.drafter.head.weight.shape[1])
        self._say(f"{settings.steps:,} draft steps take about {size / 2**20:,.0f} MiB in {self._work}")
        if self._accelerator.is_main_process:
            there = sum(path.stat().st_size for path in self._work.glob("steps-*.safetensors"))
            require_space(self._work.parent, size - there, f"{settings.steps:,} draft steps")
        job = {
            "models": pair.described(),
            "inputs": describe_files(corpus.files),
            "text field": text_field,
            "tokenizer": describe_tokenizer(pair.tokenizer),
            "settings": vars(settings),
            "rounds": rounds,
            "format": STEPS_FORMAT,
        }
        with self._progress() as report:

            def sample() -> "Windows":
                return sample_windows(
                    corpus.units,
                    pair.tokenizer,
                    pair.vocabulary_size,
                    settings,
                    text_field=text_field,
                    report=lambda done, total: self._tell(report, "reading texts", done, total),
                )

            with self._accelerator.main_process_first():
                windows = windows_of(self._work, job, sample)
            recording = self._recorder(settings, rounds).record(
                windows,
                process=self._accelerator.process_index,
                processes=self._accelerator.num_processes,
                report=lambda done, total: self._tell(report, "recording draft steps", done, total),
            )
        self._accelerator.wait_for_everyone()
        return windows, recording

    def _recorder(self, settings: "RecordingSettings", rounds: bool) -> "StepRecorder":
        from ..build.draft_rounds import RoundRecorder
        from ..build.draft_steps import StepRecorder
        from ..evaluation.pair import generation_config

        pair = self._pair
        if not rounds:
            return StepRecorder(pair.target, pair.drafter, pair.vocabulary_size, settings, self._work)
        config = generation_config(pair.target, settings.window, settings.temperature)
        return RoundRecorder(
            pair.target, pair.drafter, pair.vocabulary_size, settings, self._work, pair.tokenizer, config
        )

    def clusters(self, count: int, balanced: bool) -> "torch.Tensor":
        """int64 `[V]`: clusters of the rows that the drafter scores with, of equal size if `balanced`. Kept, as
        training goes on only with the ones that it began with, and k-means rounds differently with another number of
        threads."""
        import torch
        from accelerate.utils import broadcast

        from ..build.clusters import kept_clusters

        pair = self._pair
        head = pair.drafter.head
        weight = head.weight if head.token_ids is None else pair.target.get_output_embeddings().weight
        clusters = torch.zeros(pair.vocabulary_size, dtype=torch.int64)
        if self._accelerator.is_main_process:
            with self._progress() as report:
                file = self._work / "clusters.safetensors"
                clusters = kept_clusters(
                    file, weight, count, pair.vocabulary_size, self._seed, report, balanced=balanced
                )
        return broadcast(clusters.to(self._accelerator.device)).cpu()

    def train(
        self,
        recording: "Recording",
        clusters: "torch.Tensor",
        pinned: "torch.Tensor",
        settings: "TrainingSettings",
        judge: Callable[["Router"], "HeldOutFigures"],
    ) -> "Router":
        """Train the network, and show what `judge` says of it at each look at the held-out steps."""
        import torch

        from ..build.router_training import RouterTraining

        is_pinned = torch.zeros(clusters.shape, dtype=torch.bool).index_fill(0, pinned, True)
        training = RouterTraining(
            recording,
            clusters,
            self._pair.drafter.embed,
            is_pinned,
            settings,
            self._work / _TRAINING,
            self._accelerator,
        )
        with self._progress() as report:

            def show(state: "TrainingState") -> None:
                if not self._accelerator.is_main_process:
                    return
                _, loss, held_out_loss = state.history[-1]
                figures = judge(training.best)
                says = f"cluster recall {figures.cluster_recall:.1%}, target's mass {figures.target_mass:.1%}"
                losses = f"loss {loss:.3f}, held out {held_out_loss:.3f}"
                best = f"the best so far, of batch {state.best_step:,}: {says} on {figures.size:,.0f} tokens"
                left = f", {self._pace.left()} left at most" if state.step < settings.max_steps else ""
                self._say(f"batch {state.step:,} of at most {settings.max_steps:,}{left}: {losses}; {best}")

            trained = training.run(show, lambda done, most: self._tell(report, "training", done, most, "at most"))
        self._say(f"the router of batch {training.state.best_step:,} is kept, whose held-out loss was the lowest")
        return trained

    def _tell(
        self, report: Callable[[str, int, int], None], activity: str, done: int, total: int, bound: str = ""
    ) -> None:
        """Move the bar, and say once how long the activity is going to take."""
        report(activity, done, total)
        self._pace.note(activity, done, total, bound)

    def _say(self, text: str) -> None:
        if self._accelerator.is_main_process:
            typer.echo(text, err=True)


def _print_figures(name: str, metrics: dict[str, Any], vocabulary_size: int) -> None:
    from ..evaluation.tables import FittedTable

    table = FittedTable(
        f"At {metrics['held_out_steps']:,} held-out draft steps",
        [
            "router",
            "mean shortlist",
            "cluster\nrecall",
            "drafter's\nlikeliest token",
            "target's\nmass",
            "acceptance length,\nof full",
        ],
    )
    for figures in ({"router": name, **metrics}, *metrics["compared"]):
        table.add_row(
            figures["router"],
            f"{figures['size']:,.0f} ({figures['size'] / vocabulary_size:.1%})",
            *(
                f"{figures[share]:.2%}"
                for share in ("cluster_recall", "likeliest_recall", "target_mass", "relative_acceptance_length")
            ),
        )
    wide_console().print(table)
