"""Draft trees: how they grow, which path the target accepts, and what calls with them draft.

That output with trees is the target's own is held in `tests/generation`.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from calls import assert_same, generate
from cases import pairwise, representatives
from draft_trees import assert_same_tree, paths_of, slow_draft, slow_tree, verify
from models import EOS, POLICY_CASES, SLIDING_WINDOW, VOCABULARY, RandomShortlist, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    FrequencyShortlist,
    NotBoundError,
    TreeConfig,
    UnsupportedError,
)
from hf_dynspec.drafting.trees import TreeGrowth
from hf_dynspec.generation.verification import Outcome
from hf_dynspec.modeling.masks import attention_mask, attention_windows, descent
from hf_dynspec.protocol import Candidates, Shortlist

SHAPE = TreeConfig(total_tokens=24, depth=4, top_k=4)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Growth --------------------------------------------------------------------------------------------------------------


def grow(successors: Callable[[tuple[int, ...]], dict[int, float]], config: TreeConfig) -> Candidates:
    """The tree that `TreeGrowth` makes of the same table that `slow_tree` takes."""
    growth = TreeGrowth(config)
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(config.depth + 1):
        rows = [sorted(successors(path).items(), key=lambda one: -one[1])[: config.top_k] for path in frontier]
        tokens = torch.tensor([[token for token, _ in row] for row in rows])
        values = torch.tensor([[value for _, value in row] for row in rows])
        fresh, parents = growth.add_level(tokens, values)
        frontier = [(*frontier[parent], token) for token, parent in zip(fresh.tolist(), parents.tolist(), strict=True)]
    token_ids, scores, parents, depths = growth.choose()
    shortlists = (Shortlist(torch.arange(9), 0),) * (config.depth + 1)
    return Candidates(token_ids, shortlists, (), parents, depths, scores)


def random_table(seed: int, tokens: int) -> Callable[[tuple[int, ...]], dict[int, float]]:
    """Log-probabilities of `tokens` tokens after every path, the same each time that a path is asked for."""

    def successors(path: tuple[int, ...]) -> dict[int, float]:
        logits = torch.randn(tokens, generator=random(hash((seed, *path)) % 2**31)) * 2
        return dict(enumerate(logits.log_softmax(-1).tolist()))

    return successors


@pytest.mark.parametrize(
    "shape", [(60, 5, 10), (2, 0, 1), (2, 3, 4), (7, 0, 3), (9, 4, 1), (12, 3, 2), (40, 2, 9), (4096, 3, 3)]
)
def test_a_tree_grows_as_the_paper_has_it(shape):
    config = TreeConfig(*shape)
    for seed in range(3):
        table = random_table(seed, tokens=12)
        expected = slow_tree(table, config)
        assert_same_tree(grow(table, config), expected, tolerance=1e-5)
        k, d = config.top_k, config.depth
        assert len(expected) == min(config.total_tokens - 1, k + d * k * k)


def test_a_shortlist_smaller_than_the_tree_is_wide():
    for tokens in (1, 2, 3):
        table = random_table(0, tokens)
        assert_same_tree(grow(table, SHAPE), slow_tree(table, SHAPE), tolerance=1e-5)


@pytest.mark.parametrize("total", range(2, 14))
def test_a_certain_child_never_loses_its_parent(total):
    """A child of log-probability 0 ties its parent: wherever the tree is cut, the parent stays."""

    def certain(path: tuple[int, ...]) -> dict[int, float]:
        return {0: 0.0, 1: -torch.inf, 2: -torch.inf}

    tree = grow(certain, TreeConfig(total, depth=5, top_k=3))
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths) == total - 1
    assert set(paths[: total - 1]) >= {(0,) * length for length in range(1, min(total, 7))}


def test_ties_of_any_kind_leave_no_orphan():
    """Coarse log-probabilities tie everywhere. Whatever is chosen among equals, it is a tree of the best nodes."""
    for seed in range(30):
        generator = random(seed)
        drawn: dict[tuple[int, ...], dict[int, float]] = {}

        def table(path: tuple[int, ...], drawn=drawn, generator=generator) -> dict[int, float]:
            if path not in drawn:
                drawn[path] = {token: -float(torch.randint(0, 3, (), generator=generator)) for token in range(5)}
            return drawn[path]

        config = TreeConfig(total_tokens=int(torch.randint(2, 40, (), generator=generator)), depth=4, top_k=3)
        tree = grow(table, config)
        for path, score in zip(paths_of(tree), tree.scores.tolist(), strict=True):
            assert score == sum(table(path[:end])[path[end]] for end in range(len(path)))
        assert tree.token_ids.shape[0] == min(config.total_tokens - 1, 3 + 4 * 9)


def random_parents(seed: int, nodes: int) -> torch.Tensor:
    """A random tree whose nodes come level by level."""
    generator, levels = random(seed), [[-1]]
    parents: list[int] = []
    while len(parents) < nodes:
        width = min(int(torch.randint(1, 5, (), generator=generator)), nodes - len(parents))
        above = levels[-1]
        own = sorted(above[int(torch.randint(0, len(above), (), generator=generator))] for _ in range(width))
        levels.append(list(range(len(parents), len(parents) + width)))
        parents += own
    return torch.tensor(parents)


def ancestors_of(parents: torch.Tensor, node: int) -> list[int]:
    """The nodes on the path to a node, itself included, from the root's side."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


