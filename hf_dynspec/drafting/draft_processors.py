"""Twins of transformers' logits processors for draft steps, which process the slots of a shortlist only.

A processor of transformers reads and writes a row of the whole vocabulary, which takes longer than the rest of a draft
step. The twins do the same to the logits of a shortlist, at all nodes of a tree's level at once; a chain has one node
at each. They leave out bans of several tokens in a row, which costs acceptance and never exactness.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from .processors import looks_at_values_only


class DraftContext:
    """The tokens before a draft step, with the lookups that the twins need.

    Args:
        vocabulary_rows: one past the largest token id.
        padding: the number of padding tokens before the text.
        device: the device of the tokens.
    """

    def __init__(self, vocabulary_rows: int, padding: int, device: torch.device):
        self._padding = padding
        self._prefix = torch.empty(0, dtype=torch.int64, device=device)
        self._paths = self._prefix.unsqueeze(0)
        # By start position: the tokens that the verified text holds from there on, and how much of it was read so far.
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._marks = _Marks(vocabulary_rows + 1, device)

    def start_round(self, prefix: torch.Tensor) -> None:
        """Set the verified tokens, int64 `[n]`, without padding. They only ever grow."""
        self._prefix = prefix

    def set_paths(self, paths: torch.Tensor) -> None:
        """Set the tokens, int64 `[w, m]`, that were drafted between the verified ones and each node of a step."""
        self._paths = paths

    @property
    def length(self) -> int:
        """The number of tokens before a node, padding included."""
        return self._padding + self._prefix.shape[0] + self._paths.shape[1]

    def texts(self) -> torch.Tensor:
        """int64 `[w, n + m]`: all tokens before each node except padding."""
        return torch.cat([self._prefix.expand(self._paths.shape[0], -1), self._paths], dim=1)

    def holds(self, slots: torch.Tensor, start: int = 0) -> torch.Tensor:
        """bool `[w, width]`: whether each of these tokens, int64 `[width]`, occurs before each node, from position
        `start` on, which counts padding."""
        begin = max(0, start - self._padding)
        seen, known = self._seen.get(begin) or (self._marks.none.clone(), begin)
        seen.index_fill_(0, self._prefix[known:], True)
        self._seen[begin] = seen, max(begin, self._prefix.shape[0])
        return seen.index_select(0, slots) | self._marks.are_among(slots, self._paths)

    def are_among(self, slots: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """bool `[w, width]`: whether each of these tokens is one of each row of `token_ids`, int64 `[w, m]`, which may
        hold `no_token`."""
        return self._marks.are_among(slots, token_ids)

    @property
    def no_token(self) -> int:
        """An id for `are_among` that equals no token."""
        return self._marks.none.shape[0] - 1


class SeenTokens:
    """The set of a text's tokens in a tensor of one size: in rounds over fixed memory the context of processors that
    look at nothing else.

    Args:
        vocabulary_rows: one past the largest token id.
        device: the device of the tokens.
    """

    def __init__(self, vocabulary_rows: int, device: torch.device):
        self._every = torch.arange(vocabulary_rows, device=device)
        # One entry more than there are tokens, for no token.
        self._seen = torch.zeros(vocabulary_rows + 1, dtype=torch.bool, device=device)
        self._paths = self._every[:0].unsqueeze(0)
        self._marks = _Marks(vocabulary_rows + 1, device)

    def begin(self, text: torch.Tensor) -> None:
        """Begin a text, int64 `[n]`."""
        self._seen.zero_()
        self.add(text)

    def add(self, token_ids: torch.Tensor) -> None:
        """Add verified tokens, int64 `[n]`. Ids past the largest one are none."""
        self._seen.index_fill_(0, token_ids.clamp_max(self._every.shape[0]), True)

    def set_paths(self, paths: torch.Tensor) -> None:
        """See `DraftContext.set_paths`."""
        self._paths = paths

    def holds(self, slots: torch.Tensor, start: int = 0) -> torch.Tensor:
        """See `DraftContext.holds`; `start` is 0."""
        return self._seen.index_select(0, slots) | self._marks.are_among(slots, self._paths)

    def ids(self, one: torch.Tensor) -> torch.Tensor:
        """int64 `[1, V]`: all verified tokens, in the places of others one of them, int64 `[1]`, once more."""
        return torch.where(self._seen[:-1], self._every, one).unsqueeze(0)


def looks_at_set_only(processor: object) -> bool:
    """Whether a processor looks at the set of a text's tokens, not at their order or number."""
    return type(processor) is RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is None


