"""EAGLE heads inside `generate`: exact output from chains and trees, and drafts that are made of the true features."""

import pytest
import torch
from calls import assert_two_threads_agree, padded
from draft_trees import assert_same_tree, over_shortlist, paths_of, slow_tree
from eagle_heads import (
    DRAFTABLE,
    LAYOUTS,
    Head,
    SlowHead,
    agreeing_head,
    drafter_of,
    random_head,
    soft,
    target_features,
    trimmed_head,
)
from models import EOS, POLICY_CASES, SLIDING_WINDOW, TERRIBLE, VOCABULARY, RandomShortlist, perturbed, prompt, tiny
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_dynspec import ArtifactError, DynSpecAssistant, EagleDrafter, TreeConfig
from hf_dynspec.artifacts import read_artifact
from hf_dynspec.artifacts.config import ModelReference
from hf_dynspec.cache_names import CACHE, returned_cache
from hf_dynspec.drafters.eagle.state import EagleState
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.generation.feedback import TargetFeedback

ALL_POLICIES = POLICY_CASES | TERRIBLE
SHAPE = TreeConfig(total_tokens=24, depth=3, top_k=4)
SHAPES = {"chain": False, "tree": SHAPE}
# Log-probabilities of paths of up to four tokens, in fp32, where logits reach about 10.
CLOSE = 2e-3


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return soft()


@pytest.fixture(scope="module", params=["eagle2", "eagle3"])
def drafter(request, target) -> EagleDrafter:
    return drafter_of(agreeing_head(request.param), target)


@pytest.fixture(scope="module")
def trimmed(target) -> EagleDrafter:
    return drafter_of(trimmed_head("eagle3", target), target)


def generate(target, assistant=None, input_ids=None, **arguments):
    input_ids = prompt(seed=1) if input_ids is None else input_ids
    defaults = {"max_new_tokens": 18, "do_sample": False, "assistant_model": assistant}
    return target.generate(input_ids, **{**defaults, **arguments})


def assert_same(target, assistant, input_ids=None, **arguments) -> torch.Tensor:
    """The output with the assistant, which is the one without."""
    actual = generate(target, assistant, input_ids, **arguments)
    assert torch.equal(actual, generate(target, None, input_ids, **arguments))
    return actual


# Exact output --------------------------------------------------------------------------------------------------------


CASES = [(name, "tree") for name in ALL_POLICIES] + [(name, "chain") for name in ("full", "hybrid", "eos_only")]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_greedy_output_is_the_targets_own(name, shape, target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPES[shape])
    output = assert_same(target, assistant)
    assert assistant.stats.tokens == output.shape[1] - 12
    assert assistant.stats.accepted < assistant.stats.drafted
    if name == "full":
        assert assistant.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_knows_nothing_changes_nothing(layout, shape, target):
    assistant = DynSpecAssistant(drafter_of(random_head(layout), target), target=target, tree=SHAPES[shape])
    assert_same(target, assistant)
    assert assistant.stats.acceptance_rate < 0.1


def compare_with_rounds_alone(assistant, rounds, shortest: int = 0) -> int:
    """Assert that each whole tree of a call is drafted after its text alone too; count those after longer texts."""
    compared = 0
    for prefix, most, drafted in list(rounds):
        if most > SHAPE.depth:
            alone = assistant.draft_round(prefix.unsqueeze(0))
            assert_same_tree(drafted, dict(zip(paths_of(alone), alone.scores.tolist(), strict=True)), CLOSE)
            compared += prefix.shape[0] > shortest
        else:
            assert int(drafted.depths.max()) < most
    return compared


@pytest.mark.parametrize(
    ("layout", "family"),
    [("eagle2", one) for one in ("qwen2", "mistral", "gemma2")]
    + [("eagle3", one) for one in ("llama", "qwen3", "mistral", "gemma3")],
)
def test_every_family_of_targets(layout, family, rounds):
    """With windows shorter than the text."""
    target = soft(family)
    assistant = DynSpecAssistant(drafter_of(agreeing_head(layout), target), "full", target=target, tree=SHAPE)
    assert_same(target, assistant, prompt(SLIDING_WINDOW + 4), eos_token_id=None)
    # What the drafter was told in rounds is what it would be told at once.
    assert compare_with_rounds_alone(assistant, rounds)


