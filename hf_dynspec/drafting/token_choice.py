"""The choice of a draft token from a shortlist's logits, by argmax or by a draw, after the call's pure processors."""

import torch
from transformers import LogitsProcessorList

from ..devices import is_host_memory
from ..kernels import argmax_rows, top_k_ids
from ..protocol import Shortlist, SparseDistribution
from .draft_processors import DraftContext, SeenTokens, draft_processors
from .processors import (
    ProcessorsByValue,
    draw_of_rows,
    draw_place,
    draw_several,
    draw_with_weight,
    looks_at_values_only,
)


class TokenChoice:
    """Chooses the tokens of one call's drafts.

    Drafts agree with the target more often if they go through the same processors. The output does not depend on it:
    greedy verification compares tokens, and sampling uses the distribution returned here. A processor takes part only
    if it is known to be pure and works on a shortlist (`draft_processors`). All others see the target's logits only.

    Args:
        do_sample: draw tokens instead of taking the most probable one.
        processors: the call's logits processors.
        vocabulary_rows: width of the target's logits.
        padding: padding tokens of the prompt, which processors that count tokens include.
        device: the drafter's device.
    """

    def __init__(
        self,
        do_sample: bool,
        processors: LogitsProcessorList,
        vocabulary_rows: int,
        padding: int,
        device: torch.device,
    ):
        kept = draft_processors(processors)
        # Processors after the last one that needs token ids process all rows at once.
        cut = max((index + 1 for index, one in enumerate(kept) if not looks_at_values_only(one)), default=0)
        self._by_id = kept[:cut]
        self._by_value = ProcessorsByValue(kept[cut:])
        self.do_sample = do_sample
        self._context: DraftContext | SeenTokens | None = None
        if self._by_id:
            self._context = DraftContext(vocabulary_rows, padding, device)
        # The probability of the last drawn token, or the distribution and the index to look it up with.
        self._drawn: tuple[torch.Tensor, torch.Tensor] | float = 0.0
        # The logits of the last greedy choice.
        self._logits: torch.Tensor | None = None
        # Processors by value take tokens as an argument and do not read them.
        self._no_tokens = torch.empty(1, 0, dtype=torch.int64, device=device)

    def look_at(self, context: SeenTokens) -> None:
        """Process with the tokens of this context, in rounds over fixed memory."""
        if self._context is not None:
            self._context = context

    def start_round(self, prefix: torch.Tensor) -> None:
        """Set the verified tokens, int64 `[n]`, that this round's candidates follow."""
        if self._context is not None:
            self._context.start_round(prefix)

    def __call__(
        self, logits: torch.Tensor, shortlist: Shortlist, drafted: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, SparseDistribution | None]:
        """See `session.ChooseToken`."""
        if self._by_id:
            path = torch.cat(drafted) if drafted else self._no_tokens[0]
            logits = self.process_by_id(logits.unsqueeze(0), shortlist, path.unsqueeze(0))[0]
        if not self.do_sample:
            if self._by_value:
                logits = self._by_value(self._no_tokens, logits.unsqueeze(0))[0]
            self._logits = logits
            return shortlist.ids_at(argmax_rows(logits.unsqueeze(0))), logits, None
        columns, likely = self._process_by_value(logits.unsqueeze(0))
        weights = likely[0].softmax(-1)
        if columns is None:
            return shortlist.ids_at(self._draw(weights)), likely[0], None
        token_ids = shortlist.ids_at(columns[0])
        used = torch.full_like(logits, -torch.inf).index_copy_(0, columns[0], likely[0])
        if not is_host_memory(logits.device):
            return token_ids.index_select(0, self._draw(weights)), used, None
        few = SparseDistribution(token_ids.tolist(), weights.tolist())
        place = draw_place(few.weights)
        self._drawn = few.weights[place]
        return token_ids[place : place + 1], used, few

    @property
    def looks_at_ids(self) -> bool:
        """Whether a processor looks at token ids."""
        return bool(self._by_id)

    def of_texts(self, logits: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token for each of several texts, if no processor looks at token ids. Does not wait for the device.

        Args:
            logits: fp32 `[B, width]`.
            slots: int64 `[B, width]`: the tokens that they are of.

        Returns:
            The tokens, int64 `[B, 1]`, and the logits that they were chosen by, as in `__call__`.
        """
        if not self.do_sample:
            processed = self._by_value(self._no_tokens, logits)
            return slots.gather(1, argmax_rows(processed).unsqueeze(1)), processed
        columns, likely = self._process_by_value(logits)
        places = draw_of_rows(likely.softmax(-1))
        if columns is None:
            return slots.gather(1, places), likely
        used = torch.full_like(logits, -torch.inf).scatter_(1, columns, likely)
        return slots.gather(1, columns.gather(1, places)), used

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """Draw an index, int64 `[1]`, and note its probability."""
        place, weight = draw_with_weight(weights)
        self._drawn = (weights, place) if weight is None else weight
        return place

    def probability(self) -> float:
        """The probability of the token that was chosen last. Waits for the device."""
        if self.do_sample:
            return self._drawn if isinstance(self._drawn, float) else float(self._drawn[0].take(self._drawn[1]))
        return float(self._logits.softmax(-1).amax())

    def draw_children(
        self, logits: torch.Tensor, shortlist: Shortlist, paths: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw `count` children of each node: see `trees.grow`. Returns the token ids and probabilities that they are
        drawn from (see `protocol.Draws`), and their columns in these, int64 `[w, c]`, in the order of the draws."""
        columns, logits = self._process_by_value(self.process_by_id(logits, shortlist, paths))
        probabilities = logits.softmax(-1)
        if columns is None:
            token_ids = shortlist.scored_slots.expand(logits.shape[0], -1)
        else:
            token_ids = shortlist.ids_at(columns)
        return token_ids, probabilities, draw_several(probabilities, min(count, logits.shape[1]))

    def _process_by_value(self, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Process logits, fp32 `[m, width]`, before a draw. With a top-k, returns the columns that it keeps, int64
        `[m, k]`, and their logits; otherwise None and all logits."""
        most_kept, columns = self._by_value.most_kept, None
        if most_kept is not None and most_kept < logits.shape[1]:
            columns = top_k_ids(logits, most_kept)
            logits = logits.gather(1, columns)
        return columns, self._by_value(self._no_tokens, logits) if self._by_value else logits

    def process_by_id(self, logits: torch.Tensor, shortlist: Shortlist, paths: torch.Tensor) -> torch.Tensor:
        """Apply processors that need to know which token a logit belongs to, fp32 `[w, width]`, and what was drafted
        before each row, int64 `[w, depth]`."""
        if not self._by_id:
            return logits
        slots, processed = shortlist.scored_slots, logits
        self._context.set_paths(paths)
        for one in self._by_id:
            is_by_value = looks_at_values_only(one)
            processed = one(self._no_tokens, processed) if is_by_value else one(processed, slots, self._context)
        # Processors may forbid every token of a small shortlist. One is drafted all the same; the target rejects it.
        return torch.where((processed > -torch.inf).any(-1, keepdim=True), processed, logits)
