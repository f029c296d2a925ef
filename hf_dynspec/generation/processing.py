"""Logits processors, divided into those that must know which token a column stands for and those that need not."""

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
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

from ..kernels import top_k_ids

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

# These look at token ids, and give each sequence of a batch what they would give it alone. Others, such as a user's
# own or one that asks a user's function, may count on the one sequence that `generate` was given.
_BY_SEQUENCE = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)


def take_batches(processors: list) -> bool:
    """Whether all of these processors may be given several sequences at once."""
    return all(type(one) in _BY_VALUE or type(one) in _BY_SEQUENCE for one in processors)


class ProcessorsByValue:
    """Processors that look at values only, one after another.

    `LogitsProcessorList` inspects the signature of each processor in every call, which takes longer than most of them
    do, and `TopKLogitsWarper` sorts more of a large vocabulary than it has to.
    """

    def __init__(self, processors: list):
        self._processors = processors

    def __bool__(self) -> bool:
        return bool(self._processors)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Process scores, fp32 `[m, V]`; `input_ids` is passed on, and none of them reads it."""
        for one in self._processors:
            scores = _keep_top_k(one, scores) if type(one) is TopKLogitsWarper else one(input_ids, scores)
        return scores


def _keep_top_k(warper: TopKLogitsWarper, scores: torch.Tensor) -> torch.Tensor:
    """What a `TopKLogitsWarper` does: values below the k-th largest of their row are replaced, ties are kept."""
    kept = top_k_ids(scores, min(warper.top_k, scores.shape[-1]))
    return scores.masked_fill(scores < scores.gather(1, kept[:, -1:]), warper.filter_value)


def divide(processors: list) -> tuple[LogitsProcessorList, ProcessorsByValue]:
    """Divide processors, in their order, into a first part that ends with the last one that looks at token ids, and
    the rest, which looks at values only."""
    cut = max((index + 1 for index, one in enumerate(processors) if type(one) not in _BY_VALUE), default=0)
    return LogitsProcessorList(processors[:cut]), ProcessorsByValue(processors[cut:])


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index, int64 `[1]`, in proportion to weights `[n]`, with torch's default generator.

    Inverts the cumulative sum in fp64, which takes one random number where `torch.multinomial` takes `n`. An index of
    weight 0 is never drawn, as it adds nothing to the sum.
    """
    cumulative = weights.double().cumsum(-1)
    uniform = torch.rand(1, dtype=torch.float64, device=weights.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[-1:], right=True)
    # Rounding can only pass the end of the last positive weight.
    return torch.minimum(index, (cumulative < cumulative[-1:]).sum(-1, keepdim=True))
