"""Every argument of `generate` is decided about: it does what it does in plain `generate`, or it is refused by name,
or it is a setting of drafting, which the call has then.

A setting that a new release of transformers brings fails here until somebody decides.
"""

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from calls import SHAPES, Pieces, generate
from cases import representatives
from models import BOS, EOS, PAD, character_tokenizer, prompt, word_tokenizer
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    RepetitionPenaltyLogitsProcessor,
    WatermarkingConfig,
)

from hf_dynspec import ConfigurationError, DynSpecAssistant, UnsupportedError

SAMPLED = {"do_sample": True, "top_k": 0}
RETURNED = {"return_dict_in_generate": True}
# A token in the middle of the plain output, and those before it.
PLACE = 9


class Of:
    """A value that is made of the tokens of the plain output."""

    def __init__(self, make: Any):
        self.make = make


def allowed(batch: int, input_ids: torch.Tensor) -> list[int]:
    return [7, 8, 250 + len(input_ids) % 40, 99]


# As in plain generate: by name a value, and the arguments that it needs beside it. Sampling leaves one token to draw.
PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_length": (20, {"max_new_tokens": None}),
    "max_new_tokens": (7, {}),
    "min_length": (12 + PLACE + 5, {"eos_token_id": Of(lambda plain: plain[PLACE])}),
    "min_new_tokens": (PLACE + 5, {"eos_token_id": Of(lambda plain: plain[PLACE])}),
    "early_stopping": (True, {}),
    "max_time": (1e-9, {}),
    "stop_strings": (
        Of(lambda plain: character_tokenizer().decode(plain[5:7])),
        {"tokenizer": character_tokenizer()},
    ),
    "do_sample": (True, {"top_k": 1}),
    "num_beams": (1, {}),
    "use_cache": (True, {}),
    "cache_implementation": ("dynamic", {}),
    "cache_config": ({}, {}),
    "max_cache_len": (64, {}),
    "temperature": (1e-5, SAMPLED),
    "top_k": (1, {"do_sample": True}),
    "top_p": (1e-9, SAMPLED),
    "min_p": (1.0, SAMPLED),
    "top_h": (1e-9, SAMPLED),
    "typical_p": (1e-9, SAMPLED),
    "epsilon_cutoff": (0.999, SAMPLED),
    "eta_cutoff": (0.999, {**SAMPLED, "temperature": 1e-5}),
    "repetition_penalty": (1.7, {}),
    "encoder_repetition_penalty": (3.0, {}),
    "length_penalty": (0.5, {}),
    "no_repeat_ngram_size": (1, {}),
    "encoder_no_repeat_ngram_size": (1, {}),
    "bad_words_ids": (Of(lambda plain: [[plain[3]], [plain[5], plain[6]]]), {}),
    "renormalize_logits": (True, {}),
    "forced_bos_token_id": (7, {"input_ids": torch.tensor([[BOS]])}),
    "forced_eos_token_id": (EOS, {}),
    "remove_invalid_values": (True, {}),
    "exponential_decay_length_penalty": ((3, 1.9), {}),
    "suppress_tokens": (Of(lambda plain: plain[2:9]), {}),
    "begin_suppress_tokens": (Of(lambda plain: plain[:1]), {}),
    "sequence_bias": (Of(lambda plain: {(plain[4],): -20.0, (9,): 5.0}), {}),
    "token_healing": (True, {"tokenizer": character_tokenizer()}),
    "guidance_scale": (1.5, {}),
    "watermarking_config": (WatermarkingConfig(bias=9.0), {}),
    "num_return_sequences": (2, {"do_sample": True, "top_k": 1}),
    "output_attentions": (True, RETURNED),
    "output_hidden_states": (True, RETURNED),
    "output_scores": (True, RETURNED),
    "output_logits": (True, RETURNED),
    "return_dict_in_generate": (True, {}),
    "pad_token_id": (5, {}),
    "bos_token_id": (BOS, {}),
    "eos_token_id": (Of(lambda plain: [plain[PLACE], EOS]), {}),
    "decoder_start_token_id": (7, {}),
    "compile_config": (CompileConfig(), {}),
    "disable_compile": (True, {}),
    "continuous_batching_config": (ContinuousBatchingConfig(), {}),
    "low_memory": (True, {}),
    "diversity_penalty": (0.5, {}),
    "num_beam_groups": (1, {}),
    "prefill_chunk_size": (5, {}),
    "transformers_version": ("5.0.0", {}),
    # Arguments of generate alone.
    "inputs": (prompt(9), {"input_ids": None}),
    "input_ids": (prompt(9), {}),
    "attention_mask": (torch.ones(1, 12, dtype=torch.int64), {}),
    "position_ids": (3 * torch.arange(12).unsqueeze(0), {}),
    "generation_config": (GenerationConfig(repetition_penalty=1.7, eos_token_id=EOS, pad_token_id=PAD), {}),
    "logits_processor": ([RepetitionPenaltyLogitsProcessor(1.7)], {}),
    "stopping_criteria": ([lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] >= 20)], {}),
    "prefix_allowed_tokens_fn": (allowed, {}),
    "streamer": (Pieces, {}),
    "negative_prompt_ids": (prompt(seed=5), {"guidance_scale": 1.5}),
    "negative_prompt_attention_mask": (
        torch.ones(1, 12, dtype=torch.int64),
        {"guidance_scale": 1.5, "negative_prompt_ids": prompt(seed=5)},
    ),
    "tokenizer": (word_tokenizer(), {}),
    "trust_remote_code": (False, {}),
    "cache": (DynamicCache, {}),
    "past_key_values": (DynamicCache, {}),
    "synced_gpus": (False, {}),
}
# These only say what comes back, how it is computed, or something about methods that are refused.
CHANGES_NO_TOKEN = {
    *("early_stopping", "num_beams", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
    *("length_penalty", "renormalize_logits", "remove_invalid_values", "num_return_sequences", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id"),
    *("bos_token_id", "decoder_start_token_id", "compile_config", "disable_compile", "continuous_batching_config"),
    *(
        "token_healing",
        "low_memory",
        "diversity_penalty",
        "num_beam_groups",
        "prefill_chunk_size",
        "transformers_version",
    ),
    *("attention_mask", "streamer", "tokenizer", "trust_remote_code", "cache", "past_key_values", "synced_gpus"),
}
# Refused by name, with a value that asks for something.
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_beams": (2, {}),
    "use_mtp": (True, {}),
    "use_cache": (False, {}),
    "cache_implementation": ("quantized", {}),
    "is_assistant": (True, {}),
    "prompt_lookup_num_tokens": (3, {}),
    "max_matching_ngram_size": (3, {}),
    "assistant_early_exit": (1, {}),
    "assistant_lookbehind": (7, {}),
    "target_lookbehind": (7, {}),
    "assistant_ensemble_weight": (0.5, {}),
    "speculation_type": ("dflash", {}),
    "penalty_alpha": (0.5, {"top_k": 4}),
    "dola_layers": ("low", {}),
    "constraints": ([object()], {"num_beams": 2}),
    "force_words_ids": ([[7]], {"num_beams": 2}),
    "synced_gpus": (True, {}),
    "custom_generate": (lambda model, input_ids, **kwargs: input_ids, {}),
    "inputs_embeds": (torch.zeros(1, 12, 8), {}),
    "assistant_tokenizer": (word_tokenizer(), {}),
}
# Settings of drafting: by name values, and the most tokens that a round then drafts.
HONOURED = {
    "num_assistant_tokens": {2: 2, 9: 9},
    "assistant_confidence_threshold": {1.0: 1},
    "num_assistant_tokens_schedule": {"heuristic": 15, "heuristic_transient": 15},
}
LANES = ["general, chain", "batch, tree", "general, tree", "static, chain"]
# Each argument in two lanes by default.
IN_TURN = [
    (name, lane) for place, name in enumerate(PLAIN) for lane in (LANES[2 * (place % 2)], LANES[1 + 2 * (place % 2)])
]


def names_of_settings() -> set[str]:
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def test_every_argument_is_decided_about():
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs", "assistant_model"}
    assert names_of_settings() | parameters <= {*PLAIN, *REFUSED, *HONOURED}


def ways_of(name: str) -> list[str]:
    return ["call", "configuration"] if name in names_of_settings() else ["call"]


def call_of(name: str, value: Any, beside: dict[str, Any], way: str, plain: list[int]) -> dict[str, Any]:
    """The arguments of a call that passes this value by keyword or in a configuration."""
    made = {key: one.make(plain) if isinstance(one, Of) else one for key, one in {**beside, name: value}.items()}
    if isinstance(made[name], type):
        made[name] = made[name]()
    arguments = {"max_new_tokens": 24, "do_sample": False, "input_ids": prompt(), **made}
    if way == "configuration":
        settings = {key: arguments.pop(key) for key in [*arguments] if key in names_of_settings()}
        arguments["generation_config"] = GenerationConfig(**{"eos_token_id": EOS, "pad_token_id": PAD, **settings})
    return arguments


def in_lane(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The call in fixed memory, or of two texts."""
    if kind == "static":
        config = arguments.get("generation_config")
        if config is None:
            return {"cache_implementation": "static", **arguments}
        config.cache_implementation = config.cache_implementation or "static"
    if kind == "batch":
        several = {key for key, one in arguments.items() if isinstance(one, torch.Tensor)}
        return {key: torch.cat([one, one.flip(1)]) if key in several else one for key, one in arguments.items()}
    return arguments


def assert_same_outputs(actual: Any, expected: Any, kind: str) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
        return
    # The cache is not returned from fixed memory.
    assert kind != "general" or actual.keys() == expected.keys()
    assert torch.equal(actual.sequences, expected.sequences)
    for name in {"scores", "logits"} & actual.keys():
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=3e-3)
    for name in {"attentions", "hidden_states"} & actual.keys():
        assert len(actual[name]) == len(expected[name])


def names(reason: str, *known: str) -> bool:
    return any(one in reason for one in known)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "lane"),
    representatives("families", dict.fromkeys([*IN_TURN, *itertools.product(PLAIN, LANES)]), keep=len(IN_TURN)),
)
def test_as_in_plain_generate(name, lane, target, drafter):
    """By keyword and in a configuration. In fixed memory what cannot be done is refused by its name."""
    kind, shape = lane.split(", ")
    plain = generate(target)[0, 12:].tolist()
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    for way in ways_of(name):
        # An object with a state is made twice.
        ours, theirs = (call_of(name, *PLAIN[name], way, plain) for _ in range(2))
        theirs = in_lane("batch", theirs) if kind == "batch" else theirs
        expected = target.generate(**theirs)
        try:
            actual = target.generate(**in_lane(kind, ours), assistant_model=assistant)
        except UnsupportedError as error:
            assert kind != "general" and names(str(error), name, *PLAIN[name][1], "processor"), str(error)
            continue
        assert_same_outputs(actual, expected, kind)
        if name not in CHANGES_NO_TOKEN:
            tokens = actual if isinstance(actual, torch.Tensor) else actual.sequences
            assert tokens[0].tolist() != [*prompt()[0].tolist(), *plain], "the argument changed nothing"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, target, drafter):
    value, beside = REFUSED[name]
    assistant = DynSpecAssistant(drafter, "full", target=target)
    for way in ways_of(name):
        arguments = call_of(name, value, beside, way, [])
        if name == "inputs_embeds":
            del arguments["input_ids"]
        with pytest.raises(UnsupportedError) as refusal:
            target.generate(**arguments, assistant_model=assistant)
        assert names(str(refusal.value), name, *beside), str(refusal.value)
    assert assistant.stats_total.calls == 0


# Settings of drafting ------------------------------------------------------------------------------------------------


def steps_of(assistant: DynSpecAssistant) -> int:
    """The most tokens that a round of the last call drafted."""
    return len(assistant.stats.drafted_at)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["general", "static", "batch", "conversation"])
@pytest.mark.parametrize("name", HONOURED)
def test_a_call_may_have_settings_of_drafting(name, kind, target, drafter):
    """They are for that call alone."""
    # A drafter that is always right, so that a schedule makes drafts longer.
    drafter = target if name == "num_assistant_tokens_schedule" else drafter
    assistant = DynSpecAssistant(drafter, "full", target=target)
    before = assistant.generation_config.to_dict()
    passed = assistant.conversation() if kind == "conversation" else assistant
    for (value, steps), way in itertools.product(HONOURED[name].items(), ways_of(name)):
        for beside, expected in (({}, 5), ({name: value}, steps)):
            arguments = call_of("max_new_tokens", 40, beside, way, [])
            actual = target.generate(**in_lane(kind, copy.deepcopy(arguments)), assistant_model=passed)
            assert torch.equal(actual, target.generate(**in_lane("batch" if kind == "batch" else "", arguments)))
            assert steps_of(assistant) in (range(6, steps + 1) if expected == 15 else [expected])
    assert assistant.generation_config.to_dict() == before


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("num_assistant_tokens", 0), ("assistant_confidence_threshold", 1.5), ("num_assistant_tokens_schedule", "never")],
)
def test_a_wrong_setting_of_a_call_is_refused(name, wrong, target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    for tree in (False, True):
        assistant.tree = tree
        with pytest.raises((ConfigurationError, UnsupportedError), match=name):
            generate(target, assistant, **{name: wrong})


def test_trees_have_a_shape_of_their_own(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, tree=SHAPES["tree"])
    for name, values in HONOURED.items():
        with pytest.raises(UnsupportedError, match=rf"{name} is for chains.*assistant\.tree"):
            generate(target, assistant, **{name: next(iter(values))})
    with pytest.raises(ConfigurationError, match="assistant_confidence_threshold is for chains"):
        DynSpecAssistant(drafter, target=target, tree=True, assistant_confidence_threshold=0.4)
    settings = {"num_assistant_tokens": "auto", "num_assistant_tokens_schedule": "constant"}
    assert torch.equal(generate(target, assistant, **settings), generate(target))


def test_the_targets_own_settings_of_drafting_take_the_place_of_defaults(target, drafter):
    own = copy.deepcopy(target)
    assistant = DynSpecAssistant(drafter, "full", target=own)
    given = DynSpecAssistant(drafter, "full", target=own, num_assistant_tokens=5)
    own.generation_config.num_assistant_tokens = 3
    # As a pipeline does.
    copied = {"generation_config": copy.deepcopy(own.generation_config)}
    for one, steps in ((assistant, 3), (given, 5)):
        for arguments, expected in (({}, steps), (copied, steps), ({"num_assistant_tokens": 2}, 2)):
            generate(own, one, **arguments)
            assert steps_of(one) == expected
    assistant.generation_config.num_assistant_tokens = 4
    generate(own, assistant)
    assert steps_of(assistant) == 4
    assistant.tree = SHAPES["tree"]
    assert torch.equal(generate(own, assistant), generate(target))


def test_an_assistant_that_is_made_within_the_call_has_its_settings_too(target, drafter):
    made: list[DynSpecAssistant] = []

    def make() -> DynSpecAssistant:
        made.append(DynSpecAssistant(drafter, "full", target=target))
        return made[-1]

    plain = generate(target)
    for arguments, steps in (({}, 5), ({"num_assistant_tokens": 2}, 2), ({"assistant_confidence_threshold": 1.0}, 1)):
        arguments |= {"max_new_tokens": 24, "do_sample": False}
        assert torch.equal(target.generate(prompt(), assistant_model=make(), **arguments), plain)
        assert steps_of(made[-1]) == steps
        made.clear()
    with pytest.raises(UnsupportedError, match="assistant_lookbehind"):
        target.generate(prompt(), assistant_model=make(), assistant_lookbehind=7)
