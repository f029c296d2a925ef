"""Binding attaches to one model object and to nothing else, and unbinding leaves it as it was."""

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
from calls import generate
from cases import representatives
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
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_dynspec import (
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
from hf_dynspec.loading import local_tokenizer
from hf_dynspec.shortlists import POLICIES


# Every test has models of its own, as binding changes them.
@pytest.fixture
def target():
    return tiny()


@pytest.fixture
def drafter(target):
    return perturbed(target)


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
    before = dict(bystander.__dict__)
    drafter_before = dict(drafter.__dict__)
    assistant = DynSpecAssistant(drafter, target=target)
    generate(target, assistant)
    assert bystander.__dict__ == before
    assert drafter.__dict__ == drafter_before
    for cls, own in zip(type(target).__mro__, classes, strict=True):
        assert {name: vars(cls).get(name) for name in names} == {name: own.get(name) for name in names}


def test_binding_again_moves_the_assistant(target, drafter):
    other = tiny(seed=4)
    assistant = DynSpecAssistant(drafter, target=target)
    first = generate(target, assistant)
    assert assistant.bind(other) is assistant
    assert "generate" not in target.__dict__
    assert torch.equal(generate(other, assistant), generate(other))
    with pytest.raises(NotBoundError):
        generate(target, assistant)
    assistant.bind(target)
    assert "generate" not in other.__dict__
    assert torch.equal(generate(target, assistant), first)
    assistant.bind(target)
    assert torch.equal(generate(target, assistant), first)


def test_a_refused_target_leaves_the_old_binding(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    with pytest.raises(UnsupportedError):
        assistant.bind(tiny(vocabulary=3000))
    assert assistant.target is target
    assert torch.equal(generate(target, assistant), generate(target))


def test_two_assistants_on_one_target(target, drafter):
    first = DynSpecAssistant(drafter, "full", target=target)
    second = DynSpecAssistant(perturbed(target, 0.2), POLICY_CASES["hybrid"](), target=target)
    expected = generate(target)
    assert torch.equal(generate(target, first), expected)
    assert torch.equal(generate(target, second), expected)
    first.unbind()
    assert torch.equal(generate(target, second), expected)
    with pytest.raises(NotBoundError):
        generate(target, first)
    second.unbind()
    assert "generate" not in target.__dict__


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_bound_target_is_a_model_of_its_own(how, target, drafter):
    # This policy asks for none of the target's hidden states. Capturing some, with an assistant or without, leaves
    # hooks of transformers on a model that cannot be pickled.
    assistant = DynSpecAssistant(drafter, "full", target=target)
    expected = generate(target, assistant)
    if how == "deepcopy":
        twin = copy.deepcopy(target)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(target))
    else:
        file = io.BytesIO()
        torch.save(target, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(generate(twin), expected)
    with ForwardCounter(target) as original, ForwardCounter(twin) as own:
        generate(twin)
    assert original.count == 0 and own.count > 0
    with pytest.raises(NotBoundError):
        generate(twin, assistant)
    own_assistant = DynSpecAssistant(drafter, "full", target=twin)
    assert torch.equal(generate(twin, own_assistant), expected)
    assert torch.equal(generate(target, assistant), expected)
    own_assistant.unbind()
    assert torch.equal(generate(target, assistant), expected)


def test_a_bound_target_is_saved_as_before(target, drafter, tmp_path):
    target.save_pretrained(tmp_path / "before")
    DynSpecAssistant(drafter, target=target)
    target.save_pretrained(tmp_path / "bound")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "bound" / file.name).read_bytes()


# Lifetimes -----------------------------------------------------------------------------------------------------------


def test_neither_keeps_the_other_alive(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target)
    expected = generate(target, assistant)
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


def test_a_call_with_a_conversation_leaves_nothing_behind(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    conversation = assistant.conversation()
    generate(target, conversation)
    watched = weakref.ref(conversation)
    session = weakref.ref(conversation.session)
    del conversation
    gc.collect()
    assert watched() is None and session() is None


# Other ways to generate ----------------------------------------------------------------------------------------------


def test_other_assistants_work_on_a_bound_target(target, drafter):
    """Plain drafters and prompt lookup go the way they always go, with the same output and the same drafter calls."""
    expected = generate(target)
    ways = [{"assistant": drafter}, {"prompt_lookup_num_tokens": 3}, {"assistant": None}]
    counts = []
    for bound in (False, True):
        if bound:
            assistant = DynSpecAssistant(drafter, target=target)
        for way in ways:
            with ForwardCounter(target, drafter) as forwards:
                assert torch.equal(generate(target, **way), expected)
            counts.append(forwards.count)
    assert counts[:3] == counts[3:]
    assert assistant.stats_total.calls == 0
    assert torch.equal(generate(target, assistant), expected)


def test_a_custom_decoding_method_works_on_a_bound_target(target, drafter):
    DynSpecAssistant(drafter, target=target)

    def last_token_again(model, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    output = target.generate(prompt(), custom_generate=last_token_again, max_new_tokens=1)
    assert output[0, -1] == output[0, -2]


# Refusals: typed, at once, and naming the fix ------------------------------------------------------------------------


def refused(error, match, target, drafter, call) -> None:
    with ForwardCounter(target, drafter, target.get_decoder(), drafter.get_decoder()) as forwards:
        with pytest.raises(error, match=match) as caught:
            call()
    assert isinstance(caught.value, DynSpecError)
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


@pytest.mark.parametrize("policy", representatives("families", POLICY_CASES, keep=len(POLICIES)))
def test_the_method_of_the_class_drafts_in_transformers_loop(policy, target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
    call = {"max_new_tokens": 24, "do_sample": False}
    output = type(target).generate(target, prompt(), assistant_model=assistant, **call)
    assert torch.equal(output, generate(target, **call))
    assert assistant.stats.accepted > 0 and assistant.stats.tokens == 24


UNSUPPORTED = {
    "a batch": ({"inputs": prompt().expand(2, -1)}, "once for each"),
    "a batch as input_ids": ({"inputs": None, "input_ids": prompt().expand(2, -1)}, "once for each"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "a static cache by name": ({"cache_implementation": "static"}, "dynamic cache"),
    "embeddings": ({"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "input_ids"),
    "a custom loop": ({"custom_generate": lambda *args, **kwargs: None}, "leave one of the two out"),
    "sharding": ({"synced_gpus": True}, "leave it unset"),
}
# What a configuration may say too.
UNSUPPORTED_SETTINGS = {
    "beams": ({"num_beams": 2}, "num_beams=1"),
    "return sequences": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=1"),
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
OF_A_CALL = {name: UNSUPPORTED[name] for name in ("no cache", "a static cache by name")}
BY_CONFIG = [*itertools.product(UNSUPPORTED_SETTINGS, PASSED), *itertools.product(OF_A_CALL, PASSED[:2])]


@pytest.mark.parametrize(("name", "passed"), BY_CONFIG)
def test_unsupported_settings_of_a_configuration_are_refused(name, passed, target, drafter):
    arguments, fix = (UNSUPPORTED_SETTINGS | OF_A_CALL)[name]
    assistant = DynSpecAssistant(drafter, target=target)
    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS, pad_token_id=PAD)
    for key, value in arguments.items():
        setattr(config, key, value)
    args, kwargs = (prompt(),), {"assistant_model": assistant}
    if passed == "as the target's own":
        target.generation_config = config
    elif passed == "by position":
        args += (config,)
    else:
        kwargs["generation_config"] = config
    refused(UnsupportedError, fix, target, drafter, lambda: target.generate(*args, **kwargs))


@pytest.mark.parametrize(("setting", "value"), [("cache_implementation", "static"), ("use_cache", False)])
def test_the_targets_default_cache_gives_way_to_a_dynamic_one(setting, value, target, drafter):
    """As MPT's, whose configuration says that no cache is used."""
    expected = generate(target)
    setattr(target.generation_config, setting, value)
    output = generate(target, DynSpecAssistant(drafter, target=target), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert type(returned_cache(output)) is DynamicCache
    assert getattr(target.generation_config, setting) == value


def test_a_configuration_that_says_nothing_leaves_the_targets_own_refused(target, drafter):
    """transformers fills the gaps of a passed configuration with the target's own settings."""
    assistant = DynSpecAssistant(drafter, target=target)
    target.generation_config.num_beams = 3
    config = GenerationConfig(max_new_tokens=4)
    refused(
        UnsupportedError, "num_beams=1", target, drafter, lambda: generate(target, assistant, generation_config=config)
    )


def test_an_assistant_passed_by_position(target, drafter):
    """`assistant_model` is the seventh argument of `generate`."""
    assistant = DynSpecAssistant(drafter, target=target)
    config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS, pad_token_id=0)
    output = target.generate(prompt(), config, None, None, None, None, assistant)
    assert torch.equal(output, generate(target))
    assert assistant.stats.rounds > 0


def test_a_static_cache_is_refused(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    cache = StaticCache(target.config, max_cache_len=64)
    refused(UnsupportedError, "DynamicCache", target, drafter, lambda: generate(target, assistant, **{CACHE: cache}))
    cache = DynamicCache(config=target.config)
    assert torch.equal(generate(target, assistant, **{CACHE: cache}), generate(target))


# Leaving no trace ----------------------------------------------------------------------------------------------------


def wrapper_of(generate, calls: list):
    """What users and libraries put around `generate`."""

    def wrapped(*args, **kwargs):
        calls.append(kwargs)
        return generate(*args, **kwargs)

    return wrapped


def test_a_generate_that_the_object_had_before_is_called_and_restored(target, drafter):
    calls: list = []
    wrapped = target.generate = wrapper_of(target.generate, calls)
    assistant = DynSpecAssistant(drafter, target=target)
    expected = generate(tiny())
    assert torch.equal(generate(target, assistant), expected) and assistant.stats.rounds > 0
    assert len(calls) == 1
    assert torch.equal(generate(target), expected) and len(calls) == 2
    assistant.unbind()
    assert vars(target)["generate"] is wrapped and "_get_candidate_generator" not in vars(target)
    assert torch.equal(generate(target), expected) and len(calls) == 3


def test_a_wrapper_put_on_after_binding_keeps_working(target, drafter):
    calls: list = []
    assistant = DynSpecAssistant(drafter, target=target)
    wrapped = target.generate = wrapper_of(target.generate, calls)
    expected = generate(tiny())
    assert torch.equal(generate(target, assistant), expected) and assistant.stats.rounds > 0
    other = DynSpecAssistant(drafter, "full", target=target)
    for one in (assistant, other):
        assert torch.equal(generate(target, one), expected) and one.stats.rounds > 0
    other.unbind()
    assert vars(target)["generate"] is wrapped
    assistant.unbind()
    assert vars(target)["generate"] is wrapped
    assert torch.equal(generate(target), expected) and len(calls) == 4
    assistant.bind(target)
    assert torch.equal(generate(target, assistant), expected)


def test_a_second_binding_over_a_wrapper_leaves_nothing_either(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    wrapped = target.generate = wrapper_of(target.generate, [])
    assistant.policy = "full"
    assert torch.equal(generate(target, assistant), generate(tiny()))
    assistant.unbind()
    assert vars(target).get("generate") is wrapped and "_get_candidate_generator" not in vars(target)


def test_a_tokenizer_that_was_found_is_not_one_that_was_given(tmp_path):
    """Another pair with another tokenizer may be bound after it; and a chat model may have more tokens."""
    models = []
    for index, tokenizer in enumerate((word_tokenizer(), character_tokenizer())):
        tiny(seed=index).save_pretrained(tmp_path / str(index))
        tokenizer.save_pretrained(tmp_path / str(index))
        models.append(type(tiny()).from_pretrained(tmp_path / str(index)))
    assistant = DynSpecAssistant(models[0], target=models[0])
    assert assistant.tokenizer.get_vocab() == word_tokenizer().get_vocab()
    assistant.unbind()
    assistant.drafter = models[1]
    assistant.bind(models[1])
    assert assistant.tokenizer.get_vocab() == character_tokenizer().get_vocab()
    more = word_tokenizer()
    more.add_tokens(["<tool>"])
    DynSpecAssistant(models[0], target=models[0], tokenizer=more)
    with pytest.raises(UnsupportedError, match="differ"):
        DynSpecAssistant(models[0], target=models[0], tokenizer=character_tokenizer())


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


@pytest.mark.parametrize("name", SIGNATURES)
def test_subclasses_with_any_signature(name, target, drafter):
    namespace: dict = {}
    exec(SIGNATURES[name], namespace)
    target.__class__ = type("Special", (type(target),), {"generate": namespace["generate"]})
    assistant = DynSpecAssistant(drafter, target=target)
    arguments = {"max_new_tokens": 24, "do_sample": False}
    args, kwargs = ((), {"inputs": prompt()}) if name == "keywords" else ((prompt(),), {})
    output = target.generate(*args, **kwargs, **arguments, assistant_model=assistant)
    assert torch.equal(output, generate(tiny()))
    assert assistant.stats.accepted > 0 and assistant.stats.tokens == 24
    if name in ("any", "one and any"):
        config = GenerationConfig(max_new_tokens=24, eos_token_id=EOS, pad_token_id=0)
        rounds = assistant.stats_total.rounds
        output = target.generate(prompt(), config, None, None, None, None, assistant)
        assert torch.equal(output, generate(tiny())) and assistant.stats_total.rounds > rounds


def test_the_attributes_go_with_the_last_assistant(target, drafter):
    before = dict(vars(target))
    first, second = DynSpecAssistant(drafter, target=target), DynSpecAssistant(drafter, "full", target=target)
    generate(target, first)
    del first
    assert "generate" in vars(target)
    generate(target, second)
    del second
    gc.collect()
    assert vars(target) == before


@pytest.mark.parametrize(
    ("policy", "do_sample"), representatives("families", itertools.product(POLICY_CASES, (False, True)), keep=4)
)
def test_an_assistant_made_within_the_call(policy, do_sample, target, drafter):
    before = dict(vars(target))
    output = target.generate(
        prompt(),
        max_new_tokens=24,
        do_sample=do_sample,
        assistant_model=DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, num_assistant_tokens=4),
    )
    if not do_sample:
        assert torch.equal(output, generate(target, max_new_tokens=24))
    assert output.shape[1] <= 36
    gc.collect()
    assert vars(target) == before


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
def test_a_loop_of_ones_own(ends, target, drafter):
    """The contract of transformers' candidate generators, in the fewest lines."""
    assistant = DynSpecAssistant(drafter, target=target)
    plain = generate(target)[0].tolist()
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
            matches = int((drafted == chosen[:, :-1]).cumprod(-1).sum())
            matches = min(matches, 27 - text.shape[1])
            text = torch.cat([text, chosen[:, : matches + 1]], dim=1)
            generator.update_candidate_strategy(text, outputs.logits[:, -drafted.shape[1] - 1 :], matches)
    assert text[0].tolist() == plain[: text.shape[1]]
    assert assistant.stats_total.rounds == 0
    del generator
    assert assistant.stats.accepted > 0 and assistant.stats.tokens == text.shape[1] - 12


def test_a_bind_that_fails_leaves_everything_as_it_was(target, drafter):
    assistant = DynSpecAssistant(drafter, RouterShortlist(random_router(), max_clusters=3), target=target)
    expected = generate(tiny())
    wide = tiny(hidden_size=64)
    refused_targets = (wide, tiny(vocabulary=4000), tiny_t5(), object())
    for other in refused_targets[1:]:
        with pytest.raises(UnsupportedError):
            assistant.bind(other)
        assert assistant.target is target and "generate" not in getattr(other, "__dict__", {})
        assert torch.equal(generate(target, assistant), expected) and assistant.stats.rounds > 0
    for name, wrong in {
        "drafter": perturbed(tiny(vocabulary=4000)),
        "policy": RouterShortlist(random_router(width=16), max_clusters=3),
        "tree": 7,
    }.items():
        before = getattr(assistant, name)
        with pytest.raises(DynSpecError):
            setattr(assistant, name, wrong)
        assert getattr(assistant, name) is before
        assert torch.equal(generate(target, assistant), expected) and assistant.stats.accepted > 0


def test_what_is_reassigned_takes_effect_at_the_next_call(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target)
    expected = generate(tiny())
    assert torch.equal(generate(target, assistant), expected)
    full = assistant.stats.active_vocabulary
    assistant.policy = POLICY_CASES["frequency"]()
    assert torch.equal(generate(target, assistant), expected)
    assert assistant.stats.active_vocabulary == 90 < full
    assistant.policy = "hybrid"
    conversation = assistant.conversation()
    assert torch.equal(generate(target, conversation), expected)
    assistant.drafter = target
    for one in (assistant, conversation):
        assert torch.equal(generate(target, one), expected)
    assert assistant.stats.acceptance_rate > 0.8
    assistant.tree = TreeConfig(8, 2, 3)
    assert torch.equal(generate(target, assistant), expected) and assistant.stats.drafted % 7 == 0
    assistant.tree = False
    assistant.generation_config.num_assistant_tokens = 2
    assert torch.equal(generate(target, assistant), expected)
    assert max(index for index, count in enumerate(assistant.stats.tokens_per_round) if count) <= 3


def test_a_copy_is_bound_to_the_same_target(target, drafter):
    """Evaluation harnesses copy the arguments of every request."""
    assistant = DynSpecAssistant(drafter, target=target, num_assistant_tokens=3)
    expected = generate(target, assistant)
    assert torch.equal(generate(target, copy.copy(assistant)), expected)
    twin = copy.deepcopy({"assistant_model": [assistant, assistant]})["assistant_model"]
    assert twin[0] is twin[1] is not assistant
    twin = twin[0]
    assert twin.target is target and twin.drafter is assistant.drafter and twin.policy is assistant.policy
    twin.generation_config.num_assistant_tokens = 1
    assert torch.equal(generate(target, twin), expected) and torch.equal(generate(target, assistant), expected)
    assert max(index for index, count in enumerate(twin.stats.tokens_per_round) if count) == 2
    assistant.unbind()
    assert torch.equal(generate(target, twin), expected)
    conversation = copy.deepcopy(twin.conversation())
    assert torch.equal(generate(target, conversation), expected)
    twin.unbind()
    assert "generate" not in vars(target)
    assert copy.deepcopy(twin).target is None


@pytest.mark.parametrize("given", [False, True])
def test_tokenizers_that_can_both_be_known_are_compared(given, tmp_path):
    target, drafter = tiny(), tiny(seed=2)
    other = PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer()._tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    word_tokenizer().save_pretrained(tmp_path / "target")
    other.save_pretrained(tmp_path / "drafter")
    target = type(target).from_pretrained(tmp_path / "target")
    drafter = type(drafter).from_pretrained(tmp_path / "drafter")
    tokenizer = word_tokenizer() if given else None
    with pytest.raises(UnsupportedError, match="differ"):
        DynSpecAssistant(drafter, target=target, tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match="differ"):
        DynSpecAssistant(drafter, target=tiny(), tokenizer=word_tokenizer())
    word_tokenizer().save_pretrained(tmp_path / "drafter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynSpecAssistant(drafter, target=target, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="could not be compared"):
        DynSpecAssistant(tiny(seed=2), target=target, tokenizer=tokenizer)


# Models that cannot be used ------------------------------------------------------------------------------------------


def test_an_encoder_decoder_is_refused_on_either_side(target, drafter):
    with pytest.raises(UnsupportedError, match="transformers' own"):
        DynSpecAssistant(tiny_t5())
    with pytest.raises(UnsupportedError, match="transformers' own"):
        DynSpecAssistant(drafter, target=tiny_t5())


def test_a_recurrent_model_is_refused_on_either_side(drafter):
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=301, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedError, match="attention-only"):
        DynSpecAssistant(recurrent)
    with pytest.raises(UnsupportedError, match="without an assistant"):
        DynSpecAssistant(drafter, target=recurrent)


@pytest.mark.parametrize("thing", [None, "gpt2", torch.nn.Linear(3, 3)])
def test_something_else_is_refused_on_either_side(thing, drafter):
    with pytest.raises(UnsupportedError, match=r"AutoModelForCausalLM\.from_pretrained"):
        DynSpecAssistant(thing)
    with pytest.raises(UnsupportedError, match=r"AutoModelForCausalLM\.from_pretrained"):
        DynSpecAssistant(drafter).bind(thing)


def test_a_model_without_a_head_is_refused(target):
    with pytest.raises(UnsupportedError, match="output projection"):
        DynSpecAssistant(target.model)
    with pytest.raises(UnsupportedError, match=r"AutoModelForCausalLM\.from_pretrained"):
        DynSpecAssistant(target, target=target.model)


def test_different_vocabularies_are_refused(target):
    with pytest.raises(UnsupportedError, match="universal assisted generation"):
        DynSpecAssistant(tiny(vocabulary=301 + 1024), target=target)


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
    # Another tokenizer is compared, the same one with another token, and what lies beside another model.
    with pytest.raises(UnsupportedError):
        bind(tokenizer=character_tokenizer())
    tokenizer.add_tokens(["more"])
    bind(tokenizer=tokenizer).unbind()
    models["drafter"].name_or_path = str(tmp_path / "other")
    character_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(UnsupportedError):
        bind(tokenizer=tokenizer)
    assert len(read) == 8
