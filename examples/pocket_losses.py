"""What the pocket models learn from: the next token, and for those that draft, what the target says of it."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from pocket_text import VOCABULARY_SIZE
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from hf_dynspec import EagleDrafter

# Of the drafters' losses, the share of the cross entropy on the text; the rest is divergence from the target.
DATA_SHARE = 0.2
# Draft steps that an EAGLE head is trained for, reading its own outputs after the first.
EAGLE_STEPS = 3

# Of token ids and the target's hidden states there, `[windows, length]` and `[windows, length, hidden]`: for each
# window a drafter's own hidden states, `[rows, hidden]` for each of its steps. A step's rows belong to the last so
# many tokens.
Draft = Callable[[Tensor, Tensor], Iterable[list[Tensor]]]


@dataclass(frozen=True)
class Candidates:
    """The tokens that one training step scores, and how to make their softmax stand for the whole vocabulary's.

    Attributes:
        token_ids: unique ids, `[candidates]`.
        log_weights: the log of how many tokens each candidate stands for, `[candidates]`; added to its logit.
        labels: where in `token_ids` each label of the step lies, in the shape of the labels.
    """

    token_ids: Tensor
    log_weights: Tensor
    labels: Tensor


class CandidateSampler:
    """Draws the tokens to score in a training step, because scoring all 98,304 would take most of the time.

    The most common tokens and the step's labels are always scored. A uniform sample of the others estimates their part
    of the softmax's denominator: each sampled token stands for as many as were left out.
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
        positions: where among the candidates the text's own tokens lie, `[rows]`.
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
    # The drafters have the target's embedding, which stays as it is.
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
    """What a small model says after every prefix of the windows."""
    return lambda token_ids, _: ([hidden] for hidden in hidden_states(drafter, token_ids))


def eagle_drafts(head: EagleDrafter) -> Draft:
    """What an EAGLE head drafts after every prefix of the windows, step by step (EAGLE-3's training-time test; Li et
    al., 2025, section 3.2). It drafts nothing after a single token."""

    def draft(token_ids: Tensor, features: Tensor) -> Iterator[list[Tensor]]:
        for window, hidden in zip(token_ids, features, strict=True):
            # Its norms do not mix dtypes, and its matrices are too small to gain by bfloat16.
            with torch.autocast("cpu", enabled=False):
                steps = [step.hidden for step in head.unroll(window, hidden, EAGLE_STEPS)]
            yield steps

    return draft
