"""MicroSpec's in-context window: the tokens lately seen, drafted, or thought likely by the target. Nothing to train.

The state lives on the head's device in tensors of fixed size, and no operation on it waits for the device.
"""

from typing import Any, ClassVar

import torch

from ..fields import LARGEST_TOP_K, OneOf, WholeNumber
from ..protocol import Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState

EVICTIONS = ("stream", "lru")

# Up to this many stream elements are compared with each other at once; longer stretches of context are sorted in.
_LARGEST_PUSH = 512


class InContextShortlist(ShortlistPolicy):
    """A sliding window over a stream of candidate tokens (MicroSpec, section 3.2 and algorithm 1).

    The stream starts with the prompt's tokens and the target's `prompt_top_k` most probable tokens at each prompt
    position (equation 2). Every round appends the drafted tokens and the target's `verify_top_k` most probable tokens
    at each verified position (equation 3), together with the tokens that the target chose there, which in greedy
    decoding are among them anyway. The shortlist is what the window holds, made unique, and the EOS ids.

    Args:
        window: `W_max`, the size of the window. A session takes no more room than the vocabulary needs.
        prompt_top_k: `K_pre`, at most 1,024. Of a smaller vocabulary all tokens are taken.
        verify_top_k: `K_ver`, likewise.
        eviction: `"stream"` keeps the last `window` elements of the stream (equation 4); `"lru"` keeps the last
            `window` distinct tokens, which covers more with the same rows.
        prompt_positions: take `prompt_top_k` at the last so many prompt positions only (None: at all of them).

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
    """

    name = "in_context"
    setting_rules: ClassVar = {
        "window": WholeNumber(1),
        "prompt_top_k": WholeNumber(0, LARGEST_TOP_K),
        "verify_top_k": WholeNumber(0, LARGEST_TOP_K),
        "eviction": OneOf(EVICTIONS),
        "prompt_positions": WholeNumber(1, optional=True),
    }
    card_summary = "A sliding window over the context's tokens and what the target found likely there (MicroSpec)."
    card_tags = ("microspec",)

    def __init__(
        self,
        window: int = 3072,
        prompt_top_k: int = 3,
        verify_top_k: int = 3,
        eviction: str = "stream",
        prompt_positions: int | None = None,
    ):
        self.window = window
        self.prompt_top_k = prompt_top_k
        self.verify_top_k = verify_top_k
        self.eviction = eviction
        self.prompt_positions = prompt_positions
        self.require_settings(self.settings())

    @property
    def needs(self) -> Needs:
        return Needs(self.verify_top_k, self.prompt_top_k, self.prompt_positions)

    def start(self, vocabulary: VocabularyInfo) -> "InContextState":
        return InContextState(self.window, self.eviction == "lru", vocabulary)

    def settings(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "prompt_top_k": self.prompt_top_k,
            "verify_top_k": self.verify_top_k,
            "eviction": self.eviction,
            "prompt_positions": self.prompt_positions,
        }


