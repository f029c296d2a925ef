"""Which retrieved tokens stay: those that were worth most lately (LRFU), those used last (LRU), or an adaptive
replacement cache (ARC).

All live on the CPU and hold a few hundred plain numbers. What they hold lies in slots that keep their place, so that
a packed copy of the head's rows changes only where a token was evicted for another. They are filled in their order.
"""

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


class TokenCache(ABC):
    """At most `capacity` token ids, each in a slot of its own.

    Args:
        capacity: how many token ids.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int:
        """How many token ids are here."""

    @abstractmethod
    def __contains__(self, token_id: int) -> bool:
        """Whether a token id is here."""

    @abstractmethod
    def fill(self, token_ids: Sequence[int]) -> None:
        """Take in the first tokens of an empty cache, each in the slot of its own number, as if they had been asked
        for long ago, the last of them first. That is no change.

        Args:
            token_ids: distinct ids, at most as many as there are places.
        """

    def advance(self, steps: int = 1) -> None:  # noqa: B027
        """Let decoding steps go by."""

    @abstractmethod
    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        """Take in events, one after the other. Tokens that are here already are refreshed.

        Args:
            token_ids: int64 `[n]`, not negative: those of one event after those of another, the most wanted of each
                first.
            weights: `[n]`: what each mention is worth, for caches that weigh (None: little, and alike).
            counts: how many of the tokens are of each event (None: all of one).
        """

    @abstractmethod
    def refresh(self, token_ids: Iterable[int]) -> None:
        """Note that tokens were of use. Those that are not here are passed over."""

    @abstractmethod
    def take_changes(self) -> dict[int, int]:
        """The slots whose token is another than when this was last asked, with the tokens that they hold now."""

    @abstractmethod
    def slots(self) -> dict[int, int]:
        """The token id in each slot that holds one."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens."""


class RecencyFrequencyCache(TokenCache):
    """LRFU (Lee et al., 2001, "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently
    Used Policies"): the tokens whose mentions are worth most together, where what a mention is worth fades from event
    to event. Here a mention is worth the token's probability, so that a position's many unlikely tokens do not drive
    out the likely ones of the positions before. What is held changes when the changes are taken.

    In arrays over the vocabulary, as every position mentions hundreds of tokens, and whoever generates waits for the
    interpreter while another thread of it walks along them.

    Args:
        capacity: as for every cache.
        decay: what is left of a mention's worth after an event whose tokens had weights.
        unweighted: what a mention without a weight is worth.
    """

    # At most so much are the first tokens worth, and how much less is rescaled to stay within floats.
    _WORTH_OF_FIRST, _LARGEST_UNIT = 1e-12, 1e100

    def __init__(self, capacity: int, decay: float = 0.95, unweighted: float = 0.1):
        super().__init__(capacity)
        self._decay, self._unweighted = decay, unweighted
        # The token of each slot, of which the first so many hold one.
        self._tokens, self._count = np.zeros(capacity, dtype=np.int64), 0
        # By token id: what mentions are worth together, in units that grow, in place of all of them fading; and
        # whether the token is held.
        self._worth, self._is_held = np.zeros(0), np.zeros(0, dtype=bool)
        self._unit = 1.0
        # Since the changes were taken.
        self._mentioned: list[np.ndarray] = []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, token_id: int) -> bool:
        return token_id < len(self._is_held) and bool(self._is_held[token_id])

    def fill(self, token_ids: Sequence[int]) -> None:
        first = np.asarray(token_ids, dtype=np.int64)
        self._make_room(first)
        self._tokens[: len(first)], self._count = first, len(first)
        self._is_held[first] = True
        self._worth[first] = np.linspace(self._WORTH_OF_FIRST, 0.0, len(first))

    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        token_ids = np.asarray(token_ids, dtype=np.int64)
        self._make_room(token_ids)
        worth = self._unweighted * self._unit
        if weights is not None:
            counts = [len(token_ids)] if counts is None else counts
            self._fade(len(counts))
            # Of the first events as much is left as after the last one.
            left = self._unit * self._decay ** np.arange(len(counts))[::-1]
            worth = weights * np.repeat(left, counts)
        np.add.at(self._worth, token_ids, worth)
        self._mentioned.append(token_ids)

    def _fade(self, events: int) -> None:
        """Let all that was mentioned fade, by a larger unit."""
        left = self._decay**events
        if self._unit > left * self._LARGEST_UNIT:
            self._worth *= left / self._unit
            self._unit = 1.0
        else:
            self._unit /= left

    def _make_room(self, token_ids: np.ndarray) -> None:
        """Let the arrays reach to these tokens."""
        size = int(token_ids.max(initial=-1)) + 1
        if size > len(self._worth):
            more = max(size, 2 * len(self._worth)) - len(self._worth)
            self._worth, self._is_held = np.pad(self._worth, (0, more)), np.pad(self._is_held, (0, more))

    def refresh(self, token_ids: Iterable[int]) -> None:
        # Of those that were of use the same is said by the event that brings them.
        pass

    def take_changes(self) -> dict[int, int]:
        if not self._mentioned:
            return {}
        # Whoever is neither held nor mentioned was worth less before, and has faded as much as all.
        mentioned = np.concatenate(self._mentioned)
        self._mentioned.clear()
        new = np.unique(mentioned[~self._is_held[mentioned]])
        held = self._tokens[: self._count]
        goes = np.zeros(len(held) + len(new), dtype=bool)
        surplus = len(goes) - self.capacity
        if surplus > 0:
            goes[np.argpartition(self._worth[np.concatenate([held, new])], surplus - 1)[:surplus]] = True
        new = new[~goes[len(held) :]]
        (slots,) = goes[: len(held)].nonzero()
        self._is_held[held[slots]] = False
        slots = np.concatenate([slots, np.arange(len(held), len(held) + len(new) - len(slots))])
        self._count = max(len(held), int(slots.max(initial=-1)) + 1)
        self._tokens[slots] = new
        self._is_held[new] = True
        return dict(zip(slots.tolist(), new.tolist(), strict=True))

    def slots(self) -> dict[int, int]:
        return dict(enumerate(self._tokens[: self._count].tolist()))

    def clear(self) -> None:
        self._worth.fill(0.0)
        self._is_held.fill(False)
        self._mentioned.clear()
        self._count, self._unit = 0, 1.0


