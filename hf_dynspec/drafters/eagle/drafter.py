"""EAGLE heads: one layer that drafts from the target's own hidden states.

Row `i` of a head pairs the feature of token `i`, which the target computed, with the embedding of token `i + 1`, at
position `i`. Its output stands for the feature of token `i + 1`, which does not exist yet, and predicts token `i + 2`.
EAGLE-2 (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", section 2.2) reads
the target's last hidden state and feeds its output back as it is. EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test", section 3.1) reads several and feeds back its
output before the final norm, past `fc`.

A step is a handful of operations over fused weights: no modules, no masks for chains, no waiting for the device.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import ArtifactError, UnsupportedError
from ...modeling.head import DynamicLMHead
from ...modeling.parts import unwrapped
from ..base import Drafter, DrafterState, ObserveDraftInputs, UnrolledStep
from ..weights_watch import WeightsWatch, stamp
from .checkpoint import CONFIG_FILE, EagleCheckpoint, EagleSettings, read_checkpoint, write_checkpoint

_FIRST_CAPACITY = 256


class EagleDrafter(Drafter):
    """An EAGLE-2 or EAGLE-3 head beside the target that it was trained for.

    The target is not modified. Its embedding and output projection are referenced, not copied, wherever the checkpoint
    has none, or has the target's own rows: then the head drafts any token, and otherwise only `head.token_ids`.
    Embeddings are the rows of the embedding matrix as they are, without the factor of Gemma's models, because EAGLE's
    own code looks them up in a plain embedding; the norm of EAGLE-3 would take the factor out again.

    Args:
        checkpoint: what `read_checkpoint` returned.
        target: a decoder-only model of transformers.
        dtype: of the head's own weights (None: the target's).

    Attributes:
        checkpoint: what was loaded, and what `save_pretrained` writes.

    Raises:
        ArtifactError: the checkpoint was made for a target of another size, or its rotary embedding is unknown.
        UnsupportedError: the target is an encoder-decoder, has too few layers, or no plain output projection.
    """

    def __init__(self, checkpoint: EagleCheckpoint, target: PreTrainedModel, dtype: torch.dtype | None = None):
        target = unwrapped(target)
        _require_fit(checkpoint, target)
        self.checkpoint = checkpoint
        self.settings = checkpoint.settings
        self.reads = _hidden_states_read(checkpoint.settings, target.config.get_text_config().num_hidden_layers)
        self._target = weakref.ref(target)
        self._dtype = dtype
        self._lock = threading.RLock()
        self._version = 0
        self._take_up(target)

    def _take_up(self, target: PreTrainedModel) -> None:
        """Reference what the target lends, and fuse the checkpoint's own weights."""
        shared = _head_of(target)
        device, dtype = shared.weight.device, self._dtype or shared.weight.dtype
        self.head = _choose_head(self.checkpoint, shared, dtype)
        self.weights = _Weights.fuse(self.checkpoint, device, dtype)
        self.rotary = _Rotary(self.checkpoint.settings, device, dtype)
        own = self.checkpoint.tensors.get("embed_tokens.weight")
        self.embedding = (
            target.get_input_embeddings().weight.detach() if own is None else own.to(device=device, dtype=dtype)
        )
        self._watch = WeightsWatch(target.get_output_embeddings(), samples=True)
        self._stamp = self._stamp_now(target)

    def _stamp_now(self, target: PreTrainedModel) -> list[Any]:
        return stamp([*self.checkpoint.tensors.values(), target.get_input_embeddings().weight], samples=True)

    @property
    def weights_version(self) -> int:
        with self._lock:
            target = self._target()
            # A target that is gone lends what it lent last.
            if target is not None and self._has_changed(target):
                self._take_up(target)
                self._version += 1
            return self._version

    def _has_changed(self, target: PreTrainedModel) -> bool:
        return (
            target.get_output_embeddings() is not self._watch.module
            or self._watch.has_changed()
            or self._stamp_now(target) != self._stamp
        )

    @classmethod
    def from_pretrained(
        cls,
        directory_or_repo: str | os.PathLike,
        *,
        target: PreTrainedModel,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        dtype: torch.dtype | None = None,
        allow_pickle: bool = False,
    ) -> "EagleDrafter":
        """Load an EAGLE-2, official EAGLE-3 or speculators EAGLE-3 checkpoint.

        Args:
            directory_or_repo: an existing folder, or a repository on the Hub.
            target: the model that it was trained for.
            revision: the branch, tag or commit of a repository, resolved to one commit for all files.
            cache_dir: where downloads are kept (None: the Hub's usual cache).
            token: for a private repository (None: the one that you are logged in with).
            dtype: of the head's own weights (None: the target's).
            allow_pickle: read `pytorch_model.bin` where there are no safetensors, by `torch.load(weights_only=True)`.

        Raises:
            ArtifactError: the checkpoint is damaged, not one of these, or made for another target. It names what is
                wrong; every tensor that is missing, unexpected or of another shape is listed.
            UnsupportedError: as the class.
        """
        checkpoint = read_checkpoint(
            directory_or_repo, revision=revision, cache_dir=cache_dir, token=token, allow_pickle=allow_pickle
        )
        return cls(checkpoint, target, dtype)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write what was loaded, in the format that it came in; a pickle becomes safetensors."""
        write_checkpoint(directory, self.checkpoint)

    def require_target(self, target: PreTrainedModel) -> None:
        _require_fit(self.checkpoint, target)
        _hidden_states_read(self.settings, target.config.get_text_config().num_hidden_layers)

    @torch.no_grad()
    def unroll(self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int) -> Iterator[UnrolledStep]:
        rows = token_ids.shape[0] - 1
        weight = self.weights.qkv
        embedded = self.embed(token_ids[1:])
        hidden = features[:rows].to(device=weight.device, dtype=weight.dtype)
        cos, sin = self.rotary.tables(rows + depth)
        drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(depth):
            width = rows - step
            feature = self.feature(hidden[:width], fed_back=step > 0)
            joined, residual = self.combine(embedded[step:], feature)
            at = slice(step, rows)
            queries, keys, values = self.weights.project(joined, width, cos[at], sin[at])
            if step == 0:
                stable = keys, values
            else:
                drafted = [(key[:width], value[:width]) for key, value in [*drafted, (keys, values)]]
            hidden = self.finish(_attend_from_everywhere(queries, *stable, drafted), residual)
            yield UnrolledStep(embedded[step:], feature, self.predict(hidden))

    def start(self) -> "EagleState":
        return EagleState(self)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[w, H]` in the head's dtype and on its device: the embeddings of tokens, int64 `[w]`."""
        rows = embedding(token_ids.to(self.embedding.device), self.embedding)
        return rows.to(device=self.weights.qkv.device, dtype=self.weights.qkv.dtype)

    def predict(self, output: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: outputs as the output projection expects them. EAGLE-2 has no norm of its own."""
        if self.weights.norm is not None:
            output = self.weights.norm(output)
        return output.to(self.head.weight.dtype)

    def feature(self, hidden: torch.Tensor, fed_back: bool) -> torch.Tensor:
        """`[w, H]`: what stands beside the embeddings.

        Args:
            hidden: `[w, d]`: the target's hidden states, which EAGLE-3 combines into one, or the head's own outputs
                where `fed_back`.
        """
        weights = self.weights
        if self.settings.generation == 2 or fed_back:
            return hidden
        if weights.input_norm is not None:
            hidden = weights.input_norm(hidden)
        return linear(hidden, weights.fc)

    def combine(self, embedded: torch.Tensor, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Join embeddings and features, each `[w, H]`.

        Returns:
            What the attention reads, `[w, H]` (EAGLE-2) or `[w, 2 · H]`, and the residual around it, `[w, H]`.
        """
        weights = self.weights
        if self.settings.generation == 2:
            joined = linear(torch.cat([embedded, feature], -1), weights.fc, weights.fc_bias)
            return joined, joined
        both = weights.pair_norm(torch.stack([embedded, feature], 1))
        # speculators' norm_before_residual: the normalised hidden state goes around the attention.
        return both.flatten(1), both[:, 1] if self.settings.norm_before_residual else feature

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`[w, H]`: the layer after its attention, `[w, heads · head_dim]`."""
        weights = self.weights
        if weights.output_bias is not None:
            residual = residual + weights.output_bias
        hidden = torch.addmm(residual, attended, weights.output.T)
        gate, up = linear(weights.mlp_norm(hidden), weights.gate_up).chunk(2, -1)
        return torch.addmm(hidden, weights.activation(gate) * up, weights.down.T)


class EagleState(DrafterState):
    """The stable rows of the verified text, computed from the target's features, and after them the rows of a draft.

    Rows of a draft hold the head's own guesses at features, so they are forgotten even where their tokens were
    accepted; `length` therefore counts verified tokens only: stable rows, and the token that the last one read.

    Keys are kept rotated, except where the rotation of a position changes with the length of the text (dynamic and
    longrope): there they are kept as they are and rotated at every step.
    """

    def __init__(self, drafter: EagleDrafter):
        self._drafter = drafter
        self._start = 0  # the position of the first row: not 0 where the features of the beginning were not to be had
        self._stable = 0
        self._drafted = 0
        self._levels = 0
        # `[w, H]`: the outputs of the last level, or of the last stable row.
        self._output: torch.Tensor | None = None
        # bool `[w, drafted]`: which drafted rows the last level saw, None where it saw all.
        self._ancestors: torch.Tensor | None = None
        self._reserve(_FIRST_CAPACITY)

    @property
    def length(self) -> int:
        """How many leading tokens of the verified text are covered: the target's features are next wanted from token
        `length - 1` on (from 0 on where it is 0). A draft does not count."""
        return self._start + self._stable + 1 if self._stable else 0

    @torch.no_grad()
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Compute the stable rows of the tokens that were verified since, from the target's features.

        Where the features begin later than the rows end, as when the target had the beginning of a text in its cache,
        the rows start afresh there, at their true positions.

        Args:
            prefix: int64 `[n]`, `n >= 2`: all verified tokens, more than are covered.
            features: `[m, d_target · len(reads)]`: of `prefix[n - 1 - m : n - 1]`, `m >= 1`. May reach back over
                tokens that are covered already.
            observe_draft_inputs: as the contract has it. The feature of EAGLE-3 is taken in as `fc` combines it.

        Returns:
            `[1, H]`, of the output projection's dtype.

        Raises:
            ValueError: there are no features, more than tokens before the last one, or no tokens to cover.
        """
        n = prefix.shape[0]
        if features is None or not features.shape[0]:
            raise ValueError("an EAGLE head drafts from the target's hidden states, and none were given")
        first = n - 1 - features.shape[0]
        if first < 0:
            raise ValueError(f"{features.shape[0]} features, and the prefix has {n - 1} tokens before its last one")
        self._forget_draft()
        if first > self._start + self._stable or not self._stable:
            self._start, self._stable = first, 0
        position = self._start + self._stable
        if position >= n - 1:
            raise ValueError(f"the cache covers {self.length} tokens, and the prefix has no more than {n}")
        weight = self._drafter.weights.qkv
        features = features[position - n + 1 :].to(device=weight.device, dtype=weight.dtype)
        self._output = self._append(
            prefix[position + 1 :], features, position, fed_back=False, observe_draft_inputs=observe_draft_inputs
        )
        self._stable += features.shape[0]
        return self._drafter.predict(self._output)

    @torch.no_grad()
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Append one level of drafted tokens, each with its parent's output in the place of a feature.

        Args:
            token_ids: int64 `[w]`: the target's ids, also of a head with a vocabulary of its own.
            parents: int64 `[w]`, as the contract has it; None for a chain.
            observe_draft_inputs: as the contract has it.

        Returns:
            `[w, H]`, of the output projection's dtype.

        Raises:
            ValueError: nothing has been advanced to, or several tokens have no parents.
        """
        width = token_ids.shape[0]
        if self._output is None or (parents is None and width != 1):
            raise ValueError("draft() follows advance(), and takes the parents of all levels but a chain's")
        hidden = self._output
        if parents is None or not self._levels:
            hidden = hidden.expand(width, -1)
        else:
            hidden = hidden.index_select(0, parents)
        self._ancestors = self._ancestors_of(width, parents)
        position = self._start + self._stable + self._levels
        self._output = self._append(
            token_ids, hidden, position, fed_back=True, observe_draft_inputs=observe_draft_inputs
        )
        self._drafted += width
        self._levels += 1
        return self._drafter.predict(self._output)

    def truncate(self, length: int) -> None:
        """Keep the rows that the first `length` tokens allow, and no draft."""
        self._forget_draft()
        self._stable = max(0, min(self._stable, length - 1 - self._start))

    def _forget_draft(self) -> None:
        self._drafted = self._levels = 0
        self._output = self._ancestors = None

    def _ancestors_of(self, width: int, parents: torch.Tensor | None) -> torch.Tensor | None:
        """bool `[w, drafted + w]`: which drafted rows a level sees, itself included. None where it sees all."""
        if width == 1 and self._ancestors is None and (self._drafted == self._levels):
            return None
        device = self._keys.device
        own = torch.eye(width, dtype=torch.bool, device=device)
        if not self._levels:
            return own
        before = self._ancestors
        if before is None:
            before = torch.ones(1, self._drafted, dtype=torch.bool, device=device)
        before = before if parents is None else before.index_select(0, parents)
        return torch.cat([before, own], 1)

    def _append(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        position: int,
        fed_back: bool,
        observe_draft_inputs: ObserveDraftInputs | None,
    ) -> torch.Tensor:
        """Append rows.

        Args:
            token_ids: int64 `[w]`.
            hidden: `[w, d]`.
            position: of all rows of a draft's level, or of the first of the target's features.
            fed_back: the rows are a draft's.
            observe_draft_inputs: called with the embeddings and features of the rows whose outputs are wanted.

        Returns:
            `[w, H]` for a draft. Of stable rows only the last one's output is ever read, `[1, H]`; of the others no
            more is computed than the keys and values.
        """
        drafter = self._drafter
        width = token_ids.shape[0]
        outputs = width if fed_back else 1
        begin = self._stable + self._drafted
        if begin + width > self._keys.shape[1]:
            self._reserve(max(begin + width, 2 * self._keys.shape[1]))
        stop = position + (1 if fed_back else width)
        cos, sin = drafter.rotary.tables(stop)
        embedded, hidden = drafter.embed(token_ids), drafter.feature(hidden, fed_back)
        if observe_draft_inputs is not None:
            observe_draft_inputs(embedded[-outputs:], hidden[-outputs:])
        joined, residual = drafter.combine(embedded, hidden)
        at = slice(position, stop)
        if drafter.rotary.is_steady:
            queries, keys, values = drafter.weights.project(joined, outputs, cos[at], sin[at])
        else:
            queries, keys, values = drafter.weights.project(joined, outputs)
            queries = _rotate(queries, cos[stop - 1], sin[stop - 1])
            self._positions[begin : begin + width] = torch.arange(position, stop, device=keys.device)
        self._keys[:, begin : begin + width] = keys.transpose(0, 1)
        self._values[:, begin : begin + width] = values.transpose(0, 1)
        attended = self._attend(queries, begin + width, cos, sin)
        return drafter.finish(attended, residual[-outputs:])

    def _attend(self, queries: torch.Tensor, rows: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[w, heads · head_dim]`: attention of queries `[w, heads, head_dim]` to the first so many rows.

        The heads that share keys are laid side by side as if they were rows, so that keys are never repeated.
        """
        width, heads, head_dim = queries.shape
        keys, values = self._keys[:, :rows], self._values[:, :rows]
        if not self._drafter.rotary.is_steady:
            positions = self._positions[:rows]
            keys = _rotate(keys, cos[:, 0].index_select(0, positions), sin[:, 0].index_select(0, positions))
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        queries = queries.view(width, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        queries = queries.reshape(1, kv_heads, group * width, head_dim)
        mask = None
        if self._ancestors is not None:
            stable = self._ancestors.new_ones(width, self._stable)
            mask = torch.cat([stable, self._ancestors], 1).repeat(group, 1)
        attended = scaled_dot_product_attention(queries, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask)
        return attended.view(kv_heads, group, width, head_dim).permute(2, 0, 1, 3).reshape(width, -1)

    def _reserve(self, capacity: int) -> None:
        """Make room for so many rows, keeping those that are there."""
        settings, like = self._drafter.settings, self._drafter.weights.qkv
        rows = self._stable + self._drafted
        shape = (settings.num_key_value_heads, capacity, settings.head_dim)
        keys, values = like.new_empty(shape), like.new_empty(shape)
        positions = torch.empty(capacity, dtype=torch.int64, device=like.device)
        if rows:
            keys[:, :rows], values[:, :rows] = self._keys[:, :rows], self._values[:, :rows]
            positions[:rows] = self._positions[:rows]
        self._keys, self._values, self._positions = keys, values, positions


def _attend_from_everywhere(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    drafted: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """`[w, heads · head_dim]`: attention of rows that belong to `w` different drafts.

    Args:
        queries: `[w, heads, head_dim]`.
        keys, values: `[n, kv_heads, head_dim]`: of the stable rows; draft `i` sees the first `i + 1`.
        drafted: keys and values, each `[w, kv_heads, head_dim]`, of the drafts' own rows, one of each draft per step.
    """
    width, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    queries = queries.view(width, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("wkgd,nkd->wkgn", queries, keys)
    is_later = torch.ones(width, keys.shape[0], dtype=torch.bool, device=keys.device).triu(1)
    scores = scores.masked_fill(is_later[:, None, None], -torch.inf)
    own = [torch.einsum("wkgd,wkd->wkg", queries, key).unsqueeze(-1) for key, _ in drafted]
    weights = (torch.cat([scores, *own], -1) * head_dim**-0.5).softmax(-1)
    attended = torch.einsum("wkgn,nkd->wkgd", weights[..., : keys.shape[0]], values)
    for step, (_, value) in enumerate(drafted, start=keys.shape[0]):
        attended = attended + weights[..., step, None] * value.unsqueeze(2)
    return attended.reshape(width, -1)


@dataclass(frozen=True, eq=False)
class _Weights:
    """The head's own weights, with those that read the same input fused into one matrix.

    Args:
        qkv: `[(heads + 2 · kv_heads) · head_dim, H or 2 · H]`.
        pair_norm: EAGLE-3's of embeddings and hidden states, over `[w, 2, H]`.
        query_norm, key_norm: over `[w, heads, head_dim]`, where the head has them.
        gate_up: `[2 · intermediate, H]`.
    """

    settings: EagleSettings
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
    def fuse(cls, checkpoint: EagleCheckpoint, device: torch.device, dtype: torch.dtype) -> "_Weights":
        tensors, settings = checkpoint.tensors, checkpoint.settings

        def one(name: str) -> torch.Tensor | None:
            tensor = tensors.get(name)
            return None if tensor is None else tensor.to(device=device, dtype=dtype)

        def several(names: list[str]) -> torch.Tensor | None:
            parts = [one(name) for name in names]
            return None if parts[0] is None else torch.cat(parts)

        def norm(*names: str) -> _Norm | None:
            parts = [one(f"{name}.weight") for name in names]
            if parts[0] is None:
                return None
            return _Norm(torch.stack(parts) if len(parts) > 1 else parts[0], settings.rms_norm_eps)

        attention = "layer.self_attn."
        return cls(
            settings=settings,
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

    def project(
        self, joined: torch.Tensor, outputs: int, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of the last rows, keys and values of all; queries and keys rotated, if tables are given.

        Args:
            joined: `[w, H or 2 · H]`.
            outputs: how many queries are wanted.
            cos, sin: `[w, 1, head_dim]` or `[1, 1, head_dim]`.

        Returns:
            `[outputs, heads, head_dim]`, `[w, kv_heads, head_dim]` and the same.
        """
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


class _Norm:
    """Root mean square normalisation over the last dimension.

    torch's own is one kernel on a GPU, but a dozen operations on a CPU, which there is half of a small head's step.
    The same takes four: `x / sqrt(|x|² / d + eps) · w = x / hypot(|x|, sqrt(d · eps)) · (sqrt(d) · w)`.

    Args:
        weight: `[d]`, or `[k, d]` for inputs `[w, k, d]`.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self._weight, self._eps = weight, eps
        self._shape = weight.shape[-1:]
        # 16-bit inputs are squared in fp32, which torch's own sees to.
        self._is_split = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        if self._is_split:
            self._scaled = weight * self._shape[0] ** 0.5
            self._floor = torch.tensor((self._shape[0] * eps) ** 0.5, dtype=weight.dtype)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if not self._is_split:
            if self._weight.dim() == 1:
                return rms_norm(states, self._shape, self._weight, self._eps)
            return rms_norm(states, self._shape, None, self._eps) * self._weight
        lengths = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        return states / torch.hypot(lengths, self._floor) * self._scaled


def _position(
    states: torch.Tensor, norm: _Norm | None, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> torch.Tensor:
    """Normalise queries or keys, if the head does so, and rotate them, if tables are given."""
    if norm is not None:
        states = norm(states)
    return states if cos is None else _rotate(states, cos, sin)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding; `sin` has the sign of its first half turned (`_Rotary.tables`)."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


class _Rotary:
    """The rotary embedding of a head, of any kind that transformers knows.

    Attributes:
        is_steady: the rotation of a position is the same in texts of every length.

    Raises:
        ArtifactError: transformers does not know the kind, or a parameter is missing or mistyped.
    """

    def __init__(self, settings: EagleSettings, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        try:
            self._config = LlamaConfig(
                hidden_size=settings.hidden_size,
                num_attention_heads=settings.num_attention_heads,
                head_dim=settings.head_dim,
                **settings.rope,
            )
            rope = self._config.rope_parameters
            self._kind = rope["rope_type"]
            default = LlamaRotaryEmbedding.compute_default_rope_parameters
            self._parameters = default if self._kind == "default" else ROPE_INIT_FUNCTIONS[self._kind]
            self._limit = rope.get("original_max_position_embeddings", self._config.max_position_embeddings)
            self.is_steady = self._kind not in ("dynamic", "longrope")
            self._cached = self._compute(_FIRST_CAPACITY)
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            problem = f"transformers cannot make a rotary embedding of {dict(settings.rope)}: {error}"
            fix = "Correct rope_parameters, or rope_theta and rope_scaling."
            raise ArtifactError(f"{CONFIG_FILE}: rope_parameters", problem[:400], fix) from error
        if self._cached[1].shape[-1] != settings.head_dim:
            problem = "rotates only a part of each attention head"
            raise ArtifactError(f"{CONFIG_FILE}: partial_rotary_factor", problem, "Use a head that rotates all of it.")

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines `[length or more, 1, head_dim]` for a text of so many positions."""
        key, cos, sin = self._cached
        if key != self._key(length) or cos.shape[0] < length:
            # Tables that hold for any length are made larger than needed, so that they are made seldom.
            key, cos, sin = self._cached = self._compute(max(length, 2 * cos.shape[0]) if self.is_steady else length)
        return cos, sin

    def _key(self, length: int) -> int:
        """Which lengths have the same frequencies."""
        if self._kind == "dynamic":
            return max(length, self._config.max_position_embeddings)
        return int(self._kind == "longrope" and length > self._limit)

    def _compute(self, length: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        # transformers' own module reads the length off the positions, which waits for the device.
        frequencies, scale = self._parameters(self._config, device=self._device, seq_len=length)
        positions = torch.arange(length, device=self._device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies.to(device=self._device, dtype=torch.float32))
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # Turning the sign here instead of in each step: rotate_half(x) · sin = roll(x) · (−sin, sin).
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return self._key(length), cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1)


# The target ----------------------------------------------------------------------------------------------------------


def _head_of(target: PreTrainedModel) -> DynamicLMHead:
    if target.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{type(target).__name__} is an encoder-decoder model. EAGLE heads draft for decoder-only models."
        )
    return DynamicLMHead.from_model(target)


def _require_fit(checkpoint: EagleCheckpoint, target: PreTrainedModel) -> None:
    """Compare the sizes that the checkpoint was made for with the target's."""
    settings, config = checkpoint.settings, target.config.get_text_config()
    fix = f"Load the head that was made for {config.name_or_path or type(target).__name__}."
    if settings.target_hidden_size != config.hidden_size:
        problem = f"is for hidden states of {settings.target_hidden_size}, and the target's have {config.hidden_size}"
        raise ArtifactError(f"{CONFIG_FILE}: hidden_size", problem, fix)
    if settings.vocab_size != config.vocab_size:
        problem = f"is {settings.vocab_size}, and the target's is {config.vocab_size}"
        raise ArtifactError(f"{CONFIG_FILE}: vocab_size", problem, fix)
    lent = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in checkpoint.tensors]
    if lent and settings.hidden_size != settings.target_hidden_size:
        problem = f"is {settings.hidden_size}, so that the target's {lent[0]} cannot be used, and there is no own one"
        raise ArtifactError(f"{CONFIG_FILE}: hidden_size", problem, f"Use a checkpoint with {lent[0]}.")
    width = target.get_input_embeddings().weight.shape[-1]
    if "embed_tokens.weight" in lent and width != settings.hidden_size:
        raise UnsupportedError(
            f"{type(target).__name__} embeds tokens in {width} numbers, and the head reads {settings.hidden_size}. "
            "Use a checkpoint with an embedding of its own."
        )


def _hidden_states_read(settings: EagleSettings, layers: int) -> tuple[int, ...]:
    """Which of the target's hidden states, `0 … layers`, the head reads."""
    if settings.generation == 2:
        return (layers,)
    reads = settings.target_layer_ids or (2, layers // 2, layers - 3)
    if min(reads) < 0 or max(reads) > layers:
        raise UnsupportedError(
            f"the head reads the hidden states {reads}, and the target has those from 0 to {layers}. "
            "Use the target that the head was made for."
        )
    return reads


def _choose_head(checkpoint: EagleCheckpoint, shared: DynamicLMHead, dtype: torch.dtype) -> DynamicLMHead:
    """The output projection: the target's, or the head's own.

    speculators freezes the verifier's rows into `lm_head`. A head with exactly those rows can draft every token
    through the target's own projection, of which its rows are a part.
    """
    own, token_ids = checkpoint.tensors.get("lm_head.weight"), checkpoint.token_ids()
    if own is None:
        return shared
    if own.shape[1] == shared.weight.shape[1] and shared.bias is None:
        # A few rows first: comparing all of them is for those that are likely to agree.
        for rows in (slice(0, 8), slice(None)):
            ids = torch.arange(own.shape[0])[rows] if token_ids is None else token_ids[rows]
            theirs = shared.weight.index_select(0, ids.to(shared.weight.device)).to(device="cpu", dtype=own.dtype)
            if not torch.equal(theirs, own[rows]):
                break
        else:
            return shared
    weight = own.to(device=shared.weight.device, dtype=dtype)
    return DynamicLMHead(weight, token_ids=None if token_ids is None else token_ids.to(shared.weight.device))
