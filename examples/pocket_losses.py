"""Losses of the pocket models: on the next token, and for drafters also on the target's distribution of it."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from pocket_text import VOCABULARY_SIZE
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from hf_dynspec import EagleDrafter

# The share of the cross entropy on the text in the drafters' losses; the rest is divergence from the target.
DATA_SHARE = 0.2
# Draft steps that an EAGLE head is trained for. After the first it reads its own outputs.
EAGLE_STEPS = 3

# From token ids `[windows, length]` and the target's hidden states `[windows, length, hidden]`: for each window and
# each draft step the drafter's hidden states `[rows, hidden]`, which belong to the last `rows` tokens.
Draft = Callable[[Tensor, Tensor], Iterable[list[Tensor]]]


@dataclass(frozen=True)
class Candidates:
    """The tokens that one training step scores, and weights by which their softmax estimates the vocabulary's.

    Attributes:
        token_ids: unique ids, `[candidates]`.
        log_weights: `[candidates]`, added to the logits: the log of the number of tokens that each stands for.
        labels: the index in `token_ids` of each label of the step, in the shape of the labels.
    """

    token_ids: Tensor
    log_weights: Tensor
    labels: Tensor


class CandidateSampler:
    """Draws the tokens to score in a training step, as scoring all 98,304 would take most of the time.

    The most common tokens and the step's labels are always scored. A uniform sample of the others estimates their part
    of the softmax's denominator.
    """

    def __init__(self, counts: Tensor, common: int, sampled: int, seed: int):
        self.common = counts.argsort(descending=True, stable=True)[:common]
        self.sampled = sampled
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, labels: Tensor) -> Candidates:
        """The candidates for a step whose next tokens are `labels`."""
        certain = torch.zeros(VOCABULARY_SIZE, dtype=torch.bool)
        certain[self.common] = True
        certain[labels.flatten()] = True
        rest = (~certain).nonzero().squeeze(1)
        drawn = rest[torch.randperm(len(rest), generator=self.generator)[: self.sampled]]
        always = certain.nonzero().squeeze(1)
        token_ids = torch.cat([always, drawn])
        log_weights = torch.zeros(len(token_ids))
        log_weights[len(always) :] = math.log(len(rest) / max(len(drawn), 1))
        position = torch.zeros(VOCABULARY_SIZE, dtype=torch.long)
        position[token_ids] = torch.arange(len(token_ids))
        return Candidates(token_ids, log_weights, position[labels])


def hidden_states(model: Qwen3ForCausalLM, token_ids: Tensor) -> Tensor:
    """The final hidden states of `model`, fp32 `[batch, length, hidden]`, without the projection over the
    vocabulary."""
    return model.model(input_ids=token_ids, use_cache=False).last_hidden_state.float()


def candidate_log_probabilities(hidden: Tensor, weight: Tensor, candidates: Candidates) -> Tensor:
    """Log probabilities of the candidates, `[rows, candidates]`; `weight` holds the candidates' rows only."""
    return functional.log_softmax(functional.linear(hidden, weight, candidates.log_weights).float(), dim=-1)


def text_loss(model: Qwen3ForCausalLM, sampler: CandidateSampler, windows: Tensor) -> Tensor:
    """Cross entropy of the windows' next tokens."""
    candidates = sampler.draw(windows[:, 1:])
    weight = model.lm_head.weight[candidates.token_ids]
    losses = []
    # One window at a time keeps the logits inside the processor's cache.
    for hidden, positions in zip(hidden_states(model, windows[:, :-1]), candidates.labels, strict=True):
        losses.append(functional.nll_loss(candidate_log_probabilities(hidden, weight, candidates), positions))
    return torch.stack(losses).mean()


def drafting_loss(drafted: Tensor, wanted: Tensor, positions: Tensor) -> Tensor:
    """A mix of a drafter's cross entropy on the text and its divergence from the target's distribution.

    Args:
        drafted, wanted: log probabilities of the drafter and the target, `[rows, candidates]`.
        positions: the index among the candidates of the text's own tokens, `[rows]`.
    """
    divergence = functional.kl_div(drafted, wanted, reduction="batchmean", log_target=True)
    return DATA_SHARE * functional.nll_loss(drafted, positions) + (1 - DATA_SHARE) * divergence


def distillation_loss(
    target: Qwen3ForCausalLM,
    sampler: CandidateSampler,
    windows: Tensor,
    draft: Draft,
) -> Tensor:
    """The mean loss of a drafter's steps on windows of the text."""
    candidates = sampler.draw(windows[:, 1:])
    # The drafters share the target's embedding, which they do not train.
    weight = target.lm_head.weight.detach()[candidates.token_ids]
    with torch.no_grad():
        features = hidden_states(target, windows[:, :-1])
    losses = []
    for steps, hidden, positions in zip(draft(windows[:, :-1], features), features, candidates.labels, strict=True):
        with torch.no_grad():
            wanted = candidate_log_probabilities(hidden, weight, candidates)
        for outputs in steps:
            rows = len(outputs)
            drafted = candidate_log_probabilities(outputs, weight, candidates)
            losses.append(drafting_loss(drafted, wanted[-rows:], positions[-rows:]))
    return torch.stack(losses).mean()


def independent_drafts(drafter: Qwen3ForCausalLM) -> Draft:
    """The hidden states of a small model after every prefix of the windows."""
    return lambda token_ids, _: ([hidden] for hidden in hidden_states(drafter, token_ids))


def eagle_drafts(head: EagleDrafter) -> Draft:
    """The hidden states of an EAGLE head after every prefix of at least two tokens, step by step (EAGLE-3's
    training-time test; Li et al., 2025, section 3.2)."""

    def draft(token_ids: Tensor, features: Tensor) -> Iterator[list[Tensor]]:
        for window, hidden in zip(token_ids, features, strict=True):
            # Its norms do not mix dtypes, and its matrices are too small to gain by bfloat16.
            with torch.autocast("cpu", enabled=False):
                steps = [step.hidden for step in head.unroll(window, hidden, EAGLE_STEPS)]
            yield steps

    return draft
