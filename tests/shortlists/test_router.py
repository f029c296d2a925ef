"""The policy that chooses token clusters: its budget, its blocks, and the head that scores them."""

import gc
import json
import weakref

import pytest
import torch
from models import (
    VOCABULARY,
    centroid_router,
    fitted_budgets,
    perturbed,
    random_router,
    tiny,
    word_tokenizer,
)

from hf_dynspec import ArtifactError, ConfigurationError, DynSpecAssistant
from hf_dynspec.artifacts import write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.protocol import BlockShortlist, Prompt, VocabularyInfo
from hf_dynspec.shortlists import UnionShortlist
from hf_dynspec.shortlists.in_context import InContextShortlist
from hf_dynspec.shortlists.router import Router, RouterShortlist
from hf_dynspec.shortlists.router.layout import BLOCK_ROWS
from hf_dynspec.shortlists.router.policy import position_aware_clusters
from hf_dynspec.vocabulary import fingerprint_tokenizer

WIDTH = 32
RANKING = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5))


def vocabulary(eos: tuple[int, ...] = (2, 77), draftable: torch.Tensor | None = None) -> VocabularyInfo:
    return VocabularyInfo(VOCABULARY, eos, torch.device("cpu"), draftable)


def states(rows: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def expected_ids(policy: RouterShortlist, scores: torch.Tensor, depth: int, info: VocabularyInfo) -> set[int]:
    """By sets and loops."""
    clusters = policy.router.clusters.tolist()
    order = scores.argsort(descending=True).tolist()[: policy.budget(depth)]
    if policy.mass < 1:
        probabilities = scores.sigmoid()
        reached, kept = 0.0, []
        for cluster in order:
            if reached < policy.mass * float(probabilities.sum()):
                kept.append(cluster)
            reached += float(probabilities[cluster])
        order = kept
    ids = {token for token, cluster in enumerate(clusters) if cluster in order}
    ids |= set(policy.ranking[: policy.pinned].tolist()) if policy.pinned else set()
    ids |= set(info.eos_token_ids)
    return ids if info.draftable is None else ids & set(info.draftable.tolist())


def test_the_budget_is_that_of_the_paper():
    assert [position_aware_clusters(48, depth) for depth in range(6)] == [48, 48, 8, 6, 4, 4]
    assert [position_aware_clusters(3, depth) for depth in range(4)] == [3, 3, 1, 1]
    policy = RouterShortlist(random_router(), max_clusters=100)
    assert [policy.budget(depth) for depth in range(4)] == [12, 12, 2, 1]
    assert RouterShortlist(random_router(), max_clusters=5, schedule="fixed").budget(9) == 5


def test_fitted_budgets_are_those_of_their_row():
    policy = RouterShortlist(random_router(), max_clusters=9, budgets=fitted_budgets())
    assert policy.schedule == "fitted"
    assert [policy.budget(depth) for depth in range(5)] == [9, 5, 4, 4, 4]
    assert [policy.with_budget(100).budget(depth) for depth in range(3)] == [12, 7, 5]
    formula = RouterShortlist(random_router(), 12, "dynaspec", budgets=fitted_budgets())
    assert [formula.budget(depth) for depth in range(3)] == [12, 12, 2]


@pytest.mark.parametrize(
    ("budgets", "says"),
    [
        ([[1]], "int32 or int64"),
        (fitted_budgets().float(), "int32 or int64"),
        (fitted_budgets(11), "each of 12 clusters"),
        (fitted_budgets()[:, :0], "each of 12 clusters"),
        (fitted_budgets() - 1, "run from 1 to 12"),
        (fitted_budgets().flip(0), "begin with the number of their row"),
        (torch.cat([fitted_budgets(), torch.full((12, 1), 13)], 1), "run from 1 to 12"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(budgets, says):
    with pytest.raises(ConfigurationError, match=says):
        RouterShortlist(random_router(), budgets=budgets)


def test_the_network_is_the_one_of_the_docstring():
    router, (embeddings, features) = random_router(), states(3)
    read = [one / one.square().mean(-1, keepdim=True).sqrt() for one in (embeddings, features)]
    inner = torch.cat(read, -1) @ router.input_weight.T + router.input_bias
    expected = (inner * torch.sigmoid(inner)) @ router.output_weight.T + router.output_bias
    torch.testing.assert_close(router.scores(embeddings, features), expected, rtol=1e-5, atol=1e-5)
    # How large states are does not matter.
    scaled = router.scores(embeddings * 9, features / 7)
    torch.testing.assert_close(scaled, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mass", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("pinned", [0, 1, 20, 40])
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_shortlists_hold_the_chosen_clusters_and_what_is_pinned(mass, pinned, is_trimmed):
    policy = RouterShortlist(random_router(), 5, "dynaspec", mass, RANKING, pinned)
    info = vocabulary(draftable=torch.cat([torch.tensor([2, 77]), RANKING[10:150]]).unique() if is_trimmed else None)
    state = policy.start(info)
    for seed in range(4):
        inputs = states(seed=seed)
        for depth in range(4):
            state.observe_draft_inputs(*inputs)
            shortlist = state.select(depth, torch.tensor([5]), inputs[0])
            ids = shortlist.ids().tolist()
            assert len(set(ids)) == len(ids)
            assert set(ids) == expected_ids(policy, policy.router.scores(*inputs)[0], depth, info)
            assert torch.equal(shortlist.layout.token_ids[shortlist.blocks].flatten(), shortlist.slots)
            assert int(shortlist.count) == len(ids) and shortlist.width == shortlist.slots.shape[0]
            for shape in ((2, 9), (1,)):
                columns = torch.randint(0, shortlist.width, shape)
                assert torch.equal(shortlist.ids_at(columns), shortlist.slots[columns])
            asked = torch.arange(VOCABULARY + 5)
            assert set(asked[shortlist.contains(asked)].tolist()) == set(ids)


def test_a_shortlist_is_never_empty():
    """Clusters that hold nothing that can be drafted are passed over, however likely the router finds them."""
    router = random_router()
    likely = router.output_bias.clone()
    likely[3] = 1e4
    policy = RouterShortlist(Router(**{**router.tensors(), "output_bias": likely}), max_clusters=1)
    draftable = (router.clusters != 3).nonzero().squeeze(1)
    state = policy.start(vocabulary(eos=(), draftable=draftable))
    state.observe_draft_inputs(*states())
    ids = state.select(0, torch.tensor([5]), states()[0]).ids()
    assert ids.numel() and bool(torch.isin(ids, draftable).all())


def test_the_tokens_of_a_tree_share_their_best_clusters():
    policy = RouterShortlist(random_router(), 4, schedule="fixed")
    state, inputs = policy.start(vocabulary()), states(rows=6)
    state.observe_draft_inputs(*inputs)
    pooled = policy.router.scores(*inputs).amax(0)
    shortlist = state.select(0, torch.arange(6), inputs[0])
    assert set(shortlist.ids().tolist()) == expected_ids(policy, pooled, 0, vocabulary())


def test_centroids_score_as_if_each_were_a_token():
    router = centroid_router()
    policy = RouterShortlist(router, 3, schedule="fixed")
    assert not policy.needs.draft_inputs
    features = states()[0]
    shortlist = policy.start(vocabulary()).select(0, torch.tensor([5]), features)
    scores = (features @ router.centroids.T)[0]
    assert set(shortlist.ids().tolist()) == expected_ids(policy, scores, 0, vocabulary())


def test_a_router_that_foresaw_nothing_says_so():
    with pytest.raises(RuntimeError, match="observe_draft_inputs"):
        RouterShortlist(random_router()).start(vocabulary()).select(0, torch.tensor([5]), states()[0])


def test_off_the_cpu_the_number_of_blocks_is_fixed_beforehand():
    """There it would have to be waited for; what is not chosen is −1."""
    policy = RouterShortlist(random_router(), 4, ranking=RANKING, pinned=20)
    layout = policy._layout(vocabulary())
    for seed in range(6):
        chosen = torch.zeros(13, dtype=torch.bool)
        chosen[torch.randperm(12, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 4]] = True
        chosen[-1] = True
        exact = layout.blocks_of(chosen, 4)
        fixed = layout.fixed_blocks_of(chosen, 4)
        assert fixed.shape[0] == layout.most_blocks[4] >= exact.shape[0]
        assert fixed[fixed >= 0].tolist() == exact.tolist()
        assert (fixed >= 0).sum() == exact.shape[0]
        one, other = (BlockShortlist(blocks, layout.blocks, 1) for blocks in (fixed, exact))
        assert one.ids().tolist() == other.ids().tolist() and int(one.count) == int(other.count)
        asked = torch.arange(VOCABULARY + 5)
        assert torch.equal(one.contains(asked), other.contains(asked))
        # What is not there stands in the last columns, and has some id of the vocabulary.
        ids = one.ids_at(torch.arange(one.width))
        assert torch.equal(ids[: other.width], other.slots) and int(ids.max()) < VOCABULARY


# The head -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_trimmed", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_blocks_score_as_the_head_does(with_bias, is_trimmed, soft_cap, monkeypatch):
    token_ids = torch.randperm(VOCABULARY)[:200] if is_trimmed else None
    if is_trimmed:
        token_ids = torch.cat([torch.tensor([2, 77]), token_ids[(token_ids != 2) & (token_ids != 77)]])
    rows = VOCABULARY if token_ids is None else token_ids.shape[0]
    weight, bias = torch.randn(rows, WIDTH), torch.randn(rows) if with_bias else None
    head = DynamicLMHead(weight, bias, logit_scale=0.5, soft_cap=soft_cap, token_ids=token_ids)
    plain = DynamicLMHead(weight, bias, logit_scale=0.5, soft_cap=soft_cap, token_ids=token_ids)
    info = vocabulary(draftable=token_ids)
    packed = RouterShortlist(random_router(), 3, ranking=RANKING, pinned=20).start(info)
    loose = RouterShortlist(random_router(), 3, ranking=RANKING, pinned=20, packed=False).start(info)
    # What does not go through blocks would fail.
    monkeypatch.setattr(head, "_scattered_scores", None)
    for seed in range(3):
        inputs, hidden = states(rows=2, seed=seed), torch.randn(2, WIDTH)
        for state in (packed, loose):
            state.observe_draft_inputs(*inputs)
        one, other = (state.select(seed, torch.tensor([5, 6]), inputs[0]) for state in (packed, loose))
        assert isinstance(one, BlockShortlist) and not isinstance(other, BlockShortlist)
        torch.testing.assert_close(
            head.scores(hidden, one, PackedRows()), plain.scores(hidden, other, PackedRows()), rtol=1e-5, atol=1e-5
        )


def test_a_union_scores_blocks_as_blocks_and_its_window_from_packed_rows(monkeypatch):
    head = DynamicLMHead(torch.randn(VOCABULARY, WIDTH))
    # What is gathered row by row would fail.
    monkeypatch.setattr(head, "_scattered_scores", None)
    state = UnionShortlist(InContextShortlist(20), RouterShortlist(random_router(), 3)).start(vocabulary())
    rows = PackedRows()
    for seed in range(5):
        state.observe_prompt(Prompt(torch.randperm(VOCABULARY)[:9], 0))
        for depth in range(3):
            inputs, hidden = states(rows=2, seed=3 * seed + depth), torch.randn(2, WIDTH)
            state.observe_draft_inputs(*inputs)
            shortlist = state.select(depth, torch.tensor([5, 6]), inputs[0])
            expected = (hidden @ head.weight.T)[:, shortlist.scored_slots]
            expected = expected.masked_fill(~shortlist.scored_occupied, -torch.inf)
            torch.testing.assert_close(head.scores(hidden, shortlist, rows), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_copied_once_and_not_held_longer_than_the_policy():
    head = DynamicLMHead(torch.randn(VOCABULARY, WIDTH))
    policy = RouterShortlist(random_router(), 3)
    for _ in range(3):
        state = policy.start(vocabulary())
        state.observe_draft_inputs(*states())
        head.scores(states()[0], state.select(0, torch.tensor([5]), states()[0]), PackedRows())
    (held,) = head._blocks.values()
    assert held.weight.shape[1:] == (BLOCK_ROWS, WIDTH)
    remembered = weakref.ref(held)
    del held, state, policy
    gc.collect()
    assert remembered() is None


def test_clusters_that_do_not_fill_their_last_block_cost_little():
    """151,665 tokens in 1,024 clusters of very different sizes: at most half a block for each, on average."""
    sizes = torch.distributions.Dirichlet(torch.ones(1024)).sample() * 150_000
    clusters = torch.repeat_interleave(torch.arange(1024), sizes.long() + 1)
    policy = RouterShortlist(Router(clusters, centroids=torch.zeros(1024, 4)))
    layout = policy._layout(VocabularyInfo(clusters.shape[0], (), torch.device("cpu")))
    assert layout.blocks.token_ids.numel() < 1.1 * clusters.shape[0]


# Bad input ----------------------------------------------------------------------------------------------------------


def parts(**changes) -> dict[str, torch.Tensor]:
    return {**random_router().tensors(), **changes}


BAD_ROUTERS = {
    "a gap in the clusters": (parts(clusters=torch.tensor([0, 2, 2])), "without gaps"),
    "a negative cluster": (parts(clusters=torch.tensor([0, -1])), "without gaps"),
    "clusters of numbers": (parts(clusters=torch.rand(4)), "int32 or int64"),
    "no clusters": (parts(clusters=torch.zeros(0, dtype=torch.int64)), "int32 or int64"),
    "two dimensions": (parts(clusters=torch.zeros(2, 2, dtype=torch.int64)), "int32 or int64"),
    "half a network": ({name: one for name, one in parts().items() if name != "input_bias"}, "a router needs"),
    "both": (parts(centroids=torch.zeros(12, 4)), "not both"),
    "neither": ({"clusters": torch.zeros(3, dtype=torch.int64)}, "a router needs"),
    "outputs for other clusters": (parts(output_bias=torch.zeros(5)), "output_bias"),
    "another width": (parts(output_weight=torch.zeros(12, 9)), "input_weight"),
    "an odd width": (parts(input_weight=torch.zeros(24, 7)), "even number"),
    "whole numbers": (parts(input_bias=torch.zeros(24, dtype=torch.int64)), "floating-point"),
    "too few centroids": ({"clusters": torch.arange(3), "centroids": torch.zeros(2, 4)}, "centroids"),
}


@pytest.mark.parametrize("name", BAD_ROUTERS)
def test_tensors_that_do_not_fit_are_refused(name):
    tensors, says = BAD_ROUTERS[name]
    with pytest.raises(ConfigurationError, match=says):
        Router(**tensors)
    settings = RouterShortlist(random_router()).settings()
    with pytest.raises(ConfigurationError, match=says):
        RouterShortlist.from_settings(settings, tensors)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"router": 5}, "router must be"),
        ({"router": "/nowhere"}, "nowhere"),
        ({"max_clusters": 0}, "max_clusters"),
        ({"max_clusters": True}, "max_clusters"),
        ({"schedule": "halving"}, "schedule must be one of fitted, dynaspec, fixed"),
        ({"schedule": "fitted"}, "needs budgets"),
        ({"packed": 0}, "packed"),
        ({"mass": 0.0}, "mass"),
        ({"mass": 1.5}, "mass"),
        ({"mass": True}, "mass"),
        ({"pinned": -1}, "pinned"),
        ({"pinned": 5}, "ranking"),
        ({"pinned": 5, "ranking": [1, 1]}, "repeat"),
        ({"router": centroid_router(), "mass": 0.5}, "trained router"),
    ],
)
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(Exception, match=says):
        RouterShortlist(**{"router": random_router(), **settings})


def test_an_artifact_brings_its_settings_and_takes_others(tmp_path):
    stored = RouterShortlist(random_router(), 5, None, 0.8, RANKING, pinned=9, packed=False, budgets=fitted_budgets())
    tokenizer = fingerprint_tokenizer(word_tokenizer())
    config = DynSpecConfig(PolicyConfig(stored.name, stored.settings()), tokenizer=tokenizer)
    write_artifact(tmp_path / "router", config, stored.tensors())
    loaded = RouterShortlist(tmp_path / "router")
    assert loaded.settings() == stored.settings() and torch.equal(loaded.ranking, RANKING)
    assert loaded.schedule == "fitted" and loaded.budget(1) == 3
    assert loaded.tokenizer_fingerprints == (tokenizer,)
    changed = RouterShortlist(str(tmp_path / "router"), max_clusters=2, schedule="dynaspec", mass=1.0, pinned=0)
    assert changed.settings() == {**RouterShortlist(random_router(), 2).settings(), "packed": False}
    write_artifact(tmp_path / "older", DynSpecConfig(PolicyConfig(stored.name), tokenizer=tokenizer), stored.tensors())
    older = json.loads((tmp_path / "older" / "config.json").read_text())
    older["policy"]["settings"] = {"position_aware": True}
    (tmp_path / "older" / "config.json").write_text(json.dumps(older))
    with pytest.raises(ArtifactError, match="no setting 'position_aware'"):
        RouterShortlist(tmp_path / "older")
    write_artifact(tmp_path / "damaged", config, {**stored.tensors(), "budgets": fitted_budgets() + 1})
    with pytest.raises(ArtifactError, match="budgets must run from 1 to 12"):
        RouterShortlist(tmp_path / "damaged")
    union = UnionShortlist(stored)
    config = DynSpecConfig(PolicyConfig(union.name, union.settings()), tokenizer=tokenizer)
    write_artifact(tmp_path / "union", config, union.tensors())
    with pytest.raises(ArtifactError, match="clusters"):
        RouterShortlist(tmp_path / "union")


def test_a_router_of_another_vocabulary_or_width_is_refused():
    with pytest.raises(ConfigurationError, match="200 tokens"):
        RouterShortlist(random_router(vocabulary=200)).start(vocabulary())
    target = tiny("llama")
    assistant = DynSpecAssistant(perturbed(target), RouterShortlist(random_router(width=16)))
    with pytest.raises(ConfigurationError, match="16"):
        assistant.bind(target)