class _Marks:
    """Looks up tokens in rows of tokens, without work for the rest of the vocabulary.

    Args:
        size: one more than there are tokens.
        device: the device of the tokens.

    Attributes:
        none: bool `[size]`, all False.
    """

    def __init__(self, size: int, device: torch.device):
        # All False except while `are_among` runs; a row for each node of the widest step so far.
        self._rows = torch.zeros(1, size, dtype=torch.bool, device=device)

    @property
    def none(self) -> torch.Tensor:
        return self._rows[0]

    def are_among(self, slots: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """bool `[w, width]`: whether each token, int64 `[width]`, is in each row of `token_ids`, int64 `[w, m]`."""
        w = token_ids.shape[0]
        if self._rows.shape[0] < w:
            self._rows = self._rows.new_zeros(w, self._rows.shape[1])
        rows = self._rows[:w].scatter_(1, token_ids, True)
        is_among = rows.gather(1, slots.expand(w, -1))
        rows.scatter_(1, token_ids, False)
        return is_among


# Process the logits of a shortlist's slots: logits, fp32 [w, width], slots, int64 [width], and the context.
_Twin = Callable[[Any, torch.Tensor, torch.Tensor, DraftContext], torch.Tensor]


def draft_processors(processors: LogitsProcessorList) -> list[Any]:
    """The processors of a call that drafts go through, in their order. Those that look at values only are kept; others
    are replaced by their twin, a function of logits, slots and context, or left out if they have none."""
    kept: list[Any] = []
    for one in processors:
        if looks_at_values_only(one):
            kept.append(one)
        elif type(one) in _TWINS:
            kept.append(partial(_TWINS[type(one)], one))
    return kept


def _penalise_repetition(
    processor: RepetitionPenaltyLogitsProcessor, logits: torch.Tensor, slots: torch.Tensor, context: DraftContext
) -> torch.Tensor:
    # A tensor counts the prompt's padding, which the context does not have.
    ignored = processor.prompt_ignore_length
    is_seen = context.holds(slots, ignored if isinstance(ignored, int) else 0)
    penalised = torch.where(logits < 0, logits * processor.penalty, logits / processor.penalty)
    return torch.where(is_seen, penalised, logits)


def _ban_repeated_ngrams(
    processor: NoRepeatNGramLogitsProcessor, logits: torch.Tensor, slots: torch.Tensor, context: DraftContext
) -> torch.Tensor:
    tokens, size = context.texts(), processor.ngram_size
    if tokens.shape[1] < size:
        return logits
    ngrams = tokens.unfold(1, size, 1)
    goes_on_alike = (ngrams[..., :-1] == tokens[:, None, tokens.shape[1] - size + 1 :]).all(-1)
    banned = torch.where(goes_on_alike, ngrams[..., -1], context.no_token)
    return logits.masked_fill(context.are_among(slots, banned), -torch.inf)


def _add_bias(
    processor: SequenceBiasLogitsProcessor, logits: torch.Tensor, slots: torch.Tensor, context: DraftContext
) -> torch.Tensor:
    # The bias is prepared when the processor first sees the target's logits.
    if not processor.prepared_bias_variables:
        return logits
    return logits + processor.length_1_bias.to(slots.device).index_select(0, slots)


def _suppress(
    processor: SuppressTokensLogitsProcessor, logits: torch.Tensor, slots: torch.Tensor, context: DraftContext
) -> torch.Tensor:
    suppressed = torch.as_tensor(processor.suppress_tokens, device=slots.device)
    suppressed = suppressed.where((suppressed >= 0) & (suppressed < context.no_token), context.no_token)
    return logits.masked_fill(context.are_among(slots, suppressed.unsqueeze(0)), -torch.inf)


def _ban_end_before(
    length: int, end: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor, context: DraftContext
) -> torch.Tensor:
    if context.length >= length:
        return logits
    is_end = (slots.unsqueeze(-1) == end.to(slots.device)).any(-1)
    return logits.masked_fill(is_end, -torch.inf)


def _require_length(processor: MinLengthLogitsProcessor, *step: Any) -> torch.Tensor:
    return _ban_end_before(processor.min_length, processor.eos_token_id, *step)


def _require_new_tokens(processor: MinNewTokensLengthLogitsProcessor, *step: Any) -> torch.Tensor:
    return _ban_end_before(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id, *step)


# Exactly these classes: a subclass may do anything.
_TWINS: dict[type, _Twin] = {
    MinLengthLogitsProcessor: _require_length,
    MinNewTokensLengthLogitsProcessor: _require_new_tokens,
    NoBadWordsLogitsProcessor: _add_bias,
    NoRepeatNGramLogitsProcessor: _ban_repeated_ngrams,
    RepetitionPenaltyLogitsProcessor: _penalise_repetition,
    SequenceBiasLogitsProcessor: _add_bias,
    SuppressTokensLogitsProcessor: _suppress,
}
