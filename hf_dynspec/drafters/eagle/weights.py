"""The weights of an EAGLE head for drafting: layers with the same input are one matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import embedding, linear, pad, rms_norm, silu
from transformers.activations import ACT2FN

from .rotary import Rotary, rotate
from .settings import EagleSettings


@dataclass(frozen=True, eq=False)
class FusedWeights:
    """The weights of a draft step, of one dtype and on one device. Made anew when the module changes.

    Args:
        rotary: the rotary embedding.
        embedding: `[V, H]`: the head's own or the target's, in its own dtype and on its own device.
        output_dtype: the input dtype of the output projection.
        qkv: `[(heads + 2 · kv_heads) · head_dim, H or 2 · H]`.
        pair_norm: EAGLE-3's norm of embeddings and hidden states, over `[w, 2, H]`.
        query_norm, key_norm: over `[w, heads, head_dim]`, if the head has them.
        gate_up: `[2 · intermediate, H]`.
    """

    settings: EagleSettings
    rotary: Rotary
    embedding: torch.Tensor
    output_dtype: torch.dtype
    fc: torch.Tensor
    fc_bias: torch.Tensor | None
    input_norm: "_Norm | None"
    pair_norm: "_Norm | None"
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: "_Norm | None"
    key_norm: "_Norm | None"
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: "_Norm"
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: "_Norm | None"
    activation: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def fuse(
        cls,
        settings: EagleSettings,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        output_dtype: torch.dtype,
        device: torch.device,
        dtype: torch.dtype,
        rotary: Rotary | None = None,
    ) -> "FusedWeights":
        """Fuse a head's tensors.

        Args:
            tensors: by the package's names, of any dtype and on any device.
            embedding: the target's, `[V, H]`, for heads without their own; others get as many rows.
            output_dtype: the input dtype of the output projection.
            device, dtype: for drafting.
            rotary: the rotary embedding of these settings, device and dtype (None: make one).

        Raises:
            ArtifactError: the rotary embedding is unknown.
        """

        def one(name: str) -> torch.Tensor | None:
            tensor = tensors.get(name)
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        def several(names: list[str]) -> torch.Tensor | None:
            parts = [one(name) for name in names]
            return None if parts[0] is None else _joined(parts)

        def norm(*names: str) -> _Norm | None:
            parts = [one(f"{name}.weight") for name in names]
            if parts[0] is None:
                return None
            return _Norm(torch.stack(parts) if len(parts) > 1 else parts[0], settings.rms_norm_eps)

        own = one("embed_tokens.weight")
        missing = 0 if own is None else embedding.shape[0] - own.shape[0]
        attention = "layer.self_attn."
        return cls(
            settings=settings,
            rotary=rotary or Rotary(settings, device, dtype),
            embedding=embedding if own is None else pad(own, (0, 0, 0, missing)) if missing > 0 else own,
            output_dtype=output_dtype,
            fc=one("fc.weight"),
            fc_bias=one("fc.bias"),
            input_norm=norm("input_norm"),
            pair_norm=norm("layer.input_layernorm", "layer.hidden_norm"),
            qkv=several([f"{attention}{letter}_proj.weight" for letter in "qkv"]),
            qkv_bias=several([f"{attention}{letter}_proj.bias" for letter in "qkv"]),
            query_norm=norm(f"{attention}q_norm"),
            key_norm=norm(f"{attention}k_norm"),
            output=one(f"{attention}o_proj.weight"),
            output_bias=one(f"{attention}o_proj.bias"),
            mlp_norm=norm("layer.post_attention_layernorm"),
            gate_up=several([f"layer.mlp.{name}_proj.weight" for name in ("gate", "up")]),
            down=one("layer.mlp.down_proj.weight"),
            norm=norm("norm"),
            activation=silu if settings.hidden_act == "silu" else ACT2FN[settings.hidden_act],
        )

    def anew(self, tensors: Mapping[str, torch.Tensor]) -> "FusedWeights":
        """The same for other tensors of the head."""
        device, dtype = self.qkv.device, self.qkv.dtype
        return self.fuse(self.settings, tensors, self.embedding, self.output_dtype, device, dtype, self.rotary)

    def write(self, other: "FusedWeights") -> None:
        """Copy the numbers of others of the same settings, dtype and device to the addresses of these."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, _Norm):
                mine, theirs = mine.weight, theirs.weight
            # Others are the same, such as the target's embedding.
            if isinstance(mine, torch.Tensor) and mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: the embeddings of tokens, int64 `[w]`."""
        rows = embedding(token_ids.to(self.embedding.device), self.embedding)
        return rows.to(device=self.qkv.device, dtype=self.qkv.dtype)

    def feature(self, hidden: torch.Tensor, fed_back: bool) -> torch.Tensor:
        """`[w, H]`: the features beside the embeddings.

        Args:
            hidden: `[w, d]`: the target's hidden states, which EAGLE-3 combines into one, or if `fed_back` the head's
                own outputs.
        """
        if self.settings.generation == 2 or fed_back:
            return hidden
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        return linear(hidden, self.fc)

    def combine(self, embedded: torch.Tensor, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Join embeddings and features, each `[w, H]`.

        Returns:
            The input of the attention, `[w, H]` (EAGLE-2) or `[w, 2 · H]`, and the residual around it, `[w, H]`.
        """
        if self.settings.generation == 2:
            joined = linear(torch.cat([embedded, feature], -1), self.fc, self.fc_bias)
            return joined, joined
        both = self.pair_norm(torch.stack([embedded, feature], 1))
        # speculators' norm_before_residual: the normalised hidden state goes around the attention.
        return both.flatten(1), both[:, 1] if self.settings.norm_before_residual else feature

    def project(
        self, joined: torch.Tensor, outputs: int, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of the last rows, `[outputs, heads, head_dim]`, and keys and values of all, `[w, kv_heads,
        head_dim]`, for `[w, H or 2 · H]`. With tables, `[w or 1, 1, head_dim]`, queries and keys are rotated."""
        settings = self.settings
        heads, kv_heads, head_dim = settings.num_attention_heads, settings.num_key_value_heads, settings.head_dim
        width, split = joined.shape[0], heads * head_dim
        if outputs < width:
            bias = (None, None) if self.qkv_bias is None else (self.qkv_bias[:split], self.qkv_bias[split:])
            last = (None, None) if cos is None else (cos[-outputs:], sin[-outputs:])
            queries = linear(joined[-outputs:], self.qkv[:split], bias[0]).view(outputs, heads, head_dim)
            keys, values = linear(joined, self.qkv[split:], bias[1]).view(width, -1, head_dim).chunk(2, 1)
            return _position(queries, self.query_norm, *last), _position(keys, self.key_norm, cos, sin), values
        states = linear(joined, self.qkv, self.qkv_bias).view(width, -1, head_dim)
        states, values = states.split([heads + kv_heads, kv_heads], 1)
        if self.query_norm is not None:
            states = torch.cat([self.query_norm(states[:, :heads]), self.key_norm(states[:, heads:])], 1)
        queries, keys = _position(states, None, cos, sin).split([heads, kv_heads], 1)
        return queries, keys, values

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: the layer after its attention, `[w, heads · head_dim]`."""
        if self.output_bias is not None:
            residual = residual + self.output_bias
        hidden = torch.addmm(residual, attended, self.output.T)
        gate, up = linear(self.mlp_norm(hidden), self.gate_up).chunk(2, -1)
        return torch.addmm(hidden, self.activation(gate) * up, self.down.T)

    def final_norm(self, output: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: outputs with the norm before the output projection. EAGLE-2 has none of its own."""
        return output if self.norm is None else self.norm(output)

    def predict(self, output: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: outputs as the output projection expects them."""
        return self.final_norm(output).to(self.output_dtype)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """`[Σ rows, …]`: the parts concatenated, without a copy if they are adjacent in memory (`EagleModule.settle`)."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    return first.as_strided((sum(part.shape[0] for part in parts), *first.shape[1:]), first.stride())


class _Norm:
    """Root mean square normalisation over the last dimension.

    torch's own is one kernel on a GPU, but a dozen operations on a CPU, half of a small head's step. Four are enough:
    `x / sqrt(|x|² / d + eps) · w = x / hypot(|x|, sqrt(d · eps)) · (sqrt(d) · w)`.

    Args:
        weight: `[d]`, or `[k, d]` for inputs `[w, k, d]`.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self._eps = weight, eps
        self._shape = weight.shape[-1:]
        # torch's own squares 16-bit inputs in fp32.
        self._is_split = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        if self._is_split:
            self._scaled = weight * self._shape[0] ** 0.5
            self._floor = weight.new_tensor((self._shape[0] * eps) ** 0.5)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if not self._is_split:
            if self.weight.dim() == 1:
                return rms_norm(states, self._shape, self.weight, self._eps)
            return rms_norm(states, self._shape, None, self._eps) * self.weight
        lengths = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        return states / torch.hypot(lengths, self._floor) * self._scaled


def _position(
    states: torch.Tensor, norm: _Norm | None, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> torch.Tensor:
    """Normalise queries or keys, if the head does so, and rotate them, if tables are given."""
    if norm is not None:
        states = norm(states)
    return states if cos is None else rotate(states, cos, sin)
