"""One draft after a text, without verification: for study and for comparison."""

from dataclasses import replace

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from ..cache_names import cache_inputs
from ..drafting.session import DraftSession
from ..errors import UnsupportedError
from ..protocol import Candidates
from ..tree_config import LONGEST_DRAFT
from .bindable import Assistant
from .generate_call import GenerateCall
from .verification import Outcome


class _StudiedCall(GenerateCall):
    """A call with a given session, which publishes and learns nothing."""

    _learns = False

    def __init__(self, assistant: Assistant, session: DraftSession):
        super().__init__(assistant)
        self._given = session

    def _open_session(self, eos_token_ids: tuple[int, ...]) -> tuple[DraftSession, bool]:
        return self._given, False


def draft_once(assistant: Assistant, session: DraftSession, input_ids: torch.Tensor) -> Candidates:
    """Draft after a text as in the second round of a greedy call, whose first round ended with the text's last token.

    Args:
        assistant: a bound assistant.
        session: the session that drafts.
        input_ids: int64 `[1, n]`, `n >= 2`: the text.

    Returns:
        The candidates, with parents, depths and scores for chains too.

    Raises:
        UnsupportedError: nothing is drafted after a text of that length, see `TargetForward.room`.
    """
    prompt, last = input_ids[:, :-1], input_ids[0, -1:]
    cache = DynamicCache(config=assistant.target.config)
    kwargs = cache_inputs(cache) | {"attention_mask": torch.ones_like(prompt)}
    longest = GenerationConfig(max_length=input_ids.shape[1] + LONGEST_DRAFT + 1)
    call = _StudiedCall(assistant, session)
    call.begin(longest, prompt, LogitsProcessorList(), dict(kwargs))
    outputs = call.verify(prompt, None, True, kwargs)
    call.observe(outputs, Outcome(last, torch.zeros_like(last), ()), False)
    candidates = call.propose(input_ids)
    if candidates is None:
        raise UnsupportedError(
            f"nothing is drafted after a text of {input_ids.shape[1]} tokens: the target's rotary embedding changes "
            "at this length, or a model has no position left. Pass a shorter text or a longer one."
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
