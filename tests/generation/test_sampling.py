"""Sampling follows the target's distribution exactly, under processors, whatever the drafter and the policy.

Two kinds of evidence, both with fixed seeds and with a false-alarm probability of `FALSE_ALARM` for each test:

- Tokens of 100,000 rounds of the acceptance functions are counted against tables of probabilities.
- Every token of long texts becomes a uniform number (`sampled_texts`).
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from calls import SHAPES, assert_same
from cases import pairwise, representatives
from eagle_heads import drafter_of, random_head
from models import POLICY_CASES, REMEMBERING, TERRIBLE, RandomShortlist, perturbed, prompt, tiny
from pocket import POCKET
from sampled_texts import FALSE_ALARM, chi_square, processors_of, uniform_numbers, uniformity
from torch.nn.functional import pad
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
    FrequencyShortlist,
    InContextShortlist,
    ScreenShortlist,
    TargetError,
    TreeConfig,
    UnionShortlist,
    devices,
)
from hf_dynspec.drafting import trees as tree_module
from hf_dynspec.drafting.processors import ProcessorsByValue, draw, draw_of_rows, draw_several, few_columns
from hf_dynspec.drafting.token_choice import TokenChoice
from hf_dynspec.generation import acceptance, verification
from hf_dynspec.kernels import top_k_ids
from hf_dynspec.protocol import Candidates, Shortlist, SparseDistribution

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """As on a device for which the host would have to wait: no value is looked at on the way."""
    monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())


# Acceptance over tables ----------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """What target and drafter say after each token: probabilities `[V, V]`. Row 0 is also what they say at first."""

    p: torch.Tensor
    q: torch.Tensor


def random_rows(seed: int, vocabulary: int, sharpness: float = 1.5, possible: int | None = None) -> torch.Tensor:
    """`[V, V]`: probabilities, of which only so many in a row are not 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, vocabulary, generator=generator) * sharpness
    if possible is not None:
        order = torch.rand(vocabulary, vocabulary, generator=generator).argsort(-1)
        logits.scatter_(1, order[:, possible:], -torch.inf)
    return logits.softmax(-1)


TABLES = {
    "far apart": Table(random_rows(1, 4), random_rows(2, 4)),
    "sure of the wrong": Table(random_rows(1, 5), random_rows(51, 5, 3.0)),
    "near": Table(random_rows(1, 5, 1.0), 0.7 * random_rows(1, 5, 1.0) + 0.3 * random_rows(2, 5, 1.0)),
    "fewer tokens than children": Table(random_rows(3, 5), random_rows(4, 5, possible=2)),
    "the target says few": Table(random_rows(5, 5, possible=3), random_rows(6, 5)),
    "the drafter says one": Table(random_rows(7, 4), random_rows(8, 4, possible=1)),
    "a vocabulary of two": Table(random_rows(9, 2), random_rows(10, 2)),
    "a wide vocabulary": Table(random_rows(11, 700, 3.0), (random_rows(11, 700, 3.0) + random_rows(12, 700, 2.0)) / 2),
}
TABLE_TREE = TreeConfig(total_tokens=14, depth=1, top_k=4)


def drafted_chain(q: torch.Tensor, levels: int) -> Candidates:
    """A chain that is drawn from a table's rows. Each shortlist has one more slot that does not count."""
    drafted, rows, shortlists = [torch.zeros(1, dtype=torch.int64)], [], []
    for level in range(levels):
        rows.append(pad(q.index_select(0, drafted[-1])[0], (0, level)))
        drafted.append(draw(rows[-1]))
        shortlists.append(Shortlist(pad(torch.arange(q.shape[0]), (0, level)), 0))
    return Candidates(torch.cat(drafted[1:]), tuple(shortlists), tuple(row.log() for row in rows))


