"""What a target and a drafter say along a given text: distributions, hidden states and likely tokens, row by row.

Rows are read a few dozen at a time, since one row over a large vocabulary takes as much memory as thousands of tokens.

What an independent drafter says of a token depends on the text before it alone. An EAGLE head reads the target's
features of the verified tokens only, and its own outputs in the place of those of drafted ones, so what it says
depends on where the round began too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel

from ...cache_names import cache_inputs
from ...drafters import Drafter
from ...generation.target import entries_with, hidden_state
from ...kernels import top_k_ids
from ...modeling.head import PackedRows, widen
from ...protocol import Needs, Shortlist, VocabularyInfo

# Full-vocabulary rows of the drafter that are computed at a time, and tokens of a prompt that the target reads.
CHUNK = 64


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, fp32 `[m, n]`, which sums to 1 to rounding.

    Torch's own is off by up to 1e-4 over 150,000 tokens on a CPU, where it adds up in fp32 one by one.
    """
    probabilities = logits.softmax(-1)
    return probabilities / probabilities.sum(-1, keepdim=True)


AnyRows = TypeVar("AnyRows", bound="Rows")


@dataclass(frozen=True, eq=False)
class Rows:
    """What both models say at `m` consecutive positions, on the drafter's device. `R`: rows of the target's head.

    Args:
        first: row `i` is about the token `first + i` of the text, given all tokens before it.
        target: fp32 `[m, R]`: the target's distribution `p`.
        oracle: fp32 `[m, R]`: entry `k - 1` is the mass of the `k` most probable tokens under `p`, which is `H_k(p)`
            of DynaSpec's lemma 2.
        top_ids: int64 `[m, top_k]`: the target's most probable tokens, most probable first.
        top_logits: fp32 `[m, top_k]`: their logits, without the temperature.
        states: `[m, d_target]`: what the target's output projection is given; `[m, 0]` where nobody asks for it.
        drafter: fp32 `[m, V]`: the drafter's logits, divided by the temperature, over the shared vocabulary; −inf for
            ids that its head does not score.
        features: `[m, d]`: the drafter's hidden states.
        embeddings: `[m, d]`: what `ShortlistState.observe_draft_inputs` is given before each of these draft steps.
        before: `[m, d]`: likewise, the features.
    """

    first: int
    target: torch.Tensor
    oracle: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    states: torch.Tensor
    drafter: torch.Tensor
    features: torch.Tensor
    embeddings: torch.Tensor
    before: torch.Tensor

    @property
    def end(self) -> int:
        """The first token of the text that no row is about any more."""
        return self.first + self.target.shape[0]

    def between(self: AnyRows, start: int, end: int) -> AnyRows:
        """The rows about tokens `start … end - 1` of the text, as views."""
        part = slice(start - self.first, end - self.first)
        return type(self)(start, *(getattr(self, one.name)[part] for one in fields(self)[1:]))

    def __add__(self: AnyRows, other: AnyRows) -> AnyRows:
        """These rows and those that follow them."""
        names = [one.name for one in fields(self)[1:]]
        return type(self)(self.first, *(torch.cat([getattr(self, name), getattr(other, name)]) for name in names))

    def of_round(self, start: int, count: int) -> "Rows":
        """The rows of a round that drafts the tokens `start … start + count - 1`, and the target's about the next."""
        return self.between(start, start + count + 1)


class RowsByStart(Rows):
    """Rows of a drafter whose hidden states depend on where a round began.

    Args:
        drafter: fp32 `[m, num_assistant_tokens, V]`: entry `[i, depth]` is about the token `first + i + depth`, in a
            round whose first draft is the token `first + i`. What is past the text's end has no meaning.
        features: `[m, num_assistant_tokens, d]`, likewise; embeddings and before too.
    """

    def of_round(self, start: int, count: int) -> Rows:
        """As `Rows.of_round`; there is no row of the drafter about the token after the drafts."""
        part = self.between(start, start + count + 1)
        drafts = (part.drafter, part.features, part.embeddings, part.before)
        of_target = (part.target, part.oracle, part.top_ids, part.top_logits, part.states)
        return Rows(start, *of_target, *(one[0, :count] for one in drafts))


