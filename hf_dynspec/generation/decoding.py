"""The decoding loop: propose, verify in one forward of the target, keep what holds. Entered through `custom_generate`.

transformers prepares the call (inputs, cache, processors, criteria) and hands it over. The loop differs from its
assisted-decoding loop in four ways: stopping criteria see every token, so that none comes out after the one that
stops; a passed-in cache is not read again; processors that look at values only take all positions at once; and
sampling draws one random number where a multinomial draws one for each token of the vocabulary.
"""

import copy
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..errors import UnsupportedError
from ..protocol import Candidates
from .drafting import ChainDrafting
from .processing import divide
from .verification import verify_greedy, verify_sampled


def decode_chains(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafting_call: Any,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate with chains of candidates.

    Args:
        target: the model that verifies.
        input_ids: int64 `[1, n]`.
        logits_processor: applied to the target's logits.
        stopping_criteria: asked after every token.
        generation_config: the call's resolved configuration.
        drafting_call: the `binding.Call` that this is.
        token_streamer: is given the new tokens of each round.
        model_kwargs: what the target is called with; `past_key_values` holds a cache that can be cropped.

    Returns:
        As `generate` without an assistant.

    Raises:
        UnsupportedError: a batch of several sequences, or no cache that can be cropped.
    """
    cache = model_kwargs.get("past_key_values")
    if input_ids.shape[0] != 1 or cache is None or not hasattr(cache, "activate_past_recording"):
        raise UnsupportedError(
            "speculative decoding takes one sequence and a dynamic cache: pass one prompt, and leave use_cache and "
            "cache_implementation as they are."
        )
    cache.activate_past_recording()
    record = _Record(generation_config, input_ids.shape[1])
    verifier = _Verifier(logits_processor, bool(generation_config.do_sample))
    drafting: ChainDrafting = drafting_call.drafting(
        generation_config=generation_config,
        input_ids=input_ids,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
    )
    skipped = drafting.cached_prompt_tokens
    outputs = None
    is_first, is_done = True, False
    while not is_done:
        length = input_ids.shape[1]
        candidates = drafting.propose(input_ids, outputs)
        drafted = input_ids[0, :0] if candidates is None else candidates.token_ids.to(input_ids.device)
        candidate_ids = torch.cat([input_ids, drafted.unsqueeze(0)], dim=1)
        k = drafted.shape[0]
        unread = candidate_ids.shape[1] - skipped if is_first and skipped else None if is_first else k + 1
        outputs = _forward(target, candidate_ids, k, unread, is_first, model_kwargs, drafting.model_inputs)
        logits = outputs.logits[0, -k - 1 :].to(device=input_ids.device, dtype=torch.float32)
        scores = verifier.process(logits, candidate_ids, length)
        verified, accepted = verifier.verify(scores, drafted, candidates)

        extended = torch.cat([input_ids, verified.unsqueeze(0)], dim=1)
        record.add_scores(scores[: accepted + 1], logits[: accepted + 1])
        kept, is_done = _tokens_until_done(stopping_criteria, extended, length, record.scores)
        input_ids = extended[:, : length + kept]
        record.keep_scores(input_ids.shape[1])
        if token_streamer is not None:
            token_streamer.put(input_ids[0, length:].cpu())
        cache = outputs.past_key_values
        cache.crop(kept - 1 - k)
        drafting.observe_verification(input_ids, scores, kept - 1)
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=kept)
        record.add_states(outputs, k, kept, length)
        is_first = False
    if token_streamer is not None:
        token_streamer.end()
    return record.result(input_ids, cache)


def _forward(
    target: PreTrainedModel,
    candidate_ids: torch.Tensor,
    k: int,
    unread: int | None,
    is_first: bool,
    model_kwargs: dict[str, Any],
    more_inputs: dict[str, Any],
) -> Any:
    """Run the target on the last `unread` tokens (None: all), for the logits after each of the last `k + 1`."""
    kwargs = _prepare_attention_mask(copy.copy(model_kwargs), candidate_ids.shape[1], False)
    kwargs = _prepare_token_type_ids(kwargs, candidate_ids.shape[1])
    positions = kwargs.get("position_ids")
    if positions is not None and k > 0:
        kwargs = _prepare_position_ids(kwargs, positions.shape[-1] + k, False)
    inputs = target.prepare_inputs_for_generation(
        candidate_ids, next_sequence_length=unread, is_first_iteration=is_first, **kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = k + 1
    return target(**{**inputs, **more_inputs})


def _tokens_until_done(
    criteria: StoppingCriteriaList, extended: torch.Tensor, length: int, scores: tuple[torch.Tensor, ...] | None
) -> tuple[int, bool]:
    """Ask the criteria after each new token, as plain generation does.

    Returns:
        How many of the new tokens come out, and whether they are the last. Waits for the device once.
    """
    new = extended.shape[1] - length
    stops = []
    for count in range(1, new + 1):
        seen = None if scores is None else scores[: len(scores) - new + count]
        stops.append(criteria(extended[:, : length + count], seen))
    stopped = torch.cat(stops).tolist()
    return (stopped.index(True) + 1, True) if True in stopped else (new, False)


class _Verifier:
    """Processes the target's logits and accepts candidates by them."""

    def __init__(self, processors: LogitsProcessorList, do_sample: bool):
        self._by_id, self._by_value = divide(list(processors))
        self._do_sample = do_sample

    def process(self, logits: torch.Tensor, candidate_ids: torch.Tensor, length: int) -> torch.Tensor:
        """fp32 `[k + 1, V]`: each row processed with the tokens before it as its context."""
        scores = logits
        if self._by_id:
            # Processors may write into what they are given.
            rows = [self._by_id(candidate_ids[:, : length + i], row.clone()) for i, row in enumerate(logits.split(1))]
            scores = torch.cat(rows)
        return self._by_value(candidate_ids, scores) if self._by_value else scores

    def verify(
        self, scores: torch.Tensor, drafted: torch.Tensor, candidates: Candidates | None
    ) -> tuple[torch.Tensor, int]:
        """See `verification`."""
        return verify_sampled(scores, drafted, candidates) if self._do_sample else verify_greedy(scores, drafted)


class _Record:
    """Collects what `return_dict_in_generate` asks for, one entry per token as plain generation does."""

    def __init__(self, config: GenerationConfig, prompt_length: int):
        self._returns_dict = bool(config.return_dict_in_generate)
        self._prompt_length = prompt_length
        self.scores = () if self._returns_dict and config.output_scores else None
        self._logits = () if self._returns_dict and config.output_logits else None
        self._attentions = () if self._returns_dict and config.output_attentions else None
        self._hidden_states = () if self._returns_dict and config.output_hidden_states else None

    def add_scores(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the rows of one round; `keep_scores` takes back those whose tokens do not come out."""
        if self.scores is not None:
            self.scores += scores.split(1)
        if self._logits is not None:
            self._logits += logits.split(1)

    def keep_scores(self, length: int) -> None:
        """Keep as many rows as there are new tokens in a sequence of this length."""
        if self.scores is not None:
            self.scores = self.scores[: length - self._prompt_length]
        if self._logits is not None:
            self._logits = self._logits[: length - self._prompt_length]

    def add_states(self, outputs: Any, drafted: int, kept: int, length: int) -> None:
        """Add the attentions and hidden states of one round.

        Args:
            outputs: the target's.
            drafted: how many candidates it read.
            kept: how many new tokens came out.
            length: of the sequence before the round.
        """
        if self._attentions is not None and outputs.attentions[0] is not None:
            self._attentions += _split_by_token(outputs.attentions, drafted, kept, not self._attentions, length)
        if self._hidden_states is not None:
            self._hidden_states += _split_by_token(outputs.hidden_states, drafted, kept, not self._hidden_states, None)

    def result(self, input_ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self._returns_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=self.scores,
            logits=self._logits,
            attentions=self._attentions,
            hidden_states=self._hidden_states,
            past_key_values=cache,
        )


def _split_by_token(
    states: tuple[torch.Tensor, ...], drafted: int, kept: int, is_first: bool, keys: int | None
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Give each new token the states of the position that it was predicted at; the first of all has the prompt's too.

    Args:
        states: for each layer `[…, rows, width]`; the last `drafted + 1` rows are those that predict.
        drafted: how many candidates the target read.
        kept: how many new tokens came out.
        is_first: whether the round is the first.
        keys: for attentions, how many positions the first of these tokens looked back on; None for hidden states.
    """
    first_row = states[0].shape[-2] - drafted - 1
    entries = []
    for token in range(kept):
        rows = slice(0 if is_first and token == 0 else first_row + token, first_row + token + 1)
        width = slice(None if keys is None else keys + token)
        entries.append(tuple(layer[..., rows, width] for layer in states))
    return tuple(entries)
