"""The policy that chooses groups of equal size by one layer on the hidden state. How it is trained,
`test_train_router.py` tests, and what it shares with routers, `test_router.py`."""

import pytest
import torch
from models import VOCABULARY, centroid_router, layer_router, perturbed, random_router, tiny, word_tokenizer

from hf_dynspec import ArtifactError, ConfigurationError, CoralShortlist, DynSpecAssistant, RouterShortlist
from hf_dynspec.artifacts import write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.protocol import BlockShortlist, Prompt, VocabularyInfo
from hf_dynspec.shortlists import InContextShortlist, Router, UnionShortlist
from hf_dynspec.vocabulary import fingerprint_tokenizer

WIDTH = 32


def vocabulary(draftable: torch.Tensor | None = None) -> VocabularyInfo:
    return VocabularyInfo(VOCABULARY, (2, 77), torch.device("cpu"), draftable)


def hidden_states(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def expected_ids(policy: CoralShortlist, hidden: torch.Tensor, info: VocabularyInfo) -> set[int]:
    """By sets and loops: a tree's tokens share the groups that are likely for any of them."""
    router = policy.router
    probabilities = torch.stack(
        [(router.output_weight @ row + router.output_bias).double().softmax(0) for row in hidden]
    )
    best = probabilities.amax(0).argsort(descending=True).tolist()[: policy.top_groups]
    ids = {token for token, group in enumerate(router.clusters.tolist()) if group in best} | set(info.eos_token_ids)
    return ids if info.draftable is None else ids & set(info.draftable.tolist())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_shortlists_hold_the_groups_that_the_layer_finds_likely(rows, packed, is_trimmed):
    draftable = torch.cat([torch.tensor([2, 77]), torch.arange(90, 280)]) if is_trimmed else None
    info, policy = vocabulary(draftable), CoralShortlist(layer_router(), 3, packed)
    router = policy.router
    if is_trimmed:
        # Groups of which nothing but EOS can be drafted take no place on a shortlist.
        has_token = torch.isin(torch.arange(12), router.clusters[draftable[2:]])
        assert not has_token.all()
        router = Router(**{**router.tensors(), "output_bias": router.output_bias.masked_fill(~has_token, -torch.inf)})
    assert not policy.needs.draft_inputs
    state = policy.start(info)
    for seed in range(6):
        hidden = hidden_states(rows, seed)
        # Hidden states of a tree may be of very different lengths.
        hidden *= torch.logspace(-1, 1, rows).unsqueeze(1)
        shortlist = state.select(seed, torch.arange(rows), hidden)
        assert isinstance(shortlist, BlockShortlist) == packed
        ids = shortlist.ids().tolist()
        assert len(set(ids)) == len(ids)
        assert set(ids) == expected_ids(CoralShortlist(router, 3), hidden, info)


def test_as_many_groups_are_scored_at_each_step():
    policy = CoralShortlist(layer_router(), top_groups=5)
    assert [policy.budget(depth) for depth in (0, 1, 9)] == [5, 5, 5]
    assert policy.with_budget(100).budget(0) == 12 and policy.with_budget(2).settings()["top_groups"] == 2


def test_a_union_with_a_window_holds_both():
    policy = CoralShortlist(layer_router(), 2)
    state = UnionShortlist(InContextShortlist(20), policy).start(vocabulary())
    window = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:9]
    state.observe_prompt(Prompt(window, 0))
    hidden = hidden_states()
    ids = set(state.select(0, torch.tensor([5]), hidden).ids().tolist())
    assert ids == expected_ids(policy, hidden, vocabulary()) | set(window.tolist())


# Bad input, and artifacts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"router": random_router()}, "one layer"),
        ({"router": centroid_router()}, "one layer"),
        ({"router": 5}, "router must be"),
        ({"router": "/nowhere"}, "nowhere"),
        ({"top_groups": 0}, "top_groups"),
        ({"top_groups": 1.5}, "top_groups"),
        ({"packed": 1}, "packed"),
    ],
)
def test_bad_arguments_are_refused(arguments, says):
    with pytest.raises((ConfigurationError, ArtifactError), match=says):
        CoralShortlist(**{"router": layer_router(), **arguments})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_bias": torch.zeros(5)}, "output_bias"),
        ({"output_weight": torch.zeros(11, WIDTH)}, "output_weight"),
        ({"output_weight": torch.zeros(12, WIDTH, dtype=torch.int64)}, "floating-point"),
        ({"clusters": torch.tensor([0, 2, 2])}, "without gaps"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        CoralShortlist.from_settings({"top_groups": 3}, {**layer_router().tensors(), **changes})
    missing = {name: tensor for name, tensor in layer_router().tensors().items() if name not in changes}
    with pytest.raises(ConfigurationError, match=r"a router needs|clusters"):
        CoralShortlist.from_settings({"top_groups": 3}, missing)


def test_a_layer_for_drafters_of_another_width_and_one_for_dynaspec_are_refused():
    target = tiny("llama")
    with pytest.raises(ConfigurationError, match="16"):
        DynSpecAssistant(perturbed(target), CoralShortlist(layer_router(width=16)), target=target)
    with pytest.raises(ConfigurationError, match="CoralShortlist"):
        RouterShortlist(layer_router())


def test_an_artifact_brings_its_settings_and_takes_others(tmp_path):
    stored = CoralShortlist(layer_router(), 5, packed=False)
    tokenizer = fingerprint_tokenizer(word_tokenizer())
    for policy in (stored, RouterShortlist(random_router(), 3)):
        config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=tokenizer)
        write_artifact(tmp_path / policy.name, config, policy.tensors())
    loaded = CoralShortlist(tmp_path / "coral")
    assert loaded.settings() == stored.settings() and loaded.tokenizer_fingerprints == (tokenizer,)
    for name, tensor in stored.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor)
    assert CoralShortlist(tmp_path / "coral", top_groups=2).settings() == {"top_groups": 2, "packed": False}
    with pytest.raises(ArtifactError, match="is 'router'"):
        CoralShortlist(tmp_path / "router")
    with pytest.raises(ArtifactError, match="is 'coral'"):
        RouterShortlist(tmp_path / "coral")
