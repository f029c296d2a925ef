"""Gemma 4's assistants: a few layers that read the target's own keys and values.

Source: transformers' `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator`. A draft step reads
the target's embedding of the newest token beside a hidden state: at first the target's last one, then the assistant's
own, projected back to the target's size. Its layers have queries alone, which read the keys and values of the target's
last layer of each kind, so the assistant has no cache, and all steps of a draft have the position of the last verified
token. transformers' generator also lets the assistant read keys of rejected tokens, and of two tokens past the window;
here it reads verified tokens within the window, as the target does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ArtifactError, UnsupportedError
from ..modeling.head import DynamicLMHead
from ..modeling.parts import projection_of
from ..protocol import OwnClusters
from .base import DrafterState, ObserveDraftInputs, TargetCache
from .beside_target import BesideTarget

_KINDS = "full_attention", "sliding_attention"
_FIX = "Load the assistant that was made for this target."


class Gemma4AssistantDrafter(BesideTarget):
    """A `Gemma4AssistantForCausalLM` (or `Gemma4UnifiedAssistantForCausalLM`) beside a Gemma-4 target. Arguments and
    errors are those of `BesideTarget`. The policy `native` selects from its own clusters of tokens, if it has some."""

    reads_cache = True
    why_no_trees = "was trained to draft one chain: all drafted tokens have one position, and cannot see each other"

    @classmethod
    def is_kind_of(cls, config: PreTrainedConfig) -> bool:
        return config.model_type in ("gemma4_assistant", "gemma4_unified_assistant")

    def require_target(self, target: PreTrainedModel) -> None:
        name, config, own = type(target).__name__, target.config.get_text_config(), self.model.config
        if not config.model_type.startswith("gemma4"):
            raise UnsupportedError(
                f"{name} shares no keys and values with a {type(self.model).__name__}, which drafts for models of "
                "Gemma 4 alone. Use a drafter of the target's family."
            )
        if own.backbone_hidden_size != config.hidden_size:
            problem = f"is {own.backbone_hidden_size}, and the target's hidden states have {config.hidden_size}"
            raise ArtifactError("config.json: backbone_hidden_size", problem, _FIX)
        layers, text = _shared_layers(target), own.get_text_config()
        for index, kind in enumerate(text.layer_types):
            wanted, there = _heads(text, index), _heads(config, layers[kind])
            if wanted != there:
                problem = f"reads {kind} of {wanted} (heads, numbers), and the target's has {there}"
                raise ArtifactError("config.json: text_config", problem, _FIX)

    def _reads_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        self._layers = _shared_layers(target)
        return (target.config.get_text_config().num_hidden_layers,)

    def _head_parts(self) -> Sequence[nn.Module]:
        parts = self.model.get_output_embeddings(), self.model.masked_embedding
        return [one for one in parts if one is not None]

    def _make_head(self) -> DynamicLMHead:
        return DynamicLMHead(*projection_of(self.model), clusters=self._clusters())

    def _clusters(self) -> OwnClusters | None:
        embedder = self.model.masked_embedding
        if embedder is None:
            return None
        order = embedder.token_ordering.to(device="cpu", dtype=torch.int64)
        tokens, count = order.shape[0], embedder.num_centroids
        if not embedder.centroids.weight.is_floating_point():
            raise UnsupportedError(
                f"the {type(self.model).__name__}'s masked_embedding.centroids are packed. Load it with them unpacked."
            )
        if tokens % count or not torch.equal(order.sort().values, torch.arange(tokens)):
            raise UnsupportedError(
                f"the {type(self.model).__name__}'s masked_embedding.token_ordering does not put each of {tokens:,} "
                f"tokens into one of {count:,} clusters of equal size. {_FIX}"
            )
        of_tokens = torch.empty_like(order).scatter_(0, order, torch.arange(tokens) // (tokens // count))
        return OwnClusters(of_tokens, embedder.centroids.weight.detach(), embedder.centroid_intermediate_top_k)

    @property
    def num_embeddings(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[m, d]`: the assistant's own embeddings of tokens, int64 `[m]`, for policies. Its layers read the target's,
        which have another size than its hidden states."""
        return nn.functional.embedding(token_ids, self.model.get_input_embeddings().weight)

    def start(self) -> "Gemma4AssistantState":
        return Gemma4AssistantState(self)

    def context(self, read: TargetCache) -> dict[str, Any]:
        """What all draft steps of a round have in common, as the model's `forward` takes it."""
        place = {"device": self.model.device, "dtype": self.model.dtype}
        layers = {kind: read.cache.layers[index] for kind, index in self._layers.items()}
        shared = {kind: (layer.keys.to(**place), layer.values.to(**place)) for kind, layer in layers.items()}
        mask = None if read.is_visible is None else read.is_visible.to(self.model.device).long().unsqueeze(0)
        token = torch.empty(1, 1, self.model.config.get_text_config().hidden_size, **place)
        return {
            "attention_mask": self.model.create_attention_masks(token, mask, shared),
            "position_ids": torch.full((1, 1), read.position, dtype=torch.int64, device=self.model.device),
            "shared_kv_states": shared,
        }

    def step(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        context: dict[str, Any],
        observe_draft_inputs: ObserveDraftInputs | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step.

        Args:
            token_ids: int64 `[1]`: the newest token.
            hidden: `[1, d_target]`: the target's last hidden state before it, or that of the step before.
            context: as `context` returns it.
            observe_draft_inputs: called with `embed`'s `[1, d]` and the projection of `hidden` to `[1, d]`.

        Returns:
            `[1, d]`: the hidden state for the output projection; and `[1, d_target]`: the next step's `hidden`.
        """
        model, lent = self.model, self.target.get_input_embeddings()
        place = {"device": model.device, "dtype": model.dtype}
        embedded, hidden = lent(token_ids.to(lent.weight.device)).to(**place), hidden.to(**place)
        if observe_draft_inputs is not None:
            projected = model.pre_projection(torch.cat([torch.zeros_like(hidden), hidden], dim=-1))
            observe_draft_inputs(self.embed(token_ids), projected)
        inputs = model.pre_projection(torch.cat([embedded, hidden], dim=-1)).unsqueeze(0)
        output = model.model(inputs_embeds=inputs, use_cache=False, **context).last_hidden_state[0]
        return output.to(self.head.weight), model.post_projection(output)


class Gemma4AssistantState(DrafterState):
    """The hidden state of a draft, and what the target has read. Nothing is kept of a text between rounds."""

    length = 0

    def __init__(self, drafter: Gemma4AssistantDrafter):
        self._drafter = drafter
        self.truncate(0)

    def see_target(self, read: TargetCache) -> None:
        self._context = self._drafter.context(read)

    @torch.no_grad()
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """The arguments are those of `DrafterState`, with features of `m >= 1` tokens; the last one's is read.

        Returns:
            `[1, d]`, in the output projection's dtype.

        Raises:
            ValueError: there are no features, or `see_target` was not called in this round.
        """
        if features is None or not features.shape[0]:
            raise ValueError("an assistant drafts from the target's hidden states, and none were given")
        self._hidden = features[-1:]
        return self.draft(prefix[-1:], observe_draft_inputs=observe_draft_inputs)

    @torch.no_grad()
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        if parents is not None:
            self._drafter.require_trees()
        if self._hidden is None or self._context is None:
            raise ValueError("draft() follows advance(), and advance() follows see_target()")
        output, self._hidden = self._drafter.step(token_ids, self._hidden, self._context, observe_draft_inputs)
        return output

    def truncate(self, length: int) -> None:
        """Forget the draft."""
        self._context: dict[str, Any] | None = None
        self._hidden: torch.Tensor | None = None


def _shared_layers(target: PreTrainedModel) -> dict[str, int]:
    """By kind of attention, the target's last layer that has keys and values of its own.

    Raises:
        UnsupportedError: there is none of a kind.
    """
    config = target.config.get_text_config()
    kinds = list(config.layer_types)[: config.num_hidden_layers - config.num_kv_shared_layers]
    missing = [kind for kind in _KINDS if kind not in kinds]
    if missing:
        raise UnsupportedError(
            f"{type(target).__name__} has no layer of {' and '.join(missing)} with keys and values of its own, which "
            f"an assistant reads. {_FIX}"
        )
    return {kind: max(index for index, one in enumerate(kinds) if one == kind) for kind in _KINDS}


def _heads(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """The heads of a layer's keys, and the numbers of each."""
    one = config.per_layer_config[layer]
    return one.num_key_value_heads, one.head_dim
