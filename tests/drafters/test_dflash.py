"""DFlash: blocks are drafted as in transformers' own generation, and the output is the target's own."""

import copy

import pytest
import torch
from beside_targets import TOKENS, dflash, few_worded, gemma4, muse_glimmer, repeating
from calls import assert_same, generate, padded
from models import ForwardCounter, prompt, tiny
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from hf_dynspec import (
    ArtifactError,
    DynSpecAssistant,
    FullShortlist,
    InContextShortlist,
    OnlineAlignment,
    ScreenShortlist,
    UnionShortlist,
    UnsupportedError,
)
from hf_dynspec.cache_names import CACHE, cache_inputs
from hf_dynspec.drafters.dflash import DFlashDrafter
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.shortlists.forwarding import ForwardingPolicy, ForwardingState

TEXT = prompt(vocabulary=TOKENS)
TARGETS = {
    "llama": lambda: few_worded(tiny(vocabulary=TOKENS, num_hidden_layers=4)),
    "muse_glimmer": lambda: few_worded(muse_glimmer()),
    "gemma4": lambda: few_worded(gemma4()),
}
Drafts = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return TARGETS["llama"]()


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return repeating(target)


@pytest.fixture
def drafts(monkeypatch) -> tuple[Drafts, Drafts]:
    """What transformers' generator drafts, and what this package does: the length of the text, and the tokens."""
    theirs, ours = [], []
    get_candidates, draft_chain = DFlashTokenCandidateGenerator.get_candidates, DraftSession.draft_chain

    def of_transformers(self, input_ids, **arguments):
        drafted, logits = get_candidates(self, input_ids, **arguments)
        if logits is not None:
            theirs.append((input_ids.shape[1], drafted[0, input_ids.shape[1] :].tolist()))
        return drafted, logits

    def of_this_package(self, prefix, *arguments):
        candidates = draft_chain(self, prefix, *arguments)
        ours.append((prefix.shape[0], candidates.token_ids.tolist()))
        return candidates

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", of_transformers)
    monkeypatch.setattr(DraftSession, "draft_chain", of_this_package)
    return theirs, ours


def assert_same_drafts(drafts: tuple[Drafts, Drafts], longest: int) -> None:
    """Round by round. Here drafts end where the text must end."""
    theirs, ours = drafts
    assert len(ours) > 3 and [length for length, _ in ours] == [length for length, _ in theirs][: len(ours)]
    for (length, mine), (_, other) in zip(ours, theirs, strict=False):
        assert mine == other[: longest - length - 1]


# Drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dflash, repeating], ids=["random", "repeating"])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_transformers(name, make, drafts):
    """Along whole calls, past the drafter's window, with rejected and accepted drafts, and without the embedding's
    norm."""
    target = TARGETS[name]()
    model = make(target)
    assistant = DynSpecAssistant(model, "full", target=target)
    for length in (2, 12, 40):
        for one in drafts:
            one.clear()
        text = prompt(length, vocabulary=TOKENS)
        expected = generate(target, None, text, max_new_tokens=30)
        theirs = generate(target, model, text, max_new_tokens=30, speculation_type="dflash")
        assert torch.equal(generate(target, assistant, text, max_new_tokens=30), expected)
        assert torch.equal(theirs, expected)
        assert_same_drafts(drafts, length + 30)
    assert assistant.stats_total.accepted > 0 or make is dflash


def test_one_forward_and_one_shortlist_a_round(target, drafter):
    policy = Watched(FullShortlist())
    assistant = DynSpecAssistant(drafter, policy, target=target)
    assert assistant.generation_config.num_assistant_tokens == assistant.drafter.block_size == 7
    with ForwardCounter(drafter) as forwards:
        assert_same(target, assistant, TEXT)
    assert forwards.count == len(policy.selected) < assistant.stats.rounds < assistant.stats.drafted
    assert {depth for depth, _, _ in policy.selected} == {0}
    assert {tuple(token_ids.shape) for _, token_ids, _ in policy.selected} == {(1,)}
    assert {tuple(features.shape[1:]) for _, _, features in policy.selected} == {(32,)}
    assert policy.selected[0][2].shape[0] == 7
    # Fewer tokens than a block: the rest of it is not scored.
    policy.selected.clear()
    assert_same(target, DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=2), TEXT)
    assert {features.shape[0] for _, _, features in policy.selected} <= {1, 2}
    assert_same(target, DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=50), TEXT)


class Watched(ForwardingPolicy):
    """Keeps what its states are given."""

    def __init__(self, policy):
        super().__init__(policy)
        self.selected = []

    def start(self, vocabulary, memory=None):
        return WatchedState(super().start(vocabulary, memory), self)


