"""Sampling follows the target's distribution exactly, under processors, whatever the drafter and the policy.

Two kinds of evidence, both with fixed seeds and with a false-alarm probability of `FALSE_ALARM` for each test:

- The first new tokens of many calls are counted against their probabilities, which are enumerated.
- In long texts every token is turned into a number that is uniform on [0, 1] exactly if the token was drawn from the
  target's distribution given all tokens before it, and independent of the numbers before it (Rosenblatt, 1952).
"""

from collections.abc import Callable

import draft_trees
import pytest
import torch
from draft_trees import Path, drawn_tree, verify
from eagle_heads import random_head
from models import POLICY_CASES, REMEMBERING, TERRIBLE, RandomShortlist, perturbed, prompt, tiny
from pocket import POCKET
from scipy import stats as scipy_stats
from transformers import (
    AutoTokenizer,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_dynspec import (
    DynSpecAssistant,
    EagleDrafter,
    FrequencyShortlist,
    InContextShortlist,
    ScreenShortlist,
    TargetError,
    TreeConfig,
    UnionShortlist,
    devices,
)
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint
from hf_dynspec.drafting import trees as tree_module
from hf_dynspec.drafting.automatic import AutomaticDrafting
from hf_dynspec.drafting.processors import ProcessorsByValue, draw, draw_several, few_columns
from hf_dynspec.drafting.token_choice import TokenChoice
from hf_dynspec.generation import acceptance, decoding
from hf_dynspec.kernels import top_k_ids
from hf_dynspec.protocol import Candidates, Shortlist, SparseDistribution

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
    "screen": lambda: ScreenShortlist(rank=3, candidates=4),
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


def sample(target, input_ids, assistant, arguments, new_tokens: int, more: tuple = ()) -> torch.Tensor:
    return target.generate(
        input_ids,
        max_new_tokens=new_tokens,
        do_sample=True,
        assistant_model=assistant,
        logits_processor=LogitsProcessorList([ForbidEos(), *more]),
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


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor, at_least: int = 8) -> float:
    """The p-value of counts, with events that are expected fewer than five times taken together, and then `at_least`
    so many kinds. 0 where something came out that cannot."""
    expected = probabilities.flatten() / probabilities.sum() * counts.sum()
    counts = counts.flatten().double()
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    kept = expected > 0
    assert kept.sum() >= at_least
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
def test_every_token_of_long_texts(policy, processors, target, drafter, monkeypatch):
    shortened = [0]
    of_the_package = ProcessorsByValue.few

    def few(self, scores, best):
        left = of_the_package(self, scores, best)
        shortened[0] += left != [None] * len(left)
        return left

    monkeypatch.setattr(ProcessorsByValue, "few", few)
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, num_assistant_tokens=2)
    numbers = sampled_numbers(target, drafter, assistant, PROCESSORS[processors])
    assert numbers.shape == (TEXTS * TEXT_LENGTH,)
    assert uniformity(numbers) > FALSE_ALARM
    assert assistant.stats_total.accepted < assistant.stats_total.drafted
    assert (assistant.stats_total.accepted > 0) == (policy != "eos_only")
    # What a top-k leaves is what is drawn from, and not the whole row.
    has_top_k = PROCESSORS[processors].get("top_k") != 0
    assert (shortened[0] >= assistant.stats_total.tokens) == has_top_k


