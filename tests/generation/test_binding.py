"""Binding attaches to one model object and to nothing else, and unbinding leaves it as it was."""

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from calls import assert_same, generate
from cases import representatives
from eagle_heads import random_head
from families import model_of
from models import (
    EOS,
    PAD,
    POLICY_CASES,
    ForwardCounter,
    character_tokenizer,
    perturbed,
    prompt,
    random_router,
    tiny,
    word_tokenizer,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    DynSpecCandidateGenerator,
    DynSpecError,
    NotBoundError,
    RouterShortlist,
    TreeConfig,
    UnsupportedError,
    loading,
)
from hf_dynspec.cache_names import CACHE, returned_cache
from hf_dynspec.drafters import CausalLMDrafter, EagleDrafter
from hf_dynspec.loading import local_tokenizer
from hf_dynspec.shortlists import POLICIES


# Every test has models of its own, as binding changes them.
@pytest.fixture
def target():
    return tiny()


@pytest.fixture
def drafter(target):
    return perturbed(target)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return generate(tiny())


def assert_serves(target, assistant, expected: torch.Tensor) -> None:
    """A call on the target goes through the assistant, and its output is as expected."""
    assert torch.equal(generate(target, assistant), expected)
    assert assistant.stats.rounds > 0


def tiny_t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=301, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).eval()


# Attaching -----------------------------------------------------------------------------------------------------------


def test_unbinding_restores_the_target(target, drafter):
    """Also while a conversation is open."""
    before = dict(target.__dict__)
    assistant = DynSpecAssistant(drafter, target=target)
    assert set(target.__dict__) - set(before) == {"generate", "_get_candidate_generator"}
    assert assistant.target is target
    conversation = assistant.conversation()
    generate(target, conversation)
    for _ in range(2):
        assistant.unbind()
        assert target.__dict__ == before and assistant.target is None
        assert all(target.__dict__[name] is value for name, value in before.items())
    with pytest.raises(NotBoundError):
        generate(target, conversation)


def test_no_other_model_and_no_class_is_touched(target, drafter):
    names = ("generate", "_get_candidate_generator", "_assisted_decoding")
    classes = [vars(cls).copy() for cls in type(target).__mro__]
    bystander = tiny(seed=2)
    before = dict(bystander.__dict__), dict(drafter.__dict__)
    generate(target, DynSpecAssistant(drafter, target=target))
    assert (bystander.__dict__, drafter.__dict__) == before
    for cls, own in zip(type(target).__mro__, classes, strict=True):
        assert {name: vars(cls).get(name) for name in names} == {name: own.get(name) for name in names}


def test_binding_again_moves_the_assistant(target, drafter, expected):
    other = tiny(seed=4)
    assistant = DynSpecAssistant(drafter, target=target)
    assert_serves(target, assistant, expected)
    assert assistant.bind(other) is assistant
    assert "generate" not in target.__dict__
    assert_serves(other, assistant, generate(other))
    with pytest.raises(NotBoundError):
        generate(target, assistant)
    for _ in range(2):
        assistant.bind(target)
        assert "generate" not in other.__dict__
        assert_serves(target, assistant, expected)


def test_two_assistants_on_one_target(target, drafter, expected):
    before = dict(vars(target))
    first = DynSpecAssistant(drafter, "full", target=target)
    second = DynSpecAssistant(perturbed(target, 0.2), POLICY_CASES["hybrid"](), target=target)
    for one in (first, second):
        assert_serves(target, one, expected)
    first.unbind()
    assert_serves(target, second, expected)
    with pytest.raises(NotBoundError):
        generate(target, first)
    del one, second
    gc.collect()
    assert vars(target) == before, "the attributes go with the last assistant"


