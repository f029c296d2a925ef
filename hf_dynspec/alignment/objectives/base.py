"""The base of objectives: drafts unrolled over a request's own tokens, with the target's distributions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch

from ...drafters.base import Drafter
from ..replay import Trajectory

# The temperature for greedy requests: all tokens except the most probable have almost no probability.
_COLDEST = 0.02
# The most ids of a request's shortlist, from its beginning, that a draft is normalised over, besides the target's. A
# step takes longer with more of them, and learns hardly more.
_MOST_SCORED = 2048


class ObjectiveSettings(Protocol):
    """The settings of `OnlineAlignment` that objectives use."""

    objective: str
    support: str
    horizon: int
    decay: float
    temperature: float
    fill: str
    align_threshold: float
    waits_for_full_buffer: bool


@dataclass(frozen=True, eq=False)
class Horizon:
    """Drafts of a request, one from each place where a verified token was chosen, unrolled over its own tokens.

    All `r` predictions lie in one dimension. `steps[j]` are those of step `j`, in the order of the drafts' first
    places. Each step has one prediction less than the step before it, as the request ends.

    Args:
        logits: fp32 `[r, s]`, with gradients: the draft's logits of `s` ids; −inf for ids that it cannot propose.
        kept: int64 `[r, K]`: the columns of the target's most probable ids.
        target_logits: fp32 `[r, K]`: the target's logits of these; −inf for ids that the draft cannot propose.
        target_log_normalisers: fp32 `[r]`: the log of the softmax's denominator over the full vocabulary, at the
            request's temperature.
        verified: int64 `[r]`: the columns of the verified tokens.
        is_wrong: bool `[r]`: the draft was rejected there, or there was none.
        in_shortlist: bool `[r]`: the verified token could have been drafted.
        steps: slices of the `r` predictions.
        temperature: the temperature of the request.
        could_be_drafted: bool `[s]`: the ids of the request's shortlist.
        first_place: the index of the verified token that the first draft predicts first.
        is_chosen: bool `[d]`: the drafts, of `d`, to learn from (None: all).
    """

    logits: torch.Tensor
    kept: torch.Tensor
    target_logits: torch.Tensor
    target_log_normalisers: torch.Tensor
    verified: torch.Tensor
    is_wrong: torch.Tensor
    in_shortlist: torch.Tensor
    steps: tuple[slice, ...]
    temperature: float
    could_be_drafted: torch.Tensor
    first_place: int
    is_chosen: torch.Tensor | None

    def target(self, temperature: float) -> torch.Tensor:
        """`[r, K]`: the target's probabilities, normalised over the kept ids that can be proposed; zeros in rows
        without any."""
        return (self.target_logits / temperature).softmax(-1).masked_fill(self._is_out, 0.0)

    def draft_log_probabilities(self, support: str, temperature: float) -> torch.Tensor:
        """`[r, K]`: the draft's log-probabilities of the kept ids; 0 for ids that it cannot propose."""
        kept = self.logits.gather(1, self.kept) / temperature
        if support == "kept":
            log_normalisers = kept.masked_fill(self._is_out, -torch.inf).logsumexp(-1)
        elif temperature == 1.0:
            log_normalisers = self.log_normalisers
        else:
            log_normalisers = (self.logits / temperature).logsumexp(-1)
        return (kept - log_normalisers[:, None]).masked_fill(self._is_out, 0.0)

    @cached_property
    def _is_out(self) -> torch.Tensor:
        """bool `[r, K]`: the kept ids that are missing, or that the draft cannot propose."""
        return self.target_logits == -torch.inf

    @cached_property
    def log_normalisers(self) -> torch.Tensor:
        """`[r]`: the draft's log-normalisers over all `s` ids."""
        return self.logits.logsumexp(-1)

    def divergence(self, support: str, temperature: float) -> torch.Tensor:
        """`[r]`, in nats: the Kullback-Leibler divergence of the draft from the target."""
        target = self.target(temperature)
        entropy = torch.special.entr(target).sum(-1)
        return -(target * self.draft_log_probabilities(support, temperature)).sum(-1) - entropy

    def acceptance(self) -> float | None:
        """The mean of `Σ min(p, q)` over all steps of all drafts, at the temperature of the request (None: nothing was
        drafted, so the request has no shortlist)."""
        if not bool(self.could_be_drafted.any()):
            return None
        temperature = max(self.temperature, _COLDEST)
        # Normalised over the kept ids alone, the target would favour drafts that are too sharp.
        log_target = self.target_logits / temperature - self.target_log_normalisers[:, None]
        target = log_target.exp() if temperature == self.temperature else self.target(temperature)
        # Ids that the request could not draft do not count.
        logits = self.logits.detach().masked_fill(~self.could_be_drafted, -torch.inf) / temperature
        draft = logits.softmax(-1).gather(1, self.kept)
        # The target is 0 for ids that the draft cannot propose.
        accepted = torch.minimum(target, draft).sum(-1)
        return float(torch.cat([accepted[step] for step in self.steps]).mean())

    def passes_gate(self, settings: ObjectiveSettings) -> torch.Tensor:
        """bool `[d]`: the drafts to learn from, by their first step: algorithm 1, lines 22 to 24."""
        first = self.steps[0]
        diverges = self.divergence(settings.support, settings.temperature)[first].detach() > settings.align_threshold
        return self.in_shortlist[first] & (self.is_wrong[first] | diverges)

    def weigh(self, losses: torch.Tensor, settings: ObjectiveSettings) -> torch.Tensor:
        """Sum losses `[r]` over the steps by the weights of equation 4, `w_j = exp(−β · L_base · (j − 1))`, and take
        the mean over the chosen drafts. L_base is the cross-entropy of a draft's first step against the verified
        token, without gradients."""
        first = self.steps[0]
        verified = self.logits[first].detach().gather(1, self.verified[first, None])[:, 0]
        # The cross-entropy of a token that cannot be proposed is infinite: only the draft's first step counts then.
        base = (self.log_normalisers[first].detach() - verified).clamp(0.0, 1e4)
        of_drafts = torch.zeros_like(base)
        for depth, step in enumerate(self.steps):
            of_step = losses[step]
            length = of_step.shape[0]
            weights = (-settings.decay * depth * base[:length]).exp()
            of_drafts = torch.cat([of_drafts[:length] + weights * of_step, of_drafts[length:]])
        if self.is_chosen is None:
            return of_drafts.mean()
        return of_drafts.where(self.is_chosen, 0.0).sum() / self.is_chosen.sum().clamp_min(1)