def drafted_tree(q: torch.Tensor, config: TreeConfig) -> Candidates:
    """A tree that is drawn from a table's rows."""
    levels = min(config.depth + 1, config.total_tokens - 1)
    growth, frontier = tree_module.DrawnTreeGrowth(config, levels), torch.zeros(1, dtype=torch.int64)
    for _ in range(levels):
        rows = q.index_select(0, frontier)
        columns = draw_several(rows, min(growth.most_children, q.shape[0]))
        frontier, _ = growth.add_level(torch.arange(q.shape[0]).expand_as(rows), rows, columns)
    token_ids, scores, parents, depths = growth.choose()
    shortlists = (Shortlist(torch.arange(q.shape[0]), 0),) * levels
    return Candidates(token_ids, shortlists, (), parents, depths, scores, growth.draws())


AT_ONCE = "at once"
# The shapes of drafts: chains, verified node by node or at once, and trees.
SHAPES_OF_ROUNDS = {"chain": False, "chain at once": AT_ONCE, "tree": TABLE_TREE}
in_each_shape = pytest.mark.parametrize("shape", SHAPES_OF_ROUNDS.values(), ids=SHAPES_OF_ROUNDS)


def one_round(table: Table, shape: TreeConfig | bool | str) -> verification.BatchedWalk:
    """Draft by `q`, verify by `p`."""

    def process(row: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        return table.p.index_select(0, pad(path[0], (1, 0))[-1:]).log()

    candidates = drafted_tree(table.q, shape) if isinstance(shape, TreeConfig) else drafted_chain(table.q, 2)
    if shape == AT_ONCE:
        # Beside another text's.
        chains = [drafted_chain(table.q, 2), candidates]
        processed = [table.p.index_select(0, pad(one.token_ids, (1, 0))).log() for one in chains]
        tokens = acceptance.draw_along(chains, torch.stack(processed))
        return verification.walk_at_once(candidates, tokens[1], ())
    return verification.walk_to_end(candidates, process, True, CPU, keeps_scores=False)


def p_values(table: Table, shape: TreeConfig | bool | str, rounds: int = 100_000) -> list[float]:
    """Of the first token of a round; and of the second one, after each first one that was accepted.

    The rounds are computed side by side, each with random numbers of its own.
    """
    torch.manual_seed(13)
    vocabulary = table.p.shape[0]
    chunk = None if vocabulary < 100 else 500

    def tokens(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        walk = one_round(table, shape)
        return walk.token_ids, walk.goes_on

    token_ids, goes_on = torch.vmap(tokens, randomness="different", chunk_size=chunk)(torch.zeros(rounds))
    first, second = token_ids[:, 0], token_ids[:, 1]
    found = [chi_square(torch.bincount(first, minlength=vocabulary), table.p[0], at_least=2)]
    for token in range(vocabulary):
        counts = torch.bincount(second[(first == token) & (goes_on[:, 0] > 0)], minlength=vocabulary)
        if counts.sum() >= 500:
            found.append(chi_square(counts, table.p[token], at_least=2))
    assert len(found) > 1, "no second token was ever verified"
    return found


@in_each_shape
@pytest.mark.parametrize("name", TABLES)
def test_rounds_follow_the_target(name, shape, elsewhere):
    found = p_values(TABLES[name], shape, 100_000 if name != "a wide vocabulary" else 10_000)
    assert min(found) > FALSE_ALARM / len(found)


@pytest.mark.parametrize("shape", [False, TABLE_TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", representatives("statistical", TABLES))
def test_rounds_that_end_where_the_target_disagrees_follow_it_too(name, shape):
    """As on a CPU, where values are looked at on the way."""
    torch.manual_seed(13)
    p, _ = table = TABLES[name]
    counts, deep = torch.zeros(2, *p.shape[:1]), 0
    for _ in range(800):
        token_ids = one_round(table, shape).token_ids
        counts[0, token_ids[0]] += 1
        if token_ids[0] == p[0].argmax() and len(token_ids) > 1:
            counts[1, token_ids[1]] += 1
        deep += len(token_ids) > 1
    assert chi_square(counts[0], p[0], at_least=2) > FALSE_ALARM
    assert counts[1].sum() < 30 or chi_square(counts[1], p[p[0].argmax()], at_least=1) > FALSE_ALARM
    # A drafter that always says the same is rarely right.
    assert deep > 5


def unscaled(q: torch.Tensor, columns: torch.Tensor, is_child: torch.Tensor) -> torch.Tensor:
    place = torch.arange(q.shape[0])
    is_elder = (columns.unsqueeze(1) == place).cumsum(0) - (columns.unsqueeze(1) == place).long() > 0
    return pad(torch.where(is_elder, 0.0, q), (0, 1))


def with_elders(q: torch.Tensor, columns: torch.Tensor, is_child: torch.Tensor) -> torch.Tensor:
    return pad(q.expand(columns.shape[0], -1), (0, 1))


def without_say(candidates: list[Candidates]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 1)


SMALL_TREE = TreeConfig(total_tokens=5, depth=1, top_k=4)
# The shape, and what is put in whose place.
MISTAKES = {
    "a refused token is drawn again": (False, (acceptance.Weights, "minus", lambda self, *_: self)),
    "the drafter has no say": (AT_ONCE, (acceptance, "_drawn_from", without_say)),
    "what is left is not scaled": (SMALL_TREE, (acceptance, "_without_elders", unscaled)),
    "elders are not left out": (SMALL_TREE, (acceptance, "_without_elders", with_elders)),
    # As EAGLE-2 chooses its nodes.
    "a token has a say": (SMALL_TREE, (tree_module, "chances_of_draws", lambda drawn: (drawn.log(),) * 2)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_acceptance_would_be_noticed(mistake, elsewhere, monkeypatch):
    """The negative control."""
    shape, replaced = MISTAKES[mistake]
    monkeypatch.setattr(*replaced)
    assert min(p_values(TABLES["sure of the wrong"], shape)) < FALSE_ALARM


@pytest.mark.parametrize("shape", [False, TreeConfig(total_tokens=20, depth=3, top_k=3)], ids=["chain", "tree"])
def test_a_drafter_that_is_the_target_is_always_right(shape):
    """The whole path of first children is accepted."""
    torch.manual_seed(0)
    rows = random_rows(1, 6)
    for _ in range(200):
        walk = one_round(Table(rows, rows), shape)
        assert len(walk.token_ids) == (5 if shape else 3)


def test_slots_that_do_not_count_are_not_accepted(elsewhere):
    """An unoccupied slot may hold the id of one that counts, or of a token that the target likes."""
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.5, 0.4])
    ids, q = torch.tensor([[1, 1, 2, 0]]), torch.tensor([[0.0, 0.3, 0.0, 0.7]])

    def tokens(_: torch.Tensor) -> torch.Tensor:
        growth = tree_module.DrawnTreeGrowth(TreeConfig(5, 0, 4), 1)
        growth.add_level(ids, q, draw_several(q, 4))
        token_ids, scores, parents, depths = growth.choose()
        tree = Candidates(token_ids, (Shortlist(ids[0], 0),), (), parents, depths, scores, growth.draws())
        walk = verification.walk_to_end(tree, lambda row, path: p.log()[None], True, CPU, keeps_scores=False)
        return walk.token_ids[0]

    counts = torch.bincount(torch.vmap(tokens, randomness="different")(torch.zeros(100_000)), minlength=3)
    assert chi_square(counts, p) > FALSE_ALARM


@pytest.mark.parametrize(
    ("q_is_sparse", "p_is_sparse", "few_drafted"), pairwise("statistical", (False, True), (False, True), (True, False))
)
def test_a_chain_is_verified_alike_by_sparse_distributions_and_by_rows(q_is_sparse, p_is_sparse, few_drafted):
    """A wide vocabulary of which a top-k leaves six tokens, each accepted, or refused and drawn again, in the target's
    proportions."""
    torch.manual_seed(21)
    width, rounds = 1200, 3000
    left = torch.tensor([3, 40, 41, 700, 1100, 1199])
    of_left = torch.tensor([1.0, 0.2, 2.0, 1.5, -1.0, 0.0])
    logits = torch.full((width,), -torch.inf if few_drafted else -3.0)
    logits[torch.tensor([3, 40, 900, 1100])] = torch.tensor([3.0, 4.0, 4.0, 1.0])
    possible = (logits > -torch.inf).nonzero().squeeze(1)
    drawn_from = SparseDistribution(possible.tolist(), logits[possible].exp().tolist()) if q_is_sparse else None
    processed = torch.full((1, width), -torch.inf).index_copy_(1, left, of_left.unsqueeze(0))
    if p_is_sparse:
        processed = SparseDistribution(left.tolist(), of_left.exp().tolist())
    counts, accepted = torch.zeros(len(left)), 0
    for _ in range(rounds):
        shortlists = (Shortlist(torch.arange(width), 0),)
        chain = Candidates(draw(logits.softmax(-1)), shortlists, (logits,), drawn_from=(drawn_from,))
        token = acceptance.draw_at(chain, 0, processed)
        counts += token == left
        accepted += int(token == chain.token_ids)
    assert int(counts.sum()) == rounds and 0 < accepted < rounds
    assert chi_square(counts, of_left.softmax(-1), at_least=6) > FALSE_ALARM


@pytest.mark.parametrize("top_k", [0, 3])
def test_drafts_of_several_texts_are_drawn_from_the_logits_that_are_reported(top_k):
    torch.manual_seed(3)
    logits, slots = torch.randn(2, 6), torch.tensor([[3, 1, 4, 0, 5, 9], [2, 7, 8, 1, 6, 0]])
    processors = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
    choice = TokenChoice(True, processors, 10, 0, CPU)
    counts = torch.zeros(2, 10)
    for _ in range(4000):
        tokens, used = choice.of_texts(logits, slots)
        counts.scatter_add_(1, tokens, torch.ones(2, 1))
    assert torch.equal(used, processors(slots, logits.clone()))
    for count, tokens, some in zip(counts, slots, used, strict=True):
        assert chi_square(count[tokens], some.softmax(-1)) > FALSE_ALARM and count.sum() == 4000


def test_drafts_verified_at_once_of_a_drafter_that_computes_nan_have_no_say():
    """As in 16 bits, if hidden states overflow."""
    torch.manual_seed(21)
    p, shortlist = torch.tensor([0.3, 0.1, 0.4, 0.2]), Shortlist(torch.arange(4), 0)
    chain = Candidates(torch.tensor([2]), (shortlist,), (torch.full((4,), torch.nan),))
    drawn = torch.stack([acceptance.draw_along([chain], p.log().expand(1, 2, -1))[0] for _ in range(2000)])
    for tokens in drawn.T:
        assert chi_square(torch.bincount(tokens, minlength=4), p) > FALSE_ALARM


def test_tokens_that_cannot_be_drawn_are_none():
    rows = torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [-torch.inf, -torch.inf]])
    assert acceptance.draw_along([None], rows.unsqueeze(0))[0, 1:].tolist() == [acceptance.NO_TOKEN] * 2


@pytest.mark.parametrize("p_is_sparse", [False, True])
@pytest.mark.parametrize("q_is_sparse", [False, True])
def test_drafts_of_a_drafter_that_computes_nan_have_no_say(q_is_sparse, p_is_sparse):
    """As in 16 bits, if hidden states overflow."""
    torch.manual_seed(21)
    drafted, p = torch.tensor([0, 2, 3]), torch.tensor([0.3, 0.1, 0.4, 0.2])
    logits = torch.full((4,), -torch.inf).index_fill(0, drafted, torch.nan)
    drawn_from = SparseDistribution(drafted.tolist(), [torch.nan] * 3) if q_is_sparse else None
    chain = Candidates(drafted[:1], (Shortlist(torch.arange(4), 0),), (logits,), drawn_from=(drawn_from,))
    processed = SparseDistribution([0, 1, 2, 3], p.tolist()) if p_is_sparse else p.log().unsqueeze(0)
    drawn = torch.cat([acceptance.draw_at(chain, 0, processed) for _ in range(2000)])
    assert chi_square(torch.bincount(drawn, minlength=4), p) > FALSE_ALARM


# Whole texts ---------------------------------------------------------------------------------------------------------

VOCABULARY = 14
# Never reached, so that all texts are equally long; as a special token it is still in every shortlist.
UNREACHABLE_EOS = 13
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS, TEXT_LENGTH = 4, 200

PROCESSORS = {
    "everything": {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3},
    "plain": {"top_k": 0},
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "repetition penalty": {"repetition_penalty": 1.8, "top_k": 0},
}
POLICIES = {
    "union": lambda: UnionShortlist(FrequencyShortlist(size=3), InContextShortlist(3, 1, 1, eviction="lru")),
    "full": POLICY_CASES["full"],
    "frequency": lambda: FrequencyShortlist(size=5),
    "in_context": lambda: InContextShortlist(6, 1, 1),
    "screen": lambda: ScreenShortlist(rank=3, candidates=4),
    "random": lambda: RandomShortlist(size=4),
    "eos_only": TERRIBLE["eos_only"],
}


class ForbidEos(LogitsProcessor):
    """A user's own processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([UNREACHABLE_EOS], device=scores.device), -torch.inf)


def sampling_target() -> PreTrainedModel:
    """Probabilities between clear favourites and long shots, so that acceptance and rejection are both common."""
    model = tiny(seed=1, vocabulary=VOCABULARY, **SMALL)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.9)
    model.generation_config.eos_token_id = UNREACHABLE_EOS
    return model


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return sampling_target()


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target, noise=0.8)


def sample(target, input_ids, assistant, new_tokens: int, processors: tuple = (), **arguments) -> torch.Tensor:
    """`[1, n]`: a prompt and what was sampled after it."""
    processors = LogitsProcessorList([ForbidEos(), *processors])
    named = {"max_new_tokens": new_tokens, "do_sample": True, "logits_processor": processors, **arguments}
    return target.generate(input_ids, assistant_model=assistant, **named)


def sampled_numbers(target, drafter, assistant, make_processor=None, device=CPU, **arguments) -> torch.Tensor:
    """The uniform numbers of some texts that `assistant`'s target samples. `make_processor` makes one more processor
    for each text."""
    torch.manual_seed(7)
    of_generate = processors_of(target, logits_processor=LogitsProcessorList([ForbidEos()]), **arguments)
    numbers = []
    for seed in range(TEXTS):
        input_ids = prompt(3, seed, vocabulary=12)
        own = (make_processor(target),) if make_processor else ()
        text = sample(assistant.target, input_ids.to(device), assistant, TEXT_LENGTH, own, **arguments).cpu()
        processors = LogitsProcessorList([*of_generate, *((make_processor(target),) if make_processor else ())])
        numbers.append(uniform_numbers(target, drafter, processors, text, 3))
    return torch.cat(numbers)


TREE = TreeConfig(total_tokens=10, depth=2, top_k=3)
TEXT_CASES = dict.fromkeys(
    [
        ("union", "everything", False),
        *itertools.product(POLICIES, ["everything"], [False, TREE]),
        *itertools.product(["frequency"], PROCESSORS, [False]),
        *itertools.product(["full"], PROCESSORS, [TREE]),
    ]
)


@pytest.mark.parametrize(("policy", "processors", "tree"), representatives("statistical", TEXT_CASES))
def test_every_token_of_long_texts(policy, processors, tree, target, drafter, monkeypatch):
    shortened, sparse = [0], ProcessorsByValue.sparse

    def counting(self, scores, best):
        left = sparse(self, scores, best)
        shortened[0] += left != [None] * len(left)
        return left

    monkeypatch.setattr(ProcessorsByValue, "sparse", counting)
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, tree=tree, num_assistant_tokens=2)
    numbers = sampled_numbers(target, drafter, assistant, **PROCESSORS[processors])
    assert numbers.shape == (TEXTS * TEXT_LENGTH,)
    assert uniformity(numbers) > FALSE_ALARM
    stats = assistant.stats_total
    assert stats.accepted < stats.drafted and (stats.accepted > 0) == (policy != "eos_only")
    # A token is drawn from what a top-k leaves, and not from the whole row.
    if not tree:
        assert (shortened[0] >= stats.tokens) == (PROCESSORS[processors].get("top_k") != 0)


@pytest.mark.statistical
@pytest.mark.parametrize(("layout", "tree"), [("eagle2", TREE), ("eagle3", TREE), ("eagle3", False)])
def test_every_token_of_long_texts_from_eagle_heads(layout, tree, target, drafter):
    """A head that knows nothing is often right among so few tokens."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "target_hidden_size": 16}
    head = random_head(layout, VOCABULARY, features=2, eagle_aux_hidden_state_layer_ids=[0, 1], **shape)
    assistant = DynSpecAssistant(drafter_of(head, target), "full", target=target, tree=tree, num_assistant_tokens=2)
    numbers = sampled_numbers(target, drafter, assistant, **PROCESSORS["everything"])
    assert uniformity(numbers) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.statistical
@pytest.mark.parametrize("processors", ["everything", "temperature"])
@pytest.mark.parametrize(
    "settings", [{"num_assistant_tokens": 6, "assistant_confidence_threshold": 0.15}, {"num_assistant_tokens": "auto"}]
)
def test_every_token_of_long_texts_from_drafts_that_stop_early(settings, processors, target, drafter):
    """A draft stops by what was drawn so far, which says nothing of how the target will judge it."""
    assistant = DynSpecAssistant(drafter, "full", target=target, **settings)
    numbers = sampled_numbers(target, drafter, assistant, **PROCESSORS[processors])
    assert uniformity(numbers) > FALSE_ALARM
    stats = assistant.stats_total
    if "assistant_confidence_threshold" in settings:
        assert 0 < stats.accepted < stats.drafted < 6 * stats.rounds


@pytest.mark.parametrize(
    ("kind", "shape", "looks"), representatives("statistical", itertools.product(REMEMBERING, SHAPES, (True, False)))
)
def test_every_token_of_long_texts_under_processors_that_remember(kind, shape, looks, target, drafter, monkeypatch):
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=3, tree=SHAPES[shape])
    assert uniformity(sampled_numbers(target, drafter, assistant, REMEMBERING[kind], top_k=0)) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize(
    "lie",
    representatives(
        "statistical", ["reports less than it drew from", "argmax drafts", "names other weights", "favours its tree"]
    ),
)
def test_wrong_sampling_would_be_noticed(lie, target, drafter, monkeypatch):
    """The negative control: mistakes that speculative sampling is prone to."""
    choose, walk = TokenChoice.__call__, verification.walk

    def chooses_wrong(self, logits, shortlist, drafted):
        token, used, sparse = choose(self, logits, shortlist, drafted)
        if lie == "reports less than it drew from":  # so that too much is accepted
            return token, torch.where(shortlist.scored_slots == token, used - 1.0, used), None
        if lie == "names other weights":
            return shortlist.scored_slots[used.argmax(-1, keepdim=True)], used, sparse
        return shortlist.scored_slots[logits.argmax(-1, keepdim=True)], logits, None

    def walks_wrong(candidates, process, do_sample, device, looks=True):
        def likelier(row, path):
            scores = process(row, path)
            if candidates is not None:
                scores[0, candidates.token_ids[candidates.parents + 1 == row]] += 2.0
            return scores

        return walk(candidates, likelier, do_sample, device, looks)

    is_tree = lie == "favours its tree"
    if is_tree:
        monkeypatch.setattr(verification, "walk", walks_wrong)
    else:
        monkeypatch.setattr(TokenChoice, "__call__", chooses_wrong)
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=2, tree=is_tree and TREE)
    processors = PROCESSORS["top-k" if lie == "names other weights" else "plain"]
    assert uniformity(sampled_numbers(target, drafter, assistant, **processors)) < FALSE_ALARM


