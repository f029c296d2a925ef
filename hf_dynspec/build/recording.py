"""What is recorded of a pair's draft steps, and the folder with the records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..fields import SettingError, WholeNumber
from ..files import replacing
from .clusters import LARGEST_SEED

# Tokens.
SHORTEST_WINDOW = 16
# A job with another format is not continued. 2: the target's probabilities are taken after what follows its head.
# 3: held-out steps have hidden states too. 4: windows begin as the tokenizer begins texts.
STEPS_FORMAT = 4


@dataclass(frozen=True)
class RecordingSettings:
    """How draft steps are recorded."""

    steps: int = 500_000  # how many draft steps to record for training, at most
    held_out: int = 16_384  # how many besides, from other windows, to judge by
    window: int = 384  # tokens of a window, at most. A window of `n` tokens gives `n - 1` steps.
    depth: int = 5  # draft steps after each prefix. Teacher-forced, a depth below this is drawn for each prefix.
    top_k: int = 10  # how many of the drafter's most probable tokens are recorded, `L` in section 4.2
    target_top_k: int = 64  # how many of the target's most probable tokens are recorded at held-out steps
    draws: int = 64  # how many tokens are drawn there from the drafter's distribution, to estimate acceptance
    temperature: float = 0.8  # at which the pair is going to sample, and of those draws. 0 draws at temperature 1.
    seed: int = 0  # of the windows, the depths and the draws
    # Record for training what CORAL's router reads, the drafter's hidden states and the shares of its
    # probability, instead of what DynaSpec's reads, the features that a draft step starts from.
    of_hidden: bool = False

    def __post_init__(self):
        if isinstance(self.temperature, bool) or not 0 <= self.temperature < math.inf:
            raise SettingError("temperature", f"must be a number of at least 0, got {self.temperature!r}")
        least = {"window": SHORTEST_WINDOW, "seed": 0}
        for name in vars(self).keys() - {"temperature", "of_hidden"}:
            WholeNumber(least.get(name, 1), LARGEST_SEED).require(name, getattr(self, name))

    def bytes_on_disk(self, width: int) -> int:
        """About how many bytes the steps of a drafter with features of `width` numbers take."""
        step = 2 * width + 4 + 1 + (6 if self.of_hidden else 4) * self.top_k
        held_out = step + 2 * width + 6 * (self.target_top_k + self.draws)
        return self.steps * step + self.held_out * held_out


@dataclass(frozen=True, eq=False)
class Recording:
    """A folder of draft steps in shards. The tensors of a shard:

    - `token_ids` int32 `[n]`: the newest token before each step.
    - `depths` uint8 `[n]`.
    - `features` fp16 `[n, d]`: see `ShortlistState.observe_draft_inputs`. For DynaSpec and in held-out shards.
    - `hidden` fp16 `[n, d]`: what the drafter's head reads. For CORAL (`of_hidden`) and in held-out shards.
    - `top_ids` int32 `[n, L]`: the drafter's most probable tokens.
    - `top_shares` fp16 `[n, L]`: their probabilities at the temperature, divided by their sum. For CORAL.
    - `target_ids` int32, `target_probabilities` fp16 `[n, target_top_k]`: the target's most probable tokens, at
      temperature 1. In held-out shards.
    - `drawn_ids` int32, `drawn_ratios` fp16 `[n, draws]`: tokens drawn from the drafter's distribution, and how many
      times as probable they are to the target. In held-out shards.

    Probabilities and ratios are 0 at steps after a draft that the target rejected: nothing depends on them.
    """

    folder: Path
    train: range  # numbers of the shards to train on
    held_out: range  # numbers of the shards to judge by

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
        return max((1 + int(shard["depths"].max()) for shard in self.shards(shards)), default=1)

    def shard(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of one shard."""
        return load_file(self.path(number))

    def shards(self, numbers: range) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of some shards, without empty ones: texts may end before there is a step."""
        for number in numbers:
            shard = self.shard(number)
            if shard["token_ids"].shape[0]:
                yield shard

    def write(self, number: int, parts: list[dict[str, torch.Tensor]]) -> None:
        """Write a shard. A kill leaves all of it or nothing."""
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        with replacing(self.path(number)) as scratch:
            save_file(tensors, scratch)

    def path(self, number: int) -> Path:
        """The file of one shard."""
        return self.folder / f"steps-{number:05d}.safetensors"
