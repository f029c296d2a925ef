"""The multi-token-prediction layers of a target, built of transformers' own modules.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2: layer `k` joins the hidden state of depth `k − 1` at a
token with the embedding of the next one, and runs one decoder layer.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ...cache_names import CACHE
from ...errors import UnsupportedError
from ...modeling.masks import attention_windows
from ...modeling.parts import decoder_of

_FULL, _SLIDING = "full_attention", "sliding_attention"
_MASKS = {_FULL: create_causal_mask, _SLIDING: create_sliding_window_causal_mask}


class MtpLayers(nn.Module):
    """The layers with their own weights alone; embedding, rotation and output projection are the target's.

    Args:
        target: a model of transformers, whose class of decoder layers and of norms they have.
        count: the number of layers.
        hidden_first: the projection reads `cat(hidden, embedding)` (MiMo), not `cat(embedding, hidden)`.

    Attributes:
        text_config: the configuration of these layers alone. By the name `config` peft would take them for a model.
        layers: transformers' `MtpLayer`s, on the meta device until they are loaded.
        windows: for each layer the most positions that it looks back on (None: all).

    Raises:
        UnsupportedError: this transformers has no such layers, or the target's cache more than keys and values.
    """

    def __init__(self, target: PreTrainedModel, count: int, hidden_first: bool = False):
        super().__init__()
        try:
            from transformers.modeling_layers import MtpLayer
        except ImportError:
            raise UnsupportedError("MTP layers need transformers 5.24 or newer: update it.") from None
        decoder, config = decoder_of(target), _layers_config(target, count)
        config.mtp_hidden_states_first = hidden_first
        windows = attention_windows(config)
        kinds = getattr(config, "layer_types", None) or [*windows] * count
        others = set(kinds) - set(_MASKS)
        cached = {type(one) for one in DynamicCache(config=config).layers}
        is_known = cached <= {DynamicLayer, DynamicSlidingWindowLayer}
        is_known &= all(hasattr(decoder, part) for part in ("layers", "norm", "rotary_emb"))
        if others or not is_known or hasattr(config, "chain_hidden_post_norm"):
            what = f"layers of the kind {min(others)}" if others else "MTP layers of another make"
            raise UnsupportedError(f"{type(target).__name__} has {what}, which this package does not know.")
        has_ropes = config.nested_rope_parameter_keys(getattr(config, "rope_parameters", None) or {})
        self._rope_options = [{"layer_type": kind} if has_ropes else {} for kind in kinds]
        self.text_config, self.windows, self._kinds = config, [windows[kind] for kind in kinds], kinds
        layer, norm = type(decoder.layers[-1]), type(decoder.norm)
        with torch.device("meta"):
            self.layers = nn.ModuleList([MtpLayer(config, layer, norm, at) for at in range(count)])
        if not {name for name, _ in self.named_buffers()} <= self.state_dict().keys():
            raise UnsupportedError(f"{type(target).__name__} has layers with buffers that no checkpoint holds.")
        # Not a part of this module: it is the target's.
        self._rotary = (decoder.rotary_emb,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MtpLayers":
        # The rotation stays the target's, and moves with it.
        memo[id(self._rotary[0])] = self._rotary[0]
        twin = memo[id(self)] = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def settle(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to a device, and the parameters to a dtype. Buffers, such as corrections of routers, keep theirs."""
        for one in self.parameters():
            one.data = one.data.to(dtype)
        self.to(device)

    def forward(
        self,
        at: int,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Append rows to a layer's keys and values.

        Args:
            at: the layer's index.
            embedded: `[m, d]`: the embeddings of the tokens.
            hidden: `[m, d]`: the hidden states at the tokens before these, of the layer before.
            positions: int64 `[m]`: the tokens' positions.
            cache: with the earlier rows of all layers.
            mask: `[1, 1, m, rows]`, as `attention_mask` returns it (None: rows see all before them).

        Returns:
            `[m, d]`: the hidden states at the tokens, after the final norm.
        """
        like = self.layers[at].eh_proj.weight
        embedded, hidden, positions = embedded[None].to(like), hidden[None].to(like), positions.unsqueeze(0)
        if mask is None:
            make = _MASKS[self._kinds[at]]
            mask = make(self.text_config, embedded, None, cache, position_ids=positions, layer_idx=at)
        rotation = self._rotary[0](embedded, position_ids=positions, **self._rope_options[at])
        return self.layers[at](embedded, hidden, rotation, mask, positions, **{CACHE: cache})[0]


def _layers_config(target: PreTrainedModel, count: int) -> PreTrainedConfig:
    """transformers' configuration of MTP layers. Families that it builds none for get layers of full attention, and
    the kind of MLP that the target's last layer has."""
    config: Any = copy.deepcopy(target.config.get_text_config())
    config.num_mtp_layers = count
    for name, default in (("layer_types", _FULL), ("mlp_layer_types", None)):
        kinds = getattr(config, name, None)
        if kinds and not getattr(config, f"mtp_{name}", None):
            setattr(config, f"mtp_{name}", [default or kinds[-1]] * count)
    config = config.get_mtp_config()
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = []
    return config
