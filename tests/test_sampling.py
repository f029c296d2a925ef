"""Sampling follows the target's distribution exactly, under processors, whatever the drafter and the policy.

Two kinds of evidence, both with fixed seeds and with a false-alarm probability of `FALSE_ALARM` for each test:

- The first new tokens of many calls are counted against their probabilities, which are enumerated.
- In long texts every token is turned into a number that is uniform on [0, 1] exactly if the token was drawn from the
  target's distribution given all tokens before it, and independent of the numbers before it (Rosenblatt, 1952).
"""

import pytest
import torch
from eagle_heads import random_head
from models import POLICY_CASES, TERRIBLE, RandomShortlist, perturbed, prompt, tiny
from scipy import stats as scipy_stats
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from hf_dynspec import (
    DynSpecAssistant,
    EagleDrafter,
    FrequencyShortlist,
    InContextShortlist,
    TreeConfig,
    UnionShortlist,
)
from hf_dynspec.drafters.eagle_checkpoint import EagleCheckpoint
from hf_dynspec.generation import decoding
from hf_dynspec.generation.processing import ProcessorsByValue, draw
from hf_dynspec.generation.token_choice import TokenChoice

# Of 10,000 correct programs one would fail such a test.
FALSE_ALARM = 1e-4
VOCABULARY = 14
# Never reached, so that all texts are equally long; as a special token it is still in every shortlist.
UNREACHABLE_EOS = 13
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

