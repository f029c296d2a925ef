"""Training of routers: which clusters does a draft step need?

Data-parallel over accelerate's processes: every batch is the same as with one process, each process computes its part
of it, and gradients are averaged, so that the result is the same to rounding.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import reduce

from ..errors import ConfigurationError
from ..fields import LARGEST_SEED, SettingError, WholeNumber
from ..files import replacing
from ..shortlists.router.network import Router
from .recording import Recording
from .router_networks import CoralNetwork, DynaSpecNetwork, Embed, RouterNetwork

# Shards whose steps are shuffled together. They are held in memory.
_POOL_SHARDS = 8
# Held-out rows that are scored at a time.
_CHUNK = 4096
# Batches between two reports of progress.
_BATCHES_OF_A_REPORT = 5
# A plateau is `patience` evaluations without this improvement of the held-out loss. It lowers the learning rate by a
# factor, so many times.
_LEAST_IMPROVEMENT = 1e-3
_DECAY = 0.2
_DECAYS = 2


@dataclass(frozen=True)
class TrainingSettings:
    """How a router is trained."""

    hidden: int | None = 512  # width of the network's hidden layer (None: CORAL's router, which has none)
    batch_size: int = 1024  # draft steps of a batch, over all processes together
    learning_rate: float = 2e-3  # of AdamW, at first
    max_steps: int = 20_000  # batches to train on, at most
    evaluate_every: int = 200  # batches between two evaluations at the held-out steps, after which the state is saved
    # Evaluations without improvement after which the learning rate falls; the third time training ends.
    patience: int = 2
    seed: int = 0  # of the first weights and of the order

    def __post_init__(self):
        for name in ("hidden", "batch_size", "max_steps", "evaluate_every", "patience"):
            WholeNumber(1, LARGEST_SEED, optional=name == "hidden").require(name, getattr(self, name))
        if not 0 < self.learning_rate < 1:
            raise SettingError("learning_rate", f"must be between 0 and 1, got {self.learning_rate!r}")


@dataclass
class TrainingState:
    """The progress of a training, without weights and moments."""

    step: int = 0  # batches done
    best: float = math.inf  # the lowest held-out loss
    stale: int = 0  # evaluations since then
    decays: int = 0  # how often the learning rate fell
    # Step, training loss and held-out loss at each evaluation.
    history: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def best_step(self) -> int:
        """The step with the lowest held-out loss; 0 before the first evaluation."""
        return min(self.history, key=lambda look: look[2])[0] if self.history else 0

    def look(self, training_loss: float, held_out_loss: float, patience: int) -> bool:
        """Note an evaluation. Returns whether training goes on."""
        self.history.append((self.step, training_loss, held_out_loss))
        is_better = held_out_loss < self.best * (1 - _LEAST_IMPROVEMENT)
        self.best = min(self.best, held_out_loss)
        self.stale = 0 if is_better else self.stale + 1
        if self.stale >= patience:
            self.stale, self.decays = 0, self.decays + 1
        return self.decays <= _DECAYS


class RouterTraining:
    """One training on a recording, over the accelerator's processes.

    Args:
        clusters: int64 `[V]`: the cluster of each token id, from 0 without gaps.
        pinned: bool `[V]`: tokens that are on every shortlist and need no cluster.
        checkpoint: the file of the state. Training goes on from it if it is there.
    """

    def __init__(
        self,
        recording: Recording,
        clusters: torch.Tensor,
        embed: Embed,
        pinned: torch.Tensor,
        settings: TrainingSettings,
        checkpoint: str | Path,
        accelerator: Accelerator,
    ):
        self._recording, self._settings, self._accelerator = recording, settings, accelerator
        self._embed, self._checkpoint = embed, Path(checkpoint)
        self._clusters, self._num_clusters = clusters, int(clusters.max()) + 1
        # One more column, of no cluster, takes the pinned tokens.
        self._cluster_of = torch.where(pinned, self._num_clusters, clusters).to(accelerator.device)
        torch.manual_seed(settings.seed)
        network = self._method = self._first_network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.01)
        self.state = TrainingState()
        self._best = _copied(network)
        if self._checkpoint.exists():
            self._resume(network, optimizer)
        self._network, self._optimizer = accelerator.prepare(network, optimizer)

    @property
    def best(self) -> Router:
        """The router with the lowest held-out loss so far, in fp32 on the CPU."""
        return self._method.router(self._clusters.to(device="cpu", dtype=torch.int32), self._best)

    def run(
        self,
        report: Callable[[TrainingState], None] = lambda state: None,
        progress: Callable[[int, int], None] = lambda done, most: None,
    ) -> Router:
        """Train until the held-out loss no longer falls, or `max_steps`. Returns `best`. `report` is called after each
        evaluation, and `progress` every few batches with how many are done and how many there are at most."""
        state, most = self.state, self._settings.max_steps
        losses, batches = [], self._batches()
        progress(state.step, most)
        while state.decays <= _DECAYS and state.step < most:
            losses.append(self._step(next(batches)))
            state.step += 1
            if state.step % _BATCHES_OF_A_REPORT == 0:
                progress(state.step, most)
            if state.step % self._settings.evaluate_every and state.step < most:
                continue
            training_loss, held_out_loss = float(reduce(torch.stack(losses).mean(), "mean")), self._held_out_loss()
            losses = []
            if held_out_loss < state.best:
                self._best = _copied(self._method)
            state.look(training_loss, held_out_loss, self._settings.patience)
            self._save()
            report(state)
        self._accelerator.wait_for_everyone()
        return self.best

    # Batches -------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This process's part of every batch, after the batches that are done."""
        size, skip = self._settings.batch_size, self.state.step
        for epoch in range(10**9):
            rest: dict[str, torch.Tensor] = {}  # too few for a batch
            for fresh in self._pools(epoch):
                pool = {name: torch.cat([rest[name], fresh[name]]) if rest else fresh[name] for name in fresh}
                count = pool["top_ids"].shape[0] // size
                for start in range(0, count * size, size):
                    if skip:
                        skip -= 1
                        continue
                    part = slice(
                        start + self._accelerator.process_index, start + size, self._accelerator.num_processes
                    )
                    yield {name: tensor[part].to(self._accelerator.device) for name, tensor in pool.items()}
                rest = {name: tensor[count * size :] for name, tensor in pool.items()}

    def _pools(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """The training steps, a few shards at a time, shuffled."""
        random = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        shards = torch.tensor(list(self._recording.train))
        for numbers in shards[torch.randperm(len(shards), generator=random)].split(_POOL_SHARDS):
            loaded = [self._recording.shard(int(number)) for number in numbers]
            pool = {name: torch.cat([one[name] for one in loaded]) for name in self._method.reads}
            order = torch.randperm(pool["top_ids"].shape[0], generator=random)
            yield {name: tensor[order] for name, tensor in pool.items()}

    def _first_network(self) -> RouterNetwork:
        """The network before training, which begins at how often each cluster is right in the first shard."""
        width, hidden = self._recording.width, self._settings.hidden
        if hidden is None:
            network: RouterNetwork = CoralNetwork(width, self._num_clusters)
        else:
            network = DynaSpecNetwork(width, self._num_clusters, hidden)
        shard = next(self._recording.shards(self._recording.train))
        first = {name: shard[name][:_CHUNK] for name in network.reads}
        network.begin_at(first, network.labels(first, self._cluster_of.cpu(), self._num_clusters))
        return network

    # Steps ---------------------------------------------------------------------------------------------------------

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Averaged over the draft steps of a batch."""
        scores = self._network(*self._method.inputs(batch, self._embed))
        return self._method.loss(scores, self._method.labels(batch, self._cluster_of, self._num_clusters))

    def _step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * _DECAY**self.state.decays
        self._optimizer.zero_grad()
        loss = self._loss(batch)
        self._accelerator.backward(loss)
        self._optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        total = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        part = slice(self._accelerator.process_index, None, self._accelerator.num_processes)
        for shard in self._recording.shards(self._recording.held_out):
            rows = {name: shard[name][part].to(self._accelerator.device) for name in self._method.reads}
            for start in range(0, rows["top_ids"].shape[0], _CHUNK):
                chunk = {name: tensor[start : start + _CHUNK] for name, tensor in rows.items()}
                size = chunk["top_ids"].shape[0]
                total += torch.stack([self._loss(chunk).double() * size, total.new_tensor(float(size))])
        total = reduce(total, "sum")
        return float(total[0] / total[1])

    # The saved state -----------------------------------------------------------------------------------------------

    def _job(self) -> str:
        """A digest of what decides the training's result."""
        files = [(path.name, path.stat().st_size) for path in map(self._recording.path, self._recording.train)]
        counts = torch.bincount(self._cluster_of.cpu(), minlength=self._num_clusters + 1).tolist()
        return hashlib.sha256(json.dumps([asdict(self._settings), files, counts]).encode()).hexdigest()

    def _save(self) -> None:
        """Write weights, moments and progress. A kill leaves the old file or the new one."""
        if not self._accelerator.is_main_process:
            return
        saved = {
            "job": self._job(),
            "state": asdict(self.state),
            "best": self._best,
            "network": _copied(self._method),
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._checkpoint) as scratch:
            torch.save(saved, scratch)

    def _resume(self, network: RouterNetwork, optimizer: torch.optim.Optimizer) -> None:
        fix = "Train with the same settings to go on, or remove it to begin again"
        try:
            saved = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's and zipfile's errors for damaged files have no common class
            raise ConfigurationError(f"{self._checkpoint}: cannot be read: {error}. {fix}.") from error
        if saved["job"] != self._job():
            raise ConfigurationError(f"{self._checkpoint}: is the state of another training. {fix}.")
        self.state, self._best = TrainingState(**saved["state"]), saved["best"]
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])


def _copied(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in network.named_parameters()}
