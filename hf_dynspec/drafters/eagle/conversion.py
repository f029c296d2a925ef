"""Conversion of EAGLE checkpoints between layouts. A head that the other layout cannot express is refused.

Tensors keep their bits and get other names. Added are only the verifier's rows for speculators, and for SGLang a zero
`fc.bias` for EAGLE-2 heads without one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import ArtifactError
from .checkpoint import EagleCheckpoint
from .checkpoint_files import CONFIG_FILE, open_safetensors, read_json, safetensors_files
from .checkpoint_tensors import renamed
from .settings import EagleSettings

ConversionTarget = Literal["official", "speculators", "sglang"]

_ROWS = ("lm_head.weight", "embed_tokens.weight")

# Settings of an official configuration outside of speculators' `transformer_layer_config`.
_TOP_KEYS = {
    "architectures",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "norm_before_fc",
    "norm_before_residual",
    "target_hidden_size",
}


def convert_checkpoint(
    checkpoint: EagleCheckpoint,
    to: ConversionTarget,
    *,
    verifier: str | None = None,
    architectures: Sequence[str] = (),
    output_rows: torch.Tensor | None = None,
    speculative_tokens: int = 5,
) -> EagleCheckpoint:
    """Convert a checkpoint. One that has the layout already is returned as it is.

    Args:
        checkpoint: the checkpoint to convert.
        to: `official` (SafeAILab's EAGLE), `speculators` (EAGLE-3 only; read by vLLM), or `sglang` (the official
            layout with SGLang's additions).
        verifier: for speculators, the name or path of the target.
        architectures: for speculators, the target's architectures, such as `LlamaForCausalLM`.
        output_rows: `[V, H]`: for speculators, the target's output projection. Needed for heads without `lm_head`, as
            speculators stores the rows that it uses.
        speculative_tokens: for speculators, the default number of tokens to draft.

    Raises:
        ArtifactError: the layout cannot express the head, which names all settings in the way, or an argument is
            missing.
    """
    if to == "speculators":
        if checkpoint.format == "speculators":
            return checkpoint
        return _to_speculators(checkpoint, verifier, architectures, output_rows, speculative_tokens)
    if to == "sglang" and checkpoint.settings.generation == 2:
        return _eagle2_to_sglang(checkpoint)
    if to == "official" and checkpoint.format == "official":
        return checkpoint
    return _to_official(checkpoint, for_sglang=to == "sglang")


def read_output_rows(folder: str | os.PathLike) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Read a model's output projection, `[V, d]`, and the names of its architectures, without loading the model.

    Raises:
        ArtifactError: the folder holds no safetensors, no output projection, or one with a bias, for which heads have
            no place.
    """
    folder = Path(folder)
    config = read_json(folder, CONFIG_FILE)
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    # Families differ in the default of tied embeddings, so a stored head comes first.
    found: dict[str, tuple[Path, str]] = {}
    for path in safetensors_files(folder) or ():
        with open_safetensors(path) as file:
            if any(name.endswith("lm_head.bias") for name in file.keys()):
                problem = f"is in {folder}, and a head that takes the target's rows has no place for it"
                raise ArtifactError("target: lm_head.bias", problem, "Use the head without these rows, as it is.")
            found |= {name.split(".")[-2]: (path, name) for name in file.keys() if name.endswith(_ROWS)}
    tied = text_config.get("tie_word_embeddings", True)
    path, name = found.get("lm_head") or (tied and found.get("embed_tokens")) or (None, "")
    if path is None:
        raise ArtifactError("target", f"{folder} has no {_ROWS[0]}", "Give the target's folder with its safetensors.")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise ArtifactError(f"{CONFIG_FILE}: architectures", "must be a list of names", "Download the target again.")
    with open_safetensors(path) as file:
        return file.get_tensor(name), tuple(architectures)


def _to_official(checkpoint: EagleCheckpoint, for_sglang: bool) -> EagleCheckpoint:
    """EAGLE-3 in the official layout. SGLang reads the same, but takes other layers and a shared head."""
    settings = checkpoint.settings
    layout = "SGLang" if for_sglang else "the official layout"
    _refuse_unless_plain(settings, layout)
    if checkpoint.format == "speculators":
        config = dict(checkpoint.config["transformer_layer_config"])
    else:
        config = {key: value for key, value in checkpoint.config.items() if key not in _TOP_KEYS}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": settings.draft_vocab_size}
    if settings.target_hidden_size != settings.hidden_size:
        config["target_hidden_size"] = settings.target_hidden_size
    if settings.target_layer_ids is not None:
        config |= _layer_settings(settings.target_layer_ids, for_sglang)
    if for_sglang:
        # SGLang's defaults: a bias on `fc`, and the embedding as the head.
        config |= {"bias": False, "tie_word_embeddings": False}
        if "lm_head.weight" not in checkpoint.tensors:
            config["draft_vocab_size"] = None  # takes the target's head
    return EagleCheckpoint.from_parts(config, _renamed(checkpoint, "midlayer."))


def _layer_settings(layer_ids: tuple[int, ...], for_sglang: bool) -> dict[str, Any]:
    """The layout's setting of the layers: SGLang counts outputs, which is one less; EAGLE's own code cannot choose."""
    if for_sglang:
        if min(layer_ids) < 1:
            problem = f"is {list(layer_ids)}, and SGLang cannot read the embedding, which is 0"
            fix = "Train a head that reads the outputs of layers."
            raise ArtifactError(f"{CONFIG_FILE}: eagle_aux_hidden_state_layer_ids", problem, fix)
        outputs = [layer_id - 1 for layer_id in layer_ids]
        return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}}
    layers = layer_ids[-1] + 3
    if layer_ids != (2, layers // 2, layers - 3):
        problem = f"is {list(layer_ids)}, and EAGLE's own code always reads 2, n // 2 and n - 3 of n layers"
        fix = "Convert it for SGLang, or keep it as it is for vLLM."
        raise ArtifactError(f"{CONFIG_FILE}: eagle_aux_hidden_state_layer_ids", problem, fix)
    return {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}


def _to_speculators(
    checkpoint: EagleCheckpoint,
    verifier: str | None,
    architectures: Sequence[str],
    output_rows: torch.Tensor | None,
    speculative_tokens: int,
) -> EagleCheckpoint:
    settings = checkpoint.settings
    if settings.generation != 3:
        problem = "is an EAGLE-2 head, and only EAGLE-3 heads are converted for speculators"
        raise ArtifactError("checkpoint", problem, "Convert it for SGLang, or use it as it is.")
    if settings.attention_bias != settings.output_bias:
        problem = "has biases on a part of the attention's projections, and speculators knows all or none"
        raise ArtifactError("checkpoint", problem, "Keep it in the official layout.")
    if not verifier or not architectures:
        problem = "speculators' configuration names the target and its architectures"
        raise ArtifactError("verifier", problem, "Give --verifier and --architectures, or --verifier and --target.")
    tensors = _renamed(checkpoint, "layers.0.")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _checked_rows(settings, output_rows).to(tensors["fc.weight"].dtype)
    layer = {key: value for key, value in checkpoint.config.items() if key not in _TOP_KEYS}
    layer |= {"model_type": "llama", "attention_bias": settings.attention_bias}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": settings.draft_vocab_size,
        # Always written: releases of speculators and vLLM differ in the default.
        "norm_before_residual": settings.norm_before_residual,
        "speculators_config": speculators_config(verifier, architectures, speculative_tokens),
    }
    if settings.norm_before_fc:
        config["norm_before_fc"] = True
    if settings.target_hidden_size != settings.hidden_size:
        config["target_hidden_size"] = settings.target_hidden_size
    if settings.target_layer_ids is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(settings.target_layer_ids)
    return EagleCheckpoint.from_parts(config, tensors)


