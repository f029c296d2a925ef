"""The decoding loop: propose, verify in one forward of the target, keep what holds. Entered through `custom_generate`.

transformers prepares the call (inputs, cache, processors, criteria) and hands it over. The loop differs from its
assisted-decoding loop in five ways: candidates may be a tree; stopping criteria see every token, so that none comes
out after the one that stops; a passed-in cache is not read again; processors that look at values only take all
positions at once; and sampling draws one random number where a multinomial draws one for each token of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..errors import UnsupportedError
from ..protocol import Candidates
from .drafting import Drafting
from .processing import divide, take_batches
from .target import keep_path
from .verification import Outcome, verify_greedy, verify_sampled


def decode(
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
    """Generate with chains or trees of candidates.

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
    drafting: Drafting = drafting_call.drafting(
        generation_config=generation_config,
        input_ids=input_ids,
        logits_processor=logits_processor,
        model_kwargs=model_kwargs,
    )
    is_first, is_done = True, False
    while not is_done:
        length = input_ids.shape[1]
        candidates = drafting.propose(input_ids)
        k = 0 if candidates is None else candidates.token_ids.shape[0]
        outputs = drafting.verify(input_ids, candidates, is_first, model_kwargs)
        logits = outputs.logits[0].to(device=input_ids.device, dtype=torch.float32)
        scores = verifier.process(logits, input_ids, candidates)
        outcome = verifier.verify(scores, candidates)

        extended = torch.cat([input_ids, outcome.token_ids.unsqueeze(0)], dim=1)
        record.add_scores(scores, logits, outcome)
        kept, is_done = _tokens_until_done(stopping_criteria, extended, length, record.scores)
        outcome = outcome.first(kept)
        input_ids = extended[:, : length + kept]
        record.keep_scores(input_ids.shape[1])
        if token_streamer is not None:
            token_streamer.put(input_ids[0, length:].cpu())
        cache = outputs.past_key_values
        if candidates is None or candidates.is_chain:
            cache.crop(kept - 1 - k)
        else:
            keep_path(cache, k, outcome.rows[1:] - 1)
        drafting.observe(outputs, outcome, scores, is_done)
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=kept)
        record.add_states(outputs, k, outcome, length)
        is_first = False
    if token_streamer is not None:
        token_streamer.end()
    return record.result(input_ids, cache)


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
        self._in_batches = take_batches(self._by_id)
        self._do_sample = do_sample
        self._probabilities: torch.Tensor | None = None

    def process(self, logits: torch.Tensor, input_ids: torch.Tensor, candidates: Candidates | None) -> torch.Tensor:
        """fp32 `[k + 1, V]`: each row processed with the tokens on the path to it as its context."""
        scores = logits
        if self._by_id:
            # Processors may write into what they are given.
            scores = logits.clone()
            for rows, context in _contexts(input_ids, candidates):
                size = context.shape[0] if self._in_batches else 1
                parts = zip(context.split(size), scores[rows].split(size), strict=True)
                scores[rows] = torch.cat([self._by_id(one, own) for one, own in parts])
        return self._by_value(input_ids, scores) if self._by_value else scores

    def verify(self, scores: torch.Tensor, candidates: Candidates | None) -> Outcome:
        """See `verification`."""
        if not self._do_sample:
            return verify_greedy(scores, candidates)
        if self._probabilities is None or self._probabilities.shape[0] < scores.shape[0]:
            self._probabilities = torch.empty_like(scores)
        return verify_sampled(scores, candidates, self._probabilities)


def _contexts(input_ids: torch.Tensor, candidates: Candidates | None) -> Iterator[tuple[Any, torch.Tensor]]:
    """Which scored rows have contexts of the same length, and those contexts, int64 `[rows, n + depth]`."""
    yield slice(0, 1), input_ids
    if candidates is None:
        return
    token_ids = candidates.token_ids.to(input_ids.device).unsqueeze(1)
    if candidates.is_chain:
        for i in range(token_ids.shape[0]):
            yield slice(i + 1, i + 2), torch.cat([input_ids, token_ids[: i + 1].T], dim=1)
        return
    # Nodes come level by level. This waits for the device once, for processors that look at ids only.
    sizes = [(candidates.depths == depth).sum() for depth in range(len(candidates.shortlists))]
    parents = candidates.parents.to(input_ids.device)
    above, start = input_ids, 0
    for depth, size in enumerate(torch.stack(sizes).tolist()):
        nodes = slice(start, start + size)
        first_above = start - above.shape[0] if depth else -1
        above = torch.cat([above[parents[nodes] - first_above], token_ids[nodes]], dim=1)
        start += size
        if size:
            yield slice(nodes.start + 1, nodes.stop + 1), above


class _Record:
    """Collects what `return_dict_in_generate` asks for, one entry per token as plain generation does."""

    def __init__(self, config: GenerationConfig, prompt_length: int):
        self._returns_dict = bool(config.return_dict_in_generate)
        self._prompt_length = prompt_length
        self.scores = () if self._returns_dict and config.output_scores else None
        self._logits = () if self._returns_dict and config.output_logits else None
        self._attentions = () if self._returns_dict and config.output_attentions else None
        self._hidden_states = () if self._returns_dict and config.output_hidden_states else None

    def add_scores(self, scores: torch.Tensor, logits: torch.Tensor, outcome: Outcome) -> None:
        """Add the rows of one round's tokens; `keep_scores` takes back those whose tokens do not come out."""
        if self.scores is not None:
            self.scores += scores[outcome.rows].split(1)
        if self._logits is not None:
            self._logits += logits[outcome.rows].split(1)

    def keep_scores(self, length: int) -> None:
        """Keep as many rows as there are new tokens in a sequence of this length."""
        if self.scores is not None:
            self.scores = self.scores[: length - self._prompt_length]
        if self._logits is not None:
            self._logits = self._logits[: length - self._prompt_length]

    def add_states(self, outputs: Any, drafted: int, outcome: Outcome, length: int) -> None:
        """Add the attentions and hidden states of one round.

        Args:
            outputs: the target's.
            drafted: how many candidates it read.
            outcome: the tokens that came out.
            length: of the sequence before the round.
        """
        kept = outcome.accepted + 1
        for wanted, states, keys in (
            ("_attentions", outputs.attentions, length),
            ("_hidden_states", outputs.hidden_states, None),
        ):
            collected = getattr(self, wanted)
            if collected is None or states[0] is None:
                continue
            if isinstance(outcome.rows, torch.Tensor):
                path = tuple(_along_path(layer, drafted, outcome.rows, keys is not None) for layer in states)
                entries = _split_by_token(path, kept - 1, kept, not collected, keys)
            else:
                entries = _split_by_token(states, drafted, kept, not collected, keys)
            setattr(self, wanted, collected + entries)

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


def _along_path(states: torch.Tensor, drafted: int, rows: torch.Tensor, has_keys: bool = False) -> torch.Tensor:
    """The rows of a tree's states that lie on one path, and of attentions the columns that do, as a chain has them."""
    path = rows + states.shape[-2] - drafted - 1
    states = states.index_select(-2, path.to(states.device))
    if not has_keys:
        return states
    prefix = states.shape[-1] - drafted
    columns = torch.cat([torch.arange(prefix, device=rows.device), rows[1:] - 1 + prefix])
    return states.index_select(-1, columns.to(states.device))


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
