"""What transformers tests of its own assisted generation, with an assistant of this package in the drafter's place.

The reference is plain generation: all that it returns, one entry for each token, must come back the same.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import EOS, PAD, SLIDING_WINDOW, VOCABULARY, perturbed, prompt, tiny
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2LMHeadModel,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from hf_dynspec import DynSpecAssistant, TreeConfig, UnsupportedError
from hf_dynspec.cache_names import CACHE, returned_cache

SHAPES = {"chain": False, "tree": TreeConfig(total_tokens=12, depth=2, top_k=3)}
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
PROMPT_LENGTH, NEW_TOKENS = 12, 12
# fp32 logits of a batched forward and of one-token forwards, where logits reach about 100.
CLOSE = {"rtol": 1e-4, "atol": 3e-3}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gemma3", "mistral", "cohere2"])
def target(request) -> PreTrainedModel:
    """Attention weights are returned by eager attention alone. The text goes on past the sliding windows."""
    assert PROMPT_LENGTH + NEW_TOKENS > SLIDING_WINDOW + 4
    model = tiny(request.param)
    model.set_attn_implementation("eager")
    return model


DRAFTERS = {
    "never right": lambda target: tiny("llama", seed=77),
    "always right": lambda target: target,
    "often right": perturbed,
}


@pytest.fixture(params=SHAPES)
def assistant(request, target) -> Iterator[DynSpecAssistant]:
    assistant = DynSpecAssistant(perturbed(target), target=target, tree=SHAPES[request.param])
    yield assistant
    assistant.unbind()


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny()


@pytest.fixture(params=SHAPES)
def llamas_assistant(request, llama) -> Iterator[DynSpecAssistant]:
    assistant = DynSpecAssistant(perturbed(llama), target=llama, tree=SHAPES[request.param])
    yield assistant
    assistant.unbind()


def generate(target: PreTrainedModel, assistant: DynSpecAssistant | None = None, **arguments: Any) -> Any:
    named = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, **arguments}
    return target.generate(prompt(PROMPT_LENGTH), assistant_model=assistant, **named)


# What is returned ----------------------------------------------------------------------------------------------------


def assert_same_output(actual: GenerateDecoderOnlyOutput, expected: GenerateDecoderOnlyOutput) -> None:
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert_same_entries(getattr(actual, name), getattr(expected, name), name)
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs)
        for token, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_entries(one, other, f"{name} of token {token}")
    assert_same_cache(returned_cache(actual), returned_cache(expected))


def assert_same_entries(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], name: str) -> None:
    assert isinstance(ours, tuple)
    assert [one.shape for one in ours] == [other.shape for other in theirs], name
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda text: f"{name}: {text}")


def assert_same_cache(actual: DynamicCache, expected: DynamicCache) -> None:
    assert type(actual) is type(expected)
    assert actual.get_seq_length() == expected.get_seq_length()
    for one, other in zip(actual.layers, expected.layers, strict=True):
        assert type(one) is type(other)
        torch.testing.assert_close(one.keys, other.keys, **CLOSE)
        torch.testing.assert_close(one.values, other.values, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_search(kind, shape, target):
    assistant = DynSpecAssistant(DRAFTERS[kind](target), target=target, tree=SHAPES[shape])
    assistant.generation_config.num_assistant_tokens = 2
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    actual = generate(target, assistant, **EVERYTHING)
    assistant.unbind()
    assert_same_output(actual, generate(target, **EVERYTHING))
    assert len(actual.scores) == NEW_TOKENS


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_search_by_an_assistant_that_is_made_inline(kind, target):
    """Python looks `generate` up before the assistant is there, so this is transformers' own loop."""
    model = copy.deepcopy(target)
    assert "generate" not in vars(model)
    names = ("return_dict_in_generate", "output_scores", "output_logits")
    arguments = dict.fromkeys(names, True) | {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    actual = model.generate(
        prompt(PROMPT_LENGTH), assistant_model=DynSpecAssistant(DRAFTERS[kind](target), target=model), **arguments
    )
    expected = target.generate(prompt(PROMPT_LENGTH), **arguments)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert_same_entries(getattr(actual, name), getattr(expected, name), name)


def test_sampling(target, assistant):
    """Other random numbers, the same outputs in form: those of plain generation."""
    arguments = EVERYTHING | {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.7}
    torch.manual_seed(0)
    actual, expected = generate(target, assistant, **arguments), generate(target, **arguments)
    assert actual.sequences.shape == expected.sequences.shape == (1, PROMPT_LENGTH + NEW_TOKENS)
    for name in ("scores", "logits"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert [one.shape for one in ours] == [one.shape for one in theirs]
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        shapes = [[layer.shape for layer in token] for token in ours]
        assert shapes == [[layer.shape for layer in token] for token in theirs]
    for token, scores in zip(actual.sequences[0, PROMPT_LENGTH:], actual.scores, strict=True):
        assert scores[0, token] > -torch.inf
        assert int((scores > -torch.inf).sum()) <= 10
    with torch.no_grad():
        logits = target(actual.sequences).logits[0, PROMPT_LENGTH - 1 : -1]
    torch.testing.assert_close(torch.cat(actual.logits), logits, **CLOSE)


@pytest.mark.parametrize("name", EVERYTHING)
def test_each_output_by_itself(name, llama, llamas_assistant):
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    llamas_assistant.bind(model)
    arguments = {"return_dict_in_generate": True, name: True}
    actual, expected = generate(model, llamas_assistant, **arguments), generate(model, **arguments)
    assert actual.keys() == expected.keys()
    assert [actual[key] is None for key in actual] == [expected[key] is None for key in expected]
    assert torch.equal(actual.sequences, expected.sequences)


def test_outputs_need_a_dict(llama, llamas_assistant):
    """Without `return_dict_in_generate` the sequence comes back alone, whatever else was asked for."""
    arguments = {"output_scores": True, "output_logits": True}
    actual = generate(llama, llamas_assistant, **arguments)
    assert isinstance(actual, torch.Tensor)
    assert torch.equal(actual, generate(llama, **arguments))


# Prompts and inputs --------------------------------------------------------------------------------------------------


def test_left_padding(target, assistant):
    padded = torch.cat([torch.full((1, 5), PAD), prompt(PROMPT_LENGTH)], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long().unsqueeze(0)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": mask}
    expected = target.generate(padded, **arguments)
    assert torch.equal(target.generate(padded, assistant_model=assistant, **arguments), expected)


def test_going_on_with_a_returned_cache(target, assistant):
    """So many tokens in one call are the same as in two, of which the second is given the cache of the first."""
    whole = generate(target, max_new_tokens=10)
    first = generate(target, assistant, max_new_tokens=6, return_dict_in_generate=True)
    arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "return_dict_in_generate": True}
    mask = torch.ones_like(first.sequences)
    second = target.generate(
        first.sequences,
        assistant_model=assistant,
        **{CACHE: returned_cache(first)},
        attention_mask=mask,
        **arguments,
    )
    assert torch.equal(second.sequences, whole)
    expected = generate(target, max_new_tokens=10, return_dict_in_generate=True)
    assert_same_cache(returned_cache(second), returned_cache(expected))


def test_position_ids(llama, llamas_assistant):
    positions = torch.arange(PROMPT_LENGTH).unsqueeze(0)
    expected = generate(llama)
    assert torch.equal(generate(llama, llamas_assistant, position_ids=positions), expected)
    shifted = generate(llama, position_ids=positions * 3)
    assert torch.equal(generate(llama, llamas_assistant, position_ids=positions * 3), shifted)
    assert not torch.equal(shifted, expected)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_logits_to_keep(kept, llama, llamas_assistant):
    assert torch.equal(generate(llama, llamas_assistant, logits_to_keep=kept), generate(llama))


@pytest.mark.parametrize("shape", SHAPES)
def test_token_types(shape):
    """An input that is passed on to the target's forward, and grows with the text."""
    model = tiny("gpt2")
    assistant = DynSpecAssistant(perturbed(model), target=model, tree=SHAPES[shape])
    types = torch.full((1, PROMPT_LENGTH), 7)
    expected = generate(model, token_type_ids=types)
    assert not torch.equal(expected, generate(model))
    assert torch.equal(generate(model, assistant, token_type_ids=types), expected)


class Shifted(GPT2LMHeadModel):
    """A user's own model, with an input that no other has."""

    def forward(self, input_ids=None, shift=0.0, **inputs):
        outputs = super().forward(input_ids, **inputs)
        outputs.logits = outputs.logits + shift * torch.linspace(-1, 1, outputs.logits.shape[-1])
        return outputs

    def prepare_inputs_for_generation(self, input_ids, shift=0.0, **inputs):
        return super().prepare_inputs_for_generation(input_ids, **inputs) | {"shift": shift}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_input_of_a_users_own_model(shape):
    original = tiny("gpt2")
    model = Shifted(original.config).eval()
    model.load_state_dict(original.state_dict())
    model.generation_config = copy.deepcopy(original.generation_config)
    assistant = DynSpecAssistant(perturbed(original), target=model, tree=SHAPES[shape])
    expected = generate(model, shift=6.0)
    assert not torch.equal(expected, generate(model))
    assert torch.equal(generate(model, assistant, shift=6.0), expected)
    assert torch.equal(generate(model, assistant), generate(model))


def test_an_argument_that_nobody_takes(llama, llamas_assistant):
    messages = []
    for one in (llamas_assistant, None):
        with pytest.raises(ValueError, match=r"not used by the model.*\bnonsense\b") as refusal:
            generate(llama, one, nonsense=1)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


# Lengths and ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_new_tokens": 10, "max_new_tokens": 20},
        {"min_new_tokens": 10, "max_new_tokens": None},
        {"min_length": PROMPT_LENGTH + 9, "max_new_tokens": None, "max_length": PROMPT_LENGTH + 15},
        {"max_new_tokens": 5},
    ],
)
def test_lengths(arguments, llama, llamas_assistant):
    plain = generate(llama, max_new_tokens=30)
    end = int(plain[0, PROMPT_LENGTH + 4])
    expected = generate(llama, eos_token_id=end, **arguments)
    output = generate(llama, llamas_assistant, eos_token_id=end, **arguments)
    assert torch.equal(output, expected)
    new = output.shape[1] - PROMPT_LENGTH
    least = arguments.get("min_new_tokens") or (9 if "min_length" in arguments else 1)
    assert new >= least


