"""What a target and a drafter predict along a given text.

An independent drafter's prediction depends on the text before it alone. An EAGLE head reads the target's hidden states
at verified tokens and its own outputs at drafted ones, so its prediction also depends on where the round began.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from ...cache_names import cache_inputs
from ...drafters import Drafter
from ...generation.target import entries_with, hidden_state
from ...kernels import top_k_ids
from ...modeling.head import PackedRows, widen
from ...protocol import Needs, Shortlist, VocabularyInfo
from .settings import CoverageSettings

# Tokens that the target reads at a time, and full-vocabulary rows of the drafter that are held.
CHUNK = 64


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, fp32 `[m, n]`, which sums to 1 to rounding.

    Torch's own is off by up to 1e-4 over 150,000 tokens on a CPU, where it adds them up one by one in fp32.
    """
    probabilities = logits.softmax(-1)
    return probabilities / probabilities.sum(-1, keepdim=True)


def first_draft(drafter: Drafter, prompt_length: int) -> int:
    """The first token of a text that is drafted. An EAGLE head has to wait until the target has read the prompt."""
    return prompt_length + bool(drafter.reads)


class Rows(NamedTuple):
    """What both models predict at `m` consecutive positions. `R`: rows of the target's head."""

    target: torch.Tensor  # fp32 `[m, R]`: the target's distribution `p`
    oracle: torch.Tensor  # fp32 `[m, R]`: entry `k - 1` is the mass of the `k` most probable tokens (lemma 2)
    top_ids: torch.Tensor  # int64 `[m, top_k]`: the target's most probable tokens, most probable first
    drafter: torch.Tensor  # fp32 `[m, V]`: logits, divided by the temperature; −inf for ids that its head lacks

    def part(self, start: int, end: int) -> "Rows":
        """Views of the rows `start … end - 1`."""
        return Rows(*(one[start:end] for one in self))


