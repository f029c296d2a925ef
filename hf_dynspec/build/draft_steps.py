"""Draft steps of a pair along texts: what each starts from, and what the drafter would say with all of its vocabulary.

Routers are trained on these (DynaSpec, appendix A.2). The paper records them while it generates, as `draft_rounds`
does; here they are teacher-forced: texts are cut into windows, both models read a window once, and a draft is unrolled
after every prefix of it, fed with the window's own tokens. These are the draft steps of rounds whose drafts were
accepted, which are all that acceptance depends on, at a fraction of the cost: no step waits for the one before, and
only held-out steps need the target's head. Of the steps after a prefix one is recorded, at a depth that is drawn.

Everything is streamed: windows are sampled while texts are read, and steps are written in shards of bounded size.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..errors import ConfigurationError
from ..files import replacing
from ..kernels import top_k_ids
from ..modeling.head import PackedRows, finish_logits
from ..modeling.parts import scale_and_cap
from ..protocol import Shortlist
from .corpus import CorpusError, FilePart, read_unit

# Rows whose logits over the whole vocabulary are held at a time.
_CHUNK = 128
_SHORTEST_WINDOW = 16
_BATCH_CHARACTERS = 1 << 20
_WINDOWS_FILE = "windows.npz"
# Of what is recorded: a job of another one is not continued. 2: the target's probabilities are those that it samples
# by, after what follows its head. 3: held-out steps have hidden states too.
STEPS_FORMAT = 3
# What exceeds the inverse of a shortlist's share of the drafter's probability changes nothing.
_LARGEST_RATIO = 1e4


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
        least = {"window": _SHORTEST_WINDOW, "seed": 0}
        if isinstance(self.temperature, bool) or not 0 <= self.temperature < math.inf:
            raise ConfigurationError(f"temperature must be a number of at least 0, got {self.temperature!r}")
        for name, value in asdict(self).items():
            if name in ("temperature", "of_hidden"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least.get(name, 1):
                raise ConfigurationError(
                    f"{name} must be a whole number of at least {least.get(name, 1)}, got {value!r}"
                )

    def bytes_on_disk(self, width: int) -> int:
        """About how many bytes the steps of a drafter with features of `width` numbers take."""
        step = 2 * width + 4 + 1 + (6 if self.of_hidden else 4) * self.top_k
        held_out = step + 2 * width + 6 * (self.target_top_k + self.draws)
        return self.steps * step + self.held_out * held_out


# Windows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Windows:
    """A sample of the windows of a corpus, in random order, and how often each token occurs in the corpus.

    Args:
        token_ids: int32 `[n]`: the windows, one after another.
        ends: int64 `[w]`: one past the last token of each.
        counts: int64 `[V]`: of all texts, also of what was not sampled.
    """

    token_ids: np.ndarray
    ends: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> torch.Tensor:
        """int64 `[n]`: the tokens of one window."""
        start = 0 if index == 0 else self.ends[index - 1]
        return torch.from_numpy(self.token_ids[start : self.ends[index]].astype(np.int64))

    def covering(self, steps: int, first: int = 0) -> int:
        """The end of the fewest windows from `first` on that have so many steps, or of all."""
        lengths = np.diff(self.ends, prepend=0)[first:] - 1
        return min(len(self), first + int(np.searchsorted(lengths.cumsum(), steps)) + 1)


def sample_windows(
    units: Sequence[tuple[FilePart, ...]],
    tokenizer: Any,
    vocabulary_size: int,
    settings: RecordingSettings,
    *,
    text_field: str = "text",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Windows:
    """Cut texts into windows and keep a uniform sample (reservoir sampling) with enough steps.

    Args:
        units: from `plan_corpus`.
        tokenizer: of both models.
        vocabulary_size: `V`.
        settings: what is going to be recorded.
        text_field: as in `plan_corpus`.
        report: called before each unit with how many are done and how many there are.

    Raises:
        CorpusError: a unit cannot be read, or no text is long enough for a window.
    """
    random = np.random.default_rng(settings.seed)
    most = (settings.steps + settings.held_out) // (_SHORTEST_WINDOW - 1) + 2
    # Enough even if all windows were as short as can be; this many, and one text, are what is held.
    kept: list[np.ndarray] = []
    counts = np.zeros(vocabulary_size, np.int64)
    seen = 0
    for done, unit in enumerate(units):
        report(done, len(units))
        for token_ids in _tokenized(unit, tokenizer, text_field):
            counts += np.bincount(token_ids, minlength=vocabulary_size)
            for start in range(0, len(token_ids), settings.window):
                # A copy, which does not keep the whole text.
                window = token_ids[start : start + settings.window].copy()
                if len(window) < _SHORTEST_WINDOW:
                    continue
                place = seen if len(kept) < most else int(random.integers(0, seen + 1))
                seen += 1
                if place < len(kept):
                    kept[place] = window
                elif place < most:
                    kept.append(window)
    report(len(units), len(units))
    if len(kept) < 2:
        raise CorpusError(f"the texts give {len(kept)} windows of {_SHORTEST_WINDOW} tokens or more; two are needed")
    order = random.permutation(len(kept))
    enough = np.cumsum([len(kept[index]) - 1 for index in order])
    order = order[: np.searchsorted(enough, settings.steps + settings.held_out + 2 * settings.window) + 1]
    lengths = [len(kept[index]) for index in order]
    return Windows(np.concatenate([kept[index] for index in order]), np.cumsum(lengths), counts)


def windows_of(folder: str | Path, job: dict[str, Any], sample: Callable[[], Windows]) -> Windows:
    """The windows of a job, sampled now or when the job was begun.

    Args:
        folder: where they are kept, beside the steps recorded from them.
        job: JSON values that decide what is recorded. A folder of another job is not continued.
        sample: makes the windows.

    Raises:
        ConfigurationError: the folder holds another job.
    """
    file, described = Path(folder, _WINDOWS_FILE), json.dumps(job, sort_keys=True)
    if file.exists():
        with np.load(file, allow_pickle=False) as saved:
            if str(saved["job"]) != described:
                raise ConfigurationError(
                    f"{folder} holds draft steps that were recorded with other models, texts or settings. Run with "
                    "the same ones to continue, choose another folder, or remove it."
                )
            return Windows(saved["token_ids"], saved["ends"], saved["counts"])
    windows = sample()
    arrays = {"token_ids": windows.token_ids, "ends": windows.ends, "counts": windows.counts}
    with replacing(file) as scratch, open(scratch, "wb") as stream:
        np.savez(stream, **arrays, job=np.array(described))
    return windows


def _tokenized(unit: Sequence[FilePart], tokenizer: Any, text_field: str) -> Iterator[np.ndarray]:
    """int32 `[n]`: the tokens of each text of a unit; long texts come in several pieces."""
    texts: list[str] = []
    characters = 0
    for piece, _ in read_unit(unit, text_field):
        texts.append(piece)
        characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield from _tokenize(texts, tokenizer)
            texts, characters = [], 0
    if texts:
        yield from _tokenize(texts, tokenizer)


def _tokenize(texts: list[str], tokenizer: Any) -> Iterator[np.ndarray]:
    for token_ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        yield np.array(token_ids, np.int32)


# Recording ---------------------------------------------------------------------------------------------------------


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

    def path(self, number: int) -> Path:
        """The file of one shard."""
        return self.folder / f"steps-{number:05d}.safetensors"


class StepRecorder:
    """Records the draft steps of a pair into a folder, shard by shard; shards that are there are not made again.

    Args:
        target: a loaded model.
        drafter: what drafts for it.
        vocabulary_size: ids below it are tokens that both models score.
        settings: what to record.
        folder: made if needed.

    Attributes:
        shard_steps: about how many steps a shard has, which is the most that a stopped run does again.
    """

    shard_steps = 1 << 14

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        vocabulary_size: int,
        settings: RecordingSettings,
        folder: str | Path,
    ):
        self.target, self.drafter, self.settings = target, drafter, settings
        self._folder = Path(folder)
        self._vocabulary_size = vocabulary_size
        head = drafter.head
        slots = torch.arange(vocabulary_size, device=head.device) if head.token_ids is None else head.token_ids
        self._everything = Shortlist(slots, version=0, is_prefix=True)

    def record(
        self,
        windows: Windows,
        *,
        process: int = 0,
        processes: int = 1,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> Recording:
        """Record all shards, or every `processes`-th of them.

        Args:
            windows: the texts. The first ones are held out, a fifth of them at most.
            process: which of the processes this is.
            processes: how many share the work.
            report: called before each window with how many come before it and how many there are.
        """
        held_out_end = min(windows.covering(self.settings.held_out), max(1, len(windows) // 5))
        end = windows.covering(self.settings.steps, held_out_end)
        held_out = self._cut(windows, 0, held_out_end)
        shards = [*held_out, *self._cut(windows, held_out_end, end)]
        recording = Recording(self._folder, range(len(held_out), len(shards)), range(len(held_out)))
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(shards):
            if number % processes == process and not recording.path(number).exists():
                parts = []
                for index in shard:
                    report(index, end)
                    parts.append(self.steps(windows[index], index, number in recording.held_out))
                _write(recording.path(number), parts)
        report(end, end)
        return recording

    def _cut(self, windows: Windows, start: int, end: int) -> list[range]:
        """Cut a range of windows into shards of about `shard_steps` steps."""
        shards = []
        while start < end:
            stop = min(end, windows.covering(self.shard_steps, start))
            shards.append(range(start, stop))
            start = stop
        return shards

    @torch.no_grad()
    def steps(self, token_ids: torch.Tensor, index: int, is_held_out: bool) -> dict[str, torch.Tensor]:
        """Record one draft step after each prefix of a window.

        Args:
            token_ids: int64 `[n]`: the window.
            index: its number, which the random numbers that are drawn for it depend on.
            is_held_out: whether the target's tokens are wanted.

        Returns:
            The window's part of the tensors of a shard, see `Recording`.
        """
        drafter, settings = self.drafter, self.settings
        device = drafter.head.device
        target_states = self.target_states(token_ids, is_held_out)
        features = None
        if drafter.reads:
            features = torch.cat([target_states[layer] for layer in drafter.reads], dim=-1).to(device)
        n = token_ids.shape[0]
        random = torch.Generator().manual_seed(settings.seed * 1_000_003 + index)
        depths = torch.randint(0, settings.depth, (n - 1,), generator=random)
        # Near the end there are only as many steps as there are tokens left.
        depths = torch.minimum(depths, torch.arange(n - 2, -1, -1))
        read, before, hidden = [], [], []
        for depth, step in enumerate(drafter.unroll(token_ids.to(device), features, min(settings.depth, n - 1))):
            starts = (depths == depth).nonzero().squeeze(1)
            read.append(starts + 1 + depth)
            before.append(step.features[starts.to(device)])
            hidden.append(step.hidden[starts.to(device)])
        newest = torch.cat(read)
        depths, hidden = depths.sort(stable=True).values, torch.cat(hidden)
        steps = self.described(token_ids[newest], depths, torch.cat(before), hidden, is_held_out)
        if is_held_out:
            steps |= self.both_say(hidden, target_states[-1][newest.to(target_states[-1].device)], index)
        return steps

    def target_states(self, token_ids: torch.Tensor, is_held_out: bool) -> tuple[torch.Tensor, ...]:
        """The target's hidden states, each `[n, d]`: its embedding, and those after its layers."""
        if not self.drafter.reads and not is_held_out:
            return ()
        decoder = self.target.get_decoder()
        outputs = decoder(
            input_ids=token_ids.unsqueeze(0).to(self.target.device), output_hidden_states=True, use_cache=False
        )
        return tuple(states[0] for states in outputs.hidden_states)

    def described(
        self,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        features: torch.Tensor,
        hidden: torch.Tensor,
        is_held_out: bool,
    ) -> dict[str, torch.Tensor]:
        """What a shard has of every draft step.

        Args:
            token_ids: int64 `[n]` on the CPU: the newest tokens.
            depths: int64 `[n]` on the CPU.
            features: `[n, d]`: what the drafter knew before those tokens.
            hidden: `[n, d]`: what its logits are computed from.
            is_held_out: whether any router is to be judged at these steps.
        """
        steps = {"token_ids": token_ids.to(torch.int32), "depths": depths.to(torch.uint8)}
        if is_held_out or not self.settings.of_hidden:
            steps["features"] = features.to(device="cpu", dtype=torch.float16)
        if is_held_out or self.settings.of_hidden:
            steps["hidden"] = hidden.to(device="cpu", dtype=torch.float16)
        return steps | self.drafter_says(hidden)

    def drafter_says(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """`top_ids` of a shard, and `top_shares` where they are wanted, after the drafter's hidden states `[n, d]`."""
        most = min(self.settings.top_k, self._everything.width)
        ids, shares = [torch.empty(0, most, dtype=torch.int32)], [torch.empty(0, most, dtype=torch.float16)]
        for rows in hidden.split(_CHUNK):
            scores = self._scores(rows)
            best = top_k_ids(scores, most)
            ids.append(self._everything.slots[best].to(device="cpu", dtype=torch.int32))
            if self.settings.of_hidden:
                logits = scores.gather(1, best).float() / (self.settings.temperature or 1.0)
                shares.append(logits.softmax(-1).to(device="cpu", dtype=torch.float16))
        says = {"top_ids": torch.cat(ids)}
        return {**says, "top_shares": torch.cat(shares)} if self.settings.of_hidden else says

    def both_say(self, hidden: torch.Tensor, states: torch.Tensor, index: int) -> dict[str, torch.Tensor]:
        """What a held-out shard has besides; `target_probabilities` are those at temperature 1.

        Args:
            hidden: `[n, d]`: the drafter's hidden states.
            states: `[n, d_target]`: the target's last ones.
            index: of the window, which the draws depend on.
        """
        head, settings = self.target.get_output_embeddings(), self.settings
        temperature = settings.temperature or 1.0
        most = min(settings.target_top_k, self._vocabulary_size)
        random = torch.Generator(hidden.device).manual_seed(settings.seed * 1_000_003 + index)
        says = {
            "target_ids": [torch.empty(0, most, dtype=torch.int32)],
            "target_probabilities": [torch.empty(0, most, dtype=torch.float16)],
            "drawn_ids": [torch.empty(0, settings.draws, dtype=torch.int32)],
            "drawn_ratios": [torch.empty(0, settings.draws, dtype=torch.float16)],
        }
        for drafters, targets in zip(hidden.split(_CHUNK), states.split(_CHUNK), strict=True):
            logits = finish_logits(head(targets).float(), *scale_and_cap(self.target))
            likely = logits.softmax(-1)[:, : self._vocabulary_size].topk(most)
            of_target = (logits / temperature).softmax(-1)[:, : self._vocabulary_size]
            of_drafter = (self._scores(drafters).float() / temperature).softmax(-1)
            drawn = of_drafter.multinomial(settings.draws, replacement=True, generator=random)
            ids = self._everything.slots[drawn]
            ratios = of_target.gather(1, ids.to(of_target.device)).to(drawn.device) / of_drafter.gather(1, drawn)
            for name, values in zip(
                says, (likely.indices, likely.values, ids, ratios.clamp_max(_LARGEST_RATIO)), strict=True
            ):
                says[name].append(values.to(device="cpu", dtype=says[name][0].dtype))
        return {name: torch.cat(parts) for name, parts in says.items()}

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, V]`: the drafter's logits of all tokens that its head scores."""
        return self.drafter.head.scores(hidden, self._everything, PackedRows())


def _write(path: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    """Write a shard, so that a kill leaves all of it or nothing."""
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    with replacing(path) as scratch:
        save_file(tensors, scratch)
