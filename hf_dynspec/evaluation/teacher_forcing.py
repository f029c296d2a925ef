"""What a target and a drafter say along a given text: distributions, hidden states and likely tokens, row by row.

Rows are read a few dozen at a time, since one row over a large vocabulary takes as much memory as thousands of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from transformers import DynamicCache, PreTrainedModel

from ..drafters import Drafter
from ..head import PackedRows
from ..kernels import top_k_ids
from ..protocol import Shortlist, VocabularyInfo

# Positions whose full-vocabulary rows are computed at a time.
CHUNK = 64


def distribution(logits: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, fp32 `[m, n]`, which sums to 1 to rounding.

    Torch's own is off by up to 1e-4 over 150,000 tokens on a CPU, where it adds up in fp32 one by one.
    """
    probabilities = logits.softmax(-1)
    return probabilities / probabilities.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Rows:
    """What both models say at `m` consecutive positions, on the drafter's device. `R`: rows of the target's head.

    Args:
        first: row `i` is about the token `first + i` of the text, given all tokens before it.
        target: fp32 `[m, R]`: the target's distribution `p`.
        oracle: fp32 `[m, R]`: entry `k - 1` is the mass of the `k` most probable tokens under `p`, which is `H_k(p)`
            of DynaSpec's lemma 2.
        top_ids: int64 `[m, top_k]`: the target's most probable tokens, most probable first.
        drafter: fp32 `[m, V]`: the drafter's logits, divided by the temperature, over the shared vocabulary.
        features: `[m, d]`: the drafter's hidden states.
    """

    first: int
    target: torch.Tensor
    oracle: torch.Tensor
    top_ids: torch.Tensor
    drafter: torch.Tensor
    features: torch.Tensor

    @property
    def end(self) -> int:
        """The first token of the text that no row is about any more."""
        return self.first + self.target.shape[0]

    def between(self, start: int, end: int) -> "Rows":
        """The rows about tokens `start … end - 1` of the text, as views."""
        part = slice(start - self.first, end - self.first)
        return Rows(start, *(getattr(self, one.name)[part] for one in fields(self)[1:]))

    def __add__(self, other: "Rows") -> "Rows":
        """These rows and those that follow them."""
        names = [one.name for one in fields(self)[1:]]
        return Rows(self.first, *(torch.cat([getattr(self, name), getattr(other, name)]) for name in names))


class ForcedText:
    """A text that both models read once, from the beginning.

    Use it where no gradients are computed. At most `CHUNK` rows and those that the caller asks to keep are held at a
    time, and some temporary copies of `CHUNK` rows while the next ones are computed. The models' caches grow with the
    text, as in generation.

    Args:
        target: the model that verifies.
        drafter: the model that drafts.
        token_ids: int64 `[n]`, on the target's device. Its prompt is read here.
        prompt_length: how many of them, at least 1, are the prompt.
        vocabulary: the ids that both models score, and the drafter's device.
        temperature: of both distributions. At 0 they are those at temperature 1.
        top_k: how many of the target's most probable tokens are looked up at every position.

    Attributes:
        token_ids: int64 `[n]`, on the drafter's device.
        prompt_top_ids: int64 `[prompt_length, top_k]`: the target's most probable tokens after each prompt token.
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
    ):
        self.prompt_length = prompt_length
        self._target, self._target_cache = target, DynamicCache(config=target.config)
        self._head, self._drafter_state = drafter.head, drafter.start()
        self._target_ids = token_ids
        self.token_ids = token_ids.to(vocabulary.device)
        self._all_tokens = Shortlist(
            torch.arange(vocabulary.size, device=vocabulary.device), version=0, is_prefix=True
        )
        self._temperature = temperature or 1.0
        self._top_k = top_k
        top_ids = []
        for start in range(0, prompt_length, CHUNK):
            logits = self._target_logits(start, min(start + CHUNK, prompt_length))
            top_ids.append(top_k_ids(logits, top_k))
        self.prompt_top_ids = torch.cat(top_ids).to(vocabulary.device)
        features = self._features(0, prompt_length)
        self._last_of_prompt = self._rows(prompt_length, logits[-1:], features[-1:])

    def rows(self, keep: int) -> Iterator[Rows]:
        """Read the rest of the text; yields overlapping rows, which together are about every token after the prompt.

        Args:
            keep: how many of the rows to yield again together with the next ones.
        """
        rows, length = self._last_of_prompt, self.token_ids.shape[0]
        while rows.end < length:
            start, end = rows.end, min(rows.end + CHUNK, length)
            # What a token's row says follows from reading the token before it.
            features = self._features(start - 1, end - 1)
            rows = rows + self._rows(start, self._target_logits(start - 1, end - 1), features)
            yield rows
            rows = rows.between(max(rows.first, rows.end - keep), rows.end)

    def _target_logits(self, start: int, end: int) -> torch.Tensor:
        """fp32 `[end - start, R]`, after reading these tokens."""
        unread = self._target_ids[start:end].unsqueeze(0)
        return self._target(input_ids=unread, past_key_values=self._target_cache, use_cache=True).logits[0].float()

    def _features(self, start: int, end: int) -> torch.Tensor:
        """`[end - start, d]`: the drafter's hidden states, after reading these tokens."""
        return self._drafter_state.advance(self.token_ids[:end])[start - end :]

    def _rows(self, first: int, logits: torch.Tensor, features: torch.Tensor) -> Rows:
        device = self.token_ids.device
        probabilities = distribution(logits / self._temperature)
        # The sum of very many very small numbers, which fp32 would lose.
        oracle = probabilities.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64).float()
        drafter = self._head.scores(features, self._all_tokens, PackedRows()) / self._temperature
        top_ids = top_k_ids(logits, self._top_k)
        return Rows(first, probabilities.to(device), oracle.to(device), top_ids.to(device), drafter, features)