@pytest.mark.parametrize("processors", ["everything", "temperature"])
@pytest.mark.parametrize("ends", ["below a threshold", "by itself"])
def test_every_token_of_long_texts_from_drafts_that_end_early(ends, processors, target, drafter, monkeypatch):
    """By what was drawn so far, which says nothing of how the target will judge it."""
    record = AutomaticDrafting.record

    def record_cheap_drafts(self, round, ended):
        record(self, round._replace(seconds=1.0 + 0.2 * round.steps), ended)

    monkeypatch.setattr(AutomaticDrafting, "record", record_cheap_drafts)
    torch.manual_seed(27)
    arguments = {"num_assistant_tokens": "auto"} if ends == "by itself" else {"num_assistant_tokens": 6}
    threshold = 0.15 if ends == "below a threshold" else None
    assistant = DynSpecAssistant(drafter, "full", target=target, assistant_confidence_threshold=threshold, **arguments)
    numbers = sampled_numbers(target, drafter, assistant, PROCESSORS[processors])
    assert uniformity(numbers) > FALSE_ALARM
    stats = assistant.stats_total
    assert 0 < stats.accepted < stats.drafted < 6 * stats.rounds


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("looks", [True, False], ids=["cpu", "elsewhere"])
@pytest.mark.parametrize("kind", REMEMBERING)
def test_every_token_of_long_texts_under_processors_that_remember(kind, looks, tree, target, drafter, monkeypatch):
    """Also on devices that would be waited for, where the walk does not look at what it comes to."""
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    torch.manual_seed(17)
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=3, tree=tree)
    numbers = []
    for seed in range(TEXTS):
        input_ids = prompt(3, seed, vocabulary=12)
        new = sample(target, input_ids, assistant, {"top_k": 0}, TEXT_LENGTH, (REMEMBERING[kind](target),))
        processors = LogitsProcessorList([ForbidEos(), REMEMBERING[kind](target)])
        text = torch.cat([input_ids, new[None]], dim=1)
        numbers.append(uniform_numbers(target, drafter, processors, text, input_ids.shape[1]))
    assert uniformity(torch.cat(numbers)) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize("lie", ["reports less than it drew from", "argmax drafts", "names other weights"])
def test_wrong_sampling_would_be_noticed(lie, target, drafter, monkeypatch):
    """The negative control: mistakes that speculative sampling is prone to."""
    choose = TokenChoice.__call__

    def wrong(self, logits, shortlist, drafted):
        if lie == "reports less than it drew from":  # so that too much is accepted
            token, used, _ = choose(self, logits, shortlist, drafted)
            return token, torch.where(shortlist.scored_slots == token, used - 1.0, used), None
        if lie == "names other weights":
            _, used, few = choose(self, logits, shortlist, drafted)
            return shortlist.scored_slots[used.argmax(-1, keepdim=True)], used, few
        return shortlist.scored_slots[logits.argmax(-1, keepdim=True)], logits, None

    monkeypatch.setattr(TokenChoice, "__call__", wrong)
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES["full"](), target=target, num_assistant_tokens=2)
    processors = PROCESSORS["top-k" if lie == "names other weights" else "plain"]
    assert uniformity(sampled_numbers(target, drafter, assistant, processors)) < FALSE_ALARM


# Trees ---------------------------------------------------------------------------------------------------------------

WIDE = TreeConfig(total_tokens=10, depth=2, top_k=3)
TREE_CASES = [
    ("full", "temperature"),
    ("full", "top-k"),
    ("full", "top-p"),
    ("full", "repetition penalty"),
    *((policy, "everything") for policy in POLICIES),
]


@pytest.mark.parametrize(("policy", "processors"), TREE_CASES)
def test_every_token_of_long_texts_from_trees(policy, processors, target, drafter):
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, tree=WIDE)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS[processors])) > FALSE_ALARM
    assert assistant.stats_total.accepted < assistant.stats_total.drafted
    assert (len(assistant.stats_total.tokens_per_round) > 2) == (policy != "eos_only")


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
    walk = decoding.walk

    def wrong(candidates, process, do_sample, device):
        def likelier(row, path):
            scores = process(row, path)
            if candidates is not None:
                scores[0, candidates.token_ids[candidates.parents + 1 == row]] += 2.0
            return scores

        return walk(candidates, likelier, do_sample, device)

    monkeypatch.setattr(decoding, "walk", wrong)
    torch.manual_seed(7)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=WIDE)
    assert uniformity(sampled_numbers(target, drafter, assistant, PROCESSORS["plain"])) < FALSE_ALARM


