"""The stages of training a router, and what is kept of them when one is stopped."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import counted
from .common import Pace, progress_bar
from .running import require_space

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from ..build.corpus import Corpus
    from ..build.draft_steps import StepRecorder
    from ..build.recording import Recording, RecordingSettings
    from ..build.router_judging import HeldOutFigures
    from ..build.router_pair import RouterPair
    from ..build.router_training import TrainingSettings, TrainingState
    from ..build.windows import Windows
    from ..shortlists.router import Router

_WINDOWS, _CLUSTERS, _TRAINING = "windows.npz", "clusters.safetensors", "training.safetensors"


class TrainingJob:
    """The stages of one training, each of which goes on where it was stopped.

    Args:
        accelerator: of the processes that train.
        pair: for which the router is.
        work: the folder of what is kept.
        seed: of clusters.
    """

    def __init__(self, accelerator: "Accelerator", pair: "RouterPair", work: Path, seed: int):
        self.pair = pair
        self._accelerator, self._work, self._seed = accelerator, work, seed
        self._pace = Pace(self._say)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self._accelerator.is_main_process

    def _progress(self) -> AbstractContextManager[Callable[[str, int, int], None]]:
        return progress_bar() if self.is_main else nullcontext(lambda *_: None)

    def record(
        self, corpus: "Corpus", text_field: str, settings: "RecordingSettings", rounds: bool
    ) -> "tuple[Windows, Recording]":
        """Sample the texts and record the draft steps along them, or of rounds after their beginnings."""
        from ..build.inputs import describe_files, describe_tokenizer
        from ..build.recording import STEPS_FORMAT
        from ..build.windows import sample_windows, windows_of

        pair = self.pair
        self._require_space(settings)
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
                windows = windows_of(self._work / _WINDOWS, job, sample)
            recording = self._recorder(settings, rounds).record(
                windows,
                process=self._accelerator.process_index,
                processes=self._accelerator.num_processes,
                report=lambda done, total: self._tell(report, "recording draft steps", done, total),
            )
        self._accelerator.wait_for_everyone()
        return windows, recording

    def _require_space(self, settings: "RecordingSettings") -> None:
        """Say how much disk the recording takes, and refuse a disk that has less."""
        size = settings.bytes_on_disk(self.pair.drafter.head.weight.shape[1])
        self._say(f"{settings.steps:,} draft steps take about {size / 2**20:,.0f} MiB in {self._work}")
        if self.is_main:
            there = sum(path.stat().st_size for path in self._work.glob("steps-*.safetensors"))
            require_space(self._work.parent, size - there, f"{settings.steps:,} draft steps")

    def _recorder(self, settings: "RecordingSettings", rounds: bool) -> "StepRecorder":
        from ..build.draft_rounds import RoundRecorder
        from ..build.draft_steps import StepRecorder
        from ..evaluation.pair import generation_config

        pair = self.pair
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

        pair = self.pair
        head = pair.drafter.head
        weight = head.weight if head.token_ids is None else pair.target.get_output_embeddings().weight
        clusters = torch.zeros(pair.vocabulary_size, dtype=torch.int64)
        if self.is_main:
            with self._progress() as report:
                file = self._work / _CLUSTERS
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
            self.pair.drafter.embed,
            is_pinned,
            settings,
            self._work / _TRAINING,
            self._accelerator,
        )
        with self._progress() as report:

            def show(state: "TrainingState") -> None:
                if not self.is_main:
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
        if self.is_main:
            # Not by typer's echo, which writes past the bar that stands on the terminal, into its line.
            print(text, file=sys.stderr)


def describe_kept(work: Path, fix: str) -> str:
    """What a run that is stopped leaves, which the next one goes on with."""
    shards = len(list(work.glob("steps-*.safetensors")))
    kept = [f"{counted(shards, 'part')} of the draft steps"] if shards else []
    files = {"the texts": _WINDOWS, "the clusters": _CLUSTERS, "training": _TRAINING}
    kept += [what for what, name in files.items() if (work / name).exists()]
    if not kept:
        return "nothing was finished yet; run the same command to begin anew"
    return f"what was finished is kept in {work} ({', '.join(kept)}); {fix}"
