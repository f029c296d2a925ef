"""What a verification said, turned into the tokens of a cache."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from .cache import TokenCache
from .graph import WantedSuccessors
from .index import SemanticIndex
from .neighbours import TokenNeighbours

# Stands for a token that does not matter.
NO_TOKEN = -1
# Of one position that brought nothing, `[1, 0]`.
_NO_IDS = np.empty((1, 0), dtype=np.int64)


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
    def take_up(self, count: int) -> None:
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

    def retrieve(self, event: RetrievalEvent) -> dict[int, int]:
        """Take in an event. Returns the slots of the cache that hold another token now, with these tokens."""
        if self._listener is None:
            return self._take_in(event)[1]
        start = time.perf_counter()
        found, changes = self._take_in(event)
        self._listener.hear(Retrieval(event, found, changes, start, time.perf_counter()))
        return changes

    def _take_in(self, event: RetrievalEvent) -> tuple[list[Retrieved], dict[int, int]]:
        token_ids = event.token_ids.tolist()
        self._cache.advance(len(token_ids) if event.is_verified else 0)
        self._cache.refresh(token_ids)
        found = self._found(event)
        for one in found:
            self._cache.add(*self._wanted(one))
        return found, self._cache.take_changes()

    def take_semantic(self, semantic: SemanticIndex | TokenNeighbours | None) -> None:
        """Take up what is made of other weights."""
        self._semantic = semantic

    def _found(self, event: RetrievalEvent) -> list[Retrieved]:
        """What each position that counts brings, in their order."""
        chosen = torch.arange(event.token_ids.shape[0], device="cpu")
        if event.is_trigger is not None:
            chosen = event.is_trigger.cpu().nonzero().squeeze(1)
        if not chosen.numel():
            return []
        token_ids = event.token_ids.cpu()[chosen].numpy()
        likely, near = self._likely(event, chosen), self._near(event, chosen)
        # Of all positions at once: a look-up costs more than what it finds.
        following = self._following(np.concatenate([token_ids[:, None], likely, near], axis=1))
        positions = (event.start + chosen).tolist()
        columns = positions, token_ids.tolist(), likely, self._probabilities(event, chosen), near, following
        return [Retrieved(*one) for one in zip(*columns, strict=True)]

    def _likely(self, event: RetrievalEvent, chosen: torch.Tensor) -> np.ndarray:
        """The target's likeliest tokens at each of the chosen positions."""
        return _NO_IDS.repeat(chosen.shape[0], 0) if event.top_ids is None else event.top_ids.cpu()[chosen].numpy()

    def _probabilities(self, event: RetrievalEvent, chosen: torch.Tensor) -> np.ndarray:
        """Of the likeliest tokens among each other, at each of the chosen positions."""
        if event.top_ids is None or event.top_logits is None:
            return _NO_IDS.astype(np.float32).repeat(chosen.shape[0], 0)
        return event.top_logits.cpu()[chosen].softmax(-1).numpy()

    def _near(self, event: RetrievalEvent, chosen: torch.Tensor) -> np.ndarray:
        """What is near to what the target's head was given, or to the token, at each of the chosen positions."""
        if isinstance(self._semantic, SemanticIndex) and event.hidden_states is not None:
            asked = event.hidden_states.index_select(0, chosen.to(event.hidden_states.device))
            return self._semantic.search(asked, self._neighbours).numpy()
        if isinstance(self._semantic, TokenNeighbours) and event.is_verified:
            return self._semantic.of(event.token_ids.cpu()[chosen])[:, : self._neighbours].numpy()
        return _NO_IDS.repeat(chosen.shape[0], 0)

    def _following(self, asked: np.ndarray) -> list[np.ndarray]:
        """What follows the tokens of each position most often, and may come in, for int64 `[n, k]`."""
        if self._successors is None:
            return [_NO_IDS[0]] * len(asked)
        found, counts = self._successors.of(asked.ravel())
        return np.split(found, counts.reshape(asked.shape).sum(1).cumsum()[:-1])

    def _wanted(self, one: Retrieved) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens that may come in, in their order, and what they are worth: the likely ones their probability, and
        the others what the least likely of them is."""
        ids = np.concatenate([[one.trigger], one.likely, one.near, one.following])
        # The last entry stands for what is no token: past the vocabulary, or `NO_TOKEN`, which finds it by itself.
        is_wanted = self._is_wanted[np.minimum(ids, len(self._is_wanted) - 1)]
        if not len(one.probabilities):
            return ids[is_wanted], None
        weights = np.full(len(ids), one.probabilities[-1], dtype=np.float64)
        weights[1 : len(one.probabilities) + 1] = one.probabilities
        return ids[is_wanted], weights[is_wanted]
