"""Verification: which candidates the target accepts. This file is what "lossless" means.

Row 0 of the target's logits predicts the token after the last verified one, row `j + 1` the token after candidate `j`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..devices import is_host_memory
from ..drafting.draft_processors import looks_at_set_only
from ..drafting.processors import divide, looks_at_values_only, may_keep_state
from ..errors import TargetError
from ..kernels import argmax_rows, best_ids, top_k_ids
from ..protocol import Candidates, SparseDistribution
from .acceptance import NO_TOKEN, draw_alone, draw_along, draw_among, draw_at, weights_of

# These criteria may be asked about tokens that are not accepted. Exactly these classes: a subclass may do anything.
# Some look at the last token only, some at no token.
_BY_LAST_TOKEN = (EosTokenCriteria,)
_BY_LENGTH_OR_TIME = (MaxLengthCriteria, MaxTimeCriteria)
_PURE_CRITERIA = (*_BY_LAST_TOKEN, *_BY_LENGTH_OR_TIME, StopStringCriteria)
# Rows of logits that are processed at once: some tensors of fp64 have as many rows and the vocabulary's columns.
_MOST_ROWS = 64


def divide_criteria(criteria: StoppingCriteriaList) -> tuple[StoppingCriteriaList, list[StoppingCriteria]]:
    """Divide criteria into those that may be asked about tokens that are not accepted, and those that may do
    anything."""
    pure = StoppingCriteriaList(one for one in criteria if type(one) in _PURE_CRITERIA)
    return pure, [one for one in criteria if type(one) not in _PURE_CRITERIA]


# Processes the row of logits at one node, int64 [1], given the tokens on the path to it, int64 [1, depth]. Returns
# logits, fp32 [1, V]; when sampling, a sparse distribution if only few tokens keep a probability above 0.
ProcessRow = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | SparseDistribution]


class BestTokens:
    """The most probable tokens in every row of one round's logits, found in one pass.

    Args:
        logits: `[k + 1, V]`.
        most: the largest count that will be asked for later; 0 if unknown.
    """

    def __init__(self, logits: torch.Tensor, most: int = 0):
        self._logits, self._most = logits, most
        self._ids: torch.Tensor | None = None

    def ids(self, count: int) -> torch.Tensor:
        """int64 `[k + 1, min(count, V)]`: the most probable tokens of each row, in descending order. The first is
        `torch.argmax`'s."""
        if self._ids is None or self._ids.shape[1] < count:
            count_of_all = min(max(count, self._most), self._logits.shape[1])
            is_one = count_of_all == 1
            self._ids = argmax_rows(self._logits)[:, None] if is_one else best_ids(self._logits, count_of_all)
        return self._ids[:, :count]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one verification.

    Args:
        token_ids: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
        rows: int64 `[a + 1]`: the row of the target's logits that each token was chosen from.
        scores: the processed logits that each token was chosen from, fp32 `[1, V]`. Empty if nobody wants them.
        on_host: the same tokens in the host's memory, if they have been read already.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    on_host: tuple[int, ...] | None = None

    @property
    def accepted(self) -> int:
        """The number of accepted candidates, `a`."""
        return self.token_ids.shape[0] - 1

    def tokens_on_host(self) -> torch.Tensor:
        """int64 `[a + 1]`: the tokens in the host's memory. Waits for the device unless they have been read."""
        return self.token_ids.cpu() if self.on_host is None else torch.tensor(self.on_host, device="cpu")