def speculators_config(verifier: str, architectures: Sequence[str], speculative_tokens: int) -> dict[str, Any]:
    """The part of speculators' configuration on the use of a head: the target, its architectures, and the default
    number of tokens to draft."""
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
        "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
    }


def _checked_rows(settings: EagleSettings, output_rows: torch.Tensor | None) -> torch.Tensor:
    if output_rows is None:
        problem = "is not in the checkpoint, which uses the target's, and speculators stores those rows"
        raise ArtifactError("lm_head.weight", problem, "Give the target's folder with --target.")
    shape = (settings.vocab_size, settings.hidden_size)
    if tuple(output_rows.shape) != shape:
        problem = f"the target's output projection has shape {list(output_rows.shape)}, expected {list(shape)}"
        raise ArtifactError("target", problem, "Give the target that the head was made for.")
    return output_rows


def _eagle2_to_sglang(checkpoint: EagleCheckpoint) -> EagleCheckpoint:
    """Add the bias of `fc`, which SGLang always has and leaves uninitialised if a file has none.

    The configuration must not have the key `bias`: SGLang reads it as a bias on the attention's projections, and all
    readers take a missing key as a bias on `fc`.
    """
    if checkpoint.settings.attention_bias:
        problem = "is true, and SGLang has biases on all four projections of an EAGLE-2 head's attention or on none"
        raise ArtifactError(f"{CONFIG_FILE}: qkv_bias", problem, "Use it with EAGLE's own code.")
    config = {key: value for key, value in checkpoint.config.items() if key != "bias"}
    config["architectures"] = ["LlamaForCausalLMEagle"]
    tensors = checkpoint.named_tensors()
    if "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])
    return EagleCheckpoint.from_parts(config, tensors)


def _refuse_unless_plain(settings: EagleSettings, layout: str) -> None:
    """Refuse all settings that the readers of a layout would silently ignore."""
    names = ("norm_before_residual", "norm_before_fc", "qk_norm", "attention_bias", "output_bias")
    switches = [name for name in names if getattr(settings, name)]
    if switches:
        problem = f"{layout} cannot express {', '.join(switches)}"
        raise ArtifactError(CONFIG_FILE, problem, "Keep the checkpoint in the layout that it has.")


def _renamed(checkpoint: EagleCheckpoint, prefix: str) -> dict[str, torch.Tensor]:
    return {renamed(name, "layer.", prefix): tensor for name, tensor in checkpoint.tensors.items()}
