"""The targets and the calls that are refused, each by name and with the way out."""

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from ..cache_names import CACHE, cached_tokens
from ..errors import UnsupportedError
from ..modeling.parts import is_tensor_parallel, require_real_tokens
from ..shortlists import ShortlistPolicy
from ..tree_config import AUTO
from .arguments import CACHES_THAT_CAN_BE_CROPPED, STATIC_CACHE, CallArguments
from .bindable import Assistant

# Ways to generate that transformers chooses by a setting, and that leave no place for an assistant.
_OTHER_METHODS = {
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup, another way of drafting",
    "assistant_early_exit": "early exit, another way of drafting",
    "use_mtp": "multi-token prediction, another way of drafting",
    "speculation_type": "another way of drafting",
    "assistant_ensemble_weight": "ensemble verification, whose output is not the target's own",
}


def check_target(target: Any) -> None:
    """Refuse targets that cannot be bound.

    Raises:
        UnsupportedError: not a transformers model that generates, an encoder-decoder model, or one whose parameters
            are sharded.
    """
    if not isinstance(target, PreTrainedModel) or not target.can_generate():
        raise UnsupportedError(
            f"the target must be a transformers model with generate, got {type(target).__name__}. "
            "Load it with AutoModelForCausalLM.from_pretrained."
        )
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} is an encoder-decoder model, and only decoder-only targets are supported. Use transformers' own "
            "assisted generation: pass the drafter itself as assistant_model."
        )
    _check_sharding(target)


def _check_sharding(target: PreTrainedModel) -> None:
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target):
        raise UnsupportedError(
            "the target's parameters are sharded by FSDP or DeepSpeed ZeRO-3, where all processes must run in step. "
            "Load the model with device_map='auto' to spread it over devices, or generate without an assistant."
        )


def check_clocks(target: PreTrainedModel, assistant: Assistant, settings: GenerationConfig) -> None:
    """Refuse drafting by a clock for a tensor-parallel target, whose processes must verify the same drafts
    (`UnsupportedError`)."""
    policy, length = assistant.policy, settings.num_assistant_tokens
    by_clock = {
        "num_assistant_tokens='auto'": (length == AUTO, "set a number of tokens"),
        "the policy 'auto'": (len(policy.alternatives(None)) > 1, "name one policy, such as 'hybrid'"),
        "alignment": (assistant.alignment is not None, "leave it out"),
        "retrieval in a thread": (_retrieves_beside(policy), "make the policy with synchronous=True"),
    }
    for name, (is_asked, fix) in by_clock.items():
        if is_asked and is_tensor_parallel(target):
            raise UnsupportedError(
                f"{name} goes by each process's clock, and those of a tensor-parallel target must draft alike: {fix}."
            )


def _retrieves_beside(policy: ShortlistPolicy) -> bool:
    """Whether a policy or a part of it takes up what a thread is done with."""
    parts = getattr(policy, "policies", ())
    return getattr(policy, "synchronous", None) is False or any(map(_retrieves_beside, parts))


def check_call(target: PreTrainedModel, call: CallArguments, settings: GenerationConfig) -> None:
    """Refuse what assisted generation cannot do, before any work is done.

    Args:
        target: the model that generates.
        call: its arguments.
        settings: the configuration that they come to.

    Raises:
        UnsupportedError: names the argument and the alternative.
    """
    require_real_tokens(getattr(vars(target).get("prepare_inputs_for_generation"), "__self__", None))
    inputs = call.input_ids()
    cache_implementation = call.asked("cache_implementation")
    asked_use_cache = call.asked("use_cache")
    refusals = [
        (
            isinstance(inputs, torch.Tensor) and (inputs.dim() != 2 or not inputs.shape[1]),
            "prompts are int64 [B, n], n at least 1: pass the input_ids that a tokenizer returns, or leave them out "
            "to begin with the BOS token.",
        ),
        (
            call.get("inputs_embeds") is not None,
            "inputs_embeds is not supported, as the drafter needs token ids: pass input_ids.",
        ),
        (
            (settings.num_beams or 1) > 1,
            "beam search is not supported: set num_beams=1.",
        ),
        (
            asked_use_cache is False,
            "use_cache=False is not supported, as verification rolls the cache back: leave use_cache at True.",
        ),
        (
            cache_implementation not in (*CACHES_THAT_CAN_BE_CROPPED, STATIC_CACHE),
            f"cache_implementation={cache_implementation!r} cannot be rolled back to the accepted tokens: leave it "
            "unset for a dynamic cache.",
        ),
        (
            call.get("custom_generate") is not None,
            "custom_generate replaces the loop that the assistant works in: leave one of the two out.",
        ),
        (
            bool(call.get("synced_gpus")),
            "synced_gpus=True is for FSDP and ZeRO-3, which are not supported: leave it unset.",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise UnsupportedError(reason)
    check_method(settings)
    _check_passed_cache(call, inputs)
    _check_sharding(target)


def check_method(settings: GenerationConfig) -> None:
    """Refuse settings by which transformers generates in another way than greedily or by sampling."""
    ensemble = getattr(settings, "assistant_ensemble_weight", None) is not None
    is_plain = settings.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    if is_plain and not ensemble and getattr(settings, "speculation_type", None) is None:
        return
    asked = [name for name in _OTHER_METHODS if getattr(settings, name, None)]
    named = asked[0] if asked else settings.get_generation_mode().value
    raise UnsupportedError(
        f"{named} asks for {_OTHER_METHODS.get(named, 'another decoding method')}, in which there is no place for "
        f"this assistant: leave {named} or assistant_model out."
    )


def _check_passed_cache(call: CallArguments, inputs: Any) -> None:
    """Refuse caches that cannot be rolled back, and those that leave nothing to read."""
    cache = call.cache()
    if cache is None:
        return
    if not isinstance(cache, DynamicCache):
        raise UnsupportedError(
            f"a {type(cache).__name__} cannot be rolled back to the accepted tokens: pass a DynamicCache as {CACHE}."
        )
    mask = call.get("attention_mask")
    cached = cached_tokens(cache)
    if not isinstance(inputs, torch.Tensor) or (mask is not None and mask.shape[1] != inputs.shape[1]):
        return
    if cached and cached >= inputs.shape[1]:
        raise UnsupportedError(
            f"{CACHE} holds {cached} tokens, which is all of the prompt's {inputs.shape[1]}, and the target "
            f"must read at least the last one: call {CACHE}.crop({inputs.shape[1] - 1 - cached}) first, or "
            "pass new tokens alone together with the attention_mask of the whole text."
        )
