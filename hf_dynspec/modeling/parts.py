"""The parts of a transformers model of any family, with its wrappers and adapters."""

import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import UnsupportedError

# The families' settings for the scale of logits.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)
# Errors of a model's forward for unsuitable inputs.
FORWARD_ERRORS = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)
# Unit vectors in one probe of an unknown output projection.
_PROBED_COLUMNS = 64
# Embeddings are padded to a multiple of at most this, so that siblings differ by less: Qwen2.5-7B has 152,064 rows,
# its 0.5B sibling 151,936, and their tokenizer 151,665 entries.
LARGEST_PADDING = 1024
# A configuration's names for ids in the place of parts of media.
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside `torch.compile`'s, peft's and data-parallel wrappers.

    All of these run the inner model, whose `generate` theirs ends in. peft's adapters are layers of it, and stay.

    Raises:
        UnsupportedError: the wrapper puts virtual tokens, which have no ids, before the text (prompt, prefix and
            P-tuning).
    """
    while isinstance(model, nn.Module):
        require_real_tokens(model)
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "peft_type") and hasattr(model, "get_base_model"):  # peft
            model = model.get_base_model()
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            break
    return model


def require_real_tokens(model: Any) -> None:
    """Refuse a peft wrapper that puts virtual tokens before the text (`UnsupportedError`)."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_type") else None
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(model.peft_type, "value", model.peft_type)
        raise UnsupportedError(
            f"the model is adapted by {kind}, which puts virtual tokens before the text that no drafter can read. Use "
            "an adapter in the layers, such as LoRA, or generate without an assistant."
        )


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a model from token ids to hidden states."""
    decoder = model.get_decoder()
    # For some families transformers returns the model itself, or its output projection.
    if decoder is model or decoder is model.get_output_embeddings():
        decoder = getattr(model, "model", model.base_model)
    return decoder


def input_device(model: nn.Module) -> torch.device:
    """The device of a model's token ids, also if accelerate offloads its weights."""
    device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    hooks = (getattr(one, "_hf_hook", None) for one in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((one for one in devices if one is not None), "cpu"))


def computes_in_fp32(model: nn.Module) -> bool:
    """Whether a model's logits depend on the number of tokens read at once only in the last digits of fp32."""
    try:
        multiplies_exactly = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # only some kinds of device round
        multiplies_exactly = False
    is_autocast = torch.is_autocast_enabled(input_device(model).type)
    return model.dtype == torch.float32 and multiplies_exactly and not is_autocast


def agree(model: nn.Module, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of a model are the same but for rounding."""
    tolerance = (1e-3 if computes_in_fp32(model) else 5e-2) * expected.abs().max()
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= tolerance).all())


def output_rows(model: nn.Module) -> int:
    """The number of token ids that a model scores, padding included."""
    projection = model.get_output_embeddings()
    weight = getattr(projection, "weight", None)
    if is_plain(projection):
        return weight.shape[0]
    # The weight of a quantised projection may have any shape.
    return getattr(projection, "out_features", None) or model.config.get_text_config().vocab_size


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether a model's weights are spread over processes, which run it in step."""
    return any(hasattr(one, "device_mesh") for one in model.parameters())


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is numbers in memory, and not made of other tensors, as packed and sharded ones are."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not tensor.is_quantized


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """The ids that stand in prompts for parts of images, videos and sound."""
    ids = (value for name, value in vars(config).items() if _PLACEHOLDER.fullmatch(name))
    return tuple(sorted({one for one in ids if isinstance(one, int)}))


def require_finite_weights(model: nn.Module, outputs: torch.Tensor | None = None) -> None:
    """Check whether damaged weights, or numbers that its dtype cannot hold, are the reason for wrong outputs.

    Raises:
        UnsupportedError: a parameter holds NaN or infinity, or its `outputs` do.
    """
    for name, one in model.named_parameters():
        if is_memory(one) and one.is_floating_point() and one.device.type != "meta" and not bool(one.isfinite().all()):
            raise UnsupportedError(
                f"{type(model).__name__} holds NaN or infinity in {name}. Load it anew, and not in fp16 if it was "
                "trained in bf16."
            )
    if outputs is not None and not bool(outputs.isfinite().all()):
        raise UnsupportedError(
            f"{type(model).__name__} computes NaN or infinity in {model.dtype}. Load it in bfloat16 or float32."
        )


def is_plain(projection: Any) -> bool:
    """Whether an output projection is only a product with a matrix in memory."""
    weight = getattr(projection, "weight", None)
    return (
        isinstance(projection, nn.Linear)
        and type(projection).forward is nn.Linear.forward
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight.is_floating_point()
        and weight.device.type != "meta"
    )


@torch.no_grad()
def projection_of(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight `[V, d]` and bias of a model's output projection. A plain one's is not copied; any other, such as a
    quantised or adapted one, is probed with unit vectors."""
    projection = model.get_output_embeddings()
    if is_plain(projection):
        return projection.weight, projection.bias
    if is_tensor_parallel(model):
        raise UnsupportedError(
            f"{type(model).__name__} is spread over processes, as by a tp_plan, so none has all rows of its "
            "output projection. Load a drafter without tp_plan, whole in each process; EAGLE heads, MTP layers and "
            "policies that read the target's rows need a target without one."
        )
    config, device = model.config.get_text_config(), input_device(model)
    try:
        # accelerate loads offloaded weights; without it torch would compute with undefined numbers.
        if any(one.device.type == "meta" for one in projection.parameters()) and not hasattr(projection, "_hf_hook"):
            raise ValueError("its weight is not in memory")
        width = getattr(projection, "in_features", None) or config.hidden_size
        bias = projection(torch.zeros(1, width, dtype=model.dtype, device=device))[0]
        if bias.shape != (config.vocab_size,) or bias.device.type == "meta":
            raise ValueError(f"it returns {list(bias.shape)} on {bias.device}, and not {config.vocab_size} logits")
        weight = bias.new_empty(bias.shape[0], width)
        for columns in torch.arange(width, device=device).split(_PROBED_COLUMNS):
            unit = functional.one_hot(columns, width).to(bias.dtype)
            weight[:, columns] = (projection(unit) - bias).T
        if not bool(weight.isfinite().all()):
            raise ValueError("its weights are not finite")
    except FORWARD_ERRORS as error:
        raise UnsupportedError(
            f"{type(model).__name__} has no output projection from hidden states to a vocabulary in memory "
            f"({type(projection).__name__}: {error!s:.200}). Load it without offloading, or use another model."
        ) from error
    return weight, bias if bool(bias.any()) else None


def scale_and_cap(model: nn.Module) -> tuple[float, float | None]:
    """The scale and the cap of a model's logits, by its configuration, for `finish_logits`."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    return scale, getattr(config, "final_logit_softcapping", None)