@pytest.mark.parametrize("ends", [-1, [-1], [-1, EOS], [EOS, 5000], None])
def test_ends_that_no_token_has(ends, llama, llamas_assistant):
    expected = generate(llama, eos_token_id=ends)
    assert torch.equal(generate(llama, llamas_assistant, eos_token_id=ends), expected)


def test_a_criterion_of_a_users_own(llama, llamas_assistant):
    class Seen(StoppingCriteria):
        """Remembers what it saw."""

        def __init__(self):
            self.lengths: list[int] = []

        def __call__(self, input_ids, scores, **kwargs):
            self.lengths.append(input_ids.shape[1])
            return torch.full((1,), bool((input_ids[0, PROMPT_LENGTH:] % 7 == 3).any()))

    ours, theirs = Seen(), Seen()
    actual = generate(llama, llamas_assistant, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([ours]))
    expected = generate(llama, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([theirs]))
    assert torch.equal(actual, expected)
    assert ours.lengths[: len(theirs.lengths)] == theirs.lengths


def test_processors_by_keyword_and_by_list(llama, llamas_assistant):
    expected = generate(llama, repetition_penalty=1.9)
    assert not torch.equal(expected, generate(llama))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.9)])
    assert torch.equal(generate(llama, llamas_assistant, repetition_penalty=1.9), expected)
    assert torch.equal(generate(llama, llamas_assistant, logits_processor=processors), expected)


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
def test_schedules_of_draft_lengths(schedule, llama):
    assistant = DynSpecAssistant(perturbed(llama), "full", target=llama)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    assert torch.equal(generate(llama, assistant, max_new_tokens=20), generate(llama, max_new_tokens=20))
    left = assistant.generation_config.num_assistant_tokens
    assert (left == 5) == (schedule != "heuristic")


