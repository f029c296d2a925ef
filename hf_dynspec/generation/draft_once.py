"""One round drafted after a text, and nothing verified: for study and for comparison."""

from dataclasses import replace

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from ..cache_names import cache_inputs
from ..drafting.session import DraftSession
from ..drafting.tree_config import LONGEST_DRAFT, TreeConfig
from ..errors import UnsupportedError
from ..protocol import Candidates
from ..stats import DraftingStatistics
from .round import Drafting
from .target import TargetForward
from .verification import Outcome


def draft_once(
    target: TargetForward,
    session: DraftSession,
    reads: tuple[int, ...],
    drafting_config: GenerationConfig,
    tree: TreeConfig | None,
    input_ids: torch.Tensor,
) -> Candidates:
    """Draft after a text as the second round of a greedy call does, whose first round ended with its last token.

    Args:
        target: as for `Drafting`, likewise the next five.
        input_ids: int64 `[1, n]`, `n >= 2`.

    Returns:
        The candidates, with parents, depths and scores for chains too.

    Raises:
        UnsupportedError: nothing is drafted after a text of that length, see `TargetForward.room`.
    """
    session.stats = DraftingStatistics()
    prompt, last = input_ids[:, :-1], input_ids[0, -1:]
    cache = DynamicCache(config=target.model.config)
    kwargs = cache_inputs(cache) | {"attention_mask": torch.ones_like(prompt)}
    longest = GenerationConfig(max_length=input_ids.shape[1] + LONGEST_DRAFT + 1)
    drafting = Drafting(
        session, reads, target, longest, prompt, dict(kwargs), drafting_config, LogitsProcessorList(), tree
    )
    outputs = drafting.verify(prompt, None, True, kwargs)
    drafting.observe(outputs, Outcome(last, torch.zeros_like(last), ()), False)
    candidates = drafting.propose(input_ids)
    if candidates is None:
        raise UnsupportedError(
            f"nothing is drafted after a text of {input_ids.shape[1]} tokens: what the target says of tokens changes "
            "where the text grows past a length, as its rotary embedding does. Pass a shorter text or a longer one."
        )
    if not candidates.is_chain:
        return candidates
    steps = torch.arange(candidates.token_ids.shape[0], device=candidates.token_ids.device)
    log_probabilities = [
        torch.where(shortlist.scored_slots == token_id, logits.log_softmax(-1), -torch.inf).amax()
        for token_id, logits, shortlist in zip(
            candidates.token_ids, candidates.logits, candidates.shortlists, strict=True
        )
    ]
    return replace(candidates, parents=steps - 1, depths=steps, scores=torch.stack(log_probabilities).cumsum(0))