@pytest.mark.parametrize("tree", [TREE, TreeConfig(3, 4, 3), TreeConfig(2, 0, 1), TreeConfig(40, 3, 1)])
def test_drawn_trees_keep_to_their_shape(tree, target, drafter):
    """Also if there are fewer nodes than levels."""
    torch.manual_seed(1)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
    assert sample(target, prompt(3, vocabulary=12), assistant, 60).shape == (1, 63)
    stats = assistant.stats
    assert 0 < stats.accepted < stats.drafted <= stats.rounds * (tree.total_tokens - 1)
    assert len(stats.tokens_per_round) - 1 <= min(tree.depth + 1, tree.total_tokens - 1) + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_is_reproducible_from_torchs_seed(shape, target, drafter):
    assistant = DynSpecAssistant(drafter, POLICIES["union"](), target=target, tree=SHAPES[shape])
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(sample(target, prompt(3, vocabulary=12), assistant, 60).tolist())
    assert outputs[0] == outputs[1] != outputs[2]


class BarsAll(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize(
    ("number", "shape", "top_k", "looks"),
    pairwise("families", (torch.nan, torch.inf, None), list(SHAPES), (0, 20), (True, False)),
)
def test_an_error_as_in_plain_generate_if_there_is_no_token_to_draw(number, shape, top_k, looks, monkeypatch):
    """Because logits overflow, or every token is barred (None). The next call is as if nothing had happened."""
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    target, drafter = tiny(tie_word_embeddings=False), tiny()
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    sound = target.lm_head.weight.detach().clone()
    barred = LogitsProcessorList([] if number else [BarsAll()])
    settings = {"max_new_tokens": 6, "do_sample": True, "top_k": top_k, "logits_processor": barred}
    # Criteria that look tokens up are not shown what stands for none.
    stops = {"stop_strings": ["zz"], "tokenizer": AutoTokenizer.from_pretrained(POCKET / "target")}
    with torch.no_grad():
        if number:
            target.lm_head.weight[7].fill_(number)
        with pytest.raises(RuntimeError, match="probability"):
            target.generate(prompt(), **settings)
        for more in ({}, stops):
            with pytest.raises(TargetError, match="no token can be drawn"):
                target.generate(prompt(), assistant_model=assistant, **settings, **more)
        target.lm_head.weight.copy_(sound)
    assert_same(target, assistant)


# Processors that look at values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_is_transformers_own(ties):
    """With ties at the border, which are all kept; with forbidden tokens; and with more than there are."""
    for k in (1, 2, 7, 50, 299, 300, 5000):
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
            assert torch.equal(ProcessorsByValue([warper])(None, scores), warper(None, before.clone()))
            assert torch.equal(scores, before), "the scores that were given must stay as they are"


def test_processors_by_value_follow_one_another(target):
    by_value = list(processors_of(target, temperature=1.7, top_k=9, top_p=0.8, min_p=0.05))
    assert len(by_value) >= 4
    scores, text = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3, torch.zeros(6, 1)
    assert torch.equal(ProcessorsByValue(by_value)(text, scores), LogitsProcessorList(by_value)(text, scores.clone()))


AFTER_TOP_K = {
    "nothing": [],
    "top-p": [TopPLogitsWarper(0.7)],
    "min-p": [MinPLogitsWarper(0.2)],
    "typical": [TypicalLogitsWarper(0.8)],
    "epsilon, eta": [EpsilonLogitsWarper(0.03), EtaLogitsWarper(0.05)],
    "another top-k": [TopKLogitsWarper(4)],
    "normalisation": [LogitNormalization()],
}


def sparse_rows(processors: ProcessorsByValue, scores: torch.Tensor) -> list[SparseDistribution | None]:
    return processors.sparse(scores, top_k_ids(scores, processors.most_looked_at))


@pytest.mark.parametrize("after", AFTER_TOP_K)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.3, 1.7])
def test_the_sparse_rows_after_a_top_k_are_the_processed_rows(temperature, ties, after):
    warmth = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    processors = ProcessorsByValue([*warmth, TopKLogitsWarper(11), *AFTER_TOP_K[after]])
    scores = torch.randn(20, 1500, generator=torch.Generator().manual_seed(0)) * 2
    if ties:
        scores = scores.mul(64).round() / 64
    before = scores.clone()
    rows = sparse_rows(processors, scores)
    for sparse, row in zip(rows, processors(None, scores).softmax(-1), strict=True):
        if sparse is not None:
            assert sparse.token_ids == row.nonzero().squeeze(1).tolist() or min(sparse.weights) == 0
            actual = torch.zeros_like(row)
            actual[sparse.token_ids] = torch.tensor(sparse.weights)
            torch.testing.assert_close(actual, row, rtol=1e-5, atol=0)
    # Nothing is written into the scores, which may be the logits that others are shown.
    assert torch.equal(scores, before)
    # All tokens that tie for the last place are kept, and only the whole row shows how many these are.
    known = sum(one is not None for one in rows)
    assert (0 < known < 20) if ties else known == 20