def test_a_bind_that_fails_leaves_everything_as_it_was(target, drafter, expected):
    assistant = DynSpecAssistant(drafter, RouterShortlist(random_router(), max_clusters=3), target=target)
    for other in (tiny(vocabulary=4000), tiny_t5(), object()):
        with pytest.raises(UnsupportedError):
            assistant.bind(other)
        assert assistant.target is target and "generate" not in getattr(other, "__dict__", {})
        assert_serves(target, assistant, expected)
    for name, wrong in {
        "drafter": perturbed(tiny(vocabulary=4000)),
        "policy": RouterShortlist(random_router(width=16), max_clusters=3),
        "tree": 7,
    }.items():
        before = getattr(assistant, name)
        with pytest.raises(DynSpecError):
            setattr(assistant, name, wrong)
        assert getattr(assistant, name) is before
        assert_serves(target, assistant, expected)


def test_an_attribute_that_is_assigned_takes_effect_at_the_next_call(target, drafter, expected):
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_serves(target, assistant, expected)
    full = assistant.stats.active_vocabulary
    assistant.policy = POLICY_CASES["frequency"]()
    assert_serves(target, assistant, expected)
    assert assistant.stats.active_vocabulary == 90 < full
    assistant.policy = "hybrid"
    conversation = assistant.conversation()
    assert torch.equal(generate(target, conversation), expected)
    assistant.drafter = target
    assert torch.equal(generate(target, conversation), expected)
    assert_serves(target, assistant, expected)
    assert assistant.stats.acceptance_rate > 0.8
    assistant.tree = TreeConfig(8, 2, 3)
    assert_serves(target, assistant, expected)
    assert assistant.stats.drafted % 7 == 0
    assistant.tree = False
    assistant.generation_config.num_assistant_tokens = 2
    assert_serves(target, assistant, expected)
    assert max(index for index, count in enumerate(assistant.stats.tokens_per_round) if count) <= 3


# Copies and lifetimes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_bound_target_is_a_model_of_its_own(how, target, drafter, expected):
    # This policy needs no hidden states of the target. Capturing some, with an assistant or without, leaves hooks of
    # transformers on a model that cannot be pickled.
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_serves(target, assistant, expected)
    if how == "deepcopy":
        twin = copy.deepcopy(target)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(target))
    else:
        file = io.BytesIO()
        torch.save(target, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with ForwardCounter(target) as original, ForwardCounter(twin) as own:
        assert torch.equal(generate(twin), expected)
    assert original.count == 0 and own.count > 0
    with pytest.raises(NotBoundError):
        generate(twin, assistant)
    own_assistant = DynSpecAssistant(drafter, "full", target=twin)
    assert_serves(twin, own_assistant, expected)
    own_assistant.unbind()
    assert_serves(target, assistant, expected)


def test_a_copy_of_an_assistant_is_bound_to_the_same_target(target, drafter, expected):
    """Evaluation harnesses copy the arguments of every request."""
    assistant = DynSpecAssistant(drafter, target=target, num_assistant_tokens=3)
    assert_serves(target, copy.copy(assistant), expected)
    twin, same = copy.deepcopy({"assistant_model": [assistant, assistant]})["assistant_model"]
    assert twin is same is not assistant
    assert twin.target is target and twin.drafter is assistant.drafter and twin.policy is assistant.policy
    twin.generation_config.num_assistant_tokens = 1
    for one in (twin, assistant):
        assert_serves(target, one, expected)
    assert max(index for index, count in enumerate(twin.stats.tokens_per_round) if count) == 2
    assistant.unbind()
    assert_serves(target, twin, expected)
    assert torch.equal(generate(target, copy.deepcopy(twin.conversation())), expected)
    twin.unbind()
    assert "generate" not in vars(target)
    assert copy.deepcopy(twin).target is None


def test_a_bound_target_is_saved_as_before(target, drafter, tmp_path):
    target.save_pretrained(tmp_path / "before")
    DynSpecAssistant(drafter, target=target)
    target.save_pretrained(tmp_path / "bound")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "bound" / file.name).read_bytes()