@pytest.mark.parametrize("nodes", [1, 2, 7, 30])
def test_descent(nodes):
    for seed in range(5):
        parents = random_parents(seed, nodes)
        paths = [ancestors_of(parents, node) for node in range(nodes)]
        expected = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node, path in enumerate(paths):
            expected[node, path] = True
        for levels in (max(map(len, paths)), max(map(len, paths)) + 2):
            assert torch.equal(descent(parents, levels), expected)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_a_tree(window, dtype):
    """A node sees what counts of the prefix and its own path, as far back as the window reaches."""
    parents = random_parents(3, 11)
    levels = torch.tensor([len(ancestors_of(parents, node)) - 1 for node in range(11)])
    prefix = torch.tensor([False, False, True, True, False, True, True])
    queries = slice(6, 11)
    within = descent(parents, 11)[queries]
    mask = attention_mask(prefix, within, levels[queries], levels, dtype, window)
    assert mask.shape == (1, 1, 5, 18) and mask.dtype == dtype
    for row, node in enumerate(range(6, 11)):
        path = ancestors_of(parents, node)
        positions = [position - 7 for position in range(7)] + levels.tolist()
        for column in range(18):
            belongs = bool(prefix[column]) if column < 7 else column - 7 in path
            is_near = window is None or len(path) - 1 - positions[column] < window
            assert mask[0, 0, row, column] == (0.0 if belongs and is_near else torch.finfo(dtype).min)


def test_the_windows_of_a_model():
    assert attention_windows(tiny("llama").config) == {"full_attention": None}
    assert attention_windows(tiny("gpt2").config) == {"full_attention": None}
    assert attention_windows(tiny("mistral").config) == {"sliding_attention": SLIDING_WINDOW}
    both = {"sliding_attention": SLIDING_WINDOW, "full_attention": None}
    assert attention_windows(tiny("gemma3").config) == both == attention_windows(tiny("gemma2").config)


# Verification --------------------------------------------------------------------------------------------------------


def random_tree(seed: int, nodes: int, vocabulary: int) -> Candidates:
    """A tree whose siblings are different tokens."""
    parents = random_parents(seed, nodes)
    depths = torch.tensor([len(ancestors_of(parents, node)) - 1 for node in range(nodes)])
    token_ids = torch.zeros(nodes, dtype=torch.int64)
    for parent in set(parents.tolist()):
        children = (parents == parent).nonzero()[:, 0]
        token_ids[children] = torch.randperm(vocabulary, generator=random(seed + parent))[: children.shape[0]]
    return Candidates(
        token_ids, (Shortlist(torch.arange(vocabulary), 0),) * (int(depths.max()) + 1), (), parents, depths
    )


def accept(scores: torch.Tensor, tree: Candidates) -> Outcome:
    """What is accepted greedily where the processed logits of each node are these."""
    return verify(tree, lambda row, path: scores.index_select(0, row), False)


def test_greedy_verification_walks_down_the_tree():
    lengths = set()
    for seed in range(200):
        tree = random_tree(seed, nodes=1 + seed % 25, vocabulary=5)
        scores = torch.randn(tree.token_ids.shape[0] + 1, 5, generator=random(seed))
        tokens, rows, node = [], [0], -1
        while node is not None:
            tokens.append(int(scores[node + 1].argmax()))
            children = (tree.parents == node) & (tree.token_ids == tokens[-1])
            node = int(children.nonzero()) if children.any() else None
            rows += [] if node is None else [node + 1]
        outcome = accept(scores, tree)
        assert outcome.token_ids.tolist() == tokens and outcome.rows.tolist() == rows
        assert outcome.accepted == len(tokens) - 1
        lengths.add(outcome.accepted)
    assert lengths >= {0, 1, 2, 3}


