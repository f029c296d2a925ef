"""Tiny random targets and the models that draft beside them: Gemma 4's assistants, and DFlash's blocks."""

from typing import Any

import torch
from models import BOS, EOS, PAD, SLIDING_WINDOW, with_clear_preferences
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerTextConfig,
    PreTrainedModel,
)

# As many tokens in each of 20 clusters.
TOKENS, CLUSTERS = 300, 20
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": TOKENS}
_GEMMA = _SPECIAL | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": SLIDING_WINDOW,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def gemma4(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A target whose next token depends on the last one mostly."""
    config = Gemma4TextConfig(
        **_GEMMA
        | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": TOKENS}
        | changes
    )
    torch.manual_seed(seed)
    return _with_small_layers(with_clear_preferences(Gemma4ForCausalLM(config).eval()))


def gemma4_assistant(target: PreTrainedModel, seed: int = 1, clusters: int | None = 6, **changes: Any) -> Any:
    """An assistant that often agrees with a target, and takes so many of its clusters (None: it has none)."""
    width = target.config.get_text_config().hidden_size
    text = _GEMMA | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text | {"hidden_size": width} | changes),
        backbone_hidden_size=width,
        use_ordered_embeddings=clusters is not None,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=clusters or 1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = _with_small_layers(with_clear_preferences(Gemma4AssistantForCausalLM(config).eval()))
    model.generation_config.num_assistant_tokens = 5
    rows = target.get_output_embeddings().weight
    with torch.no_grad():
        # The target's embedding and a little of the hidden state, as its own layers see them.
        model.pre_projection.weight.mul_(0.3)[:, :width] += torch.eye(width)
        model.lm_head.weight.copy_(rows)
        if clusters is not None:
            # Neighbours in one direction, so that a centroid stands for its cluster.
            order = rows[:, 0].argsort()
            model.masked_embedding.token_ordering.copy_(order)
            means = rows[order].unflatten(0, (CLUSTERS, -1)).mean(1)
            model.masked_embedding.centroids.weight.copy_(means)
    return model


def muse_glimmer(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A target whose embedding has a norm that blocks are drafted without, and whose logits have a scale and a cap."""
    text = {name: _GEMMA[name] for name in _GEMMA if name != "global_head_dim"}
    config = MuseGlimmerConfig(
        text_config=MuseGlimmerTextConfig(**text | {"num_hidden_layers": 4} | changes),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        out_hidden_size=16,
        projector_hidden_size=16,
    )
    torch.manual_seed(seed)
    return _with_small_layers(with_clear_preferences(MuseGlimmerForConditionalGeneration(config).eval()))


def dflash(target: PreTrainedModel, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """A drafter of blocks of 8 for a target of 4 layers, with random weights."""
    width = target.config.get_text_config().hidden_size
    shape = {"hidden_size": width, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": width // 8, "num_key_value_heads": width // 8, "sliding_window": 24}
    shape |= {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _ROPE}
    block = {"block_size": 8, "mask_token_id": TOKENS - 1, "target_layer_ids": [0, 3]}
    torch.manual_seed(seed)
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**shape | block | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def repeating(target: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """A drafter that drafts what the target's last states say most, which often comes again in random texts."""
    model = dflash(target, seed, target_layer_ids=[3], num_hidden_layers=1, layer_types=["sliding_attention"])
    layer, fc = model.layers[0], model.encoder.fc
    with torch.no_grad():
        for one in (layer.mlp.down_proj, layer.self_attn.q_proj):
            one.weight.zero_()
        for one in (fc, layer.self_attn.v_proj, layer.self_attn.o_proj):
            one.weight.copy_(torch.eye(*one.weight.shape))
        layer.self_attn.o_proj.weight.mul_(100)
    return model


def few_worded(target: PreTrainedModel) -> PreTrainedModel:
    """A target that says a few tokens mostly, so that drafts of these are often accepted."""
    with torch.no_grad():
        target.get_output_embeddings().weight[5:11].mul_(3)
    return target


def _with_small_layers(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(0.4)
    return model