# Every draw is made from a table here, so that a thousand rounds take seconds.
Table = Callable[[Path], torch.Tensor]
ROUNDS = 1200


def table(seed: int, vocabulary: int, sharpness: float, possible: int | None = None) -> Table:
    """Probabilities of the token after every path, the same each time; only so many of them are not 0."""
    known: dict[Path, torch.Tensor] = {}

    def probabilities(path: Path) -> torch.Tensor:
        if path not in known:
            generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
            logits = torch.randn(vocabulary, generator=generator) * sharpness
            if possible is not None:
                logits[torch.randperm(vocabulary, generator=generator)[possible:]] = -torch.inf
            known[path] = logits.softmax(-1)
        return known[path]

    return probabilities


def count_texts(p: Table, q: Table, vocabulary: int, length: int, config: TreeConfig) -> tuple[torch.Tensor, int]:
    """How often every text of `length` tokens came out of rounds that draft by `q` and verify by `p`; and how many
    tokens of drafts were accepted below the first level."""
    counts, deep = torch.zeros((vocabulary,) * length), 0
    for _ in range(ROUNDS):
        text: Path = ()
        while len(text) < length:
            candidates = drawn_tree(lambda path, text=text: q((*text, *path)), config)
            outcome = verify(
                candidates,
                lambda row, path, text=text: p((*text, *path[0].tolist())).log().unsqueeze(0),
                True,
            )
            deep += max(0, outcome.accepted - 1)
            text = (*text, *outcome.token_ids.tolist())
        counts[text[:length]] += 1
    return counts, deep


def probabilities_of_texts(p: Table, vocabulary: int, length: int, path: Path = ()) -> torch.Tensor:
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    return torch.stack(
        [
            p(path)[token].double() * probabilities_of_texts(p, vocabulary, length - 1, (*path, token))
            for token in range(vocabulary)
        ]
    )


def mixture(first: Table, second: Table, share: float) -> Table:
    return lambda path: (1 - share) * first(path) + share * second(path)


# The size of the vocabulary, the target, the drafter, and how many successive tokens are counted together.
TABLES = {
    "far apart": (4, table(1, 4, 1.5), table(2, 4, 1.5), 3),
    "sure of the wrong": (5, table(1, 5, 1.5), table(51, 5, 1.5), 2),
    "near": (5, table(1, 5, 1.0), mixture(table(1, 5, 1.0), table(2, 5, 1.0), 0.3), 2),
    "fewer tokens than children": (5, table(3, 5, 1.0), table(4, 5, 1.0, possible=2), 2),
    "the target says few": (5, table(5, 5, 1.0, possible=3), table(6, 5, 1.0), 2),
    "one token": (4, table(7, 4, 1.0), table(8, 4, 1.0, possible=1), 2),
    "a vocabulary of two": (2, table(9, 2, 1.0), table(10, 2, 1.0), 4),
    "a wide vocabulary": (700, table(11, 700, 3.0), table(12, 700, 2.0), 1),
}
WALKS = [(name, True) for name in TABLES] + [("far apart", False), ("fewer tokens than children", False)]


@pytest.mark.parametrize(("name", "is_host_memory"), WALKS)
def test_texts_from_drawn_trees(name, is_host_memory, monkeypatch):
    """Several successive tokens together, over as many rounds as they take; by a walk that looks at values as it goes,
    as on a CPU, and by one that does not."""
    if not is_host_memory:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    torch.manual_seed(13)
    vocabulary, p, q, length = TABLES[name]
    counts, deep = count_texts(p, q, vocabulary, length, TreeConfig(total_tokens=14, depth=1, top_k=4))
    assert chi_square(counts, probabilities_of_texts(p, vocabulary, length)) > FALSE_ALARM
    assert deep > 20


