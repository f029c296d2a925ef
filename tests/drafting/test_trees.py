"""Draft trees: how they grow, which path the target accepts, and `generate` with them, exact to the token."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from draft_trees import assert_same_tree, over_shortlist, paths_of, slow_tree, verify
from models import (
    BOS,
    EOS,
    FAMILIES,
    PAD,
    POLICY_CASES,
    SLIDING_WINDOW,
    TERRIBLE,
    VOCABULARY,
    RandomShortlist,
    character_tokenizer,
    perturbed,
    prompt,
    tiny,
    word_tokenizer,
)
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    TextStreamer,
)

from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    FrequencyShortlist,
    NotBoundError,
    TreeConfig,
    UnsupportedError,
)
from hf_dynspec.cache_names import CACHE, returned_cache
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.drafting.trees import TreeGrowth
from hf_dynspec.generation.verification import Outcome
from hf_dynspec.modeling.masks import attention_mask, attention_windows, descent
from hf_dynspec.protocol import Candidates, Shortlist

ALL_POLICIES = POLICY_CASES | TERRIBLE
NEW_TOKENS = 22
SHAPE = TreeConfig(total_tokens=24, depth=4, top_k=4)
# fp32 logits of a batched forward and of one-token forwards, where logits reach about 100.
CLOSE = {"rtol": 1e-4, "atol": 3e-3}


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


# Greedy --------------------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target)


@pytest.fixture(params=["full", "random"])
def assistant(request, target, drafter) -> DynSpecAssistant:
    policy = RandomShortlist(60) if request.param == "random" else POLICY_CASES[request.param]()
    return DynSpecAssistant(drafter, policy, target=target, tree=SHAPE)


@pytest.fixture
def full(target, drafter) -> DynSpecAssistant:
    return DynSpecAssistant(drafter, "full", target=target, tree=SHAPE)


def generate(target, assistant=None, input_ids=None, **arguments):
    input_ids = prompt() if input_ids is None else input_ids
    defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "assistant_model": assistant}
    return target.generate(input_ids, **{**defaults, **arguments})


def assert_same(target, assistant, input_ids=None, **arguments) -> torch.Tensor:
    """The output with the assistant, which is the one without."""
    actual = generate(target, assistant, input_ids, **arguments)
    expected = generate(target, None, input_ids, **arguments)
    assert torch.equal(actual, expected)
    return actual


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_greedy_output_is_the_targets_own(name, target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPE)
    output = assert_same(target, assistant)
    stats = assistant.stats
    assert stats.tokens == output.shape[1] - 12
    assert stats.accepted < stats.drafted, "nothing of the draft was ever rejected, so rejection was not exercised"
    if name in POLICY_CASES:
        assert stats.accepted > 0, "nothing of the draft was ever accepted, so acceptance was not exercised"
    if name == "full":
        assert len(stats.tokens_per_round) > 3, "no path of more than one token was ever accepted"


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


EAGER = ["llama", "mistral", "gemma2", "gemma3", "gpt2"]
CASES = [(family, "sdpa") for family in (*FAMILIES, "gemma") if family != "gemma2"] + [
    (family, "eager") for family in EAGER
]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_every_family(family, attention):
    """With windows shorter than the text; as a target, and as a drafter that drafts what it would from scratch."""
    target = confident(gemma() if family == "gemma" else tiny(family))
    target.set_attn_implementation(attention)
    drafter = perturbed(target)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPE)
    output = assert_same(target, assistant, prompt(14), max_new_tokens=26, eos_token_id=VOCABULARY - 1)
    assert output.shape[1] > SLIDING_WINDOW + 10, "the text never got past the sliding windows"
    assert len(assistant.stats.tokens_per_round) > 3, "no path of more than one token was ever accepted"
    text, shape = output[:, :32], TreeConfig(10, 2, 3)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=shape)
    assert_same_tree(assistant.draft_round(text), slow_draft(drafter, text, shape), tolerance=2e-3)


def gemma() -> PreTrainedModel:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = GemmaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, head_dim=8, tie_word_embeddings=False, **shape, **special
    )
    torch.manual_seed(0)
    model = GemmaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_target_that_prepares_its_inputs_under_the_older_name(tree):
    """As models from elsewhere may."""

    class Older(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **inputs):
            prepared = super().prepare_inputs_for_generation(input_ids, **inputs)
            return {"past_key_values" if name == CACHE else name: value for name, value in prepared.items()}

    target = tiny()
    older = Older(target.config).eval()
    older.load_state_dict(target.state_dict())
    older.generation_config = target.generation_config
    assistant = DynSpecAssistant(perturbed(target), target=older, tree=tree)
    assert torch.equal(generate(older, assistant), generate(target))
    assert assistant.stats.drafted > 0


@pytest.mark.parametrize("prompt_length", [SLIDING_WINDOW - 2, 40])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "cohere2"])
def test_a_cache_without_windows(family, prompt_length):
    """A passed-in `DynamicCache()` keeps all positions, also those that the windows of the model have left behind."""
    target = confident(tiny(family, seed=3))
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    arguments = {"max_new_tokens": 20, "eos_token_id": VOCABULARY - 1}
    expected = generate(target, None, prompt(prompt_length), **arguments)
    for cache in (DynamicCache(), DynamicCache(config=target.config), None):
        output = generate(target, assistant, prompt(prompt_length), **{CACHE: cache}, **arguments)
        assert torch.equal(output, expected)
        assert len(assistant.stats.tokens_per_round) > 2


@pytest.mark.parametrize(
    "families", [("llama", "gpt2"), ("gpt2", "llama"), ("mistral", "qwen3"), ("gemma3", "mistral")]
)
def test_the_drafter_may_be_of_another_family(families):
    target, drafter = tiny(families[0]), tiny(families[1], seed=9)
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    assert_same(target, assistant, max_new_tokens=20, eos_token_id=VOCABULARY - 1)


@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_in_bf16_every_token_is_an_argmax_up_to_rounding(name, target, drafter):
    """Eight steps of bf16's rounding of the largest logit, as for chains; a wrong token lies farther away."""
    target_16 = copy.deepcopy(target).to(torch.bfloat16)
    drafter_16 = copy.deepcopy(drafter).to(torch.bfloat16)
    assistant = DynSpecAssistant(drafter_16, ALL_POLICIES[name](), target=target_16, tree=SHAPE)
    output = generate(target_16, assistant)
    with torch.no_grad():
        logits = target_16(output).logits[0, 11:-1].float()
    emitted = logits.gather(1, output[0, 12:, None])[:, 0]
    explained = 8 * 2**-8 * float(logits.abs().max())
    assert float((logits.amax(-1) - emitted).max()) <= explained < float(logits.amax(-1).min())
    assert assistant.stats.accepted > 0