PROCESSORS = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "repetition penalty": {"repetition_penalty": 1.8, "top_k": 0},
    "everything": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3},
}
POLICIES = {
    "full": POLICY_CASES["full"],
    "frequency": lambda: FrequencyShortlist(size=5),
    "in_context": lambda: InContextShortlist(6, 1, 1),
    "union": lambda: UnionShortlist(FrequencyShortlist(size=3), InContextShortlist(3, 1, 1, eviction="lru")),
    "random": lambda: RandomShortlist(size=4),
    "eos_only": TERRIBLE["eos_only"],
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Probabilities between clear favourites and long shots, so that acceptance and rejection are both common."""
    model = tiny(seed=1, vocabulary=VOCABULARY, **SMALL)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.9)
    model.generation_config.eos_token_id = UNREACHABLE_EOS
    return model


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target, noise=0.8)


class ForbidEos:
    """A user's own processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, UNREACHABLE_EOS] = -torch.inf
        return scores


def processors_of(target: PreTrainedModel, arguments: dict) -> LogitsProcessorList:
    """The processors that `generate` makes of its arguments, asked for them in the way that it does."""
    made = []
    get_logits_processor = target._get_logits_processor
    target._get_logits_processor = lambda *args, **kwargs: (
        made.append(get_logits_processor(*args, **kwargs)) or made[0]
    )
    try:
        target.generate(
            prompt(2, vocabulary=12),
            do_sample=True,
            max_new_tokens=1,
            logits_processor=LogitsProcessorList([ForbidEos()]),
            **arguments,
        )
    finally:
        del target._get_logits_processor
    return made[0]


@torch.no_grad()
def distribution(target: PreTrainedModel, processors: LogitsProcessorList, text: torch.Tensor) -> torch.Tensor:
    """`[V]`: the target's distribution of the next token."""
    return processors(text, target(text).logits[:, -1].float()).softmax(-1)[0].double()


def sample(target, input_ids, assistant, arguments, new_tokens: int) -> torch.Tensor:
    return target.generate(
        input_ids,
        max_new_tokens=new_tokens,
        do_sample=True,
        assistant_model=assistant,
        logits_processor=LogitsProcessorList([ForbidEos()]),
        **arguments,
    )[0, input_ids.shape[1] :]


# Enumerated ----------------------------------------------------------------------------------------------------------


def enumerate_pairs(target, processors, input_ids: torch.Tensor) -> torch.Tensor:
    """`[V, V]`: the probability of each pair of first new tokens."""
    first = distribution(target, processors, input_ids)
    rows = []
    for token in range(VOCABULARY):
        text = torch.cat([input_ids, torch.tensor([[token]])], dim=1)
        rows.append(first[token] * distribution(target, processors, text))
    return torch.stack(rows)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of counts, with events that are expected fewer than five times taken together. 0 where something
    came out that cannot."""
    expected = probabilities.flatten() / probabilities.sum() * counts.sum()
    counts = counts.flatten().double()
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    kept = expected > 0
    assert kept.sum() >= 8
    return float(scipy_stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue)


def count_pairs(target, assistant, arguments, input_ids: torch.Tensor, samples: int) -> torch.Tensor:
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for _ in range(samples):
        first, second, _ = sample(target, input_ids, assistant, arguments, new_tokens=3).tolist()
        counts[first, second] += 1
    return counts


@pytest.mark.parametrize(("policy", "processors"), [("union", "temperature"), ("random", "everything")])
def test_the_first_two_tokens(policy, processors, target, drafter):
    torch.manual_seed(11)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target)
    arguments = PROCESSORS[processors]
    input_ids = prompt(3, vocabulary=12)
    expected = enumerate_pairs(target, processors_of(target, arguments), input_ids)
    counts = count_pairs(target, assistant, arguments, input_ids, samples=600)
    assert chi_square(counts, expected) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted
    # The test has power: as many draws from the drafter's distribution would be told from the target's.
    foreign = enumerate_pairs(drafter, processors_of(target, arguments), input_ids)
    assert chi_square(torch.distributions.Multinomial(600, foreign.flatten()).sample(), expected) < FALSE_ALARM


# Uniform numbers -----------------------------------------------------------------------------------------------------

TEXTS, TEXT_LENGTH = 4, 200


@torch.no_grad()
def uniform_numbers(target, drafter, processors, text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """fp64 `[n]`: for each new token a number that is uniform if the token follows the target's distribution.

    Tokens are lined up by how much the drafter prefers them, so that output that leans towards the drafter (or away
    from it) moves the numbers to one side.
    """
    logits, drafter_logits = target(text).logits[0].float(), drafter(text).logits[0].float()
    numbers = []
    for end in range(prompt_length, text.shape[1]):
        probabilities = processors(text[:, :end], logits[None, end - 1].clone()).softmax(-1)[0].double()
        order = (drafter_logits[end - 1].log_softmax(-1) - logits[end - 1].log_softmax(-1)).argsort()
        token = text[0, end]
        assert probabilities[token] > 0, "something came out that the target never says"
        place = int((order == token).nonzero())
        below = probabilities[order[:place]].sum()
        numbers.append(below + probabilities[token] * torch.rand((), dtype=torch.float64))
    return torch.stack(numbers)


def uniformity(numbers: torch.Tensor, bins: int = 20) -> float:
    """The smaller p-value of two chi-square tests, times two: of the numbers, and of each with the one after it."""
    counts = torch.histc(numbers, bins, 0, 1)
    steps = (numbers * 5).long().clamp(0, 4)
    pairs = torch.zeros(5, 5)
    pairs.index_put_((steps[0::2], steps[1::2]), torch.ones(()), accumulate=True)
    singles = scipy_stats.chisquare(counts.numpy()).pvalue
    return 2 * min(float(singles), float(scipy_stats.chisquare(pairs.flatten().numpy()).pvalue))


def sampled_numbers(target, drafter, assistant, arguments) -> torch.Tensor:
    processors = processors_of(target, arguments)
    numbers = []
    for seed in range(TEXTS):
        input_ids = prompt(3, seed, vocabulary=12)
        new = sample(target, input_ids, assistant, arguments, TEXT_LENGTH)
        text = torch.cat([input_ids, new[None]], dim=1)
        numbers.append(uniform_numbers(target, drafter, processors, text, input_ids.shape[1]))
    return torch.cat(numbers)


CASES = [(policy, "everything") for policy in POLICIES] + [("frequency", name) for name in PROCESSORS]


@pytest.mark.parametrize(("policy", "processors"), dict.fromkeys(CASES))
def test_every_token_of_long_texts(policy, processors, target, drafter):
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, num_assistant_tokens=2)
    numbers = sampled_numbers(target, drafter, assistant, PROCESSORS[processors])
    assert numbers.shape == (TEXTS * TEXT_LENGTH,)
    assert uniformity(numbers) > FALSE_ALARM
    assert assistant.stats_total.accepted < assistant.stats_total.drafted
    assert (assistant.stats_total.accepted > 0) == (policy != "eos_only")


@pytest.mark.parametrize("lie", ["reports less than it drew from", "argmax drafts"])
def test_wrong_sampling_would_be_noticed(lie, target, drafter, monkeypatch):
    """The negative control: two mistakes that speculative sampling is prone to."""
    choose = TokenChoice.__call__

    def wrong(self, logits, shortlist, drafted):
        if lie == "reports less than it drew from":  # so that too much is accepted
            token, used = choose(self, logits, shortlist, drafted)
            return token, torch.where(shortlist.scored_slots == token, used - 1.0, used)
        return shortlist.scored_slots[logits.argmax(-1, keepdim=True)], logits

    monkeypatch.setattr(TokenChoice, "__call__", wrong)
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES["full"](), target=target, num_assistant_tokens=2)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS["plain"])) < FALSE_ALARM


# Trees ---------------------------------------------------------------------------------------------------------------

WIDE = TreeConfig(total_tokens=10, depth=2, top_k=3)
TREE_CASES = [
    ("full", "temperature"),
    ("full", "top-k"),
    ("full", "top-p"),
    ("full", "repetition penalty"),
    ("frequency", "everything"),
    ("random", "everything"),
]


@pytest.mark.parametrize(("policy", "processors"), TREE_CASES)
def test_every_token_of_long_texts_from_trees(policy, processors, target, drafter):
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, tree=WIDE)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS[processors])) > FALSE_ALARM
    assert assistant.stats_total.accepted < assistant.stats_total.drafted
    assert len(assistant.stats_total.tokens_per_round) > 2


def eagle_of(target: PreTrainedModel, layout: str) -> EagleDrafter:
    """Knows nothing; among so few tokens it is often right."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "target_hidden_size": 16}
    head = random_head(layout, VOCABULARY, features=2, eagle_aux_hidden_state_layer_ids=[0, 1], **shape)
    return EagleDrafter(EagleCheckpoint.from_parts(head.config, head.tensors), target)


@pytest.mark.parametrize(("layout", "tree"), [("eagle2", WIDE), ("eagle3", WIDE), ("eagle3", False)])
def test_every_token_of_long_texts_from_eagle_heads(layout, tree, target, drafter):
    torch.manual_seed(7)
    assistant = DynSpecAssistant(eagle_of(target, layout), "full", target=target, tree=tree, num_assistant_tokens=2)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS["everything"])) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize("processors", ["everything"])
