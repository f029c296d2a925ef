"""Logits processors by what they depend on (values only, or token ids too; state or none), and drawing from logits."""

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

# These look at the values of logits only, row by row. They give the same distribution on a shortlist as on the full
# vocabulary with −inf elsewhere, and can process all positions of a draft at once.
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

# The result of these depends on the row and the tokens before it only, not on earlier calls.
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
    """Whether a processor looks at the values of logits only, row by row."""
    # Exactly these classes: a subclass may do anything.
    return type(processor) in _BY_VALUE


def may_keep_state(processors: Iterable[object]) -> bool:
    """Whether any of these processors is not known to be pure.

    Processors with state count calls, follow the text or run a model beside the target, as classifier-free guidance
    and watermarks do. They must see each accepted token once and in order, and nothing else.
    """
    return any(type(one) not in _BY_VALUE and type(one) not in _BY_ID for one in processors)


class ProcessorsByValue:
    """A list of processors that look at values only.

    It is faster than `LogitsProcessorList`, which inspects the signature of each processor in every call, and than
    `TopKLogitsWarper`, which sorts more of a large vocabulary than it has to.
    """

    def __init__(self, processors: list):
        self._processors = processors
        self._top_k_first = _top_k_first(processors)

    def __bool__(self) -> bool:
        return bool(self._processors)

    @property
    def most_kept(self) -> int | None:
        """The most tokens of a row that can keep a probability, ties aside (None: all)."""
        return min((one.top_k for one in self._processors if type(one) is TopKLogitsWarper), default=None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process scores, fp32 `[m, V]`. `input_ids` is passed on; no processor here reads it."""
        for one in self._processors:
            scores = _keep_top_k(one, scores) if type(one) is TopKLogitsWarper else one(input_ids, scores)
        return scores

    @property
    def most_looked_at(self) -> int | None:
        """The number of a row's most probable tokens that `sparse` needs; None if it does not apply."""
        # One more than are kept, to see whether it ties with the last of them.
        return None if self._top_k_first is None else self._top_k_first + 1

    def sparse(self, scores: torch.Tensor, best: torch.Tensor) -> list[SparseDistribution | None]:
        """The softmax of processed scores, without processing whole rows: the same tokens with the same weights, up to
        the rounding of sums. Reads the host's memory.

        Args:
            scores: fp32 `[m, V]`.
            best: int64 `[m, most_looked_at]`: the most probable tokens of each row, in descending order.

        Returns:
            For each row its tokens in ascending order. None if tokens tie for a top-k's last place (all of them are
            kept), if any tie before a processor that sorts, or if a score is not finite.
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
    """The `k` of a top-k that comes first, or after temperatures, which keep a row's order; None if there is none.
    Later processors never bring a forbidden token back."""
    if any(getattr(one, "filter_value", -torch.inf) != -torch.inf for one in processors):
        return None
    rest = itertools.dropwhile(lambda one: type(one) is TemperatureLogitsWarper, processors)
    first = next(rest, None)
    return first.top_k if type(first) is TopKLogitsWarper else None


def _keep_top_k(warper: TopKLogitsWarper, scores: torch.Tensor) -> torch.Tensor:
    """Do what `TopKLogitsWarper` does: replace values below the k-th largest of their row; keep ties."""
    if warper.top_k >= scores.shape[-1]:
        return scores
    kept = top_k_ids(scores, warper.top_k)
    return torch.where(scores < scores.gather(1, kept[:, -1:]), warper.filter_value, scores)


def divide(processors: list) -> tuple[LogitsProcessorList, ProcessorsByValue]:
    """Divide processors, in their order, into those up to the last one that looks at token ids, and the rest, which
    look at values only."""
    cut = max((index + 1 for index, one in enumerate(processors) if not looks_at_values_only(one)), default=0)
    return LogitsProcessorList(processors[:cut]), ProcessorsByValue(processors[cut:])


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index, int64 `[1]`, in proportion to weights `[n]`, with torch's default generator.

    Inverts the cumulative sum in fp64, with one random number; `torch.multinomial` uses `n`. An index of weight 0 is
    never drawn, as it adds nothing to the sum.
    """
    index, _ = draw_with_weight(weights)
    return index


def draw_with_weight(weights: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """`draw`, with the weight of the drawn index (None on a device that would be waited for). On the host, wide rows
    are drawn in two steps: a block by the blocks' sums, then an index in it."""
    if not is_host_memory(weights.device):
        return draw_of_rows(weights), None
    n, start, end = weights.shape[0], 0, weights.shape[0]
    if n >= _FEWEST_WIDE_COLUMNS:
        blocks = n // _DRAWN_BLOCK
        sums = weights[: blocks * _DRAWN_BLOCK].view(blocks, _DRAWN_BLOCK).sum(-1).tolist()
        start = _DRAWN_BLOCK * draw_place([*sums, weights[blocks * _DRAWN_BLOCK :].sum().item()])
        end = min(start + _DRAWN_BLOCK, n)
    block = weights[start:end].tolist()
    place = draw_place(block)
    return torch.tensor([start + place], device=weights.device), block[place]


# With fewer columns than this, searching for the columns that count takes longer than using all.
_FEWEST_WIDE_COLUMNS = 1024
# Columns in a block. A large vocabulary then has about as many blocks as a block has weights.
_DRAWN_BLOCK = 256


def few_columns(is_wanted: torch.Tensor) -> torch.Tensor | None:
    """The columns, int64 `[m]`, that are True in `[n]`, if they are so few that using only them pays, as after a top-k
    over a large vocabulary. None otherwise, and on a device that would be waited for."""
    if not is_host_memory(is_wanted.device) or is_wanted.shape[0] < _FEWEST_WIDE_COLUMNS:
        return None
    wanted = is_wanted.nonzero().squeeze(1)
    return wanted if 0 < wanted.shape[0] <= is_wanted.shape[0] // 8 else None


def draw_of_rows(weights: torch.Tensor) -> torch.Tensor:
    """`draw` for each row of weights `[…, n]`: int64 `[…, 1]`. Does not wait for the device."""
    if torch.are_deterministic_algorithms_enabled():
        # torch has no deterministic cumulative sum on GPUs.
        return _race(weights).argmin(-1, keepdim=True)
    cumulative = weights.double().cumsum(-1)
    uniform = torch.rand(*weights.shape[:-1], 1, dtype=torch.float64, device=weights.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
    # Rounding can only pass the end of the last positive weight.
    return torch.minimum(index, (cumulative < cumulative[..., -1:]).sum(-1, keepdim=True))


def draw_place(weights: list[float]) -> int:
    """`draw` on the host, in fp64: for some hundred weights this is quicker than ten small operations."""
    cumulative = list(itertools.accumulate(weights))
    uniform = torch.rand(1, dtype=torch.float64, device="cpu").item()
    return min(bisect_right(cumulative, uniform * cumulative[-1]), bisect_left(cumulative, cumulative[-1]))


def draw_several(weights: torch.Tensor, count: int, block: int = 128) -> torch.Tensor:
    """Draw several indices of each row without replacement, each in proportion to the remaining weights.

    If each index gets an exponentially distributed time whose rate is its weight, the indices in the order of their
    times are such a draw. In a wide row, blocks get times first, at the rates of their sums: the first `count` indices
    then lie in the first `count` blocks, and within a block the first index has the block's time and the others follow
    it as if they had started then, as exponential times have no memory. So few random numbers are drawn. They are
    fp64, as fp32 is too coarse for small weights.

    Args:
        weights: fp32 `[m, n]`, not negative.
        count: the number of indices, at most `n`.
        block: columns in a block.

    Returns:
        int64 `[m, count]`: columns in the order of the draws. Those of weight 0 come last, in any order.
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