@pytest.mark.parametrize(("length", "new_tokens"), [(1, 18), (2, 18), (3, 18), (12, 1), (12, 2), (12, 3), (12, 7)])
def test_short_prompts_and_outputs(length, new_tokens, target, drafter):
    for tree in SHAPES.values():
        assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
        output = assert_same(target, assistant, prompt(length, seed=1), max_new_tokens=new_tokens)
        assert output.shape[1] == length + assistant.stats.tokens <= length + new_tokens


@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_the_end_of_the_text(place, target, drafter):
    end = int(generate(target)[0, 12 + place])
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPE)
    assert assert_same(target, assistant, eos_token_id=end)[0, -1] == end


@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_what_the_user_asks_for_comes_with_what_the_drafter_needs(name, drafter, target):
    """The hidden states that the head reads are neither returned unasked nor missing from those that are."""
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=SHAPE)
    plain = generate(target, assistant, return_dict_in_generate=True)
    assert plain.hidden_states is None
    arguments = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    actual, expected = generate(target, assistant, **arguments), generate(target, None, **arguments)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert [tensor.shape for tensor in one] == [tensor.shape for tensor in other]
        for mine, its in zip(one, other, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-3)
    for one, other in zip(actual.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


# One round -----------------------------------------------------------------------------------------------------------


def slow_draft(head: Head, drafter: EagleDrafter, target, text, config, ids) -> dict:
    """The tree of the reference head, which computes a whole path anew for every node, from the target's features."""
    slow = SlowHead(head, target.get_input_embeddings().weight.detach())
    features = target_features(target, text[:-1], drafter.reads)
    token_ids, weight = drafter.head.token_ids, drafter.head.weight

    def successors(path: tuple[int, ...]) -> dict[int, float]:
        scores = slow.after(text, features, list(path)) @ weight.T
        if token_ids is not None:
            scores = torch.full((VOCABULARY,), torch.nan).index_put((token_ids,), scores)
        return over_shortlist(scores, ids)

    return slow_tree(successors, config)


@pytest.mark.parametrize("shape", [(60, 5, 10), (5, 0, 6)])
@pytest.mark.parametrize("name", ["full", "frequency"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "trimmed"])
def test_a_round_equals_the_papers_algorithm(layout, name, shape, target):
    head = trimmed_head("eagle3", target) if layout == "trimmed" else agreeing_head(layout)
    drafter, config = drafter_of(head, target), TreeConfig(*shape)
    draftable = set(range(VOCABULARY) if drafter.head.token_ids is None else drafter.head.token_ids.tolist())
    ids = [EOS, *(one for one in range(VOCABULARY - 1, -1, -1) if one != EOS)]
    ids = torch.tensor([one for one in ids if one in draftable][: None if name == "full" else 90])
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=config)
    for seed, length in ((0, 2), (1, 13)):
        text = prompt(length, seed)
        expected = slow_draft(head, drafter, target, text[0], config, ids)
        assert_same_tree(assistant.draft_round(text), expected, CLOSE)


@pytest.mark.parametrize("name", ["full", "frequency"])
def test_a_call_drafts_what_its_texts_alone_would(name, target, drafter, rounds):
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=SHAPE)
    assert_same(target, assistant)
    assert compare_with_rounds_alone(assistant, rounds) > 3


def test_a_round_of_a_chain(target, drafter):
    text = prompt(9)
    chain = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=4).draft_round(text)
    tree = DynSpecAssistant(drafter, "full", target=target, tree=TreeConfig(5, 3, 1)).draft_round(text)
    assert paths_of(chain) == paths_of(tree)
    torch.testing.assert_close(chain.scores, tree.scores, rtol=0, atol=CLOSE)


# Trimmed vocabularies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [one for one in CASES if one[0] in POLICY_CASES])
def test_every_policy_works_in_the_heads_own_vocabulary(name, shape, target, trimmed, monkeypatch):
    draftable = set(trimmed.head.token_ids.tolist())
    keep, drafted = DraftSession._keep, []

    def checking(self, candidates):
        assert set(candidates.token_ids.tolist()) <= draftable
        for shortlist in candidates.shortlists:
            assert set(shortlist.scored_slots.tolist()) <= draftable and shortlist.ids().numel()
        drafted.append(candidates)
        return keep(self, candidates)

    monkeypatch.setattr(DraftSession, "_keep", checking)
    assistant = DynSpecAssistant(trimmed, POLICY_CASES[name](), target=target, tree=SHAPES[shape])
    assert_same(target, assistant)
    assert drafted and 0 < assistant.stats_total.active_vocabulary_max <= DRAFTABLE
    assert assistant.stats_total.oov_rate > 0
    if name == "full":
        assert assistant.stats_total.active_vocabulary == DRAFTABLE and assistant.stats_total.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_an_end_that_the_head_cannot_draft(shape, target, trimmed):
    """It comes from the target."""
    plain = generate(target)[0, 12:].tolist()
    draftable = trimmed.head.token_ids.tolist()
    end = next(token for token in plain[3:] if token not in draftable)
    assistant = DynSpecAssistant(trimmed, "full", target=target, tree=SHAPES[shape])
    assert assert_same(target, assistant, eos_token_id=end)[0, -1] == end
    able = next(token for token in plain[3:] if token in draftable)
    assert assert_same(target, assistant, eos_token_id=[EOS, able])[0, -1] == able
    assert assistant.scored_eos_token_ids(target.generation_config) == ()