class WatchedState(ForwardingState):
    def __init__(self, state, policy):
        super().__init__(state)
        self._policy = policy

    def select(self, depth, token_ids, features):
        self._policy.selected.append((depth, token_ids, features))
        return super().select(depth, token_ids, features)


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:drafting does not pay")
@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "hybrid"},
        {"policy": "native"},
        {"policy": "screen"},
        {"policy": "auto"},
        {"policy": UnionShortlist(InContextShortlist(20), ScreenShortlist(candidates=9))},
        {"num_assistant_tokens": "auto"},
        {"assistant_confidence_threshold": 0.3},
    ],
    ids=lambda one: next(iter(one)) + " " + str(next(iter(one.values())))[:16],
)
def test_output_is_the_targets_own(settings, target, drafter):
    assistant = DynSpecAssistant(drafter, **{"target": target, "validate": True, **settings})
    for length in (1, 2, 12, 40):
        assert_same(target, assistant, prompt(length, vocabulary=TOKENS), max_new_tokens=30)
    assert_same(target, assistant, TEXT, do_sample=True, top_k=1)
    assert assistant.stats_total.accepted > 0


def test_padding_batches_passed_caches_and_conversations(target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target)
    text, mask = padded(5, prompt(30, vocabulary=TOKENS))
    assert_same(target, assistant, text, attention_mask=mask)
    generate(target, assistant, text, attention_mask=mask)
    found = assistant.stats.to_dict()
    generate(target, assistant, text[:, 5:])
    assert assistant.stats.to_dict() == found
    assert_same(target, assistant, text[:, 5:], prefill_chunk_size=7)
    batch = torch.cat([text, prompt(35, vocabulary=TOKENS, seed=4)])
    assert_same(target, assistant, batch, attention_mask=torch.cat([mask, torch.ones_like(mask)]))
    # The whole text, or its new tokens alone with a mask for all.
    for tokens, mask in ((TEXT, None), (TEXT[:, 6:], torch.ones_like(TEXT))):
        written = []
        for given in (assistant, None):
            cache = DynamicCache(config=target.config)
            target(TEXT[:, :6], **cache_inputs(cache))
            written.append(generate(target, given, tokens, attention_mask=mask, **{CACHE: cache}))
        assert torch.equal(*written) and assistant.stats.drafted > 0
    conversation, text = assistant.conversation(), TEXT
    for turn in range(4):
        # The third turn takes some of the text back.
        text = text[:, :20] if turn == 2 else text
        text = torch.cat([assert_same(target, conversation, text, max_new_tokens=10), TEXT[:, :3]], dim=1)


def test_in_transformers_own_loop(target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target)
    looked_up = type(target).generate
    actual = looked_up(target, TEXT, assistant_model=assistant, max_new_tokens=24, do_sample=False)
    assert torch.equal(actual, generate(target, None, TEXT)) and assistant.stats.accepted > 0


def test_changes_of_weights_are_followed(target, drafter, drafts):
    target, model = copy.deepcopy(target), copy.deepcopy(drafter)
    assistant = DynSpecAssistant(model, "hybrid", target=target)
    full = DynSpecAssistant(model, "full", target=target)
    for _ in range(3):
        assert_same(target, assistant, TEXT)
        for one in drafts:
            one.clear()
        generate(target, model, TEXT, speculation_type="dflash")
        assert_same(target, full, TEXT)
        assert_same_drafts(drafts, 36)
        with torch.no_grad():
            target.get_output_embeddings().weight.add_(torch.randn(TOKENS, 32) / 9)
            model.encoder.fc.weight.mul_(0.5)


# The door and refusals -----------------------------------------------------------------------------------------------


def test_a_folder_or_a_model_is_recognised(target, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "drafter")
    assistant = DynSpecAssistant(tmp_path / "drafter", "full", target=target)
    assert isinstance(assistant.drafter, DFlashDrafter)
    assert_same(target, assistant, TEXT)
    assert assistant.stats.accepted > 0
    assistant.save_pretrained(tmp_path / "saved")
    loaded = DynSpecAssistant.from_pretrained(tmp_path / "saved", target=target, drafter=drafter)
    assert_same(target, loaded, TEXT)
    assert loaded.stats.to_dict() == assistant.stats.to_dict()


def test_what_does_not_fit_is_refused(target, drafter):
    for changes, says in (
        ({"mask_token_id": TOKENS}, r"mask_token_id: is 300, and the target embeds the ids from 0 to 299"),
        ({"block_size": 1}, "block_size: is 1"),
    ):
        with pytest.raises(ArtifactError, match=says):
            DynSpecAssistant(dflash(target, **changes), target=target)
    with pytest.raises(ArtifactError, match="hidden_size: is 32, and the target's is 48"):
        DynSpecAssistant(drafter, target=tiny(vocabulary=TOKENS, num_hidden_layers=4, hidden_size=48))
    for layers in ([0, 4], [-1], []):
        with pytest.raises(UnsupportedError, match="reads the target's layers"):
            DynSpecAssistant(dflash(target, target_layer_ids=layers or [9]), target=target)


def test_what_it_cannot_do_is_refused(target, drafter):
    with pytest.raises(UnsupportedError, match="drafts a block of tokens at once"):
        DynSpecAssistant(drafter, target=target, tree=True)
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment())
