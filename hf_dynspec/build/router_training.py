"""Training of routers: which clusters does a draft step need? What is learned of that, `router_networks` says.

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import ConfigurationError
from ..fields import SettingError
from ..files import replacing
from ..shortlists.router.network import Router
from .recording import Recording
from .router_networks import CoralNetwork, DynaSpecNetwork, Embed, RouterNetwork

# Shards whose steps are shuffled together. What is held in memory is these and the batch.
_POOL_SHARDS = 8
# Held-out rows that are scored at a time.
_CHUNK = 4096
# Batches between two calls that tell how far it is.
_BATCHES_TOLD = 5
# What counts as an improvement of the held-out loss, and by how much a plateau lowers the learning rate, how often.
_LEAST_IMPROVEMENT = 1e-3
_DECAY = 0.2
_DECAYS = 2
# What AdamW remembers of each parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainingSettings:
    """How a router is trained.

    Args:
        hidden: width of the network's hidden layer (None: CORAL's router, which has none).
        batch_size: draft steps of a batch, over all processes together.
        learning_rate: of AdamW, at first.
        max_steps: batches to train on, at most.
        evaluate_every: batches between two looks at the held-out steps, after which the state is saved.
        patience: looks without improvement after which the learning rate falls; the third time training ends.
        seed: of the first weights and of the order.

    Raises:
        ConfigurationError: a number is out of range.
    """

    hidden: int | None = 512
    batch_size: int = 1024
    learning_rate: float = 2e-3
    max_steps: int = 20_000
    evaluate_every: int = 200
    patience: int = 2
    seed: int = 0

    def __post_init__(self):
        for name in ("hidden", "batch_size", "max_steps", "evaluate_every", "patience"):
            value = getattr(self, name)
            if name == "hidden" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(name, f"must be a whole number of at least 1, got {value!r}")
        if not 0 < self.learning_rate < 1:
            raise SettingError("learning_rate", f"must be between 0 and 1, got {self.learning_rate!r}")


@dataclass
class TrainingState:
    """Where a training is, but for weights and moments.

    Args:
        step: batches done.
        best: the lowest held-out loss.
        stale: looks at the held-out steps since then.
        decays: how often the learning rate fell.
        history: step, training loss and held-out loss at each look.
    """

    step: int = 0
    best: float = math.inf
    stale: int = 0
    decays: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def best_step(self) -> int:
        """After how many batches the held-out loss was the lowest; 0 where nothing was looked at yet."""
        return min(self.history, key=lambda look: look[2])[0] if self.history else 0

    def look(self, training_loss: float, held_out_loss: float, patience: int) -> bool:
        """Take in a look at the held-out steps. Returns whether training goes on."""
        self.history.append((self.step, training_loss, held_out_loss))
        is_better = held_out_loss < self.best * (1 - _LEAST_IMPROVEMENT)
        self.best = min(self.best, held_out_loss)
        self.stale = 0 if is_better else self.stale + 1
        if self.stale >= patience:
            self.stale, self.decays = 0, self.decays + 1
        return self.decays <= _DECAYS


class RouterTraining:
    """One training.

    Args:
        recording: draft steps of the pair.
        clusters: int64 `[V]`: the cluster of each token id, from 0 without gaps.
        embed: gives the drafter's embeddings `[m, d]` of tokens, int64 `[m]`.
        pinned: bool `[V]`: tokens that are on every shortlist anyway, so that no cluster is needed for them.
        settings: how to train.
        checkpoint: where the state is saved, and continued from if it is there.
        accelerator: device and processes.
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
        self._checkpoint = Path(checkpoint)
        device = accelerator.device
        self._clusters, self._num_clusters = clusters, int(clusters.max()) + 1
        # A column more, which no cluster has, takes the tokens that count for none.
        self._cluster_of = torch.where(pinned, self._num_clusters, clusters).to(device)
        self._embed = embed
        torch.manual_seed(settings.seed)
        network = self._method = self._first_network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.01)
        self.state = TrainingState()
        self._best = {name: tensor.detach().cpu().clone() for name, tensor in network.named_parameters()}
        if self._checkpoint.exists():
            self._resume(network, optimizer)
        self._network, self._optimizer = accelerator.prepare(network, optimizer)

    @property
    def best(self) -> Router:
        """The router whose held-out loss was the lowest so far, in fp32 on the CPU."""
        return self._method.router(self._clusters.to(device="cpu", dtype=torch.int32), self._best)

    def run(
        self,
        report: Callable[[TrainingState], None] = lambda state: None,
        progress: Callable[[int, int], None] = lambda done, most: None,
    ) -> Router:
        """Train until the held-out loss no longer falls, or `max_steps`.

        Args:
            report: called after each look at the held-out steps.
            progress: called every few batches with how many are done and how many there are at most.

        Returns:
            See `best`.
        """
        losses = []
        goes_on = self.state.decays <= _DECAYS and self.state.step < self._settings.max_steps
        batches = self._batches() if goes_on else iter(())
        progress(self.state.step, self._settings.max_steps)
        while goes_on:
            losses.append(self._step(next(batches)))
            self.state.step += 1
            if self.state.step % _BATCHES_TOLD == 0:
                progress(self.state.step, self._settings.max_steps)
            if self.state.step % self._settings.evaluate_every and self.state.step < self._settings.max_steps:
                continue
            before = self.state.best
            training_loss = float(reduce(torch.stack(losses).mean(), "mean"))
            held_out_loss = self._held_out_loss()
            losses = []
            goes_on = self.state.look(training_loss, held_out_loss, self._settings.patience)
            goes_on = goes_on and self.state.step < self._settings.max_steps
            self._save(is_best=held_out_loss < before)
            report(self.state)
        self._accelerator.wait_for_everyone()
        return self.best

    # Batches -------------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This process's part of every batch, from the one after those that are done on."""
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
        """What is to be trained, which begins at how often each cluster is right in the first shard."""
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
        for shard in self._recording.shards(self._recording.held_out):
            part = slice(self._accelerator.process_index, None, self._accelerator.num_processes)
            rows = {name: shard[name][part].to(self._accelerator.device) for name in self._method.reads}
            count = rows["top_ids"].shape[0]
            for start in range(0, count, _CHUNK):
                chunk = {name: tensor[start : start + _CHUNK] for name, tensor in rows.items()}
                size = chunk["top_ids"].shape[0]
                total += torch.stack([self._loss(chunk).double() * size, total.new_tensor(float(size))])
        total = reduce(total, "sum")
        return float(total[0] / total[1])

    # The saved state --------------------------------------------------------------------------------------------

    def _job(self) -> str:
        """What a saved state must have been made with to be continued."""
        files = [(path.name, path.stat().st_size) for path in map(self._recording.path, self._recording.train)]
        counts = torch.bincount(self._cluster_of.cpu(), minlength=self._num_clusters + 1).tolist()
        described = json.dumps([asdict(self._settings), files, counts])
        return hashlib.sha256(described.encode()).hexdigest()

    def _save(self, is_best: bool) -> None:
        """Write weights, moments and state, so that a kill leaves the old file or the new one."""
        network = self._accelerator.unwrap_model(self._network)
        weights = {name: tensor.detach().cpu().clone() for name, tensor in network.named_parameters()}
        if is_best:
            self._best = weights
        if not self._accelerator.is_main_process:
            return
        tensors = {f"best.{name}": tensor.clone() for name, tensor in self._best.items()}
        tensors |= {f"now.{name}": tensor for name, tensor in weights.items()}
        for name, parameter in network.named_parameters():
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = self._optimizer.state[parameter][moment].detach().cpu().clone()
        with replacing(self._checkpoint) as scratch:
            save_file(tensors, scratch, metadata={"job": self._job(), "state": json.dumps(asdict(self.state))})

    def _resume(self, network: RouterNetwork, optimizer: torch.optim.Optimizer) -> None:
        """Go on where the saved state is.

        Raises:
            ConfigurationError: it is of another training, or damaged.
        """
        fix = "Train with the same settings to continue it, or remove it to begin anew"
        try:
            with safe_open(self._checkpoint, "pt") as saved:
                metadata = saved.metadata()
                tensors = {name: saved.get_tensor(name) for name in saved.keys()}
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{self._checkpoint}: cannot be read: {error}. {fix}.") from error
        if metadata.get("job") != self._job():
            raise ConfigurationError(f"{self._checkpoint}: is the state of another training. {fix}.")
        state = json.loads(metadata["state"])
        self.state = TrainingState(**{**state, "history": [tuple(one) for one in state["history"]]})
        self._best = {name: tensors[f"best.{name}"] for name in self._best}
        network.load_state_dict({name: tensors[f"now.{name}"] for name in self._best})
        for name, parameter in network.named_parameters():
            moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(self.state.step)), **moments}
