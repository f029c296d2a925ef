"""Whether sampled text follows the target's distribution.

`uniform_numbers` turns every token into a number that is uniform on [0, 1] exactly if the token was drawn from the
target's distribution given all tokens before it, and independent of the numbers before it (Rosenblatt, 1952).
"""

from typing import Any

import torch
from models import prompt
from scipy import stats as scipy_stats
from transformers import LogitsProcessorList, PreTrainedModel

# Of 10,000 correct programs one would fail a test. Seeds are fixed.
FALSE_ALARM = 1e-4


def processors_of(target: PreTrainedModel, input_ids: Any = None, **arguments: Any) -> LogitsProcessorList:
    """The processors that `generate` makes of its arguments."""
    input_ids = prompt(2, vocabulary=12) if input_ids is None else input_ids
    made = []
    get_logits_processor = target._get_logits_processor
    target._get_logits_processor = lambda *args, **named: made.append(get_logits_processor(*args, **named)) or made[0]
    try:
        target.generate(input_ids, **{"do_sample": True, "max_new_tokens": 1, **arguments})
    finally:
        del target._get_logits_processor
    return made[0]


@torch.no_grad()
def uniform_numbers(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    processors: LogitsProcessorList,
    text: torch.Tensor,
    prompt_length: int,
) -> torch.Tensor:
    """fp64 `[n]`: for each new token of a text `[1, m]` a number that is uniform if the token follows the target.

    Tokens are ordered by how much more the drafter prefers them, so that a text that leans towards the drafter, or
    away from it, moves the numbers to one side.
    """
    logits, drafter_logits = target(text).logits[0].float(), drafter(text).logits[0].float()
    numbers = []
    for end in range(prompt_length, text.shape[1]):
        probabilities = processors(text[:, :end], logits[None, end - 1].clone()).softmax(-1)[0].double()
        order = (drafter_logits[end - 1].log_softmax(-1) - logits[end - 1].log_softmax(-1)).argsort()
        token = text[0, end]
        assert probabilities[token] > 0, "a token came out that the target never says"
        below = probabilities[order[: int((order == token).nonzero())]].sum()
        numbers.append(below + probabilities[token] * torch.rand((), dtype=torch.float64))
    return torch.stack(numbers)


def uniformity(numbers: torch.Tensor) -> float:
    """The smaller p-value of two chi-square tests, times two: of the numbers, and of each with the one after it."""
    n = numbers.shape[0]
    counts = torch.histc(numbers, min(20, n // 10), 0, 1)
    width = 5 if n >= 400 else 3
    steps = (numbers * width).long().clamp(0, width - 1)
    pairs = torch.zeros(width, width)
    pairs.index_put_((steps[0 : n - n % 2 : 2], steps[1::2]), torch.ones(()), accumulate=True)
    return 2 * min(float(scipy_stats.chisquare(one.flatten().numpy()).pvalue) for one in (counts, pairs))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor, at_least: int = 3) -> float:
    """The p-value of counts of events with these probabilities; 0 if an impossible one occurred.

    Events that are expected fewer than five times are taken together. `at_least` so many kinds must be left.
    """
    counts, probabilities = counts.flatten().double(), probabilities.flatten().double()
    expected = probabilities / probabilities.sum() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    kept = expected > 0
    assert kept.sum() >= at_least, "too few kinds of events to tell distributions apart"
    return float(scipy_stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue)
