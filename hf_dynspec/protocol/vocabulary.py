"""What policies select from: the vocabulary, and the rows of the output projections."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class OwnClusters:
    """The clusters that a drafter was trained to choose its tokens from.

    Args:
        of_tokens: int64 `[V]` on the CPU: the cluster of each token id. Every cluster has a token.
        centroids: `[M, d]`: a cluster's score is the product of its centroid with the hidden state.
        chosen: the best clusters that the drafter scores tokens of at each draft step, at most `M`.
    """

    of_tokens: torch.Tensor
    centroids: torch.Tensor
    chosen: int


@dataclass(frozen=True, eq=False)
class HeadRows:
    """The rows of an output projection, as they lie in the model: to be read, and never written to or copied whole.

    Args:
        weight: `[V, d]`, of the model's dtype and on the device of the projection.
        bias: `[V]`, or None.
        token_ids: int64 `[V]`: the token id that each row scores, without repeats; None where row `i` scores id `i`.
            Rows past the vocabulary's size are padding.
        clusters: the drafter's own clusters of tokens; None where it has none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    clusters: OwnClusters | None = None


@dataclass(frozen=True)
class VocabularyInfo:
    """What a policy may know of the vocabulary it selects from.

    Args:
        size: ids `0 … size-1` are real tokens of the tokenizer that both models can score. Rows past it are padding.
        eos_token_ids: the end-of-sequence ids, each below `size`, without repeats; every shortlist contains them.
        device: where shortlists live, which is where the drafter's head lives.
        draftable: int64 `[n]` on that device: the only ids that the head can score, each below `size`, row by row of
            the head (None: all of them, row `i` being id `i`). Shortlists hold no others.
        placeholder_ids: ids that stand in a prompt for parts of images and other media. Policies are not shown them.
        width: numbers of the hidden states and embeddings that a policy is shown (None: not known).
        drafter_rows: the rows of the drafter's output projection. None where the policy did not ask for them.
        target_rows: those of the target's, likewise.
    """

    size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    draftable: torch.Tensor | None = None
    width: int | None = None
    placeholder_ids: tuple[int, ...] = ()
    drafter_rows: HeadRows | None = None
    target_rows: HeadRows | None = None

    @functools.cached_property
    def _placeholders(self) -> torch.Tensor:
        return torch.tensor(self.placeholder_ids, dtype=torch.int64, device=self.device)

    def is_text(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool, of the shape of `token_ids` (on the device): which of these ids are no placeholders."""
        return ~torch.isin(token_ids, self._placeholders)

    @functools.cached_property
    def _is_draftable(self) -> torch.Tensor:
        """bool `[size + 1]`: for each id; the last entry is for ids past the vocabulary."""
        table = torch.zeros(self.size + 1, dtype=torch.bool, device=self.device)
        return table.index_fill(0, self.draftable, True)

    def can_draft(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool, of the shape of `token_ids` (on the device): which of these ids the head can score."""
        if self.draftable is None:
            return token_ids < self.size
        return self._is_draftable.take(token_ids.to(torch.int64).clamp_max(self.size))