class ForcedText:
    """A text that the target reads once, from the beginning, and with which the drafter is led along.

    Use it where no gradients are computed. At most `CHUNK` rows of the drafter (or one position's, if more) and those
    of the positions that the caller asks to keep are held at a time, and some temporary copies of `CHUNK` rows while
    the next ones are computed. The models' caches grow with the text, as in generation.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        token_ids: int64 `[n]`, on the target's device. Its prompt is read here.
        prompt_length: how many of them, at least 1, are the prompt.
        vocabulary: the ids that both models score, and the drafter's device.
        temperature: of both distributions. At 0 they are those at temperature 1.
        top_k: how many of the target's most probable tokens are looked up at every position.
        num_assistant_tokens: most tokens that a round drafts.
        needs: what of the target's hidden states is wanted.

    Attributes:
        token_ids: int64 `[n]`, on the drafter's device.
        prompt_top_ids: int64 `[prompt_length, top_k]`: the target's most probable tokens after each prompt token.
        prompt_top_logits: fp32 `[prompt_length, top_k]`: their logits.
        prompt_states: `[prompt_length, d_target]`: what the target's output projection is given after each prompt
            token; `[prompt_length, 0]` where nobody asks for it.
        first_draft: see `first_draft`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        token_ids: torch.Tensor,
        prompt_length: int,
        vocabulary: VocabularyInfo,
        temperature: float,
        top_k: int,
        num_assistant_tokens: int,
        needs: Needs = Needs(),  # noqa: B008
    ):
        self.prompt_length = prompt_length
        self.first_draft = first_draft(drafter, prompt_length)
        self._target, self._target_cache = target, DynamicCache(config=target.config)
        self._target_ids = token_ids
        self.token_ids = token_ids.to(vocabulary.device)
        self._head, self._vocabulary = drafter.head, vocabulary
        self._drafter: _Model | _EagleHead
        if drafter.reads:
            self._drafter = _EagleHead(drafter, self.token_ids, self.first_draft, num_assistant_tokens)
        else:
            self._drafter = _Model(drafter, self.token_ids)
        self._temperature, self._top_k = temperature or 1.0, top_k
        self._needs = needs
        parts = []
        for start in range(0, prompt_length, CHUNK):
            logits, states = self._read_target(start, min(start + CHUNK, prompt_length))
            top_ids = top_k_ids(logits, top_k)
            kept = states if needs.prompt_hidden_states else states[:, :0]
            parts.append((top_ids, logits.gather(1, top_ids), kept))
        of_prompt = (torch.cat(part).to(vocabulary.device) for part in zip(*parts, strict=True))
        self.prompt_top_ids, self.prompt_top_logits, self.prompt_states = of_prompt
        self._first_row = self._rows(prompt_length, logits[-1:], states[-1:])

    def rows(self, keep: int) -> Iterator[Rows]:
        """Read the rest of the text; yields overlapping rows, which together are about every token after the prompt.

        Args:
            keep: how many of the rows to yield again together with the next ones.
        """
        rows, length = self._first_row, self.token_ids.shape[0]
        count = max(1, CHUNK // self._drafter.rows_per_token)
        while rows.end < length:
            start, end = rows.end, min(rows.end + count, length)
            # What a token's row says follows from reading the token before it.
            rows = rows + self._rows(start, *self._read_target(start - 1, end - 1))
            yield rows
            rows = rows.between(max(rows.first, rows.end - keep), rows.end)

    def _read_target(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the target read these tokens. Shows the drafter the hidden states that it reads.

        Returns:
            fp32 `[end - start, R]`: logits; and `[end - start, d_target]`: what they are computed from, `[…, 0]` where
            nobody asks for it.
        """
        unread = self._target_ids[start:end].unsqueeze(0)
        layers = self._target.config.get_text_config().num_hidden_layers
        reads, last = self._drafter.reads, (layers,) if self._needs.of_states else ()
        wanted = {"output_hidden_states": entries_with((*reads, *last))} if reads or last else {}
        outputs = self._target(input_ids=unread, **cache_inputs(self._target_cache), **wanted)
        if reads:
            states = [hidden_state(outputs, index, layers) for index in reads]
            self._drafter.observe(torch.cat(states, -1).to(self.token_ids.device))
        logits = outputs.logits[0].float()
        return logits, hidden_state(outputs, layers, layers) if last else logits[:, :0]

    def _rows(self, first: int, logits: torch.Tensor, states: torch.Tensor) -> Rows:
        device = self.token_ids.device
        probabilities = distribution(logits / self._temperature)
        # The sum of very many very small numbers, which fp32 would lose.
        oracle = probabilities.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64).float()
        top_ids = top_k_ids(logits, self._top_k)
        of_target = (probabilities, oracle, top_ids, logits.gather(1, top_ids), states)
        features, *inputs = self._drafter.steps(first, first + logits.shape[0])
        drafter = self._drafter_logits(features) / self._temperature
        return self._drafter.kind(first, *(one.to(device) for one in of_target), drafter, features, *inputs)

    def _drafter_logits(self, features: torch.Tensor) -> torch.Tensor:
        """fp32 `[..., V]`, from hidden states `[..., d]`."""
        size, draftable = self._vocabulary.size, self._vocabulary.draftable
        slots = torch.arange(size, device=features.device) if draftable is None else draftable
        scored = Shortlist(slots, version=0, is_prefix=True)
        logits = self._head.scores(features.flatten(0, -2), scored, PackedRows())
        if draftable is not None:
            wide = logits.new_full((logits.shape[0], size), -torch.inf)
            widen(logits, scored, wide)
            logits = wide
        return logits.unflatten(0, features.shape[:-1])


