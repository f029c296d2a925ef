"""DFlash: one forward of the drafter denoises a block of tokens.

Source: transformers' `DFlashTokenCandidateGenerator` and `MuseGlimmerAssistantModel`. The drafter caches keys and
values of the target's hidden states, from some of its layers, at the verified tokens but the last. A block is the last
token and mask tokens after it, as the target embeds them, all of which see each other and the cache. The target's
output projection predicts each token from the hidden state at its mask. The block leaves nothing in the cache.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache_names import cache_inputs
from ..errors import ArtifactError, UnsupportedError
from ..modeling.head import DynamicLMHead
from ..modeling.parts import projection_of
from .base import DrafterState, ObserveDraftInputs
from .beside_target import BesideTarget

_FIX = "Load the drafter that was made for this target."


class DFlashDrafter(BesideTarget):
    """A model of transformers whose configuration has `block_size`, `mask_token_id` and `target_layer_ids`, and whose
    `forward` takes `noise_embeds` and `context_hidden_states`. Arguments and errors are those of `BesideTarget`. As in
    transformers, the target's scale and cap of logits are left out."""

    why_no_trees = "drafts a block of tokens at once, in which a token has no children of its own"

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel | None = None):
        # The first place of a block is the last verified token's.
        self.block_size = model.config.block_size - 1
        if self.block_size < 1:
            problem = f"is {model.config.block_size}, and a block is the last verified token and at least one more"
            raise ArtifactError("config.json: block_size", problem, "Load a drafter of blocks.")
        super().__init__(model, target)

    @classmethod
    def is_kind_of(cls, config: PreTrainedConfig) -> bool:
        return all(hasattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids"))

    def require_target(self, target: PreTrainedModel) -> None:
        own, config = self.model.config, target.config.get_text_config()
        embedding = target.get_input_embeddings().weight
        wrong = {
            "hidden_size": (own.hidden_size != config.hidden_size, f"the target's is {config.hidden_size}"),
            "mask_token_id": (
                not 0 <= own.mask_token_id < embedding.shape[0],
                f"the target embeds the ids from 0 to {embedding.shape[0] - 1:,}",
            ),
        }
        for name, (is_wrong, problem) in wrong.items():
            if is_wrong:
                raise ArtifactError(f"config.json: {name}", f"is {getattr(own, name)}, and {problem}", _FIX)
        layers = own.target_layer_ids
        if not layers or min(layers) < 0 or max(layers) >= config.num_hidden_layers:
            raise UnsupportedError(
                f"the drafter reads the target's layers {layers}, and there are those from 0 to "
                f"{config.num_hidden_layers - 1}. {_FIX}"
            )
        if not embedding.is_floating_point():
            raise UnsupportedError(
                f"{type(target).__name__} keeps its embedding packed ({str(embedding.dtype).removeprefix('torch.')}), "
                "and the drafter reads rows of it. Load the target with its embedding unpacked."
            )

    def _reads_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        # 0 is the embedding.
        return tuple(layer + 1 for layer in self.model.config.target_layer_ids)

    def _head_parts(self) -> Sequence[nn.Module]:
        return (self.target.get_output_embeddings(),)

    def _make_head(self) -> DynamicLMHead:
        return DynamicLMHead(*projection_of(self.target))

    @property
    def num_embeddings(self) -> int:
        return self.target.get_input_embeddings().weight.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[m, d]`: the target's embeddings of tokens, int64 `[m]`, in the drafter's dtype and on its device; without
        a norm that the target applies to them (Muse Glimmer)."""
        lent = self.target.get_input_embeddings()
        token_ids = token_ids.to(lent.weight.device)
        has_norm = hasattr(lent, "embed_norm")
        rows = nn.functional.embedding(token_ids, lent.weight) if has_norm else lent(token_ids)
        return rows.to(device=self.model.device, dtype=self.model.dtype)

    def start(self) -> "DFlashState":
        return DFlashState(self)


class DFlashState(DrafterState):
    """The drafter's cache of a text's features. `length` counts their tokens, and the last one, which has none yet."""

    def __init__(self, drafter: DFlashDrafter):
        self._drafter = drafter
        self._begin_at(0)

    def _begin_at(self, start: int) -> None:
        """Forget the text. The next feature is that of token `start`: not 0 if the first ones are not available."""
        from transformers.cache_utils import DFlashCache

        self._start = self._end = start
        self._cache = DFlashCache(config=self._drafter.model.config)
        self._cache.activate_past_recording()

    @property
    def length(self) -> int:
        return self._end + 1 if self._end > self._start else 0

    @torch.no_grad()
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Cache new features, and draft a block. If they begin after the last cached one, as when the target had the
        beginning of a text in its cache, the cache starts afresh there.

        The arguments are those of `DrafterState`, with features of `m >= 1` tokens, which may overlap cached ones.
        `observe_draft_inputs` gets the last token's embedding and the last feature as it is cached.

        Returns:
            `[block_size, d]`, in the output projection's dtype.

        Raises:
            ValueError: there are no features, or more than tokens before the last one.
        """
        end = prefix.shape[0] - 1
        first = end if features is None else end - features.shape[0]
        if not 0 <= first < end:
            raise ValueError(
                f"a block after {end + 1} tokens is drafted from features of 1 to {end}, got {end - first}"
            )
        if first > self._end or self._end > end or self._end == self._start:
            self._begin_at(first)
        model, device = self._drafter.model, self._drafter.model.device
        features = features.to(device=device, dtype=model.dtype)
        fresh, block = features[self._end - first :], model.config.block_size
        masks = prefix.new_full((block - 1,), model.config.mask_token_id)
        embedded = self._drafter.embed(torch.cat([prefix[-1:], masks]))
        if observe_draft_inputs is not None:
            observe_draft_inputs(embedded[:1], model.encoder(features[-1:]))
        self._cache.set_previous_accepted_tokens(fresh.shape[0])
        hidden = model(
            noise_embeds=embedded.unsqueeze(0),
            context_hidden_states=fresh.unsqueeze(0),
            position_ids=torch.arange(self._end, end + block, device=device).unsqueeze(0),
            **cache_inputs(self._cache),
        ).last_hidden_state[0, 1:]
        self._cache.crop(-block)
        self._end = end
        return hidden.to(self._drafter.head.weight)

    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        raise ValueError("advance() drafts a whole block")

    def truncate(self, length: int) -> None:
        """Forget the text if fewer tokens stay than are cached, as layers with a window cannot go back."""
        if length < self.length:
            self._begin_at(0)
