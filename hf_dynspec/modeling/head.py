"""The dynamic LM head: hidden states × shortlist → logits, without touching the rest of the vocabulary."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from ..kernels import (
    block_scores_for,
    dense_scores,
    has_dense_kernel,
    has_packed_kernel,
    lossless_dtype,
    packed_scores,
    packed_scores_for,
    prepare_kernels,
    replace_rows,
    scattered_scores_for,
)
from ..protocol import BlockLayout, BlockShortlist, JoinedShortlist, OwnClusters, Shortlist
from .parts import FORWARD_ERRORS, decoder_of, input_device, is_plain, projection_of, scale_and_cap

# Rows that are copied at a time, so that a conversion needs little temporary memory.
_COPIED_ROWS = 4096


class PackedRows:
    """A copy of the rows of a session's shortlist, updated as the shortlist changes. The buffers grow with the widest
    shortlist so far, and are kept between calls.

    Args:
        reserve: returns memory for so many rows of a head and for their bias (None: memory of its own).
    """

    def __init__(self, reserve: "_Reserve | None" = None):
        self._reserve = reserve or _memory_of_its_own
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._capacity = 0
        self._version: int | None = None

    def forget(self) -> None:
        """Pack all rows anew at the next use, as the head's rows changed."""
        self._weight = self._bias = self._version = None

    def expire(self) -> None:
        """Pack all rows anew at the next use, in the same memory."""
        self._version = None

    def update(self, head: "DynamicLMHead", shortlist: Shortlist) -> None:
        """Make row `i` the head's row for slot `i`. Does nothing if this version is packed already."""
        if shortlist.version == self._version and shortlist.slots.shape[0] == self._capacity:
            return
        changed = shortlist.replaced
        if changed is None or shortlist.version - 1 != self._version or shortlist.slots.shape[0] != self._capacity:
            self._repack(head, head.rows_of(shortlist.slots))
        else:
            rows = head.rows_of(shortlist.slots.index_select(0, changed))
            replace_rows(self._weight, changed, head.weight, rows)
            if head.bias is not None:
                replace_rows(self._bias, changed, head.bias, rows)
        self._version = shortlist.version
        self._capacity = shortlist.slots.shape[0]

    def _repack(self, head: "DynamicLMHead", rows: torch.Tensor) -> None:
        n = rows.shape[0]
        if self._weight is None or self._weight.shape[0] < n:
            self._weight, self._bias = self._reserve(head, n)
        for tensor, packed in ((head.weight, self._weight), (head.bias, self._bias)):
            if tensor is None:
                continue
            if packed.dtype == tensor.dtype:
                torch.index_select(tensor, 0, rows, out=packed[:n])
                continue
            for first in range(0, n, _COPIED_ROWS):
                some = rows[first : first + _COPIED_ROWS]
                packed[first : first + some.shape[0]] = tensor.index_select(0, some)

    def scores(self, head: "DynamicLMHead", hidden: torch.Tensor, width: int) -> torch.Tensor:
        """`[m, width]`: the scores of the first packed rows."""
        return head.packed_scores(hidden, self._weight[:width], None if self._bias is None else self._bias[:width])


# Returns memory for the weight, [n, d], and the bias, [n], of so many rows of a head.
_Reserve = Callable[["DynamicLMHead", int], tuple[torch.Tensor, torch.Tensor | None]]


