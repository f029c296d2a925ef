"""What a verification said, turned into the tokens of a cache."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import record_function

from .cache import TokenCache
from .graph import WantedSuccessors
from .index import SemanticIndex
from .neighbours import TokenNeighbours

# Stands for a token that does not matter.
NO_TOKEN = -1
_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RetrievalEvent:
    """Positions of the text, as retrieval reads them. The tensors stay on their device until they are read.

    Args:
        token_ids: int64 `[n]`: the tokens that stand there, `NO_TOKEN` where they do not matter.
        is_trigger: bool `[n]`: which positions count (None: all).
        top_ids: int64 `[n, likely]`: the target's most probable tokens there (None: not asked for).
        top_logits: fp32, of the shape of `top_ids`: their logits (None: not asked for).
        hidden_states: `[n, d]`: what the target's head was given there (None: not asked for).
        is_verified: whether the target chose the tokens. Those of a prompt have no neighbours looked up.
        start: the position in the text of the first of them; the others follow.
    """

    token_ids: torch.Tensor
    is_trigger: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    is_verified: bool = False
    start: int = 0


@dataclass(frozen=True, eq=False)
class Retrieved:
    """What one position of an event brought, in the order in which the cache takes it in.

    Args:
        position: of the text.
        trigger: the token that stands there, `NO_TOKEN` where it does not matter.
        likely: int64 `[n]`: what the target found most probable there.
        probabilities: fp32 `[n]`: of these among each other; `[0]` where nobody asked.
        near: int64 `[m]`: what the index or the table of neighbours has near to it.
        following: int64 `[l]`: of what most often follows all of these, with repeats, what may come in.
    """

    position: int
    trigger: int
    likely: np.ndarray
    probabilities: np.ndarray
    near: np.ndarray
    following: np.ndarray


@dataclass(frozen=True, eq=False)
class Retrieval:
    """One event, and what came of it.

    Args:
        event: what was read.
        found: what each position that counts brought, in their order.
        changes: the slots of the cache that hold another token now, with these tokens.
        start: when it began, in seconds of `time.perf_counter`.
        end: when it was done.
    """

    event: RetrievalEvent
    found: list[Retrieved]
    changes: dict[int, int]
    start: float
    end: float


class RetrievalListener(ABC):
    """Is told what a session retrieves, for those who study it."""

    @abstractmethod
    def hear(self, retrieval: Retrieval) -> None:
        """An event was taken in. Called by the thread that retrieves, in the order of the events."""

    @abstractmethod
    def on_taken(self, count: int) -> None:
        """A round takes up the next `count` retrievals. Called by the thread that generates."""


class Retriever:
    """Fills a cache of tokens. Used by one thread at a time.

    Args:
        cache: what holds them.
        is_wanted: bool `[V + 1]`, on the CPU: which ids may come in, that is those that the drafter can score and the
            core does not hold; the last entry, False, stands for all ids past the vocabulary.
        semantic: what finds tokens that are near: an index asked with hidden states, a table asked with tokens, or
            None where the target's own likeliest tokens are all.
        neighbours: how many tokens of an index.
        successors: what finds tokens that follow (None: nothing).
        listener: is told what is retrieved (None: nobody).
    """

    def __init__(
        self,
        cache: TokenCache,
        is_wanted: torch.Tensor,
        semantic: SemanticIndex | TokenNeighbours | None,
        neighbours: int,
        successors: WantedSuccessors | None,
        listener: RetrievalListener | None = None,
    ):
        self._cache = cache
        # In arrays from here on: with a few hundred numbers, a tensor's operations take several times as long.
        self._is_wanted = is_wanted.numpy()
        self._semantic = semantic
        self._neighbours = neighbours
        self._successors = successors
        self._listener = listener

    def retrieve(self, event: RetrievalEvent, passed: Sequence[list[int]] = ()) -> dict[int, int]:
        """Take in an event.

        Args:
            event: what was said.
            passed: the tokens that were verified between the last event and this one, and triggered nothing.

        Returns:
            The slots of the cache that hold another token now, with these tokens.
        """
        for token_ids in passed:
            self._go_by(token_ids, is_verified=True)
        if self._listener is None:
            return self._take_in(event)[1]
        start = time.perf_counter()
        with record_function("retrieval"):
            found, changes = self._take_in(event)
        by_position = [] if found is None else found.by_position()
        self._listener.hear(Retrieval(event, by_position, changes, start, time.perf_counter()))
        return changes

    def _take_in(self, event: RetrievalEvent) -> tuple["_Found | None", dict[int, int]]:
        token_ids = event.token_ids.cpu().numpy()
        self._go_by(token_ids.tolist(), event.is_verified)
        found = self._found(event, token_ids)
        if found is not None:
            self._cache.add(*self._wanted(found))
        return found, self._cache.take_changes()

    def _go_by(self, token_ids: list[int], is_verified: bool) -> None:
        """Tokens stand in the text, which are decoding steps where the target chose them."""
        self._cache.advance(len(token_ids) if is_verified else 0)
        self._cache.refresh(token_ids)

    def take_semantic(self, semantic: SemanticIndex | TokenNeighbours | None) -> None:
        """Take up what is made of other weights."""
        self._semantic = semantic

    def _found(self, event: RetrievalEvent, token_ids: np.ndarray) -> "_Found | None":
        """What the positions that count bring (None: none counts)."""
        chosen = np.arange(len(token_ids))
        if event.is_trigger is not None:
            (chosen,) = event.is_trigger.cpu().numpy().nonzero()
        if not len(chosen):
            return None
        near = self._near(event, chosen)
        likely = np.empty((len(chosen), 0), dtype=np.int64)
        probabilities = likely.astype(np.float32)
        if event.top_ids is not None:
            likely = event.top_ids.cpu().numpy()[chosen]
        if event.top_ids is not None and event.top_logits is not None:
            probabilities = event.top_logits.cpu().softmax(-1).numpy()[chosen]
        named = np.concatenate([token_ids[chosen, None], likely, near], axis=1)
        following, counts = _NO_IDS, np.zeros(len(chosen), dtype=np.int64)
        if self._successors is not None:
            following, counts = self._successors.of(named.ravel())
            counts = counts.reshape(named.shape).sum(1)
        return _Found(event.start + chosen, named, probabilities, near.shape[1], following, counts)

    def _near(self, event: RetrievalEvent, chosen: np.ndarray) -> np.ndarray:
        """What is near to what the target's head was given, or to the token, at each of the chosen positions."""
        if isinstance(self._semantic, SemanticIndex) and event.hidden_states is not None:
            asked = event.hidden_states[torch.from_numpy(chosen).to(event.hidden_states.device)]
            return self._semantic.search(asked, self._neighbours).numpy()
        if isinstance(self._semantic, TokenNeighbours) and event.is_verified:
            return self._semantic.of(event.token_ids.cpu()[chosen])[:, : self._neighbours].numpy()
        return np.empty((len(chosen), 0), dtype=np.int64)

    def _wanted(self, found: "_Found") -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """The tokens that may come in, those of one position after those of another; what they are worth, the likely
        ones their probability and the others what the least likely of their position is; and how many of each position
        there are."""
        # The last entry stands for what is no token: past the vocabulary, or `NO_TOKEN`, which finds it by itself.
        is_wanted = self._is_wanted[np.minimum(found.named, len(self._is_wanted) - 1)]
        ids, weights, counts = found.named[is_wanted], None, is_wanted.sum(1)
        if found.probabilities.shape[1]:
            weights = found.probabilities[:, -1:].repeat(found.named.shape[1], 1)
            weights[:, 1 : found.probabilities.shape[1] + 1] = found.probabilities
            weights = weights[is_wanted]
        if not len(found.following):
            return ids, weights, counts
        # After what they follow. All of them may come in.
        places = np.repeat(counts.cumsum(), found.counts)
        if weights is not None:
            weights = np.insert(weights, places, np.repeat(found.probabilities[:, -1], found.counts))
        return np.insert(ids, places, found.following), weights, counts + found.counts


class _Found(NamedTuple):
    """What some positions brought.

    Args:
        positions: int64 `[n]`: of the text.
        named: int64 `[n, 1 + likely + near]`: the token that stands there, and what is likely and near.
        probabilities: fp32 `[n, likely]`: of the likely ones among each other; `[n, 0]` where nobody asked.
        near: how many of those named are near.
        following: int64 `[m]`: what follows the named ones most often and may come in, of one position after another.
        counts: int64 `[n]`: how many of these are of each position.
    """

    positions: np.ndarray
    named: np.ndarray
    probabilities: np.ndarray
    near: int
    following: np.ndarray
    counts: np.ndarray

    def by_position(self) -> list[Retrieved]:
        """What each of them brought, for a listener."""
        trigger, likely, near = np.split(self.named, [1, self.named.shape[1] - self.near], axis=1)
        following = np.split(self.following, self.counts.cumsum()[:-1])
        columns = self.positions.tolist(), trigger.ravel().tolist(), likely, self.probabilities, near, following
        return [Retrieved(*one) for one in zip(*columns, strict=True)]
