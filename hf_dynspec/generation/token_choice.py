"""How a draft token is chosen from a shortlist's logits: by argmax or by a draw, under the call's processors."""

import torch
from transformers import LogitsProcessorList, MinLengthLogitsProcessor

from ..head import widen
from ..kernels import top_k_ids
from ..protocol import Shortlist
from .processing import divide, draw, draw_several


class TokenChoice:
    """Chooses the tokens of one call's drafts.

    Drafting under the processors that the target's logits go through makes drafts agree with it more often. It cannot
    make the output wrong: greedy verification compares tokens, and sampling uses the distribution returned here.

    Args:
        do_sample: draw tokens instead of taking the most probable one.
        processors: the call's logits processors.
        vocabulary_rows: width of the target's logits.
        device: where the processors' own tensors live.
    """

    def __init__(self, do_sample: bool, processors: LogitsProcessorList, vocabulary_rows: int, device: torch.device):
        # A minimum length keeps EOS from the output, not from drafts that reach past it.
        drafting = [one for one in processors if not isinstance(one, MinLengthLogitsProcessor)]
        self._by_id, self._by_value = divide(drafting)
        self.do_sample = do_sample
        self._vocabulary_rows = vocabulary_rows
        self._device = device
        self._prefix: torch.Tensor | None = None

    def start_round(self, prefix: torch.Tensor) -> None:
        """Set the verified tokens, int64 `[n]`, that this round's candidates follow."""
        self._prefix = prefix

    def __call__(
        self, logits: torch.Tensor, shortlist: Shortlist, drafted: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `session.ChooseToken`."""
        if self._by_id:
            logits = self._process_by_id(logits, shortlist, drafted)
        if not self.do_sample:
            if self._by_value:
                logits = self._by_value(self._prefix[None, -1:], logits.unsqueeze(0))[0]
            return shortlist.ids_at(logits.argmax(-1, keepdim=True)), logits
        columns, likely = self._process_by_value(logits.unsqueeze(0))
        column = draw(likely[0].softmax(-1))
        if columns is None:
            return shortlist.ids_at(column), likely[0]
        column = columns[0].index_select(0, column)
        return shortlist.ids_at(column), torch.full_like(logits, -torch.inf).index_copy_(0, columns[0], likely[0])

    def draw_children(
        self, logits: torch.Tensor, shortlist: Shortlist, paths: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `session.DrawChildren`.

        Processors that look at token ids are asked node by node, each with its own path, as they are for a chain.
        """
        if self._by_id:
            nodes = zip(logits.unbind(0), paths.unbind(0), strict=True)
            logits = torch.stack([self._process_by_id(row, shortlist, [path]) for row, path in nodes])
        columns, logits = self._process_by_value(logits)
        probabilities = logits.softmax(-1)
        if columns is None:
            token_ids = shortlist.scored_slots.expand(logits.shape[0], -1)
        else:
            token_ids = shortlist.ids_at(columns)
        return token_ids, probabilities, draw_several(probabilities, min(count, logits.shape[1]))

    def _process_by_value(self, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Process logits, fp32 `[m, width]`, of what is to be drawn. What a top-k leaves is all that the rest has to
        look at: then the columns that are left, int64 `[m, k]`, and their logits; otherwise None and all logits."""
        most_kept, columns = self._by_value.most_kept, None
        if most_kept is not None and most_kept < logits.shape[1]:
            columns = top_k_ids(logits, most_kept)
            logits = logits.gather(1, columns)
        return columns, self._by_value(self._prefix[None, -1:], logits) if self._by_value else logits

    def _process_by_id(self, logits: torch.Tensor, shortlist: Shortlist, drafted: list[torch.Tensor]) -> torch.Tensor:
        """Apply processors that need to know which token a logit belongs to."""
        wide = logits.new_full((1, self._vocabulary_rows), -torch.inf)
        widen(logits, shortlist, wide[0])
        context = torch.cat([self._prefix, *drafted]).unsqueeze(0)
        processed = self._by_id(context.to(self._device), wide.to(self._device)).to(logits.device)
        narrow = processed[0].index_select(0, shortlist.scored_slots)
        if shortlist.occupied is not None:
            narrow = narrow.masked_fill(~shortlist.scored_occupied, -torch.inf)
        # Processors may forbid all of a small shortlist. Something must be drafted, and the target will refuse it.
        return torch.where((narrow > -torch.inf).any(), narrow, logits)
