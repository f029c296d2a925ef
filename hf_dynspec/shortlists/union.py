"""Unions of policies."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..protocol import BlockShortlist, JoinedShortlist, Shortlist, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState, start_state
from .composite import CompositePolicy
from .forwarding import ForwardingState


class UnionShortlist(CompositePolicy):
    """Every token that any of the policies selects.

    Args:
        policies: at least one policy. Put fixed ones first, so that their rows never move.

    Raises:
        ConfigurationError: no policies, too many of them, or something that is not a policy.
    """

    name = "union"
    card_summary = "Every token that any of several shortlist policies selects."
    called = "a union"

    @classmethod
    def of(cls, policies: list[ShortlistPolicy]) -> "UnionShortlist":
        return cls(*policies)

    def start(self, vocabulary: VocabularyInfo, memory: tuple[Any, ...] | None = None) -> "UnionState":
        with ExitStack() as stack:
            parts = []
            for policy, own in self.with_memories(memory):
                parts.append(start_state(policy, vocabulary, own))
                # If a later one cannot be started, nobody else can close this one.
                stack.callback(parts[-1].close)
            stack.pop_all()
        return UnionState(parts, vocabulary)


class UnionState(ForwardingState):
    """The parts' slots side by side. A slot whose id an earlier part holds too is not occupied.

    A part that chooses blocks at each draft step counts as the first, and is scored as blocks. The slots of the
    others do not change within a round.
    """

    def __init__(self, parts: list[ShortlistState], vocabulary: VocabularyInfo):
        super().__init__(*parts)
        # With two such parts, or within an inner union, blocks are taken as slots.
        of_blocks = [part for part in parts if part.layout is not None and not isinstance(part, UnionState)]
        self._of_blocks = of_blocks[0] if len(of_blocks) == 1 else None
        self.layout = None if self._of_blocks is None else self._of_blocks.layout
        self._of_slots = [part for part in parts if part is not self._of_blocks]
        if all(part.carried is not None for part in parts):
            self.carried = ("states", "_taken", "_shortlist")
        self._vocabulary = vocabulary
        self._shown: list[Shortlist | None] = [None] * len(self._of_slots)
        # taken[i]: bool [vocabulary], the ids of parts 0 … i. The last is never needed.
        self._taken: list[torch.Tensor | None] = [None] * len(self._of_slots)
        self._shortlist: Shortlist | None = None
        # The last blocks, the last slots, and both joined.
        self._joined: tuple[BlockShortlist, Shortlist, JoinedShortlist] | None = None

    @property
    def parts(self) -> tuple[ShortlistState, ...]:
        return tuple(part for state in self.states for part in state.parts)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        blocks = None if self._of_blocks is None else self._of_blocks.select(depth, token_ids, features)
        if not self._of_slots:
            return blocks
        slots = self._take([part.select(depth, token_ids, features) for part in self._of_slots])
        return slots if blocks is None else self._join(blocks, slots)

    def settle(self) -> Shortlist | None:
        settled = [part.settle() for part in self._of_slots]
        return None if not settled or None in settled else self._take(settled)

    def _take(self, shown: list[Shortlist]) -> Shortlist:
        """The union of slots, made anew if one of the parts has changed."""
        if self._shortlist is None or any(new is not old for new, old in zip(shown, self._shown, strict=True)):
            self._shortlist = self._unite(shown)
            self._shown = shown
        return self._shortlist

    def _join(self, blocks: BlockShortlist, slots: Shortlist) -> JoinedShortlist:
        if self._joined is None or self._joined[0] is not blocks or self._joined[1] is not slots:
            rest = replace(slots, occupied=_occupied(slots) & ~blocks.contains(slots.slots))
            self._joined = blocks, slots, JoinedShortlist(blocks, rest)
        return self._joined[2]

    def _unite(self, shown: list[Shortlist]) -> Shortlist:
        occupied = []
        earlier_changed = False
        for index, (new, old) in enumerate(zip(shown, self._shown, strict=True)):
            own = _occupied(new)
            if index > 0:
                own = own & ~self._taken[index - 1][new.slots]
            occupied.append(own)
            earlier_changed = earlier_changed or new is not old
            if earlier_changed and index + 1 < len(shown):
                self._taken[index] = self._mark(index, new.slots, own)
        # Rows of a transient shortlist are not packed.
        is_transient = any(part.is_transient for part in shown)
        replaced = None if is_transient else self._replaced(shown)
        unchanged = self._shortlist is not None and replaced is not None and replaced.shape[0] == 0
        return Shortlist(
            self._shortlist.slots if unchanged else torch.cat([part.slots for part in shown]),
            version=0 if self._shortlist is None else self._shortlist.version + (not unchanged),
            occupied=torch.cat(occupied),
            replaced=self._shortlist.replaced if unchanged else replaced,
            is_transient=is_transient,
        )

    def _mark(self, index: int, slots: torch.Tensor, occupied: torch.Tensor) -> torch.Tensor:
        """bool `[vocabulary]`: the ids of this part's occupied slots and of all earlier parts."""
        marks = torch.zeros(self._vocabulary.size, dtype=torch.int8, device=self._vocabulary.device)
        marks.scatter_reduce_(0, slots, occupied.to(torch.int8), "amax")
        return marks.bool() if index == 0 else marks.bool() | self._taken[index - 1]

    def _replaced(self, shown: list[Shortlist]) -> torch.Tensor | None:
        """int64 `[r]`: the slots of the union that may have changed since it was last shown (None: all)."""
        changed = []
        offset = 0
        for new, old in zip(shown, self._shown, strict=True):
            if old is None or new.slots.shape != old.slots.shape:
                return None
            if new.version == old.version + 1 and new.replaced is not None:
                changed.append(new.replaced + offset)
            elif new.version != old.version:
                changed.append(torch.arange(offset, offset + new.slots.shape[0], device=new.slots.device))
            offset += new.slots.shape[0]
        return torch.cat(changed) if changed else self._shown[0].slots[:0]


def _occupied(shortlist: Shortlist) -> torch.Tensor:
    """bool `[C]`: the slots of a part that count, given its `occupied` and its `width`."""
    occupied = shortlist.occupied
    if occupied is None:
        occupied = torch.ones_like(shortlist.slots, dtype=torch.bool)
    if shortlist.width < shortlist.slots.shape[0]:
        occupied = occupied.clone()
        occupied[shortlist.width :] = False
    return occupied
