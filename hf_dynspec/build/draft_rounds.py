"""Draft steps of a pair recorded in rounds of generation, as DynaSpec does (appendix A.2).

The beginning of a window is a prompt, which the target continues; chains are drafted from the drafter's whole
vocabulary. Every step is recorded as it happened, also after a draft that the target rejected: its token is one that
the drafter drew, and the features are the drafter's own. That takes as long as generating does; `draft_steps` reads
texts instead, and gives the steps of rounds whose drafts were accepted.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from ..assistant import DynSpecAssistant
from ..drafters import Drafter
from ..protocol import Needs, Shortlist, VocabularyInfo
from ..shortlists import FullShortlist, ShortlistState
from .draft_steps import StepRecorder
from .recording import Recording, RecordingSettings
from .windows import Windows

# The prompt is a window's first quarter. The steps of a window are there before its text is as long as the window, if
# two tokens of three come from drafts.
_PROMPT_SHARE = 4


@dataclass(frozen=True, eq=False)
class DraftedRounds:
    """The draft steps of some rounds, one after another, and the resulting text. All but features and hidden are on
    the CPU."""

    text: torch.Tensor  # int64 `[n]`: the prompt, and the target's continuation
    token_ids: torch.Tensor  # int64 `[m]`: the newest token before each step
    places: torch.Tensor  # int64 `[m]`: the token's place in the text if it is accepted
    depths: torch.Tensor  # int64 `[m]`
    is_accepted: torch.Tensor  # bool `[m]`: all tokens that were drafted before the step in its round are in the text
    features: torch.Tensor  # fp16 `[m, d]`: see `ShortlistState.observe_draft_inputs`
    hidden: torch.Tensor  # `[m, d]`: what the step's logits are computed from


class RoundRecorder(StepRecorder):
    """Records the steps of rounds in which the target continues the beginnings of windows. `depth` tokens are drafted
    in each round, sampled as the target is.

    A window of `n` tokens gives `n - 1` steps; fewer if the target ends its text early, or if so many drafts are
    accepted that the text reaches the length of the window.
    """

    # Minutes of generation on a CPU.
    shard_steps = 1 << 12

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        vocabulary_size: int,
        settings: RecordingSettings,
        folder: str | Path,
        tokenizer: Any,
        generation_config: GenerationConfig,
    ):
        super().__init__(target, drafter, vocabulary_size, settings, folder)
        self._generation_config = generation_config
        self._log = _Log()
        self._assistant = DynSpecAssistant(
            drafter,
            _RecordingShortlist(self._log),
            tokenizer=tokenizer,
            num_assistant_tokens=settings.depth,
            assistant_confidence_threshold=0.0,
        )

    def record(self, windows: Windows, **arguments: Any) -> Recording:
        """See `StepRecorder.record`. The target is bound to an assistant meanwhile."""
        with self._bound():
            return super().record(windows, **arguments)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        is_outermost = self._assistant.target is None
        if is_outermost:
            self._assistant.bind(self.target)
        try:
            yield
        finally:
            if is_outermost:
                self._assistant.unbind()

    @torch.no_grad()
    def steps(self, token_ids: torch.Tensor, index: int, is_held_out: bool) -> dict[str, torch.Tensor]:
        """Record the steps of rounds after the beginning of a window, see `StepRecorder.steps`."""
        rounds = self.rounds(token_ids, index)
        steps = self._drafter_part(rounds.token_ids, rounds.depths, rounds.features, rounds.hidden, is_held_out)
        if is_held_out:
            # The target reads the text once. Its part is 0 after a draft that is not in the text.
            rows = rounds.is_accepted.nonzero().squeeze(1)
            states = self._target_states(rounds.text, True)[-1]
            hidden = rounds.hidden[rows.to(rounds.hidden.device)]
            part = self._target_part(hidden, states[rounds.places[rows].to(states.device)], index)
            for name, tensor in part.items():
                zeros = tensor.new_zeros(len(rounds.token_ids), tensor.shape[1])
                steps[name] = zeros.index_copy_(0, rows, tensor)
        return steps

    def rounds(self, token_ids: torch.Tensor, index: int) -> DraftedRounds:
        """Generate after the beginning of a window, int64 `[n]`. Its number `index`, with the settings' seed, is the
        seed of this text."""
        n, device = token_ids.shape[0], self.target.device
        prompt = token_ids[: n // _PROMPT_SHARE].unsqueeze(0).to(device)
        config = copy.deepcopy(self._generation_config)
        config.max_new_tokens = n - prompt.shape[1]
        self._log.clear()
        with self._bound(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + index)
            text = self.target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                assistant_model=self._assistant,
                streamer=self._log,
                stopping_criteria=StoppingCriteriaList([_EnoughSteps(self._log, n - 1)]),
            )
        return self._log.rounds(text[0].cpu(), n - 1, self.drafter.head.weight)


class _Log(BaseStreamer):
    """Notes draft steps, and as a streamer the length of the text at each of them."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Begin with another text."""
        # Tokens of the text before this round, and steps before it.
        self.length = self.steps_before = 0
        # Of each step: depth, place, token, features and hidden state; copies, as a drafter may reuse the memory.
        self.steps: list[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def put(self, value: torch.Tensor) -> None:
        """See `BaseStreamer`: the prompt, or the new tokens of a round."""
        self.length += value.numel()
        self.steps_before = len(self.steps)

    def end(self) -> None:
        """See `BaseStreamer`."""

    def rounds(self, text: torch.Tensor, most: int, weight: torch.Tensor) -> DraftedRounds:
        """The first `most` steps, of which there may be none; `weight` `[V, d]` is the drafter's."""
        nothing = weight.new_zeros(0, weight.shape[1])
        empty = ([], [], [nothing.new_zeros(0, dtype=torch.int64)], [nothing.half()], [nothing])
        depths, places, *rest = zip(*self.steps[:most], strict=True) if self.steps else empty
        token_ids, features, hidden = map(torch.cat, rest)
        token_ids, places = token_ids.cpu(), torch.tensor(places, dtype=torch.int64)
        is_in_text = (places < text.shape[0]) & (text[places.clamp_max(text.shape[0] - 1)] == token_ids)
        is_accepted: list[bool] = []
        for depth, matches in zip(depths, is_in_text.tolist(), strict=True):
            is_accepted.append(matches and (depth == 0 or is_accepted[-1]))
        depths, is_accepted = torch.tensor(depths, dtype=torch.int64), torch.tensor(is_accepted, dtype=torch.bool)
        return DraftedRounds(text, token_ids, places, depths, is_accepted, features, hidden)


class _EnoughSteps(StoppingCriteria):
    """Ends the text one round after the last step that is wanted: the accepted drafts of that step's own round have to
    come out."""

    def __init__(self, log: _Log, count: int):
        self._log, self._count = log, count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        is_enough = self._log.steps_before >= self._count
        return torch.full((input_ids.shape[0],), is_enough, device=input_ids.device)


class _RecordingShortlist(FullShortlist):
    """The whole vocabulary, with a log of draft steps."""

    def __init__(self, log: _Log):
        self._log = log

    @property
    def needs(self) -> Needs:
        return Needs(draft_inputs=True)

    def start(self, vocabulary: VocabularyInfo) -> "_RecordingState":
        return _RecordingState(super().start(vocabulary), self._log)


class _RecordingState(ShortlistState):
    def __init__(self, everything: ShortlistState, log: _Log):
        self._everything, self._log = everything, log

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        self._read = features.to(torch.float16, copy=True)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        place = self._log.length - 1 + depth
        self._log.steps.append((depth, place, token_ids.clone(), self._read, features.clone()))
        return self._everything.select(depth, token_ids, features)
