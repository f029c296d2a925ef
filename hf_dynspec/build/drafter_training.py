"""Training of drafters: EAGLE heads and small models learn to say what their target would.

Training-time test, as in EAGLE-3 (Li et al. 2025, section 3.2): chains are drafted after every prefix of a text at
once, and a head reads its own outputs, as it will when it drafts. Nothing of the target's is stored: it reads the
texts beside the drafter.

Data-parallel over accelerate's processes: every batch is the same as with one process, each process computes its part
of it, and gradients are added up, so that the result is the same to rounding.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, reduce
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..errors import ConfigurationError
from ..fields import LARGEST_SEED, SettingError, WholeNumber
from ..files import replacing
from .drafter_losses import DraftLosses, HeldOutFigures, ScoredTokens
from .jobs import damaged_work
from .recording import SHORTEST_WINDOW

# The share of the training in which the learning rate rises, and batches in which it does at least: the first steps of
# AdamW are large whatever the gradients, and a head begins near a good place.
_WARM_UP, _FIRST_BATCHES = 0.04, 40
_WEIGHT_DECAY, _LONGEST_GRADIENT = 0.01, 1.0
# Looks at the held-out texts, evenly over the training; and seconds until the early one, which chooses nothing.
_LOOKS, _EARLY = 12, 60.0
# If time is limited, training between two looks takes at least so many times as long as a look.
_LOOK_SHARE = 12
# How often a text of the target's own is read.
_MOST_READINGS = 6
# Seconds after which the state is saved, if there are not enough steps before.
_SAVE_AFTER = 60.0
# Chains that a look judges.
_CHAINS = 128
# Largest learning rate; and its product with the width of hidden states in wide models.
_LARGEST_RATE, _RATE_BY_WIDTH = 3e-3, 0.5


@dataclass(frozen=True)
class DrafterTrainingSettings:
    """How a drafter is trained."""

    depth: int = 5  # draft steps of the chains that are trained on
    decay: float = 0.85  # weight of each step beside the one before it
    batch_tokens: int = 512  # tokens of a batch's texts, at least, over all processes together
    scored_tokens: int = 4096  # ids that a batch is scored by; smaller vocabularies use all
    learning_rate: float | None = None  # of AdamW, at its highest (None: by the width of hidden states)
    schedule: str = "cosine"  # after the warm-up: cosine to 0, or constant
    steps: int | None = None  # batches to train on, at most
    minutes: float | None = None  # to train for, at most
    self_written: float = 0.5  # share of the texts that the target wrote itself
    save_every: int = 100  # batches between two savings of the state
    seed: int = 0  # of the order and of the scored ids

    def __post_init__(self):
        for name in ("depth", "batch_tokens", "scored_tokens", "save_every", "steps"):
            most = SHORTEST_WINDOW - 4 if name == "depth" else LARGEST_SEED
            WholeNumber(1, most, optional=name == "steps").require(name, getattr(self, name))
        WholeNumber(0, LARGEST_SEED).require("seed", self.seed)
        if not 0 < self.decay <= 1:
            raise SettingError("decay", f"must be above 0 and at most 1, got {self.decay!r}")
        if not 0 <= self.self_written <= 1:
            raise SettingError("self_written", f"must be from 0 to 1, got {self.self_written!r}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise SettingError("learning_rate", f"must be between 0 and 1, got {self.learning_rate!r}")
        if self.schedule not in ("cosine", "constant"):
            raise SettingError("schedule", f"must be cosine or constant, got {self.schedule!r}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise SettingError("minutes", f"must be above 0, got {self.minutes!r}")
        if self.steps is None and self.minutes is None:
            raise SettingError("minutes", "or steps must say when training ends")


@dataclass
class DrafterTrainingState:
    """The progress of a training, without weights and moments."""

    step: int = 0  # batches done
    seconds: float = 0.0  # that they took, with what came before the training
    looked: tuple[float, float] = (0.0, 0.0)  # seconds at the end of the last look, and how long it took
    taken: list[int] = field(default_factory=lambda: [0, 0])  # texts of each kind that were read
    best: float = math.inf  # the lowest held-out loss
    looks: int = 0  # regular looks at the held-out texts
    is_past_early_look: bool = False
    loss: float = math.nan  # of training, a moving average
    # Step, training loss and figures at each look.
    history: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)

    def best_figures(self) -> HeldOutFigures:
        """Those of the weights that are kept."""
        return HeldOutFigures(**min((figures for *_, figures in self.history), key=lambda one: one["loss"]))


class DrafterTraining:
    """One training of a drafter's module, over the accelerator's processes.

    Args:
        target: in evaluation mode. It is not changed.
        drafter: an EAGLE head or a small model, in fp32. Its module is trained.
        texts: of each kind, the user's and the target's own; int64 `[n]` each.
        held_out: texts to judge by.
        ranking: int64 `[V]`: the ids that both models score, the most frequent first.
        settings: see there.
        checkpoint: the file of the state. Training goes on from it if it is there.
        accelerator: of the processes.
        seconds: that the job took before, which count among `minutes`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        texts: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        held_out: list[torch.Tensor],
        ranking: torch.Tensor,
        settings: DrafterTrainingSettings,
        checkpoint: str | Path,
        accelerator: Accelerator,
        seconds: float = 0.0,
    ):
        self.drafter, self._texts, self._held_out = drafter, texts, held_out
        self._settings, self._accelerator, self._checkpoint = settings, accelerator, Path(checkpoint)
        self._losses = DraftLosses(target, drafter, ranking.shape[0], settings.depth, settings.decay)
        self._scored = ScoredTokens(ranking, settings.scored_tokens)
        self._parameters = [one for one in drafter.module.parameters() if one.requires_grad]
        width = target.config.get_text_config().hidden_size
        self._rate = settings.learning_rate or min(_LARGEST_RATE, _RATE_BY_WIDTH / width)
        groups = [
            {"params": [one], "weight_decay": _WEIGHT_DECAY if one.dim() > 1 else 0.0, "share": _share(name, one)}
            for name, one in drafter.module.named_parameters()
            if one.requires_grad
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=self._rate, betas=(0.9, 0.95))
        self.state = DrafterTrainingState(seconds=seconds)
        self._best = self._copied()
        if self._checkpoint.exists():
            self._resume()

    @property
    def progress(self) -> float:
        """The part of the training that is done, from 0 to 1: of the steps or of the time, the larger one."""
        settings, state = self._settings, self.state
        by_steps = state.step / settings.steps if settings.steps else 0.0
        by_time = state.seconds / (60 * settings.minutes) if settings.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def run(
        self,
        report: Callable[[DrafterTrainingState, HeldOutFigures], None] = lambda state, figures: None,
        progress: Callable[[DrafterTrainingState, float], None] = lambda state, done: None,
    ) -> HeldOutFigures:
        """Train, and leave the weights with the lowest held-out loss in the drafter. Returns their figures. `report`
        is called after each look at the held-out texts, and `progress` after each batch."""
        state = self.state
        started, saved = time.monotonic() - state.seconds, time.monotonic()
        while self.progress < 1:
            self._step()
            state.seconds = self._agreed(time.monotonic() - started)
            progress(state, self.progress)
            if self._is_time_to_look():
                state.looks = int(self.progress * _LOOKS)
                self._look(report)
                now = self._agreed(time.monotonic() - started)
                state.looked = now, now - state.seconds
            elif state.seconds > _EARLY and not (state.looks or state.is_past_early_look):
                state.is_past_early_look = True
                report(state, self._judge())
            if state.step % self._settings.save_every == 0 or time.monotonic() - saved > _SAVE_AFTER:
                self._save()
                saved = time.monotonic()
        if not state.history:
            self._look(report)
        self._save()
        self._accelerator.wait_for_everyone()
        self._put(self._best)
        return state.best_figures()

    # Steps ---------------------------------------------------------------------------------------------------------

    def _batch(self) -> list[torch.Tensor]:
        """The texts of the next batch, of both kinds in the settings' proportion. Each kind is read in a new order as
        often as it is needed, the target's own texts not so often that they are learnt by heart."""
        taken, batch = self.state.taken, []
        while sum(map(len, batch)) < self._settings.batch_tokens:
            wants_own = taken[1] < self._settings.self_written * (sum(taken) + 1)
            kind = int(wants_own and taken[1] < _MOST_READINGS * len(self._texts[1]))
            texts = self._texts[kind]
            epoch, place = divmod(taken[kind], len(texts))
            order = np.random.default_rng([self._settings.seed, kind, epoch]).permutation(len(texts))
            batch.append(texts[order[place]])
            taken[kind] += 1
        return batch

    def _step(self) -> None:
        state, accelerator = self.state, self._accelerator
        batch = self._batch()
        ids, weights = self._scored.draw(batch, self._settings.seed * 1_000_003 + state.step)
        mine = batch[accelerator.process_index :: accelerator.num_processes]
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * self._factor() * group["share"]
        self._optimizer.zero_grad(set_to_none=False)
        loss = self._losses.backward(mine, ids, weights, self._losses.predictions(batch))
        if accelerator.num_processes > 1:
            for one in self._parameters:
                one.grad = reduce(torch.zeros_like(one) if one.grad is None else one.grad, "sum")
            loss = reduce(loss.to(accelerator.device), "sum").cpu()
        torch.nn.utils.clip_grad_norm_(self._parameters, _LONGEST_GRADIENT)
        self._optimizer.step()
        state.loss = float(loss) if state.step == 0 else 0.95 * state.loss + 0.05 * float(loss)
        state.step += 1

    def _factor(self) -> float:
        """The learning rate's part of its highest."""
        done = self.progress
        warm = (
            min(1.0, done / _WARM_UP, (self.state.step + 1) / _FIRST_BATCHES)
            if self.state.step
            else 1 / _FIRST_BATCHES
        )
        if self._settings.schedule == "constant":
            return warm
        return warm * 0.5 * (1 + math.cos(math.pi * max(0.0, done - _WARM_UP) / (1 - _WARM_UP)))

    def _agreed(self, seconds: float) -> float:
        """The main process's clock, as all of them stop at the same step."""
        if self._accelerator.num_processes == 1:
            return seconds
        return float(broadcast(torch.tensor(seconds, dtype=torch.float64, device=self._accelerator.device)))

    # Looks ---------------------------------------------------------------------------------------------------------

    def _is_time_to_look(self) -> bool:
        state = self.state
        if self.progress == 1:
            return True
        is_due = self.progress * _LOOKS >= state.looks + 1
        end, took = state.looked
        return is_due and (self._settings.minutes is None or state.seconds - end >= _LOOK_SHARE * took)

    def _judge(self) -> HeldOutFigures:
        return self._losses.judge(self._held_out, _CHAINS)

    def _look(self, report: Callable[[DrafterTrainingState, HeldOutFigures], None]) -> None:
        figures, state = self._judge(), self.state
        state.history.append((state.step, state.loss, asdict(figures)))
        if figures.loss < state.best:
            state.best, self._best = figures.loss, self._copied()
        report(state, figures)

    # The saved state -----------------------------------------------------------------------------------------------

    def _copied(self) -> dict[str, torch.Tensor]:
        """The weights, on the CPU."""
        named = self.drafter.module.named_parameters()
        return {name: one.detach().cpu().clone() for name, one in named if one.requires_grad}

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        parameters = dict(self.drafter.module.named_parameters())
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)

    def _job(self) -> str:
        """A digest of what decides the training's result, but for its length in time."""
        settings = {
            name: value for name, value in asdict(self._settings).items() if name not in ("save_every", "minutes")
        }
        sizes = [[len(text) for text in texts] for texts in (*self._texts, self._held_out)]
        shapes = {name: list(one.shape) for name, one in self._best.items()}
        return hashlib.sha256(json.dumps([settings, sizes, shapes]).encode()).hexdigest()

    def _save(self) -> None:
        """Write weights, moments and progress. A kill leaves the old file or the new one."""
        if not self._accelerator.is_main_process:
            return
        saved = {
            "job": self._job(),
            "state": asdict(self.state),
            "best": self._best,
            "module": self._copied(),
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._checkpoint) as scratch:
            torch.save(saved, scratch)

    def _resume(self) -> None:
        try:
            saved = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch's and zipfile's errors for damaged files have no common class
            raise damaged_work(self._checkpoint, error) from error
        if saved["job"] != self._job():
            raise ConfigurationError(
                f"{self._checkpoint}: is the state of another training. Train with the same settings to go on, or "
                "remove it to begin again."
            )
        self.state, self._best = DrafterTrainingState(**saved["state"]), saved["best"]
        self._put(saved["module"])
        self._optimizer.load_state_dict(saved["optimizer"])


def _share(name: str, weight: torch.Tensor) -> float:
    """A weight's share of the learning rate. What `fc` reads has any size, and its weights make up for that: changes
    of them have to be as much smaller."""
    is_sized = name.split(".")[-2:] == ["fc", "weight"]
    return min(1.0, float(weight.detach().float().square().mean() * weight.shape[-1]) ** 0.5) if is_sized else 1.0