class InContextState(ShortlistState):
    """The window as slots: which token each slot holds, and at which position of the stream it was last seen.

    A token is in a stream window exactly if its last position is among the last `window` ones, and in an LRU window
    exactly if fewer than `window` distinct tokens were seen since. Both never hold more than `window` tokens, nor more
    than the vocabulary has, so with a slot for each a new token always finds one by taking that which was seen longest
    ago. The EOS ids sit in slots of their own.
    """

    def __init__(self, window: int, keeps_distinct: bool, vocabulary: VocabularyInfo):
        self._window = window
        self._slot_count = min(window, vocabulary.size)
        self._keeps_distinct = keeps_distinct
        self._vocabulary = vocabulary
        device = vocabulary.device
        self._eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=device)
        # What slots hold that never held a token of the context: any id that the head has a row for.
        self._filler = self._eos.new_zeros(()) if vocabulary.draftable is None else vocabulary.draftable[0]
        self._slots = torch.cat([self._eos, self._filler.expand(self._slot_count)])
        # Stream positions count from 1; 0 marks a slot that never held a token.
        self._last_seen = torch.zeros(self._slot_count, dtype=torch.int64, device=device)
        self._length = torch.zeros((), dtype=torch.int64, device=device)
        # Which slot a token was last put into. The entry past the vocabulary takes what must not be remembered.
        self._slot_of = torch.zeros(vocabulary.size + 1, dtype=torch.int64, device=device)
        self._version = 0
        self._shortlist = self._make_shortlist(replaced=None)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self._shortlist

    def restart(self) -> None:
        # Slots keep their ids, so that a packed copy of their rows stays right; they just do not count any more.
        self._last_seen = torch.zeros_like(self._last_seen)
        self._length = torch.zeros_like(self._length)
        self._shortlist = self._make_shortlist(self._shortlist.replaced)

    def observe_prompt(self, prompt: Prompt) -> None:
        self._extend(prompt.token_ids, [] if prompt.top_ids is None else [prompt.top_ids.flatten()])

    def observe(self, verdict: Verdict) -> None:
        likely = verdict.verified
        if verdict.top_ids is not None:
            likely = torch.cat([verdict.top_ids.flatten(), verdict.verified])
        self._extend(verdict.drafted[:0], [verdict.drafted, likely])

    def _extend(self, sequence: torch.Tensor, sets: list[torch.Tensor]) -> None:
        """Append a sequence, then sets, to the stream. Of equal tokens in a set the last one counts."""
        ids = torch.cat([sequence, *sets])
        if ids.shape[0] == 0:
            return
        admissible = self._admissible(ids)
        all_count = torch.ones_like(sequence, dtype=torch.bool)
        counts = admissible & torch.cat([all_count, *(_is_last_occurrence(part) for part in sets)])
        positions = self._length + counts.cumsum(0)
        self._length = positions[-1]
        if ids.shape[0] <= min(_LARGEST_PUSH, self._slot_count):
            replaced = self._push(ids, positions, admissible)
        else:
            replaced = None
            self._rebuild(ids, torch.where(counts, positions, 0))
        self._version += 1
        self._shortlist = self._make_shortlist(replaced)

    def _push(self, ids: torch.Tensor, positions: torch.Tensor, admissible: torch.Tensor) -> torch.Tensor:
        """Take in `n` ids seen at `positions`, no more than there are slots, and return the slots `[n]` that may have
        changed."""
        n = ids.shape[0]
        equal = ids.unsqueeze(1) == ids
        # Equal ids are handled by the last of them, so that every token touches one slot.
        last_equal = (n - 1) - equal.flip(1).to(torch.int8).argmax(1)
        leads = admissible & ~equal.triu(1).any(1)
        window_slots = self._slots[self._eos.shape[0] :]
        # Entries of tokens that were evicted stay in the table, so the slot is asked whether it still holds the id.
        entries = torch.where(admissible, ids, self._vocabulary.size)
        held_slot = self._slot_of[entries]
        is_held = (window_slots[held_slot] == ids) & (self._last_seen[held_slot] > 0) & admissible

        # A held token that is seen again becomes recent first, so that its companions do not evict it.
        seen = torch.where(leads & is_held, positions, 0)
        self._last_seen = self._last_seen.scatter_reduce(0, held_slot, seen, "amax")
        oldest = self._last_seen.topk(n, largest=False).indices
        is_new = leads & ~is_held
        new_slot = oldest[(is_new.cumsum(0) - 1).clamp_min(0)]
        slot = torch.where(is_held, held_slot, new_slot)[last_equal]
        # An id that is not admissible must not disturb anything: it rewrites what the last of these slots holds, which
        # is free because then not all ids are new.
        slot = torch.where(admissible, slot, oldest[-1])
        written = torch.where(admissible, ids, window_slots[slot])
        self._slots = torch.cat([self._eos, window_slots.scatter(0, slot, written)])
        self._last_seen = self._last_seen.scatter_reduce(0, slot, torch.where(is_new, positions, 0), "amax")
        self._slot_of.scatter_(0, entries, slot)
        return slot + self._eos.shape[0]

    def _rebuild(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Take in any number of ids by sorting them together with what the window holds. Position 0 does not count."""
        ids = torch.cat([self._slots[self._eos.shape[0] :], ids])
        last_seen = torch.cat([self._last_seen, positions])
        latest = torch.where(_is_latest(ids, last_seen), last_seen, 0).topk(self._slot_count)
        self._last_seen = latest.values
        self._slots = torch.cat([self._eos, torch.where(latest.values > 0, ids[latest.indices], self._filler)])
        entries = torch.where(latest.values > 0, ids[latest.indices], self._vocabulary.size)
        self._slot_of.scatter_(0, entries, torch.arange(self._slot_count, device=entries.device))

    def _admissible(self, ids: torch.Tensor) -> torch.Tensor:
        """bool: ids that the drafter can score and that do not sit in the EOS slots already."""
        is_eos = (ids.unsqueeze(1) == self._eos).any(1)
        return self._vocabulary.can_draft(ids) & ~is_eos

    def _make_shortlist(self, replaced: torch.Tensor | None) -> Shortlist:
        oldest_kept = 0 if self._keeps_distinct else (self._length - self._window).clamp_min(0)
        occupied = torch.cat([torch.ones_like(self._eos, dtype=torch.bool), self._last_seen > oldest_kept])
        return Shortlist(self._slots, self._version, occupied=occupied, replaced=replaced)


def _is_last_occurrence(ids: torch.Tensor) -> torch.Tensor:
    """bool `[n]`: no equal id comes later."""
    if ids.shape[0] <= _LARGEST_PUSH:
        return ~(ids.unsqueeze(1) == ids).triu(1).any(1)
    return _is_latest(ids, torch.arange(ids.shape[0], device=ids.device))


def _is_latest(ids: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """bool `[n]`: of the entries with this id, the one with the greatest time (the last of them on a tie)."""
    by_time = times.argsort(stable=True)
    order = by_time[ids[by_time].argsort(stable=True)]
    ordered = ids[order]
    ends_run = torch.ones_like(ordered, dtype=torch.bool)
    ends_run[:-1] = ordered[1:] != ordered[:-1]
    return torch.zeros_like(ends_run).scatter(0, order, ends_run)
