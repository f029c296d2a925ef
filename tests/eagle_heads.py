"""Tiny random EAGLE heads in every layout, and a slow reference of what they compute. Nothing is downloaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import EOS, tiny
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_dynspec import EagleDrafter
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint

LAYOUTS = ("eagle2", "eagle3", "speculators")
# The number of ids that `trimmed_head` drafts.
DRAFTABLE = 110
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@dataclass
class Head:
    """A checkpoint's files, as they would be written."""

    layout: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def layer(self) -> dict[str, Any]:
        """The configuration of the transformer layer."""
        return self.config["transformer_layer_config"] if self.layout == "speculators" else self.config

    @property
    def prefix(self) -> str:
        return "midlayer." if self.layout == "eagle3" else "layers.0."

    def write(self, folder: Path, pickled: bool = False) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file({name: tensor.clone() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder


def random_head(layout: str, vocabulary: int = 301, draft_vocabulary: int | None = None, **changes: Any) -> Head:
    """A head of a layout.

    Args:
        draft_vocabulary: a trimmed vocabulary (None: no `lm_head` of its own).
        changes: of the configuration; `own_embedding`, `attention_biases` and `features` add and shape tensors.
    """
    own_embedding = changes.pop("own_embedding", False)
    biases = changes.pop("attention_biases", False)
    features = changes.pop("features", 3)
    generator = torch.Generator().manual_seed(changes.pop("seed", 0))
    top = {name: changes.pop(name) for name in list(changes) if name.startswith(("norm_before", "eagle_", "target_"))}
    layer = {**SHAPE, "vocab_size": vocabulary, "model_type": "llama", **changes}
    if layout == "speculators":
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **top}
        layer["attention_bias"] = biases
    else:
        config = {**layer, **top}
        config |= {"qkv_bias": biases} if layout == "eagle2" else {}
    if layout != "eagle2":
        config["draft_vocab_size"] = draft_vocabulary or vocabulary
    head = Head(layout, config, {})

    def add(name: str, *shape: int) -> None:
        # Outputs as large as inputs, so that outputs that are fed back neither vanish nor explode.
        values = torch.randn(shape, generator=generator) * (shape[1] ** -0.5 if len(shape) > 1 else 0.2)
        head.tensors[name] = values + 1 if "norm" in name else values

    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    head_dim = layer.get("head_dim") or hidden // layer["num_attention_heads"]
    rows = {"q": layer["num_attention_heads"] * head_dim}
    rows |= dict.fromkeys("kv", layer["num_key_value_heads"] * head_dim)
    prefix, inputs = head.prefix, hidden if layout == "eagle2" else 2 * hidden
    fc_inputs = 2 * hidden if layout == "eagle2" else features * top.get("target_hidden_size", hidden)
    add("fc.weight", hidden, fc_inputs)
    if layout == "eagle2" and config.get("bias", True):
        add("fc.bias", hidden)
    for letter, count in rows.items():
        add(f"{prefix}self_attn.{letter}_proj.weight", count, inputs)
        if biases:
            add(f"{prefix}self_attn.{letter}_proj.bias", count)
    add(f"{prefix}self_attn.o_proj.weight", hidden, rows["q"])
    if biases and layout == "speculators":
        add(f"{prefix}self_attn.o_proj.bias", hidden)
    if layer["model_type"] == "qwen3" and layout == "speculators":
        add(f"{prefix}self_attn.q_norm.weight", head_dim)
        add(f"{prefix}self_attn.k_norm.weight", head_dim)
    add(f"{prefix}mlp.gate_proj.weight", inner, hidden)
    add(f"{prefix}mlp.up_proj.weight", inner, hidden)
    add(f"{prefix}mlp.down_proj.weight", hidden, inner)
    add(f"{prefix}post_attention_layernorm.weight", hidden)
    if layout != "eagle2":
        for name in (f"{prefix}hidden_norm", f"{prefix}input_layernorm", "norm"):
            add(f"{name}.weight", hidden)
        if top.get("norm_before_fc"):
            add("input_norm.weight", fc_inputs)
    if draft_vocabulary:
        add("lm_head.weight", draft_vocabulary, hidden)
        ids = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
        head.tensors["d2t"] = ids - torch.arange(draft_vocabulary)
        head.tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    if own_embedding:
        add("embed_tokens.weight", vocabulary, hidden)
    return head


def agreeing_head(layout: str, **changes: Any) -> Head:
    """A head that often agrees with `soft` targets: it passes the embedding of the last token on, an EAGLE-3 head by
    attention to that token itself."""
    head = random_head(layout, num_key_value_heads=4, **changes)
    tensors, eye, none = head.tensors, torch.eye(32), torch.zeros(32, 32)
    attention = f"{head.prefix}self_attn."
    tensors[f"{head.prefix}mlp.down_proj.weight"] *= 0.05
    if layout == "eagle2":
        tensors["fc.weight"] = torch.cat([eye, 0.1 * tensors["fc.weight"][:, 32:]], 1)
        tensors["fc.bias"] *= 0.05
        tensors[f"{attention}o_proj.weight"] *= 0.05
        return head
    tensors["fc.weight"] *= 0.05
    for letter, strength in (("q", 3), ("k", 3), ("v", 1)):
        tensors[f"{attention}{letter}_proj.weight"] = torch.cat([strength * eye, none], 1)
    tensors[f"{attention}o_proj.weight"] = 2 * eye
    for name in (f"{head.prefix}input_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(32)
    return head


def soft(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A target of four layers that hardly change their input, so that `agreeing_head` agrees with it."""
    if family == "gemma3":
        changes = {"layer_types": ["sliding_attention", "full_attention"] * 2, **changes}
    target = tiny(family, seed=seed, num_hidden_layers=4, **changes)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.25)
    return target


def drafter_of(head: Head, target: PreTrainedModel) -> EagleDrafter:
    return EagleDrafter(EagleCheckpoint.from_parts(head.config, head.tensors), target)


def trimmed_head(layout: str, target: PreTrainedModel) -> Head:
    """A head for a third of the vocabulary, EOS not among it, whose own projection is nearly the target's."""
    head = agreeing_head(layout, draft_vocabulary=DRAFTABLE, seed=2)
    ids = head.tensors["t2d"].nonzero()[:, 0]
    rows = target.get_output_embeddings().weight.detach()[ids]
    head.tensors["lm_head.weight"] = rows + 0.02 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    assert EOS not in ids.tolist()
    return head


# The reference -------------------------------------------------------------------------------------------------------


class SlowHead(nn.Module):
    """A head as in the papers: every call computes the whole text again, with an explicit mask.

    In the dtype of the embedding, which is the target's.
    """

    def __init__(self, head: Head, embedding: torch.Tensor):
        super().__init__()
        self.layer = head.layer
        tensors = {name: tensor.to(embedding.dtype) for name, tensor in head.tensors.items()}
        self.head = Head(head.layout, head.config, tensors)
        self.embedding = tensors.get("embed_tokens.weight", embedding)
        rope = {name: self.layer[name] for name in self.layer if name.startswith("rope")}
        self.config = LlamaConfig(
            **{name: self.layer[name] for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")},
            head_dim=self.layer.get("head_dim"),
            **rope,
        )

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        tensors = self.head.tensors
        y = x @ tensors[f"{name}.weight"].T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / (mean_square + self.layer["rms_norm_eps"]).sqrt() * self.head.tensors[f"{name}.weight"]

    def attention(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of rows that stand one after the other; the last one's rotary embedding sees the whole length."""
        n, name = x.shape[0], f"{self.head.prefix}self_attn."
        q, k, v = (self.linear(f"{name}{letter}_proj", x).view(n, -1, self.config.head_dim) for letter in "qkv")
        if f"{name}q_norm.weight" in self.head.tensors:
            q, k = self.norm(f"{name}q_norm", q), self.norm(f"{name}k_norm", k)
        cos, sin = LlamaRotaryEmbedding(self.config)(x, positions.unsqueeze(0))
        q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        repeats = q.shape[1] // k.shape[1]
        k, v = k[0].repeat_interleave(repeats, 0), v.transpose(0, 1).repeat_interleave(repeats, 0)
        scores = q[0] @ k.transpose(1, 2) / self.config.head_dim**0.5
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.linear(f"{name}o_proj", (weights @ v).transpose(0, 1).reshape(n, -1))

    def rows(self, features: torch.Tensor, guesses: list[torch.Tensor], ids: torch.Tensor, start: int) -> torch.Tensor:
        """`[n, H]`: the outputs of all rows, first for true features and then for the head's own guesses."""
        embedded = self.embedding[ids]
        if self.head.layout == "eagle2":
            hidden = self.linear("fc", torch.cat([embedded, torch.cat([features, *guesses])], -1))
            residual = x = hidden
        else:
            if self.head.config.get("norm_before_fc"):
                features = self.norm("input_norm", features)
            hidden = torch.cat([self.linear("fc", features), *guesses])
            normed = self.norm(f"{self.head.prefix}hidden_norm", hidden)
            residual = normed if self.head.config.get("norm_before_residual") else hidden
            x = torch.cat([self.norm(f"{self.head.prefix}input_layernorm", embedded), normed], -1)
        hidden = residual + self.attention(x, torch.arange(start, start + ids.shape[0]))
        name = f"{self.head.prefix}mlp."
        normed = self.norm(f"{self.head.prefix}post_attention_layernorm", hidden)
        gate = ACT2FN[self.layer["hidden_act"]](self.linear(f"{name}gate_proj", normed))
        return hidden + self.linear(f"{name}down_proj", gate * self.linear(f"{name}up_proj", normed))

    @torch.no_grad()
    def after(self, text: torch.Tensor, features: torch.Tensor, path: list[int]) -> torch.Tensor:
        """`[H]`: the hidden state that predicts the token after a text and a path of drafted tokens.

        Args:
            text: `[n]`.
            features: `[m, d]`, of `text[n - 1 - m : n - 1]`.
            path: drafted tokens, each the parent of the next.
        """
        start = text.shape[0] - 1 - features.shape[0]
        known = text[start + 1 :]
        guesses: list[torch.Tensor] = []
        for depth in range(len(path) + 1):
            ids = torch.cat([known, torch.tensor(path[:depth], dtype=torch.int64)])
            output = self.rows(features, guesses, ids, start)[-1:]
            guesses.append(output)
        return (output if self.head.layout == "eagle2" else self.norm("norm", output))[0]


def target_features(target: PreTrainedModel, text: torch.Tensor, reads: tuple[int, ...]) -> torch.Tensor:
    """`[n, d · len(reads)]`: the hidden states of a target at every token of a text."""
    with torch.no_grad():
        states = target(text.unsqueeze(0), output_hidden_states=True).hidden_states
    return torch.cat([states[index][0] for index in reads], -1)
