"""The caches of retrieved tokens: LRFU keeps the tokens with the most recent weight, ARC is the one of the paper.

Both live on the CPU. Tokens lie in slots that keep their place, so that the packed copy of the head's rows changes
only for evicted tokens. Slots are filled in their order.
"""

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class TokenCache(ABC):
    """At most `capacity` token ids, each in a slot of its own."""

    def __init__(self, capacity: int):
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int:
        """The number of cached token ids."""

    @abstractmethod
    def __contains__(self, token_id: int) -> bool:
        """Whether a token id is cached."""

    @abstractmethod
    def fill(self, token_ids: Sequence[int]) -> None:
        """Put distinct tokens into the first slots of an empty cache, as if each was used long ago, the last one
        longest ago. `take_changes` does not report them."""

    def advance(self, steps: int = 1) -> None:  # noqa: B027
        """Count decoding steps."""

    @abstractmethod
    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        """Add the tokens of events, one event after another. Cached tokens are refreshed.

        Args:
            token_ids: int64 `[n]`, not negative: the tokens of all events, the most wanted of each event first.
            weights: `[n]`: the weight of each token, such as its probability (None: small and equal).
            counts: the number of tokens of each event (None: one event).
        """

    @abstractmethod
    def refresh(self, token_ids: Iterable[int]) -> None:
        """Note that tokens were used. Others than cached ones are ignored."""

    @abstractmethod
    def take_changes(self) -> dict[int, int]:
        """The slots that changed since the last call, with their tokens."""

    @abstractmethod
    def slots(self) -> dict[int, int]:
        """The token id in each occupied slot."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all tokens."""


class RecencyFrequencyCache(TokenCache):
    """LRFU (Lee et al., 2001, "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently
    Used Policies"): keeps the tokens with the largest sum of weights, where weights decay from event to event.

    A weight is the token's probability, so that the many unlikely tokens of one position do not evict the likely ones
    of earlier positions. Tokens are evicted when the changes are taken. Sums are arrays over the vocabulary: every
    position has hundreds of tokens, and a loop over them would hold the interpreter's lock.

    Args:
        capacity: the most tokens.
        decay: the factor for earlier weights at each event that has weights.
        unweighted: the weight of a token without one.
    """

    # The largest sum of a first token; and the unit at which sums are rescaled to stay within floats.
    _FIRST, _LARGEST_UNIT = 1e-12, 1e100

    def __init__(self, capacity: int, decay: float = 0.95, unweighted: float = 0.1):
        super().__init__(capacity)
        self._decay, self._unweighted = decay, unweighted
        # The token of each slot; the first `_count` slots are occupied.
        self._tokens, self._count = np.zeros(capacity, dtype=np.int64), 0
        # By token id: the sum of weights, and whether the token is cached. The unit of weights grows instead of all
        # sums decaying.
        self._sums, self._is_cached = np.zeros(0), np.zeros(0, dtype=bool)
        self._unit = 1.0
        # Tokens that were added since the changes were taken.
        self._added: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, token_id: int) -> bool:
        return token_id < len(self._is_cached) and bool(self._is_cached[token_id])

    def fill(self, token_ids: Sequence[int]) -> None:
        first = np.asarray(token_ids, dtype=np.int64)
        self._make_room(first)
        self._tokens[: len(first)], self._count = first, len(first)
        self._is_cached[first] = True
        self._sums[first] = np.linspace(self._FIRST, 0.0, len(first))

    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        token_ids = np.asarray(token_ids, dtype=np.int64)
        self._make_room(token_ids)
        scaled = self._unweighted * self._unit
        if weights is not None:
            counts = [len(token_ids)] if counts is None else counts
            self._fade(len(counts))
            # Earlier events of this call have decayed by now.
            units = self._unit * self._decay ** np.arange(len(counts))[::-1]
            scaled = weights * np.repeat(units, counts)
        np.add.at(self._sums, token_ids, scaled)
        self._added.append(token_ids)

    def _fade(self, events: int) -> None:
        """Let all sums decay, by a larger unit."""
        left = self._decay**events
        if self._unit > left * self._LARGEST_UNIT:
            self._sums *= left / self._unit
            self._unit = 1.0
        else:
            self._unit /= left

    def _make_room(self, token_ids: np.ndarray) -> None:
        size = int(token_ids.max(initial=-1)) + 1
        if size > len(self._sums):
            more = max(size, 2 * len(self._sums)) - len(self._sums)
            self._sums, self._is_cached = np.pad(self._sums, (0, more)), np.pad(self._is_cached, (0, more))

    def refresh(self, token_ids: Iterable[int]) -> None:
        # The event of a used token adds its weight.
        pass

    def take_changes(self) -> dict[int, int]:
        if not self._added:
            return {}
        # Only added tokens can enter: all others had smaller sums before, and decayed alike.
        added = np.concatenate(self._added)
        self._added.clear()
        new = np.unique(added[~self._is_cached[added]])
        cached = self._tokens[: self._count]
        leaves = np.zeros(len(cached) + len(new), dtype=bool)
        surplus = len(leaves) - self.capacity
        if surplus > 0:
            leaves[np.argpartition(self._sums[np.concatenate([cached, new])], surplus - 1)[:surplus]] = True
        new = new[~leaves[len(cached) :]]
        (slots,) = leaves[: len(cached)].nonzero()
        self._is_cached[cached[slots]] = False
        slots = np.concatenate([slots, np.arange(len(cached), len(cached) + len(new) - len(slots))])
        self._count = max(len(cached), int(slots.max(initial=-1)) + 1)
        self._tokens[slots] = new
        self._is_cached[new] = True
        return dict(zip(slots.tolist(), new.tolist(), strict=True))

    def slots(self) -> dict[int, int]:
        return dict(enumerate(self._tokens[: self._count].tolist()))

    def clear(self) -> None:
        self._sums.fill(0.0)
        self._is_cached.fill(False)
        self._added.clear()
        self._count, self._unit = 0, 1.0