def unscaled(q: torch.Tensor, columns: torch.Tensor, is_child: torch.Tensor) -> torch.Tensor:
    is_elder = torch.zeros(columns.shape[0], q.shape[0], dtype=torch.bool)
    for child, column in enumerate(columns.tolist()):
        is_elder[child + 1 :, column] = True
    return torch.nn.functional.pad(torch.where(is_elder, 0.0, q), (0, 1))


def with_elders(q: torch.Tensor, columns: torch.Tensor, is_child: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(q.expand(columns.shape[0], -1), (0, 1))


MISTAKES = {
    "what is left is not scaled": (acceptance, "_without_elders", unscaled),
    "elders are not left out": (acceptance, "_without_elders", with_elders),
    "the order is lost": (draft_trees, "draw_several", lambda *args: draw_several(*args).sort().values),
    # As EAGLE-2 chooses its nodes.
    "a token has a say": (tree_module, "chances_of_draws", lambda probabilities: (probabilities.log(),) * 2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_drawn_trees_would_be_noticed(mistake, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(*MISTAKES[mistake])
    torch.manual_seed(13)
    vocabulary, p, q, _ = TABLES["sure of the wrong"]
    counts, _ = count_texts(p, q, vocabulary, 1, TreeConfig(total_tokens=5, depth=1, top_k=4))
    assert chi_square(counts, probabilities_of_texts(p, vocabulary, 1), at_least=3) < FALSE_ALARM


def test_a_drafter_that_is_the_target_is_always_right():
    """The first child is accepted, and so the whole path of first children."""
    torch.manual_seed(0)
    p, config = table(1, 6, 1.0), TreeConfig(total_tokens=20, depth=3, top_k=3)
    for _ in range(300):
        candidates = drawn_tree(p, config)
        outcome = verify(candidates, lambda row, path: p(tuple(path[0].tolist())).log().unsqueeze(0), True)
        assert outcome.accepted == 4
        node = -1
        for row in outcome.rows[1:].tolist():
            node = int((candidates.parents == node).nonzero()[0])
            assert row == node + 1


def test_slots_that_do_not_count_are_not_accepted():
    """An unoccupied slot may hold the id of one that counts, or of a token that the target likes."""
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.5, 0.4])
    ids, q = torch.tensor([[1, 1, 2, 0]]), torch.tensor([[0.0, 0.3, 0.0, 0.7]])
    counts = torch.zeros(3)
    for _ in range(ROUNDS):
        growth = tree_module.DrawnTreeGrowth(TreeConfig(5, 0, 4), 1)
        growth.add_level(ids, q, draw_several(q, 4))
        token_ids, scores, parents, depths = growth.choose()
        assert (scores > -torch.inf).tolist() == [True, True, False, False]
        candidates = Candidates(token_ids, (Shortlist(ids[0], 0),), (), parents, depths, scores, growth.draws())
        counts[verify(candidates, lambda row, path: p.log().unsqueeze(0), True).token_ids[0]] += 1
    assert chi_square(counts, p, at_least=3) > FALSE_ALARM


@pytest.mark.parametrize("tree", [WIDE, TreeConfig(3, 4, 3), TreeConfig(2, 0, 1), TreeConfig(40, 3, 1)])
def test_drawn_trees_keep_to_their_shape(tree, target, drafter):
    """Also where there are fewer nodes than levels."""
    torch.manual_seed(1)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
    assert sample(target, prompt(3, vocabulary=12), assistant, {}, 60).shape == (60,)
    stats = assistant.stats
    assert 0 < stats.accepted < stats.drafted <= stats.rounds * (tree.total_tokens - 1)
    assert len(stats.tokens_per_round) - 1 <= min(tree.depth + 1, tree.total_tokens - 1) + 1


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


AFTER_TOP_K = {
    "nothing": [],
    "top-p": [TopPLogitsWarper(0.7)],
    "min-p": [MinPLogitsWarper(0.2)],
    "typical": [TypicalLogitsWarper(0.8)],
    "epsilon, eta": [EpsilonLogitsWarper(0.03), EtaLogitsWarper(0.05)],
    "another top-k": [TopKLogitsWarper(4)],
    "normalisation": [LogitNormalization()],
}


def few_of(processors, scores):
    """What `ProcessorsByValue.few` tells of rows."""
    return processors.sparse(scores, top_k_ids(scores, processors.most_looked_at))


@pytest.mark.parametrize("after", AFTER_TOP_K)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.3, 1.7])
def test_what_a_top_k_leaves_is_processed_alone_and_alike(temperature, ties, after):
    """The tokens that are left are those that are left of the whole row, and as probable."""
    warmth = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    processors = ProcessorsByValue([*warmth, TopKLogitsWarper(11), *AFTER_TOP_K[after]])
    shortened = 0
    scores = torch.randn(20, 1500, generator=torch.Generator().manual_seed(0)) * 2
    if ties:
        scores = scores.mul(64).round() / 64
    before = scores.clone()
    rows = few_of(processors, scores)
    assert torch.equal(scores, before)
    for few, of_row in zip(rows, processors(None, scores).softmax(-1), strict=True):
        if few is None:
            continue
        shortened += 1
        actual = torch.zeros_like(of_row)
        actual[few.token_ids] = torch.tensor(few.weights)
        assert few.token_ids == sorted(set(few.token_ids))
        assert torch.equal(actual > 0, of_row > 0)
        torch.testing.assert_close(actual, of_row, rtol=1e-5, atol=0)
    # They write nothing into what they are given, which may be the logits that others are shown.
    assert torch.equal(scores, before)
    # Where tokens tie for the last place, all of them are kept, and how many they are says the whole row alone.
    assert (0 < shortened < 20) if ties else shortened == 20


