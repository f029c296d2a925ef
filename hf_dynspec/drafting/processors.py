"""Logits processors, divided into those that must know which token a column stands for and those that need not, and
into those that are known to keep no memory and all others."""

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..devices import is_host_memory
from ..kernels import top_k_ids
from ..protocol import SparseDistribution

# These look at the values of logits only, and at each row by itself. They give the same distribution on a shortlist as
# on the full vocabulary with −inf elsewhere, and may take all positions of a draft at once.
_BY_VALUE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# What these do to a row follows from the row and the tokens before it, whatever they were shown earlier.
_BY_ID = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def looks_at_values_only(processor: object) -> bool:
    """Whether a processor looks at the values of logits only, and at each row by itself."""
    # Exactly: a subclass may do anything.
    return type(processor) in _BY_VALUE


def may_keep_state(processors: Iterable[object]) -> bool:
    """Whether any of these processors is not known to be pure.

    Such a one counts calls, follows the tokens that come out or runs a model beside the target, as classifier-free
    guidance and watermarks do; so it must be shown what comes out, once each and in order, and nothing else.
    """
    return any(type(one) not in _BY_VALUE and type(one) not in _BY_ID for one in processors)


class ProcessorsByValue:
    """Processors that look at values only, one after another.

    `LogitsProcessorList` inspects the signature of each processor in every call, which takes longer than most of them
    do, and `TopKLogitsWarper` sorts more of a large vocabulary than it has to.
    """

    def __init__(self, processors: list):
        self._processors = processors
        self._top_k_first = _top_k_first(processors)

    def __bool__(self) -> bool:
        return bool(self._processors)

    @property
    def most_kept(self) -> int | None:
        """How many of a row's most probable tokens may come out at most, ties aside (None: all)."""
        return min((one.top_k for one in self._processors if type(one) is TopKLogitsWarper), default=None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process scores, fp32 `[m, V]`; `input_ids` is passed on, and none of them reads it."""
        for one in self._processors:
            scores = _keep_top_k(one, scores) if type(one) is TopKLogitsWarper else one(input_ids, scores)
        return scores

    @property
    def most_looked_at(self) -> int | None:
        """How many of a row's most probable tokens `few` looks at; None where it cannot tell anything."""
        # One more than are kept, to see whether it ties with the last of them.
        return None if self._top_k_first is None else self._top_k_first + 1

    def sparse(self, scores: torch.Tensor, best: torch.Tensor) -> list[SparseDistribution | None]:
        """The softmax of what is left of rows of scores, where that can be told without processing them whole: the
        same tokens, with the same weights but for the rounding of sums over more or fewer zeros. Reads the host's
        memory.

        Args:
            scores: fp32 `[m, V]`.
            best: int64 `[m, most_looked_at]`: the most probable tokens of each row, the first one first.

        Returns:
            For each row its tokens, ascending. None where tokens tie for a top-k's last place, all of which are kept,
            or for any where something follows that sorts them, or where a score is not a finite number.
        """
        most_probable = scores.gather(1, best)
        for one in itertools.takewhile(lambda one: type(one) is not TopKLogitsWarper, self._processors):
            most_probable = one(None, most_probable)
        may_tie = best.shape[1] - 2 if all(type(one) in _WITHOUT_ORDER for one in self._processors) else 0
        token_ids = best[:, :-1].sort(1).values
        weights = self(None, scores.gather(1, token_ids)).softmax(-1)
        return [
            SparseDistribution(ids, of_ids)
            if values[0] < torch.inf and all(map(operator.gt, values[may_tie:], values[may_tie + 1 :]))
            else None
            for values, ids, of_ids in zip(most_probable.tolist(), token_ids.tolist(), weights.tolist(), strict=True)
        ]


# These treat tokens of the same score alike.
_WITHOUT_ORDER = (LogitNormalization, TemperatureLogitsWarper, TopKLogitsWarper)


def _top_k_first(processors: list) -> int | None:
    """How many tokens a top-k keeps before which a row's order does not change; None where there is none. All that
    comes after it leaves those that are forbidden forbidden."""
    if any(getattr(one, "filter_value", -torch.inf) != -torch.inf for one in processors):
        return None
    rest = itertools.dropwhile(lambda one: type(one) is TemperatureLogitsWarper, processors)
    first = next(rest, None)
    return first.top_k if type(first) is TopKLogitsWarper else None


def _keep_top_k(warper: TopKLogitsWarper, scores: torch.Tensor) -> torch.Tensor:
    """What a `TopKLogitsWarper` does: values below the k-th largest of their row are replaced, ties are kept."""
    if warper.top_k >= scores.shape[-1]:
        return scores
    kept = top_k_ids(scores, warper.top_k)
    return torch.where(scores < scores.gather(1, kept[:, -1:]), warper.filter_value, scores)


def divide(processors: list) -> tuple[LogitsProcessorList, ProcessorsByValue]:
    """Divide processors, in their order, into a first part that ends with the last one that looks at token ids, and
    the rest, which looks at values only."""
    cut = max((index + 1 for index, one in enumerate(processors) if not looks_at_values_only(one)), default=0)
    return LogitsProcessorList(processors[:cut]), ProcessorsByValue(processors[cut:])


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index, int64 `[1]`, in proportion to weights `[n]`, with torch's default generator.

    Inverts the cumulative sum in fp64, which takes one random number where `torch.multinomial` takes `n`. An index of
    weight 0 is never drawn, as it adds nothing to the sum.
    """
    index, _ = draw_with_weight(weights)
    return index


def draw_with_weight(weights: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """`draw`, and the weight of what was drawn, None where it would have to be waited for. Otherwise a block of many
    weights is drawn first, by the blocks' sums, and an index in it after that."""
    if not is_host_memory(weights.device):
        return _draw(weights), None
    n, start, end = weights.shape[0], 0, weights.shape[0]
    if n >= _FEWEST_WIDE_COLUMNS:
        blocks = n // _DRAWN_BLOCK
        sums = weights[: blocks * _DRAWN_BLOCK].view(blocks, _DRAWN_BLOCK).sum(-1).tolist()
        start = _DRAWN_BLOCK * draw_place([*sums, weights[blocks * _DRAWN_BLOCK :].sum().item()])
        end = min(start + _DRAWN_BLOCK, n)
    block = weights[start:end].tolist()
    place = draw_place(block)
    return torch.tensor([start + place], device=weights.device), block[place]


# Among fewer columns than this, to look for those that count takes longer than to look at all.
_FEWEST_WIDE_COLUMNS = 1024
# A block that is drawn first. With it, sums of a large vocabulary are as few as its weights.
_DRAWN_BLOCK = 256


def few_columns(is_wanted: torch.Tensor) -> torch.Tensor | None:
    """The columns, int64 `[m]`, that are True in `[n]`, where they can be counted without waiting for a device and are
    so few that it pays to look at them alone, as after a top-k over a large vocabulary; otherwise None."""
    if not is_host_memory(is_wanted.device) or is_wanted.shape[0] < _FEWEST_WIDE_COLUMNS:
        return None
    wanted = is_wanted.nonzero().squeeze(1)
    return wanted if 0 < wanted.shape[0] <= is_wanted.shape[0] // 8 else None


def _draw(weights: torch.Tensor) -> torch.Tensor:
    cumulative = weights.double().cumsum(-1)
    uniform = torch.rand(1, dtype=torch.float64, device=weights.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1:], right=True)
    # Rounding can only pass the end of the last positive weight.
    return torch.minimum(index, (cumulative < cumulative[-1:]).sum(-1, keepdim=True))