def test_of_equal_siblings_the_first_is_taken():
    """A shortlist may repeat an id in slots that do not count."""
    tree = Candidates(
        torch.tensor([1, 1, 2, 0]),
        (Shortlist(torch.arange(3), 0),) * 2,
        (),
        torch.tensor([-1, -1, -1, 0]),
        torch.tensor([0, 0, 0, 1]),
    )
    scores = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert accept(scores, tree).token_ids.tolist() == [1, 0, 0]


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("total_tokens", 1),
        ("total_tokens", 4097),
        ("total_tokens", True),
        ("total_tokens", 60.0),
        ("total_tokens", None),
        ("depth", -1),
        ("depth", 129),
        ("depth", "5"),
        ("top_k", 0),
        ("top_k", 513),
        ("top_k", False),
    ],
)
def test_a_wrong_shape_is_refused(setting, value):
    with pytest.raises(ConfigurationError, match=f"{setting} must be a whole number from"):
        TreeConfig(**{setting: value})


def test_the_shape_is_eagle_2s_by_default(drafter):
    assert TreeConfig() == TreeConfig(total_tokens=60, depth=5, top_k=10)
    assert DynSpecAssistant(drafter, tree=True).tree == TreeConfig()
    assert DynSpecAssistant(drafter, tree=SHAPE).tree is SHAPE
    assert DynSpecAssistant(drafter, tree=False).tree is DynSpecAssistant(drafter).tree is None
    TreeConfig(2, 0, 1)
    TreeConfig(4096, 128, 512)


@pytest.mark.parametrize("tree", [None, 1, 0, "eagle2", (60, 5, 10), {"total_tokens": 60}])
def test_anything_else_is_no_tree(tree, drafter):
    with pytest.raises(ConfigurationError, match="tree must be True, False or a TreeConfig"):
        DynSpecAssistant(drafter, tree=tree)


# Whole calls ---------------------------------------------------------------------------------------------------------


def confident(model: PreTrainedModel, factor: float = 6.0) -> PreTrainedModel:
    """With clear favourites, so that trees are deep as well as wide. The order of tokens stays the same."""
    head = model.get_output_embeddings().weight
    if head is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.mul_(factor)
    return model


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return confident(tiny())


@pytest.mark.parametrize("shape", [(2, 0, 1), (3, 5, 10), (5, 0, 4), (4, 3, 1), (12, 7, 2), (60, 5, 10), (200, 2, 9)])
def test_trees_of_any_shape(shape, target, drafter):
    config = TreeConfig(*shape)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=config)
    assert_same(target, assistant)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assert len(assistant.stats.tokens_per_round) - 1 <= config.depth + 2
    assert len(assistant.stats.drafted_at) <= config.depth + 1


def test_a_tree_accepts_what_a_chain_would_miss(target):
    """The second and third guesses of a drafter that is often wrong are worth having."""
    drafter = perturbed(target, noise=0.1)
    lengths = []
    for tree in (False, SHAPE):
        assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
        for seed in range(3):
            assert_same(target, assistant, prompt(seed=seed))
        lengths.append(assistant.stats_total.acceptance_length)
    assert lengths[1] > 1.15 * lengths[0]


# One round -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"), pairwise("families", ("full", "frequency"), [(24, 4, 4), (60, 5, 10), (9, 6, 2), (5, 0, 6)])
)
def test_a_round_equals_the_papers_algorithm(name, shape, target, drafter):
    ids = None if name == "full" else torch.cat([torch.tensor([EOS]), torch.arange(VOCABULARY).flip(0)[:89]])
    config = TreeConfig(*shape)
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=config)
    for seed, length in ((0, 2), (1, 17)):
        text = prompt(length, seed)
        tree = assistant.draft_round(text)
        assert_same_tree(tree, slow_draft(drafter, text, config, ids), tolerance=1e-3)
        assert len(tree.shortlists) == config.depth + 1
    assert assistant.stats_total.calls == 0, "a round that nobody verified is not a call"


def test_a_round_of_a_chain_has_the_same_fields(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=4)
    text = prompt(9)
    chain = assistant.draft_round(text)
    expected = slow_draft(drafter, text, TreeConfig(5, 3, 1))
    assert_same_tree(chain, expected, tolerance=1e-3)
    assert paths_of(chain) == sorted(expected, key=len)


