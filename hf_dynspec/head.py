"""The dynamic LM head: hidden states × shortlist → logits, without touching the rest of the vocabulary."""

import torch
from torch import nn

from .errors import UnsupportedError
from .kernels import packed_scores, replace_rows, scattered_scores_for
from .protocol import Shortlist

# Where configurations of transformers' model families write what happens to the logits after the projection.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


class PackedRows:
    """The rows of one shortlist, packed side by side for one session and updated as the shortlist changes.

    The buffers are as large as the widest shortlist seen so far, and are kept from one call to the next.
    """

    def __init__(self):
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._capacity = 0
        self._version: int | None = None

    def update(self, weight: torch.Tensor, bias: torch.Tensor | None, shortlist: Shortlist) -> None:
        """Make row `i` the head's row for slot `i`. Does nothing where the version is the one already packed."""
        if shortlist.version == self._version and shortlist.slots.shape[0] == self._capacity:
            return
        changed = shortlist.replaced
        if changed is None or shortlist.version - 1 != self._version or shortlist.slots.shape[0] != self._capacity:
            self._repack(weight, bias, shortlist.slots)
        else:
            ids = shortlist.slots.index_select(0, changed)
            replace_rows(self._weight, changed, weight, ids)
            if bias is not None:
                replace_rows(self._bias, changed, bias, ids)
        self._version = shortlist.version
        self._capacity = shortlist.slots.shape[0]

    def _repack(self, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor) -> None:
        n = slots.shape[0]
        if self._weight is None or self._weight.shape[0] < n:
            self._weight = weight.new_empty(n, weight.shape[1])
            self._bias = None if bias is None else bias.new_empty(n)
        torch.index_select(weight, 0, slots, out=self._weight[:n])
        if bias is not None:
            torch.index_select(bias, 0, slots, out=self._bias[:n])

    def scores(self, hidden: torch.Tensor, width: int) -> torch.Tensor:
        """`[m, width]`: the scores of the leading packed rows."""
        return packed_scores(hidden, self._weight[:width], None if self._bias is None else self._bias[:width])


class DynamicLMHead:
    """An output projection that scores a shortlist instead of the whole vocabulary. Immutable and shareable.

    Args:
        weight: `[V, d]`. Not copied and never written to.
        bias: `[V]` or None.
        logit_scale: multiplies the projection (Cohere, Granite, Falcon-H1).
        soft_cap: `c` in `c · tanh(logits / c)` (Gemma 2), or None.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        logit_scale: float = 1.0,
        soft_cap: float | None = None,
    ):
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.logit_scale = logit_scale
        self.soft_cap = soft_cap
        self._scattered_scores = scattered_scores_for(self.weight.device)

    @classmethod
    def from_model(cls, model: nn.Module) -> "DynamicLMHead":
        """Wrap the output projection of a transformers causal language model; its configuration says what follows.

        Raises:
            UnsupportedError: the model has no output projection with a `[V, d]` floating-point weight.
        """
        projection = model.get_output_embeddings()
        weight = getattr(projection, "weight", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point() or weight.device.type == "meta":
            raise UnsupportedError(
                f"{type(model).__name__} has no output projection with a plain [vocabulary, hidden] weight in memory. "
                "Load the drafter unquantised and without offloading."
            )
        config = model.config.get_text_config()
        scale = 1.0
        for name in _MULTIPLIERS:
            scale *= getattr(config, name, None) or 1.0
        for name in _DIVISORS:
            scale /= getattr(config, name, None) or 1.0
        return cls(weight, getattr(projection, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    @property
    def device(self) -> torch.device:
        """Where the head's weights lie."""
        return self.weight.device

    def scores(self, hidden: torch.Tensor, shortlist: Shortlist, rows: PackedRows) -> torch.Tensor:
        """Score a shortlist.

        Args:
            hidden: `[m, d]`, of the head's dtype and on its device.
            shortlist: what to score; its slots are ids below `V`.
            rows: the session's packed rows, brought up to date here.

        Returns:
            fp32 `[m, width]`: a logit for each scored slot, −inf for those that are not occupied.
        """
        width = shortlist.width
        if shortlist.is_prefix:
            bias = None if self.bias is None else self.bias[:width]
            logits = packed_scores(hidden, self.weight[:width], bias)
        elif shortlist.is_transient:
            logits = self._scattered_scores(hidden, self.weight, shortlist.scored_slots, self.bias)
        else:
            rows.update(self.weight, self.bias, shortlist)
            logits = rows.scores(hidden, width)
        logits = self._finish(logits.float())
        occupied = shortlist.scored_occupied
        return logits if occupied is None else logits.masked_fill(~occupied, -torch.inf)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model does to its logits after the projection."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def widen(logits: torch.Tensor, shortlist: Shortlist, into: torch.Tensor) -> None:
    """Lay shortlist logits out over full token ids. The only place that does; `into` must hold −inf at these ids.

    Args:
        logits: fp32 `[width]`, −inf for slots that are not occupied.
        shortlist: the shortlist they score.
        into: fp32 `[V]`, written in place.
    """
    # An unoccupied slot may hold the id of an occupied one; the maximum keeps its −inf from winning.
    into.scatter_reduce_(0, shortlist.scored_slots, logits, "amax")