def test_calls_on_one_assistant_do_not_lean_on_each_other(target, drafter):
    used = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    for seed, length in ((7, 30), (8, 3)):
        generate(target, used, prompt(length, seed))
    fresh = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    assert torch.equal(assert_same(target, used), generate(target, fresh))
    assert used.stats.to_dict() == fresh.stats.to_dict()


def test_two_threads_on_one_assistant(target, drafter):
    prompts = [prompt(10 + seed, seed) for seed in range(4)]
    expected = [generate(target, None, input_ids) for input_ids in prompts]
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    together = threading.Barrier(2)

    def run(half: int) -> list[torch.Tensor]:
        together.wait(timeout=600)
        return [generate(target, assistant, input_ids) for input_ids in prompts[half::2]]

    with ThreadPoolExecutor(2) as pool:
        for half, outputs in enumerate(pool.map(run, range(2), timeout=600)):
            for output, own in zip(outputs, expected[half::2], strict=True):
                assert torch.equal(output, own)
    alone = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    for input_ids in prompts:
        generate(target, alone, input_ids)
    assert assistant.stats_total.to_dict() == alone.stats_total.to_dict()


# One round -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def slow_draft(drafter, text: torch.Tensor, config: TreeConfig, ids: torch.Tensor | None = None) -> dict:
    """The tree that the drafter's own forwards make, each over a whole path from the beginning of the text."""
    ids = torch.arange(VOCABULARY) if ids is None else ids

    def successors(path: tuple[int, ...]) -> dict[int, float]:
        whole = torch.cat([text, torch.tensor([path], dtype=torch.int64)], dim=1)
        return over_shortlist(drafter(whole, use_cache=False).logits[0, -1], ids)

    return slow_tree(successors, config)


