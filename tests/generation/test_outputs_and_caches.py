"""What `generate` returns and the caches that it is given are those of plain generation."""

import contextlib
import copy
import itertools
import logging

import pytest
import torch
from calls import CLOSE, SHAPES, assert_same, generate, padded
from cases import pairwise, representatives
from eagle_heads import drafter_of, random_head
from models import POLICY_CASES, SLIDING_WINDOW, VOCABULARY, perturbed, prompt, tiny
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import generic

from hf_dynspec import DynSpecAssistant, UnsupportedError
from hf_dynspec.cache_names import CACHE, CACHE_NAMES, returned_cache

EVERYTHING = {f"output_{name}": True for name in ("scores", "logits", "hidden_states", "attentions")}
EVERYTHING = {"return_dict_in_generate": True, **EVERYTHING}
# The texts pass the sliding windows. No EOS ends them.
CALL = {"max_new_tokens": 12, "eos_token_id": VOCABULARY - 1}
FAMILIES = ("llama", "gemma3", "qwen3", "gpt2", "mistral", "cohere2")
DRAFTERS = {"often right": perturbed, "never right": lambda _: tiny(seed=77), "always right": lambda target: target}


def eager(family: str) -> PreTrainedModel:
    """Attention weights are returned by eager attention alone."""
    model = tiny(family)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=SHAPES)
def assistant(request, target) -> DynSpecAssistant:
    return DynSpecAssistant(perturbed(target), POLICY_CASES["hybrid"](), target=target, tree=SHAPES[request.param])


# What is returned ----------------------------------------------------------------------------------------------------


def assert_same_output(actual: GenerateDecoderOnlyOutput, expected: GenerateDecoderOnlyOutput) -> None:
    assert type(actual) is type(expected) and actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs)
        for token, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            layers, others = (two if isinstance(two, tuple) else (two,) for two in (one, other))
            assert [layer.shape for layer in layers] == [layer.shape for layer in others], (name, token)
            for layer, its in zip(layers, others, strict=True):
                assert layer.dtype == its.dtype
                torch.testing.assert_close(layer, its, **CLOSE)
    assert_same_cache(returned_cache(actual), returned_cache(expected))


def assert_same_cache(actual: DynamicCache, expected: DynamicCache) -> None:
    assert type(actual) is type(expected) and actual.get_seq_length() == expected.get_seq_length()
    for one, other in zip(actual.layers, expected.layers, strict=True):
        assert type(one) is type(other)
        assert one.keys.shape == other.keys.shape
        # Positions of padding, which come first, hold anything.
        for states, others in ((one.keys, other.keys), (one.values, other.values)):
            torch.testing.assert_close(states[..., -10:, :], others[..., -10:, :], **CLOSE)


@pytest.mark.parametrize(("family", "kind", "shape"), pairwise("families", FAMILIES, list(DRAFTERS), list(SHAPES)))
def test_everything_that_can_be_returned(family, kind, shape):
    target = eager(family)
    assistant = DynSpecAssistant(DRAFTERS[kind](target), target=target, tree=SHAPES[shape], num_assistant_tokens=2)
    arguments = EVERYTHING | CALL | {"repetition_penalty": 1.3}
    actual = generate(target, assistant, **arguments)
    assert_same_output(actual, generate(target, None, **arguments))
    assert len(actual.scores) == actual.sequences.shape[1] - 12
    assert not torch.allclose(actual.scores[5], actual.logits[5])


@pytest.mark.parametrize("name", representatives("families", reversed(EVERYTHING), keep=2))
def test_each_output_by_itself_and_no_other(name, assistant):
    """The policy's need for hidden states is not the user's. Without a dict the sequence comes back alone."""
    model = eager("llama")
    assistant.bind(model)
    arguments = {"return_dict_in_generate": True, name: True}
    actual, expected = generate(model, assistant, **arguments), generate(model, None, **arguments)
    assert actual.keys() == expected.keys()
    assert [actual[key] is None for key in actual] == [expected[key] is None for key in expected]
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch.equal(generate(model, assistant, output_scores=True), expected.sequences)


