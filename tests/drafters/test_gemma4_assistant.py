"""Gemma 4's assistants: they draft as in transformers' own generation, and the output is the target's own."""

import copy

import pytest
import torch
from beside_targets import CLUSTERS, TOKENS, gemma4, gemma4_assistant
from calls import Pieces, assert_same, generate, padded
from models import POLICY_CASES, SLIDING_WINDOW, ForwardCounter, prompt, tiny, with_clear_preferences
from transformers import (
    DynamicCache,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from hf_dynspec import (
    ArtifactError,
    ConfigurationError,
    DynSpecAssistant,
    DynSpecCandidateGenerator,
    InContextShortlist,
    NativeShortlist,
    NotBoundError,
    OnlineAlignment,
    UnionShortlist,
    UnsupportedError,
)
from hf_dynspec.cache_names import CACHE, cache_inputs
from hf_dynspec.drafters import as_drafter
from hf_dynspec.drafters.gemma4_assistant import Gemma4AssistantDrafter

TEXT = prompt(vocabulary=TOKENS)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return gemma4()


@pytest.fixture(scope="module")
def assistant(target) -> PreTrainedModel:
    return gemma4_assistant(target)


def drafts_of_transformers(target: PreTrainedModel, assistant: PreTrainedModel, text: torch.Tensor) -> list[int]:
    """What transformers' generator drafts after a text, int64 `[1, n]`, whose last token the target has not read. The
    target shows it the keys within its window, as it keeps them for itself."""
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), GenerationConfig(max_length=10**3)
    )
    generator.num_assistant_tokens = 5
    cache = DynamicCache(config=target.config.get_text_config())
    states = {"output_hidden_states": True, "return_shared_kv_states": True}
    with torch.no_grad():
        outputs = target(text[:, :-1], **states, **cache_inputs(cache))
    keys = {"sliding_attention": SLIDING_WINDOW - 1, "full_attention": text.shape[1]}
    for kind, most in keys.items():
        outputs.shared_kv_states[kind] = tuple(one[:, :, -most:] for one in outputs.shared_kv_states[kind])
    kwargs = {"attention_mask": torch.ones_like(text)}
    drafted, _ = generator.get_candidates(text, kwargs, outputs, is_first_iteration=False, n_last_matches=0)
    return drafted[0, text.shape[1] :].tolist()


# Drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clusters", "policy"), [(6, "native"), (1, "native"), (None, "full"), (None, "native")])
@pytest.mark.parametrize("shared", [2, 0], ids=["shared layers", "no shared layers"])
def test_drafts_are_those_of_transformers(clusters, policy, shared):
    """Along a text that grows past the window; targets without shared layers lend keys and values too."""
    target = gemma4(num_kv_shared_layers=shared, eos_token_id=None)
    target.generation_config.eos_token_id = None
    model = gemma4_assistant(target, clusters=clusters)
    ours = DynSpecAssistant(model, policy, target=target, num_assistant_tokens=5)
    text = generate(target, input_ids=TEXT)
    for length in range(2, text.shape[1]):
        drafted = ours.draft_round(text[:, :length]).token_ids.tolist()
        assert drafted == drafts_of_transformers(target, model, text[:, :length])


def test_drafts_of_a_call_are_those_of_transformers(target):
    """Also after drafts that were rejected, whose keys are gone, and after some that were accepted."""
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = None
    model = gemma4_assistant(target)
    ours = DynSpecAssistant(model, "native", target=target, num_assistant_tokens=5)
    drafted, pieces = [], Pieces()
    session = ours.take_session(())
    draft_chain = session.draft_chain

    def watched(*arguments):
        drafted.append((arguments[0], draft_chain(*arguments)))
        return drafted[-1][1]

    session.draft_chain = watched
    ours.return_session(session)
    assert_same(target, ours, TEXT, max_new_tokens=30)
    generate(target, ours, TEXT, streamer=pieces)
    accepted = {len(piece) - 1 for piece in pieces.pieces[1:]}
    assert len(drafted) > 15 and len(accepted) > 1
    for prefix, candidates in drafted:
        expected = drafts_of_transformers(target, model, prefix.unsqueeze(0))
        assert candidates.token_ids.tolist() == expected[: candidates.token_ids.shape[0]]