def test_the_whole_row_is_processed_if_too_little_is_known():
    scores = torch.randn(1, 1500, generator=torch.Generator().manual_seed(0))
    top_k = TopKLogitsWarper(11)
    assert sparse_rows(ProcessorsByValue([top_k]), scores) != [None]
    for processors in (
        [],
        [TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(0.7), top_k],  # whose sum is of the whole row
        [TopKLogitsWarper(11, filter_value=-9.0)],
        [top_k, TopPLogitsWarper(0.7, filter_value=-9.0)],
    ):
        assert ProcessorsByValue(processors).most_looked_at is None
    forbidden = torch.full_like(scores, -torch.inf)
    forbidden[0, :5] = 1.0
    spoilt = [
        scores.index_fill(1, torch.tensor([place]), number) for place, number in ((0, torch.nan), (7, torch.inf))
    ]
    for row in (forbidden, *spoilt):
        assert sparse_rows(ProcessorsByValue([top_k]), row) == [None]


# The draw itself -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 700, 1024, 4099])
def test_a_draw_follows_the_weights_and_never_takes_what_is_impossible(n):
    """Rows of more than 1,024 weights are drawn by blocks: the few that are above 0 lie in the first block, at its
    end, and in the last one."""
    torch.manual_seed(0)
    possible = torch.tensor([0, 255, 256, n // 2, n - 2, n - 1]) if n > 256 else torch.tensor([0, 1, 2, 4, 5, 6])
    weights = torch.zeros(n).index_copy_(0, possible, torch.tensor([0.1, 1.0, 0.5, 2.0, 0.3, 0.7]))
    drawn = torch.cat([draw(weights) for _ in range(4000)])
    assert chi_square(torch.bincount(drawn, minlength=n), weights, at_least=5) > FALSE_ALARM


def test_rows_are_drawn_without_a_cumulative_sum_if_algorithms_are_to_be_deterministic(poisoned_memory, monkeypatch):
    """torch has none on GPUs."""
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    torch.manual_seed(0)
    weights = torch.tensor([0.0, 0.1, 1.0, 0.5, 0.0, 2.0, 0.3])
    drawn = draw_of_rows(weights.expand(3, 4000, -1))
    assert drawn.shape == (3, 4000, 1)
    assert chi_square(torch.bincount(drawn.flatten(), minlength=7), weights, at_least=5) > FALSE_ALARM


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0 - 2**-53])
@pytest.mark.parametrize(("n", "first", "second"), [(5, 1, 3), (3001, 700, 2999)])
def test_a_draw_at_the_edges_of_the_uniform_number(n, first, second, value, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.full(size, value, dtype=torch.float64))
    weights = torch.zeros(n).index_fill(0, torch.tensor([first, second]), 0.25)
    assert int(draw(weights)) == (first if value < 0.5 else second)


def test_few_possible_tokens_are_looked_at_alone():
    possible = torch.tensor([0, 7, 1999, 3998, 3999])
    assert few_columns(torch.zeros(4000, dtype=torch.bool).index_fill(0, possible, True)).tolist() == possible.tolist()
    # Nothing is looked at if many are possible, or none, or if a device would be waited for.
    for columns in (torch.ones(4000), torch.zeros(4000), torch.zeros(4000, device="meta")):
        assert few_columns(columns.bool()) is None


def test_several_draws_follow_one_another_without_replacement():
    """All ordered triples; a row of one block, and one whose blocks race, with an end that is no block."""
    torch.manual_seed(2)
    for columns, block in ((5, 128), (11, 2)):
        weights = torch.rand(columns) ** 3
        weights[[1, 4]] = 0.0
        weights = weights / weights.sum()
        drawn = draw_several(weights.expand(100_000, -1), 3, block)
        counts = torch.zeros(columns, columns, columns).index_put(tuple(drawn.T), torch.ones(()), accumulate=True)
        expected = torch.zeros_like(counts, dtype=torch.float64)
        w = weights.double()
        for a, b, c in itertools.permutations(range(columns), 3):
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
