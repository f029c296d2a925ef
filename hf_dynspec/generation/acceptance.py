"""Speculative sampling: draw the target's token at a node so that it equals a candidate as often as possible."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..devices import is_host_memory
from ..drafting.processors import draw, draw_of_rows, draw_place, few_columns
from ..protocol import Candidates, SparseDistribution

# Drawn if weights are NaN or all 0: raising an error here would have to wait for the device.
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class Weights:
    """The distribution of a token at a node, up to a factor: weights need not add up to 1.

    Args:
        weights: fp32 `[n]`.
        token_ids: int64 `[n]`, ascending: the token of each weight. None if token `i` has weight `i`.
    """

    weights: torch.Tensor
    token_ids: torch.Tensor | None

    @functools.cached_property
    def total(self) -> torch.Tensor:
        """fp32 `[1]`: the sum. That of a softmax over a large vocabulary is 1 only to a few digits."""
        return self.weights.sum(0, keepdim=True)

    def at(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of tokens: fp32, of the shape of `token_ids`."""
        if self.token_ids is None:
            return self.weights.index_select(0, token_ids)
        places, has_weight = self._places(token_ids)
        return torch.where(has_weight, self.weights.index_select(0, places), 0.0)

    def minus(self, token_ids: torch.Tensor, amounts: torch.Tensor) -> "Weights":
        """Subtract fp32 `[m]` from the weights of tokens, int64 `[m]`. Weights stay at least 0."""
        if self.token_ids is not None:
            token_ids, has_weight = self._places(token_ids)
            amounts = torch.where(has_weight, amounts, 0.0)
        return Weights(self.weights.scatter_add(0, token_ids, -amounts).clamp_min_(0.0), self.token_ids)

    def _places(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of each token's weight, and whether the token has one."""
        places = torch.searchsorted(self.token_ids, token_ids).clamp_max_(self.token_ids.shape[0] - 1)
        return places, self.token_ids.index_select(0, places) == token_ids

    def draw_what_is_left(self, left: "Weights") -> torch.Tensor:
        """Draw from the rest of these weights. If `p` and `q` are equal up to rounding there is no rest, and the draw
        is from these weights themselves."""
        is_left = left.total > 0
        if is_host_memory(is_left.device):
            return (left if is_left else self).draw()
        return Weights(torch.where(is_left, left.weights, self.weights), self.token_ids).draw()

    def draw(self) -> torch.Tensor:
        """Draw a token, int64 `[1]`, or `NO_TOKEN`."""
        place = draw(self.weights)
        token_id = place if self.token_ids is None else self.token_ids.index_select(0, place)
        # `draw` returns some place even if the weights are NaN.
        return torch.where(self.weights.index_select(0, place) > 0, token_id, NO_TOKEN)


def weights_of(processed: torch.Tensor | SparseDistribution) -> Weights:
    """The weights of processed logits, as `ProcessRow` returns them."""
    if isinstance(processed, SparseDistribution):
        weights = torch.tensor(processed.weights, dtype=torch.float32, device="cpu")
        return Weights(weights, torch.tensor(processed.token_ids, device="cpu"))
    return Weights(processed[0].softmax(-1), None)


def draw_alone(processed: torch.Tensor | SparseDistribution) -> torch.Tensor:
    """Draw a token, int64 `[1]`, or `NO_TOKEN`, at a node without children."""
    if isinstance(processed, SparseDistribution):
        return torch.tensor([_draw_sparse(processed.token_ids, processed.weights)], device="cpu")
    return weights_of(processed).draw()


def draw_at(candidates: Candidates, depth: int, processed: torch.Tensor | SparseDistribution) -> torch.Tensor:
    """Draw a token, int64 `[1]`, from the target's distribution at one depth of a chain, by speculative sampling.

    Args:
        candidates: a drawn chain.
        depth: the depth of the candidate.
        processed: the target's processed logits there, as `ProcessRow` returns them.
    """
    few = candidates.drawn_from[depth] if candidates.drawn_from else None
    if few is not None and isinstance(processed, SparseDistribution):
        return torch.tensor([_draw_at_once(candidates.token_ids[depth].item(), few, processed)], device="cpu")
    p = weights_of(processed)
    shortlist, logits = candidates.shortlists[depth], candidates.logits[depth]
    possible = few_columns(logits > -torch.inf)
    if possible is None:
        token_ids, q = shortlist.scored_slots, logits.softmax(-1)
    else:
        token_ids, q = shortlist.ids_at(possible), logits[possible].softmax(-1)
    device = p.weights.device
    drafted = candidates.token_ids[depth : depth + 1]
    # A token has one occupied slot; other slots have probability 0.
    of_drafter = torch.where(token_ids == drafted, q, 0.0).amax(keepdim=True).to(device)
    drafted = drafted.to(device)
    is_accepted = torch.rand(1, dtype=torch.float32, device=device) * of_drafter * p.total < p.at(drafted)
    if is_host_memory(device) and is_accepted:
        return drafted
    left = p.minus(token_ids.to(device), q.to(device) * p.total)
    return torch.where(is_accepted, drafted, p.draw_what_is_left(left))


def draw_along(candidates: Sequence[Candidates | None], processed: torch.Tensor) -> torch.Tensor:
    """Draw a token, or `NO_TOKEN`, at every node of several texts' chains, int64 `[B, k + 1]`: as `draw_at` at each
    depth and `draw_alone` after the last, in as many operations as one of them. Does not wait for the device.

    Args:
        candidates: for each text a drawn chain of `k` tokens (None: nothing was drafted).
        processed: the target's processed logits, fp32 `[B, k + 1, V]`.
    """
    p, device = processed.softmax(-1), processed.device
    if candidates[0] is None:
        return _draw_of_rows(p)
    drafted = torch.stack([one.token_ids for one in candidates]).to(device)
    token_ids, q = (one.to(device).unflatten(0, drafted.shape) for one in _drawn_from(candidates))
    of_drafter = torch.where(token_ids == drafted.unsqueeze(-1), q, 0.0).amax(-1)
    before = p[:, :-1]
    total = before.sum(-1, keepdim=True)
    uniform = torch.rand(drafted.shape, dtype=torch.float32, device=device)
    is_accepted = uniform * of_drafter * total[..., 0] < before.gather(-1, drafted.unsqueeze(-1))[..., 0]
    left = before.scatter_add(-1, token_ids, -q * total).clamp_min_(0.0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, before)
    drawn = _draw_of_rows(torch.cat([left, p[:, -1:]], dim=1))
    return torch.cat([torch.where(is_accepted, drafted, drawn[:, :-1]), drawn[:, -1:]], dim=1)


def _drawn_from(candidates: Sequence[Candidates]) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots and the probabilities that the tokens of chains were drawn from, int64 and fp32 `[B · k, C]`.
    Shortlists of fewer than `C` slots are filled up with slots of probability 0."""
    logits = [row for one in candidates for row in one.logits]
    slots = [shortlist.scored_slots for one in candidates for shortlist in one.shortlists]
    width = max(map(len, logits))
    for place, row in enumerate(logits):
        missing = width - len(row)
        if missing:
            logits[place], slots[place] = pad(row, (0, missing), value=-torch.inf), pad(slots[place], (0, missing))
    return torch.stack(slots), torch.stack(logits).softmax(-1)


def _draw_of_rows(weights: torch.Tensor) -> torch.Tensor:
    """A token, or `NO_TOKEN`, for each row of weights `[…, V]`: int64 `[…]`."""
    places = draw_of_rows(weights)
    return torch.where(weights.gather(-1, places) > 0, places, NO_TOKEN)[..., 0]


def _draw_at_once(drafted: int, q: SparseDistribution, p: SparseDistribution) -> int:
    """`draw_at` on the host: for few weights this is quicker than twenty small operations."""
    scale = sum(p.weights) / sum(q.weights)
    # A shortlist may repeat a token in an unoccupied slot. NaN weights of a broken drafter are left out: its candidate
    # is then rejected, and all of p remains.
    q_of = {token_id: scale * weight for token_id, weight in zip(q.token_ids, q.weights, strict=True) if weight > 0}
    p_of = dict(zip(p.token_ids, p.weights, strict=True))
    if torch.rand(1, device="cpu").item() * q_of.get(drafted, torch.inf) < p_of.get(drafted, 0.0):
        return drafted
    left = [max(0.0, weight - q_of.get(token_id, 0.0)) for token_id, weight in p_of.items()]
    return _draw_sparse(p.token_ids, left if any(left) else p.weights)


def _draw_sparse(token_ids: list[int], weights: list[float]) -> int:
    """Draw a token, or `NO_TOKEN`."""
    place = draw_place(weights)
    return token_ids[place] if weights[place] > 0 else NO_TOKEN


def draw_among(candidates: Candidates, depth: int, is_child: torch.Tensor, p: Weights) -> torch.Tensor:
    """Draw a token, int64 `[1]`, from `p` at a node with drawn children, by recursive rejection sampling.

    All tokens that the drafter could not have drawn are only ever scaled together: one number stands for them.

    Args:
        candidates: a drawn tree.
        depth: the depth of the children.
        is_child: bool `[k]`: which candidates are children of the node.
        p: the target's distribution.
    """
    draws, device = candidates.draws, p.weights.device
    count = is_child.sum()
    most = int(count) if is_host_memory(device) else draws.most_siblings
    if most == 0:
        return p.draw()
    w, n = draws.probabilities[depth].shape
    order = torch.arange(most, device=device)
    # Siblings lie side by side. Indices past the last sibling are clamped, and their results are masked below.
    children = (is_child.to(torch.int8).argmax() + order).clamp_max(is_child.shape[0] - 1)
    columns = draws.columns.to(device)[children].clamp_max(n - 1)
    row = draws.rows.to(device)[children[:1]].clamp_max(w - 1)
    token_ids = draws.token_ids[depth].to(device).index_select(0, row)[0]
    q = draws.probabilities[depth].to(device).index_select(0, row)[0]
    q_of_each = _without_elders(q, columns, order < count)

    # Tokens with q = 0 belong to the rest.
    p_here = torch.where(q > 0, p.at(token_ids) / p.total, 0.0)
    p_left = torch.cat([p_here, (1.0 - p_here.sum(0, keepdim=True)).clamp_min(0.0)])
    p_of_children, masses = [], []
    for q_of_child, column in zip(q_of_each.unbind(0), columns.split(1), strict=True):
        p_of_children.append(p_left.index_select(0, column))
        masses.append(p_left.sum(0, keepdim=True))
        # The rest after this child is rejected. Instead of scaling p back to 1, q is scaled to the rest.
        p_left = torch.addcmul(p_left, q_of_child, masses[-1], value=-1.0).clamp_min(0.0)
    q_of_children = q_of_each.gather(1, columns.unsqueeze(1))[:, 0] * torch.cat(masses)
    uniform = torch.rand(most, dtype=torch.float32, device=device)
    is_accepted = (uniform * q_of_children < torch.cat(p_of_children)) & (q_of_children > 0)
    accepted = candidates.token_ids.to(device)[children[is_accepted.to(torch.int8).argmax(keepdim=True)]]
    if is_host_memory(device) and is_accepted.any():
        return accepted
    left = p.minus(token_ids, (p_here - p_left[:-1]) * p.total)
    return torch.where(is_accepted.any(), accepted, p.draw_what_is_left(left))


def _without_elders(q: torch.Tensor, columns: torch.Tensor, is_child: torch.Tensor) -> torch.Tensor:
    """The distribution that each child was drawn from, fp32 `[c, n + 1]`: 0 at the children before it and in the last
    column. A row is all 0 if there is no such child, or nothing was left to draw.

    Args:
        q: fp32 `[n]`: the distribution that the first child was drawn from.
        columns: int64 `[c]`: the children, in the order in which they were drawn.
        is_child: bool `[c]`: False past the last child.
    """
    n, c = q.shape[0], columns.shape[0]
    order = torch.arange(c, device=q.device)
    place = order.new_full((n,), c).scatter_reduce(0, columns, torch.where(is_child, order, c), "amin")
    left = torch.where(place >= order.unsqueeze(1), q, 0.0)
    # Sums are used instead of 1 minus the drawn part, where rounding would leave a rest that does not exist.
    left = left / left.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    return pad(left * is_child.unsqueeze(1), (0, 1))
