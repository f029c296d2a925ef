"""The stages of training a router for a pair, each of which goes on where it was stopped."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from ..assistant import DynSpecAssistant
from ..build.clusters import kept_clusters
from ..build.corpus import Corpus
from ..build.draft_rounds import RoundRecorder
from ..build.draft_steps import StepRecorder
from ..build.jobs import begin_job, describe_files, describe_model, describe_tokenizer
from ..build.ranking import rank
from ..build.recording import STEPS_FORMAT, Recording, RecordingSettings
from ..build.router_judging import HeldOutFigures
from ..build.router_training import RouterTraining, TrainingSettings, TrainingState
from ..build.windows import Windows, kept_windows, sample_windows
from ..drafters import CausalLMDrafter, Drafter, EagleDrafter
from ..errors import ConfigurationError, counted
from ..evaluation.pair import generation_config
from ..loading import shared_vocabulary_size
from ..shortlists.router import Router
from ..shortlists.router.clusters import ClusterShortlist
from ..vocabulary import fingerprint_tokenizer, require_same_tokenizer
from .building import going_on
from .common import progress_bar
from .running import require_space

_WINDOWS, _CLUSTERS, _TRAINING = "windows.npz", "clusters.safetensors", "training.pt"


class TrainingJob:
    """The stages of one training, which keeps what is finished in a folder. `seed` is of clusters."""

    def __init__(self, accelerator: Accelerator, target: Any, drafter: Drafter, tokenizer: Any, work: Path, seed: int):
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        # How many token ids both models and the tokenizer know.
        self.vocabulary_size = shared_vocabulary_size(target, drafter, tokenizer)
        self._accelerator, self._work, self._seed = accelerator, work, seed

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self._accelerator.is_main_process

    def _described_drafter(self) -> Any:
        if isinstance(self.drafter, CausalLMDrafter):
            return describe_model(self.drafter.model)
        is_head = isinstance(self.drafter, EagleDrafter)
        return str(self.drafter.checkpoint.folder) if is_head else type(self.drafter).__name__

    def record(self, corpus: Corpus, settings: RecordingSettings, rounds: bool) -> tuple[Windows, Recording]:
        """Sample the texts and record the draft steps along them, or of rounds after their beginnings."""
        self._require_space(settings)
        job = {
            "models": [
                describe_model(self.target),
                self._described_drafter(),
            ],
            "inputs": describe_files(file.path for file in corpus.files),
            "text field": corpus.text_field,
            "tokenizer": describe_tokenizer(self.tokenizer),
            "settings": vars(settings),
            "rounds": rounds,
            "format": STEPS_FORMAT,
        }
        with progress_bar(self.is_main) as report:
            read = partial(report, "reading texts")
            sample = partial(sample_windows, corpus, self.tokenizer, self.vocabulary_size, settings, read)
            with self._accelerator.main_process_first():
                begin_job(self._work, job, is_main=self.is_main)
                windows = kept_windows(self._work / _WINDOWS, sample)
            share = {"process": self._accelerator.process_index, "processes": self._accelerator.num_processes}
            steps = partial(report, "recording draft steps")
            recording = self._recorder(settings, rounds).record(windows, **share, report=steps)
        self._accelerator.wait_for_everyone()
        return windows, recording

    def _require_space(self, settings: RecordingSettings) -> None:
        """Say how much disk the recording takes, and refuse a disk that has less."""
        size = settings.bytes_on_disk(self.drafter.head.weight.shape[1])
        self._say(f"{settings.steps:,} draft steps take about {size / 2**20:,.0f} MiB in {self._work}")
        if self.is_main:
            there = sum(path.stat().st_size for path in self._work.glob("steps-*.safetensors"))
            require_space(self._work.parent, size - there, f"{settings.steps:,} draft steps")

    def _recorder(self, settings: RecordingSettings, rounds: bool) -> StepRecorder:
        arguments = (self.target, self.drafter, self.vocabulary_size, settings, self._work)
        if not rounds:
            return StepRecorder(*arguments)
        config = generation_config(self.target, settings.window, settings.temperature)
        return RoundRecorder(*arguments, self.tokenizer, config)

    def clusters(self, count: int, balanced: bool) -> torch.Tensor:
        """int64 `[V]`: clusters of the rows that the drafter scores with. They are kept, as training goes on only with
        the clusters that it began with, and k-means rounds differently with another number of threads."""
        head = self.drafter.head
        weight = head.weight if head.token_ids is None else self.target.get_output_embeddings().weight
        clusters = torch.zeros(self.vocabulary_size, dtype=torch.int64)
        if self.is_main:
            with progress_bar() as report:
                file = self._work / _CLUSTERS
                clusters = kept_clusters(file, weight, count, self.vocabulary_size, self._seed, report, balanced)
        return broadcast(clusters.to(self._accelerator.device)).cpu()

    def stored_clusters(self, stored: torch.Tensor) -> torch.Tensor:
        """int64 `[V]`: the clusters of an artifact, without clusters of tokens that only one of the models scores."""
        if stored.shape[0] < self.vocabulary_size:
            problem = f"has {stored.shape[0]:,} tokens in its clusters, and the pair {self.vocabulary_size:,}"
            raise ConfigurationError(f"--clusters {problem}. Build clusters with the tokenizer of these models.")
        return stored.long()[: self.vocabulary_size].unique(return_inverse=True)[1]

    def require_trained_for(self, name: str, policy: ClusterShortlist) -> None:
        """Raise a `ConfigurationError` if a router cannot be judged at this pair's draft steps."""
        router, width = policy.router, self.drafter.head.weight.shape[1]
        if router.centroids is not None:
            raise ConfigurationError(f"--compare {name}: holds clusters and no trained router.")
        for made_with in policy.tokenizer_fingerprints:
            require_same_tokenizer(made_with, fingerprint_tokenizer(self.tokenizer), f"--compare {name}: tokenizer")
        problem = ""
        if router.reads != width:
            problem = f"reads hidden states of {router.reads:,} numbers, and the drafter's have {width:,}"
        elif len(router.clusters) != self.vocabulary_size:
            problem = f"has clusters of {len(router.clusters):,} tokens, and the pair {self.vocabulary_size:,}"
        if problem:
            raise ConfigurationError(f"--compare {name}: {problem}. Name a router that was trained for this pair.")

    def rank(self, windows: Windows) -> torch.Tensor:
        """int64 `[n]`: the tokens, those most frequent in the data first."""
        ranking = torch.from_numpy(rank(windows.counts, self.tokenizer))
        return ranking[ranking < self.vocabulary_size]

    def train(
        self,
        recording: Recording,
        clusters: torch.Tensor,
        pinned: torch.Tensor,
        settings: TrainingSettings,
        judge: Callable[[Router], HeldOutFigures],
    ) -> Router:
        """Train the network, and print the figures of `judge` after each evaluation at the held-out steps."""
        is_pinned = torch.zeros(clusters.shape, dtype=torch.bool).index_fill(0, pinned, True)
        file = self._work / _TRAINING
        training = RouterTraining(
            recording, clusters, self.drafter.embed, is_pinned, settings, file, self._accelerator
        )

        def show(state: TrainingState) -> None:
            if not self.is_main:
                return
            _, loss, held_out_loss = state.history[-1]
            figures = judge(training.best)
            # The table at the end has other recalls: of the budgets that are fitted when training is over.
            says = (
                f"by one budget, cluster recall {figures.cluster_recall:.1%}, target's mass {figures.target_mass:.1%}"
            )
            losses = f"loss {loss:.3f}, held out {held_out_loss:.3f}"
            best = f"the best so far, of batch {state.best_step:,}: {says} on {figures.size:,.0f} tokens"
            self._say(f"batch {state.step:,} of at most {settings.max_steps:,}: {losses}; {best}")

        with progress_bar(self.is_main) as report:
            trained = training.run(show, partial(report, "training"))
        self._say(f"the router of batch {training.state.best_step:,} is kept, whose held-out loss was the lowest")
        return trained

    def save(self, policy: ClusterShortlist, out: Path, provenance: dict[str, Any]) -> None:
        """Write the artifact."""
        assistant = DynSpecAssistant(self.drafter, policy, target=self.target, tokenizer=self.tokenizer)
        assistant.save_pretrained(out, provenance=provenance)

    def _say(self, text: str) -> None:
        if self.is_main:
            # typer's echo would write into the line of the bar.
            print(text, file=sys.stderr)


def describe_kept(work: Path, out: Path, overwrite: bool) -> str:
    """What a run that is stopped leaves for the next one."""
    shards = len(list(work.glob("steps-*.safetensors")))
    kept = [f"{counted(shards, 'part')} of the draft steps"] if shards else []
    files = {"the texts": _WINDOWS, "the clusters": _CLUSTERS, "training": _TRAINING}
    kept += [what for what, name in files.items() if (work / name).exists()]
    if not kept:
        return "nothing was finished yet; run the same command to begin anew"
    return f"what was finished is kept in {work} ({', '.join(kept)}); {going_on(out, overwrite)}"
