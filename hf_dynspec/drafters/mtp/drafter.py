"""Multi-token-prediction (MTP) layers as drafters.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2: the layers are trained with the target, layer `k` to
predict the token `k + 2` places on from the hidden state of layer `k − 1` and the embeddings of the tokens between.
After the last layer drafting goes on with that layer's own hidden state.
"""

import copy
import os
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import DynamicCache, PreTrainedModel

from ...errors import ArtifactError, UnsupportedError
from ...modeling.head import DynamicLMHead
from ...modeling.masks import attention_mask, require_tree_masks
from ...modeling.parts import LARGEST_PADDING, unwrapped
from ..base import Drafter, UnrolledStep
from ..weights_watch import WeightsWatch
from .checkpoint import read_layers
from .layers import MtpLayers
from .state import MtpState


class MtpDrafter(Drafter):
    """The MTP layers of a target, which `from_pretrained` of transformers leaves in the checkpoint.

    The target is not modified. Its embedding is used without copying, and its output projection too, unless the
    checkpoint has another one for the layers (`shared_head.head`).

    Args:
        target, path_or_repo, options: as `from_pretrained`, which says what is raised.

    Attributes:
        module: the layers. The target's weights are no part of it.
        follows_targets: read the layers of another target anew from its own checkpoint.
    """

    module: MtpLayers
    follows_targets = False

    def __init__(self, target: PreTrainedModel, path_or_repo: str | os.PathLike | None = None, **options: object):
        target = unwrapped(target)
        if target.config.is_encoder_decoder:
            raise UnsupportedError(f"{type(target).__name__} is an encoder-decoder model, which has no MTP layers.")
        embeddings = target.get_input_embeddings()
        is_plain = type(embeddings).forward is nn.Embedding.forward and embeddings.weight.is_floating_point()
        if not is_plain or embeddings.weight.device.type == "meta":
            raise UnsupportedError(
                f"{type(target).__name__} scales, normalises, packs or offloads its embeddings, and MTP layers read "
                "plain rows. Load the target whole and unquantised, or use another drafter."
            )
        config = target.config.get_text_config()
        self.reads = (config.num_hidden_layers,)
        self._sizes = config.hidden_size, config.vocab_size
        self._target = weakref.ref(target)
        self._lock = threading.RLock()
        self._version = 0
        self._settled: tuple[torch.device, torch.dtype] | None = None
        lent = {"head": DynamicLMHead.from_model(target).weight, "embedding": embeddings.weight.detach()}
        self.module, self._own = read_layers(target, lent, path_or_repo, **options)
        self.module.eval()
        self._follow_target(target)

    @classmethod
    def from_pretrained(
        cls,
        target: PreTrainedModel,
        path_or_repo: str | os.PathLike | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
    ) -> "MtpDrafter":
        """Load the MTP layers of DeepSeek-V3, GLM-4-MoE, Qwen3-Next, Qwen3.5, MiMo, and others with their layouts.

        Args:
            target: the model that they were trained with.
            path_or_repo: a folder or a repository on the Hub with the layers (None: where the target was loaded from).
            revision: the branch, tag or commit of a repository, resolved to one commit for all files.
            cache_dir: the folder for downloads (None: the Hub's usual cache).
            token: for a private repository (None: the one that you are logged in with).

        Raises:
            ArtifactError: there is no checkpoint, or none with such layers; or they are damaged, quantised, pickled,
                or of other shapes than the target's configuration says.
            UnsupportedError: this transformers has no MTP layers (5.24 has), or not of this family.
        """
        return cls(target, path_or_repo, revision=revision, cache_dir=cache_dir, token=token)

    def _follow_target(self, target: PreTrainedModel) -> None:
        """Reference the target's weights, and bring the layers to them."""
        self._is_current = False
        shared = DynamicLMHead.from_model(target)
        device, dtype = shared.device, shared.weight.dtype
        # Only after the target was moved or cast: a module cast by its user stays so.
        if self._settled != (device, dtype):
            self.module.settle(device, dtype)
            self._settled = device, dtype
        own = {kind: tensor.to(shared.weight) for kind, tensor in self._own.items()}
        self.head = shared.anew(own["head"], None) if "head" in own else shared
        self._embedding = own.get("embedding", target.get_input_embeddings().weight.detach())
        projection = target.get_output_embeddings()
        self._watches = [WeightsWatch(one, samples=True) for one in (projection, target.get_input_embeddings())]
        self._watches.append(WeightsWatch(self.module))
        self._is_current = True

    @property
    def weights_version(self) -> int:
        with self._lock:
            target = self._target()
            # After the target is gone, its last weights are used.
            if target is not None and self._has_changed(target):
                self._follow_target(target)
                self._version += 1
            return self._version

    def _has_changed(self, target: PreTrainedModel) -> bool:
        parts = target.get_output_embeddings(), target.get_input_embeddings()
        are_others = any(watch.module is not part for watch, part in zip(self._watches[:2], parts, strict=True))
        return not self._is_current or are_others or any(watch.has_changed() for watch in self._watches)

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that the layers were loaded for (None: it is gone)."""
        return self._target()

    def copy(self) -> "MtpDrafter":
        target = self._target()
        if target is None:
            raise ReferenceError("the target of the MTP layers is gone")
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        other._lock = threading.RLock()
        other._follow_target(target)
        return other

    def for_target(self, target: PreTrainedModel) -> "MtpDrafter":
        if self.follows_targets and target is not self.target:
            other = MtpDrafter(target)
            other.follows_targets = True
            return other
        return super().for_target(target)

    def require_target(self, target: PreTrainedModel) -> None:
        config = target.config.get_text_config()
        width, rows = self._sizes
        if config.hidden_size != width or not 0 <= config.vocab_size - rows < LARGEST_PADDING:
            sizes = "hidden states of {} and {} tokens"
            problem = f"are for {sizes.format(*self._sizes)}; it has {config.hidden_size} and {config.vocab_size}"
            raise ArtifactError("MTP layers", problem, "Load the layers of this target.")

    def require_trees(self) -> None:
        require_tree_masks(self.module.layers[0])

    @property
    def num_embeddings(self) -> int:
        return self._embedding.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # A layer's own embedding may have fewer rows than a padded target.
        ids = token_ids.to(self._embedding.device).clamp_max(self._embedding.shape[0] - 1)
        return embedding(ids, self._embedding).to(self.head.weight)

    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        _ = self.weights_version
        layers, rows, last = self.module, token_ids.shape[0] - 1, len(self.module.layers) - 1
        embedded, cache = self.embed(token_ids[1:]), DynamicCache()
        hidden, positions = features[:rows].to(embedded), torch.arange(1, rows + 1, device=embedded.device)
        for step in range(min(depth, last + 1)):
            # The text's own tokens are drafted, so the rows are those of the text.
            hidden = hidden[: rows - step]
            output = layers(step, embedded[step:], hidden, positions[step:], cache)
            yield UnrolledStep(embedded[first + step :], hidden[first:], output[first:].to(self.head.weight))
            hidden = output
        # From here on every draft has rows of its own.
        hidden, seen = hidden[first:], positions[last:]
        visible = torch.ones(hidden.shape[0], seen.shape[0], dtype=torch.bool, device=embedded.device).tril(first)
        for start in range(first + last + 1, first + depth):
            hidden, itself = hidden[: rows - start], torch.eye(rows - start, dtype=torch.bool, device=embedded.device)
            visible, seen = torch.cat([visible[: rows - start], itself], 1), torch.cat([seen, positions[start:]])
            keys = visible, positions[start:], seen, embedded.dtype, layers.windows[last]
            mask = attention_mask(itself.new_ones(0), *keys)
            output = layers(last, embedded[start:], hidden, positions[start:], cache, mask)
            yield UnrolledStep(embedded[start:], hidden, output.to(self.head.weight))
            hidden = output

    def start(self) -> MtpState:
        return MtpState(self.module, self.embed, lambda: self.head.weight)
