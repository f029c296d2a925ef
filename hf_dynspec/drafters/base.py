"""The contract of drafters: tokens in, hidden states out, and never a projection to the vocabulary."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..modeling.head import DynamicLMHead
from .weights_watch import stamp

# Takes in what a draft step starts from: the embeddings of the tokens whose successors are wanted, [m, d], and what
# was known before each of them, [m, d]: an EAGLE head's feature, or an independent model's hidden state before it.
ObserveDraftInputs = Callable[[torch.Tensor, torch.Tensor], None]


class UnrolledStep(NamedTuple):
    """One draft step after every prefix of a text: row `i` of step `depth` is the one that reads token
    `i + 1 + depth`, after a prefix whose last token is `i + 1`. Rows before `first` are left out (`Drafter.unroll`).

    Args:
        embeddings: `[n − 1 − first − depth, d]`: the draft inputs, as `ObserveDraftInputs` takes them in.
        features: `[n − 1 − first − depth, d]`, likewise.
        hidden: `[n − 1 − first − depth, d]`: what `DrafterState.draft` returns, or `advance` for depth 0.

    All of them carry gradients where gradients are enabled.
    """

    embeddings: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor


class DrafterState(ABC):
    """What a drafter remembers during one session: its cache over the verified prefix and the current draft.

    A round calls `advance` once, `draft` any number of times, and `truncate` when the verdict is known.
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """How many leading tokens of the text the cache covers; those of the current draft count if they may stay."""

    @abstractmethod
    def advance(
        self,
        prefix: torch.Tensor,
        features: torch.Tensor | None = None,
        observe_draft_inputs: ObserveDraftInputs | None = None,
    ) -> torch.Tensor:
        """Bring the cache to the verified prefix.

        Args:
            prefix: int64 `[n]` on the drafter's device: all verified tokens. The cache covers fewer of them, and the
                tokens that it covers have not changed.
            features: `[m, d_target · layers]`: for drafters that read the target's hidden states (`Drafter.reads`),
                those at the tokens before the last one, `prefix[n - 1 - m : n - 1]`; the last one has none yet.
            observe_draft_inputs: called once, with what the last token is read with, as soon as that is known.

        Returns:
            `[r, d]`: the hidden states at the last tokens read, as the output projection expects them; the last one
            predicts the token after the prefix. An independent model returns those at all tokens that it read.
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
            parents: int64 `[w]`: for each token the row of its parent in the level before; in the first level all are
                children of the prefix and its values do not matter. None for a chain, which is one token a level.
            observe_draft_inputs: called once, with what these tokens are read with.

        Returns:
            `[w, d]`: the hidden state that predicts the successors of each of them.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Shorten the cache to the first `length` tokens of the text, or fewer, `length <= self.length`.

        The drafted tokens among them have been accepted; a drafter may keep what it computed for them, or forget it.
        """


class Drafter(ABC):
    """A model that proposes tokens. Shareable between sessions.

    Attributes:
        module: what can be trained: its parameters are the drafter's own weights, and whatever is done to it, by an
            optimizer or by adapters, drafting follows at the start of the next round (`weights_version`).
        head: the output projection that turns the hidden states into logits over a shortlist.
        reads: which hidden states of the target it reads, side by side in this order: 0 is the target's embedding, its
            number of layers the output of the final norm. Empty for an independent model.
        most_positions: how many tokens of a text it can read (None: any number).
    """

    module: nn.Module
    head: DynamicLMHead
    reads: tuple[int, ...] = ()
    most_positions: int | None = None

    @property
    def weights_version(self) -> int:
        """A number that changes when the drafter's weights do. Looked at at the start of a round, and nowhere else:
        then whatever copies there are of weights, the head's among them, are made anew from what is there, and states
        that remember what old weights said are started anew, except where it could not be had again."""
        return 0

    @property
    def keeps_states(self) -> bool:
        """Whether states go on when weights change, as what they were computed from is not at hand any more."""
        return bool(self.reads)

    def require_target(self, target: Any) -> None:  # noqa: B027
        """Make sure that the hidden states of a target, a model of transformers, are those that this reads.

        Raises:
            ArtifactError: they have another size.
            UnsupportedError: the target has too few layers.
        """

    def require_trees(self) -> None:  # noqa: B027
        """Make sure that trees can be drafted.

        Raises:
            UnsupportedError: they cannot.
        """

    @property
    @abstractmethod
    def num_embeddings(self) -> int:
        """How many ids it reads: `0` to one less."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[m, d]`: the embeddings that the drafter reads for tokens, int64 `[m]` on its device."""

    @abstractmethod
    def unroll(
        self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int, first: int = 0
    ) -> Iterator[UnrolledStep]:
        """Compute the draft steps of chains after all prefixes of a text at once, as if the text's own tokens had been
        drafted: a head reads its own outputs as it does when it drafts. For training and for study.

        Where gradients are enabled they run through all steps, into every weight of the `module` that takes part, and
        the steps are computed in its dtype and where it lies. `torch.no_grad()` saves the memory.

        Args:
            token_ids: int64 `[n]`, `n > depth`, on the drafter's device: a text from its beginning.
            features: `[n, d_target · layers]`: the target's hidden states at these tokens, for drafters that read
                them.
            depth: how many steps, at most `n − 1 − first`.
            first: the rows before it are read, and no drafts begin there: a prompt costs little then.

        Yields:
            The steps, from depth 0 on.
        """

    def token_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """What the drafter says of some tokens, with gradients: for training.

        Args:
            hidden: `[m, d]`: of `unroll`.
            token_ids: int64 `[k]`, the same for all rows, or `[m, k]`.

        Returns:
            `[m, k]`, fp32, or fp64 where the hidden states are: the logits, −inf for tokens that the drafter cannot
            propose. Their gradients reach `hidden`, and the output projection where that is part of the `module`.
        """
        return self.head.token_logits(hidden, token_ids)

    def copy(self) -> "Drafter":
        """A drafter whose `module` is a copy, so that it can be trained while this one drafts. What a target lends is
        shared.

        Raises:
            NotImplementedError: it cannot be copied.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be copied")

    def weights_stamp(self) -> dict[str, tuple[nn.Parameter, list[Any]]]:
        """The parameters of the `module` by name, and of each what tells it from a changed one (`stamp`)."""
        return {name: (one, stamp([one], samples=True)) for name, one in self.module.named_parameters()}

    def prepare_weights(self, weights: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Make ready to draft with other numbers in parameters of the `module`.

        Args:
            weights: by the parameters' names, each of its parameter's shape, dtype and device. They are not copied.

        Returns:
            What puts them in the place of those that are there, at once and without copying any. `weights_version`
            then is another one. Nothing may be drafting meanwhile.
        """
        parameters = dict(self.module.named_parameters())
        places = [(parameters[name], tensor.detach()) for name, tensor in weights.items()]

        def replace() -> None:
            for parameter, tensor in places:
                parameter.data = tensor

        return replace

    @abstractmethod
    def start(self) -> DrafterState:
        """Begin a session with an empty cache."""