def test_where_too_little_is_known_the_whole_row_is_processed():
    scores = torch.randn(1, 1500, generator=torch.Generator().manual_seed(0))
    top_k = TopKLogitsWarper(11)
    assert few_of(ProcessorsByValue([top_k]), scores) != [None]
    for processors in (
        [],
        [TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(0.7), top_k],  # whose sum is of the whole row
        [TopKLogitsWarper(11, filter_value=-9.0)],
        [top_k, TopPLogitsWarper(0.7, filter_value=-9.0)],
    ):
        assert ProcessorsByValue(processors).most_looked_at is None
    for column, value in ((0, torch.nan), (7, torch.inf)):
        spoilt = scores.clone()
        spoilt[0, column] = value
        assert few_of(ProcessorsByValue([top_k]), spoilt) == [None]
    forbidden = torch.full_like(scores, -torch.inf)
    forbidden[0, :5] = 1.0
    assert few_of(ProcessorsByValue([top_k]), forbidden) == [None]


@pytest.mark.parametrize("shortlist_is_few", [False, True])
@pytest.mark.parametrize("q_of", ["all tokens", "few tokens"])
def test_a_chain_is_verified_alike_by_few_weights_and_by_all(q_of, shortlist_is_few):
    """Speculative sampling over a wide vocabulary of which a top-k leaves six tokens: accepted, refused and drawn anew
    in the target's proportions, whether it is shown the row or what is left of it; and what is left of the draft's."""
    torch.manual_seed(21)
    width, rounds = 1200, 3000
    left = torch.tensor([3, 40, 41, 700, 1100, 1199])
    of_left = torch.tensor([1.0, 0.2, 2.0, 1.5, -1.0, 0.0])
    row = torch.full((1, width), -torch.inf).index_copy_(1, left, of_left.unsqueeze(0))
    logits = torch.full((width,), -torch.inf) if q_of == "few tokens" else torch.full((width,), -3.0)
    logits[torch.tensor([3, 40, 900, 1100])] = torch.tensor([3.0, 4.0, 4.0, 1.0])
    expected = of_left.softmax(-1).double() * rounds
    possible = (logits > -torch.inf).nonzero().squeeze(1)
    few = SparseDistribution(possible.tolist(), logits[possible].exp().tolist())
    drawn_from = (few if shortlist_is_few else None,)
    for processed in (row, SparseDistribution(left.tolist(), of_left.exp().tolist())):
        counts, accepted = torch.zeros(len(left)), 0
        for _ in range(rounds):
            drafted = draw(logits.softmax(-1))
            chain = Candidates(drafted, (Shortlist(torch.arange(width), 0),), (logits,), drawn_from=drawn_from)
            outcome = verify(chain, lambda row, path, processed=processed: processed, True)
            counts += outcome.token_ids[0] == left
            accepted += outcome.accepted
        assert int(counts.sum()) == rounds and 0 < accepted < rounds
        assert chi_square(counts, expected, at_least=6) > FALSE_ALARM


