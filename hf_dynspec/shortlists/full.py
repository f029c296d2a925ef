"""The whole vocabulary at every draft step: the baseline of all other policies."""

import torch

from ..protocol import Shortlist, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState


class FixedState(ShortlistState):
    """The same shortlist at every step of every round."""

    carried = ()
    is_constant = True

    def __init__(self, shortlist: Shortlist):
        self._shortlist = shortlist

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self._shortlist

    def settle(self) -> Shortlist:
        return self._shortlist


class FullShortlist(ShortlistPolicy):
    """Every token that the drafter can score, padding rows excluded: plain speculative decoding."""

    name = "full"
    card_summary = "The drafter scores its whole vocabulary: the baseline that shortlists are measured against."

    def start(self, vocabulary: VocabularyInfo) -> FixedState:
        slots = vocabulary.draftable
        if slots is None:
            slots = torch.arange(vocabulary.size, device=vocabulary.device)
        return FixedState(Shortlist(slots, version=0, is_prefix=True))
