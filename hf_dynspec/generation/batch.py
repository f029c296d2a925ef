"""Calls in memory of a fixed size: batches, and single texts that ask for a static cache.

transformers prepares each text alone, so that processors and criteria see no padding and no other text. Each text is
then a call of its own, which ends by itself. Rounds over fixed memory (`rounds`) draft, verify and accept for all
texts at once. For a call that these cannot do (`fixed_lane.why_not`), each text drafts and accepts alone, and only the
target reads all texts at once.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_names import CACHE_NAMES
from ..drafting.guards import outside_inference_mode
from ..errors import UnsupportedError
from ..modeling.parts import input_device
from .arguments import STATIC_CACHE, CallArguments
from .bindable import Assistant
from .fixed_lane import InRounds, why_no_graph, why_not
from .media import Media, divide_media, takes_media
from .text_by_text import TextByText
from .texts import CommonCriteria, Prepared, Text
from .verification import divide_criteria

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
    target = assistant.target
    # transformers names arguments that the target does not take, such as misspelled ones.
    takers = (GenerationMixin.generate, target.prepare_inputs_for_generation, target.forward)
    taken = {name for one in takers for name in signature(one).parameters}
    media = () if takes_media(target) else _arguments_of_media(call, settings)
    others = [name for name in media if name in taken and name not in CACHE_NAMES]
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
    names += [name for name in CACHE_NAMES if call.get(name) is not None]
    is_usual = call.asked("cache_implementation") in (None, "dynamic", STATIC_CACHE)
    names += [] if is_usual else ["cache_implementation"]
    refusals = [
        (assistant.owner is not assistant, f"a conversation is not kept {where}: {way_out}."),
        (
            assistant.owner.drafter.reads_cache,
            f"the drafter reads the target's dynamic cache, and there is none {where}: {way_out}.",
        ),
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


def _arguments_of_media(call: CallArguments, settings: GenerationConfig) -> list[str]:
    """The names of the arguments that are neither known nor settings."""
    given = [name for name, value in call.kwargs.items() if value is not None]
    return [name for name in given if name not in _KNOWN_ARGUMENTS and not hasattr(settings, name)]


def why_general(assistant: Any, call: CallArguments, settings: GenerationConfig) -> str | None:
    """Why a text that asks for nothing special is generated in the general lane (None: in fixed memory, as far as can
    be told now)."""
    if assistant.owner is not assistant:
        return "a conversation goes on"
    if assistant.forward.rollback.has_states:
        return "the target keeps a recurrent state"
    reason = why_no_graph(assistant) or why_not(assistant)
    if reason is None and call.asked("cache_implementation") not in (None, "dynamic"):
        reason = "another kind of cache is asked for"
    if reason is None and settings.return_dict_in_generate:
        reason = "the cache is returned"
    if reason is None:
        try:
            check_batch(assistant, call, settings)
            assistant.forward.require_batches()
        except UnsupportedError as error:
            reason = str(error)
    return reason


@outside_inference_mode
def generate_batch(
    target: PreTrainedModel,
    inner: Callable[..., Any],
    call: CallArguments,
    settings: GenerationConfig,
    assistant: Assistant,
    is_asked: bool,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generate one or several texts in fixed memory.

    Args:
        target: the model that verifies.
        inner: the `generate` that the target had before it was bound.
        call: the arguments, which `refusals.check_call` and `check_batch` have accepted.
        settings: the configuration that they come to.
        assistant: drafts.
        is_asked: use fixed memory also if the rounds cannot be of fixed shape.

    Returns:
        As `generate` without an assistant: int64 `[B, n + m]`, padded with `pad_token_id` after texts that ended.

    Raises:
        UnsupportedError: a processor may keep a state, or the target cannot read a batch in fixed memory.
        NotInRounds: fixed memory is not asked for, and the rounds cannot be of fixed shape. Nothing was done yet.
    """
    inputs = call.input_ids().to(input_device(target))
    is_token = _tokens_of(inputs, call.get("attention_mask"), settings)
    copies, names = settings.num_return_sequences or 1, _arguments_of_media(call, settings)
    media: list[Media | None] = [None] * len(inputs)
    if names:
        media = divide_media(target, inner, call, inputs, is_token.to(inputs.device))
        call = call.copy()
        for name in names:
            call.remove(name)
    prepared = [
        _prepare(inner, call, settings, row[mask.to(row.device)].unsqueeze(0), len(row))
        for row, mask in zip(inputs, is_token, strict=True)
        for _ in range(copies)
    ]
    assistant.forward.require_batches()
    texts = [
        Text(target, one, assistant.measure_coverage, media[number // copies]) for number, one in enumerate(prepared)
    ]
    longest = max(text.most_tokens for text in texts)
    reason = why_not(assistant, len(texts), longest) or next(filter(None, map(Text.why_not_in_rounds, texts)), None)
    if not is_asked and not bool(is_token.all()) and texts[0].verifier.looks_at_ids:
        reason = reason or "a logits processor looks at padding"
    streamer, (_, criteria) = call.get("streamer"), divide_criteria(prepared[0].stopping_criteria)
    refused = next((text.why_refused() for text in texts if text.why_refused()), None)
    if streamer is not None and criteria:
        refused = "a streamer would get tokens before a stopping criterion of your own is asked"
    padding = prepared[0].generation_config._pad_token_tensor
    padding = 0 if padding is None else int(padding)
    common = CommonCriteria(criteria, texts, inputs.repeat_interleave(copies, dim=0), padding)
    run, reason = None, reason or refused
    if reason is None:
        run = InRounds(assistant, texts, longest, common)
        reason = run.why_not()
    if reason is not None and not is_asked:
        raise NotInRounds(reason)
    if refused is not None:
        raise UnsupportedError(
            f"{refused}: call generate once for each prompt, with cache_implementation unset, or leave it out."
        )
    if streamer is not None:
        streamer.put(inputs.cpu())
    with run if reason is None else TextByText(assistant, texts, longest, common, reason) as run:
        run.generate(streamer)
    if streamer is not None:
        streamer.end()
    new = [text.new_tokens for text in texts]
    width = max(map(len, new))
    sequences = inputs.new_full((len(texts), inputs.shape[1] + width), padding)
    for row, (sequence, tokens) in enumerate(zip(sequences, new, strict=True)):
        sequence[: inputs.shape[1]] = inputs[row // copies]
        sequence[inputs.shape[1] : inputs.shape[1] + len(tokens)] = tokens
    return GenerateDecoderOnlyOutput(sequences=sequences) if settings.return_dict_in_generate else sequences


class NotInRounds(Exception):
    """Rounds of fixed shape cannot generate a call that did not ask for fixed memory. The message is the reason."""


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


def _prepare(
    inner: Callable[..., Any], call: CallArguments, settings: GenerationConfig, text: torch.Tensor, padded_length: int
) -> Prepared:
    """Let transformers prepare a text, int64 `[1, n]`.

    Args:
        inner: transformers' `generate`.
        call: the arguments of the batch.
        settings: the configuration that they come to.
        text: without padding.
        padded_length: the length of the batch's prompts, to which `max_length` and `min_length` refer.
    """

    def collect(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Prepared:
        processors, criteria = prepared["logits_processor"], prepared["stopping_criteria"]
        return Prepared(input_ids, processors, criteria, prepared["generation_config"])

    one = call.copy()
    one.set("inputs" if call.get("inputs") is not None else "input_ids", text)
    one.set("attention_mask", torch.ones_like(text))
    one.set("num_return_sequences", 1)
    one.set("custom_generate", collect)
    # The cache that transformers makes is not used.
    one.set("cache_implementation", "dynamic")
    for name in ("assistant_model", "streamer"):
        one.remove(name)
    for name in ("max_length", "min_length"):
        length = getattr(settings, name)
        # A number of new tokens goes before the length of the text.
        if length and (name == "min_length" or settings.max_new_tokens is None):
            one.set(name, max(0, length - padded_length + text.shape[1]))
    return inner(*one.args, **one.kwargs)
