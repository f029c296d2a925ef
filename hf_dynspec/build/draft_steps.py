"""Draft steps of a pair along texts: what each starts from, and the drafter's output over its whole vocabulary.

Routers are trained on these (DynaSpec, appendix A.2). The paper records them while it generates, as `draft_rounds`
does; here they are teacher-forced: texts are cut into windows, both models read a window once, and a draft is unrolled
after every prefix of it, fed with the window's own tokens. These are the draft steps of rounds whose drafts were
accepted, at a fraction of the cost: no step waits for the one before, and only held-out steps need the target's head.
Of the steps after a prefix one is recorded, at a depth that is drawn.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..drafters import Drafter
from ..kernels import top_k_ids
from ..modeling.head import PackedRows, finish_logits
from ..modeling.parts import scale_and_cap
from ..protocol import Shortlist
from .recording import Recording, RecordingSettings
from .windows import Windows

# Rows whose logits over the whole vocabulary are held at a time.
_CHUNK = 128
# Beyond the inverse of a shortlist's share of the drafter's probability a ratio makes no difference.
_LARGEST_RATIO = 1e4


class StepRecorder:
    """Records the draft steps of a pair into a folder, shard by shard. Shards that are there are kept. Both models
    score the tokens of ids below `vocabulary_size`."""

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
        """Record all shards, or every `processes`-th of them. The first windows are held out, a fifth of them at most.
        `report` is called before each window with how many come before it and how many there are."""
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
                recording.write(number, parts)
        report(end, end)
        return recording

    def _cut(self, windows: Windows, start: int, end: int) -> list[range]:
        """Cut a range of windows into shards."""
        shards = []
        while start < end:
            stop = min(end, windows.covering(self.shard_steps, start))
            shards.append(range(start, stop))
            start = stop
        return shards

    @torch.no_grad()
    def steps(self, token_ids: torch.Tensor, index: int, is_held_out: bool) -> dict[str, torch.Tensor]:
        """Record one draft step after each prefix of a window, int64 `[n]`. Returns the window's part of a shard, see
        `Recording`.

        Its number `index`, with the settings' seed, is the seed of what is drawn for it. If it is held out, what
        routers are judged by is recorded too.
        """
        drafter, settings = self.drafter, self.settings
        device = drafter.head.device
        target_states = self._target_states(token_ids, is_held_out)
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
        newest, hidden = torch.cat(read), torch.cat(hidden)
        depths = depths.sort(stable=True).values
        steps = self._drafter_part(token_ids[newest], depths, torch.cat(before), hidden, is_held_out)
        if is_held_out:
            steps |= self._target_part(hidden, target_states[-1][newest.to(target_states[-1].device)], index)
        return steps

    def _target_states(self, token_ids: torch.Tensor, is_held_out: bool) -> tuple[torch.Tensor, ...]:
        """The target's hidden states, each `[n, d]`: its embedding, and those after its layers."""
        if not self.drafter.reads and not is_held_out:
            return ()
        outputs = self.target.get_decoder()(
            input_ids=token_ids.unsqueeze(0).to(self.target.device), output_hidden_states=True, use_cache=False
        )
        return tuple(states[0] for states in outputs.hidden_states)

    def _drafter_part(
        self,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        features: torch.Tensor,
        hidden: torch.Tensor,
        is_held_out: bool,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a shard about the drafter: after the newest tokens, int64 `[n]`, at depths `[n]`, from
        features `[n, d]` known before those tokens and hidden states `[n, d]` that the logits are computed from."""
        steps = {"token_ids": token_ids.to(torch.int32), "depths": depths.to(torch.uint8)}
        if is_held_out or not self.settings.of_hidden:
            steps["features"] = features.to(device="cpu", dtype=torch.float16)
        if is_held_out or self.settings.of_hidden:
            steps["hidden"] = hidden.to(device="cpu", dtype=torch.float16)
        most, ids, shares = min(self.settings.top_k, self._everything.width), [], []
        for rows in hidden.split(_CHUNK):
            scores = self._scores(rows)
            best = top_k_ids(scores, most)
            ids.append(self._everything.slots[best])
            shares.append((scores.gather(1, best).float() / (self.settings.temperature or 1.0)).softmax(-1))
        steps["top_ids"] = torch.cat(ids).to(device="cpu", dtype=torch.int32)
        if self.settings.of_hidden:
            steps["top_shares"] = torch.cat(shares).to(device="cpu", dtype=torch.float16)
        return steps

    def _target_part(self, hidden: torch.Tensor, states: torch.Tensor, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a held-out shard about the target, from the drafter's hidden states `[n, d]` and the target's
        last ones `[n, d_target]`."""
        head, settings = self.target.get_output_embeddings(), self.settings
        temperature = settings.temperature or 1.0
        most = min(settings.target_top_k, self._vocabulary_size)
        random = torch.Generator(hidden.device).manual_seed(settings.seed * 1_000_003 + index)
        parts = []
        for drafters, targets in zip(hidden.split(_CHUNK), states.split(_CHUNK), strict=True):
            logits = finish_logits(head(targets).float(), *scale_and_cap(self.target))
            likely = logits.softmax(-1)[:, : self._vocabulary_size].topk(most)
            of_target = (logits / temperature).softmax(-1)[:, : self._vocabulary_size]
            of_drafter = (self._scores(drafters).float() / temperature).softmax(-1)
            drawn = of_drafter.multinomial(settings.draws, replacement=True, generator=random)
            ids = self._everything.slots[drawn]
            ratios = of_target.gather(1, ids.to(of_target.device)).to(drawn.device) / of_drafter.gather(1, drawn)
            parts.append((likely.indices, likely.values, ids, ratios.clamp_max(_LARGEST_RATIO)))
        names = ("target_ids", "target_probabilities", "drawn_ids", "drawn_ratios")
        whole = zip(names, map(torch.cat, zip(*parts, strict=True)), (torch.int32, torch.float16) * 2, strict=True)
        return {name: values.to(device="cpu", dtype=dtype) for name, values, dtype in whole}

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, V]`: the drafter's logits of all tokens that its head scores."""
        return self.drafter.head.scores(hidden, self._everything, PackedRows())
