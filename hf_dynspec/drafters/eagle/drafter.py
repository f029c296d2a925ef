"""EAGLE heads: one layer that drafts from the target's own hidden states.

Row `i` of a head pairs the target's feature of token `i` with the embedding of token `i + 1`, at position `i`. Its
output predicts token `i + 2`, and stands for the feature of token `i + 1`, which does not exist yet. EAGLE-2 (Li et
al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", section 2.2) reads the target's last
hidden state and feeds its output back as it is. EAGLE-3 (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration
of Large Language Models via Training-Time Test", section 3.1) reads several and feeds back its output before the final
norm, past `fc`.

A step is a handful of operations over fused weights: no modules, no masks for chains, no waiting for the device.
"""

import copy
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ...devices import has_graphs
from ...errors import ArtifactError, UnsupportedError
from ...memory.fixed import FixedMemory
from ...modeling.head import DynamicLMHead
from ...modeling.parts import LARGEST_PADDING, unwrapped
from ..base import Drafter, UnrolledStep
from ..weights_watch import WeightsWatch, stamp
from .checkpoint import EagleCheckpoint, read_checkpoint, write_checkpoint
from .checkpoint_files import CONFIG_FILE
from .fixed import FixedEagle
from .module import EagleModule, side_by_side
from .settings import EagleSettings
from .state import EagleState
from .trimming import are_copies
from .weights import FusedWeights