def test_native_holds_the_tokens_of_the_best_clusters(target, assistant):
    drafter = Gemma4AssistantDrafter(assistant, target)
    embedder, clusters = assistant.masked_embedding, drafter.head.clusters
    order = embedder.token_ordering.view(CLUSTERS, -1)
    for cluster, tokens in enumerate(order):
        assert (clusters.of_tokens[tokens] == cluster).all()
    for top in (None, 2, CLUSTERS, 10**4):
        ours = DynSpecAssistant(assistant, NativeShortlist(top), target=target)
        state = ours.take_session((2,)).selector.state
        hidden = torch.randn(1, 32, generator=torch.Generator().manual_seed(top or 0))
        best = embedder.centroids(hidden)[0].argsort(descending=True)[: top or 6]
        assert set(state.select(0, TEXT[0, :1], hidden).ids().tolist()) == {*order[best].flatten().tolist(), 2}


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "hybrid", "screen", "native", "union with a screen", "union of three"])
def test_output_is_the_targets_own(policy, target, assistant):
    ours = DynSpecAssistant(assistant, POLICY_CASES[policy](), target=target, validate=True)
    assert_same(target, ours, TEXT, max_new_tokens=30)
    assert_same(target, ours, TEXT, do_sample=True, top_k=1)
    assert ours.stats_total.accepted > 0


@pytest.mark.filterwarnings("ignore:drafting does not pay")
@pytest.mark.parametrize(
    "settings",
    [
        {"num_assistant_tokens": "auto"},
        {"num_assistant_tokens": 1},
        {"num_assistant_tokens": 20},
        {"assistant_confidence_threshold": 0.3},
        {"policy": UnionShortlist(InContextShortlist(20), NativeShortlist(2, packed=False))},
        {"policy": "auto"},
    ],
    ids=str,
)
def test_output_with_other_settings(settings, target, assistant):
    ours = DynSpecAssistant(assistant, **{"policy": "native", "target": target, **settings})
    for length in (1, 2, SLIDING_WINDOW + 1, 40):
        assert_same(target, ours, prompt(length, vocabulary=TOKENS), max_new_tokens=30)


def test_padding_chunks_passed_caches_and_conversations(target, assistant):
    ours = DynSpecAssistant(assistant, "native", target=target)
    text, mask = padded(5, prompt(30, vocabulary=TOKENS))
    assert_same(target, ours, text, attention_mask=mask)
    generate(target, ours, text[:, 5:])
    alone = ours.stats.to_dict()
    generate(target, ours, text, attention_mask=mask)
    assert ours.stats.to_dict() == alone
    assert_same(target, ours, text[:, 5:], prefill_chunk_size=7)
    # The whole text, or its new tokens alone with a mask for all.
    for tokens, mask in ((TEXT, None), (TEXT[:, 6:], torch.ones_like(TEXT))):
        written = []
        for given in (ours, None):
            cache = DynamicCache(config=target.config)
            target(TEXT[:, :6], **cache_inputs(cache))
            written.append(generate(target, given, tokens, attention_mask=mask, **{CACHE: cache}))
        assert torch.equal(*written) and ours.stats.drafted > 0
    conversation, text = ours.conversation(), TEXT
    for _ in range(3):
        text = torch.cat([assert_same(target, conversation, text, max_new_tokens=10), TEXT[:, :3]], dim=1)
    assert conversation.session.length > 30


def test_in_transformers_own_loop(target, assistant):
    ours = DynSpecAssistant(assistant, "native", target=target)
    expected = generate(target, None, TEXT)
    looked_up = type(target).generate
    actual = looked_up(target, TEXT, assistant_model=ours, max_new_tokens=24, do_sample=False)
    assert torch.equal(actual, expected) and ours.stats.drafted > 0
    # A loop that does not show its cache gets no drafts.
    config = GenerationConfig(max_length=40, do_sample=False)
    generator = DynSpecCandidateGenerator(ours, input_ids=TEXT, generation_config=config)
    assert generator.get_candidates(TEXT)[1] is None


def test_one_forward_a_token_and_no_head(target, assistant):
    ours = DynSpecAssistant(assistant, "native", target=target, num_assistant_tokens=4)
    with ForwardCounter(assistant.model) as layers, ForwardCounter(assistant.lm_head) as head:
        generate(target, ours, TEXT)
    assert layers.count == ours.stats.drafted and head.count == 0


def test_a_conditional_target():
    """The text part of a model that sees pictures too."""
    text = gemma4().config
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    target = with_clear_preferences(Gemma4ForConditionalGeneration(config).eval())
    ours = DynSpecAssistant(gemma4_assistant(target), "native", target=target)
    assert_same(target, ours, TEXT)
    assert ours.stats.drafted > 0