def _memory_of_its_own(head: "DynamicLMHead", n: int, *texts: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = head.weight.new_empty(*texts, n, head.weight.shape[1], dtype=head.copy_dtype)
    return weight, None if head.bias is None else head.bias.new_empty(*texts, n, dtype=head.copy_dtype)


class RowsSideBySide:
    """The packed rows of several texts in one block, so that one product scores the shortlists of all.

    Args:
        count: the number of texts.

    Attributes:
        parts: the rows of each text.
    """

    def __init__(self, count: int):
        self.parts = [PackedRows(partial(self._reserve, text)) for text in range(count)]
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def _reserve(self, text: int, head: "DynamicLMHead", n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._weight is None or self._weight.shape[1] < n:
            self._weight, self._bias = _memory_of_its_own(head, n, len(self.parts))
            for other in self.parts:
                other.forget()
        return self._weight[text], None if self._bias is None else self._bias[text]

    def products(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """`[B, w, width]`: the products of hidden states, `[B, w, d]`, with the first rows of each text."""
        rows = self._weight[:, :width].transpose(1, 2)
        return hidden @ rows if self._bias is None else torch.baddbmm(self._bias[:, None, :width], hidden, rows)


class DynamicLMHead:
    """An output projection that scores a shortlist instead of the whole vocabulary. Immutable and shareable.

    Args:
        weight: `[V, d]`. Not copied and never written to.
        bias: `[V]` or None.
        logit_scale: multiplies the projection (Cohere, Granite, Falcon-H1).
        soft_cap: `c` in `c · tanh(logits / c)` (Gemma 2), or None.
        token_ids: int64 `[V]`: the token id of each row, without repeats, for heads that leave most of the vocabulary
            out (None: row `i` scores id `i`).
        clusters: the clusters that the drafter chooses its tokens from, for the policy `native` (None: it has none).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        logit_scale: float = 1.0,
        soft_cap: float | None = None,
        token_ids: torch.Tensor | None = None,
        clusters: OwnClusters | None = None,
    ):
        self.weight = weight.detach()
        self.clusters = clusters
        self.token_ids = token_ids
        self._row_of = None if token_ids is None else _inverse(token_ids)
        self.bias = None if bias is None else bias.detach()
        self.logit_scale = logit_scale
        self.soft_cap = soft_cap
        self._scattered_scores = scattered_scores_for(self.weight.device)
        self._leading: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._block_scores = block_scores_for(self.weight.device)
        # The rows in the order of a layout, while the layout is in use.
        self._blocks: weakref.WeakKeyDictionary[BlockLayout, _Blocks] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @classmethod
    def from_model(cls, model: nn.Module) -> "DynamicLMHead":
        """Wrap the output projection of a transformers causal language model, with the configuration's scale and cap.

        Raises:
            UnsupportedError: the model has no output projection with a `[V, d]` floating-point weight.
        """
        return cls(*projection_of(model), *scale_and_cap(model))

    @property
    def device(self) -> torch.device:
        """The device of the head's weights."""
        return self.weight.device

    def scores(self, hidden: torch.Tensor, shortlist: Shortlist, rows: PackedRows) -> torch.Tensor:
        """Score a shortlist.

        Args:
            hidden: `[m, d]`, of the head's dtype and on its device.
            shortlist: the shortlist, with ids below `V` in its slots.
            rows: the session's packed rows, which are updated.

        Returns:
            fp32 `[m, width]`: a logit for each scored slot, −inf if it is not occupied.
        """
        if isinstance(shortlist, JoinedShortlist):
            return torch.cat([self.scores(hidden, part, rows) for part in (shortlist.chosen, shortlist.rest)], dim=1)
        width = shortlist.width
        if shortlist.is_prefix:
            logits = self.packed_scores(hidden, *self._leading_rows(width))
        elif isinstance(shortlist, BlockShortlist):
            held = self._held_blocks(shortlist.layout)
            logits = self._block_scores(hidden, held.weight, shortlist.blocks, held.bias)
            if self.soft_cap is None:
                # Unoccupied slots are −inf already, also after a scale.
                return self._finish(logits)
        elif shortlist.is_transient:
            logits = self._scattered_scores(hidden, self.weight, self.rows_of(shortlist.scored_slots), self.bias)
        else:
            rows.update(self, shortlist)
            logits = rows.scores(self, hidden, width)
        logits = self._finish(logits.float())
        occupied = shortlist.scored_occupied
        return logits if occupied is None else torch.where(occupied, logits, -torch.inf)

    def scores_of_texts(
        self, hidden: torch.Tensor, shortlists: Sequence[Shortlist], rows: RowsSideBySide
    ) -> torch.Tensor:
        """Score packed shortlists of one width, one for each text, by one product: `[B, w, d]` → fp32 `[B, w, width]`.
        Otherwise as `scores`."""
        for part, shortlist in zip(rows.parts, shortlists, strict=True):
            part.update(self, shortlist)
        logits = self._finish(rows.products(hidden, shortlists[0].width).float())
        if shortlists[0].scored_occupied is None:
            return logits
        occupied = torch.stack([shortlist.scored_occupied for shortlist in shortlists])
        return torch.where(occupied.unsqueeze(1), logits, -torch.inf)

    def token_logits(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, projection: nn.Module | None = None
    ) -> torch.Tensor:
        """Score any tokens, with gradients; for training. Waits for the device.

        Args:
            hidden: `[m, d]`, of the head's dtype and on its device.
            token_ids: int64 `[k]`, the same for all rows, or `[m, k]`.
            projection: the module that the head was made from, if gradients are to reach it too.

        Returns:
            `[m, k]`, fp32, or fp64 for fp64 hidden states: logits, −inf for tokens without a row.
        """
        token_ids = token_ids.to(self.device)
        wanted, places = token_ids.unique(return_inverse=True)
        last = (self.weight if self._row_of is None else self._row_of).shape[0] - 1
        rows = self.rows_of(wanted.clamp_max(last))
        has_row = (rows >= 0) & (wanted <= last)
        rows = rows.clamp_min(0)
        if projection is None or is_plain(projection):
            weight, bias = (self.weight, self.bias) if projection is None else (projection.weight, projection.bias)
            rows = rows.to(weight.device)
            logits = hidden @ weight.index_select(0, rows).to(hidden).T
            logits = logits if bias is None else logits + bias.index_select(0, rows).to(hidden)
        else:
            # Only the module itself knows its rows after adapters and quantisation.
            like = next(projection.parameters())
            logits = projection(hidden.to(like) if like.is_floating_point() else hidden).index_select(1, rows)
            logits = logits.to(hidden.device)
        logits = self._finish(logits if logits.dtype == torch.float64 else logits.float())
        if not bool(has_row.all()):
            logits = logits.masked_fill(~has_row, -torch.inf)
        if token_ids.dim() > 1:
            return logits.gather(1, places)
        # Sorted ids without repeats need no copy, whose gradients would take longer than the product.
        return logits if torch.equal(wanted, token_ids) else logits[:, places]

    @cached_property
    def packed_scores(self) -> Callable[..., torch.Tensor]:
        """The fastest implementation of `reference.packed_scores` for copies of this head's rows."""
        return packed_scores_for(self.weight)

    @cached_property
    def copy_dtype(self) -> torch.dtype:
        """The dtype of copies of rows: 16 bits if that holds an fp32 head on the CPU exactly, as after loading a
        16-bit checkpoint. Scores take the time of reading the rows, and sums are in fp32 either way."""
        return lossless_dtype(self.weight, self.bias) if has_packed_kernel(self.weight) else self.weight.dtype

    def prepare(self, layout: BlockLayout | None = None) -> None:
        """Choose the dtype of copies and, for a layout, copy the rows in its order and on the CPU compile the kernels,
        which takes seconds the first time on a machine."""
        _ = self.copy_dtype
        if layout is not None:
            self._held_blocks(layout)
            if self.device.type == "cpu":
                prepare_kernels()

    def _leading_rows(self, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the first rows, or a copy of these in `copy_dtype`, which is made on first use."""
        held = self.weight, self.bias
        if self.copy_dtype != self.weight.dtype:
            with self._lock:
                if self._leading is None or self._leading[0].shape[0] < width:
                    self._leading = tuple(None if one is None else one[:width].to(self.copy_dtype) for one in held)
                held = self._leading
        weight, bias = held
        return weight[:width], None if bias is None else bias[:width]

    def _held_blocks(self, layout: BlockLayout) -> "_Blocks":
        """The rows in the order of a layout, copied on first use."""
        with self._lock:
            held = self._blocks.get(layout)
            if held is None:
                rows = self.rows_of(layout.token_ids)
                bias = self.weight.new_zeros(rows.shape) if self.bias is None else self.bias[rows]
                bias = torch.where(layout.is_token, bias, -torch.inf)
                weight = self.weight[rows].to(self.copy_dtype)
                held = self._blocks[layout] = _Blocks(weight, bias.to(self.copy_dtype))
            return held

    @property
    def can_speed_up_all_scores(self) -> bool:
        """Whether `all_scores` is faster than the module that the head was made from. The first call on a machine
        compiles it, which takes seconds."""
        return has_dense_kernel(self.weight)

    def all_scores(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Score every row: `[m, d]` → fp32 `[m, V]`. For the target's head, on the CPU. See `kernels.dense_scores`."""
        logits = dense_scores(hidden, self.weight, out)
        return self._finish((logits if self.bias is None else logits + self.bias).float())

    @classmethod
    def matching(cls, model: nn.Module) -> "DynamicLMHead | None":
        """The head with which the decoder gives the same logits as the whole model (None: there is none).

        Families differ in the operations after the decoder, and in the meaning of a setting: Granite divides by
        `logits_scaling`, HyperCLOVA multiplies.

        Raises:
            UnsupportedError: as `from_model`.
        """
        head = cls.from_model(model)
        if head.agrees_with(model):
            return head
        if head.logit_scale != 1.0:
            head = cls(head.weight, head.bias, 1 / head.logit_scale, head.soft_cap)
        return head if head.agrees_with(model) else None

    def agrees_with(self, model: nn.Module) -> bool:
        """Whether decoder and head give the same logits as the whole model, for one token."""
        token_ids = torch.tensor([[1]], device=input_device(model))
        with torch.no_grad():
            expected = model(input_ids=token_ids, use_cache=False).logits[0, -1].float()
            try:
                hidden = decoder_of(model)(input_ids=token_ids, use_cache=False)[0][0, -1:].to(self.weight)
                actual = self._finish(packed_scores(hidden, self.weight, self.bias).float())[0].to(expected.device)
            except FORWARD_ERRORS:
                return False
            # The error of rounding, also in a quantised projection. That of a missing scale, cap or transform is
            # larger.
            is_exact = self.weight.dtype == torch.float32 and is_plain(model.get_output_embeddings())
            tolerance = (1e-3 if is_exact else 5e-2) * expected.abs().max()
            return actual.shape == expected.shape and bool(((actual - expected).abs() <= tolerance).all())

    def anew(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "DynamicLMHead":
        """The same projection with other numbers."""
        return DynamicLMHead(weight, bias, self.logit_scale, self.soft_cap, self.token_ids, self.clusters)

    def rows_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of `token_ids`: their rows, which must exist."""
        return token_ids if self._row_of is None else self._row_of[token_ids]

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        return finish_logits(logits, self.logit_scale, self.soft_cap)


def finish_logits(logits: torch.Tensor, logit_scale: float, soft_cap: float | None) -> torch.Tensor:
    """Logits of any shape after a scale and, with a cap `c`, `c · tanh(logits / c)`."""
    if logit_scale != 1.0:
        logits = logits * logit_scale
    return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap


@dataclass(frozen=True, eq=False)
class _Blocks:
    """A head's rows in the order of a layout: weight `[B, T, d]`, and bias `[B, T]`, −inf for no token."""

    weight: torch.Tensor
    bias: torch.Tensor


def _inverse(token_ids: torch.Tensor) -> torch.Tensor:
    """int64 `[largest id + 1]`: the row of each token id; −1 for no row."""
    rows = token_ids.new_full((int(token_ids.max()) + 1,), -1)
    return rows.scatter(0, token_ids, torch.arange(token_ids.shape[0], device=token_ids.device))


def widen(logits: torch.Tensor, shortlist: Shortlist, into: torch.Tensor) -> None:
    """Write a shortlist's logits to their token ids.

    Args:
        logits: fp32 `[..., width]`, −inf for slots that are not occupied.
        shortlist: the shortlist.
        into: fp32 `[..., V]`, with −inf at these ids; written in place.
    """
    # The maximum, since an unoccupied slot may hold the id of an occupied one.
    into.scatter_reduce_(-1, shortlist.scored_slots.expand_as(logits), logits, "amax")
