"""Which candidates the target accepts: what lossless means.

Row 0 of the target's logits is what it says after the last verified token, row `j + 1` what it says after candidate
`j`.
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
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..devices import is_host_memory
from ..drafting.processors import divide, may_keep_state
from ..errors import TargetError
from ..kernels import argmax_rows, top_k_ids
from ..protocol import Candidates, SparseDistribution
from .acceptance import NO_TOKEN, draw_alone, draw_among, draw_at, weights_of

# These criteria may be asked about tokens that do not come out. Exactly these classes: a subclass may do anything.
# Some look at the last token alone, some at no token at all.
_BY_LAST_TOKEN = (EosTokenCriteria,)
_BY_LENGTH_OR_TIME = (MaxLengthCriteria, MaxTimeCriteria)
_PURE_CRITERIA = (*_BY_LAST_TOKEN, *_BY_LENGTH_OR_TIME, StopStringCriteria)

# Processes the row of logits at one node, int64 [1], given the tokens on the path to it, int64 [1, depth]. Returns
# fp32 [1, V], or when sampling what is left of its softmax, where that is little.
ProcessRow = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | SparseDistribution]


class BestTokens:
    """The most probable tokens of all rows of one round's logits: found in one pass, whoever asks for how many.

    Args:
        logits: `[k + 1, V]`.
        most: how many will be asked for later, if any.
    """

    def __init__(self, logits: torch.Tensor, most: int = 0):
        self._logits, self._most = logits, most
        self._ids: torch.Tensor | None = None

    def ids(self, count: int) -> torch.Tensor:
        """int64 `[k + 1, count]`, of a smaller vocabulary all of it: the most probable ones, the first one first."""
        if self._ids is None or self._ids.shape[1] < count:
            count_of_all = min(max(count, self._most), self._logits.shape[1])
            is_one = count_of_all == 1
            self._ids = argmax_rows(self._logits)[:, None] if is_one else top_k_ids(self._logits, count_of_all)
        return self._ids[:, :count]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one verification accepts.

    Args:
        token_ids: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
        rows: int64 `[a + 1]`: which rows of the target's logits they were chosen at.
        scores: for each of them the processed logits that it was chosen by, fp32 `[1, V]`. Empty where nobody wants
            them.
        on_host: the tokens once more, where they have been read already.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    on_host: tuple[int, ...] | None = None

    @property
    def accepted(self) -> int:
        """How many candidates were accepted, `a`."""
        return self.token_ids.shape[0] - 1

    def tokens_on_host(self) -> torch.Tensor:
        """int64 `[a + 1]` in the host's memory: the tokens. Waits for the device where they have not been read."""
        return self.token_ids.cpu() if self.on_host is None else torch.tensor(self.on_host, device="cpu")


