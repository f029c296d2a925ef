"""The hybrid of an in-context window with a static core, which is the default policy."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..protocol import VocabularyInfo
from .base import ShortlistPolicy
from .frequency import FrequencyShortlist
from .in_context import InContextShortlist
from .recent_tokens import RecentTokens, RecentTokensState


class HybridShortlist(ShortlistPolicy):
    """A static core of frequent tokens beside an in-context window of distinct other tokens. Nothing to train.

    A window alone is too small after a short prompt, and a static list misses the tokens of the context; each covers
    the other's gap. The window first holds the tokens that follow the core in the ranking. Tokens of the context and
    of the target then replace them, the rarest first. It takes many more of the target's tokens than MicroSpec's 3.
    `hf-dynspec coverage` compares sizes on your own pair: `--policy hybrid:window=1024 --policy
    hybrid:core_size=4096,window=1024`.

    Between calls the window keeps token ids in the order of their last use. They change what is drafted, never the
    output. But the speed of a text reveals something of earlier texts, so use `memory="assistant"` only for people who
    may know of each other, and call `DynSpecAssistant.forget` between groups.

    Args:
        ranking: token ids, most frequent first, as for `FrequencyShortlist` (None: the tokenizer's merge order).
        core_size: tokens of the static core.
        window: distinct tokens of the in-context window.
        prompt_top_k: the target's most probable tokens taken at each prompt position.
        verify_top_k: the target's most probable tokens taken at each verified position.
        prompt_positions: take `prompt_top_k` at this many last prompt positions only (None: at all of them). Each
            costs one product with the target's output projection, once a call.
        memory: how long the window keeps its tokens: `"call"`: one call, and a conversation's earlier text is taken in
            anew; `"conversation"`: all turns of one conversation (`DynSpecAssistant.conversation`), while single calls
            start anew; `"assistant"`: the last `window` tokens of all finished calls of an assistant, of all threads,
            until `DynSpecAssistant.forget`.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
        ArtifactError: the ranking's artifact is damaged or holds no ranking.
    """

    name = "hybrid"
    tensor_rules = FrequencyShortlist.tensor_rules
    card_summary = (
        "A static core of frequent tokens beside a sliding window over the context's tokens and what the target found "
        "likely there."
    )
    card_tags = ("fr-spec", "microspec")
    setting_rules: ClassVar = {
        "core_size": FrequencyShortlist.setting_rules["size"],
        **{name: rule for name, rule in InContextShortlist.setting_rules.items() if name != "eviction"},
    }

    def __init__(
        self,
        ranking: Sequence[int] | torch.Tensor | str | os.PathLike | None = None,
        core_size: int = 1024,
        window: int = 4096,
        prompt_top_k: int = 150,
        verify_top_k: int = 150,
        prompt_positions: int | None = 16,
        memory: str = "conversation",
    ):
        self.core_size = core_size
        self.window = window
        self.prompt_top_k = prompt_top_k
        self.verify_top_k = verify_top_k
        self.prompt_positions = prompt_positions
        self.memory = memory
        self.require_settings(self.settings())
        self._core = FrequencyShortlist(ranking, size=core_size)

    needs, new_memory = InContextShortlist.needs, InContextShortlist.new_memory

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        return self._core.tokenizer_fingerprints

    @property
    def static_core(self) -> FrequencyShortlist:
        return self._core

    def start(self, vocabulary: VocabularyInfo, memory: RecentTokens | None = None) -> RecentTokensState:
        """Begin a session over `vocabulary`.

        Raises:
            ConfigurationError: the ranking holds no token that the drafter can score.
        """
        core_size = max(self.core_size, len(vocabulary.eos_token_ids))
        ids = self._core.leading_ids(vocabulary, core_size + self.window)
        return RecentTokensState(ids[:core_size], ids[core_size:], self.window, vocabulary, self.memory, memory)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._core.tensors()