@pytest.mark.parametrize("processed_is_few", [False, True])
@pytest.mark.parametrize("shortlist_is_few", [False, True])
def test_drafts_of_a_drafter_that_computes_no_numbers_have_no_say(shortlist_is_few, processed_is_few):
    """As one of 16 bits whose hidden states overflow: its logits are NaN."""
    torch.manual_seed(21)
    rounds, drafted, p = 2000, torch.tensor([0, 2, 3]), torch.tensor([0.3, 0.1, 0.4, 0.2])
    logits = torch.full((4,), -torch.inf).index_fill(0, drafted, torch.nan)
    few = SparseDistribution(drafted.tolist(), [torch.nan] * 3) if shortlist_is_few else None
    chain = Candidates(drafted[:1], (Shortlist(torch.arange(4), 0),), (logits,), drawn_from=(few,))
    processed = SparseDistribution([0, 1, 2, 3], p.tolist()) if processed_is_few else p.log().unsqueeze(0)
    drawn = [verify(chain, lambda row, path: processed, True).token_ids[0] for _ in range(rounds)]
    assert chi_square(torch.bincount(torch.stack(drawn), minlength=4), p.double(), at_least=4) > FALSE_ALARM


class BarsAll(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)


def one_row(value: float) -> Callable[[PreTrainedModel], None]:
    return lambda target: target.lm_head.weight[7].fill_(value)


@pytest.mark.parametrize("looks", [True, False], ids=["looks at numbers", "waits for none"])
@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "spoil", [one_row(torch.nan), one_row(torch.inf), None], ids=["NaN", "infinity", "all barred"]
)
def test_where_plain_generate_has_nothing_to_draw_from_neither_is_anything_drawn(
    spoil, tree, top_k, looks, monkeypatch
):
    """As by fp16 logits that overflow. The next call goes on as if nothing had happened."""
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    target, drafter = tiny("llama", tie_word_embeddings=False), tiny("llama")
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
    sound = target.lm_head.weight.detach().clone()
    barred = LogitsProcessorList([] if spoil else [BarsAll()])
    settings = {"max_new_tokens": 6, "do_sample": True, "top_k": top_k, "logits_processor": barred}
    with torch.no_grad():
        if spoil:
            spoil(target)
        with pytest.raises(RuntimeError, match="probability"):
            target.generate(prompt(), **settings)
        with pytest.raises(TargetError, match="no token can be drawn"):
            target.generate(prompt(), assistant_model=assistant, **settings)
        # Criteria that look tokens up are not shown what stands for none.
        stops = {"stop_strings": ["zz"], "tokenizer": AutoTokenizer.from_pretrained(POCKET / "target")}
        with pytest.raises(TargetError, match="no token can be drawn"):
            target.generate(prompt(), assistant_model=assistant, **settings, **stops)
        target.lm_head.weight.copy_(sound)
    plain = target.generate(prompt(), max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt(), max_new_tokens=12, do_sample=False, assistant_model=assistant), plain)


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