@dataclass(frozen=True, eq=False)
class Step:
    """What the target says at one node of a walk along the candidates.

    Args:
        token_id: int64 `[1]`: its own token there.
        row: int64 `[1]`: the row of its logits that the token was chosen at.
        scores: what `ProcessRow` returned: the processed logits that it was chosen by.
        goes_on: bool `[1]`: a candidate below the node is that token. None where nothing is below.
    """

    token_id: torch.Tensor
    row: torch.Tensor
    scores: torch.Tensor | SparseDistribution
    goes_on: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class BatchedWalk:
    """A walk that no criterion has looked at, perhaps to the end of the candidates. What comes after the first node at
    which it does not go on says nothing.

    Args:
        token_ids: int64 `[n]`: the target's own token at each node.
        rows: int64 `[n]`: the rows of its logits that they were chosen at.
        goes_on: `[n - 1]`: above 0 where a candidate below the node is that token. The last node has none below.
        scores: the processed logits: for each node, fp32 `[1, V]`, or of all rows, fp32 `[k + 1, V]`. Empty where
            nobody wants them.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    goes_on: torch.Tensor
    scores: tuple[torch.Tensor, ...] | torch.Tensor

    def outcome(self, token_ids: Sequence[int]) -> Outcome:
        """The outcome in which the first tokens come out, given as they were read."""
        rows, scores = self.rows[: len(token_ids)], self.scores[: len(token_ids)]
        if isinstance(self.scores, torch.Tensor):
            # Copied, as the next round's logits may be written where these are.
            scores = self.scores.index_select(0, rows).split(1)
        return Outcome(self.token_ids[: len(token_ids)], rows, scores, tuple(token_ids))


def outcome_of(steps: Sequence[Step], keeps_scores: bool = True) -> Outcome:
    """The tokens of the first steps of a walk, all of which come out, with their scores where these are kept."""
    tokens, rows = torch.cat([one.token_id for one in steps]), torch.cat([one.row for one in steps])
    return Outcome(tokens, rows, tuple(one.scores for one in steps) if keeps_scores else ())


def walk(
    candidates: Candidates | None, process: ProcessRow, do_sample: bool, device: torch.device, looks: bool = True
) -> Iterator[Step]:
    """Walk from the last verified token along the candidates for as long as the target agrees.

    At every node the target chooses a token: greedily its most probable one, when sampling one that is distributed as
    its `p` says. If a candidate below the node is that token, the walk goes on there.

    Greedy candidates are a chain or a tree of the drafter's likeliest tokens. When sampling they were drawn, and the
    target's token is found in one of two ways that make it the drafter's as often as can be:

    - In a chain, whose candidate `x` was drawn from `q`, by speculative sampling (Leviathan et al., 2023, algorithm
      1): `x` with probability `min(1, p(x) / q(x))`, else a token from `max(0, p − q)`.
    - In a tree, whose siblings were drawn from `q` without replacement, by the same again and again (recursive
      rejection sampling: Jeon et al., 2024, "Recursive Speculative Decoding"; Yang et al., 2024,
      "Multi-Candidate Speculative Decoding"): the first sibling is accepted so; if it is not, `p` becomes
      `max(0, p − q)` scaled to 1, `q` loses that sibling and is scaled to 1, and the next one is asked about; after
      the last one a token is drawn from what is left of `p`. A node without children has all of `p` left.

    Either is exact because what a candidate was drawn from is known, and nothing but earlier siblings and other nodes
    decided whether it is there (`trees.DrawnTreeGrowth`).

    Only the nodes on the path are processed, one after another, each with its own path as the context.

    Args:
        candidates: what was verified (None: nothing).
        process: gives the processed logits at a node.
        do_sample: draw tokens.
        device: where the logits are.
        looks: end the walk where the target disagrees, which waits for the device at every node. Otherwise all levels
            are walked, and steps after the first that does not go on say nothing.

    Yields:
        A step for each node. The next node is processed when it is asked for, so whoever stops asking has it that no
        later one ever was.
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
            token = draw_among(candidates, depth, path.are_below, weights_of(processed))
        row = path.row
        goes_on = None if depth == levels else path.go_on(token)
        yield Step(token, row, processed, goes_on)
        if looks and (goes_on is None or not goes_on):
            return


def walk_unseen(
    candidates: Candidates | None,
    process: ProcessRow,
    do_sample: bool,
    device: torch.device,
    keeps_scores: bool,
) -> BatchedWalk:
    """Walk as `walk` does, to the end, or where looking costs nothing for as long as the target agrees."""
    steps = list(walk(candidates, process, do_sample, device, looks=is_host_memory(device)))
    outcome = outcome_of(steps, keeps_scores)
    goes_on = torch.cat([one.goes_on for one in steps[:-1]]) if steps[1:] else outcome.rows[:0]
    return BatchedWalk(outcome.token_ids, outcome.rows, goes_on, outcome.scores)


def walk_greedily(
    candidates: Candidates | None, token_ids: torch.Tensor, scores: torch.Tensor | tuple[()]
) -> BatchedWalk:
    """Walk as `walk` does when tokens are not drawn, to the end, without looking at anything: all rows at once.

    Args:
        candidates: what was verified (None: nothing).
        token_ids: int64 `[k + 1]`: the target's own token at each row.
        scores: fp32 `[k + 1, V]`: the processed logits of all rows; empty where nobody wants them.
    """
    device, count = token_ids.device, token_ids.shape[0]
    if candidates is None or candidates.is_chain:
        drafted = token_ids[:0] if candidates is None else candidates.token_ids.to(device)
        rows = torch.arange(count, device=device)
        return BatchedWalk(token_ids, rows, token_ids[:-1] == drafted, scores)
    rows_before = candidates.parents.to(device) + 1
    is_next = token_ids.index_select(0, rows_before) == candidates.token_ids.to(device)
    # Of equal siblings, which stand for the same path, the first is taken, by counting from the end.
    from_end = torch.arange(count - 1, 0, -1, device=device) * is_next
    best = torch.zeros_like(token_ids).scatter_reduce_(0, rows_before, from_end, "amax")
    # The row after each row, 0 where the walk does not go on.
    next_rows = (count - best).remainder_(count)
    rows = [next_rows.new_zeros(1)]
    for _ in candidates.shortlists:
        rows.append(next_rows.index_select(0, rows[-1]))
    rows = torch.cat(rows)
    return BatchedWalk(token_ids.index_select(0, rows), rows, rows[1:], scores)