def draw_place(weights: list[float]) -> int:
    """`draw` on the host, whose numbers are fp64: for some hundred weights quicker than ten small operations."""
    cumulative = list(itertools.accumulate(weights))
    uniform = torch.rand(1, dtype=torch.float64, device="cpu").item()
    return min(bisect_right(cumulative, uniform * cumulative[-1]), bisect_left(cumulative, cumulative[-1]))


def draw_several(weights: torch.Tensor, count: int, block: int = 128) -> torch.Tensor:
    """Draw several indices of each row without replacement: each in proportion to what the ones before it leave.

    That is the order in which a race ends whose runners take times that are exponentially distributed, each at the
    rate of its weight. A wide row first lets its blocks race, at the rates of their sums: the first runner of a block
    arrives when the block does, the others are as far behind it as if they had started then, for such times have no
    memory; and the first `count` runners belong to the first `count` blocks. So few random numbers are drawn, and in
    fp64, as those of fp32 are too coarse for small weights.

    Args:
        weights: fp32 `[m, n]`, not negative.
        count: how many, at most `n`.
        block: columns in a block.

    Returns:
        int64 `[m, count]`: columns in the order in which they were drawn. Those of weight 0 come last, in any order.
    """
    m, columns = weights.shape
    blocks = columns // block
    if blocks <= count:
        return _race(weights).topk(count, largest=False).indices
    blocked = weights[:, : blocks * block].view(m, blocks, block)
    first = _race(blocked.sum(-1)).topk(count, largest=False)
    runners = (first.indices.unsqueeze(-1) * block + torch.arange(block, device=weights.device)).view(m, -1)
    times = _race(weights.gather(1, runners)).view(m, count, block)
    # A block of weight 0 never arrives.
    delays = (first.values.unsqueeze(-1) - times.amin(-1, keepdim=True)).nan_to_num(torch.inf, torch.inf, -torch.inf)
    leftover = torch.arange(blocks * block, columns, device=weights.device).expand(m, -1)
    times = torch.cat([(times + delays).view(m, -1), _race(weights[:, blocks * block :])], dim=1)
    return torch.cat([runners, leftover], dim=1).gather(1, times.topk(count, largest=False).indices)


def _race(rates: torch.Tensor) -> torch.Tensor:
    """fp64, of the shape of `rates`: exponentially distributed times, ∞ where the rate is 0."""
    uniform = torch.rand(rates.shape, dtype=torch.float64, device=rates.device)
    return -uniform.log() / rates
