"""The decoding loop: propose, verify in one forward of the target, keep what holds. Entered through `custom_generate`.

transformers prepares the call (inputs, cache, processors, criteria) and hands it over. The loop differs from its
assisted-decoding loop in five ways: candidates may be a tree; stopping criteria see every token, so that none comes
out after the one that stops; a passed-in cache is not read again; processors that look at values only take all
positions at once; and sampling draws one random number where a multinomial draws one for each token of the vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_names import CACHE, returned_cache
from ..devices import is_host_memory
from ..drafting.processors import divide, may_keep_state
from ..errors import TargetError, UnsupportedError
from ..kernels import argmax_rows, top_k_ids
from ..protocol import Candidates, SparseDistribution
from .acceptance import NO_TOKEN
from .output_record import OutputRecord
from .round import Drafting
from .target import keep_path
from .verification import (
    BatchedWalk,
    BestTokens,
    Outcome,
    ProcessRow,
    Step,
    outcome_of,
    walk,
    walk_greedily,
    walk_unseen,
)

# These may be asked about tokens that do not come out. Exactly these classes: a subclass may do anything. Some look at
# the last token alone, some at no token at all.
_BY_LAST_TOKEN = (EosTokenCriteria,)
_BY_LENGTH_OR_TIME = (MaxLengthCriteria, MaxTimeCriteria)
_PURE_CRITERIA = (*_BY_LAST_TOKEN, *_BY_LENGTH_OR_TIME, StopStringCriteria)


def decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafting_call: Any,
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
        drafting_call: the `call.Call` that this is.
        token_streamer: is given the new tokens of each round.
        healer: the tokenizer to heal the prompt's last token with, or None. The streamer is then given the prompt too.
        model_kwargs: what the target is called with; its `CACHE` is one that can be cropped.

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
    cache = model_kwargs[CACHE]
    cache.activate_past_recording()
    record = OutputRecord(generation_config, target.config.get_text_config())
    drafting: Drafting = drafting_call.drafting(
        generation_config=generation_config,
        input_ids=input_ids,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
    )
    keeps_scores = record.scores is not None or drafting.wants_scores
    verifier = _Verifier(logits_processor, stopping_criteria, bool(generation_config.do_sample), keeps_scores)
    is_first, is_done = True, False
    while not is_done:
        length = input_ids.shape[1]
        candidates = drafting.propose(input_ids)
        with _CacheOfRound(cache) as of_round:
            outputs = drafting.verify(input_ids, candidates, is_first, model_kwargs)
            of_round.is_read(returned_cache(outputs), candidates)
            logits = outputs.logits[0].to(device=input_ids.device, dtype=torch.float32)
            outcome, is_done = verifier.verify(logits, input_ids, candidates, record.scores, drafting.best_tokens)
            of_round.is_changing()
            cache = _keep_accepted(cache, returned_cache(outputs), candidates, outcome)
        input_ids = torch.cat([input_ids, outcome.token_ids.unsqueeze(0)], dim=1)
        record.add_scores(logits, outcome)
        model_kwargs = target._update_model_kwargs_for_generation(
            outputs, model_kwargs, num_new_tokens=outcome.accepted + 1
        )
        if token_streamer is not None:
            # May raise, as plain generate's does, when the cache holds all tokens but the last.
            token_streamer.put(outcome.tokens_on_host())
        record.add_states(outputs, candidates, outcome, drafting.cached_before + length)
        drafting.observe(outputs, outcome, is_done)
        is_first = False
    if token_streamer is not None:
        token_streamer.end()
    return record.result(input_ids, cache)


def _require_croppable(input_ids: torch.Tensor, cache: Any) -> None:
    if input_ids.shape[0] != 1:
        raise UnsupportedError("speculative decoding takes one sequence: pass one prompt.")
    if not hasattr(cache, "activate_past_recording"):
        raise UnsupportedError(
            f"speculative decoding takes a dynamic cache, and this is a {type(cache).__name__}: leave use_cache and "
            "cache_implementation as they are."
        )


class _CacheOfRound:
    """Sees to it that no draft stays in the target's cache where an error ends the round: the caller who passed the
    cache, or took it from an earlier call, may go on with it, as after plain `generate`.

    Args:
        cache: as the round finds it.
    """

    def __init__(self, cache: Any):
        self._cache = cache
        self._verified = cache.get_seq_length()
        self._is_whole = False

    def is_read(self, returned: Any, candidates: Candidates | None) -> None:
        """Note that the target has read all that is verified, and the candidates."""
        self._cache = returned
        self._verified = returned.get_seq_length() - (0 if candidates is None else candidates.token_ids.shape[0])
        self._is_whole = True

    def is_changing(self) -> None:
        """Note that from now on layers may differ in what they hold, whatever the first of them says."""
        self._verified, self._is_whole = -1, False

    def __enter__(self) -> "_CacheOfRound":
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            return
        change = self._verified - self._cache.get_seq_length()
        if self._is_whole:
            self._cache.crop(change)
        elif change:
            # Nobody knows what each layer has read: the text is read again.
            self._cache.reset()


def _keep_accepted(cache: Any, returned: Any, candidates: Candidates | None, outcome: Outcome) -> Any:
    """Take out of the cache what was not accepted. Returns the cache that the model goes on with."""
    if returned is not cache:
        # Some models begin another one when the text grows past a limit.
        returned.activate_past_recording()
    if candidates is None:
        returned.crop(0)
    elif candidates.is_chain:
        returned.crop(outcome.accepted - candidates.token_ids.shape[0])
    else:
        keep_path(returned, candidates.token_ids.shape[0], outcome.rows[1:] - 1)
    return returned


def _healed(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    tokenizer: Any,
    generation_config: GenerationConfig,
    criteria: StoppingCriteriaList,
) -> torch.Tensor:
    """Heal the prompt's last token. A prompt may become shorter or longer, as its text is tokenised anew; new tokens
    are then counted from there."""
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


class _Verifier:
    """Processes the target's logits, accepts candidates by them, and asks the stopping criteria after every token.

    Where a processor or a criterion may remember what it was shown, the target's token at one node is known, and has
    come out, before anybody sees the next node. With processors and criteria that are known to be pure, nodes are
    walked to first, all of them on devices that would be waited for, which are so waited for once.

    Args:
        processors: applied to the target's logits.
        criteria: asked after every token.
        do_sample: draw tokens.
        keeps_scores: somebody wants the scores of all tokens, and not the tokens alone.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        keeps_scores: bool,
    ):
        self._by_id, self._by_value = divide(list(processors))
        self._criteria = criteria
        self._do_sample = do_sample
        self._keeps_scores = keeps_scores
        self._is_stepwise = may_keep_state(processors) or any(type(one) not in _PURE_CRITERIA for one in criteria)
        # Tokens are read in every round anyway: what asks for the last one alone is answered on the host.
        self._ends = frozenset(
            token_id for one in criteria if type(one) in _BY_LAST_TOKEN for token_id in one.eos_token_id.tolist()
        )
        self._by_text = [one for one in criteria if type(one) not in (*_BY_LAST_TOKEN, *_BY_LENGTH_OR_TIME)]
        self._by_length_or_time = [one for one in criteria if type(one) in _BY_LENGTH_OR_TIME]
        self._first_length_of_note = min(map(_first_length_of_note, self._by_length_or_time), default=math.inf)

    def verify(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        candidates: Candidates | None,
        scores: tuple[torch.Tensor, ...] | None,
        best: BestTokens | None,
    ) -> tuple[Outcome, bool]:
        """Accept candidates up to the token that is the last one.

        Args:
            logits: fp32 `[k + 1, V]`: the target's.
            input_ids: int64 `[1, n]`: the verified tokens.
            candidates: what follows them (None: nothing).
            scores: those of the tokens before, if the criteria are to see scores.
            best: of these logits. None where to find them for all rows would take longer than to walk, or make wait.

        Returns:
            The tokens that come out, and whether they are the last.

        Raises:
            TargetError: a token was to be drawn where the target's probabilities are no numbers.
        """
        process = self._process_row(logits, input_ids, best)
        if self._is_stepwise:
            steps: list[Step] = []
            text = input_ids
            for step in walk(candidates, process, self._do_sample, logits.device):
                steps.append(step)
                if self._do_sample:
                    _require_tokens(step.token_id.tolist())
                text = torch.cat([text, step.token_id.unsqueeze(0)], dim=1)
                if bool(self._criteria(text, _scores_with(scores, steps))):
                    return outcome_of(steps, self._keeps_scores), True
            return outcome_of(steps, self._keeps_scores), False
        if self._do_sample or self._by_id:
            walked = walk_unseen(candidates, process, self._do_sample, logits.device, self._keeps_scores)
        elif best is not None and not self._by_value:
            walked = walk_greedily(candidates, best.ids(1)[:, 0], logits if self._keeps_scores else ())
        elif is_host_memory(logits.device):
            # Rows that the walk does not come to are not looked at.
            walked = walk_unseen(candidates, process, False, logits.device, self._keeps_scores)
        else:
            processed = self._by_value(input_ids, logits)
            walked = walk_greedily(candidates, argmax_rows(processed), processed if self._keeps_scores else ())
        return self._until_done(walked, input_ids)

    def _process_row(self, logits: torch.Tensor, input_ids: torch.Tensor, best: BestTokens | None) -> ProcessRow:
        """What processes a row of this round's logits. Arguments as for `verify`."""
        count = self._by_value.most_looked_at if self._do_sample and not self._keeps_scores else None
        if count is not None and (count > logits.shape[1] or not is_host_memory(logits.device)):
            count = None
        few: list[SparseDistribution | None] = []
        if count is not None and best is not None and not self._by_id:
            few = self._by_value.sparse(logits, best.ids(count))

        def process(row: torch.Tensor, path: torch.Tensor) -> torch.Tensor | SparseDistribution:
            left = few[row] if few else None
            if left is None:
                # A copy where it outlives the round, or as processors may write into what they are given; those by
                # value do not.
                is_passing = not (self._by_id or self._keeps_scores) and is_host_memory(logits.device)
                processed = logits[row.item()].unsqueeze(0) if is_passing else logits.index_select(0, row)
                if self._by_id:
                    processed = self._by_id(torch.cat([input_ids, path], dim=1), processed)
                if count is not None and not few:
                    left = self._by_value.sparse(processed, top_k_ids(processed, count))[0]
                if left is None:
                    return self._by_value(input_ids, processed)
            return left

        return process

    def _until_done(self, walked: BatchedWalk, input_ids: torch.Tensor) -> tuple[Outcome, bool]:
        """What of a walk that was not looked at comes out, and whether that ends the text. Waits for the device once,
        for all that the host has to know."""
        n, length = walked.token_ids.shape[0], input_ids.shape[1]
        stops = self._stops_by_text(walked.token_ids, input_ids)
        read = torch.cat([walked.token_ids, walked.goes_on, *stops]).tolist()
        token_ids, goes_on, stops = read[:n], read[n : 2 * n - 1], read[2 * n - 1 :]

        def stops_after(count: int) -> bool:
            return token_ids[count - 1] in self._ends or any(stops[count - 1 :: n])

        count = next((one for one in range(1, n) if not goes_on[one - 1] or stops_after(one)), n)
        _require_tokens(token_ids[:count])
        is_done = stops_after(count)
        # A text that is too long, or comes too late, stays so as it grows.
        if length + count >= self._first_length_of_note and self._stops_at(length + count):
            is_done, count = True, next((one for one in range(1, count) if self._stops_at(length + one)), count)
        return walked.outcome(token_ids[:count]), is_done

    def _stops_by_text(self, token_ids: torch.Tensor, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """For each criterion that looks at the text bool `[n]`: whether it stops after each of `n` more tokens."""
        if not self._by_text:
            return []
        # Some token in the place of `NO_TOKEN`, which criteria cannot look up.
        text = torch.cat([input_ids, token_ids.clamp_min(0).unsqueeze(0)], dim=1)
        ends = range(input_ids.shape[1] + 1, text.shape[1] + 1)
        return [torch.cat([one(text[:, :end], None) for end in ends]) for one in self._by_text]

    def _stops_at(self, length: int) -> bool:
        """Whether a criterion that looks at no token stops a text of that length."""
        # On the CPU, where the answer is at hand.
        text = torch.empty(1, 1, dtype=torch.int64, device="cpu").expand(1, length)
        return any(bool(one(text, None)) for one in self._by_length_or_time)


def _require_tokens(token_ids: Sequence[int]) -> None:
    """Raise the error that drawing could not: plain generate's draws raise it too."""
    if NO_TOKEN in token_ids:
        raise TargetError(
            "no token can be drawn: the target's probabilities are NaN, as its logits hold NaN or infinity, or the "
            "logits processors left nothing. Look at its dtype first: fp16 overflows where bf16 does not."
        )


def _first_length_of_note(criterion: MaxLengthCriteria | MaxTimeCriteria) -> int:
    """From which length of the text on the criterion stops it, or warns of it."""
    if type(criterion) is MaxTimeCriteria:
        return 0
    # It warns of what is longer than the model's positions.
    positions = criterion.max_position_embeddings
    return criterion.max_length if positions is None else min(criterion.max_length, positions + 1)


def _scores_with(scores: tuple[torch.Tensor, ...] | None, steps: Sequence[Step]) -> tuple[torch.Tensor, ...] | None:
    return None if scores is None else scores + tuple(one.scores for one in steps)
