"""Drafters of every kind by name: EAGLE heads in all their variants, and independent ones of several families."""

import torch
from eagle_heads import drafter_of, random_head
from models import tiny
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from hf_dynspec.drafters import CausalLMDrafter, Drafter

# Layers of a target that all of these heads can read.
LAYERS = 6
# Arguments of `random_head`.
HEADS = {
    "eagle2": {"layout": "eagle2"},
    "eagle2-no-bias": {"layout": "eagle2", "bias": False},
    "eagle2-attention-bias": {"layout": "eagle2", "attention_biases": True, "own_embedding": True},
    "eagle3": {"layout": "eagle3"},
    "eagle3-trimmed": {"layout": "eagle3", "draft_vocabulary": 100, "own_embedding": True},
    "eagle3-attention-bias": {"layout": "eagle3", "attention_biases": True},
    "eagle3-layers": {"layout": "eagle3", "eagle_aux_hidden_state_layer_ids": [0, 6], "features": 2},
    "speculators": {"layout": "speculators", "draft_vocabulary": 100},
    "speculators-norms": {"layout": "speculators", "norm_before_residual": True, "norm_before_fc": True},
    "speculators-qwen3": {"layout": "speculators", "model_type": "qwen3", "attention_biases": True, "head_dim": 12},
    "no-groups": {"layout": "eagle3", "num_key_value_heads": 4},
    "one-group": {"layout": "eagle3", "num_key_value_heads": 1, "head_dim": 16},
    "gelu": {"layout": "eagle2", "hidden_act": "gelu_pytorch_tanh"},
}


def in_fp64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64, its norms too: transformers computes these in fp32, whose rounding would hide the differences
    of a loss."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            shift = float(type(module).__name__.startswith("Gemma"))  # its weights stand for what they add to 1

            def forward(states: torch.Tensor, norm: nn.Module = module, eps: float = eps, shift: float = shift):
                return rms_norm(states, states.shape[-1:], norm.weight + shift, eps)

            module.forward = forward
    return model


def drafter_named(kind: str, target: PreTrainedModel) -> Drafter:
    """The head of that name, or an independent drafter of that family; in fp64 if the target is."""
    if kind in HEADS:
        return drafter_of(random_head(**HEADS[kind]), target)
    model = tiny(kind, seed=3)
    return CausalLMDrafter(in_fp64(model) if target.dtype == torch.float64 else model)


def features_for(drafter: Drafter, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    """`[length, d · layers]`: random features for a head; None for an independent drafter."""
    if not drafter.reads:
        return None
    width = drafter.settings.target_hidden_size * len(drafter.reads)
    return torch.randn(length, width, generator=torch.Generator().manual_seed(5), dtype=dtype)