def test_neither_target_nor_assistant_nor_conversation_keeps_another_alive(target, drafter, expected):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target)
    conversation = assistant.conversation()
    generate(target, conversation)
    watched = weakref.ref(conversation), weakref.ref(conversation.session)
    del conversation
    gc.collect()
    assert [one() for one in watched] == [None, None]
    watched = weakref.ref(assistant)
    del assistant
    gc.collect()
    assert watched() is None
    assert torch.equal(generate(target), expected)
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=tiny())
    gc.collect()
    assert assistant.target is None
    with pytest.raises(NotBoundError):
        assistant.config  # noqa: B018


# Other ways to generate ----------------------------------------------------------------------------------------------


def test_other_ways_to_generate_work_on_a_bound_target(target, drafter, expected):
    """Plain drafters and prompt lookup go the way they always go, with as many forwards."""
    ways = [{"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3}, {}]
    counts = []
    for bound in (False, True):
        if bound:
            assistant = DynSpecAssistant(drafter, target=target)
        for way in ways:
            with ForwardCounter(target, drafter) as forwards:
                assert torch.equal(generate(target, **way), expected)
            counts.append(forwards.count)
    assert counts[:3] == counts[3:]

    def last_token_again(model, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    output = target.generate(prompt(), custom_generate=last_token_again, max_new_tokens=1)
    assert output[0, -1] == output[0, -2]
    assert assistant.stats_total.calls == 0
    assert_serves(target, assistant, expected)


def wrapper_of(generate, calls: list):
    """What users and libraries put around `generate`."""

    def wrapped(*args, **kwargs):
        calls.append(kwargs)
        return generate(*args, **kwargs)

    return wrapped


def test_a_generate_that_the_object_had_before_is_called_and_restored(target, drafter, expected):
    calls: list = []
    wrapped = target.generate = wrapper_of(target.generate, calls)
    assistant = DynSpecAssistant(drafter, target=target)
    assert_serves(target, assistant, expected)
    assert len(calls) == 1
    assert torch.equal(generate(target), expected) and len(calls) == 2
    assistant.unbind()
    assert vars(target)["generate"] is wrapped and "_get_candidate_generator" not in vars(target)
    assert torch.equal(generate(target), expected) and len(calls) == 3


def test_a_wrapper_put_on_after_binding_keeps_working(target, drafter, expected):
    calls: list = []
    assistant = DynSpecAssistant(drafter, target=target)
    wrapped = target.generate = wrapper_of(target.generate, calls)
    assert_serves(target, assistant, expected)
    other = DynSpecAssistant(drafter, "full", target=target)
    for one in (assistant, other):
        assert_serves(target, one, expected)
    for one in (other, assistant):
        one.unbind()
        assert vars(target)["generate"] is wrapped
    assert "_get_candidate_generator" not in vars(target)
    assert torch.equal(generate(target), expected) and len(calls) == 4
    # Over the wrapper.
    assistant.bind(target)
    assistant.policy = "hybrid"
    assert_serves(target, assistant, expected)
    assistant.unbind()
    assert vars(target)["generate"] is wrapped and "_get_candidate_generator" not in vars(target)


SIGNATURES = {
    "any": "def generate(self, *args, **kwargs): return super(type(self), self).generate(*args, **kwargs)",
    "one and any": "def generate(self, x, *args, **more): return super(type(self), self).generate(x, *args, **more)",
    "keywords": "def generate(self, *, inputs, **kwargs): return super(type(self), self).generate(inputs, **kwargs)",
    "few": (
        "def generate(self, inputs=None, assistant_model=None, max_new_tokens=24, do_sample=False):\n"
        "  return super(type(self), self).generate(inputs, assistant_model=assistant_model, "
        "max_new_tokens=max_new_tokens, do_sample=do_sample)"
    ),
}
# `assistant_model` is the seventh argument of `generate`.
POSITIONAL = (GenerationConfig(max_new_tokens=24, eos_token_id=EOS, pad_token_id=PAD), None, None, None, None)


@pytest.mark.parametrize("name", [None, *SIGNATURES])
def test_subclasses_with_any_signature(name, target, drafter, expected):
    """And the class itself; also with the assistant by position, where the signature allows it."""
    if name is not None:
        namespace: dict = {}
        exec(SIGNATURES[name], namespace)
        target.__class__ = type("Special", (type(target),), {"generate": namespace["generate"]})
    assistant = DynSpecAssistant(drafter, target=target)
    args, kwargs = ((), {"inputs": prompt()}) if name == "keywords" else ((prompt(),), {})
    output = target.generate(*args, **kwargs, max_new_tokens=24, do_sample=False, assistant_model=assistant)
    assert torch.equal(output, expected) and assistant.stats.tokens == expected.shape[1] - 12
    if name in (None, "any", "one and any"):
        rounds = assistant.stats_total.rounds
        assert torch.equal(target.generate(prompt(), *POSITIONAL, assistant), expected)
        assert assistant.stats_total.rounds > rounds


# transformers' own loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", representatives("families", POLICY_CASES, keep=len(POLICIES)))
def test_the_method_of_the_class_drafts_in_transformers_loop(policy, target, drafter, expected):
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
    call = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(type(target).generate(target, prompt(), assistant_model=assistant, **call), expected)
    assert assistant.stats.accepted > 0 and assistant.stats.tokens == expected.shape[1] - 12


@pytest.mark.parametrize(
    ("policy", "do_sample"), representatives("families", itertools.product(POLICY_CASES, (False, True)), keep=4)
)
def test_an_assistant_made_within_the_call(policy, do_sample, target, drafter, expected):
    before = dict(vars(target))
    output = target.generate(
        prompt(),
        max_new_tokens=24,
        do_sample=do_sample,
        assistant_model=DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, num_assistant_tokens=4),
    )
    assert output.shape[1] <= 36 if do_sample else torch.equal(output, expected)
    gc.collect()
    assert vars(target) == before


def test_a_hybrid_of_attention_layers_alone_drafts_in_transformers_loop():
    target = model_of("granitemoehybrid", layer_types=["attention", "attention"])
    expected = target.generate(prompt(), max_new_tokens=24, do_sample=False)
    # Looked up before the assistant is bound.
    generate = target.generate
    assistant = DynSpecAssistant(perturbed(target), target=target)
    output = generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=assistant)
    assert torch.equal(output, expected) and assistant.stats.acceptance_length > 1.5
    assistant.unbind()
    assert target._is_stateful


def test_an_assistant_made_within_the_call_that_needs_our_own_loop(target, drafter):
    with pytest.raises(UnsupportedError, match="bind the assistant before the call"):
        target.generate(prompt(), assistant_model=DynSpecAssistant(drafter, target=target, tree=True))
    gc.collect()
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(prompt()[:, :6], **{CACHE: cache})
    with pytest.raises(UnsupportedError, match="bind the assistant before the call"):
        target.generate(
            prompt(), **{CACHE: cache}, assistant_model=DynSpecAssistant(drafter, target=target), max_new_tokens=4
        )


@pytest.mark.parametrize("ends", ["by length", "by token"])
def test_a_loop_of_ones_own(ends, target, drafter, expected):
    """The contract of transformers' candidate generators, in the fewest lines."""
    assistant = DynSpecAssistant(drafter, target=target)
    plain = expected[0].tolist()
    eos = plain[20] if ends == "by token" else EOS
    config = GenerationConfig(max_length=28, eos_token_id=eos)
    generator = DynSpecCandidateGenerator(assistant, input_ids=prompt(), generation_config=config)
    text, outputs, matches = prompt(), None, 0
    with torch.no_grad():
        while text.shape[1] < 28 and text[0, -1] != eos:
            candidates, logits = generator.get_candidates(text, model_outputs=outputs, n_last_matches=matches)
            assert logits is None and candidates.shape[1] <= 27
            outputs = target(candidates, **generator.model_kwargs_overrides)
            chosen = outputs.logits[:, text.shape[1] - 1 :].argmax(-1)
            drafted = candidates[:, text.shape[1] :]
            matches = min(int((drafted == chosen[:, :-1]).cumprod(-1).sum()), 27 - text.shape[1])
            text = torch.cat([text, chosen[:, : matches + 1]], dim=1)
            generator.update_candidate_strategy(text, outputs.logits[:, -drafted.shape[1] - 1 :], matches)
    assert text[0].tolist() == plain[: text.shape[1]]
    assert assistant.stats_total.rounds == 0
    del generator
    assert assistant.stats.accepted > 0 and assistant.stats.tokens == text.shape[1] - 12


def test_what_a_candidate_generator_cannot_serve(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    config = GenerationConfig(max_length=30)
    for error, words, one, ids, settings in (
        (NotBoundError, "bind", DynSpecAssistant(drafter), prompt(), config),
        (UnsupportedError, "DynSpecAssistant", drafter, prompt(), config),
        (UnsupportedError, "one prompt", assistant, prompt().expand(2, -1), config),
        (UnsupportedError, "one prompt", assistant, prompt()[:, :0], config),
        (UnsupportedError, "max_length", assistant, prompt(), GenerationConfig()),
    ):
        with pytest.raises(error, match=words):
            DynSpecCandidateGenerator(one, input_ids=ids, generation_config=settings)
    for settings in ({"assistant_ensemble_weight": 0.5}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(UnsupportedError, match=next(iter(settings))):
            target.generate(prompt(), assistant_model=DynSpecAssistant(drafter, target=target), **settings)


# Refusals: typed, at once, and naming the fix ------------------------------------------------------------------------


def refused(error, match, target, drafter, call) -> None:
    with ForwardCounter(target, drafter, target.get_decoder(), drafter.get_decoder()) as forwards:
        with pytest.raises(error, match=match) as caught:
            call()
    assert isinstance(caught.value, DynSpecError)
    assert error is NotBoundError or isinstance(caught.value, ValueError), "as in transformers"
    assert forwards.count == 0, "work was done before the call was refused"


@pytest.mark.parametrize("bound_to", ["nothing", "another model"])
def test_an_assistant_that_is_not_bound_to_the_target_is_refused(bound_to, target, drafter):
    """Whether another assistant is bound to it or not."""
    other = tiny(seed=3)
    assistant = DynSpecAssistant(drafter, target=other if bound_to == "another model" else None)
    refused(NotBoundError, r"bind\(target\)", target, drafter, lambda: generate(target, assistant))
    DynSpecAssistant(drafter, target=target)
    refused(NotBoundError, r"bind\(target\)", target, drafter, lambda: generate(target, assistant))
    if bound_to == "nothing":
        with pytest.raises(NotBoundError, match="bind"):
            assistant.conversation()


UNSUPPORTED = {
    "no cache": ({"use_cache": False}, "use_cache"),
    "a static cache": ({CACHE: StaticCache(tiny().config, max_cache_len=64)}, "DynamicCache"),
    "a quantized cache by name": ({"cache_implementation": "quantized"}, "dynamic cache"),
    "embeddings": ({"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "input_ids"),
    "a custom loop": ({"custom_generate": lambda *args, **kwargs: None}, "leave one of the two out"),
    "sharding": ({"synced_gpus": True}, "leave it unset"),
}
# What a configuration may say too.
UNSUPPORTED_SETTINGS = {
    "beams": ({"num_beams": 2}, "num_beams=1"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers"),
    "words that must occur": ({"force_words_ids": [[5]]}, "force_words_ids"),
    "constraints": ({"constraints": [object()]}, "constraints"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assistant_model"),
    "the target's own drafting layers": ({"use_mtp": True}, "use_mtp"),
}


@pytest.mark.parametrize("name", UNSUPPORTED | UNSUPPORTED_SETTINGS)
def test_unsupported_arguments_are_refused(name, target, drafter):
    arguments, fix = (UNSUPPORTED | UNSUPPORTED_SETTINGS)[name]
    assistant = DynSpecAssistant(drafter, target=target)
    call = {"inputs": prompt(), "max_new_tokens": 4, "assistant_model": assistant, **arguments}
    refused(UnsupportedError, fix, target, drafter, lambda: target.generate(**call))


PASSED = ("by keyword", "by position", "as the target's own")
# A cache that only the target's defaults name, or none, is not what the caller asked for: see below.
OF_A_CALL = {name: UNSUPPORTED[name] for name in ("no cache", "a quantized cache by name")}
BY_CONFIG = [*itertools.product(UNSUPPORTED_SETTINGS, PASSED), *itertools.product(OF_A_CALL, PASSED[:2])]


@pytest.mark.parametrize(("name", "passed"), BY_CONFIG)
def test_unsupported_settings_of_a_configuration_are_refused(name, passed, target, drafter):
    """transformers fills the gaps of a passed configuration with the target's own settings."""
    arguments, fix = (UNSUPPORTED_SETTINGS | OF_A_CALL)[name]
    assistant = DynSpecAssistant(drafter, target=target)
    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS, pad_token_id=PAD)
    for key, value in arguments.items():
        setattr(config, key, value)
    args, kwargs = (prompt(),), {"assistant_model": assistant}
    if passed == "as the target's own":
        target.generation_config = config
        kwargs["generation_config"] = GenerationConfig(max_new_tokens=4)
    elif passed == "by position":
        args += (config,)
    else:
        kwargs["generation_config"] = config
    refused(UnsupportedError, fix, target, drafter, lambda: target.generate(*args, **kwargs))


@pytest.mark.parametrize(("setting", "value"), [("cache_implementation", "static"), ("use_cache", False)])
def test_the_targets_default_cache_gives_way_to_a_dynamic_one(setting, value, target, drafter, expected):
    """As MPT's, whose configuration says that no cache is used."""
    setattr(target.generation_config, setting, value)
    output = generate(target, DynSpecAssistant(drafter, target=target), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert type(returned_cache(output)) is DynamicCache
    assert getattr(target.generation_config, setting) == value


@pytest.mark.parametrize("thing", [None, 7, torch.nn.Linear(3, 3)])
def test_other_things_than_models_are_refused_on_either_side(thing, drafter):
    for bind in (lambda: DynSpecAssistant(thing), lambda: DynSpecAssistant(drafter).bind(thing)):
        with pytest.raises(UnsupportedError, match=r"AutoModelForCausalLM\.from_pretrained"):
            bind()


def test_names_of_nothing_are_refused(drafter, target):
    with pytest.raises(ConfigurationError, match="no drafter named 'hybrid': name a folder or a repository"):
        DynSpecAssistant("hybrid")
    with pytest.raises(UnsupportedError, match=r"AutoModelForCausalLM\.from_pretrained"):
        DynSpecAssistant(drafter).bind("gpt2")
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        DynSpecAssistant("./nowhere", target=target)


def test_a_folder_is_what_it_holds(tmp_path, target, drafter):
    """A model, or a head for the target, which is loaded once there is one."""
    drafter.save_pretrained(tmp_path / "model")
    random_head("eagle3", features=3).write(tmp_path / "head")
    four = tiny(num_hidden_layers=4)
    for name, kind in (("model", CausalLMDrafter), ("head", EagleDrafter)):
        assistant = DynSpecAssistant(tmp_path / name)
        with pytest.raises(NotBoundError, match="is loaded for a target"):
            _ = assistant.drafter.head
        assert type(assistant.bind(four).drafter) is kind
        assert_same(four, assistant, prompt(12))
        assistant.unbind()


def test_models_that_cannot_draft_or_verify_are_refused_on_either_side(target, drafter):
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=301, hidden_size=16, num_hidden_layers=1, state_size=4))
    for words, bind in (
        ("transformers' own", lambda: DynSpecAssistant(tiny_t5())),
        ("transformers' own", lambda: DynSpecAssistant(drafter, target=tiny_t5())),
        ("several tokens read at once", lambda: DynSpecAssistant(drafter, target=recurrent)),
        ("output projection", lambda: DynSpecAssistant(target.model)),
        (r"AutoModelForCausalLM\.from_pretrained", lambda: DynSpecAssistant(target, target=target.model)),
        ("universal assisted generation", lambda: DynSpecAssistant(tiny(vocabulary=301 + 1024), target=target)),
    ):
        with pytest.raises(UnsupportedError, match=words):
            bind()


@pytest.mark.parametrize("layer_types", [["attention", "attention"], ["mamba", "attention"]], ids="+".join)
def test_the_layers_of_a_hybrid_decide_whether_it_takes_trees(layer_types):
    """And not the class, which is flagged as recurrent."""
    sizes = {"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_heads": 2, "mamba_d_head": 32}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32}
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(**sizes, **heads, **experts, layer_types=layer_types)
    target = GraniteMoeHybridForCausalLM(config).eval()
    for tree in (False, True):
        if tree and "mamba" in layer_types:
            with pytest.raises(UnsupportedError, match="recurrent state"):
                DynSpecAssistant(perturbed(target), target=target, tree=tree)
            continue
        assistant = DynSpecAssistant(perturbed(target), target=target, tree=tree)
        assert_same(target, assistant, eos_token_id=300)
        assert assistant.stats.drafted


# Tokenizers ----------------------------------------------------------------------------------------------------------


def saved_pair(folder: Path) -> list[PreTrainedModel]:
    """Two models in folders of their own, with different tokenizers beside them."""
    for seed, tokenizer in enumerate((word_tokenizer(), character_tokenizer())):
        tiny(seed=seed).save_pretrained(folder / str(seed))
        tokenizer.save_pretrained(folder / str(seed))
    return [type(tiny()).from_pretrained(folder / str(seed)) for seed in (0, 1)]


@pytest.mark.parametrize("given", [False, True])
def test_tokenizers_are_compared_if_both_can_be_found(given, tmp_path):
    target, drafter = saved_pair(tmp_path)
    tokenizer = word_tokenizer() if given else None
    for other in (target, tiny()) if given else (target,):
        with pytest.raises(UnsupportedError, match="differ"):
            DynSpecAssistant(drafter, target=other, tokenizer=tokenizer)
    word_tokenizer().save_pretrained(tmp_path / "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynSpecAssistant(drafter, target=target, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="could not be compared"):
        DynSpecAssistant(tiny(seed=2), target=target, tokenizer=tokenizer)


def test_a_tokenizer_that_was_found_is_not_one_that_was_given(tmp_path):
    """Another pair with another tokenizer may be bound after it; and a chat model may have more tokens."""
    first, second = saved_pair(tmp_path)
    assistant = DynSpecAssistant(first, target=first)
    assert assistant.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assistant.unbind()
    assistant.drafter = second
    assistant.bind(second)
    assert assistant.tokenizer.get_vocab() == character_tokenizer().get_vocab()
    more = word_tokenizer()
    more.add_tokens(["<tool>"])
    DynSpecAssistant(first, target=first, tokenizer=more)
    with pytest.raises(UnsupportedError, match="differ"):
        DynSpecAssistant(first, target=first, tokenizer=character_tokenizer())


def test_tokenizers_of_a_pair_are_read_once_beside_a_given_one(tmp_path, monkeypatch):
    tokenizer, models = word_tokenizer(), {"target": tiny(), "drafter": tiny(seed=2)}
    for name, model in models.items():
        model.name_or_path = str(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    read = []
    monkeypatch.setattr(loading, "local_tokenizer", lambda model: read.append(model) or local_tokenizer(model))
    bind = partial(DynSpecAssistant, models["drafter"], target=models["target"])
    for _ in range(3):
        bind(tokenizer=tokenizer).unbind()
    assert read == [models["target"], models["drafter"]]
    # Another tokenizer is compared, the same one with another token, and one beside another model.
    with pytest.raises(UnsupportedError):
        bind(tokenizer=character_tokenizer())
    tokenizer.add_tokens(["more"])
    bind(tokenizer=tokenizer).unbind()
    models["drafter"].name_or_path = str(tmp_path / "other")
    character_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(UnsupportedError):
        bind(tokenizer=tokenizer)
    assert len(read) == 8