# Configurations ------------------------------------------------------------------------------------------------------


def test_a_configuration_with_everything_in_it(llama, llamas_assistant):
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")
    llamas_assistant.bind(model)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=PAD,
        no_repeat_ngram_size=2,
        **EVERYTHING,
    )
    before = config.to_dict()
    expected = model.generate(prompt(PROMPT_LENGTH), generation_config=config)
    actual = model.generate(prompt(PROMPT_LENGTH), generation_config=config, assistant_model=llamas_assistant)
    assert_same_output(actual, expected)
    assert config.to_dict() == before
    shorter = model.generate(prompt(PROMPT_LENGTH), config, assistant_model=llamas_assistant, max_new_tokens=5)
    assert torch.equal(shorter.sequences, expected.sequences[:, : PROMPT_LENGTH + 5])


def test_the_targets_own_configuration(llama, llamas_assistant):
    model = copy.deepcopy(llama)
    llamas_assistant.bind(model)
    model.generation_config.update(
        max_new_tokens=9,
        repetition_penalty=1.8,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=[-1, 4],
    )
    before = model.generation_config.to_dict()
    actual = model.generate(prompt(PROMPT_LENGTH), do_sample=False, assistant_model=llamas_assistant)
    expected = model.generate(prompt(PROMPT_LENGTH), do_sample=False)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same_entries(actual.scores, expected.scores, "scores")
    assert model.generation_config.to_dict() == before


