"""The state of in-context policies: fixed slots, and a window of slots for the tokens seen last.

It is kept on the head's device in tensors of fixed size, and no operation of a round waits for the device.
"""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch

from ..devices import is_host_memory
from ..protocol import Prompt, Shortlist, Verdict, VocabularyInfo
from .base import ShortlistState

# How long a window keeps its tokens.
MEMORIES = ("call", "conversation", "assistant")


class RecentTokens:
    """The tokens that the calls of one assistant saw last. Shareable between threads.

    Args:
        most: the number of tokens to keep.

    Attributes:
        ids: distinct ids, the latest first; nothing else of any text is kept.
    """

    def __init__(self, most: int):
        self._most = most
        # The garbage collector may end a call at any time, also within `add`.
        self._lock = threading.RLock()
        self.ids: tuple[int, ...] = ()

    def add(self, ids: Sequence[int]) -> None:
        """Add ids that were seen after all others, the latest first."""
        with self._lock:
            self.ids = tuple(itertools.islice(dict.fromkeys((*ids, *self.ids)), self._most))


class RecentTokensState(ShortlistState):
    """Fixed slots, and after them a window: the distinct other tokens that were seen last.

    The window takes no token of a fixed slot, so that no id is held twice. The tables have an entry for each token id,
    and one more for all tokens that the window does not take. An eviction need not clear them: a table entry counts
    only if its slot still holds the token.

    Args:
        fixed_ids: int64 `[f]` on the head's device: the tokens of the fixed slots, the EOS ids among them.
        first_ids: int64 `[n]`: the window's tokens before any is seen; the last ones are replaced first. If there are
            too few, other tokens follow in the order of their ids.
        window: the most slots of the window.
        vocabulary: the tokens to select from.
        memory: one of `MEMORIES`.
        shared: the tokens of other calls, for `"assistant"`; without it that works as `"conversation"`.
    """

    carried = ("_slots", "_position", "_text_start", "_shared_end", "_shortlist")

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
        # One more slot, which is not shown, for tokens that the window does not take.
        self._slots = torch.cat([fixed_ids, self._first_ids, entries[-1:]])
        self._slot_of = torch.full_like(entries, count)
        # Each token's last position in the stream, int64 [1] like all positions. They count on from text to text: this
        # text's lie past `_text_start`, and this call's, which are not shared yet, past `_shared_end`.
        self._last_seen = torch.zeros_like(entries)
        self._position = self._text_start = self._shared_end = entries.new_zeros(1)
        self._version = 0
        # The slots that changed since they were last shown.
        self._replaced: list[torch.Tensor] = []
        self._empty()
        self._shortlist = self._show(None)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        if self._replaced:
            self._version += 1
            one, *more = self._replaced
            self._shortlist = self._show(torch.cat([one, *more]) if more else one)
        return self._shortlist

    def settle(self) -> Shortlist:
        return self.select(0, self._window_slots, self._window_slots)

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
            self._shared_end = self._position.clone()

    def resume(self, token_ids: torch.Tensor) -> None:
        if self._shared is not None:
            # The shared tokens include this conversation's.
            self.restart()
        elif self._memory == "call":
            self.restart()
            self._extend(token_ids)

    def end_call(self) -> None:
        if self._shared is not None:
            last_seen, order = self._last_seen.take(self._window_ids).sort(descending=True)
            self._shared.add(self._window_ids[order[last_seen > self._shared_end]].tolist())

    def _empty(self) -> None:
        """Put back the window's first tokens, as if seen before this text, from the last to the first."""
        self._is_used = False
        self._slots = torch.cat([self._slots[: self._fixed_count], self._first_ids, self._slots[-1:]])
        self._slot_of.scatter_(0, self._first_ids, self._window_slots)
        self._position = self._position + self._size
        # Not one tensor, as each is replaced at another time.
        self._text_start, self._shared_end = self._position.clone(), self._position.clone()
        ages = torch.arange(self._size, device=self._slots.device)
        self._last_seen.scatter_(0, self._first_ids, self._text_start - ages)
        self._replaced = [self._window_slots]

    @property
    def _window_ids(self) -> torch.Tensor:
        """int64 `[size]`: the tokens of the window's slots."""
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
        """Append a sequence, then sets, to the stream: int64 `[n]` each. The last of equal tokens counts."""
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
        """int64 `[n]`, never decreasing: the positions of entries `[n]` of a sequence and of sets of these lengths."""
        positions = self._position + torch.arange(1, entries.shape[0] + 1, device=entries.device)
        self._position = positions[-1:]
        return positions

    def _push(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Take in `n` tokens, at most one for each slot of the window. Returns the up to `n` slots that may have
        changed.

        These tokens are then the latest, so none evicts another: new ones take the slots used longest ago.
        """
        if is_host_memory(entries.device):
            return self._push_on_host(entries.numpy(), positions.numpy())
        held_slots = self._slot_of.take(entries)
        self._last_seen.scatter_reduce_(0, entries, positions, "amax")
        # The last of equal tokens leads. Tokens that the window does not take count as held, by the slot not shown.
        leads = self._last_seen.take(entries) == positions
        is_new = leads & (self._slots.take(held_slots) != entries)
        last_seen = self._last_seen.take(self._window_ids)
        oldest = last_seen.topk(entries.shape[0], largest=False).indices + self._fixed_count
        past_end = self._slots.shape[0] - 1
        # The n-th new token takes the n-th of these slots. The entries of the other tokens do not count.
        free = oldest.take(is_new.cumsum(0) - 1)
        self._slot_of.scatter_(0, entries.where(is_new, self._nowhere), free.where(is_new, past_end))
        slots = self._slot_of.take(entries)
        self._slots = self._slots.scatter(0, slots, entries)
        return slots.clamp_max(past_end - 1)

    def _push_on_host(self, entries: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The same by numpy, which begins an operation several times as fast as torch. Most tokens are held already,
        and their rows need not move."""
        shown = self._slots.clone()
        slots, slot_of, last_seen = shown.numpy(), self._slot_of.numpy(), self._last_seen.numpy()
        last_seen[entries] = positions
        new = entries[(last_seen[entries] == positions) & (slots[slot_of[entries]] != entries)]
        oldest = last_seen[slots[self._fixed_count : -1]].argpartition(len(new) - 1)[: len(new)] + self._fixed_count
        # A token may be new twice, and then takes one of two slots.
        slot_of[new] = oldest
        taken = slot_of[new]
        slots[taken] = new
        self._slots = shown
        return torch.from_numpy(taken)
