"""The weights of an EAGLE head as a module, for training, adapters and saving.

`feature`, `combine`, `project`, `finish` and `final_norm` compute the head as in the papers, one operation after
another and with gradients. Those of `FusedWeights` do the same in fewer operations for drafting, without copies of the
weights if possible.
"""

import copy
from collections.abc import Mapping

import torch
from torch import nn
from transformers.activations import ACT2FN

from ...errors import UnsupportedError
from .checkpoint import EagleCheckpoint
from .rotary import rotate
from .settings import EagleSettings

# The layers of a head, if no adapter wraps them.
_PLAIN_LAYERS = (nn.Linear, nn.RMSNorm, nn.Embedding)
# Layers with the same input, which drafting fuses.
_SIDE_BY_SIDE = (
    tuple(f"layer.self_attn.{letter}_proj" for letter in "qkv"),
    tuple(f"layer.mlp.{name}_proj" for name in ("gate", "up")),
)


class EagleModule(nn.Module):
    """A head's own weights, by the package's names of tensors: `fc.weight`, `layer.self_attn.q_proj.weight`, ….

    The target's embedding and output projection are no part of it. It may be moved and cast at any time.

    Args:
        checkpoint: from `read_checkpoint`. Its tensors are copied.

    Attributes:
        tensor_names: the names of the checkpoint's tensors, maps between vocabularies included.
    """

    def __init__(self, checkpoint: EagleCheckpoint):
        super().__init__()
        tensors, self.settings = checkpoint.tensors, checkpoint.settings
        self.tensor_names = tuple(tensors)
        eps = self.settings.rms_norm_eps
        # Shapes alone: `load_state_dict` assigns the tensors.
        with torch.device("meta"):
            self.fc = _linear(tensors, "fc")
            self.input_norm = _norm(tensors, "input_norm", eps)
            self.layer = _Layer(self.settings, tensors)
            self.norm = _norm(tensors, "norm", eps)
            own = tensors.get("embed_tokens.weight")
            self.embed_tokens = None if own is None else nn.Embedding(*own.shape)
            self.lm_head = _linear(tensors, "lm_head")
        for name in ("d2t", "t2d"):
            if name in tensors:
                self.register_buffer(name, tensors[name])
        self.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        self.eval()

    @torch.no_grad()
    def settle(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move and cast all weights, and place those that drafting fuses side by side in memory, so that it needs no
        copies of them. Weights with adapters are excluded, as these are merged into copies."""
        self.to(device=device, dtype=dtype)
        plain = [(name, layer) for name, layer in self.named_modules() if type(layer) is nn.Linear]
        weights = {f"{name}.{kind}": one for name, layer in plain for kind, one in layer.named_parameters()}
        for name, tensor in side_by_side(weights).items():
            weights[name].data = tensor.detach()

    @property
    def like(self) -> torch.Tensor:
        """A weight with the dtype and the device of all."""
        return self.layer.post_attention_layernorm.weight

    def feature(self, hidden: torch.Tensor, fed_back: bool) -> torch.Tensor:
        if self.settings.generation == 2 or fed_back:
            return hidden
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

    def combine(self, embedded: torch.Tensor, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.settings.generation == 2:
            joined = self.fc(torch.cat([embedded, feature], -1))
            return joined, joined
        normed = self.layer.hidden_norm(feature)
        joined = torch.cat([self.layer.input_layernorm(embedded), normed], -1)
        return joined, normed if self.settings.norm_before_residual else feature

    def project(
        self, joined: torch.Tensor, outputs: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention, shape = self.layer.self_attn, (-1, self.settings.head_dim)
        queries = attention.q_proj(joined[-outputs:]).unflatten(-1, shape)
        keys, values = (one(joined).unflatten(-1, shape) for one in (attention.k_proj, attention.v_proj))
        if attention.q_norm is not None:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        return rotate(queries, cos[-outputs:], sin[-outputs:]), rotate(keys, cos, sin), values

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = residual + self.layer.self_attn.o_proj(attended)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def final_norm(self, output: torch.Tensor) -> torch.Tensor:
        return output if self.norm is None else self.norm(output)

    def merged_tensors(self) -> dict[str, torch.Tensor]:
        """All present tensors by the package's names, with the active adapters of peft merged into them.

        Tensors without an adapter share their memory with the parameters. Others are copies, in fp32 for 16-bit
        weights, which would round much of a small update away.

        Raises:
            UnsupportedError: the weights of a replaced layer cannot be read. Names it.
        """
        holders: dict[str, nn.Module] = {}
        tensors = {}
        for name in self.tensor_names:
            holder, _, kind = name.rpartition(".")
            if holder not in holders:
                holders[holder] = _merged(self.get_submodule(holder), holder) if holder else self
            tensors[name] = getattr(holders[holder], kind).detach()
        return tensors


class _Layer(nn.Module):
    """Attention and MLP with the norms before them; EAGLE-2 has none before its attention."""

    def __init__(self, settings: EagleSettings, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        self.input_layernorm = _norm(tensors, "layer.input_layernorm", settings.rms_norm_eps)
        self.hidden_norm = _norm(tensors, "layer.hidden_norm", settings.rms_norm_eps)
        self.self_attn = _Attention(settings, tensors)
        self.post_attention_layernorm = _norm(tensors, "layer.post_attention_layernorm", settings.rms_norm_eps)
        self.mlp = _Mlp(settings, tensors)


class _Attention(nn.Module):
    """The projections of the attention, and the norms of queries and keys, if any."""

    def __init__(self, settings: EagleSettings, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        for letter in "qkvo":
            self.add_module(f"{letter}_proj", _linear(tensors, f"layer.self_attn.{letter}_proj"))
        for letter in "qk":
            self.add_module(f"{letter}_norm", _norm(tensors, f"layer.self_attn.{letter}_norm", settings.rms_norm_eps))


class _Mlp(nn.Module):
    def __init__(self, settings: EagleSettings, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        for name in ("gate", "up", "down"):
            self.add_module(f"{name}_proj", _linear(tensors, f"layer.mlp.{name}_proj"))
        self._activation = ACT2FN[settings.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_proj(hidden)) * self.up_proj(hidden))


def side_by_side(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights by name. Each complete group of fused weights is copied side by side in memory."""
    placed = dict(weights)
    for names in _SIDE_BY_SIDE:
        for kind in ("weight", "bias"):
            parts = {f"{name}.{kind}": weights.get(f"{name}.{kind}") for name in names}
            if all(part is not None for part in parts.values()):
                joined = torch.cat([part.detach() for part in parts.values()])
                placed |= dict(zip(parts, joined.split([part.shape[0] for part in parts.values()]), strict=True))
    return placed


def _linear(tensors: Mapping[str, torch.Tensor], name: str) -> nn.Linear | None:
    weight = tensors.get(f"{name}.weight")
    return None if weight is None else nn.Linear(weight.shape[1], weight.shape[0], f"{name}.bias" in tensors)


def _norm(tensors: Mapping[str, torch.Tensor], name: str, eps: float) -> nn.RMSNorm | None:
    weight = tensors.get(f"{name}.weight")
    return None if weight is None else nn.RMSNorm(weight.shape[0], eps)


@torch.no_grad()
def _merged(layer: nn.Module, name: str) -> nn.Module:
    """The layer itself, or, for a layer of peft, a copy of its base layer with the active adapters merged into it."""
    if type(layer) in _PLAIN_LAYERS:
        return layer
    problem = f"{name} of the EAGLE head is a {type(layer).__name__}, whose weights cannot be read"
    fix = "Use adapters that peft can merge, such as LoRA."
    if not hasattr(layer, "get_base_layer") or not hasattr(layer, "merge"):
        raise UnsupportedError(f"{problem}. {fix}")
    layer = copy.deepcopy(layer)
    if layer.weight.dtype in (torch.float16, torch.bfloat16):
        layer = layer.float()
    try:
        # As in its forward: merged adapters count unless adapters are disabled.
        if layer.disable_adapters and layer.merged:
            layer.unmerge()
        elif not layer.disable_adapters and not layer.merged:
            layer.merge()
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise UnsupportedError(f"{problem}: {error!s:.200}. {fix}") from error
    merged = layer.get_base_layer()
    if type(merged) not in _PLAIN_LAYERS:
        raise UnsupportedError(f"{problem}. {fix}")
    return merged