@pytest.mark.parametrize("kind", representatives("families", DRAFTERS))
def test_scores_of_an_assistant_that_is_made_within_the_call(kind, target):
    """Python looks `generate` up before the assistant is there, so this is transformers' own loop."""
    model = copy.deepcopy(target)
    assert "generate" not in vars(model)
    arguments = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 24}
    expected, drafter = generate(model, None, **arguments), DRAFTERS[kind](model)
    actual = model.generate(
        prompt(), assistant_model=DynSpecAssistant(drafter, target=model), do_sample=False, **arguments
    )
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), **CLOSE)


@pytest.mark.parametrize(
    ("family", "shape"), representatives("families", itertools.product(("gemma3", "llama"), SHAPES), keep=2)
)
def test_outputs_when_sampling(family, shape):
    """Other random numbers, outputs of the same form, and the target's logits of the tokens that came out."""
    target = eager(family)
    assistant = DynSpecAssistant(perturbed(target), target=target, tree=SHAPES[shape])
    arguments = EVERYTHING | CALL | {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.7}
    arguments["suppress_tokens"] = [VOCABULARY - 1]
    torch.manual_seed(0)
    actual, expected = generate(target, assistant, **arguments), generate(target, None, **arguments)
    assert actual.sequences.shape == expected.sequences.shape
    for name in EVERYTHING.keys() - {"return_dict_in_generate"}:
        ours, theirs = (getattr(one, name.removeprefix("output_")) for one in (actual, expected))
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert [layer.shape for layer in one] == [layer.shape for layer in other]
    for token, scores in zip(actual.sequences[0, 12:], actual.scores, strict=True):
        assert scores[0, token] > -torch.inf and int((scores > -torch.inf).sum()) <= 10
    with torch.no_grad():
        logits = target(actual.sequences).logits[0, 11:-1]
    torch.testing.assert_close(torch.cat(actual.logits), logits, **CLOSE)


# Padding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pads", "shape"),
    pairwise("families", ("llama", "mistral", "gemma3", "gpt2"), (5, SLIDING_WINDOW + 3), list(SHAPES)),
)
def test_the_drafter_does_not_see_left_padding(family, pads, shape, rounds):
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPES[shape])
    text, mask = padded(pads, prompt())
    output = assert_same(target, assistant, text, attention_mask=mask, **CALL)
    assert torch.equal(output[:, pads:], generate(target, None, **CALL))
    assert rounds
    for prefix, _, _ in rounds:
        assert torch.equal(prefix, output[0, pads : pads + prefix.shape[0]])
    padded_stats = assistant.stats.to_dict()
    generate(target, assistant, **CALL)
    assert assistant.stats.to_dict() == padded_stats


# Caches --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def cache_of(target: PreTrainedModel, text: torch.Tensor, **inputs: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(text, **{CACHE: cache}, **inputs)
    return cache


TURNS = pairwise("families", ("llama", "mistral", "gemma2"), (0, 3), list(SHAPES), ("assistant", "conversation"))


@pytest.mark.parametrize(("family", "pads", "shape", "what"), TURNS)
def test_going_on_with_the_cache_of_an_earlier_turn(family, pads, shape, what):
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), "hybrid", target=target, tree=SHAPES[shape])
    texts, caches = [], []
    for one in (assistant.conversation() if what == "conversation" else assistant, None):
        text, mask = padded(pads, prompt(20))
        cache = None
        for turn in range(3):
            given = {CACHE: cache, "attention_mask": mask, "return_dict_in_generate": True, **CALL}
            output = generate(target, one, text, **given)
            cache = returned_cache(output)
            # The last token has not been fed to the target.
            assert cache.get_seq_length() == output.sequences.shape[1] - 1
            text = torch.cat([output.sequences, prompt(4, seed=30 + turn)], dim=1)
            mask = torch.cat([mask, mask.new_ones(1, text.shape[1] - mask.shape[1])], dim=1)
        texts.append(text)
        caches.append(cache)
    assert torch.equal(*texts)
    assert_same_cache(*caches)
    assert assistant.stats_total.accepted > 0


def test_a_cache_of_the_prompt_but_its_last_token(assistant, target):
    """As made by hand for a prompt that many calls share."""
    cache = cache_of(target, prompt()[:, :-1])
    assert torch.equal(generate(target, assistant, **{CACHE: cache}), generate(target))