class Objective(ABC):
    """A training objective."""

    @abstractmethod
    def loss(self, horizon: Horizon, settings: ObjectiveSettings) -> torch.Tensor:
        """A scalar with gradients."""


def unroll(drafter: Drafter, trajectory: Trajectory, settings: ObjectiveSettings) -> Horizon | None:
    """Draft from every place of a request where a verified token was chosen, as if its own tokens had been drafted.
    The drafts read the same inputs as those of a session (None: no draft could have begun)."""
    n, verified = trajectory.token_ids.shape[0], trajectory.is_wrong.shape[0]
    # Row i of `Drafter.unroll` drafts from token i + 2 on; nothing drafts before the text has two tokens.
    first_row = max(0, trajectory.first - 2)
    drafts = n - 2 - first_row
    if drafts < 1 or verified < 1:
        return None
    depth = min(settings.horizon, drafts)
    # An independent model's outputs do not depend on the step of a draft: one step is enough.
    unrolled = drafter.unroll(trajectory.token_ids, trajectory.features, depth if drafter.reads else 1, first_row)
    hidden = [step.hidden[: drafts - at] for at, step in enumerate(unrolled)]
    places = [torch.arange(at, drafts, device=rows.device) for at, rows in enumerate(hidden)]
    ends = list(accumulate(drafts - at for at in range(depth))) if drafter.reads else [drafts] * depth
    steps = tuple(slice(end - drafts + at, end) for at, end in enumerate(ends))
    begin = first_row + 2 - trajectory.first
    return _beside_the_target(drafter, trajectory, torch.cat(hidden), begin + torch.cat(places), steps, begin)


def _beside_the_target(
    drafter: Drafter,
    trajectory: Trajectory,
    hidden: torch.Tensor,
    places: torch.Tensor,
    steps: tuple[slice, ...],
    first_place: int,
) -> Horizon:
    """The predictions by hidden states, `[r, d]`, of the verified tokens at `places`, int64 `[r]`."""
    top_ids, tokens = trajectory.top_ids, trajectory.token_ids[trajectory.first :]
    scored = torch.cat([top_ids.flatten(), tokens, trajectory.shortlist_ids[:_MOST_SCORED]])
    ids, columns = scored.unique(return_inverse=True)
    logits = drafter.token_logits(hidden, ids)
    kept = columns[: top_ids.numel()].view(top_ids.shape)
    verified = columns[top_ids.numel() :][: tokens.shape[0]]
    can_propose = logits[0].detach() != -torch.inf
    target_logits = trajectory.top_logits.masked_fill(~can_propose[kept], -torch.inf)
    return Horizon(
        logits,
        kept[places],
        target_logits[places],
        trajectory.log_normalisers[places],
        verified[places],
        trajectory.is_wrong[places],
        torch.isin(tokens, trajectory.shortlist_ids)[places],
        steps,
        trajectory.temperature,
        torch.isin(ids, trajectory.shortlist_ids),
        first_place,
        None if trajectory.is_chosen is None else trajectory.is_chosen[first_place:],
    )