def test_changes_of_weights_are_followed(target, assistant):
    target, model = copy.deepcopy(target), copy.deepcopy(assistant)
    ours = DynSpecAssistant(model, "native", target=target, num_assistant_tokens=5)
    for _ in range(3):
        assert_same(target, ours, TEXT)
        drafted = ours.draft_round(TEXT).token_ids.tolist()
        assert drafted == drafts_of_transformers(target, model, TEXT)
        with torch.no_grad():
            model.masked_embedding.centroids.weight.mul_(-1)
            model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape))
            target.get_input_embeddings().weight.mul_(0.7)


def test_sixteen_bits_and_other_dtypes(target, assistant):
    ours = DynSpecAssistant(copy.deepcopy(assistant).bfloat16(), "native", target=target)
    assert_same(target, ours, TEXT)
    assert ours.stats.accepted > 0


# The door ------------------------------------------------------------------------------------------------------------


def test_a_folder_or_a_model_is_recognised(target, assistant, tmp_path):
    assistant.save_pretrained(tmp_path / "assistant")
    ours = DynSpecAssistant(str(tmp_path / "assistant"), "native", target=target)
    assert isinstance(ours.drafter, Gemma4AssistantDrafter)
    assert_same(target, ours, TEXT)
    expected = ours.stats.to_dict()
    ours.drafter = assistant
    assert_same(target, ours, TEXT)
    assert ours.stats.to_dict() == expected
    ours.drafter = tmp_path / "assistant"
    ours.save_pretrained(tmp_path / "saved")
    loaded = DynSpecAssistant.from_pretrained(tmp_path / "saved", target=target, drafter=assistant)
    assert loaded.policy.settings() == NativeShortlist().settings()
    assert_same(target, loaded, TEXT)


def test_another_target_gets_a_twin(target, assistant):
    other = gemma4(seed=5)
    ours = DynSpecAssistant(assistant, "native", target=target)
    first = ours.drafter
    assert ours.bind(target).drafter is first
    twin = copy.deepcopy(ours)
    ours.bind(other)
    assert ours.drafter is not first and ours.drafter.model is first.model and twin.drafter is first
    assert_same(other, ours, TEXT)
    assert_same(target, twin, TEXT)
    with pytest.raises(UnsupportedError):
        twin.bind(tiny("gemma3"))
    assert twin.drafter is first and twin.target is target
    assert_same(target, twin, TEXT)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_other_targets_are_refused(target, assistant):
    for other, says in (
        (tiny("gemma3"), "models of Gemma 4 alone"),
        (gemma4(layer_types=["full_attention"] * 4), "no layer of sliding_attention"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            DynSpecAssistant(assistant, target=other)
    for other, says in (
        (gemma4(hidden_size=40), "backbone_hidden_size"),
        (gemma4(global_head_dim=8), r"reads full_attention of \(2, 16\) \(heads, numbers\), and the target's has"),
        (gemma4(num_key_value_heads=4), "reads sliding_attention"),
    ):
        with pytest.raises(ArtifactError, match=says):
            DynSpecAssistant(assistant, target=other)


def test_clusters_without_an_order_are_refused(target, assistant):
    damaged = copy.deepcopy(assistant)
    damaged.masked_embedding.token_ordering.zero_()
    with pytest.raises(UnsupportedError, match="token_ordering"):
        DynSpecAssistant(damaged, target=target)


def test_what_it_cannot_do_is_refused(target, assistant):
    with pytest.raises(UnsupportedError, match="trained to draft one chain"):
        DynSpecAssistant(assistant, target=target, tree=True)
    ours = DynSpecAssistant(assistant, "native", target=target)
    with pytest.raises(UnsupportedError, match="call generate once for each prompt"):
        generate(target, ours, TEXT.repeat(2, 1))
    with pytest.raises(UnsupportedError, match="leave cache_implementation unset"):
        generate(target, ours, TEXT, cache_implementation="static")
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        DynSpecAssistant(assistant, target=target, alignment=OnlineAlignment())
    with pytest.raises(NotBoundError, match="beside its target"):
        _ = as_drafter(assistant).head
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        DynSpecAssistant("./nowhere", target=target)
    with pytest.raises(ConfigurationError, match="top_clusters"):
        NativeShortlist(0)
