"""The decoding loop: propose, verify in one forward of the target, keep, observe. Entered through `custom_generate`.

transformers prepares the call (inputs, cache, processors, criteria). The loop differs from transformers' assisted
decoding in five ways: candidates may be a tree; stopping criteria see every token, so that the text ends with the one
that stops it; a passed-in cache is not read again; processors that look at values only process all positions at once;
and sampling draws one random number, while a multinomial draws one for each token of the vocabulary.
"""

from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_names import CACHE, cached_tokens, returned_cache
from ..errors import UnsupportedError
from ..memory.recurrent import RolledBack
from .generate_call import GenerateCall
from .output_record import OutputRecord
from .target import keep_path
from .verification import Verifier


def decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    call: GenerateCall,
    token_streamer: Any = None,
    healer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate with chains or trees of candidates.

    Args:
        target: the model that verifies.
        input_ids: int64 `[1, n]`.
        logits_processor: applied to the target's logits.
        stopping_criteria: asked after every token.
        generation_config: the call's resolved configuration.
        call: the assistant's call, entered and not yet begun.
        token_streamer: gets the new tokens of each round.
        healer: the tokenizer for token healing, or None. With it the streamer gets the prompt too.
        model_kwargs: the target's arguments, with a cache that can be cropped.

    Returns:
        As `generate` without an assistant.

    Raises:
        UnsupportedError: a batch of several sequences, or no cache that can be cropped.
    """
    _require_croppable(input_ids, model_kwargs.get(CACHE))
    if healer is not None:
        input_ids = _healed(target, input_ids, healer, generation_config, stopping_criteria)
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
    record = OutputRecord(generation_config, target.config.get_text_config())
    with call.rollback.of(model_kwargs[CACHE]) as rolled:
        call.begin(generation_config, input_ids, logits_processor, model_kwargs)
        keeps_scores = record.scores is not None or call.wants_scores
        verifier = Verifier(logits_processor, stopping_criteria, bool(generation_config.do_sample), keeps_scores)
        is_first, is_done = True, False
        while not is_done:
            length = input_ids.shape[1]
            candidates = call.propose(input_ids)
            drafted = 0 if candidates is None else candidates.token_ids.shape[0]
            with _DraftGuard(rolled) as guard:
                with rolled.reading(drafted):
                    outputs = call.verify(input_ids, candidates, is_first, model_kwargs)
                guard.has_read(returned_cache(outputs))
                logits = outputs.logits[0].to(device=input_ids.device, dtype=torch.float32)
                outcome, is_done = verifier.verify(logits, input_ids, candidates, record.scores, call.best_tokens)
                guard.is_cropping()
                if drafted and not candidates.is_chain:
                    keep_path(rolled.cache, drafted, outcome.rows[1:] - 1)
                else:
                    rolled.keep(outcome.accepted)
            input_ids = torch.cat([input_ids, outcome.token_ids.unsqueeze(0)], dim=1)
            record.add_scores(logits, outcome)
            model_kwargs = target._update_model_kwargs_for_generation(
                outputs, model_kwargs, num_new_tokens=outcome.accepted + 1
            )
            if token_streamer is not None:
                # May raise, as in plain generate, when the cache holds all tokens except the last.
                token_streamer.put(outcome.tokens_on_host())
            record.add_states(outputs, candidates, outcome, call.cached_before + length)
            call.observe(outputs, outcome, is_done)
            is_first = False
    if token_streamer is not None:
        token_streamer.end()
    return record.result(input_ids, rolled.cache)


def _require_croppable(input_ids: torch.Tensor, cache: Any) -> None:
    if input_ids.shape[0] != 1:
        raise UnsupportedError("speculative decoding takes one sequence: pass one prompt.")
    if not hasattr(cache, "activate_past_recording"):
        raise UnsupportedError(
            f"speculative decoding takes a dynamic cache, and this is a {type(cache).__name__}: leave use_cache and "
            "cache_implementation as they are."
        )


class _DraftGuard:
    """Removes drafts from the target's cache if an error ends the round, so that a caller who passed the cache can go
    on with it, as after plain `generate`.

    Args:
        rolled: the cache at the beginning of the round.
    """

    def __init__(self, rolled: RolledBack):
        self._rolled = rolled
        self._verified = cached_tokens(rolled.cache)
        self._is_whole = False

    def has_read(self, returned: Any) -> None:
        """The target has read the verified text and the candidates."""
        if returned is not self._rolled.cache:
            self._rolled.use(returned)
        self._is_whole = True

    def is_cropping(self) -> None:
        """From now on layers may differ in length."""
        self._verified, self._is_whole = -1, False

    def __enter__(self) -> "_DraftGuard":
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            return
        if self._is_whole:
            self._rolled.keep(0)
        elif self._rolled.has_states or cached_tokens(self._rolled.cache) != self._verified:
            # How far the layers have read is unknown: the text is read again.
            self._rolled.reset()


def _healed(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    tokenizer: Any,
    generation_config: GenerationConfig,
    criteria: StoppingCriteriaList,
) -> torch.Tensor:
    """Heal the prompt's last token. Its length may change; new tokens are counted from its new end."""
    healed = target.heal_tokens(input_ids, tokenizer)
    if not healed.shape[1]:
        raise UnsupportedError("token_healing leaves nothing of a prompt without text: leave it out, or pass a text.")
    longer = healed.shape[1] - input_ids.shape[1]
    if longer and generation_config.max_new_tokens is not None:
        generation_config.max_length += longer
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                criterion.max_length += longer
    return healed