@dataclass(frozen=True, eq=False)
class Step:
    """The target's choice at one node of a walk along the candidates.

    Args:
        token_id: int64 `[1]`: the token that the target chose.
        row: int64 `[1]`: the row of logits that it was chosen from.
        scores: the processed logits that it was chosen from, as `ProcessRow` returned them.
        goes_on: bool `[1]`: a child of the node is that token. None if the node has no children.
    """

    token_id: torch.Tensor
    row: torch.Tensor
    scores: torch.Tensor | SparseDistribution
    goes_on: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class BatchedWalk:
    """A walk whose nodes were computed before any stopping criterion was asked. Nodes after the first disagreement
    have no meaning.

    Args:
        token_ids: int64 `[n]`: the target's token at each node.
        rows: int64 `[n]`: the rows of logits that they were chosen from.
        goes_on: `[n - 1]`: above 0 if a child of the node is the target's token. The last node has no children.
        scores: the processed logits: one fp32 `[1, V]` for each node, or fp32 `[k + 1, V]` for all rows. Empty if
            nobody wants them.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    goes_on: torch.Tensor
    scores: tuple[torch.Tensor, ...] | torch.Tensor

    def outcome(self, token_ids: Sequence[int]) -> Outcome:
        """The outcome if the walk ends after the first `len(token_ids)` tokens, which have been read."""
        rows, scores = self.rows[: len(token_ids)], self.scores[: len(token_ids)]
        if isinstance(self.scores, torch.Tensor):
            # Copied, as the next round's logits may use the same memory.
            scores = self.scores.index_select(0, rows).split(1)
        return Outcome(self.token_ids[: len(token_ids)], rows, scores, tuple(token_ids))


def outcome_of(steps: Sequence[Step], keeps_scores: bool = True) -> Outcome:
    """The outcome of a walk that took these steps."""
    tokens, rows = torch.cat([one.token_id for one in steps]), torch.cat([one.row for one in steps])
    return Outcome(tokens, rows, tuple(one.scores for one in steps) if keeps_scores else ())


def walk(
    candidates: Candidates | None, process: ProcessRow, do_sample: bool, device: torch.device, looks: bool = True
) -> Iterator[Step]:
    """Walk from the last verified token along the candidates for as long as the target agrees.

    At every node the target chooses a token: the most probable one if greedy, otherwise one drawn from its
    distribution `p`. If a child of the node is that token, the walk goes on there.

    When sampling, the candidates were drawn too, and the target's token is drawn so that it equals a candidate as
    often as possible:

    - In a chain, whose candidate `x` was drawn from `q`, by speculative sampling (Leviathan et al., 2023, algorithm
      1): `x` with probability `min(1, p(x) / q(x))`, else a token from `max(0, p − q)`.
    - In a tree, whose siblings were drawn from `q` without replacement, by recursive rejection sampling (Jeon et al.,
      2024, "Recursive Speculative Decoding"; Yang et al., 2024, "Multi-Candidate Speculative Decoding"): siblings are
      tried in the order of their draws. After each rejection `p` becomes `max(0, p − q)` scaled to 1, and `q` loses
      that sibling and is scaled to 1. After the last one a token is drawn from the rest of `p`.

    Both are exact because the distribution of each candidate is known, and whether a candidate is in the draft depends
    on earlier siblings and other nodes only (`trees.DrawnTreeGrowth`).

    Only nodes on the path are processed, one after another, each with its own path as the context.

    Args:
        candidates: the verified candidates (None: nothing was drafted).
        process: returns the processed logits of a node.
        do_sample: draw tokens.
        device: the device of the logits.
        looks: end the walk at the first disagreement, which waits for the device at every node. Otherwise walk all
            levels; steps after the first disagreement have no meaning.

    Yields:
        A step for each node. A node is processed when the caller asks for it, so after the caller stops no later node
        has been processed.
    """
    levels = 0 if candidates is None else len(candidates.shortlists)
    path = _Path(candidates, device) if candidates is None or candidates.is_chain else _TreePath(candidates, device)
    for depth in range(levels + 1):
        processed = process(path.row, path.token_ids.unsqueeze(0))
        if not do_sample:
            token = argmax_rows(processed)
        elif depth == levels:
            token = draw_alone(processed)
        elif candidates.is_chain:
            token = draw_at(candidates, depth, processed)
        else:
            token = draw_among(candidates, depth, path.are_children, weights_of(processed))
        row = path.row
        goes_on = None if depth == levels else path.go_on(token)
        yield Step(token, row, processed, goes_on)
        if looks and (goes_on is None or not goes_on):
            return


def walk_to_end(
    candidates: Candidates | None,
    process: ProcessRow,
    do_sample: bool,
    device: torch.device,
    keeps_scores: bool,
) -> BatchedWalk:
    """Take all steps of `walk`. On the host, where looking is free, only those up to the first disagreement."""
    steps = list(walk(candidates, process, do_sample, device, looks=is_host_memory(device)))
    outcome = outcome_of(steps, keeps_scores)
    goes_on = torch.cat([one.goes_on for one in steps[:-1]]) if steps[1:] else outcome.rows[:0]
    return BatchedWalk(outcome.token_ids, outcome.rows, goes_on, outcome.scores)


def walk_at_once(
    candidates: Candidates | None, token_ids: torch.Tensor, scores: torch.Tensor | tuple[()]
) -> BatchedWalk:
    """Take all steps of a `walk` at once, without waiting for the device.

    Args:
        candidates: the verified candidates, not a drawn tree (None: nothing was drafted).
        token_ids: int64 `[k + 1]`: the target's token at each row.
        scores: fp32 `[k + 1, V]`: the processed logits of all rows; empty if nobody wants them.
    """
    device, count = token_ids.device, token_ids.shape[0]
    if candidates is None or candidates.is_chain:
        drafted = token_ids[:0] if candidates is None else candidates.token_ids.to(device)
        rows = torch.arange(count, device=device)
        return BatchedWalk(token_ids, rows, token_ids[:-1] == drafted, scores)
    rows_before = candidates.parents.to(device) + 1
    is_next = token_ids.index_select(0, rows_before) == candidates.token_ids.to(device)
    # Equal siblings stand for the same path: the first is taken, by counting from the end.
    from_end = torch.arange(count - 1, 0, -1, device=device) * is_next
    best = torch.zeros_like(token_ids).scatter_reduce_(0, rows_before, from_end, "amax")
    # The row after each row; 0 if the walk ends there.
    next_rows = (count - best).remainder_(count)
    rows = [next_rows.new_zeros(1)]
    for _ in candidates.shortlists:
        rows.append(next_rows.index_select(0, rows[-1]))
    rows = torch.cat(rows)
    return BatchedWalk(token_ids.index_select(0, rows), rows, rows[1:], scores)


class _Path:
    """The position of a walk along a chain.

    Attributes:
        row: int64 `[1]`: the row of the target's logits.
        token_ids: int64 `[depth]`: the candidates that were accepted so far.
    """

    def __init__(self, candidates: Candidates | None, device: torch.device):
        count = 0 if candidates is None else candidates.token_ids.shape[0]
        self._rows = torch.arange(count + 1, device=device)
        self._drafted = self._rows[:0] if candidates is None else candidates.token_ids.to(device)
        self._depth = 0
        self.row, self.token_ids = self._rows[:1], self._drafted[:0]

    def go_on(self, token_id: torch.Tensor) -> torch.Tensor:
        """Go on to the next candidate. Returns bool `[1]`: whether it is that token, int64 `[1]`."""
        is_next = self._drafted[self._depth : self._depth + 1] == token_id
        self._depth += 1
        self.row, self.token_ids = self._rows[self._depth : self._depth + 1], self._drafted[: self._depth]
        return is_next


class _TreePath:
    """The position of a walk along a tree: see `_Path`."""

    def __init__(self, candidates: Candidates, device: torch.device):
        self._drafted = candidates.token_ids.to(device)
        self._rows_before = candidates.parents.to(device) + 1
        self.row = self._rows_before.new_zeros(1)
        self.token_ids = self._drafted[:0]
        # bool [k]: which candidates are children of the current node.
        self.are_children = self._rows_before == self.row

    def go_on(self, token_id: torch.Tensor) -> torch.Tensor:
        """See `_Path.go_on`."""
        is_next = (self.are_children & (self._drafted == token_id)).to(torch.int8)
        # Equal siblings stand for the same path: the first is taken.
        best = is_next.max(0, keepdim=True)
        self.row = best.indices + 1
        self.token_ids = torch.cat([self.token_ids, token_id])
        self.are_children = self._rows_before == self.row
        return best.values.bool()


class Verifier:
    """Processes the target's logits, accepts candidates, and asks the stopping criteria after every token.

    If a processor or a criterion may keep state, they see one node at a time, and none that is not
    accepted.
    If all are known to be pure, the whole walk is computed first, so that a GPU is waited for once a round.

    Args:
        processors: applied to the target's logits.
        criteria: asked after every token.
        do_sample: draw tokens.
        keeps_scores: outcomes must have their scores.

    Attributes:
        is_stepwise: a processor or a criterion may keep state.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        do_sample: bool,
        keeps_scores: bool,
    ):
        self._by_id, self._by_value = divide(list(processors))
        self._criteria = criteria
        self._do_sample = do_sample
        self._keeps_scores = keeps_scores
        self.is_stepwise = may_keep_state(processors) or any(type(one) not in _PURE_CRITERIA for one in criteria)
        # Tokens are read in every round anyway, so criteria that look at the last one are answered on the host.
        self._ends = frozenset(
            token_id for one in criteria if type(one) in _BY_LAST_TOKEN for token_id in one.eos_token_id.tolist()
        )
        self._by_text = [one for one in criteria if type(one) not in (*_BY_LAST_TOKEN, *_BY_LENGTH_OR_TIME)]
        self._by_length_or_time = [one for one in criteria if type(one) in _BY_LENGTH_OR_TIME]
        self._first_length_of_note = min(map(_first_length_of_note, self._by_length_or_time), default=math.inf)

    def verify(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        candidates: Candidates | None,
        scores: tuple[torch.Tensor, ...] | None,
        best: BestTokens | None,
    ) -> tuple[Outcome, bool]:
        """Verify one round's candidates.

        Args:
            logits: fp32 `[k + 1, V]`: the target's logits.
            input_ids: int64 `[1, n]`: the verified tokens.
            candidates: the candidates after them (None: nothing was drafted).
            scores: the scores of earlier tokens, if the criteria are to see scores.
            best: the most probable tokens of these logits. None if finding them for all rows would cost more than the
                walk, or wait for a device.

        Returns:
            The outcome, and whether the text ends with it.

        Raises:
            TargetError: a token has to be drawn from probabilities that are NaN.
        """
        if self.is_stepwise:
            process = self._process_row(logits, input_ids, best)
            steps: list[Step] = []
            text = input_ids
            for step in walk(candidates, process, self._do_sample, logits.device):
                steps.append(step)
                if self._do_sample:
                    _require_tokens(step.token_id.tolist())
                text = torch.cat([text, step.token_id.unsqueeze(0)], dim=1)
                if bool(self._criteria(text, _scores_with(scores, steps))):
                    return outcome_of(steps, self._keeps_scores), True
            return outcome_of(steps, self._keeps_scores), False
        return self._until_done(self.walk(logits, input_ids, candidates, best), input_ids)

    def walk(
        self,
        logits: torch.Tensor,
        input_ids: torch.Tensor,
        candidates: Candidates | None,
        best: BestTokens | None = None,
    ) -> BatchedWalk:
        """Compute the whole walk, for processors that are known to be pure. Does not wait for the device. The
        arguments are those of `verify`; the verified tokens are read only if a processor looks at token ids."""
        is_chain = candidates is None or candidates.is_chain
        if self._do_sample and is_chain and not (self.looks_at_ids or is_host_memory(logits.device)):
            processed = self._by_value(input_ids, logits)
            tokens = draw_along([candidates], processed.unsqueeze(0))[0]
            return walk_at_once(candidates, tokens, processed if self._keeps_scores else ())
        if self._do_sample or self.looks_at_ids:
            process = self._process_row(logits, input_ids, best)
            return walk_to_end(candidates, process, self._do_sample, logits.device, self._keeps_scores)
        if best is not None and not self._by_value:
            return walk_at_once(candidates, best.ids(1)[:, 0], logits if self._keeps_scores else ())
        if is_host_memory(logits.device):
            # Only rows that the walk reaches are processed.
            process = self._process_row(logits, input_ids, best)
            return walk_to_end(candidates, process, False, logits.device, self._keeps_scores)
        processed = self._by_value(input_ids, logits)
        return walk_at_once(candidates, argmax_rows(processed), processed if self._keeps_scores else ())

    def along_chains(self, logits: torch.Tensor, candidates: Sequence[Candidates | None]) -> torch.Tensor:
        """The target's tokens at all nodes of several texts' chains, int64 `[B, k + 1]`, in as many operations as for
        one text. For processors that look at values only. Does not wait for the device.

        Args:
            logits: fp32 `[B, k + 1, V]`.
            candidates: for each text a chain (None: nothing was drafted).
        """
        texts = max(1, _MOST_ROWS // logits.shape[1])
        if len(logits) > texts:
            parts = (candidates[start : start + texts] for start in range(0, len(candidates), texts))
            return torch.cat([self.along_chains(*one) for one in zip(logits.split(texts), parts, strict=True)])
        processed = self._by_value(None, logits.flatten(0, 1))
        if self._do_sample:
            return draw_along(candidates, processed.view_as(logits))
        return argmax_rows(processed).view(logits.shape[:2])

    @property
    def looks_at_ids(self) -> bool:
        """Whether a processor looks at token ids."""
        return bool(self._by_id)

    @property
    def looks_at_order(self) -> bool:
        """Whether a processor looks at more of the tokens than which ones there are."""
        others = [one for one in self._by_id if not looks_at_values_only(one)]
        return not all(map(looks_at_set_only, others))

    def end(self, token_ids: list[int], input_ids: torch.Tensor) -> tuple[int, bool]:
        """Where the text ends, given verified tokens that have been read.

        Args:
            token_ids: at least one token.
            input_ids: int64 `[1, n]`: the tokens before.

        Returns:
            How many of the tokens count, and whether the text ends with them.

        Raises:
            TargetError: as `verify`.
        """
        tokens = torch.tensor(token_ids, device=input_ids.device)
        stops = [one.tolist() for one in self._stops_by_text(tokens, input_ids)]
        return self._cut(token_ids, [1] * (len(token_ids) - 1), stops, input_ids.shape[1])

    def _process_row(self, logits: torch.Tensor, input_ids: torch.Tensor, best: BestTokens | None) -> ProcessRow:
        """Return the function that processes a row of this round's logits. Arguments as for `verify`."""
        count = self._by_value.most_looked_at if self._do_sample and not self._keeps_scores else None
        if count is not None and (count > logits.shape[1] or not is_host_memory(logits.device)):
            count = None
        few: list[SparseDistribution | None] = []
        if count is not None and best is not None and not self._by_id:
            few = self._by_value.sparse(logits, best.ids(count))

        def process(row: torch.Tensor, path: torch.Tensor) -> torch.Tensor | SparseDistribution:
            left = few[row] if few else None
            if left is None:
                # A copy if it is kept as scores, or if a processor may write into its input; those by value do not.
                needs_no_copy = not (self._by_id or self._keeps_scores) and is_host_memory(logits.device)
                processed = logits[row.item()].unsqueeze(0) if needs_no_copy else logits.index_select(0, row)
                if self._by_id:
                    processed = self._by_id(torch.cat([input_ids, path], dim=1), processed)
                if count is not None and not few:
                    left = self._by_value.sparse(processed, top_k_ids(processed, count))[0]
                if left is None:
                    return self._by_value(input_ids, processed)
            return left

        return process

    def _until_done(self, walked: BatchedWalk, input_ids: torch.Tensor) -> tuple[Outcome, bool]:
        """Cut a walk at the first disagreement or at the end of the text. Returns the outcome, and whether the text
        ends with it. Waits for the device once."""
        n = walked.token_ids.shape[0]
        stops = self._stops_by_text(walked.token_ids, input_ids)
        read = torch.cat([walked.token_ids, walked.goes_on, *stops]).tolist()
        token_ids, goes_on = read[:n], read[n : 2 * n - 1]
        stops = [read[start : start + n] for start in range(2 * n - 1, len(read), n)]
        count, is_done = self._cut(token_ids, goes_on, stops, input_ids.shape[1])
        return walked.outcome(token_ids[:count]), is_done

    def _cut(self, token_ids: list[int], goes_on: list[int], stops: list[list[int]], length: int) -> tuple[int, bool]:
        """How many tokens of a walk count, and whether the text ends with them. Arguments as in `_until_done`, after a
        text of that length."""

        def stops_after(count: int) -> bool:
            return token_ids[count - 1] in self._ends or any(one[count - 1] for one in stops)

        n = len(token_ids)
        count = next((one for one in range(1, n) if not goes_on[one - 1] or stops_after(one)), n)
        _require_tokens(token_ids[:count])
        is_done = stops_after(count)
        # A text that is too long or too late stays so as it grows.
        if length + count >= self._first_length_of_note and self._stops_at(length + count):
            is_done, count = True, next((one for one in range(1, count) if self._stops_at(length + one)), count)
        return count, is_done

    def _stops_by_text(self, token_ids: torch.Tensor, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """bool `[n]` for each criterion that looks at the text: whether it stops after each of `n` more tokens."""
        if not self._by_text:
            return []
        # Criteria cannot look up `NO_TOKEN`: any other token stands in for it.
        text = torch.cat([input_ids, token_ids.clamp_min(0).unsqueeze(0)], dim=1)
        ends = range(input_ids.shape[1] + 1, text.shape[1] + 1)
        return [torch.cat([one(text[:, :end], None) for end in ends]) for one in self._by_text]

    def _stops_at(self, length: int) -> bool:
        """Whether a criterion of length or time stops a text of that length."""
        # On the CPU, so that no device is waited for.
        text = torch.empty(1, 1, dtype=torch.int64, device="cpu").expand(1, length)
        return any(bool(one(text, None)) for one in self._by_length_or_time)


def _require_tokens(token_ids: Sequence[int]) -> None:
    """Raise the error that drawing could not raise without waiting. Plain generate raises one too."""
    if NO_TOKEN in token_ids:
        raise TargetError(
            "no token can be drawn: the target's probabilities are NaN, as its logits hold NaN or infinity, or the "
            "logits processors left nothing. Look at its dtype first: fp16 overflows where bf16 does not."
        )


def _first_length_of_note(criterion: MaxLengthCriteria | MaxTimeCriteria) -> int:
    """The shortest text at which the criterion may stop, or warn that the text is longer than the positions."""
    if type(criterion) is MaxTimeCriteria:
        return 0
    positions = criterion.max_position_embeddings
    return criterion.max_length if positions is None else min(criterion.max_length, positions + 1)


def _scores_with(scores: tuple[torch.Tensor, ...] | None, steps: Sequence[Step]) -> tuple[torch.Tensor, ...] | None:
    return None if scores is None else scores + tuple(one.scores for one in steps)