@pytest.mark.parametrize("shape", [(60, 5, 10), (24, 4, 4), (9, 6, 2), (5, 0, 6)])
@pytest.mark.parametrize("name", ["full", "frequency"])
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


def test_what_is_no_text_of_one_sequence_is_refused(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", tree=True)
    with pytest.raises(NotBoundError, match="bind"):
        assistant.draft_round(prompt())
    assistant.bind(target)
    for wrong in (prompt()[0], prompt(1), prompt().expand(2, -1), prompt().tolist()):
        with pytest.raises(UnsupportedError, match="one sequence"):
            assistant.draft_round(wrong)


@pytest.fixture
def rounds(monkeypatch) -> list:
    """The (prefix, longest useful path, candidates) of every tree that any session drafts."""
    recorded = []
    draft = DraftSession.draft_tree

    def recording(self, prefix, config, most, draw=None):
        candidates = draft(self, prefix, config, most, draw)
        recorded.append((prefix.clone(), most, candidates))
        return candidates

    monkeypatch.setattr(DraftSession, "draft_tree", recording)
    return recorded


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
def test_past_the_windows_too(family, rounds):
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


# Lengths and ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5])
def test_short_outputs_are_not_overshot(new_tokens, target):
    """Also by a drafter that is always right."""
    assistant = DynSpecAssistant(target, "full", target=target, tree=SHAPE)
    assert assert_same(target, assistant, max_new_tokens=new_tokens).shape[1] == 12 + new_tokens
    assert assistant.stats.tokens == new_tokens
    assert len(assistant.stats.drafted_at) <= max(0, new_tokens - 2)
    assert assert_same(target, assistant, max_new_tokens=None, max_length=12 + new_tokens).shape[1] == 12 + new_tokens


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length, assistant, target):
    assert_same(target, assistant, prompt(length))


@pytest.mark.parametrize("place", range(6))
def test_the_end_of_the_text_within_an_accepted_path(place, target):
    plain = generate(target)[0, 12:].tolist()
    end = plain[place]
    place = plain.index(end)
    assistant = DynSpecAssistant(target, "full", target=target, tree=SHAPE)
    output = assert_same(target, assistant, eos_token_id=end)
    assert output.shape[1] == 12 + place + 1 and output[0, -1] == end
    assert assistant.stats.tokens == place + 1


def test_several_ends_and_none(assistant, target):
    plain = generate(target)[0, 12:].tolist()
    assert assert_same(target, assistant, eos_token_id=[plain[9], EOS, plain[6], 7]).shape[1] <= 12 + 7
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = None
    assistant.bind(model)
    assert assert_same(model, assistant).shape[1] == 12 + NEW_TOKENS


class AfterTokens(StoppingCriteria):
    """Is true at one length only, and so must be asked at every length."""

    def __init__(self, length: int):
        self.length = length
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        assert scores is None or len(scores) == input_ids.shape[1] - 12
        return torch.full((1,), input_ids.shape[1] == self.length)


@pytest.mark.parametrize("length", [13, 14, 15, 19])
def test_a_criterion_is_asked_after_every_token(length, assistant, target):
    criterion = AfterTokens(length)
    arguments = {"return_dict_in_generate": True, "output_scores": True}
    output = generate(target, assistant, stopping_criteria=[criterion], **arguments)
    assert torch.equal(output.sequences, generate(target)[:, :length])
    assert len(output.scores) == length - 12
    assert set(criterion.lengths) >= set(range(13, length + 1))
    assert returned_cache(output).get_seq_length() == length - 1


