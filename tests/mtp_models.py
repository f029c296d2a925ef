"""Tiny targets with multi-token-prediction layers in their checkpoints, as public ones have them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from models import BOS, EOS, PAD, VOCABULARY, with_clear_preferences
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_dynspec.loading import without_warnings_of_transformers

LAYERS = 2
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_QWEN = {"num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2} | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# The names of classes of transformers, and shapes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _EXPERTS
        | {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        | {"num_key_value_heads": 4},
    ),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", _EXPERTS | {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _QWEN | {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN),
    # One layer at most, with a window, and a rotation for each kind of layer.
    "mellum": (
        "MellumConfig",
        "MellumForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
}


# The kinds of layers: of the target's, and of its last one and the MTP layers.
_KINDS = dict.fromkeys(("qwen3_next", "qwen3_5"), ("linear_attention", "full_attention"))
_KINDS["mellum"] = ("full_attention", "sliding_attention")
# With a layer in `mtp.*`.
_BESIDE = ("qwen3_next", "qwen3_5", "mellum")


def save_with_mtp(folder: Path, family: str, count: int = 1, seed: int = 0) -> PreTrainedModel:
    """Save a target of `LAYERS` layers with `count` MTP layers, in the layout of its family, and load it."""
    *classes, shape = FAMILIES[family]
    configuration, architecture = (getattr(transformers, name) for name in classes)
    kinds = {}
    if family in _KINDS:
        kinds = {"layer_types": [_KINDS[family][0]] * (LAYERS - 1) + [_KINDS[family][1]] * (count + 1)}
    config = configuration(**{**_SHAPE, **shape, **kinds, "num_hidden_layers": LAYERS + count})
    torch.manual_seed(seed)
    model = with_clear_preferences(architecture(config).eval())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Layers that change their input little, so that MTP layers that pass the embedding on agree with them.
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.mul_(0.25)
    model.save_pretrained(folder)
    config = configuration(**{**_SHAPE, **shape, "num_hidden_layers": LAYERS})
    if kinds:
        config.layer_types = kinds["layer_types"][:LAYERS]
    config.architectures = [architecture.__name__]
    config.num_mtp_layers = count
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(_as_mtp_layers(load_file(path), family, count), path, metadata={"format": "pt"})
    with without_warnings_of_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _as_mtp_layers(tensors: dict[str, torch.Tensor], family: str, count: int) -> dict[str, torch.Tensor]:
    """The tensors of a model, whose last layers become MTP layers."""
    width = _SHAPE["hidden_size"]
    zero_centred = family.startswith("qwen3")
    named = {}
    for name, tensor in tensors.items():
        at = name.removeprefix("model.layers.").split(".")[0]
        if not name.startswith("model.layers.") or int(at) < LAYERS:
            named[name] = tensor
            continue
        rest, at = name.removeprefix(f"model.layers.{at}."), int(at) - LAYERS
        stem = "model.mtp_layers." if family == "qwen2" else "mtp.layers." if family in _BESIDE else ""
        named[(f"{stem}{at}." if stem else f"model.layers.{LAYERS + at}.") + rest] = tensor
    for at in range(count):
        parts, stem = ("enorm", "hnorm", "shared_head.norm", "eh_proj"), f"model.layers.{LAYERS + at}."
        if family in _BESIDE:
            parts, stem = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"), "mtp."
        elif family == "qwen2":
            parts = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
            stem = f"model.mtp_layers.{at}."
        else:
            named[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            named[f"{stem}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        norms = [(torch.rand(width) - 0.5) * 0.4 + (not zero_centred) for _ in range(2)]
        for part, norm in zip(parts, [*norms, tensors["model.norm.weight"].clone()], strict=False):
            named[f"{stem}{part}.weight"] = norm
        both = [torch.eye(width), 0.1 * torch.randn(width, width) * width**-0.5]
        named[f"{stem}{parts[3]}.weight"] = torch.cat(both[::-1] if family == "qwen2" else both, 1)
    return named


def write_layer_for(target: PreTrainedModel, folder: Path) -> None:
    """A checkpoint with an MTP layer alone, a copy of the target's last layer, in the layout of Qwen3-Next."""
    width = target.config.hidden_size
    named = {f"layers.0.{name}": one for name, one in target.model.layers[-1].state_dict().items()}
    named |= {f"{name}.weight": torch.ones(width) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    named["fc.weight"] = torch.eye(width, 2 * width)
    folder.mkdir(parents=True)
    target.config.save_pretrained(folder)
    held = {f"mtp.{name}": one.contiguous().clone() for name, one in named.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