class EagleDrafter(Drafter):
    """An EAGLE-2 or EAGLE-3 head beside the target that it was trained for.

    The target is not modified. If the checkpoint has no embedding or output projection, or copies of the target's
    rows, the target's is used without copying, and the head drafts any token; otherwise only `head.token_ids`.
    Embeddings are plain rows of the matrix, without the factor of Gemma's models, as in EAGLE's own code; EAGLE-3's
    norm would cancel the factor anyway.

    Args:
        checkpoint: from `read_checkpoint`. Its tensors are copied.
        target: a decoder-only transformers model.
        dtype: the dtype of the head's own weights (None: the target's, also if that is cast later).
        only_own_tokens: draft only tokens of the head's own projection, as serving engines do, even if its rows are
            copies of the target's.

    Attributes:
        module: the head's own weights, for training, adapters and saving. The target's weights are no part of it and
            never get gradients; an `lm_head` with copies of the target's rows is not used, and frozen.
        weights: the module's weights, fused for drafting.

    Raises:
        ArtifactError: the checkpoint was made for a target of another size, or its rotary embedding is unknown.
        UnsupportedError: the target is an encoder-decoder, has too few layers, or no plain output projection.
    """

    module: EagleModule

    def __init__(
        self,
        checkpoint: EagleCheckpoint,
        target: PreTrainedModel,
        dtype: torch.dtype | None = None,
        only_own_tokens: bool = False,
    ):
        target = unwrapped(target)
        _require_fit(checkpoint.settings, checkpoint.tensors, target)
        self.settings = checkpoint.settings
        self.reads = _hidden_states_read(checkpoint.settings, target.config.get_text_config().num_hidden_layers)
        self.module = EagleModule(checkpoint)
        # The module has the tensors.
        self._read = replace(checkpoint, tensors={})
        self._token_ids = checkpoint.token_ids()
        self._target = weakref.ref(target)
        self._dtype = dtype
        self._only_own_tokens = only_own_tokens
        self._lock = threading.RLock()
        self._version = 0
        self._settled: tuple[torch.device, torch.dtype] | None = None
        self._follow_target(target)
        if self.module.lm_head is not None and not self._has_own_head:
            self.module.lm_head.requires_grad_(False)

    def _follow_target(self, target: PreTrainedModel) -> None:
        """Reference the target's weights, and fuse the module's own."""
        # If there is an error here, the next round tries again.
        self._is_current = False
        if target.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{type(target).__name__} is an encoder-decoder model. EAGLE heads draft for decoder-only models."
            )
        shared = DynamicLMHead.from_model(target)
        device, dtype = shared.weight.device, self._dtype or shared.weight.dtype
        # Only after the target was moved or cast: a module cast by its user stays so, and drafts in `dtype`.
        if self._settled != (device, dtype):
            self.module.settle(device, dtype)
            self._settled = device, dtype
        tensors = self.module.merged_tensors()
        own = tensors.get("lm_head.weight")
        self.head = _choose_head(own, self._token_ids, shared, dtype, self._only_own_tokens)
        self._has_own_head = self.head is not shared
        lent = target.get_input_embeddings().weight.detach()
        self.weights = FusedWeights.fuse(self.settings, tensors, lent, self.head.weight.dtype, device, dtype)
        self._lent_stamp = self._stamp_of_embedding(target)
        self._watches = [WeightsWatch(one, samples=True) for one in (target.get_output_embeddings(), self.module)]
        self._is_current = True

    @staticmethod
    def _stamp_of_embedding(target: PreTrainedModel) -> list[Any]:
        return stamp([target.get_input_embeddings().weight], samples=True)

    @property
    def weights_version(self) -> int:
        self._follow_weights()
        return self._version

    def _follow_weights(self, of_module: bool = True) -> None:
        """Take up changes in the target's weights and, if `of_module`, in the module, whose weights are then fused
        anew."""
        with self._lock:
            target = self._target()
            # After the target is gone, its last weights are used.
            if target is not None and self._has_changed(target, of_module):
                self._follow_target(target)
                self._version += 1

    def _has_changed(self, target: PreTrainedModel, of_module: bool) -> bool:
        return (
            not self._is_current
            or target.get_output_embeddings() is not self._watches[0].module
            or any(watch.has_changed() for watch in (self._watches if of_module else self._watches[:1]))
            or self._stamp_of_embedding(target) != self._lent_stamp
        )

    @property
    def checkpoint(self) -> EagleCheckpoint:
        """The loaded checkpoint with the present weights, in their dtype and on their device. They share the module's
        memory, except those with adapters of peft, which are merged into copies.

        Raises:
            UnsupportedError: as `EagleModule.merged_tensors`.
        """
        return replace(self._read, tensors=self.module.merged_tensors())

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
        only_own_tokens: bool = False,
    ) -> "EagleDrafter":
        """Load an EAGLE-2, official EAGLE-3 or speculators EAGLE-3 checkpoint.

        Args:
            directory_or_repo: an existing folder, or a repository on the Hub.
            target: the model that it was trained for.
            revision: the branch, tag or commit of a repository, resolved to one commit for all files.
            cache_dir: the folder for downloads (None: the Hub's usual cache).
            token: for a private repository (None: the one that you are logged in with).
            dtype: the dtype of the head's own weights (None: the target's, also if that is cast later).
            allow_pickle: read `pytorch_model.bin` if there are no safetensors, by `torch.load(weights_only=True)`.
            only_own_tokens: as the class.

        Raises:
            ArtifactError: the checkpoint is damaged, not one of these, or made for another target. All tensors that
                are missing, unexpected or of another shape are listed.
            UnsupportedError: as the class.
        """
        checkpoint = read_checkpoint(
            directory_or_repo, revision=revision, cache_dir=cache_dir, token=token, allow_pickle=allow_pickle
        )
        return cls(checkpoint, target, dtype, only_own_tokens)

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the present weights in the layout of the loaded checkpoint, with the active adapters of peft merged,
        and in their dtype, except fp64 as fp32, the widest of checkpoints.

        Raises:
            ArtifactError: a weight is not finite. Names it.
            UnsupportedError: a layer's adapter cannot be merged. Names it.
        """
        checkpoint = self.checkpoint
        tensors = dict(checkpoint.tensors)
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                fix = "Go back to weights from before the training diverged."
                raise ArtifactError(name, "holds NaN or infinity", fix)
            if tensor.dtype == torch.float64:
                tensors[name] = tensor.float()
        write_checkpoint(directory, replace(checkpoint, tensors=tensors))

    def copy(self) -> "EagleDrafter":
        target = self._target()
        if target is None:
            raise ReferenceError("the target of the EAGLE head is gone")
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        other._lock = threading.RLock()
        other._follow_target(target)
        return other

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        self._follow_weights()
        weights = side_by_side(weights)
        replace = super().prepare_weights(weights)
        if not self.replaces_numbers(weights):
            # With adapters or another projection, `weights_version` finds the changes.
            return replace
        fused = self.weights.anew({**self.module.merged_tensors(), **weights})

        def replace_and_accept() -> None:
            with self._lock:
                replace()
                if has_graphs(self.weights.qkv.device):
                    self.weights.write(fused)
                else:
                    self.weights = fused
                self._watches[1].accept_weights()
                self._version += 1
                self.replacements += 1

        return replace_and_accept

    def replaces_numbers(self, names: Collection[str]) -> bool:
        return set(names) <= self.module.merged_tensors().keys() - {"lm_head.weight"}

    def require_target(self, target: PreTrainedModel) -> None:
        _require_fit(self.settings, self.module.tensor_names, target)
        _hidden_states_read(self.settings, target.config.get_text_config().num_hidden_layers)

    def start(self) -> EagleState:
        return EagleState(lambda: self.weights)

    def require_fixed_memory(self) -> None:
        if not self.weights.rotary.is_steady:
            raise UnsupportedError("the head has a rotary embedding that changes with the length of the text.")

    def fixed(self, read: Cache, texts: int, capacity: int, nodes: int) -> FixedEagle:
        settings, like = self.settings, self.weights.qkv
        shape = settings.num_key_value_heads, settings.head_dim, settings.head_dim
        return FixedEagle(
            lambda: self.weights, FixedMemory([shape], [None], texts, capacity, nodes, like.dtype, like.device)
        )

    @property
    def num_embeddings(self) -> int:
        return self.weights.embedding.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[w, H]`, in the dtype and on the device of drafting: the embeddings of tokens, int64 `[w]`."""
        return self.weights.embed(token_ids)

    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        # With gradients the module itself runs, so that its weights need not be fused after each optimizer step.
        with_gradients = torch.is_grad_enabled()
        self._follow_weights(of_module=not with_gradients)
        layer: FusedWeights | EagleModule = self.module if with_gradients else self.weights
        rows = token_ids.shape[0] - 1
        embedded = self._embedded_for(layer, token_ids[1:])
        hidden = features[:rows].to(embedded)
        cos, sin = (table[: rows + depth].to(embedded) for table in self.weights.rotary.tables(rows + depth))
        drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(depth):
            # The first step reads all rows, but only keys and values are needed of rows before `first`.
            start, width = first + step if step else 0, rows - first - step
            feature = layer.feature(hidden[: rows - start], fed_back=step > 0)
            joined, residual = layer.combine(embedded[start:], feature)
            queries, keys, values = layer.project(joined, width, cos[start:rows], sin[start:rows])
            if step == 0:
                stable = keys, values
            else:
                drafted = [(key[:width], value[:width]) for key, value in [*drafted, (keys, values)]]
            hidden = layer.finish(_attend_from_everywhere(queries, *stable, drafted, first), residual[-width:])
            outputs = layer.final_norm(hidden).to(self.head.weight)
            yield UnrolledStep(embedded[first + step :], feature if step else feature[first:], outputs)

    def _embedded_for(self, layer: FusedWeights | EagleModule, token_ids: torch.Tensor) -> torch.Tensor:
        """`[w, H]`, with gradients if the module has an embedding of its own."""
        if isinstance(layer, FusedWeights):
            return layer.embed(token_ids)
        own = layer.embed_tokens
        rows = self.weights.embed(token_ids) if own is None else own(token_ids.to(own.weight.device))
        return rows.to(layer.like)

    def token_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head.token_logits(hidden, token_ids, self.module.lm_head if self._has_own_head else None)