# Padding, caches, conversations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_left_padding(layout, family, shape):
    """The head is given neither padding nor what the target made of it: it drafts as it does without."""
    target = soft(family)
    assistant = DynSpecAssistant(drafter_of(agreeing_head(layout), target), "full", target=target, tree=SHAPES[shape])
    arguments = {"eos_token_id": VOCABULARY - 1}
    expected = generate(target, assistant, **arguments)
    without = assistant.stats.to_dict()
    text, mask = padded(5, prompt(seed=1))
    output = assert_same(target, assistant, text, attention_mask=mask, **arguments)
    assert torch.equal(output[:, 5:], expected) and assistant.stats.to_dict() == without
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_turns(layout, family, with_cache, shape):
    """With the target's cache handed on or not, in a conversation or not."""
    target = soft(family)
    assistant = DynSpecAssistant(drafter_of(agreeing_head(layout), target), "full", target=target, tree=SHAPES[shape])
    arguments = {"return_dict_in_generate": True, "max_new_tokens": 9, "eos_token_id": VOCABULARY - 1}
    for ours in (assistant, assistant.conversation()):
        texts, caches = [prompt(14), prompt(14)], [None, None]
        for turn in range(2):
            for side, one in enumerate((ours, None)):
                output = generate(target, one, texts[side], **{CACHE: caches[side]}, **arguments)
                caches[side] = returned_cache(output) if with_cache else None
                texts[side] = torch.cat([output.sequences, prompt(4, seed=30 + turn)], dim=1)
            assert torch.equal(*texts)
        assert assistant.stats_total.accepted > 0


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_conversation_drafts_as_from_scratch(with_cache, target, drafter, rounds):
    """In a conversation every feature is known, also those of turns that the target does not read again."""
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPE)
    conversation = assistant.conversation()
    text, cache = prompt(14), None
    for turn in range(3):
        output = generate(target, conversation, text, **{CACHE: cache}, return_dict_in_generate=True, max_new_tokens=9)
        cache = returned_cache(output) if with_cache else None
        text = torch.cat([output.sequences, prompt(4, seed=30 + turn)], dim=1)
    assert compare_with_rounds_alone(assistant, rounds, shortest=24) >= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_may_change_its_past(shape, target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    conversation = assistant.conversation()
    text = prompt(30)
    for position in (29, 12):
        generate(target, conversation, text, max_new_tokens=9)
        text = text.clone()
        text[0, position] = 3 + (int(text[0, position]) + 1) % (VOCABULARY - 3)
        assert_same(target, conversation, text)
        in_conversation = assistant.stats.to_dict()
        generate(target, assistant, text)
        assert in_conversation | {"lane": assistant.stats.lane} == assistant.stats.to_dict()
    assert_same(target, conversation, text[:, :7])


def test_a_cache_without_its_features(target, drafter):
    """Of a cache that was made elsewhere the head knows nothing: it starts at the tokens that the target reads."""
    for tree in SHAPES.values():
        assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree)
        expected = generate(target, None, prompt(20))
        with torch.no_grad():
            cache = returned_cache(target(prompt(20)[:, :-1], **{CACHE: DynamicCache()}))
        assert torch.equal(generate(target, assistant, prompt(20), **{CACHE: cache}), expected)
        assert assistant.stats.drafted > 0


def test_features_of_the_prompt_are_given_once(target, drafter, monkeypatch):
    advance, reads = EagleState.advance, []

    def recording(self, prefix, features=None, observe_draft_inputs=None):
        reads.append((prefix.shape[0], features.shape[0]))
        return advance(self, prefix, features, observe_draft_inputs)

    monkeypatch.setattr(EagleState, "advance", recording)
    generate(target, DynSpecAssistant(drafter, "full", target=target, tree=SHAPE))
    length = 12
    for prefix, features in reads:
        assert features == prefix - (1 if length == 12 else length)
        length = prefix
    assert len(reads) > 3