class AdaptiveReplacementCache(TokenCache):
    """ARC (Megiddo and Modha, 2003) as EvoSpec uses it (appendix A.3). `T1` holds tokens that were used once lately,
    `T2` tokens that were used again, and two ghost lists remember tokens evicted from either. A ghost that comes back
    shifts the target size of `T1` in favour of its list.

    A token is evicted from `T1` if that is larger than its target size, otherwise from `T2`; if residency protects all
    tokens of that list, from the other one. There are three safeguards against thrashing: an event counts each token
    once, brings in at most `most_insertions`, and evicts no token within `residency` decoding steps of its insertion.
    Tokens without a place are left out.

    Args:
        capacity: the most tokens.
        ghosts: the length of each ghost list (None: the capacity).
        warm_up: events in which the target size stays at half the capacity.
        most_insertions: tokens that an event may bring in (None: all).
        residency: decoding steps that a token stays at least.
    """

    def __init__(
        self,
        capacity: int,
        ghosts: int | None = None,
        warm_up: int = 50,
        most_insertions: int | None = 32,
        residency: int = 8,
    ):
        super().__init__(capacity)
        self._most_ghosts = capacity if ghosts is None else ghosts
        self._warm_up, self._most_insertions, self._residency = warm_up, most_insertions, residency
        self.clear()

    def clear(self) -> None:
        self._slot_of: dict[int, int] = {}
        self._free = list(range(self.capacity - 1, -1, -1))
        self._changed: dict[int, int] = {}
        self._inserted_at: dict[int, int] = {}
        # T1, T2 and their ghosts, the least recently used token first.
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts_of_once: OrderedDict[int, None] = OrderedDict()
        self._ghosts_of_again: OrderedDict[int, None] = OrderedDict()
        self._step = self._events = 0
        self.target_size = self.capacity / 2

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._slot_of

    def fill(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._place(token_id)
        self._changed.clear()
        self._inserted_at.update(dict.fromkeys(token_ids, self._step - self._residency))
        self._once.update(dict.fromkeys(reversed(token_ids)))

    def advance(self, steps: int = 1) -> None:
        self._step += steps

    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        token_ids = np.asarray(token_ids).tolist()
        remaining = iter(token_ids)
        for count in [len(token_ids)] if counts is None else counts:
            inserted = 0
            for token_id in dict.fromkeys(itertools.islice(remaining, count)):
                if token_id in self._slot_of:
                    self._hit(token_id)
                elif self._most_insertions is None or inserted < self._most_insertions:
                    inserted += self._insert(token_id)
            self._events += 1

    def refresh(self, token_ids: Iterable[int]) -> None:
        for token_id in dict.fromkeys(token_ids):
            if token_id in self._slot_of:
                self._hit(token_id)

    def take_changes(self) -> dict[int, int]:
        changed, self._changed = self._changed, {}
        return changed

    def slots(self) -> dict[int, int]:
        return {slot: token_id for token_id, slot in self._slot_of.items()}

    def _hit(self, token_id: int) -> None:
        self._once.pop(token_id, None)
        self._again[token_id] = None
        self._again.move_to_end(token_id)

    def _insert(self, token_id: int) -> bool:
        """Bring in a token. Returns whether there was a place."""
        is_ghost_of_once, is_ghost_of_again = token_id in self._ghosts_of_once, token_id in self._ghosts_of_again
        self._adapt(is_ghost_of_once, is_ghost_of_again)
        if len(self) == self.capacity and not self._evict():
            return False
        self._ghosts_of_once.pop(token_id, None)
        self._ghosts_of_again.pop(token_id, None)
        into = self._again if is_ghost_of_once or is_ghost_of_again else self._once
        into[token_id] = None
        self._place(token_id)
        return True

    def _place(self, token_id: int) -> None:
        slot = self._free.pop()
        self._slot_of[token_id] = slot
        self._changed[slot] = token_id
        self._inserted_at[token_id] = self._step

    def _adapt(self, is_ghost_of_once: bool, is_ghost_of_again: bool) -> None:
        """Shift the target size of `T1` if a ghost came back."""
        if self._events < self._warm_up:
            return
        once, again = len(self._ghosts_of_once), len(self._ghosts_of_again)
        if is_ghost_of_once:
            self.target_size = min(self.target_size + max(again / once, 1), self.capacity)
        elif is_ghost_of_again:
            self.target_size = max(self.target_size - max(once / again, 1), 0)

    def _evict(self) -> bool:
        """Evict a token. Returns whether residency allowed one."""
        lists = [(self._once, self._ghosts_of_once), (self._again, self._ghosts_of_again)]
        if not len(self._once) > self.target_size:
            lists.reverse()
        newest = self._step - self._residency
        for tokens, ghosts in lists:
            evicted = next((one for one in tokens if self._inserted_at[one] <= newest), None)
            if evicted is not None:
                del tokens[evicted], self._inserted_at[evicted]
                self._free.append(self._slot_of.pop(evicted))
                ghosts[evicted] = None
                if len(ghosts) > self._most_ghosts:
                    ghosts.popitem(last=False)
                return True
        return False


CACHES = {"lrfu": RecencyFrequencyCache, "arc": AdaptiveReplacementCache}
