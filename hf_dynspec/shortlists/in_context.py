"""MicroSpec's in-context window: tokens lately seen, drafted, or thought likely by the target. Nothing to train."""

from typing import ClassVar

import torch

from ..fields import LARGEST_TOP_K, OneOf, WholeNumber
from ..protocol import Needs, VocabularyInfo
from .base import ShortlistPolicy
from .recent_tokens import MEMORIES, RecentTokens, RecentTokensState

EVICTIONS = ("stream", "lru")


class InContextShortlist(ShortlistPolicy):
    """A sliding window over a stream of candidate tokens (MicroSpec, section 3.2 and algorithm 1).

    The stream starts with the prompt's tokens and the target's `prompt_top_k` most probable tokens at each prompt
    position (equation 2). Every round appends the drafted tokens and the target's `verify_top_k` most probable tokens
    at each verified position (equation 3) and the tokens that it chose there, which in greedy decoding are among them
    anyway. The shortlist is the set of the window's tokens and the EOS ids.

    Args:
        window: `W_max`, the size of the window, bounded by the vocabulary.
        prompt_top_k: `K_pre`, at most 1,024 and the size of the vocabulary.
        verify_top_k: `K_ver`, likewise.
        eviction: `"stream"` keeps the last `window` elements of the stream (equation 4); `"lru"` keeps the last
            `window` distinct tokens, which covers more with the same rows.
        prompt_positions: take `prompt_top_k` at this many last prompt positions only (None: at all of them).
        memory: how long the window keeps its tokens, as for `HybridShortlist`.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """

    name = "in_context"
    setting_rules: ClassVar = {
        "window": WholeNumber(1),
        "prompt_top_k": WholeNumber(0, LARGEST_TOP_K),
        "verify_top_k": WholeNumber(0, LARGEST_TOP_K),
        "eviction": OneOf(EVICTIONS),
        "prompt_positions": WholeNumber(1, optional=True),
        "memory": OneOf(MEMORIES),
    }
    card_summary = "A sliding window over the context's tokens and what the target found likely there (MicroSpec)."
    card_tags = ("microspec",)

    def __init__(
        self,
        window: int = 3072,
        prompt_top_k: int = 3,
        verify_top_k: int = 3,
        eviction: str = "stream",
        prompt_positions: int | None = None,
        memory: str = "conversation",
    ):
        self.window = window
        self.prompt_top_k = prompt_top_k
        self.verify_top_k = verify_top_k
        self.eviction = eviction
        self.prompt_positions = prompt_positions
        self.memory = memory
        self.require_settings(self.settings())

    @property
    def needs(self) -> Needs:
        return Needs(self.verify_top_k, self.prompt_top_k, self.prompt_positions)

    def new_memory(self) -> RecentTokens | None:
        return RecentTokens(self.window) if self.memory == "assistant" else None

    def start(self, vocabulary: VocabularyInfo, memory: RecentTokens | None = None) -> "InContextState":
        return InContextState(self.window, self.eviction == "stream", vocabulary, self.memory, memory)


class InContextState(RecentTokensState):
    """The EOS ids, and a window in which only seen tokens count.

    A token is in a stream window exactly if its last position is among the last `window` ones, and in an LRU window
    exactly if fewer than `window` distinct tokens were seen since. Both hold at most `window` tokens, so with that
    many slots a new token can always take the slot that was used longest ago.
    """

    carried = (*RecentTokensState.carried, "_length", "_met")

    def __init__(
        self, window: int, is_stream: bool, vocabulary: VocabularyInfo, memory: str, shared: RecentTokens | None
    ):
        self._is_stream, self._stream_window = is_stream, window
        eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=vocabulary.device)
        self._is_eos = torch.ones_like(eos, dtype=torch.bool)
        # For a stream: its last position; and for each entry the index of its last occurrence among all so far.
        self._length, self._met = eos.new_zeros(1), eos.new_zeros(1)
        self._last_met = eos.new_zeros(vocabulary.size + 1 if is_stream else 0)
        super().__init__(eos, eos[:0], window, vocabulary, memory, shared)

    def _occupied(self) -> torch.Tensor:
        passed = self._text_start
        if self._is_stream:
            passed = torch.maximum(self._length - self._stream_window, passed)
        return torch.cat([self._is_eos, self._last_seen.take(self._window_ids) > passed])

    def _positions(self, entries: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        positions = super()._positions(entries, lengths)
        if not self._is_stream:
            return positions
        # The stream takes every token of a sequence, but each token of a set only once, at its last occurrence.
        sequence, *sets = entries.split(lengths)
        counts = torch.cat([torch.ones_like(sequence, dtype=torch.bool), *map(self._is_last_occurrence, sets)])
        start = torch.maximum(self._length, self._shared_end)
        positions = start + (counts & (entries != self._nowhere)).cumsum(0)
        self._length = positions[-1:]
        return positions

    def _is_last_occurrence(self, entries: torch.Tensor) -> torch.Tensor:
        """bool `[n]`: no equal entry comes later."""
        if not len(entries):
            return entries.bool()
        places = self._met + torch.arange(1, entries.shape[0] + 1, device=entries.device)
        self._met = places[-1:]
        return self._last_met.scatter_reduce_(0, entries, places, "amax").take(entries) == places
