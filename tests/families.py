"""Tiny random models of nearly every decoder-only family of text models in transformers."""

from typing import Any

import torch
import transformers
from models import BOS, EOS, PAD, SLIDING_WINDOW, VOCABULARY, with_clear_preferences
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Under every name that families use. A family takes the names that its configuration declares.
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": SLIDING_WINDOW,
    # Mixtures of experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    # Compressed keys and values.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # Recurrent states.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "mamba_n_groups"), 2),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_chunk_size"), 16),
}

_ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"]}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_ALL_HEADS = {"num_key_value_heads": 4}
_LATENT = _ALL_HEADS | {"head_dim": 8}
_DECODER = {"is_decoder": True}
_UNTIED = {"tie_word_embeddings": False}

# Families that need no setting beside the common shape; that have a layer of each kind of attention; whose keys and
# values are compressed; and encoders with a setting to attend to earlier tokens only.
_AS_THEY_ARE = """
    llama arcee apertus bitnet diffllama doge ernie4_5 glm glm4 helium hunyuan_v1_dense jais2 nanochat nemotron olmo
    olmo2 persimmon phi3 seed_oss smollm3 stablelm starcoder2 mistral ministral3 qwen2 qwen3 gemma gpt2 gpt_bigcode
    gpt_neox gpt_neox_japanese openai-gpt opt xglm biogpt bloom falcon mpt dots1 ernie4_5_moe flex_olmo glm4_moe
    hunyuan_v1_moe mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen3_moe solar_open deepseek_v4 falcon_mamba mamba
    nemotron_h olmo_hybrid rwkv xlnet
""".split()
_WITH_WINDOWS = "cwm exaone4 granite_swa olmo3 ministral cohere2_moe afmoe exaone_moe gpt_oss".split()
_COMPRESSED = "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu".split()
_ENCODERS = "bert bert-generation electra roberta roformer".split()

# Settings of a family beside the common shape. Attention windows are shorter than the texts of the tests.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _AS_THEY_ARE},
    **dict.fromkeys(_WITH_WINDOWS, _ONE_OF_EACH),
    **dict.fromkeys(_COMPRESSED, _LATENT),
    **dict.fromkeys(_ENCODERS, _DECODER),
    # Llama and its kin.
    "granite": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 2.0},
    "phi": _ALL_HEADS,
    # Gemma and Cohere.
    "gemma2": _ONE_OF_EACH | {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 8},
    "gemma3_text": _ONE_OF_EACH | {"query_pre_attn_scalar": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
    },
    "gemma4_text": _ONE_OF_EACH
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16},
    "gemma4_unified_text": _ONE_OF_EACH | {"global_head_dim": 16},
    "vaultgemma": _ONE_OF_EACH | {"query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": _ONE_OF_EACH | {"logit_scale": 0.25},
    # The first generations.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": SLIDING_WINDOW},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "ctrl": {"dff": 64},
    # Mixtures of experts.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "hidden_size": 32},
    },
    "granitemoe": {"logits_scaling": 4.0},
    "granitemoeshared": {"logits_scaling": 4.0},
    "jetmoe": {"kv_channels": 8},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": SLIDING_WINDOW,
        "intermediate_size_mlp": 64,
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    # Compressed keys and values.
    "deepseek_v32": _LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    "glm_moe_dsa": _LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    "longcat_flash": _LATENT | {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "zero_expert_num": 2},
    # Recurrent and convolutional states.
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": _LATENT | _RECURRENT,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 2, "state_size": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": _RECURRENT,
    "qwen3_5_moe_text": _RECURRENT | {"shared_expert_intermediate_size": 32},
    "qwen3_next": _RECURRENT | {"shared_expert_intermediate_size": 32},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": SLIDING_WINDOW},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]},
    # Encoders with a setting to attend to earlier tokens only.
    "modernbert-decoder": {"local_attention": SLIDING_WINDOW},
    "bart": {"is_decoder": True, "is_encoder_decoder": False},
    "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
}

# A rope that changes at this length, after which a model reads everything again.
SWITCH = 30
LONG_ROPE: dict[str, Any] = {
    "sliding_window": None,
    "original_max_position_embeddings": SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": SWITCH,
        "factor": 16.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 5.0],
        "short_mscale": 1.0,
        "long_mscale": 1.0,
    },
}


def model_of(family: str, seed: int = 0, vocabulary: int = VOCABULARY, **changes: Any) -> PreTrainedModel:
    """A random model of a family of `SETTINGS`, whose weights are large enough for clear preferences among tokens."""
    configuration = CONFIG_MAPPING[family]
    declared = set(getattr(configuration, "attribute_map", {}))
    for one in configuration.__mro__:
        declared |= set(vars(one).get("__annotations__", {}))
    common = {name: value for name, value in _SHAPE.items() if name in declared}
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = configuration(**{"vocab_size": vocabulary, **common, **special, **SETTINGS[family], **changes})
    torch.manual_seed(seed)
    architecture = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    return with_clear_preferences(architecture(config).eval(), bias=0.1)