@pytest.mark.parametrize("place", [2, 5, 9])
def test_stop_strings(place, target, full):
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(generate(target)[0, 12 + place : 14 + place])
    output = assert_same(target, full, stop_strings=[stop], tokenizer=tokenizer)
    assert output.shape[1] <= 14 + place


def test_streamers(assistant, target, capsys):
    class Pieces:
        def __init__(self):
            self.pieces: list[list[int]] = []
            self.ends = 0

        def put(self, value: torch.Tensor) -> None:
            assert self.ends == 0
            self.pieces.append(value.flatten().tolist())

        def end(self) -> None:
            self.ends += 1

    pieces = Pieces()
    output = generate(target, assistant, streamer=pieces)
    assert [token for piece in pieces.pieces for token in piece] == output[0].tolist() and pieces.ends == 1
    lengths = [len(piece) for piece in pieces.pieces[1:]]
    assert assistant.stats.rounds == len(lengths)
    assert assistant.stats.tokens_per_round == [lengths.count(count) for count in range(max(lengths) + 1)]
    texts = []
    for one in (assistant, None):
        generate(target, one, streamer=TextStreamer(word_tokenizer(), skip_prompt=True))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0].split()) > 4


# Logits processors ---------------------------------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Written for one sequence, which is what `generate` was given: reads its last token and its length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (1, VOCABULARY) and input_ids.shape[0] == 1
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % VOCABULARY] += 40.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[3]], [plain[5], plain[6]]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": lambda plain: {"suppress_tokens": plain[2:9]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": plain[:1]},
    "minimum length": lambda plain: {"eos_token_id": plain[4], "min_new_tokens": 20},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "sequence_bias": lambda plain: {"sequence_bias": {(plain[4],): -90.0, (plain[8], 9): 90.0}},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.2)},
    "a user's own": {"logits_processor": LogitsProcessorList([Favour()])},
    "a user's own among others": {"repetition_penalty": 1.7, "logits_processor": LogitsProcessorList([Favour()])},
    # By batch index, of which there is one.
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: [[7, 8, 250 + len(ids) % 40, 99]][batch]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(name, full, target):
    arguments = PROCESSORS[name]
    plain = generate(target)
    arguments = arguments(plain[0, 12:].tolist()) if callable(arguments) else arguments
    output = assert_same(target, full, **arguments)
    if name != "minimum length":
        assert not torch.equal(output, plain), "the processor changed nothing"


def test_each_node_is_processed_after_its_own_path(target, full, rounds):
    """Every context that a processor is asked about is the text and the path to a node of the tree after it; and what
    is not on the path that comes out is not processed at all, as in plain generation."""

    class Contexts(LogitsProcessor):
        def __init__(self):
            self.seen: list[tuple[int, ...]] = []

        def __call__(self, input_ids, scores):
            self.seen.append(tuple(input_ids[0].tolist()))
            return scores

    contexts = Contexts()
    output = generate(target, full, logits_processor=[contexts])[0].tolist()
    assert full.stats.accepted > 0
    expected = [tuple(output[:length]) for length in range(12, len(output))]
    # The last round may see tokens past the end.
    assert contexts.seen[: len(expected)] == expected
    possible = {tuple(prompt()[0].tolist())}
    for prefix, _, tree in rounds:
        text = tuple(prefix.tolist())
        possible |= {text, *((*text, *path) for path in paths_of(tree))}
    # The last token may have been asked for without a tree.
    assert len(set(contexts.seen) - possible) <= 1