def test_few_possible_tokens_are_looked_at_alone():
    possible = torch.tensor([0, 7, 1999, 3998, 3999])
    is_possible = torch.zeros(4000, dtype=torch.bool).index_fill(0, possible, True)
    assert few_columns(is_possible).tolist() == possible.tolist()
    # Where many are possible, none, or a device would be waited for, nothing is looked at.
    assert few_columns(torch.ones(4000, dtype=torch.bool)) is None
    assert few_columns(torch.zeros(4000, dtype=torch.bool)) is None
    assert few_columns(torch.zeros(4000, dtype=torch.bool, device="meta")) is None


@pytest.mark.parametrize("n", [700, 1024, 4000, 4096 + 3])
def test_a_wide_draw_by_blocks_follows_the_weights(n):
    """Among few tokens that weigh something, in the first block, at its end, in the last one and in what is none."""
    torch.manual_seed(0)
    possible = torch.tensor([0, 255, 256, n // 2, n - 2, n - 1])
    weights = torch.zeros(n).index_copy_(0, possible, torch.tensor([0.1, 1.0, 0.5, 2.0, 0.3, 0.7]))
    drawn = torch.cat([draw(weights) for _ in range(4000)])
    counts = (drawn.unsqueeze(1) == possible).sum(0)
    assert int(counts.sum()) == 4000
    expected = weights[possible].double() / weights.sum() * 4000
    assert chi_square(counts, expected, at_least=5) > FALSE_ALARM


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0 - 2**-53])
def test_a_wide_draw_at_the_edges_of_the_uniform_number(value, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, value, dtype=torch.float64))
    weights = torch.zeros(3001)
    weights[[700, 2999]] = 0.25
    assert int(draw(weights)) == (700 if value < 0.5 else 2999)


def test_several_draws_follow_one_another_without_replacement():
    """All ordered triples; a row of one block, and one whose blocks race, with an end that is no block."""
    torch.manual_seed(2)
    for columns, block in ((5, 128), (11, 2)):
        weights = torch.rand(columns) ** 3
        weights[[1, 4]] = 0.0
        weights = weights / weights.sum()
        drawn = draw_several(weights.expand(20000, -1), 3, block)
        counts = torch.zeros(columns, columns, columns).index_put(tuple(drawn.T), torch.ones(()), accumulate=True)
        expected = torch.zeros_like(counts, dtype=torch.float64)
        w = weights.double()
        for a, b, c in torch.cartesian_prod(*[torch.arange(columns)] * 3).tolist():
            if len({a, b, c}) == 3:
                expected[a, b, c] = w[a] * w[b] / (1 - w[a]) * w[c] / (1 - w[a] - w[b])
        assert chi_square(counts, expected, at_least=6) > FALSE_ALARM


@pytest.mark.parametrize("block", [2, 128])
def test_what_is_impossible_is_drawn_last(block):
    torch.manual_seed(2)
    weights = torch.zeros(50, 9)
    weights[:, [3, 8]] = torch.tensor([0.4, 0.6])
    drawn = draw_several(weights, 4, block)
    assert drawn[:, :2].sort(-1).values.tolist() == [[3, 8]] * 50
    assert all(len(set(row)) == 4 for row in drawn.tolist())


def test_a_draw_has_no_say_in_whether_it_is_made():
    """What is asked before a draw is the same to the bit whatever is drawn, and never rises from one to the next."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(200, 12, generator=generator).softmax(-1)
    asked, accepted = tree_module.chances_of_draws(probabilities)
    assert (asked.diff() <= 0).all() and (accepted <= asked + 1e-6).all() and asked.isfinite().all()
    for place in range(12):
        changed = probabilities.clone()
        changed[:, place] *= 0.3
        assert torch.equal(tree_module.chances_of_draws(changed)[0][:, : place + 1], asked[:, : place + 1])
    probabilities[:, 5:] = 0.0
    assert tree_module.chances_of_draws(probabilities)[0][:, 5:].eq(-torch.inf).all()


def test_sampling_is_reproducible_from_torchs_seed(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICIES["union"](), target=target)
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(sample(target, prompt(3, vocabulary=12), assistant, {}, 60).tolist())
    assert outputs[0] == outputs[1] != outputs[2]