def test_a_round_after_anything_but_one_text_is_refused(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", tree=True)
    with pytest.raises(NotBoundError, match="bind"):
        assistant.draft_round(prompt())
    assistant.bind(target)
    for wrong in (prompt()[0], prompt(1), prompt().expand(2, -1), prompt().tolist()):
        with pytest.raises(UnsupportedError, match="one sequence"):
            assistant.draft_round(wrong)


def assert_drafted_as_alone(assistant: DynSpecAssistant, rounds: list) -> None:
    """Every tree of a call is the one that is drafted after its text alone; shorter where the end is near."""
    recorded, compared = list(rounds), 0
    for prefix, most, drafted in recorded:
        if most <= assistant.tree.depth:
            assert int(drafted.depths.max()) < most
            continue
        alone = assistant.draft_round(prefix.unsqueeze(0))
        assert_same_tree(drafted, dict(zip(paths_of(alone), alone.scores.tolist(), strict=True)), tolerance=3e-3)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", ["full", "frequency", "frequency, position-aware"])
def test_a_call_drafts_what_its_texts_alone_would(name, target, drafter, rounds):
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=SHAPE)
    assert_same(target, assistant)
    assert_drafted_as_alone(assistant, rounds)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2"])
def test_a_call_drafts_past_sliding_windows_what_its_texts_alone_would(family, rounds):
    target = confident(tiny(family))
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    assert_same(target, assistant, prompt(30), eos_token_id=VOCABULARY - 1)
    assert_drafted_as_alone(assistant, rounds)


@pytest.mark.parametrize("name", ["hybrid", "in_context", "random"])
def test_nodes_come_from_their_shortlists(name, target, drafter, rounds):
    """Each level from its own; and siblings differ, save for slots that do not count, whose score is −∞."""
    policy = RandomShortlist(30) if name == "random" else POLICY_CASES[name]()
    assert_same(target, DynSpecAssistant(drafter, policy, target=target, tree=SHAPE))
    for _, _, tree in rounds:
        counts = tree.scores > -torch.inf
        assert counts.any()
        paths = [path for path, one in zip(paths_of(tree), counts.tolist(), strict=True) if one]
        assert len(set(paths)) == len(paths)
        for depth, shortlist in enumerate(tree.shortlists):
            assert shortlist.contains(tree.token_ids[counts & (tree.depths == depth)]).all()
            assert EOS in shortlist.ids().tolist()


# Targets that cannot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2", "paged|sdpa"])
def test_another_attention_implementation_is_refused_by_name(attention, drafter):
    target = tiny()
    target.config._attn_implementation = attention
    before = dict(target.__dict__)
    for assistant in (DynSpecAssistant(drafter, tree=True), DynSpecAssistant(drafter, tree=SHAPE)):
        with pytest.raises(UnsupportedError, match=attention.replace("|", r"\|")) as caught:
            assistant.bind(target)
        assert "sdpa" in str(caught.value) and "tree=False" in str(caught.value)
        assert assistant.target is None and target.__dict__ == before
        with pytest.raises(NotBoundError):
            target.generate(prompt(), assistant_model=assistant)


@pytest.mark.parametrize(
    ("role", "is_later"), representatives("families", itertools.product(("target", "drafter"), (True, False)))
)
def test_attention_that_takes_no_mask_is_refused_whenever_it_is_set(role, is_later, drafter):
    """Flex attention would read past the memory of the mask."""
    models = {"target": tiny(), "drafter": drafter}

    def assistant() -> DynSpecAssistant:
        return DynSpecAssistant(drafter, target=models["target"], tree=True)

    made = assistant() if is_later else None
    models[role].set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedError, match="uses the attention implementation 'flex_attention'"):
        models["target"].generate(prompt(), assistant_model=made or assistant())
    models[role].set_attn_implementation("sdpa")
    made = made or assistant()
    expected = models["target"].generate(prompt(), do_sample=False)
    assert torch.equal(models["target"].generate(prompt(), assistant_model=made, do_sample=False), expected)


def test_a_refused_target_keeps_its_chains(drafter):
    """An assistant that drafts chains needs no mask, and stays bound when one that drafts trees is refused."""
    target = tiny()
    chains = DynSpecAssistant(drafter, "full", target=target)
    target.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="flex_attention"):
        DynSpecAssistant(drafter, tree=True, target=target)
    target.config._attn_implementation = "sdpa"
    assert_same(target, chains)


# Artifacts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True, SHAPE])
def test_an_artifact_keeps_the_shape(tree, target, drafter, tmp_path):
    assistant = DynSpecAssistant(drafter, FrequencyShortlist(size=50), target=target, tree=tree)
    assistant.save_pretrained(tmp_path)
    again = DynSpecAssistant.from_pretrained(tmp_path, target=target, drafter=drafter)
    assert again.tree == assistant.tree
    assert torch.equal(generate(target, again), generate(target, assistant))
    assert again.stats.to_dict() == assistant.stats.to_dict()
    # An argument takes precedence.
    other = TreeConfig(7, 2, 3)
    for chosen, shape in ((other, other), (True, TreeConfig()), (False, None)):
        changed = DynSpecAssistant.from_pretrained(tmp_path, target=target, drafter=drafter, tree=chosen)
        assert changed.tree == shape