# Outputs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_everything_that_can_be_returned(family):
    target = confident(tiny(family))
    target.set_attn_implementation("eager")
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    arguments = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "repetition_penalty": 1.3,
        "eos_token_id": VOCABULARY - 1,
        # Attentions of a sliding window have as many columns as the cache holds, which in plain generation is one
        # window; before the text is as long as that they are the same.
        "max_new_tokens": 24 if family == "llama" else SLIDING_WINDOW - 6,
    }
    text = prompt(12 if family == "llama" else 5)
    actual, expected = generate(target, assistant, text, **arguments), generate(target, None, text, **arguments)
    assert torch.equal(actual.sequences, expected.sequences)
    assert actual.keys() == expected.keys()
    assert len(assistant.stats.tokens_per_round) > 3
    for key in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = getattr(actual, key), getattr(expected, key)
        assert len(ours) == len(theirs) == actual.sequences.shape[1] - text.shape[1]
        for one, other in zip(ours, theirs, strict=True):
            mine, its = (one, other) if isinstance(one, tuple) else ((one,), (other,))
            assert [tensor.shape for tensor in mine] == [tensor.shape for tensor in its]
            for tensor, own in zip(mine, its, strict=True):
                torch.testing.assert_close(tensor, own, **CLOSE)
    assert returned_cache(actual).get_seq_length() == actual.sequences.shape[1] - 1
    for layer, other in zip(returned_cache(actual).layers, returned_cache(expected).layers, strict=True):
        torch.testing.assert_close(layer.keys[..., -5:, :], other.keys[..., -5:, :], **CLOSE)
        torch.testing.assert_close(layer.values[..., -5:, :], other.values[..., -5:, :], **CLOSE)


def test_nothing_is_returned_that_was_not_asked_for(target, assistant):
    actual = generate(target, assistant, return_dict_in_generate=True)
    assert actual.keys() == generate(target, None, return_dict_in_generate=True).keys()
    assert actual.hidden_states is None and actual.scores is None


# Prompts, caches, conversations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("padding", [1, SLIDING_WINDOW + 3])
def test_left_padding(family, padding, rounds):
    """Neither model minds, and the drafter does not see it."""
    target = confident(tiny(family))
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.int64), prompt()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long().unsqueeze(0)
    arguments = {"max_new_tokens": 24, "eos_token_id": VOCABULARY - 1}
    output = assert_same(target, assistant, padded, attention_mask=mask, **arguments)
    assert torch.equal(output[:, padding:], generate(target, None, **arguments))
    for prefix, _, _ in rounds:
        assert torch.equal(prefix, output[0, padding : padding + prefix.shape[0]])
    padded_stats = assistant.stats.to_dict()
    generate(target, assistant, **arguments)
    assert assistant.stats.to_dict() == padded_stats
    assert len(assistant.stats.tokens_per_round) > 2


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("in_conversation", [False, True])
def test_a_cache_from_an_earlier_turn(family, in_conversation):
    target = confident(tiny(family))
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    ours = assistant.conversation() if in_conversation else assistant
    text = {True: prompt(20), False: prompt(20)}
    cache = {True: None, False: None}
    for turn in range(3):
        outputs = {}
        for assisted in (True, False):
            outputs[assisted] = generate(
                target,
                ours if assisted else None,
                text[assisted],
                **{CACHE: cache[assisted]},
                return_dict_in_generate=True,
                max_new_tokens=10,
                eos_token_id=VOCABULARY - 1,
            )
            cache[assisted] = returned_cache(outputs[assisted])
            assert cache[assisted].get_seq_length() == outputs[assisted].sequences.shape[1] - 1
            text[assisted] = torch.cat([outputs[assisted].sequences, prompt(4, seed=30 + turn)], dim=1)
        assert torch.equal(outputs[True].sequences, outputs[False].sequences)
    assert len(assistant.stats_total.tokens_per_round) > 3


def test_a_cache_of_the_prompt_but_its_last_token(assistant, target):
    with torch.no_grad():
        cache = returned_cache(target(prompt()[:, :-1], **{CACHE: DynamicCache(config=target.config)}))
    assert torch.equal(generate(target, assistant, **{CACHE: cache}), generate(target))


