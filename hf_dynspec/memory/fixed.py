"""Keys and values of one or more texts at addresses that stay.

A dynamic cache of transformers copies all keys at each step, and the host has to know how many there are. Here slots
are reserved for each text, the lengths lie on the device, and nothing is copied but new keys. So a round reads and
writes the same addresses every time, whatever its texts are and however much of a draft is accepted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin

from ..kernels import QueryRows
from ..modeling.masks import attention_windows


class _Reading:
    """What a forward reads. All layers of a memory have it, and not the memory itself: gigabytes in a cycle would wait
    for the garbage collector."""

    def __init__(self):
        self.rows: QueryRows | None = None
        self._places: dict[int, torch.Tensor] = {}

    def begin(self, rows: QueryRows) -> None:
        self.rows = rows
        self._places.clear()

    def places(self, size: int) -> torch.Tensor:
        """int64 `[B · q]`: where the rows lie among all slots of a layer with so many for each text."""
        if size not in self._places:
            self._places[size] = _among_all(self.rows.slots(size), size)
        return self._places[size]


def _among_all(slots: torch.Tensor, size: int) -> torch.Tensor:
    """int64 `[B · n]`, given the slots of each text, `[B, n]`."""
    return (slots + torch.arange(0, len(slots) * size, size, device=slots.device).unsqueeze(1)).flatten()


class FixedLayer(CacheLayerMixin):
    """The keys and values of one attention layer, as `RoundAttention` reads them.

    Args:
        reading: what forwards read.
        keys: `[B, S, KV, D]`.
        values: `[B, S, KV, E]`.
    """

    def __init__(self, reading: _Reading, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self._reading = reading
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write those of the rows that are being read, `[B, KV, q, …]`. Returns all of the memory."""
        places = self._reading.places(self.keys.shape[1])
        for tensor, states in ((self.keys, key_states), (self.values, value_states)):
            # Under autocast, keys and values may have two dtypes.
            tensor.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1).to(tensor.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[1], 0

    def get_seq_length(self) -> int:
        raise NotImplementedError("its decoder asks the cache for one length, and each text has its own")

    def get_max_length(self) -> int:
        return self.keys.shape[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Its tensors are there from the beginning."""


class FixedMemory(Cache):
    """A transformers cache of fixed size. A forward reads the rows that `reading` names, and writes their keys and
    values after each text. `keep` then makes some of these nodes a part of the text.

    Args:
        shapes: for each layer `KV`, `D` and `E`; None for a layer that keeps nothing or shares another one's.
        windows: for each layer, how many positions it looks back on at most, itself included (None: all).
        texts: `B`.
        capacity: positions for each text, those of nodes included.
        nodes: the most nodes that are read after a text.
        dtype: of keys and values.
        device: of keys and values.

    Attributes:
        lengths: int64 `[B]`: the tokens of each text whose keys and values count.
        capacity: as given.
        windows: as given.
        shifts: int64 `[B]`: what is added to the positions of each text after its prompt (None: nothing).
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int] | None],
        windows: Sequence[int | None],
        texts: int,
        capacity: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.capacity, self.windows, self._shapes, self._nodes = capacity, windows, shapes, nodes
        self.lengths = torch.zeros(texts, dtype=torch.int64, device=device)
        self._reading = _Reading()
        self.shifts: torch.Tensor | None = None
        # Layers of one size lie in one block, `[layers, B, S, KV, D]`, so that one gather keeps a path in all of them.
        groups: dict[tuple[int, ...], list[int]] = {}
        for layer, (shape, window) in enumerate(zip(shapes, windows, strict=True)):
            if shape is not None:
                size = capacity if window is None else min(capacity, window - 1 + nodes)
                groups.setdefault((size, *shape), []).append(layer)
        self._blocks: list[torch.Tensor] = []
        # Layers that keep nothing have a class from transformers 5.23 on. Older caches have no such layers.
        layers: list[Any] = [cache_utils.DummyLayer() if shape is None else None for shape in shapes]
        for (size, heads, d, e), group in groups.items():
            # Zeros, as plain operations multiply by 0 what no row attends to.
            blocks = [torch.zeros(len(group), texts, size, heads, n, dtype=dtype, device=device) for n in (d, e)]
            self._blocks += blocks
            for layer, keys, values in zip(group, *blocks, strict=True):
                layers[layer] = FixedLayer(self._reading, keys, values)
        super().__init__(layers=layers)

    @classmethod
    def like(cls, cache: Cache, config: Any, texts: int, capacity: int, nodes: int) -> "FixedMemory":
        """Memory for a model.

        Args:
            cache: what the model has left in a dynamic cache.
            config: the text configuration of the model.
            texts, capacity, nodes: as for the class.
        """
        windows = attention_windows(config)
        kinds = getattr(config, "layer_types", None) or [next(iter(windows))] * len(cache.layers)
        shapes = [
            None if one.keys is None else (one.keys.shape[1], one.keys.shape[3], one.values.shape[3])
            for one in cache.layers
        ]
        keys = next(one.keys for one in cache.layers if one.keys is not None)
        of_layers = [windows[kind] for kind in kinds[: len(shapes)]]
        return cls(shapes, of_layers, texts, capacity, nodes, keys.dtype, keys.device)

    def positions(self, rows: QueryRows) -> torch.Tensor:
        """int64 `[B, q]`: the positions of rows."""
        return rows.positions if self.shifts is None else rows.positions + self.shifts.unsqueeze(1)

    @property
    def nbytes(self) -> int:
        """The bytes of all keys and values."""
        return sum(block.nbytes for block in self._blocks)

    def begin(self, text: int, prompt: Cache, length: int, shift: int | None = None) -> None:
        """Take the keys and values of a prompt.

        Args:
            text: the index of the text.
            prompt: what a forward of the prompt alone has left in a dynamic cache.
            length: the tokens of the prompt.
            shift: of the positions that follow (None: no text of this memory has one).
        """
        if shift is not None:
            self.shifts = torch.zeros_like(self.lengths) if self.shifts is None else self.shifts
            self.shifts[text] = shift
        for layer, read in zip(self.layers, prompt.layers, strict=True):
            if layer.keys is not None:
                size = layer.keys.shape[1]
                # A layer with a window may hold its last positions alone, and needs no others.
                count = min(read.keys.shape[2], size)
                slots = torch.arange(length - count, length, device=read.keys.device) % size
                for mine, theirs in ((layer.keys, read.keys), (layer.values, read.values)):
                    last = theirs[0, :, theirs.shape[2] - count :].to(mine.dtype)
                    mine[text].index_copy_(0, slots, last.transpose(0, 1))
        self.lengths[text] = length

    def of_text(self, text: int, count: int) -> list[torch.Tensor]:
        """The keys and values `[1, KV, count, …]` of a text's first positions, in turn for each layer. No layer has a
        window."""
        both = (tensor for layer in self.layers for tensor in (layer.keys, layer.values))
        return [tensor[text : text + 1, :count].transpose(1, 2) for tensor in both]

    def reading(self, rows: QueryRows) -> None:
        """Say what the next forward reads. `rows.lengths` are this memory's."""
        self._reading.begin(rows)

    @property
    def rows(self) -> QueryRows:
        """What the current forward reads."""
        return self._reading.rows

    def keep(self, count: torch.Tensor, path: torch.Tensor | None = None) -> None:
        """Make nodes a part of the text.

        Args:
            count: int64 `[B]`: how many nodes of each text to keep.
            path: int64 `[B, m]`: the nodes to keep, ascending; those past `count` may be any (None: the first ones).
        """
        if path is not None:
            first = self.lengths.unsqueeze(1)
            order = torch.arange(path.shape[1], device=path.device)
            for block in self._blocks:
                size = block.shape[2]
                slots = block.flatten(1, 2)
                kept = slots.index_select(1, _among_all((first + path) % size, size))
                slots.index_copy_(1, _among_all((first + order) % size, size), kept)
        self.lengths += count

    def copy(self, texts: torch.Tensor, capacity: int) -> "FixedMemory":
        """Memory of at least this capacity with some of the texts.

        Args:
            texts: int64 `[b]`: their indices.
            capacity: as for the class.
        """
        keys = self._blocks[0]
        copied = FixedMemory(self._shapes, self.windows, len(texts), capacity, self._nodes, keys.dtype, keys.device)
        for mine, theirs in zip(copied.layers, self.layers, strict=True):
            if theirs.keys is not None:
                # No text has passed the end of memory that grows, so its slots stay the same.
                mine.keys[:, : theirs.keys.shape[1]] = theirs.keys.index_select(0, texts)
                mine.values[:, : theirs.values.shape[1]] = theirs.values.index_select(0, texts)
        copied.lengths.copy_(self.lengths.index_select(0, texts))
        copied.shifts = None if self.shifts is None else self.shifts.index_select(0, texts)
        return copied