def test_the_first_two_tokens_from_trees(processors, target, drafter):
    torch.manual_seed(11)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=WIDE)
    arguments = PROCESSORS[processors]
    input_ids = prompt(3, vocabulary=12)
    expected = enumerate_pairs(target, processors_of(target, arguments), input_ids)
    counts = count_pairs(target, assistant, arguments, input_ids, samples=600)
    assert chi_square(counts, expected) > FALSE_ALARM
    foreign = enumerate_pairs(drafter, processors_of(target, arguments), input_ids)
    assert chi_square(torch.distributions.Multinomial(600, foreign.flatten()).sample(), expected) < FALSE_ALARM


def test_a_wrong_acceptance_of_trees_would_be_noticed(target, drafter, monkeypatch):
    """The negative control: what the tree holds is accepted more often than it should be."""
    verify = decoding.verify

    def wrong(candidates, process, do_sample, device):
        def likelier(row, path):
            scores = process(row, path)
            if candidates is not None:
                scores[0, candidates.token_ids[candidates.parents + 1 == row]] += 2.0
            return scores

        return verify(candidates, likelier, do_sample, device)

    monkeypatch.setattr(decoding, "verify", wrong)
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=WIDE)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS["plain"])) < FALSE_ALARM


def test_sampling_from_trees_is_reproducible_from_torchs_seed(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICIES["union"](), target=target, tree=WIDE)
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(sample(target, prompt(3, vocabulary=12), assistant, {}, 60).tolist())
    assert outputs[0] == outputs[1] != outputs[2]


# Processors that look at values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 7, 50, 299, 300, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_is_transformers_own(k, ties):
    """With ties at the border, which are all kept; with forbidden tokens; and with more than there are."""
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(k))
    if ties:
        scores = scores.mul(2).round()
    scores[1, :290] = -torch.inf
    scores[2] = 0.5
    before = scores.clone()
    for warper in (
        TopKLogitsWarper(k),
        TopKLogitsWarper(k, filter_value=-9.0),
        TopKLogitsWarper(1, min_tokens_to_keep=k),
    ):
        expected = warper(None, before.clone())
        assert torch.equal(ProcessorsByValue([warper])(None, scores), expected)
        assert torch.equal(scores, before), "the scores that were given must stay as they are"
    assert bool(ProcessorsByValue([TopKLogitsWarper(3)])) and not ProcessorsByValue([])


def test_processors_by_value_follow_one_another(target):
    processors = processors_of(target, {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05})
    by_value = [one for one in processors if not isinstance(one, ForbidEos)]
    assert len(by_value) >= 4
    scores = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    expected = LogitsProcessorList(by_value)(torch.zeros(6, 1, dtype=torch.int64), scores.clone())
    assert torch.equal(ProcessorsByValue(by_value)(torch.zeros(1, 1, dtype=torch.int64), scores.clone()), expected)


# The draw itself -----------------------------------------------------------------------------------------------------


def test_draw_follows_the_softmax_and_never_takes_what_is_impossible():
    torch.manual_seed(3)
    logits = torch.tensor([-torch.inf, 0.0, 1.5, -torch.inf, -1.0, 2.0, -torch.inf])
    counts = torch.bincount(torch.cat([draw(logits.softmax(-1)) for _ in range(4000)]), minlength=7)
    expected = logits.softmax(-1).double() * 4000
    possible = expected > 0
    assert not counts[~possible].any()
    assert scipy_stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0 - 2**-53])
def test_draw_at_the_edges_of_the_uniform_number(value, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, value, dtype=torch.float64))
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    assert int(draw(logits.softmax(-1))) == (1 if value < 0.5 else 3)


def test_sampling_is_reproducible_from_torchs_seed(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICIES["union"](), target=target)
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(sample(target, prompt(3, vocabulary=12), assistant, {}, 60).tolist())
    assert outputs[0] == outputs[1] != outputs[2]