@pytest.mark.parametrize("name", ["full", "frequency", "in_context, lru", "hybrid", "random", "eos_only"])
def test_a_conversation_stays_exact(name, target, drafter):
    conversation = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPE).conversation()
    text = prompt(10)
    for turn in range(2):
        output = assert_same(target, conversation, text, max_new_tokens=12)
        text = torch.cat([output, prompt(5, seed=50 + turn)], dim=1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_conversation_may_change_its_past(family):
    target = confident(tiny(family))
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    conversation = assistant.conversation()
    text = prompt(30)
    for position in (29, 12):
        generate(target, conversation, text, max_new_tokens=12)
        text = text.clone()
        text[0, position] = 3 + (int(text[0, position]) + 1) % (VOCABULARY - 3)
        assert_same(target, conversation, text)
        assert assistant.stats.accepted > 0
    assert_same(target, conversation, text[:, :7])


# Statistics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "frequency", "in_context", "frequency, position-aware", "random"])
def test_counts(name, target, drafter, rounds):
    """Counted here a second time, from the trees and the tokens that came out."""

    class Pieces:
        def __init__(self):
            self.pieces: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append(value.flatten().tolist())

        def end(self) -> None:
            pass

    policy = RandomShortlist(30) if name == "random" else POLICY_CASES[name]()
    assistant = DynSpecAssistant(drafter, policy, target=target, tree=SHAPE, measure_coverage=True)
    streamer = Pieces()
    output = generate(target, assistant, max_new_tokens=39, streamer=streamer, eos_token_id=VOCABULARY - 1)
    stats, pieces = assistant.stats, streamer.pieces[1:]
    trees = {prefix.shape[0]: tree for prefix, _, tree in rounds}
    assert stats.rounds == len(pieces) and stats.tokens == output.shape[1] - 12
    assert stats.accepted == stats.tokens - stats.rounds
    assert stats.drafted == sum(tree.token_ids.shape[0] for tree in trees.values())
    deepest = max(len(tree.shortlists) for tree in trees.values())
    drafted_at = [sum(tree.depths.tolist().count(depth) for tree in trees.values()) for depth in range(deepest)]
    assert stats.drafted_at == drafted_at and sum(stats.drafted_at) == stats.drafted
    accepted_at = [sum(len(piece) > depth + 1 for piece in pieces) for depth in range(deepest)]
    assert stats.acceptance_rate_by_position == [
        accepted / drafted for accepted, drafted in zip(accepted_at, drafted_at, strict=True)
    ]
    assert all(0.0 <= rate <= 1.0 for rate in stats.acceptance_rate_by_position)
    assert stats.accepted_per_round == [accepted / stats.rounds for accepted in accepted_at]
    assert "tree nodes accepted" in str(stats) and "acceptance rate" not in str(stats)
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    checked, missed, length, covered, mass = 0, 0, 12, 0, 0.0
    with torch.no_grad():
        probabilities = target(output).logits[0].float().softmax(-1)
    for piece in pieces:
        shortlists = trees[length].shortlists if length in trees else ()
        for place, (token, shortlist) in enumerate(zip(piece, shortlists, strict=False)):
            checked += 1
            missed += token not in shortlist.ids().tolist()
            covered += 1
            mass += float(probabilities[length - 1 + place, shortlist.ids()].sum())
        length += len(piece)
    assert stats.oov_rate == pytest.approx(missed / checked) and (missed > 0) == (name != "full")
    assert stats.coverage == pytest.approx(mass / covered, abs=1e-3)
    sizes = [one.ids().shape[0] for tree in trees.values() for one in tree.shortlists]
    assert stats.active_vocabulary == pytest.approx(sum(sizes) / len(sizes))
    assert stats.active_vocabulary_max == max(sizes)


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


@pytest.mark.parametrize("is_later", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("role", ["target", "drafter"])
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


def alibi_models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    bloom = BloomForCausalLM(BloomConfig(**shape, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)).eval()
    mpt = MptForCausalLM(
        MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=256, use_cache=True)
    ).eval()
    return {"bloom": bloom, "mpt": mpt}


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_target_whose_tokens_stand_where_they_lie_is_refused(name, drafter):
    """ALiBi takes distances from the order in the cache, in which the nodes of a tree lie side by side."""
    target = alibi_models()[name]
    before = dict(target.__dict__)
    with pytest.raises(UnsupportedError, match="tree=False"):
        DynSpecAssistant(drafter, "full", target=target, tree=True)
    assert target.__dict__ == before
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_same(target, assistant, max_new_tokens=12)


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
