"""Slots that hold the tokens last seen, beside others that never change: the state of in-context policies.

It lives on the head's device in tensors of fixed size, and no operation of a round waits for the device.
"""

import itertools
import threading
from collections.abc import Sequence

import torch

from ..devices import is_host_memory
from ..protocol import Prompt, Shortlist, Verdict, VocabularyInfo
from .base import ShortlistState

# What a window keeps between calls.
MEMORIES = ("call", "conversation", "assistant")


class RecentTokens:
    """The tokens that the calls of one assistant saw last: distinct ids, and nothing else of any text. Shareable
    between threads.

    Args:
        most: how many are kept; of more those that were seen longest ago go.

    Attributes:
        ids: the ids, the latest first.
    """

    def __init__(self, most: int):
        self._most = most
        # A call may be ended by the garbage collector, at any time.
        self._lock = threading.RLock()
        self.ids: tuple[int, ...] = ()

    def add(self, ids: Sequence[int]) -> None:
        """Take in ids that were seen after all others, the latest first."""
        with self._lock:
            self.ids = tuple(itertools.islice(dict.fromkeys((*ids, *self.ids)), self._most))


class RecentTokensState(ShortlistState):
    """Fixed slots, which are never moved, and after them a window: the distinct other tokens that were seen last.

    A token of a fixed slot is never taken into the window, so that no id is held twice. The tables have an entry for
    each token id, and one more, which stands for all that the window does not take. They need not be cleared when a
    token is evicted: the slot is asked whether it still holds it.

    Args:
        fixed_ids: int64 `[f]` on the head's device: what the fixed slots hold; the EOS ids are among them.
        first_ids: int64 `[n]`: what the window holds before anything is seen, and gives up from the end of this list
            on. Where these are too few, other tokens follow in the order of their ids.
        window: slots of the window. There are no more than tokens that could be in it.
        vocabulary: what the policy selects from.
        memory: one of `MEMORIES`: what is kept when another call begins.
        shared: where tokens are kept from call to call for `"assistant"`; without it that is `"conversation"`.
    """

    def __init__(
        self,
        fixed_ids: torch.Tensor,
        first_ids: torch.Tensor,
        window: int,
        vocabulary: VocabularyInfo,
        memory: str,
        shared: RecentTokens | None,
    ):
        self._nowhere, self._memory, self._shared = vocabulary.size, memory, shared
        entries = torch.arange(vocabulary.size + 1, device=vocabulary.device)
        is_taken = vocabulary.can_draft(entries).index_fill(0, fixed_ids, False)
        self._entry_of = torch.where(is_taken, entries, self._nowhere)
        taken = entries[is_taken]
        if first_ids.shape[0] < window:
            first_ids = torch.cat([first_ids, taken[~torch.isin(taken, first_ids)]])
        self._first_ids = first_ids[:window]
        self._fixed_count, self._size = fixed_ids.shape[0], self._first_ids.shape[0]
        count = self._fixed_count + self._size
        self._window_slots = entries.new_tensor(range(self._fixed_count, count))
        # One slot more than is shown, for the entry that stands for nothing.
        self._slots = torch.cat([fixed_ids, self._first_ids, entries[-1:]])
        self._slot_of = torch.full_like(entries, count)
        # The position in the stream at which each token was last seen. Positions go on from text to text; those of
        # this text are past `_text_start`, and those of this call, which others do not know of, past `_shared_end`.
        self._last_seen = torch.zeros_like(entries)
        self._position = self._text_start = self._shared_end = 0
        self._version = 0
        # Which slots changed since they were last shown.
        self._replaced: list[torch.Tensor] = []
        self._empty()
        self._shortlist = self._show(None)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        if self._replaced:
            self._version += 1
            one, *more = self._replaced
            self._shortlist = self._show(torch.cat([one, *more]) if more else one)
        return self._shortlist

    def _show(self, replaced: torch.Tensor | None) -> Shortlist:
        self._replaced = []
        return Shortlist(self._slots[:-1], self._version, occupied=self._occupied(), replaced=replaced)

    def _occupied(self) -> torch.Tensor | None:
        """bool `[C]`: the slots that count (None: all)."""
        return None

    # Between calls -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        if self._is_used and self._size:
            self._empty()
        if self._shared is not None:
            self._extend(self._window_slots.new_tensor(self._shared.ids[::-1]))
            self._shared_end = self._position

    def resume(self, token_ids: torch.Tensor) -> None:
        if self._shared is not None:
            # What this conversation saw is in there too.
            self.restart()
        elif self._memory == "call":
            self.restart()
            self._extend(token_ids)

    def end_call(self) -> None:
        if self._shared is not None:
            last_seen, order = self._last_seen.take(self._window_ids).sort(descending=True)
            self._shared.add(self._window_ids[order[last_seen > self._shared_end]].tolist())

    def _empty(self) -> None:
        """Put back what the window held at first, as seen before all that follows, the end of the list first."""
        self._is_used = False
        self._slots = torch.cat([self._slots[: self._fixed_count], self._first_ids, self._slots[-1:]])
        self._slot_of.scatter_(0, self._first_ids, self._window_slots)
        self._text_start = self._shared_end = self._position = self._position + self._size
        ages = torch.arange(self._size, device=self._slots.device)
        self._last_seen.scatter_(0, self._first_ids, self._text_start - ages)
        self._replaced = [self._window_slots]

    @property
    def _window_ids(self) -> torch.Tensor:
        """int64 `[size]`: what the window's slots hold."""
        return self._slots[self._fixed_count : -1]

    # The stream ----------------------------------------------------------------------------------------------------

    def observe_prompt(self, prompt: Prompt) -> None:
        self._extend(prompt.token_ids, *([] if prompt.top_ids is None else [prompt.top_ids.flatten()]))

    def observe(self, verdict: Verdict) -> None:
        likely = verdict.verified
        if verdict.top_ids is not None:
            likely = torch.cat([verdict.top_ids.flatten(), likely])
        self._extend(verdict.drafted[:0], verdict.drafted, likely)

    def _extend(self, sequence: torch.Tensor, *sets: torch.Tensor) -> None:
        """Append a sequence, then sets, to the stream: int64 `[n]` each. Of equal tokens the last one counts."""
        ids = torch.cat([sequence, *sets]) if sets else sequence
        if not ids.shape[0] or not self._size:
            return
        entries = self._entry_of.take(ids.clamp_max(self._nowhere))
        positions = self._positions(entries, [len(sequence), *map(len, sets)])
        self._is_used = True
        for some in zip(entries.split(self._size), positions.split(self._size), strict=True):
            self._replaced.append(self._push(*some))
        if sum(map(len, self._replaced)) > self._size:
            self._replaced = [self._window_slots]

    def _positions(self, entries: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """int64 `[n]`: the positions of these entries of the stream, which never decrease.

        Args:
            entries: int64 `[n]`: of a sequence, and of sets.
            lengths: how many are of each.
        """
        start, self._position = self._position + 1, self._position + entries.shape[0]
        return torch.arange(start, self._position + 1, device=entries.device)

    def _push(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take in `n` tokens, no more than the window has slots. Returns the slots that may have changed, at most `n`.

        All of them are then the latest, so that none evicts another: the new ones take the slots of those that were
        seen longest ago.
        """
        held_slots = self._slot_of.take(entries)
        self._last_seen.scatter_reduce_(0, entries, positions, "amax")
        # Of equal tokens the last one leads. What stands for nothing is held, by the slot past those that are shown.
        leads = self._last_seen.take(entries) == positions
        is_new = leads & (self._slots.take(held_slots) != entries)
        looks = is_host_memory(entries.device)
        if looks:
            # Most are held already, and the rows of those need not be moved.
            entries = entries[is_new]
        last_seen = self._last_seen.take(self._window_ids)
        oldest = last_seen.topk(entries.shape[0], largest=False).indices + self._fixed_count
        past_end = self._slots.shape[0] - 1
        if looks:
            self._slot_of.scatter_(0, entries, oldest)
        else:
            # The first new token takes the first of these slots, and so on; what the others find does not count.
            free = oldest.take(is_new.cumsum(0) - 1)
            self._slot_of.scatter_(0, entries.where(is_new, self._nowhere), free.where(is_new, past_end))
        slots = self._slot_of.take(entries)
        self._slots = self._slots.scatter(0, slots, entries)
        return slots.clamp_max(past_end - 1)