def test_no_configuration_is_changed_by_a_call(llama):
    drafter = perturbed(llama)
    assistant = DynSpecAssistant(drafter, target=llama)
    configs = (llama.generation_config, drafter.generation_config, assistant.generation_config)
    before = [copy.deepcopy(one.to_dict()) for one in configs]
    generate(llama, assistant, repetition_penalty=1.3, min_new_tokens=4)
    assert [one.to_dict() for one in configs] == before


def test_a_call_warns_of_nothing(llama, llamas_assistant, caplog):
    logger = logging.getLogger("transformers")
    propagates, logger.propagate = logger.propagate, True
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="transformers"):
            warnings.simplefilter("error")
            mask = torch.ones(1, PROMPT_LENGTH, dtype=torch.int64)
            for do_sample in (False, True):
                generate(
                    llama,
                    llamas_assistant,
                    do_sample=do_sample,
                    attention_mask=mask,
                    min_new_tokens=3,
                    eos_token_id=EOS,
                )
    finally:
        logger.propagate = propagates
    assert [record.getMessage() for record in caplog.records] == []


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_refusal_is_a_value_error_as_in_transformers():
    assert issubclass(UnsupportedError, ValueError)


REFUSED = {
    "a batch": ({"input_ids": prompt().repeat(2, 1)}, "one|several sequences"),
    "beams": ({"num_beams": 2}, "beam"),
    "several texts": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "a static cache": ({"cache_implementation": "static"}, "static"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers"),
    "words that must occur": ({"force_words_ids": [[5]]}, "force_words_ids"),
    "constraints": ({"constraints": [object()]}, "constraints"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "the target's own drafting layers": ({"use_mtp": True}, "use_mtp"),
}


# What only the target's own settings say of a cache was not asked for, and gives way.
REFUSALS = [
    (name, where)
    for name in REFUSED
    for where in ("call", "configuration of the call", "configuration of the target")
    if (name, where) != ("no cache", "configuration of the target")
]


@pytest.mark.parametrize(("name", "where"), REFUSALS)
def test_what_is_refused(name, where, llama, llamas_assistant):
    """By an error that names the argument, wherever it was set."""
    arguments, words = REFUSED[name]
    if "input_ids" in arguments and where != "call":
        return
    if name == "a static cache" and where == "configuration of the target":
        return  # a default that gives way, see below
    named: dict[str, Any] = {"input_ids": prompt(), "max_new_tokens": 6}
    model = copy.deepcopy(llama)
    llamas_assistant.bind(model)
    if where == "call":
        named |= arguments
    elif where == "configuration of the call":
        named["generation_config"] = GenerationConfig(max_new_tokens=6)
        for key, value in arguments.items():
            setattr(named["generation_config"], key, value)
    else:
        for key, value in arguments.items():
            setattr(model.generation_config, key, value)
    with pytest.raises(UnsupportedError, match=words):
        model.generate(assistant_model=llamas_assistant, **named)


def test_a_cache_that_only_the_targets_configuration_names_gives_way(llama, llamas_assistant):
    model = copy.deepcopy(llama)
    model.generation_config.cache_implementation = "static"
    llamas_assistant.bind(model)
    expected = generate(llama)
    assert torch.equal(generate(model, llamas_assistant), expected)


def test_a_cache_of_the_whole_prompt_is_refused(llama, llamas_assistant):
    """Plain generation reads the prompt a second time, behind itself. Nobody can want that."""
    with torch.no_grad():
        cache = returned_cache(llama(prompt(), **{CACHE: DynamicCache(config=llama.config)}))
    with pytest.raises(UnsupportedError, match=rf"{CACHE}.*(whole prompt|crop)"):
        generate(llama, llamas_assistant, **{CACHE: cache})


@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 40])
def test_a_drafter_with_padding_rows(rows, llama):
    assistant = DynSpecAssistant(tiny(vocabulary=rows, seed=3), target=llama)
    assert torch.equal(generate(llama, assistant), generate(llama))