class GuardedCache(TokenCache):
    """A cache with three safeguards against thrashing (EvoSpec, appendix A.3): an event counts each token once,
    inserts at most `most_insertions`, and evicts nothing that came in less than `residency` decoding steps ago; what
    then finds no place is left out.

    Args:
        capacity: as for every cache.
        most_insertions: how many an event may bring in (None: all).
        residency: decoding steps that a token stays for at least.
    """

    def __init__(self, capacity: int, most_insertions: int | None = 32, residency: int = 8):
        super().__init__(capacity)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._changed: dict[int, int] = {}
        self._most_insertions = most_insertions
        self._residency = residency
        self._step = 0
        self._inserted_at: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._slot_of

    def fill(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._place(token_id)
        self._changed.clear()
        self._inserted_at.update(dict.fromkeys(token_ids, self._step - self._residency))

    def advance(self, steps: int = 1) -> None:
        self._step += steps

    def add(
        self, token_ids: np.ndarray, weights: np.ndarray | None = None, counts: Sequence[int] | None = None
    ) -> None:
        token_ids = np.asarray(token_ids).tolist()
        remaining = iter(token_ids)
        for count in [len(token_ids)] if counts is None else counts:
            self._add_event(dict.fromkeys(itertools.islice(remaining, count)))

    def _add_event(self, token_ids: Iterable[int]) -> None:
        """Take in the distinct tokens of one event."""
        inserted = 0
        for token_id in token_ids:
            if token_id in self._slot_of:
                self._hit(token_id)
            elif self._most_insertions is None or inserted < self._most_insertions:
                inserted += self._insert(token_id)
        self._end_event()

    def refresh(self, token_ids: Iterable[int]) -> None:
        for token_id in dict.fromkeys(token_ids):
            if token_id in self._slot_of:
                self._hit(token_id)

    def take_changes(self) -> dict[int, int]:
        changed, self._changed = self._changed, {}
        return changed

    def slots(self) -> dict[int, int]:
        return {slot: token_id for token_id, slot in self._slot_of.items()}

    @abstractmethod
    def clear(self) -> None:
        self._slot_of.clear()
        self._free = list(range(self.capacity - 1, -1, -1))
        self._changed.clear()
        self._step = 0
        self._inserted_at.clear()

    @abstractmethod
    def _hit(self, token_id: int) -> None:
        """A token that is here is asked for again."""

    @abstractmethod
    def _insert(self, token_id: int) -> bool:
        """Bring in a token that is not here. Returns whether there was a place."""

    def _end_event(self) -> None:
        """All tokens of an event were taken in."""

    def _oldest_free_to_go(self, tokens: Iterable[int]) -> int | None:
        """The first of these that has been here for long enough."""
        newest = self._step - self._residency
        return next((one for one in tokens if self._inserted_at[one] <= newest), None)

    def _place(self, token_id: int) -> None:
        slot = self._free.pop()
        self._slot_of[token_id] = slot
        self._changed[slot] = token_id
        self._inserted_at[token_id] = self._step

    def _evict(self, token_id: int) -> None:
        self._free.append(self._slot_of.pop(token_id))
        del self._inserted_at[token_id]


class LeastRecentlyUsedCache(GuardedCache):
    """Evicts the token that was asked for longest ago."""

    def __init__(self, capacity: int, most_insertions: int | None = 32, residency: int = 8):
        super().__init__(capacity, most_insertions, residency)
        self._recent: OrderedDict[int, None] = OrderedDict()

    def fill(self, token_ids: Sequence[int]) -> None:
        super().fill(token_ids)
        self._recent.update(dict.fromkeys(reversed(token_ids)))

    def clear(self) -> None:
        super().clear()
        self._recent.clear()

    def _hit(self, token_id: int) -> None:
        self._recent.move_to_end(token_id)

    def _insert(self, token_id: int) -> bool:
        if len(self._recent) == self.capacity:
            evicted = self._oldest_free_to_go(self._recent)
            if evicted is None:
                return False
            del self._recent[evicted]
            self._evict(evicted)
        self._recent[token_id] = None
        self._place(token_id)
        return True


class AdaptiveReplacementCache(GuardedCache):
    """ARC (Megiddo and Modha, 2003) as EvoSpec uses it (appendix A.3): `T1` holds tokens asked for once lately, `T2`
    those asked for again, and two ghost lists remember which tokens were evicted from either. A ghost that comes back
    shifts the target size of `T1`: the list that it was evicted from was too small.

    Where a token must go, it goes from `T1` if that is larger than its target, and otherwise from `T2`; where
    residency keeps all of that list, from the other one.

    Args:
        capacity: as for every cache.
        ghosts: how many evicted tokens each of the two lists remembers (None: as many as there is room for).
        warm_up: the target size stays at half the capacity for so many events.
        most_insertions: as for every guarded cache.
        residency: likewise.
    """

    def __init__(
        self,
        capacity: int,
        ghosts: int | None = None,
        warm_up: int = 50,
        most_insertions: int | None = 32,
        residency: int = 8,
    ):
        super().__init__(capacity, most_insertions, residency)
        self._ghosts = capacity if ghosts is None else ghosts
        self._warm_up = warm_up
        # Least recently asked for first.
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts_of_once: OrderedDict[int, None] = OrderedDict()
        self._ghosts_of_again: OrderedDict[int, None] = OrderedDict()
        self._events = 0
        self.target_size = capacity / 2

    def fill(self, token_ids: Sequence[int]) -> None:
        super().fill(token_ids)
        self._once.update(dict.fromkeys(reversed(token_ids)))

    def clear(self) -> None:
        super().clear()
        for tokens in (self._once, self._again, self._ghosts_of_once, self._ghosts_of_again):
            tokens.clear()
        self._events = 0
        self.target_size = self.capacity / 2

    def _end_event(self) -> None:
        self._events += 1

    def _hit(self, token_id: int) -> None:
        self._once.pop(token_id, None)
        self._again[token_id] = None
        self._again.move_to_end(token_id)

    def _insert(self, token_id: int) -> bool:
        is_ghost_of_once, is_ghost_of_again = token_id in self._ghosts_of_once, token_id in self._ghosts_of_again
        self._adapt(is_ghost_of_once, is_ghost_of_again)
        if len(self) == self.capacity and not self._replace():
            return False
        self._ghosts_of_once.pop(token_id, None)
        self._ghosts_of_again.pop(token_id, None)
        into = self._again if is_ghost_of_once or is_ghost_of_again else self._once
        into[token_id] = None
        self._place(token_id)
        return True

    def _adapt(self, is_ghost_of_once: bool, is_ghost_of_again: bool) -> None:
        """Shift the target size of `T1` where a ghost came back."""
        if self._events < self._warm_up:
            return
        once, again = len(self._ghosts_of_once), len(self._ghosts_of_again)
        if is_ghost_of_once:
            self.target_size = min(self.target_size + max(again / once, 1), self.capacity)
        elif is_ghost_of_again:
            self.target_size = max(self.target_size - max(once / again, 1), 0)

    def _replace(self) -> bool:
        """Evict a token. Returns whether one could go."""
        lists = [(self._once, self._ghosts_of_once), (self._again, self._ghosts_of_again)]
        if not len(self._once) > self.target_size:
            lists.reverse()
        for tokens, ghosts in lists:
            evicted = self._oldest_free_to_go(tokens)
            if evicted is not None:
                del tokens[evicted]
                self._evict(evicted)
                ghosts[evicted] = None
                if len(ghosts) > self._ghosts:
                    ghosts.popitem(last=False)
                return True
        return False


CACHES = {"lrfu": RecencyFrequencyCache, "lru": LeastRecentlyUsedCache, "arc": AdaptiveReplacementCache}