def _attend_from_everywhere(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    drafted: list[tuple[torch.Tensor, torch.Tensor]],
    first: int,
) -> torch.Tensor:
    """`[w, heads · head_dim]`: the attention of rows of `w` different drafts.

    Args:
        queries: `[w, heads, head_dim]`.
        keys, values: `[n, kv_heads, head_dim]`: of the stable rows; draft `i` sees the first `first + i + 1`.
        drafted: for each step the keys and values of the drafts' own rows, `[w, kv_heads, head_dim]` each.
    """
    width, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    queries = queries.view(width, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("wkgd,nkd->wkgn", queries, keys)
    is_later = torch.ones(width, keys.shape[0], dtype=torch.bool, device=keys.device).triu(first + 1)
    scores = scores.masked_fill(is_later[:, None, None], -torch.inf)
    own = [torch.einsum("wkgd,wkd->wkg", queries, key).unsqueeze(-1) for key, _ in drafted]
    weights = (torch.cat([scores, *own], -1) * head_dim**-0.5).softmax(-1)
    attended = torch.einsum("wkgn,nkd->wkgd", weights[..., : keys.shape[0]], values)
    for step, (_, value) in enumerate(drafted, start=keys.shape[0]):
        attended = attended + weights[..., step, None] * value.unsqueeze(2)
    return attended.reshape(width, -1)


def _require_fit(settings: EagleSettings, tensor_names: Collection[str], target: PreTrainedModel) -> None:
    config = target.config.get_text_config()
    fix = f"Load the head that was made for {config.name_or_path or type(target).__name__}."
    if settings.target_hidden_size != config.hidden_size:
        problem = f"is for hidden states of {settings.target_hidden_size}, and the target's have {config.hidden_size}"
        raise ArtifactError(f"{CONFIG_FILE}: hidden_size", problem, fix)
    # The target may have been padded since the head was trained.
    if not 0 <= config.vocab_size - settings.vocab_size < LARGEST_PADDING:
        problem = f"is {settings.vocab_size}, and the target's is {config.vocab_size}"
        raise ArtifactError(f"{CONFIG_FILE}: vocab_size", problem, fix)
    lent = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensor_names]
    if lent and settings.hidden_size != settings.target_hidden_size:
        problem = f"is {settings.hidden_size}, so that the target's {lent[0]} cannot be used, and there is no own one"
        raise ArtifactError(f"{CONFIG_FILE}: hidden_size", problem, f"Use a checkpoint with {lent[0]}.")
    embedding = target.get_input_embeddings().weight
    if "embed_tokens.weight" in lent and not embedding.is_floating_point():
        raise UnsupportedError(
            f"{type(target).__name__} keeps its embedding packed ({str(embedding.dtype).removeprefix('torch.')}), and "
            "the head reads rows of it. Load the target with its weights unpacked, or use a checkpoint with an "
            "embedding of its own."
        )
    width = embedding.shape[-1]
    if "embed_tokens.weight" in lent and width != settings.hidden_size:
        raise UnsupportedError(
            f"{type(target).__name__} embeds tokens in {width} numbers, and the head reads {settings.hidden_size}. "
            "Use a checkpoint with an embedding of its own."
        )