# Drafters along a text ---------------------------------------------------------------------------------------------


def first_draft(drafter: Drafter, prompt_length: int) -> int:
    """The first token of a text that is drafted. A drafter that reads the target's hidden states has to wait until the
    target has read the prompt, which chooses a token."""
    return prompt_length + bool(drafter.reads)


class _Model:
    """What an independent drafter says along a text, `[n]`."""

    kind = Rows
    rows_per_token = 1
    reads: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, token_ids: torch.Tensor):
        self._drafter, self._state, self._token_ids = drafter, drafter.start(), token_ids
        # The hidden state at the last token that was read; nothing before the first one.
        self._last = drafter.head.weight.new_zeros(1, drafter.head.weight.shape[1])

    def steps(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The hidden states that predict the tokens `start … end - 1`, the embeddings of the tokens before them, and
        the hidden states before those, each `[end - start, d]`."""
        hidden = torch.cat([self._last, self._state.advance(self._token_ids[: end - 1])])[start - end - 1 :]
        self._last = hidden[-1:]
        return hidden[1:], self._drafter.embed(self._token_ids[start - 1 : end - 1]), hidden[:-1]


class _EagleHead:
    """What an EAGLE head says along a text, `[n]`, in rounds that start at each token.

    Policies differ in where their rounds start. The longest chain from everywhere, computed once, serves them all.
    """

    kind = RowsByStart

    def __init__(self, drafter: Drafter, token_ids: torch.Tensor, first_draft: int, num_assistant_tokens: int):
        self.reads = drafter.reads
        self.rows_per_token = num_assistant_tokens
        self._state, self._token_ids, self._first_draft = drafter.start(), token_ids, first_draft
        self._weight = drafter.head.weight
        # `[m, d_target · len(reads)]`: what the target said of the last tokens that it read, and the head did not yet.
        self._unread: torch.Tensor | None = None

    def observe(self, states: torch.Tensor) -> None:
        """Take in the target's hidden states at the tokens that it has read since, `[m, d_target · len(reads)]`."""
        self._unread = states if self._unread is None else torch.cat([self._unread, states])

    def steps(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, embeddings and features, `[end - start, num_assistant_tokens, d]`: see `RowsByStart`. NaN
        where no round drafts."""
        shape = (3, end - start, self.rows_per_token, self._weight.shape[1])
        steps = self._weight.new_full(shape, torch.nan)
        for index, first in enumerate(range(start, end)):
            # The last token of a text is the target's own.
            count = min(self.rows_per_token, self._token_ids.shape[0] - first - 1)
            if first >= self._first_draft and count:
                steps[:, index, :count] = self._chain(first, count)
        return steps[0], steps[1], steps[2]

    def _chain(self, start: int, count: int) -> torch.Tensor:
        """`[3, count, d]`: those of a round that starts here and drafts the text's own tokens."""
        shown: list[torch.Tensor] = []

        def observe_draft_inputs(embeddings: torch.Tensor, features: torch.Tensor) -> None:
            shown.append(torch.stack([embeddings, features]).to(self._weight.dtype))

        # The target's hidden state at the last verified token does not exist yet when a round starts.
        unread = start - max(1, self._state.length)
        states, self._unread = self._unread[:unread], self._unread[unread:]
        hidden = [self._state.advance(self._token_ids[:start], states, observe_draft_inputs)]
        for at in range(start, start + count - 1):
            hidden.append(self._state.draft(self._token_ids[at : at + 1], observe_draft_inputs=observe_draft_inputs))
        return torch.cat([torch.cat(hidden).unsqueeze(0), torch.cat(shown, 1)])