class _Path:
    """Where a walk along a chain has come to.

    Attributes:
        row: int64 `[1]`: the row of the target's logits.
        token_ids: int64 `[depth]`: the tokens from the last verified one to here.
    """

    def __init__(self, candidates: Candidates | None, device: torch.device):
        count = 0 if candidates is None else candidates.token_ids.shape[0]
        self._rows = torch.arange(count + 1, device=device)
        self._drafted = self._rows[:0] if candidates is None else candidates.token_ids.to(device)
        self._depth = 0
        self.row, self.token_ids = self._rows[:1], self._drafted[:0]

    def go_on(self, token_id: torch.Tensor) -> torch.Tensor:
        """Go on to the candidate below, which is that token, int64 `[1]`, where the result, bool `[1]`, says so."""
        is_next = self._drafted[self._depth : self._depth + 1] == token_id
        self._depth += 1
        self.row, self.token_ids = self._rows[self._depth : self._depth + 1], self._drafted[: self._depth]
        return is_next


class _TreePath:
    """Where a walk along a tree has come to: as `_Path`."""

    def __init__(self, candidates: Candidates, device: torch.device):
        self._drafted = candidates.token_ids.to(device)
        self._rows_before = candidates.parents.to(device) + 1
        self.row = self._rows_before.new_zeros(1)
        self.token_ids = self._drafted[:0]
        # bool [k]: which candidates are children of where the walk has come to.
        self.are_below = self._rows_before == self.row

    def go_on(self, token_id: torch.Tensor) -> torch.Tensor:
        """As `_Path.go_on`."""
        is_next = (self.are_below & (self._drafted == token_id)).to(torch.int8)
        # Of equal siblings, which stand for the same path, the first is taken.
        best = is_next.max(0, keepdim=True)
        self.row = best.indices + 1
        self.token_ids = torch.cat([self.token_ids, token_id])
        self.are_below = self._rows_before == self.row
        return best.values.bool()


