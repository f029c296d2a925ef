"""The contract of drafters: tokens in, hidden states out, and never a projection to the vocabulary."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache

from ..devices import has_graphs
from ..errors import UnsupportedError
from ..modeling.head import DynamicLMHead
from .fixed import FixedDrafter, ObserveDraftInputs
from .weights_watch import stamp


class UnrolledStep(NamedTuple):
    """One draft step after every prefix of a text: row `i` of step `depth` reads token `i + 1 + depth`, after a prefix
    whose last token is `i + 1`. Rows before `first` are left out (`Drafter.unroll`).

    Args:
        embeddings: `[n − 1 − first − depth, d]`: the draft inputs, as for `ObserveDraftInputs`.
        features: `[n − 1 − first − depth, d]`, likewise.
        hidden: `[n − 1 − first − depth, d]`: the result of `DrafterState.draft`, or of `advance` for depth 0.

    All of them carry gradients if gradients are enabled.
    """

    embeddings: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor


class TargetCache(NamedTuple):
    """What the target has read of a text, for drafters that read its keys and values (`Drafter.reads_cache`).

    Args:
        cache: a dynamic cache with all tokens of the text but the last, whose layers with a window may hold the last
            tokens alone. To be read, and not kept.
        is_visible: bool `[n]` on the target's device: the cached tokens that no mask hides (None: all).
        position: the position of the last token.
    """

    cache: Cache
    is_visible: torch.Tensor | None
    position: int


class DrafterState(ABC):
    """A drafter's cache during one session, over the verified prefix and the current draft.

    A round calls `advance` once, `draft` any number of times, and `truncate` after the verdict. A drafter of blocks
    (`Drafter.block_size`) drafts in `advance`, and its `draft` is never called.
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of leading tokens that the cache covers, with drafted tokens that may stay."""

    def see_target(self, read: TargetCache) -> None:
        """Take what the target has read. Called before `advance`, for drafters with `reads_cache` alone."""
        raise NotImplementedError(f"{type(self).__name__} reads nothing of the target's cache")

    @abstractmethod
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Bring the cache to the verified prefix.

        Args:
            prefix: int64 `[n]` on the drafter's device: all verified tokens. The cache covers fewer of them, and these
                have not changed.
            features: `[m, d_target · layers]`: for drafters that read the target's hidden states (`Drafter.reads`),
                those at the tokens before the last one, `prefix[n - 1 - m : n - 1]`; the last one has none yet.
            observe_draft_inputs: called once with the draft inputs of the last token, as early as possible.

        Returns:
            `[r, d]`: the hidden states at the last tokens read, as the output projection expects them; the last one
            predicts the token after the prefix. An independent model returns those at all tokens that it read. A
            drafter of blocks returns `[block_size, d]`: row `i` predicts the token `i + 1` places after the prefix.
        """

    @abstractmethod
    def draft(
        self,
        token_ids: torch.Tensor,
        parents: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Append one level of drafted tokens.

        Args:
            token_ids: int64 `[w]`, `w >= 1`, on the drafter's device.
            parents: int64 `[w]`: for each token its parent's row in the level before; ignored in the first level,
                whose parent is the prefix. None for a chain, which has one token a level.
            observe_draft_inputs: called once with the draft inputs of these tokens.

        Returns:
            `[w, d]`: the hidden states that predict their successors.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Shorten the cache to the first `length <= self.length` tokens of the text, or fewer.

        The drafted tokens among them were accepted; a drafter may keep its results for them or not.
        """

    def read(self) -> Cache:
        """The keys and values of the text, without a draft, for drafters that work over fixed memory."""
        raise NotImplementedError(f"{type(self).__name__} does not show its keys and values")


class Drafter(ABC):
    """A model that proposes tokens. Shareable between sessions.

    Attributes:
        module: the trainable part, with the drafter's own weights. Drafting follows every change of it, by optimizers
            or adapters, from the next round on (`weights_version`).
        head: the output projection, from hidden states to logits over a shortlist.
        reads: the target's hidden states that it reads, side by side in this order: 0 is the target's embedding, the
            number of layers the output of its final norm. Empty for an independent model.
        reads_cache: it reads the target's keys and values too (`DrafterState.see_target`).
        most_positions: the most tokens of a text that it can read (None: any number).
        replacements: how many changes of `weights_version` replaced numbers alone (`replaces_numbers`).
        block_size: the most tokens of a chain, all of which it drafts in one forward, in which none of them sees the
            choice of another (None: a forward drafts one token). A block has one shortlist.
    """

    module: nn.Module
    head: DynamicLMHead
    reads: tuple[int, ...] = ()
    reads_cache: bool = False
    most_positions: int | None = None
    replacements: int = 0
    block_size: int | None = None

    @property
    def weights_version(self) -> int:
        """A number that changes when the drafter's weights do. It is read at the start of a round only. All copies of
        weights, the head included, are then renewed, and states are started anew unless `keeps_states`."""
        return 0

    @property
    def keeps_states(self) -> bool:
        """Whether states outlive a change of weights, since their inputs are no longer at hand."""
        return bool(self.reads)

    def require_target(self, target: Any) -> None:  # noqa: B027
        """Make sure that the drafter can read the hidden states of a target, a transformers model.

        Raises:
            ArtifactError: they have another size.
            UnsupportedError: the target has too few layers.
        """

    def for_target(self, target: Any) -> "Drafter":
        """This drafter beside a target, a transformers model: a twin with the same `module` for those that use the
        target's own weights, and otherwise itself.

        Raises:
            ArtifactError, UnsupportedError: as `require_target`.
        """
        self.require_target(target)
        return self

    def require_trees(self) -> None:  # noqa: B027
        """Make sure that trees can be drafted.

        Raises:
            UnsupportedError: they cannot.
        """

    def require_fixed_memory(self) -> None:
        """Make sure that it can draft over fixed memory (`fixed`).

        Raises:
            UnsupportedError: it cannot.
        """
        raise UnsupportedError(f"{type(self).__name__} does not draft over fixed memory.")

    def fixed(self, read: Cache, texts: int, capacity: int, nodes: int) -> FixedDrafter:
        """This drafter over fixed memory, with its present weights.

        Args:
            read: the keys and values of some text, as `DrafterState.read` returns them.
            texts: the number of texts.
            capacity: positions for each text, those of drafts included.
            nodes: the most tokens that are read after a text.
        """
        raise NotImplementedError(f"{type(self).__name__} does not draft over fixed memory")

    @property
    @abstractmethod
    def num_embeddings(self) -> int:
        """The number of ids that it can read, from 0 on."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[m, d]`: the embeddings that the drafter reads for tokens, int64 `[m]` on its device."""

    @abstractmethod
    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        """Compute the draft steps of chains after all prefixes of a text at once, as if the text's own tokens had been
        drafted: a head reads its own outputs, as in drafting. For training and for study.

        Gradients, if enabled, run through all steps into every weight of the `module` that takes part, in its dtype
        and on its device. `torch.no_grad()` saves their memory.

        Args:
            token_ids: int64 `[n]`, `n > depth`, on the drafter's device: a text from its beginning.
            features: `[n, d_target · layers]`: the target's hidden states at these tokens, for drafters that read
                them.
            depth: the number of steps, at most `n − 1 − first`.
            first: rows before it are read without drafts, so that a prompt costs little.

        Yields:
            The steps, from depth 0 on.
        """

    def token_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The drafter's logits of some tokens, with gradients, for training.

        Args:
            hidden: `[m, d]`: from `unroll`.
            token_ids: int64 `[k]`, the same for all rows, or `[m, k]`.

        Returns:
            `[m, k]`, fp32, or fp64 for fp64 hidden states; −inf for tokens that the drafter cannot propose. Gradients
            reach `hidden`, and the output projection if it is part of the `module`.
        """
        return self.head.token_logits(hidden, token_ids)

    def copy(self) -> "Drafter":
        """A drafter with a copy of the `module`, for training while this one drafts. It shares the target's weights.

        Raises:
            NotImplementedError: it cannot be copied.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be copied")

    def weights_stamp(self) -> dict[str, tuple[nn.Parameter, list[Any]]]:
        """The parameters of the `module` by name, each with a mark that changes with it (`stamp`)."""
        return {name: (one, stamp([one], samples=True)) for name, one in self.module.named_parameters()}

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Prepare a replacement of the numbers in parameters of the `module`.

        Args:
            weights: by the parameters' names, each of its parameter's shape, dtype and device. They are not copied.

        Returns:
            A function that replaces them at once, and changes `weights_version`. On devices with graphs, which hold
            addresses, it copies them; elsewhere it does not. Nothing may draft meanwhile.
        """
        parameters = dict(self.module.named_parameters())
        places = [(parameters[name], tensor.detach()) for name, tensor in weights.items()]

        def replace() -> None:
            for parameter, tensor in places:
                if has_graphs(parameter.device):
                    parameter.data.copy_(tensor)
                else:
                    parameter.data = tensor

        return replace

    def replaces_numbers(self, names: Collection[str]) -> bool:
        """Whether `prepare_weights` for parameters of these names replaces numbers alone, so that drafts over fixed
        memory find them, and graphs still hold."""
        return False

    @abstractmethod
    def start(self) -> DrafterState:
        """Begin a session with an empty cache."""
