"""Tiny random models of families that read images, and prompts with images for them."""

import copy
from typing import Any

import torch
import transformers
from models import PAD, VOCABULARY, with_clear_preferences
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

IMAGE, VIDEO, START, END = range(VOCABULARY - 11, VOCABULARY - 7)

_TEXT: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "vision_output_dim", "embed_dim", "out_hidden_size"), 32),
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
}
_WITH_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
_LINEAR |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
# An image has 4 patches, and one of Qwen's kin 16, of which each 4 become one.
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
_OF_QWEN = {"depth": 2, "num_heads": 4, "patch_size": 4, "hidden_size": 32, "embed_dim": 32, "out_hidden_size": 32}
_OF_QWEN |= {"intermediate_size": 64, "num_position_embeddings": 16, "window_size": 16, "fullatt_block_indexes": [1]}
_OF_QWEN |= {"deepstack_visual_indexes": [0], "image_size": 8, "in_channels": 3}
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION}
_CLIP = {"model_type": "clip_vision_model", **_VISION, "projection_dim": 32}
_MLLAMA = {"hidden_size": 32, "attention_heads": 4, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 8}
_MLLAMA |= {"patch_size": 4, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
_MLLAMA |= {"vision_output_dim": 64, "max_num_tiles": 1, "intermediate_size": 64}

# By family: the text model and its settings, the settings of the vision model, and the others.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("llama", {}, _CLIP, {}),
    "llava_next": ("llama", {}, _CLIP, {"image_grid_pinpoints": [[8, 8]]}),
    "llava_onevision": ("qwen2", {}, _SIGLIP, {"image_grid_pinpoints": [[8, 8]]}),
    "mistral3": (
        "mistral",
        {},
        {"model_type": "pixtral", **_VISION, "head_dim": 8, "image_size": 16},
        {"spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "gemma3": ("gemma3_text", _WITH_WINDOWS | {"query_pre_attn_scalar": 8}, _SIGLIP, {"mm_tokens_per_image": 4}),
    "paligemma": ("gemma", {}, _SIGLIP, {"projection_dim": 32}),
    "idefics3": ("llama", {}, {"model_type": "idefics3_vision", **_VISION}, {"scale_factor": 2}),
    "smolvlm": ("llama", {}, {"model_type": "smolvlm_vision", **_VISION}, {"scale_factor": 2}),
    "internvl": (
        "qwen2",
        {},
        {"model_type": "internvl_vision", **_VISION, "image_size": [8, 8], "patch_size": [4, 4]},
        {"downsample_ratio": 0.5, "image_seq_length": 1},
    ),
    "qwen2_vl": ("qwen2_vl_text", _MROPE, _OF_QWEN, {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", _MROPE, _OF_QWEN, {}),
    "qwen3_vl": ("qwen3_vl_text", _MROPE, _OF_QWEN, {}),
    "qwen3_5": ("qwen3_5_text", _MROPE | _LINEAR, _OF_QWEN, {}),
    "glm4v": ("glm4v_text", _MROPE, _OF_QWEN, {"image_start_token_id": START, "image_end_token_id": END}),
    "lfm2_vl": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * 2},
        {"model_type": "siglip2_vision_model", **_VISION, "num_patches": 16},
        {"downsample_factor": 2},
    ),
    "mllama": ("mllama_text_model", {"cross_attention_layers": [1]}, _MLLAMA, {}),
}
# Placeholders of an image.
_PLACES = {"idefics3": 1, "smolvlm": 1, "internvl": 1, "lfm2_vl": 1, "llava_next": 10, "llava_onevision": 10}


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, whose texts do not end early."""
    # Configurations write into the dictionaries that they get.
    text, of_text, vision, others = copy.deepcopy(FAMILIES[family])
    ids = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO, "video_token_index": VIDEO}
    ids |= {"vision_start_token_id": START, "vision_end_token_id": END}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](
        text_config={"model_type": text, **_TEXT, **of_text}, vision_config=vision, **ids, **others
    )
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]
    model = getattr(transformers, names if isinstance(names, str) else names[0])(config).eval()
    with_clear_preferences(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def prompt_of(family: str, images: int = 1, seed: int = 0, video: bool = False) -> dict[str, torch.Tensor]:
    """The arguments of `generate` for a prompt with images, or for Qwen's kin with videos in their place."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def text(count: int) -> list[int]:
        return torch.randint(3, IMAGE, (count,), generator=random).tolist()

    of_qwen, place = family.startswith(("qwen", "glm4v")), VIDEO if video else IMAGE
    tokens = text(6)
    for _ in range(images):
        places = [place] * _PLACES.get(family, 4)
        tokens += [START, *places, END, *text(4)] if of_qwen else [*places, *text(4)]
    input_ids = torch.tensor([tokens])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if of_qwen:
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        inputs |= zip(names, (numbers(16 * images, 96), torch.tensor([[1, 4, 4]] * images)), strict=True)
        return inputs | {"mm_token_type_ids": (input_ids == place).int() * (2 if video else 1)}
    inputs["pixel_values"] = numbers(images, 3, 8, 8)
    if family in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = inputs["pixel_values"].unsqueeze(0)
    elif family == "mistral3":
        inputs |= {"pixel_values": numbers(images, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]] * images)}
    elif family.startswith("llava_"):
        inputs |= {"pixel_values": numbers(images, 2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]] * images)}
    elif family == "lfm2_vl":
        shapes = torch.tensor([[2, 2]] * images)
        inputs |= {"pixel_values": numbers(images, 4, 48), "spatial_shapes": shapes}
        inputs["pixel_attention_mask"] = torch.ones(images, 4, dtype=torch.int64)
    elif family == "gemma3":
        inputs["token_type_ids"] = (input_ids == IMAGE).long()
    elif family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
    return inputs
