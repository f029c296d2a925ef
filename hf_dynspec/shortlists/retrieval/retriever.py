"""Retrieval: the target's verdicts become tokens of a cache."""

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

# Stands for an unknown or irrelevant token.
NO_TOKEN = -1
_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RetrievalEvent:
    """Consecutive positions of the text. The tensors stay on their device until they are read.

    Args:
        token_ids: int64 `[n]`: their tokens, or `NO_TOKEN`.
        is_trigger: bool `[n]`: the positions that count (None: all).
        top_ids: int64 `[n, likely]`: the target's most probable tokens there (None: not needed).
        top_logits: fp32 `[n, likely]`: their logits (None: not needed).
        hidden_states: `[n, d]`: the inputs of the target's head there (None: not needed).
        is_verified: whether the target chose the tokens. Neighbours of a prompt's tokens are not looked up.
        start: the first position.
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
    """The tokens that one position of an event brought, in the order in which the cache takes them.

    Args:
        position: the position in the text.
        trigger: its token, or `NO_TOKEN`.
        likely: int64 `[n]`: the target's most probable tokens.
        probabilities: fp32 `[n]`: their probabilities, normalized among them; `[0]` if not needed.
        near: int64 `[m]`: near tokens of the index or the table of neighbours.
        following: int64 `[l]`: the most frequent successors of all these that may come in, with repeats.
    """

    position: int
    trigger: int
    likely: np.ndarray
    probabilities: np.ndarray
    near: np.ndarray
    following: np.ndarray


@dataclass(frozen=True, eq=False)
class Retrieval:
    """One event and its results.

    Args:
        event: the event.
        found: the tokens of each position that counts, in order.
        changes: the changed slots of the cache, with their tokens.
        start: the time of the beginning, in seconds of `time.perf_counter`.
        end: the time of the end.
    """

    event: RetrievalEvent
    found: list[Retrieved]
    changes: dict[int, int]
    start: float
    end: float


class RetrievalListener(ABC):
    """Observes the retrieval of a session, for study."""

    @abstractmethod
    def hear(self, retrieval: Retrieval) -> None:
        """An event was taken in. Called by the retrieving thread, in the order of the events."""

    @abstractmethod
    def on_taken(self, count: int) -> None:
        """A round takes up the next `count` retrievals. Called by the generating thread."""


class Retriever:
    """Fills a cache of tokens. Used by one thread at a time.

    Args:
        cache: the cache.
        is_wanted: bool `[V + 1]`, on the CPU: the ids that may come in: the drafter can score them, and the core does
            not hold them; the last entry, False, stands for all ids past the vocabulary.
        semantic: finds near tokens: an index for hidden states, or a table for tokens (None: no near tokens).
        neighbours: near tokens for each position.
        successors: finds the tokens that follow (None: no such tokens).
        listener: observes the retrieval (None: nobody does).
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
        # Arrays, since tensor operations on a few hundred numbers take several times as long.
        self._is_wanted = is_wanted.numpy()
        self._semantic = semantic
        self._neighbours = neighbours
        self._successors = successors
        self._listener = listener

    def retrieve(self, event: RetrievalEvent, passed: Sequence[list[int]] = ()) -> dict[int, int]:
        """Take in an event, after tokens that were `passed`: verified since the last event, without a trigger.
        Returns the changed slots of the cache, with their tokens."""
        for token_ids in passed:
            self._pass(token_ids, is_verified=True)
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
        self._pass(token_ids.tolist(), event.is_verified)
        found = self._look_up(event, token_ids)
        if found is not None:
            self._cache.add(*self._wanted(found))
        return found, self._cache.take_changes()

    def _pass(self, token_ids: list[int], is_verified: bool) -> None:
        """Note tokens of the text. Each one that the target chose is a decoding step."""
        self._cache.advance(len(token_ids) if is_verified else 0)
        self._cache.refresh(token_ids)

    def take_semantic(self, semantic: SemanticIndex | TokenNeighbours | None) -> None:
        """Replace the index or the table after the weights changed."""
        self._semantic = semantic

    def _look_up(self, event: RetrievalEvent, token_ids: np.ndarray) -> "_Found | None":
        """The tokens of the positions that count (None: no position counts)."""
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
        if isinstance(self._semantic, SemanticIndex) and event.hidden_states is not None:
            asked = event.hidden_states[torch.from_numpy(chosen).to(event.hidden_states.device)]
            return self._semantic.search(asked, self._neighbours).numpy()
        if isinstance(self._semantic, TokenNeighbours) and event.is_verified:
            return self._semantic.of(event.token_ids.cpu()[chosen])[:, : self._neighbours].numpy()
        return np.empty((len(chosen), 0), dtype=np.int64)

    def _wanted(self, found: "_Found") -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """The tokens that may come in, position by position; their weights, which are probabilities for likely tokens
        and the least of these for others; and the number of tokens of each position."""
        # The last entry stands for ids past the vocabulary, and as entry −1 for `NO_TOKEN`.
        is_wanted = self._is_wanted[np.minimum(found.named, len(self._is_wanted) - 1)]
        ids, weights, counts = found.named[is_wanted], None, is_wanted.sum(1)
        if found.probabilities.shape[1]:
            weights = found.probabilities[:, -1:].repeat(found.named.shape[1], 1)
            weights[:, 1 : found.probabilities.shape[1] + 1] = found.probabilities
            weights = weights[is_wanted]
        if not len(found.following):
            return ids, weights, counts
        # Behind the tokens that they follow. All of them may come in.
        places = np.repeat(counts.cumsum(), found.counts)
        if weights is not None:
            weights = np.insert(weights, places, np.repeat(found.probabilities[:, -1], found.counts))
        return np.insert(ids, places, found.following), weights, counts + found.counts


class _Found(NamedTuple):
    """The tokens that some positions brought.

    Args:
        positions: int64 `[n]`: the positions in the text.
        named: int64 `[n, 1 + likely + near]`: their own tokens, likely tokens and near tokens.
        probabilities: fp32 `[n, likely]`: of the likely tokens, normalized among them; `[n, 0]` if not needed.
        near: the number of near tokens.
        following: int64 `[m]`: the most frequent successors of these that may come in, position by position.
        counts: int64 `[n]`: the number of successors of each position.
    """

    positions: np.ndarray
    named: np.ndarray
    probabilities: np.ndarray
    near: int
    following: np.ndarray
    counts: np.ndarray

    def by_position(self) -> list[Retrieved]:
        """The tokens of each position, for a listener."""
        trigger, likely, near = np.split(self.named, [1, self.named.shape[1] - self.near], axis=1)
        following = np.split(self.following, self.counts.cumsum()[:-1])
        columns = self.positions.tolist(), trigger.ravel().tolist(), likely, self.probabilities, near, following
        return [Retrieved(*one) for one in zip(*columns, strict=True)]
