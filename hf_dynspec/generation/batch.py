"""Calls in memory of a fixed size: batches, and single texts that ask for a static cache.

transformers prepares each text alone, so that processors and criteria see no padding and no other text. Each text is
then a call of its own, which drafts, accepts and ends by itself. Only the target reads all texts at once: it verifies
the drafts of all of them in one forward over fixed memory.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import CACHE, cache_inputs, returned_cache
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..errors import UnsupportedError
from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from ..modeling.masks import descent
from ..modeling.parts import input_device
from ..protocol import Candidates
from ..stats import DraftingStatistics, Stopwatch
from ..tree_config import AUTO, LONGEST_DRAFT
from .arguments import STATIC_CACHE, CallArguments
from .bindable import Assistant
from .generate_call import GenerateCall
from .verification import Outcome, Verifier

# Positions that memory has beyond the longest prompt at first. It is doubled when a text outgrows it.
_FIRST_POSITIONS = 256
# Arguments of `generate` that a batch may have besides settings.
_KNOWN_ARGUMENTS = {"inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "tokenizer"}
_KNOWN_ARGUMENTS |= {"stopping_criteria", "assistant_model", "streamer", "custom_generate"}


def takes_fixed_memory(call: CallArguments, settings: GenerationConfig) -> bool:
    """Whether a call generates several texts, or asks for a static cache."""
    return _count(call, settings) > 1 or call.asked("cache_implementation") == STATIC_CACHE


def _count(call: CallArguments, settings: GenerationConfig) -> int:
    """The texts that a call generates."""
    inputs = call.input_ids()
    rows = inputs.shape[0] if isinstance(inputs, torch.Tensor) and inputs.dim() == 2 else 1
    return rows * (settings.num_return_sequences or 1)


def check_batch(assistant: Any, call: CallArguments, settings: GenerationConfig) -> None:
    """Refuse what a call in fixed memory cannot do, before any work is done.

    Raises:
        UnsupportedError: names the argument and the alternative.
    """
    given = [name for name, value in call.kwargs.items() if value is not None]
    others = [name for name in given if name not in _KNOWN_ARGUMENTS and not hasattr(settings, name)]
    mask = call.get("attention_mask")
    outputs = [
        name
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        if settings.return_dict_in_generate and getattr(settings, name)
    ]
    is_one = _count(call, settings) == 1
    where = f"with cache_implementation='{STATIC_CACHE}'" if is_one else "in a batch"
    way_out = "leave cache_implementation unset" if is_one else "call generate once for each prompt"
    names = [*outputs, *others, *(["token_healing"] if settings.token_healing else [])]
    names += [CACHE] if call.cache() is not None else []
    refusals = [
        (assistant.owner is not assistant, f"a conversation is not kept {where}: {way_out}."),
        (call.input_ids() is None, "pass input_ids, such as the BOS token alone."),
        (
            not is_one and call.get("streamer") is not None,
            "a streamer shows one text: leave it out, or pass one prompt.",
        ),
        (bool(names), f"{' and '.join(names)} cannot be used {where}: {way_out}, or leave it out."),
        (
            isinstance(mask, torch.Tensor) and not bool(mask[:, -1].all()),
            "a prompt of a batch has no token at its end: pad at the left, with padding_side='left'.",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise UnsupportedError(reason)


@torch.no_grad()
def generate_batch(
    target: PreTrainedModel,
    inner: Callable[..., Any],
    call: CallArguments,
    settings: GenerationConfig,
    assistant: Assistant,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate one or several texts in fixed memory.

    Args:
        target: the model that verifies.
        inner: the `generate` that the target had before it was bound.
        call: the arguments, which `refusals.check_call` and `check_batch` have accepted.
        settings: the configuration that they come to.
        assistant: drafts.

    Returns:
        As `generate` without an assistant: int64 `[B, n + m]`, padded with `pad_token_id` after texts that ended.

    Raises:
        UnsupportedError: a processor or criterion may keep a state, or the target cannot read a batch in fixed memory.
    """
    inputs = call.input_ids().to(input_device(target))
    is_token = _tokens_of(inputs, call.get("attention_mask"), settings)
    copies = settings.num_return_sequences or 1
    prepared = [
        _prepared(inner, call, row[mask.to(row.device)].unsqueeze(0), len(row))
        for row, mask in zip(inputs, is_token, strict=True)
        for _ in range(copies)
    ]
    batch = _Batch(assistant)
    streamer = call.get("streamer")
    try:
        with ExitStack() as stack:
            calls = [stack.enter_context(assistant.open_call()) for _ in prepared]
            texts = [_Text(target, one, each, streamer) for one, each in zip(prepared, calls, strict=True)]
            batch.run(texts)
    finally:
        batch.publish()
    if streamer is not None:
        streamer.end()
    new = [text.new_tokens for text in texts]
    width = max(map(len, new))
    padding = prepared[0].generation_config._pad_token_tensor
    sequences = inputs.new_full((len(texts), inputs.shape[1] + width), 0 if padding is None else int(padding))
    for row, (sequence, tokens) in enumerate(zip(sequences, new, strict=True)):
        sequence[: inputs.shape[1]] = inputs[row // copies]
        sequence[inputs.shape[1] : inputs.shape[1] + len(tokens)] = tokens
    return GenerateDecoderOnlyOutput(sequences=sequences) if settings.return_dict_in_generate else sequences


def _tokens_of(inputs: torch.Tensor, mask: torch.Tensor | None, settings: GenerationConfig) -> torch.Tensor:
    """bool `[B, n]`: which entries are tokens. Without a mask, padding is told as transformers tells it."""
    padding, ends = settings.pad_token_id, settings.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if mask is not None:
        is_token = mask.bool()
    elif padding is None or padding in ends:
        is_token = torch.ones_like(inputs, dtype=torch.bool)
    else:
        is_token = inputs != padding
    if not bool(is_token.any(1).all()):
        raise UnsupportedError("a prompt of the batch has no visible token: leave it out, or pass it alone.")
    return is_token


class _Prepared(NamedTuple):
    """A call of one text, as transformers prepared it for a decoding loop."""

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig


def _prepared(inner: Callable[..., Any], call: CallArguments, text: torch.Tensor, padded_length: int) -> _Prepared:
    """Let transformers prepare a text, int64 `[1, n]`.

    Args:
        inner: transformers' `generate`.
        call: the arguments of the batch.
        text: without padding.
        padded_length: the length of the batch's prompts, to which `max_length` and `min_length` refer.
    """

    def collect(model: Any, input_ids: torch.Tensor, **prepared: Any) -> _Prepared:
        processors, criteria = prepared["logits_processor"], prepared["stopping_criteria"]
        return _Prepared(input_ids, processors, criteria, prepared["generation_config"])

    one = call.copy()
    one.set("inputs" if call.get("inputs") is not None else "input_ids", text)
    one.set("attention_mask", torch.ones_like(text))
    one.set("num_return_sequences", 1)
    one.set("custom_generate", collect)
    # The cache that transformers makes is not used.
    one.set("cache_implementation", "dynamic")
    one.remove("assistant_model")
    for name in ("max_length", "min_length"):
        length = call.asked(name)
        if length:
            one.set(name, max(0, length - padded_length + text.shape[1]))
    return inner(*one.args, **one.kwargs)


class _Text:
    """One text of a batch.

    Args:
        target: the model that verifies.
        prepared: the text, and its processors and criteria.
        call: an entered call of its own.
        streamer: gets the new tokens of each round, or None.

    Attributes:
        is_done: whether the text has ended.
        candidates: of the current round.
    """

    def __init__(self, target: PreTrainedModel, prepared: _Prepared, call: GenerateCall, streamer: Any):
        self._prepared, self.call, self._streamer = prepared, call, streamer
        # All texts together make the counts of one call.
        call.publishes = False
        self.input_ids, config = prepared.input_ids, prepared.generation_config
        processors, criteria = prepared.logits_processor, prepared.stopping_criteria
        self._verifier = Verifier(processors, criteria, bool(config.do_sample), call.wants_scores)
        if self._verifier.is_stepwise:
            raise UnsupportedError(
                "a logits processor or stopping criterion may keep a state, which texts in fixed memory cannot share: "
                "call generate once for each prompt, with cache_implementation unset."
            )
        self.cache = DynamicCache(config=target.config.get_text_config())
        self._kwargs = cache_inputs(self.cache) | {"attention_mask": torch.ones_like(self.input_ids)}
        self.is_done = False
        self.candidates: Candidates | None = None

    @property
    def call_length(self) -> int:
        """The longest that the text may become."""
        return self._prepared.generation_config.max_length

    @property
    def new_tokens(self) -> torch.Tensor:
        """int64 `[m]`: the tokens after the prompt."""
        return self.input_ids[0, self._prepared.input_ids.shape[1] :]

    def read_prompt(self) -> None:
        """Let the target read the prompt alone, and choose the first token."""
        self.cache.activate_past_recording()
        config, processors = self._prepared.generation_config, self._prepared.logits_processor
        self.call.begin(config, self.input_ids, processors, dict(self._kwargs))
        self.call.propose(self.input_ids, drafts=False)
        outputs = self.call.verify(self.input_ids, None, True, self._kwargs)
        self.cache = returned_cache(outputs)
        self.cache.crop(0)
        self.observe(outputs)

    def propose(self) -> None:
        """Draft the candidates of a round."""
        self.candidates = self.call.propose(self.input_ids)

    def observe(self, outputs: CausalLMOutputWithPast) -> Outcome:
        """Accept candidates, and let the call observe the outcome."""
        logits = outputs.logits[0].to(device=self.input_ids.device, dtype=torch.float32)
        verified = self._verifier.verify(logits, self.input_ids, self.candidates, None, self.call.best_tokens)
        outcome, self.is_done = verified
        self.input_ids = torch.cat([self.input_ids, outcome.token_ids.unsqueeze(0)], dim=1)
        if self._streamer is not None:
            self._streamer.put(outcome.tokens_on_host())
        self.call.observe(outputs, outcome, self.is_done)
        return outcome


class _Batch:
    """Verifies the drafts of several texts in one forward of the target.

    Args:
        assistant: a bound assistant.

    Raises:
        UnsupportedError: its target cannot read a batch in fixed memory.
    """

    def __init__(self, assistant: Assistant):
        self._assistant, self._forward = assistant, assistant.forward
        self._target = self._forward.model
        self._forward.require_batches()
        self._decoder = FixedDecoder(self._target)
        self._most_nodes = _most_nodes(assistant)
        devices = (assistant.drafter.head.device, assistant.target.device)
        self._stopwatch = Stopwatch(assistant.profile, devices)
        self._start = self._stopwatch.now() if self._stopwatch.enabled else 0.0
        self._calls: list[GenerateCall] = []
        self._texts: list[_Text] = []
        self._longest = 0
        self._memory: FixedMemory | None = None

    def run(self, texts: list[_Text]) -> None:
        """Generate until all texts have ended."""
        self._calls = [text.call for text in texts]
        self._longest = max(text.call_length for text in texts)
        for text in texts:
            text.read_prompt()
            self._take_prompt(text, len(texts))
        while self._leave_ended():
            for text in self._texts:
                text.propose()
            self._reserve(max(text.input_ids.shape[1] for text in self._texts))
            with self._stopwatch.section("verification"):
                outputs = self._verify()
            outcomes = [text.observe(one) for text, one in zip(self._texts, outputs, strict=True)]
            self._keep(outcomes)

    def publish(self) -> None:
        """Make the counts of all texts together the assistant's."""
        total = DraftingStatistics()
        for call in self._calls:
            total.add(call.stats)
        if self._stopwatch.enabled:
            # A text waits for the others, so the rest of its time is not its own.
            total.seconds = {name: total.seconds.get(name, 0.0) + own for name, own in self._stopwatch.seconds.items()}
            total.seconds["other"] = max(0.0, self._stopwatch.now() - self._start - sum(total.seconds.values()))
        self._assistant.publish(total)

    def _take_prompt(self, text: _Text, count: int) -> None:
        """Take what the target remembers of a prompt, which is the next of `count`."""
        length = text.input_ids.shape[1] - 1
        if self._memory is None:
            config = self._target.config.get_text_config()
            capacity = self._capacity(length + _FIRST_POSITIONS)
            self._memory = FixedMemory.like(text.cache, config, count, capacity, self._most_nodes)
        self._reserve(length)
        self._memory.begin(len(self._texts), text.cache, length)
        text.cache = None
        self._texts.append(text)

    def _capacity(self, positions: int) -> int:
        return min(positions, self._longest) + self._most_nodes

    def _reserve(self, length: int) -> None:
        """Have memory for texts of that length and the nodes after them."""
        if length + self._most_nodes > self._memory.capacity:
            everyone = torch.arange(len(self._memory.lengths), device=self._memory.lengths.device)
            self._memory = self._memory.copy(everyone, self._capacity(2 * length))

    def _leave_ended(self) -> bool:
        """Drop texts that ended. Whether any is left."""
        going_on = [number for number, text in enumerate(self._texts) if not text.is_done]
        if len(going_on) < len(self._texts):
            kept = torch.tensor(going_on, device=self._memory.lengths.device)
            if going_on:
                self._memory = self._memory.copy(kept, self._memory.capacity)
            self._texts = [self._texts[number] for number in going_on]
        return bool(going_on)

    def _verify(self) -> list[CausalLMOutputWithPast]:
        """The target's outputs for each text, as if it had been verified alone."""
        device = self._memory.lengths.device
        trees = [_nodes_of(text.candidates, device) for text in self._texts]
        width = max(len(one.levels) for one in trees)
        token_ids = torch.zeros(len(trees), width, dtype=torch.int64, device=device)
        # What fills a text up to the width of the widest one attends to itself alone.
        within = torch.eye(width, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
        levels = torch.zeros_like(token_ids)
        for number, (text, tree) in enumerate(zip(self._texts, trees, strict=True)):
            count = len(tree.levels)
            token_ids[number, :1] = text.input_ids[0, -1:]
            if text.candidates is not None:
                token_ids[number, 1:count] = text.candidates.token_ids.to(device)
            within[number, :count, :count], levels[number, :count] = tree.within, tree.levels
        wanted = [text.call.wanted_states for text in self._texts]
        entries = True if True in wanted else sorted({entry for one in wanted if one for entry in one})
        inputs = {"output_hidden_states": entries} if entries else {}
        rows = QueryRows(self._memory.lengths, within, levels)
        outputs = self._decoder(token_ids, self._memory, rows, **inputs)
        logits = self._forward.logits(outputs.last_hidden_state)
        divided = []
        for number, (text, tree) in enumerate(zip(self._texts, trees, strict=True)):
            own = (slice(number, number + 1), slice(len(tree.levels)))
            states = outputs.hidden_states
            states = states and tuple(None if state is None else state[own] for state in states)
            one = CausalLMOutputWithPast(logits=logits[own], hidden_states=states)
            text.call.has_verified(one)
            divided.append(one)
        return divided

    def _keep(self, outcomes: list[Outcome]) -> None:
        """Keep the accepted nodes of all texts."""
        device = self._memory.lengths.device
        counts = torch.tensor([one.accepted + 1 for one in outcomes], device=device)
        path = None
        if not all(text.candidates is None or text.candidates.is_chain for text in self._texts):
            path = torch.zeros(len(outcomes), max(len(one.rows) for one in outcomes), dtype=torch.int64, device=device)
            for row, outcome in zip(path, outcomes, strict=True):
                row[: len(outcome.rows)] = outcome.rows.to(device)
        self._memory.keep(counts, path)


class _Nodes(NamedTuple):
    """The root and the candidates after it: bool `[q, q]` and int64 `[q]`, see `QueryRows`."""

    within: torch.Tensor
    levels: torch.Tensor


def _nodes_of(candidates: Candidates | None, device: torch.device) -> _Nodes:
    if candidates is None or candidates.is_chain:
        levels = torch.arange(1 if candidates is None else 1 + len(candidates.token_ids), device=device)
        return _Nodes(levels.unsqueeze(1) >= levels, levels)
    root = torch.zeros(1, dtype=torch.int64, device=device)
    parents = torch.cat([root - 1, candidates.parents.to(device) + 1])
    levels = torch.cat([root, candidates.depths.to(device) + 1])
    return _Nodes(descent(parents, len(candidates.shortlists) + 1), levels)


def _most_nodes(assistant: Assistant) -> int:
    """The most nodes of a round, the root included."""
    config = assistant.generation_config
    if assistant.tree is not None:
        return assistant.tree.total_tokens
    tokens = DEFAULT_NUM_ASSISTANT_TOKENS if config.num_assistant_tokens is None else config.num_assistant_tokens
    is_fixed = tokens != AUTO and config.num_assistant_tokens_schedule in (None, "constant")
    return 1 + (tokens if is_fixed else LONGEST_DRAFT)