class ForcedText:
    """A text that both models read at once. Full-vocabulary rows of the drafter are computed block by block, without
    gradients.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        token_ids: int64 `[n]`, on the target's device.
        prompt_length: how many of them, at least 1, are the prompt.
        vocabulary: the ids that both models score, and the drafter's device.
        settings: temperature, `num_assistant_tokens` (`k`) and `recall_k`.
        needs: what the policies need of the target.

    Attributes:
        token_ids: int64 `[n]`, on the drafter's device, as all tensors.
        top_ids: int64 `[n - 1, top_k]`: the target's most probable tokens after each token.
        top_logits: fp32 `[n - 1, top_k]`: their logits, without the temperature.
        states: `[n - 1, d_target]`: the input of the target's head after each token; None if nobody needs it.
        steps: `[3, n - prompt_length, k, d]`, by the first token that a round drafts and by draft step: the hidden
            state that predicts the draft, and the embedding and feature that the step starts from. NaN if there is no
            such step.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        token_ids: torch.Tensor,
        prompt_length: int,
        vocabulary: VocabularyInfo,
        settings: CoverageSettings,
        needs: Needs,
    ):
        self.prompt_length, self.first_draft = prompt_length, first_draft(drafter, prompt_length)
        self.token_ids, self.settings = token_ids.to(vocabulary.device), settings
        self._head, self._vocabulary, self._temperature = drafter.head, vocabulary, settings.temperature or 1.0
        self._length, self._reads = settings.num_assistant_tokens, drafter.reads
        top_k = max(settings.recall_k, needs.verify_top_k, needs.prompt_top_k)
        read = self._read_target(target, token_ids, top_k, needs.of_states)
        self._target_logits, self.top_ids, self.top_logits, *states = read
        self.states = states.pop() if needs.of_states else None
        self.steps = self._head_steps(drafter, torch.cat(states, -1)) if self._reads else self._model_steps(drafter)

    def blocks(self) -> Iterator[range]:
        """The tokens after the prompt, block by block: `round` and `oracle` serve those of the last block."""
        count = max(1, CHUNK // self._length if self._reads else CHUNK)
        for first in range(self.prompt_length, self.token_ids.shape[0], count):
            starts = range(first, min(first + count, self.token_ids.shape[0]))
            self._compute(starts)
            yield starts

    def oracle(self, starts: range) -> torch.Tensor:
        """fp32 `[len(starts), R]`: see `Rows`, about these tokens."""
        return self._rows.oracle[starts.start - self._first : starts.stop - self._first]

    def round(self, start: int, count: int) -> Rows:
        """The rows of a round that drafts the tokens `start … start + count - 1`."""
        at = start - self._first
        return Rows(*self._rows.part(at, at + count)[:3], self._rows.drafter[at, :count])

    def _read_target(
        self, target: PreTrainedModel, token_ids: torch.Tensor, top_k: int, with_last_state: bool
    ) -> list[torch.Tensor]:
        """Logits after the prompt, `[n - prompt_length, R]`; top ids and logits; and each hidden state."""
        layers = target.config.get_text_config().num_hidden_layers
        wanted = (*self._reads, *((layers,) if with_last_state else ()))
        more = {"output_hidden_states": entries_with(wanted)} if wanted else {}
        cache, parts = DynamicCache(config=target.config), []
        # The last token predicts nothing that is in the text.
        for start, part in enumerate(token_ids[:-1].split(CHUNK)):
            outputs = target(input_ids=part.unsqueeze(0), **cache_inputs(cache), **more)
            logits = outputs.logits[0]
            top_ids = top_k_ids(logits.float(), top_k)
            after_prompt = logits[max(0, self.prompt_length - 1 - start * CHUNK) :].clone()
            states = [hidden_state(outputs, index, layers) for index in wanted]
            parts.append((after_prompt, top_ids, logits.gather(1, top_ids).float(), *states))
        return [torch.cat(column).to(self.token_ids.device) for column in zip(*parts, strict=True)]

    def _model_steps(self, drafter: Drafter) -> torch.Tensor:
        """`steps` of an independent drafter, as views: it predicts the same in every round."""
        hidden = drafter.start().advance(self.token_ids[:-1])
        embedded = drafter.embed(self.token_ids[:-1]).to(hidden.dtype)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        steps = torch.stack([hidden, embedded, before])[:, self.prompt_length - 1 :]
        padded = functional.pad(steps, (0, 0, 0, self._length - 1), value=torch.nan)
        return padded.unfold(1, self._length, 1).transpose(2, 3)

    def _head_steps(self, drafter: Drafter, read: torch.Tensor) -> torch.Tensor:
        """`steps` of an EAGLE head, which `read` target states, `[n - 1, d_target · layers]`: the longest chain from
        everywhere, as policies differ in where their rounds start."""
        weight, length = drafter.head.weight, self.token_ids.shape[0]
        steps = weight.new_full((3, length - self.prompt_length, self._length, weight.shape[1]), torch.nan)
        state, inputs = drafter.start(), []

        def observe(embeddings: torch.Tensor, features: torch.Tensor) -> None:
            inputs.append(torch.stack([embeddings, features]).to(weight.dtype))

        # The last token of a text is the target's own.
        for start in range(self.first_draft, length - 1):
            count = min(self._length, length - start - 1)
            # The target's hidden state at the last verified token does not exist yet when a round starts.
            unread = read[max(1, state.length) - 1 : start - 1]
            hidden = [state.advance(self.token_ids[:start], unread, observe)]
            for at in range(start, start + count - 1):
                hidden.append(state.draft(self.token_ids[at : at + 1], observe_draft_inputs=observe))
            chain = torch.cat([torch.cat(hidden).unsqueeze(0), torch.cat(inputs, 1)])
            steps[:, start - self.prompt_length, :count] = chain
            inputs.clear()
        return steps

    def _compute(self, starts: range) -> None:
        """Compute the rows of the rounds that start at these tokens."""
        first, count = starts.start - self.prompt_length, len(starts)
        logits = self._target_logits[first : first + count + self._length - 1].float()
        probabilities = distribution(logits / self._temperature)
        # A sum of very many very small numbers, which fp32 would lose.
        oracle = probabilities.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64).float()
        top_ids = self.top_ids[starts.start - 1 :][: logits.shape[0]]
        features = self.steps[0, first : first + count]
        if self._reads:
            drafter = self._drafter_logits(features.flatten(0, 1)).unflatten(0, features.shape[:2])
        else:
            drafter = self._drafter_logits(torch.cat([features[:, 0], features[-1, 1:]]))
            drafter = drafter.unfold(0, self._length, 1).transpose(1, 2)
        self._rows, self._first = Rows(probabilities, oracle, top_ids, drafter), starts.start

    def _drafter_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 `[m, V]`, divided by the temperature, from hidden states `[m, d]`."""
        size, draftable = self._vocabulary.size, self._vocabulary.draftable
        slots = torch.arange(size, device=hidden.device) if draftable is None else draftable
        scored = Shortlist(slots, version=0, is_prefix=True)
        logits = self._head.scores(hidden, scored, PackedRows())
        if draftable is not None:
            wide = logits.new_full((logits.shape[0], size), -torch.inf)
            widen(logits, scored, wide)
            logits = wide
        return logits / self._temperature