@pytest.mark.parametrize("more", [{}, {"output_hidden_states": True}], ids=["alone", "with hidden states"])
def test_attentions_that_the_model_does_not_return(more, assistant, target):
    """sdpa returns none. Plain generate warns, and has an empty tuple for each token."""
    target.set_attn_implementation("sdpa")
    arguments = {"return_dict_in_generate": True, "output_attentions": True, **more}
    ours, theirs = (generate(target, one, **arguments) for one in (assistant, None))
    assert ours.attentions == theirs.attentions and set(theirs.attentions) == {()}
    assert torch.equal(ours.sequences, theirs.sequences)
    assert (ours.hidden_states is None) == (theirs.hidden_states is None)


@pytest.mark.parametrize(
    ("family", "pads", "shape"), pairwise("families", ("llama", "gemma3", "mistral"), (0, 3), list(SHAPES))
)
def test_new_tokens_alone_after_a_cache(family, pads, shape):
    """With the mask of the whole text, as a conversation is continued by hand. Attentions have plain generation's
    shapes too."""
    target = eager(family)
    assistant = DynSpecAssistant(perturbed(target), "hybrid", target=target, tree=SHAPES[shape])
    text, mask = padded(pads, prompt(30))
    arguments = {"attention_mask": mask, "return_dict_in_generate": True, "output_attentions": True}
    for length in (10, 24):
        outputs = []
        for one in (assistant, None):
            cache = cache_of(target, text[:, :length], attention_mask=mask[:, :length])
            outputs.append(generate(target, one, text[:, length:], **{CACHE: cache}, **arguments))
        ours, theirs = outputs
        assert torch.equal(ours.sequences, theirs.sequences) and assistant.stats.drafted > 0
        shapes = [[[layer.shape for layer in token] for token in one.attentions] for one in outputs]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("family", "length", "shape"),
    pairwise("families", ("mistral", "gemma2", "gemma3", "cohere2"), (SLIDING_WINDOW - 2, 40), list(SHAPES)),
)
def test_a_cache_without_windows(family, length, shape):
    """A passed-in `DynamicCache()` keeps all positions, also those that the windows of the model have left behind."""
    target = tiny(family, seed=3)
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPES[shape])
    expected = generate(target, None, prompt(length), eos_token_id=VOCABULARY - 1)
    for cache in (DynamicCache(), DynamicCache(config=target.config)):
        output = generate(target, assistant, prompt(length), **{CACHE: cache}, eos_token_id=VOCABULARY - 1)
        assert torch.equal(output, expected) and assistant.stats.accepted > 0


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_under_either_of_its_names(name, assistant, target):
    """As transformers takes it: versions with the newer name take the older one too, with a warning of their own."""
    if CACHE_NAMES.index(name) < CACHE_NAMES.index(CACHE):
        pytest.skip("transformers has no such name yet")
    cache = cache_of(target, prompt()[:, :-1])
    with contextlib.nullcontext() if name == CACHE else pytest.warns(FutureWarning, match=name):
        assert torch.equal(generate(target, assistant, **{name: cache}), generate(target))
    assert cache.get_seq_length() > 12
    # Plain generation reads a prompt a second time, behind itself, if the cache holds all of it.
    with pytest.raises(UnsupportedError, match=rf"{CACHE} holds.*(whole prompt|crop)"):
        generate(target, assistant, **{name: cache})


@pytest.mark.parametrize("head", [False, True], ids=["independent", "eagle"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_that_transformers_deprecates_is_used(head, shape, caplog):
    """Users would see its warnings, and what they warn of is removed in the end. Warnings about arguments are errors
    in all tests."""
    target = tiny(num_hidden_layers=4)
    drafter = drafter_of(random_head("eagle3"), target) if head else perturbed(target)
    generic.logger.warning_once.cache_clear()
    root = logging.getLogger("transformers")
    root.addHandler(caplog.handler)
    try:
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=SHAPES[shape])
        generate(target, assistant, return_dict_in_generate=True)
    finally:
        root.removeHandler(caplog.handler)
    assert not [message for message in caplog.messages if "deprecated" in message]