# Threads -------------------------------------------------------------------------------------------------------------


def test_two_threads_on_one_assistant(target, drafter):
    assert_two_threads_agree(
        target, lambda: DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    )


# Artifacts and binding -----------------------------------------------------------------------------------------------


def test_an_artifact_names_the_head_and_keeps_the_shape(target, tmp_path):
    head = agreeing_head("eagle3")
    drafter = EagleDrafter.from_pretrained(head.write(tmp_path / "home" / "head"), target=target)
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPE)
    folder = assistant.save_pretrained(tmp_path / "artifact")
    config, _ = read_artifact(folder)
    assert config.drafter == ModelReference("head", architecture="EagleDrafter", local=True)
    assert config.tree == SHAPE
    passed = r"drafter=EagleDrafter\.from_pretrained\(FOLDER, target=target\)\)\.$"
    with pytest.raises(ArtifactError, match=f"'head' was read from a local folder .* not on the Hub.*{passed}"):
        DynSpecAssistant.from_pretrained(folder, target=target)
    again = DynSpecAssistant.from_pretrained(folder, target=target, drafter=drafter)
    assert again.tree == SHAPE
    assert torch.equal(generate(target, again), generate(target, assistant))
    assert again.stats.to_dict() == assistant.stats.to_dict()


def test_a_head_that_was_never_in_a_folder_is_not_named(target, drafter, tmp_path):
    DynSpecAssistant(drafter, "full", target=target, tree=SHAPE).save_pretrained(tmp_path)
    assert read_artifact(tmp_path)[0].drafter is None


def test_a_head_and_a_model_draft_for_one_target(target, drafter):
    head = DynSpecAssistant(drafter, RandomShortlist(80), target=target, tree=SHAPE)
    model = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPE)
    chain = DynSpecAssistant(perturbed(target), "full", target=target)
    for assistant in (head, model, chain, head):
        assert_same(target, assistant)
    target_stays = dict(target.__dict__)
    with pytest.raises(ArtifactError, match="vocab_size"):
        DynSpecAssistant(drafter, target=tiny(vocabulary=3000))
    assert target.__dict__ == target_stays


# Controls ------------------------------------------------------------------------------------------------------------


def test_wrong_features_would_be_noticed(target, drafter, rounds, monkeypatch):
    """The drafts of a call whose features are those of the tokens before are not those of its texts."""
    features = TargetFeedback._features

    def late(self, outputs, *others):
        outputs.hidden_states = [None if state is None else state.roll(1, -2) for state in outputs.hidden_states]
        return features(self, outputs, *others)

    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(TargetFeedback, "_features", late)
        assert_same(target, assistant)
    differ = 0
    for prefix, most, drafted in list(rounds):
        if most > SHAPE.depth:
            alone = assistant.draft_round(prefix.unsqueeze(0))
            scores = dict(zip(paths_of(alone), alone.scores.tolist(), strict=True))
            own = dict(zip(paths_of(drafted), drafted.scores.tolist(), strict=True))
            differ += any(abs(scores.get(path, 9.0) - score) > CLOSE for path, score in own.items())
    assert differ > 3


def test_a_target_of_another_size_is_refused_when_bound(drafter):
    """Its hidden states would not fit the head, in the middle of a call."""
    wide = tiny("llama", num_hidden_layers=4, hidden_size=128)
    with pytest.raises(ArtifactError, match="hidden_size"):
        DynSpecAssistant(drafter, "full", target=wide)
    assert "generate" not in vars(wide)
    fitting = soft()
    assistant = DynSpecAssistant(drafter, "full", target=fitting)
    with pytest.raises(ArtifactError, match="hidden_size"):
        assistant.bind(wide)
    assert assistant.target is fitting


def test_an_artifact_says_how_to_pass_a_small_model_of_a_local_folder(target, tmp_path):
    target.save_pretrained(tmp_path / "home" / "small")
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "home" / "small")
    folder = DynSpecAssistant(drafter, target=target).save_pretrained(tmp_path / "artifact")
    passed = r"DynSpecAssistant\.from_pretrained\(…, drafter=AutoModelForCausalLM\.from_pretrained\(FOLDER\)\)\.$"
    with pytest.raises(ArtifactError, match=f"'small' was read from a local folder .* not on the Hub.*{passed}"):
        DynSpecAssistant.from_pretrained(folder, target=target)
