"""What a round of drafting proposes."""

from dataclasses import dataclass

import torch

from .shortlists import Shortlist


@dataclass(frozen=True, eq=False)
class Draws:
    """What the nodes of a tree were drawn from, without replacement: the first child of a node from these
    probabilities, the second from what they are without the first one's token, scaled back to 1, and so on.

    Args:
        token_ids: for each depth int64 `[w, n]`: the tokens that the children of each of the `w` expanded nodes could
            become. Those that can be drawn occur once in a row.
        probabilities: for each depth fp32 `[w, n]`: of these tokens, 0 for those that cannot be drawn.
        rows: int64 `[k]`: for each candidate the row of its depth's probabilities that it was drawn by.
        columns: int64 `[k]`: for each candidate its column in that row. Where a row has fewer tokens that can be drawn
            than children, the last children are others, of probability 0, and do not count.
        most_siblings: no node has more children.
    """

    token_ids: tuple[torch.Tensor, ...]
    probabilities: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    columns: torch.Tensor
    most_siblings: int


@dataclass(frozen=True)
class SparseDistribution:
    """What a token is drawn from where little of a vocabulary is left, as numbers of the host.

    Args:
        token_ids: distinct ids.
        weights: one for each; all others have none. Probabilities are in proportion to them.
    """

    token_ids: list[int]
    weights: list[float]


@dataclass(frozen=True, eq=False)
class Candidates:
    """What one round of drafting proposes: a tree of tokens, of which a chain is the special case.

    Args:
        token_ids: int64 `[k]` on the drafter's device. Parents come before their children, and siblings lie side by
            side, in the order in which they were drawn if they were.
        shortlists: one shortlist for each depth, which is what that depth's tokens were chosen from.
        logits: for a chain, the processed fp32 logits `[width]` that each token was chosen by, over the slots of its
            depth's shortlist. When sampling, their softmax is the distribution that it was drawn from. Empty for a
            tree.
        parents: int64 `[k]`: for each token the index of its parent among the candidates, −1 for a child of the
            verified prefix. None for a chain, where each token is the parent of the next.
        depths: int64 `[k]`: for each token the number of its ancestors among the candidates. None for a chain.
        scores: fp32 `[k]`: for each token of a tree what it was kept for. Of a tree of the likeliest tokens the
            log-probability of its path in the drafter's view, which is over the shortlists; of a drawn one the
            logarithm of a bound on the estimated probability that it is accepted, −inf for nodes that do not count.
            None for a chain.
        draws: what the tokens of a tree were drawn from. None for a chain, and for a tree of the likeliest tokens.
        drawn_from: for a chain, what each token was drawn from, where that is little and nothing was waited for. None
            where `logits` alone tell. Empty for a tree.
    """

    token_ids: torch.Tensor
    shortlists: tuple[Shortlist, ...]
    logits: tuple[torch.Tensor, ...] = ()
    parents: torch.Tensor | None = None
    depths: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    draws: Draws | None = None
    drawn_from: tuple[SparseDistribution | None, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each token is the only child of the one before it."""
        return self.parents is None

    def has_missed(self, verified: torch.Tensor) -> torch.Tensor | None:
        """bool `[]`: whether the last of the verified tokens, int64 `[a + 1]`, was outside the shortlist of its depth;
        None where it had no shortlist, as after a fully accepted draft. Those before it came out of theirs."""
        depth = verified.shape[0] - 1
        return ~self.shortlists[depth].contains(verified[depth]) if depth < len(self.shortlists) else None