class Verifier:
    """Processes the target's logits, accepts candidates by them, and asks the stopping criteria after every token.

    Where a processor or a criterion may remember what it was shown, the target's token at one node is known, and has
    come out, before anybody sees the next node. With processors and criteria that are known to be pure, nodes are
    walked to first, all of them on devices that would be waited for, which are so waited for once.

    Args:
        processors: applied to the target's logits.
        criteria: asked after every token.
        do_sample: draw tokens.
        keeps_scores: somebody wants the scores of all tokens, and not the tokens alone.
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
        self._is_stepwise = may_keep_state(processors) or any(type(one) not in _PURE_CRITERIA for one in criteria)
        # Tokens are read in every round anyway: what asks for the last one alone is answered on the host.
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
        """Accept candidates up to the token that is the last one.

        Args:
            logits: fp32 `[k + 1, V]`: the target's.
            input_ids: int64 `[1, n]`: the verified tokens.
            candidates: what follows them (None: nothing).
            scores: those of the tokens before, if the criteria are to see scores.
            best: of these logits. None where to find them for all rows would take longer than to walk, or make wait.

        Returns:
            The tokens that come out, and whether they are the last.

        Raises:
            TargetError: a token was to be drawn where the target's probabilities are no numbers.
        """
        process = self._process_row(logits, input_ids, best)
        if self._is_stepwise:
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
        if self._do_sample or self._by_id:
            walked = walk_unseen(candidates, process, self._do_sample, logits.device, self._keeps_scores)
        elif best is not None and not self._by_value:
            walked = walk_greedily(candidates, best.ids(1)[:, 0], logits if self._keeps_scores else ())
        elif is_host_memory(logits.device):
            # Rows that the walk does not come to are not looked at.
            walked = walk_unseen(candidates, process, False, logits.device, self._keeps_scores)
        else:
            processed = self._by_value(input_ids, logits)
            walked = walk_greedily(candidates, argmax_rows(processed), processed if self._keeps_scores else ())
        return self._until_done(walked, input_ids)

    def _process_row(self, logits: torch.Tensor, input_ids: torch.Tensor, best: BestTokens | None) -> ProcessRow:
        """What processes a row of this round's logits. Arguments as for `verify`."""
        count = self._by_value.most_looked_at if self._do_sample and not self._keeps_scores else None
        if count is not None and (count > logits.shape[1] or not is_host_memory(logits.device)):
            count = None
        few: list[SparseDistribution | None] = []
        if count is not None and best is not None and not self._by_id:
            few = self._by_value.sparse(logits, best.ids(count))

        def process(row: torch.Tensor, path: torch.Tensor) -> torch.Tensor | SparseDistribution:
            left = few[row] if few else None
            if left is None:
                # A copy where it outlives the round, or as processors may write into what they are given; those by
                # value do not.
                is_passing = not (self._by_id or self._keeps_scores) and is_host_memory(logits.device)
                processed = logits[row.item()].unsqueeze(0) if is_passing else logits.index_select(0, row)
                if self._by_id:
                    processed = self._by_id(torch.cat([input_ids, path], dim=1), processed)
                if count is not None and not few:
                    left = self._by_value.sparse(processed, top_k_ids(processed, count))[0]
                if left is None:
                    return self._by_value(input_ids, processed)
            return left

        return process

    def _until_done(self, walked: BatchedWalk, input_ids: torch.Tensor) -> tuple[Outcome, bool]:
        """What of a walk that was not looked at comes out, and whether that ends the text. Waits for the device once,
        for all that the host has to know."""
        n, length = walked.token_ids.shape[0], input_ids.shape[1]
        stops = self._stops_by_text(walked.token_ids, input_ids)
        read = torch.cat([walked.token_ids, walked.goes_on, *stops]).tolist()
        token_ids, goes_on, stops = read[:n], read[n : 2 * n - 1], read[2 * n - 1 :]

        def stops_after(count: int) -> bool:
            return token_ids[count - 1] in self._ends or any(stops[count - 1 :: n])

        count = next((one for one in range(1, n) if not goes_on[one - 1] or stops_after(one)), n)
        _require_tokens(token_ids[:count])
        is_done = stops_after(count)
        # A text that is too long, or comes too late, stays so as it grows.
        if length + count >= self._first_length_of_note and self._stops_at(length + count):
            is_done, count = True, next((one for one in range(1, count) if self._stops_at(length + one)), count)
        return walked.outcome(token_ids[:count]), is_done

    def _stops_by_text(self, token_ids: torch.Tensor, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """For each criterion that looks at the text bool `[n]`: whether it stops after each of `n` more tokens."""
        if not self._by_text:
            return []
        # Some token in the place of `NO_TOKEN`, which criteria cannot look up.
        text = torch.cat([input_ids, token_ids.clamp_min(0).unsqueeze(0)], dim=1)
        ends = range(input_ids.shape[1] + 1, text.shape[1] + 1)
        return [torch.cat([one(text[:, :end], None) for end in ends]) for one in self._by_text]

    def _stops_at(self, length: int) -> bool:
        """Whether a criterion that looks at no token stops a text of that length."""
        # On the CPU, where the answer is at hand.
        text = torch.empty(1, 1, dtype=torch.int64, device="cpu").expand(1, length)
        return any(bool(one(text, None)) for one in self._by_length_or_time)


def _require_tokens(token_ids: Sequence[int]) -> None:
    """Raise the error that drawing could not: plain generate's draws raise it too."""
    if NO_TOKEN in token_ids:
        raise TargetError(
            "no token can be drawn: the target's probabilities are NaN, as its logits hold NaN or infinity, or the "
            "logits processors left nothing. Look at its dtype first: fp16 overflows where bf16 does not."
        )


def _first_length_of_note(criterion: MaxLengthCriteria | MaxTimeCriteria) -> int:
    """From which length of the text on the criterion stops it, or warns of it."""
    if type(criterion) is MaxTimeCriteria:
        return 0
    # It warns of what is longer than the model's positions.
    positions = criterion.max_position_embeddings
    return criterion.max_length if positions is None else min(criterion.max_length, positions + 1)


def _scores_with(scores: tuple[torch.Tensor, ...] | None, steps: Sequence[Step]) -> tuple[torch.Tensor, ...] | None:
    return None if scores is None else scores + tuple(one.scores for one in steps)