def _hidden_states_read(settings: EagleSettings, layers: int) -> tuple[int, ...]:
    """The target's hidden states, among `0 … layers`, that the head reads."""
    if settings.generation == 2:
        return (layers,)
    reads = settings.target_layer_ids or (2, layers // 2, layers - 3)
    if min(reads) < 0 or max(reads) > layers:
        raise UnsupportedError(
            f"the head reads the hidden states {reads}, and the target has those from 0 to {layers}. "
            "Use the target that the head was made for."
        )
    return reads


def _choose_head(
    own: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    shared: DynamicLMHead,
    dtype: torch.dtype,
    only_own_tokens: bool,
) -> DynamicLMHead:
    """The output projection: the target's, or the head's own, `[draft_vocab_size, H]`, for these tokens.

    speculators copies the verifier's rows into `lm_head`. Unless it is to draft `only_own_tokens`, a head with such
    rows drafts every token through the target's projection.
    """
    if own is None:
        return shared
    if not only_own_tokens and own.shape[1] == shared.weight.shape[1] and shared.bias is None:
        if are_copies(own, token_ids, shared.weight):
            return shared
    weight = own.to(device=shared.weight.device, dtype=dtype)
    return DynamicLMHead(weight, token_ids=None if token_ids is None else token_ids.to(shared.weight.device))
