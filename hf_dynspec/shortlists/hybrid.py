"""The hybrid of an in-context window with a static core, which is the default policy."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..protocol import Needs, VocabularyInfo
from .base import ShortlistPolicy
from .frequency import FrequencyShortlist
from .in_context import InContextShortlist
from .recent_tokens import RecentTokens, RecentTokensState


class HybridShortlist(ShortlistPolicy):
    """A static core of frequent tokens beside an in-context window of distinct other tokens. Nothing to train.

    A window alone is too small after a short prompt, and a static list misses what the context makes likely; each
    covers the other's gap. Every slot of the window holds a token that the core has not: at first those that follow
    the core in the ranking, then, from the rarest on, in their place what the context and the target bring. So core
    and window together are a larger core to begin with, and the window's share says how much of it may go.
    Many more of the target's tokens are taken than MicroSpec's 3. `hf-dynspec coverage` compares sizes on your own
    pair: `--policy hybrid:window=1024 --policy hybrid:core_size=4096,window=1024`.

    What the window keeps between calls are token ids in the order in which they were last seen. They decide what is
    drafted, and never what comes out. Yet how fast a text is drafted tells something of the texts before it, so
    `memory="assistant"` is for calls of people who may know of each other; call `DynSpecAssistant.forget` where they
    change.

    Args:
        ranking: token ids, most frequent first, as for `FrequencyShortlist` (None: the tokenizer's merge order).
        core_size: tokens of the static core.
        window: distinct tokens of the in-context window.
        prompt_top_k: the target's most probable tokens taken at each prompt position.
        verify_top_k: the target's most probable tokens taken at each verified position.
        prompt_positions: take `prompt_top_k` at the last so many prompt positions only (None: at all of them). It
            costs the target's whole output projection at each of them, once a call.
        memory: what the window keeps when another call begins: `"call"`, nothing, also in a conversation, whose text
            is then taken in anew; `"conversation"`, from turn to turn of one conversation
            (`DynSpecAssistant.conversation`), while single calls start anew; `"assistant"`, the last `window` tokens
            of all calls of one assistant that are over, in whatever threads, until `DynSpecAssistant.forget`.

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

    @property
    def needs(self) -> Needs:
        return Needs(self.verify_top_k, self.prompt_top_k, self.prompt_positions)

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        return self._core.tokenizer_fingerprints

    @property
    def static_core(self) -> FrequencyShortlist:
        return self._core

    def new_memory(self) -> RecentTokens | None:
        return RecentTokens(self.window) if self.memory == "assistant" else None

    def start(self, vocabulary: VocabularyInfo, memory: RecentTokens | None = None) -> RecentTokensState:
        """Begin a session over `vocabulary`.

        Raises:
            ConfigurationError: the ranking holds no token that the drafter can score.
        """
        # What the window holds at first follows the core.
        core_size = max(self.core_size, len(vocabulary.eos_token_ids))
        ids = self._core.leading_ids(vocabulary, core_size + self.window)
        return RecentTokensState(ids[:core_size], ids[core_size:], self.window, vocabulary, self.memory, memory)

    def settings(self) -> dict[str, Any]:
        return {
            "core_size": self.core_size,
            "window": self.window,
            "prompt_top_k": self.prompt_top_k,
            "verify_top_k": self.verify_top_k,
            "prompt_positions": self.prompt_positions,
            "memory": self.memory,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._core.tensors()
