"""What is recorded of a pair's draft steps, and the folder that it is recorded into."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..errors import shown_value
from ..fields import SettingError
from ..files import replacing
from .clusters import LARGEST_SEED

# Tokens.
SHORTEST_WINDOW = 16
# Of what is recorded: a job of another one is not continued. 2: the target's probabilities are those that it samples
# by, after what follows its head. 3: held-out steps have hidden states too.
STEPS_FORMAT = 3


@dataclass(frozen=True)
class RecordingSettings:
    """How draft steps are recorded.

    Args:
        steps: how many draft steps to record for training, at most.
        held_out: how many besides, from other windows, to judge by.
        window: tokens of a window, at most. One of `n` tokens gives `n - 1` steps.
        depth: draft steps after each prefix. Teacher-forced, a depth below this is drawn for each prefix.
        top_k: how many of the drafter's most probable tokens are recorded, `L` in section 4.2.
        target_top_k: how many of the target's most probable tokens are recorded at held-out steps.
        draws: how many tokens are drawn there from what the drafter says, to tell how many the target accepts.
        temperature: at which the pair is going to sample, and so at which those tokens are drawn and accepted. At 0,
            where nothing is drawn, they are those of temperature 1.
        seed: of the windows, the depths and the draws.
        of_hidden: record for training what CORAL's router learns from, the drafter's hidden states and how its
            probability is shared, and not what a draft step starts from, which DynaSpec's reads.

    Raises:
        ConfigurationError: a number is out of range.
    """

    steps: int = 500_000
    held_out: int = 16_384
    window: int = 384
    depth: int = 5
    top_k: int = 10
    target_top_k: int = 64
    draws: int = 64
    temperature: float = 0.8
    seed: int = 0
    of_hidden: bool = False

    def __post_init__(self):
        least = {"window": SHORTEST_WINDOW, "seed": 0}
        if isinstance(self.temperature, bool) or not 0 <= self.temperature < math.inf:
            raise SettingError("temperature", f"must be a number of at least 0, got {self.temperature!r}")
        for name, value in asdict(self).items():
            if name in ("temperature", "of_hidden"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least.get(name, 1):
                raise SettingError(name, f"must be a whole number of at least {least.get(name, 1)}, got {value!r}")
        # That of the clusters, of which the router is.
        if self.seed > LARGEST_SEED:
            raise SettingError("seed", f"must be at most {LARGEST_SEED:,}, got {shown_value(self.seed)}")

    def bytes_on_disk(self, width: int) -> int:
        """About how many bytes the steps of a drafter with features of `width` numbers take."""
        step = 2 * width + 4 + 1 + (6 if self.of_hidden else 4) * self.top_k
        held_out = step + 2 * width + 6 * (self.target_top_k + self.draws)
        return self.steps * step + self.held_out * held_out


@dataclass(frozen=True, eq=False)
class Recording:
    """A folder of draft steps: shards of tensors, to be read one after another.

    Args:
        folder: where the shards are.
        train: numbers of the shards to train on.
        held_out: numbers of those to judge by.

    A shard has `token_ids` int32 `[n]`, the newest token before each step; `features` fp16 `[n, d]`, see
    `ShortlistState.observe_draft_inputs`; `top_ids` int32 `[n, L]`, the drafter's most probable tokens; and `depths`
    uint8 `[n]`. For CORAL (`RecordingSettings.of_hidden`) it has, in place of features, `hidden` fp16 `[n, d]`, which
    the drafter's head reads, and besides `top_shares` fp16 `[n, L]`, the probabilities of `top_ids` at the
    temperature, divided by their sum. If it is held out, it has both features and hidden states, and `target_ids`
    int32 and `target_probabilities` fp16 `[n, target_top_k]`, the target's most probable tokens, and `drawn_ids` int32
    and `drawn_ratios` fp16 `[n, draws]`, tokens drawn from the drafter's distribution and how many times as probable
    they are to the target. Probabilities and ratios are 0 where the target rejected the draft before the step, so that
    nothing depends on it.
    """

    folder: Path
    train: range
    held_out: range

    @property
    def width(self) -> int:
        """Numbers of a feature, `d`."""
        with safe_open(self.path(self.train[0]), "pt") as shard:
            return shard.get_slice("hidden" if "hidden" in shard.keys() else "features").get_shape()[1]

    def count(self, shards: range) -> int:
        """How many draft steps some shards have."""
        total = 0
        for number in shards:
            with safe_open(self.path(number), "pt") as shard:
                total += shard.get_slice("token_ids").get_shape()[0]
        return total

    def depths(self, shards: range) -> int:
        """Draft steps of the longest chain in some shards, at least 1."""
        most = 1
        for number in shards:
            with safe_open(self.path(number), "pt") as shard:
                depths = shard.get_tensor("depths")
            most = max(most, 1 + int(depths.max()) if depths.numel() else 1)
        return most

    def shard(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of one shard."""
        return load_file(self.path(number))

    def shards(self, numbers: range) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of some shards, but for those without a step: texts may end at once."""
        for number in numbers:
            shard = self.shard(number)
            if shard["token_ids"].shape[0]:
                yield shard

    def write(self, number: int, parts: list[dict[str, torch.Tensor]]) -> None:
        """Write a shard, so that a kill leaves all of it or nothing."""
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        with replacing(self.path(number)) as scratch:
            save_file(tensors, scratch)

    def path(self, number: int) -> Path:
        """The file of one shard."""
        return self.folder / f"steps-{number:05d}.safetensors"
