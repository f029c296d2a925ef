"""What policies select: slots of token ids, and whole blocks of them."""

import functools
from dataclasses import dataclass

import torch

from ..devices import is_host_memory


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Token ids in blocks of `T`, so that a head can hold its rows in the same order and score whole blocks.

    Args:
        token_ids: int64 `[B, T]` on the head's device.
        is_token: bool `[B, T]`: which of them count; the others hold any valid id.
        vocabulary_size: all ids are below it.
    """

    token_ids: torch.Tensor
    is_token: torch.Tensor
    vocabulary_size: int

    @functools.cached_property
    def sizes(self) -> torch.Tensor:
        """int64 `[B + 1]`: how many tokens each block holds; the last entry, 0, is what −1 finds, for no block."""
        return torch.nn.functional.pad(self.is_token.sum(1), (0, 1))

    @functools.cached_property
    def _block_of(self) -> torch.Tensor:
        """int64 `[vocabulary_size + 1]`: the block of each token id; the last entry is for ids past the vocabulary."""
        blocks = torch.arange(self.token_ids.shape[0], device=self.token_ids.device).unsqueeze(1)
        held = torch.where(self.is_token, blocks, -2)
        table = blocks.new_full((self.vocabulary_size + 1,), -2)
        return table.scatter_reduce_(0, self.token_ids.flatten(), held.flatten(), "amax")

    def block_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of `token_ids`: the block that holds each of them, −2 where none does."""
        # Unlike an index, which would read a single number back.
        return self._block_of.take(token_ids.to(torch.int64).clamp_max(self.vocabulary_size))


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The token ids that the drafter may propose at one draft step: the active vocabulary `V_t`.

    Slots keep their place while a shortlist evolves, so that a packed copy of the head's rows is updated row by row.

    Args:
        slots: int64 `[C]` on the head's device. Slot `i` holds a token id below `VocabularyInfo.size`.
        version: grows whenever `slots` may have changed, and never otherwise than with new context; it never shrinks.
        size: the first `size` slots are scored (None: all `C`). Nested shortlists share `slots` and differ in `size`.
        occupied: bool `[C]`, the slots that count (None: all). The ids of occupied slots are unique; an unoccupied
            slot holds any valid id and its logit is −inf.
        replaced: int64 `[r]`, the only slots that may differ from those of version `version - 1` (None: all may).
        is_prefix: slot `i` is row `i` of the head, so that its own leading rows can be scored where they lie.
        is_transient: made for one draft step and not worth a packed copy, so that its rows are scored where they lie.
    """

    slots: torch.Tensor
    version: int
    size: int | None = None
    occupied: torch.Tensor | None = None
    replaced: torch.Tensor | None = None
    is_prefix: bool = False
    is_transient: bool = False

    @property
    def steady(self) -> "Shortlist | None":
        """What of it was not made for one draft step alone; None where nothing is."""
        return None if self.is_transient else self

    @property
    def width(self) -> int:
        """Number of slots that are scored."""
        return self.slots.shape[0] if self.size is None else self.size

    @property
    def scored_slots(self) -> torch.Tensor:
        """int64 `[width]`: the ids of the slots that are scored, occupied or not."""
        return self.slots[: self.width]

    @property
    def scored_occupied(self) -> torch.Tensor | None:
        """bool `[width]`, or None where every slot counts."""
        return None if self.occupied is None else self.occupied[: self.width]

    @property
    def count(self) -> int | torch.Tensor:
        """How many token ids `V_t` has. A tensor, int64 `[]`, where the device knows it alone."""
        return self.width if self.occupied is None else self.scored_occupied.sum()

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of `columns`: the ids of these of the scored slots."""
        return self.slots.take(columns)

    def ids(self) -> torch.Tensor:
        """int64 `[n]`: the unique token ids of `V_t`. Has a data-dependent shape, so it waits for the device."""
        occupied = self.scored_occupied
        return self.scored_slots if occupied is None else self.scored_slots[occupied]

    def reachable_ids(self) -> torch.Tensor:
        """int64 `[n]`: the unique token ids that a step's choice could have brought as well, as far as that is known,
        and otherwise those of `V_t`. May wait for the device."""
        return self.ids()

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool, of the shape of `token_ids`: which of these ids are in `V_t`. Does not wait for the device."""
        matches = token_ids.unsqueeze(-1) == self.scored_slots
        occupied = self.scored_occupied
        return (matches if occupied is None else matches & occupied).any(-1)


class BlockShortlist(Shortlist):
    """The tokens of whole blocks, one block after another, so that the head can score them from a copy of its rows in
    the same order. Its slots are looked up when they are first asked for, and most draft steps never ask.

    Args:
        blocks: int64 `[n]`: which blocks of the layout; −1 for a block without tokens.
        layout: the blocks of `T` slots. Shortlists of one policy share it.
        version: as for every shortlist.
    """

    is_transient = True

    def __init__(self, blocks: torch.Tensor, layout: BlockLayout, version: int):
        # Past the dataclass's own, which would want the slots.
        vars(self).update(blocks=blocks, layout=layout, version=version)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        return self.layout.token_ids.index_select(0, self.blocks.clamp_min(0)).flatten()

    @functools.cached_property
    def occupied(self) -> torch.Tensor:
        is_token = self.layout.is_token.index_select(0, self.blocks.clamp_min(0))
        return (is_token & (self.blocks >= 0).unsqueeze(1)).flatten()

    @property
    def width(self) -> int:
        return self.blocks.shape[0] * self.layout.token_ids.shape[1]

    @property
    def count(self) -> torch.Tensor:
        return self.layout.sizes[self.blocks].sum()

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        block_rows = self.layout.token_ids.shape[1]
        if columns.numel() == 1 and is_host_memory(columns.device):
            # A chain's only token: reading numbers takes less time than computing with tensors of one.
            place, row = divmod(columns.item(), block_rows)
            return self.layout.token_ids[self.blocks[place].item(), row].view(columns.shape)
        places = columns // block_rows
        # From where the block lies in the shortlist to where it lies in the layout; the block −1 finds the last one.
        return self.layout.token_ids.take(columns.add(self.blocks.take(places) - places, alpha=block_rows))

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Two entries more than there are blocks: −1, for no block, finds the last one, and −2, of ids that are in no
        # block, the one before it.
        is_chosen = torch.zeros(self.layout.token_ids.shape[0] + 2, dtype=torch.bool, device=self.blocks.device)
        is_chosen.index_fill_(0, self.blocks, True)
        return is_chosen.take(self.layout.block_of(token_ids))


class JoinedShortlist(Shortlist):
    """What was chosen for one draft step, and after it the slots of another shortlist, so that the head scores each as
    it does alone.

    Args:
        chosen: blocks, or slots that are scored where they lie: a transient shortlist.
        rest: no token that was chosen is in one of its occupied slots.
        among: int64 `[n]`: what was chosen from, none of it in the rest, which is the same whatever is chosen (None:
            not known, and the rest depends on it).
    """

    is_transient = True

    def __init__(self, chosen: Shortlist, rest: Shortlist, among: torch.Tensor | None = None):
        vars(self).update(chosen=chosen, rest=rest, version=chosen.version + rest.version, among=among)

    @property
    def steady(self) -> Shortlist | None:
        return None if self.among is None else self.rest

    def reachable_ids(self) -> torch.Tensor:
        return self.ids() if self.among is None else torch.cat([self.rest.ids(), self.among])

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        return torch.cat([self.chosen.scored_slots, self.rest.scored_slots])

    @functools.cached_property
    def occupied(self) -> torch.Tensor | None:
        parts = (self.chosen, self.rest)
        occupied = [one.scored_occupied for one in parts]
        if occupied == [None, None]:
            return None
        every = (torch.ones_like(one.scored_slots, dtype=torch.bool) for one in parts)
        return torch.cat([all_count if own is None else own for own, all_count in zip(occupied, every, strict=True)])

    @property
    def width(self) -> int:
        return self.chosen.width + self.rest.width

    @property
    def count(self) -> int | torch.Tensor:
        return self.chosen.count + self.rest.count

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        if columns.numel() == 1 and is_host_memory(columns.device):
            past = columns.item() - self.chosen.width
            return self.rest.ids_at(columns - self.chosen.width) if past >= 0 else self.chosen.ids_at(columns)
        past_chosen = columns - self.chosen.width
        of_chosen = self.chosen.ids_at(columns.clamp_max(self.chosen.width - 1))
        return torch.where(past_chosen < 0, of_chosen, self.rest.ids_at(past_chosen.clamp_min(0)))

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.chosen.contains(token_ids) | self.rest.contains(token_ids)
