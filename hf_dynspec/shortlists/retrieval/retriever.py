"""What a verification said, turned into the tokens of a cache."""

from dataclasses import dataclass

import torch

from .cache import TokenCache
from .graph import CooccurrenceGraph
from .index import SemanticIndex
from .neighbours import TokenNeighbours

# Stands for a token that does not matter.
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class RetrievalEvent:
    """Positions of the text, as retrieval reads them. The tensors stay on their device until they are read.

    Args:
        token_ids: int64 `[n]`: the tokens that stand there, `NO_TOKEN` where they do not matter.
        is_trigger: bool `[n]`: which positions count (None: all).
        top_ids: int64 `[n, likely]`: the target's most probable tokens there (None: not asked for).
        hidden_states: `[n, d]`: what the target's head was given there (None: not asked for).
        is_verified: whether the target chose the tokens. Those of a prompt have no neighbours looked up.
    """

    token_ids: torch.Tensor
    is_trigger: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    is_verified: bool = False


@dataclass(frozen=True)
class Retrieved:
    """What one position of an event brought.

    Args:
        trigger: the token at whose position it was.
        semantic: what the target found likely there, and what is near to it.
        following: what most often follows these.
    """

    trigger: int
    semantic: tuple[int, ...]
    following: tuple[int, ...]


class Retriever:
    """Fills a cache of tokens. Used by one thread at a time.

    Args:
        cache: what holds them.
        is_wanted: bool `[V + 1]`, on the CPU: which ids may come in, that is those that the drafter can score and the
            core does not hold; the last entry, False, stands for all ids past the vocabulary.
        semantic: what finds tokens that are near: an index asked with hidden states, a table asked with tokens, or
            None where the target's own likeliest tokens are all.
        neighbours: how many tokens of an index.
        graph: what finds tokens that follow (None: nothing).
        successors: how many follow each of the others.
    """

    def __init__(
        self,
        cache: TokenCache,
        is_wanted: torch.Tensor,
        semantic: SemanticIndex | TokenNeighbours | None,
        neighbours: int,
        graph: CooccurrenceGraph | None,
        successors: int,
    ):
        self._cache = cache
        self._is_wanted = is_wanted
        self._semantic = semantic
        self._neighbours = neighbours
        self._graph = graph
        self._successors = successors

    def retrieve(self, event: RetrievalEvent) -> dict[int, int]:
        """Take in an event. Returns the slots of the cache that hold another token now, with these tokens."""
        token_ids = event.token_ids.tolist()
        self._cache.advance(len(token_ids) if event.is_verified else 0)
        self._cache.refresh(token_ids)
        for one in self._found(event):
            self._cache.add(self._wanted([one.trigger, *one.semantic, *one.following]))
        return self._cache.take_changes()

    def take_semantic(self, semantic: SemanticIndex | TokenNeighbours | None) -> None:
        """Take up what is made of other weights."""
        self._semantic = semantic

    def _found(self, event: RetrievalEvent) -> list[Retrieved]:
        """What each position that counts brings, in their order."""
        chosen = torch.arange(event.token_ids.shape[0])
        if event.is_trigger is not None:
            chosen = event.is_trigger.cpu().nonzero().squeeze(1)
        if not chosen.numel():
            return []
        seeds = self._seeds(event, chosen)
        token_ids = event.token_ids.cpu()[chosen].tolist()
        return [
            Retrieved(token_id, tuple(row), self._following(row if token_id == NO_TOKEN else [token_id, *row]))
            for token_id, row in zip(token_ids, seeds.tolist(), strict=True)
        ]

    def _seeds(self, event: RetrievalEvent, chosen: torch.Tensor) -> torch.Tensor:
        """int64 `[m, s]`: the target's likeliest tokens at the chosen positions, and those that are near."""
        found = [torch.zeros(chosen.shape[0], 0, dtype=torch.int64)]
        if event.top_ids is not None:
            found.append(event.top_ids.cpu()[chosen])
        if isinstance(self._semantic, SemanticIndex) and event.hidden_states is not None:
            asked = event.hidden_states.index_select(0, chosen.to(event.hidden_states.device))
            found.append(self._semantic.search(asked, self._neighbours))
        elif isinstance(self._semantic, TokenNeighbours) and event.is_verified:
            found.append(self._semantic.of(event.token_ids.cpu()[chosen])[:, : self._neighbours])
        return torch.cat(found, dim=1)

    def _following(self, token_ids: list[int]) -> tuple[int, ...]:
        """What follows tokens most often, each once."""
        if self._graph is None:
            return ()
        found, _ = self._graph.successors_of(torch.tensor(token_ids), self._successors)
        return tuple(dict.fromkeys(found.flatten().tolist()))

    def _wanted(self, token_ids: list[int]) -> list[int]:
        """Those that may come in, in their order."""
        # The last entry stands for what is no token: past the vocabulary, or below 0, which finds it by itself.
        ids = torch.tensor(token_ids).clamp_max(self._is_wanted.shape[0] - 1)
        return ids[self._is_wanted[ids]].tolist()
