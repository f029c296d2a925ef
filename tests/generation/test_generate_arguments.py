"""Whatever users pass to `generate` works as it does without an assistant."""

import copy
import itertools
import logging
import types
import warnings

import pytest
import torch
from calls import SHAPES, Pieces, assert_same, generate, padded
from cases import pairwise, representatives
from eagle_heads import drafter_of, random_head
from families import LONG_ROPE, SWITCH, model_of
from models import (
    BOS,
    EOS,
    PAD,
    POLICY_CASES,
    VOCABULARY,
    RandomShortlist,
    character_tokenizer,
    perturbed,
    prompt,
    tiny,
    word_tokenizer,
)
from transformers import (
    GenerationConfig,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from hf_dynspec import ConfigurationError, DynSpecAssistant, InContextShortlist, TreeConfig, UnsupportedError, devices
from hf_dynspec.kernels import cpu

DRAFTED = 5
POLICIES = {name: POLICY_CASES[name] for name in ("full", "hybrid")} | {"random": lambda: RandomShortlist(60)}
BOTH = ["hybrid, chain", "random, tree", "full, chain", "random, chain", "full, tree"]


@pytest.fixture(params=representatives("families", BOTH, keep=2))
def assistant(request, target, drafter) -> DynSpecAssistant:
    name, shape = request.param.split(", ")
    return DynSpecAssistant(drafter, POLICIES[name](), target=target, tree=SHAPES[shape])


# Lengths and ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafted", [1, 2, 20])
def test_short_outputs_are_not_overshot(drafted, shape, target):
    """By a drafter that is always right. Drafts leave room for the token that the target adds."""
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=drafted, tree=SHAPES[shape])
    for new_tokens in (1, 2, 3, 7):
        for limit in ({"max_new_tokens": new_tokens}, {"max_new_tokens": None, "max_length": 12 + new_tokens}):
            assert assert_same(target, assistant, **limit).shape[1] == 12 + new_tokens
            assert assistant.stats.tokens == new_tokens
            assert len(assistant.stats.drafted_at) < new_tokens


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length, assistant, target):
    assert_same(target, assistant, prompt(length))


def test_a_prompt_of_the_bos_alone(assistant, target):
    assert_same(target, assistant, torch.tensor([[BOS]]))
    actual = target.generate(max_new_tokens=8, do_sample=False, bos_token_id=BOS, assistant_model=assistant)
    assert torch.equal(actual, target.generate(max_new_tokens=8, do_sample=False, bos_token_id=BOS))


INVISIBLE = {
    "no prompt": {},
    "pads": {"input_ids": torch.full((1, 4), PAD)},
    "a mask of zeros": {"input_ids": prompt(3), "attention_mask": torch.zeros(1, 3, dtype=torch.int64)},
}


@pytest.mark.parametrize(
    ("family", "attention", "drafts", "shape", "text"),
    pairwise(
        "families",
        ("llama", "gemma3", "gpt2", "mistral", "qwen3"),
        ("sdpa", "eager"),
        ("model", "eagle2", "eagle3"),
        list(SHAPES),
        list(INVISIBLE),
    ),
)
def test_prompts_without_a_visible_token(family, attention, drafts, shape, text):
    """Generation from a BOS token that is also the padding, among them."""
    target = tiny(family)
    target.set_attn_implementation(attention)
    layers = {"features": 2, "eagle_aux_hidden_state_layer_ids": [0, 1]} if drafts == "eagle3" else {}
    drafter = perturbed(target) if drafts == "model" else drafter_of(random_head(drafts, **layers), target)
    assistant = DynSpecAssistant(drafter, target=target, tree=SHAPES[shape])
    arguments = {"max_new_tokens": 16, "do_sample": False, "bos_token_id": PAD, "pad_token_id": PAD, **INVISIBLE[text]}
    output = target.generate(assistant_model=assistant, **arguments)
    assert torch.equal(output, target.generate(**arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_end_of_the_text_at_any_place_of_an_accepted_draft(shape, target):
    assistant = DynSpecAssistant(target, "full", target=target, tree=SHAPES[shape])
    plain = generate(target)[0, 12:].tolist()
    for end in plain[:8]:
        output = assert_same(target, assistant, eos_token_id=end)
        assert output[0, -1] == end and assistant.stats.tokens == plain.index(end) + 1


def test_several_ends(assistant, target):
    plain = generate(target)[0, 12:].tolist()
    ends = [plain[9], EOS, plain[6], plain[13]]
    output = assert_same(target, assistant, eos_token_id=ends)
    assert output[0, -1] in ends and output.shape[1] <= 12 + 7
    assert_same(target, assistant, eos_token_id=torch.tensor(ends))
    # The next call has the model's own EOS again.
    assert assert_same(target, assistant).shape[1] > output.shape[1]


def test_every_end_of_a_call_is_in_each_shortlist(target, drafter, rounds):
    assistant = DynSpecAssistant(drafter, InContextShortlist(6), target=target)
    ends = [VOCABULARY - 1, VOCABULARY - 2, EOS]
    assert_same(target, assistant, eos_token_id=ends)
    assert all(set(ends) <= set(one.ids().tolist()) for _, _, drafted in rounds for one in drafted.shortlists)


@pytest.mark.parametrize("ends", [-1, [-1], [-1, EOS], [EOS, 5000], None])
def test_ends_that_no_token_has(ends, assistant, target):
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = ends
    assistant.bind(model)
    for arguments in ({}, {"eos_token_id": ends}):
        assert assert_same(model, assistant, **arguments).shape[1] == 12 + 24


@pytest.mark.parametrize(
    "arguments",
    [
        {"min_new_tokens": 20},
        {"min_new_tokens": 10, "max_new_tokens": None},
        {"min_length": 12 + 9, "max_new_tokens": None, "max_length": 12 + 15},
    ],
)
def test_minimum_lengths(arguments, assistant, target):
    end = int(generate(target)[0, 12 + 4])
    new = assert_same(target, assistant, eos_token_id=end, **arguments).shape[1] - 12
    assert new >= arguments.get("min_new_tokens", 9)


# Streamers and stopping criteria -------------------------------------------------------------------------------------


def test_a_streamer_gets_every_token_once(assistant, target):
    streamer = Pieces()
    output = generate(target, assistant, streamer=streamer)
    assert streamer.tokens == output[0].tolist() and streamer.ends == 1
    assert len(streamer.pieces) == 1 + assistant.stats.rounds


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_streamed_text(skip_prompt, assistant, target, capsys):
    tokenizer, texts = word_tokenizer(), []
    for one in (assistant, None):
        generate(target, one, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        texts.append(capsys.readouterr().out)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=120)
        generate(target, one, streamer=streamer)
        assert "".join(streamer).split() == texts[-1].split()
    assert texts[0] == texts[1] and len(texts[0].split()) >= 24


class AtLength(StoppingCriteria):
    """Is true at one length only, and so must be asked at every length."""

    def __init__(self, length: int):
        self.length = length
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        assert scores is None or len(scores) == input_ids.shape[1] - 12
        return torch.full((1,), input_ids.shape[1] == self.length)


@pytest.mark.parametrize("length", [13, 14, 15, 19])
def test_a_criterion_is_asked_after_every_token(length, assistant, target):
    ours, theirs = AtLength(length), AtLength(length)
    arguments = {"return_dict_in_generate": True, "output_scores": True}
    output = generate(target, assistant, stopping_criteria=StoppingCriteriaList([ours]), **arguments)
    assert torch.equal(output.sequences, generate(target, stopping_criteria=[theirs]))
    assert len(output.scores) == length - 12
    assert ours.lengths[: len(theirs.lengths)] == theirs.lengths


@pytest.mark.parametrize("place", [2, 5, 6, 11])
def test_a_text_ends_with_the_token_that_completes_a_stop_string(place, assistant, target):
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(generate(target)[0, 12 + place : 14 + place])
    assert assert_same(target, assistant, stop_strings=[stop], tokenizer=tokenizer).shape[1] <= 14 + place


@pytest.mark.parametrize("where", ["call", "configuration of the call", "configuration of the target"])
def test_stop_strings_and_healing_wherever_they_are_asked_for(where, drafter):
    tokenizer, target = character_tokenizer(), tiny()
    plain = generate(target)[0]
    stop = tokenizer.decode(plain[18:20])
    assistant = DynSpecAssistant(drafter, target=target)
    for settings in ({"stop_strings": [stop]}, {"token_healing": True}, {"stop_strings": stop, "token_healing": True}):
        target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        arguments = {"tokenizer": tokenizer}
        if where == "call":
            arguments |= settings
        elif where == "configuration of the call":
            arguments["generation_config"] = GenerationConfig(**settings, max_new_tokens=24, do_sample=False)
        else:
            target.generation_config = GenerationConfig(**settings, eos_token_id=EOS, pad_token_id=PAD)
        before = target.generation_config.to_dict()
        output = assert_same(target, assistant, **arguments)
        assert "stop_strings" not in settings or output.shape[1] < plain.shape[0]
        assert target.generation_config.to_dict() == before
        with pytest.raises(UnsupportedError, match="tokenizer="):
            generate(target, assistant, **{**arguments, "tokenizer": None})


def test_healing_with_a_bos_and_without_a_prompt(drafter):
    """`generate` makes the mask before it heals."""
    tokenizer, target = character_tokenizer(), tiny()
    assistant = DynSpecAssistant(drafter, target=target)
    arguments = {"tokenizer": tokenizer, "token_healing": True, "max_new_tokens": 12, "do_sample": False}
    with pytest.raises(UnsupportedError, match="token_healing"):
        target.generate(None, assistant_model=assistant, **arguments)
    for ids in (torch.cat([torch.tensor([[BOS]]), prompt()], dim=1), prompt()):
        streamed = []
        for model in (assistant, None):
            streamer = Pieces()
            output = target.generate(ids, assistant_model=model, streamer=streamer, **arguments)
            streamed.append(streamer.tokens)
            assert streamer.tokens == output[0].tolist()
        assert streamed[0] == streamed[1]


# Logits processors ---------------------------------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Written for one sequence: reads its last token and its length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (1, VOCABULARY), "a processor must see the whole vocabulary"
        assert input_ids.shape[0] == 1
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % VOCABULARY] += 4.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty by list": {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[3]], [plain[5], plain[6]]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": lambda plain: {"suppress_tokens": plain[2:9]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": plain[:1]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "sequence_bias": lambda plain: {"sequence_bias": {(plain[4],): -20.0, (plain[8], 9): 20.0, (9,): 5.0}},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.2)},
    "a user's own": {"logits_processor": LogitsProcessorList([Favour()])},
    "a user's own among others": {"repetition_penalty": 1.7, "logits_processor": LogitsProcessorList([Favour()])},
    # By batch index, of which there is one.
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: [[7, 8, 250 + len(ids) % 40, 99]][batch]},
}


def arguments_of(name: str, plain: torch.Tensor) -> dict:
    arguments = PROCESSORS[name]
    return arguments(plain[0, 12:].tolist()) if callable(arguments) else arguments


# With each processor a chain or a tree by default, in turn.
IN_TURN = list(zip(PROCESSORS, itertools.cycle(BOTH[:2]), strict=False))


@pytest.mark.parametrize(
    ("name", "case"),
    representatives("families", dict.fromkeys([*IN_TURN, *itertools.product(PROCESSORS, BOTH)]), keep=len(IN_TURN)),
)
def test_logits_processors(name, case, target, drafter):
    policy, shape = case.split(", ")
    assistant = DynSpecAssistant(drafter, POLICIES[policy](), target=target, tree=SHAPES[shape])
    plain = generate(target)
    output = assert_same(target, assistant, **arguments_of(name, plain))
    assert not torch.equal(output, plain), "the processor changed nothing"


def test_drafts_go_through_the_processors(target):
    """Otherwise most of a draft would be refused; with the target as drafter nothing is."""
    plain, assistant = generate(target), DynSpecAssistant(target, "full", target=target)
    for name in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "sequence_bias"):
        assert_same(target, assistant, **arguments_of(name, plain))
        assert assistant.stats.acceptance_rate > (0.7 if name == "sequence_bias" else 0.99), name
    assert_same(target, assistant, min_new_tokens=20, eos_token_id=plain[0, 14:24].tolist())
    assert assistant.stats.acceptance_rate > 0.99


BANNED = [token for token in range(VOCABULARY) if token % 8 and token != EOS]
BANS = {
    "suppress_tokens": {"suppress_tokens": BANNED},
    "bad_words_ids": {"bad_words_ids": [[token] for token in BANNED]},
    "min_new_tokens": {"min_new_tokens": 24, "eos_token_id": BANNED},
    "suppress_tokens among others": {"suppress_tokens": BANNED, "repetition_penalty": 1.7},
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", BANS)
def test_trees_draft_nothing_that_is_banned(name, cache, rounds):
    """With the target as drafter, a tree accepts as much as a chain."""
    target = tiny()
    with torch.no_grad():
        # Clear favourites, so that trees are deep as well as wide.
        target.get_output_embeddings().weight.mul_(6)
    lengths = []
    for tree in (False, TreeConfig(total_tokens=30, depth=4, top_k=3)):
        assistant = DynSpecAssistant(target, "full", target=target, tree=tree)
        output = generate(target, assistant, prompt(seed=1), cache_implementation=cache, **BANS[name])
        assert torch.equal(output, generate(target, None, prompt(seed=1), **BANS[name]))
        lengths.append(assistant.stats.acceptance_length)
    # A chain drafts beside the prompt, too.
    assert lengths[1] > 0.7 * lengths[0] > 2.5
    for _, _, drafted in rounds:
        if not drafted.is_chain:
            assert not set(drafted.token_ids[drafted.scores > -torch.inf].tolist()) & set(BANNED)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_processor_of_unknown_kind_sees_the_text_that_comes_out_and_nothing_else(shape, target, drafter):
    class Contexts(LogitsProcessor):
        def __init__(self):
            self.seen: list[list[int]] = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids[0].tolist())
            return scores

    contexts = Contexts()
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    output = generate(target, assistant, logits_processor=[contexts])[0].tolist()
    assert assistant.stats.accepted > 0
    assert contexts.seen == [output[:length] for length in range(12, len(output))]


# Prompts and inputs of the model -------------------------------------------------------------------------------------


def test_prompts_of_other_integers(assistant, target):
    ids = prompt().to(torch.int32)
    for arguments in ({}, {"repetition_penalty": 1.5}):
        expected = generate(target, None, ids, **arguments)
        assert torch.equal(generate(target, assistant, ids, **arguments).long(), expected.long())


def test_position_ids(assistant, target):
    positions = torch.arange(12).unsqueeze(0)
    assert_same(target, assistant, position_ids=positions)
    shifted = assert_same(target, assistant, position_ids=positions * 3)
    assert not torch.equal(shifted, generate(target))


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_logits_to_keep(kept, assistant, target):
    assert torch.equal(generate(target, assistant, logits_to_keep=kept), generate(target))


class Shifted(GPT2LMHeadModel):
    """A user's own model, with an input that no other has."""

    def forward(self, input_ids=None, shift=0.0, token_type_ids=None, **inputs):
        outputs = super().forward(input_ids, token_type_ids=token_type_ids, **inputs)
        outputs.logits = outputs.logits + shift * torch.linspace(-1, 1, outputs.logits.shape[-1])
        return outputs

    def prepare_inputs_for_generation(self, input_ids, shift=0.0, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"shift": shift}


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_that_are_passed_on_to_the_targets_forward(shape):
    """Token types, which grow with the text, and an input that a user's own model has."""
    original = tiny("gpt2")
    model = Shifted(original.config).eval()
    model.load_state_dict(original.state_dict())
    model.generation_config = copy.deepcopy(original.generation_config)
    assistant = DynSpecAssistant(perturbed(original), target=model, tree=SHAPES[shape])
    plain = assert_same(model, assistant)
    for inputs in ({"token_type_ids": torch.full((1, 12), 7)}, {"shift": 6.0}):
        assert not torch.equal(assert_same(model, assistant, **inputs), plain)


def test_an_argument_that_nobody_takes_is_refused_as_in_plain_generate(assistant, target):
    messages = []
    for one in (assistant, None):
        with pytest.raises(ValueError, match=r"not used by the model.*\bnonsense\b") as refusal:
            generate(target, one, nonsense=1)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


CHUNKS = representatives("families", itertools.product((5, 12, 1, 40), ("independent", "eagle"), SHAPES), keep=5)


@pytest.mark.parametrize(("chunk", "kind", "shape"), CHUNKS)
def test_prompts_are_read_in_chunks_of_the_size_that_was_asked_for(chunk, kind, shape):
    """The policy and an EAGLE head observe all of them."""
    target = tiny(num_hidden_layers=4)
    drafter = perturbed(target) if kind == "independent" else drafter_of(random_head("eagle3"), target)
    policy = InContextShortlist(60, prompt_top_k=3)
    assistant = DynSpecAssistant(drafter, policy, target=target, tree=SHAPES[shape], num_assistant_tokens=DRAFTED)
    sizes: list[int] = []
    forward = type(target.model).forward

    def watched(self, input_ids=None, **kwargs):
        sizes.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    assert_same(target, assistant)
    expected, stats = generate(target), assistant.stats.to_dict()
    target.model.forward = types.MethodType(watched, target.model)
    assert torch.equal(generate(target, assistant, prefill_chunk_size=chunk), expected)
    *first, last = sizes[: -(-12 // chunk)]
    assert first == [chunk] * len(first)
    assert last == 12 - sum(first) + DRAFTED * (kind == "independent" and shape == "chain")
    assert assistant.stats.to_dict() == stats


@pytest.mark.parametrize(
    ("length", "chunk"), representatives("families", itertools.product((SWITCH - 2, 40), (8, 31, 40)), 2)
)
def test_chunks_of_a_model_that_reads_again_past_a_limit(length, chunk, drafter):
    target = model_of("phi3", **LONG_ROPE)
    target.generation_config.eos_token_id = None
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_same(target, assistant, prompt(length), prefill_chunk_size=chunk, max_new_tokens=12)


@pytest.mark.parametrize(
    ("rope", "pads", "shape"), pairwise("families", ("longrope", "dynamic"), (0, 6), list(SHAPES))
)
def test_a_rope_that_changes_after_longer_texts_and_padding(rope, pads, shape):
    limit = 40
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    if rope == "longrope":
        settings |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]}
        settings |= {"original_max_position_embeddings": limit}
    target = tiny(rope_parameters=settings, max_position_embeddings=limit if rope == "dynamic" else 512)
    target.generation_config.eos_token_id = None
    assistant = DynSpecAssistant(target, "full", target=target, tree=SHAPES[shape])
    text, mask = padded(pads, prompt(30))
    # Beyond the limit a dynamic rope is not repeatable: its output depends on the longest text that it has read.
    new = 24 if rope == "longrope" else limit - text.shape[1]
    for longer in (0, 30):
        outputs = []
        for model in (assistant, None):
            if longer:
                target(prompt(limit + longer))
            outputs.append(generate(target, model, text, attention_mask=mask, max_new_tokens=new))
        assert torch.equal(*outputs)


# Draft length and threshold ------------------------------------------------------------------------------------------


def test_settings_come_from_the_constructor_the_drafter_or_the_defaults(target, drafter):
    plain = DynSpecAssistant(drafter).generation_config
    assert plain.num_assistant_tokens_schedule == "constant" and plain.assistant_confidence_threshold == 0.0
    own = copy.deepcopy(drafter)
    own.generation_config.num_assistant_tokens = 7
    own.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    own.generation_config.assistant_confidence_threshold = 0.25
    before = own.generation_config.to_dict()
    config = DynSpecAssistant(own).generation_config
    assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (7, "heuristic_transient")
    assert config.assistant_confidence_threshold == 0.25
    assistant = DynSpecAssistant(own, target=target, num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    config = assistant.generation_config
    assert config.num_assistant_tokens == 3 and config.assistant_confidence_threshold == 0.0
    generate(target, assistant)
    assert own.generation_config.to_dict() == before


WRONG = [
    *(("num_assistant_tokens", one) for one in (0, -1, 2.5, True, "5")),
    *(("assistant_confidence_threshold", one) for one in (-0.1, 1.1, float("nan"), "x")),
]


@pytest.mark.parametrize(("name", "wrong"), [*WRONG, ("num_assistant_tokens_schedule", "sometimes")])
def test_a_wrong_setting_is_refused_before_work(name, wrong, target, drafter):
    """By the constructor, and by a call if it was assigned."""
    if (name, wrong) in WRONG and wrong != "x":
        with pytest.raises(ConfigurationError, match=f"{name} must be"):
            DynSpecAssistant(drafter, **{name: wrong})
    assistant = DynSpecAssistant(drafter, target=target)
    before = getattr(assistant.generation_config, name)
    setattr(assistant.generation_config, name, wrong)
    with pytest.raises(ConfigurationError, match=name):
        generate(target, assistant)
    setattr(assistant.generation_config, name, before)
    assert_same(target, assistant)


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
def test_schedules(schedule, target, drafter, rounds):
    """Two more after a draft that was accepted as a whole, one fewer after any other (transformers' heuristic)."""
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=3)
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    streamer = Pieces()
    generate(target, assistant, streamer=streamer, max_new_tokens=60, eos_token_id=300)
    drafted = [one.candidates.token_ids.shape[0] for one in rounds]
    length, left, expected = 3, 60, []
    for own, piece in zip(drafted, streamer.pieces[1:], strict=False):
        expected.append(min(length, left - 1))
        left -= len(piece)
        if schedule != "constant":
            length = length + 2 if len(piece) > own else max(1, length - 1)
    assert drafted == expected
    assert len(set(drafted[:-1])) > 1 or schedule == "constant"
    assert assistant.generation_config.num_assistant_tokens == (length if schedule == "heuristic" else 3)


def test_a_schedule_leaves_trees_alone_and_stays_below_the_longest_draft(target):
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=1023)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    generate(target, assistant, prompt(4))
    assert assistant.generation_config.num_assistant_tokens <= 1024
    # In transformers' own loop nothing is drafted under a processor that remembers.
    type(target).generate(target, prompt(), assistant_model=assistant, max_new_tokens=9, guidance_scale=1.5)
    assert assistant.generation_config.num_assistant_tokens <= 1024
    assistant.tree, assistant.generation_config.num_assistant_tokens = True, 7
    assert_same(target, assistant)
    assert assistant.generation_config.num_assistant_tokens == 7


@pytest.mark.parametrize(
    ("top_k", "looks"), [(None, True), *representatives("families", itertools.product((8, 0), (True, False)), keep=2)]
)
def test_the_threshold_ends_a_draft_after_an_improbable_token(top_k, looks, target, drafter, rounds, monkeypatch):
    """That token is still drafted, as in transformers. When sampling, the probability is that of what was drawn."""
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    totals = []
    for threshold in (0.0, {None: 0.05, 0: 0.004, 8: 0.13}[top_k], 1.0):
        rounds.clear()
        assistant = DynSpecAssistant(drafter, "full", target=target, assistant_confidence_threshold=threshold)
        torch.manual_seed(0)
        sampling = {} if top_k is None else {"do_sample": True, "top_k": top_k}
        generate(target, assistant, max_new_tokens=60, eos_token_id=300, **sampling)
        for _, count, drafted in rounds:
            probabilities = [
                logits.softmax(-1)[shortlist.scored_slots == token].max()
                for token, logits, shortlist in zip(drafted.token_ids, drafted.logits, drafted.shortlists, strict=True)
            ]
            assert all(one >= threshold for one in probabilities[:-1])
            assert len(probabilities) == count or probabilities[-1] < threshold
        totals.append(sum(one.candidates.token_ids.shape[0] for one in rounds) / len(rounds))
    assert totals[0] > totals[1] > totals[2] == 1.0


# Configurations, vocabularies and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the call's", "the target's"])
def test_a_generation_config(where, assistant, target):
    """By keyword, by position, and with arguments that take precedence; none is changed."""
    model = copy.deepcopy(target)
    assistant.bind(model)
    settings = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": 1.4, "eos_token_id": [-1, EOS]}
    config = GenerationConfig(**settings, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True)
    if where == "the target's":
        model.generation_config = config
    before = [one.to_dict() for one in (config, model.generation_config, assistant.generation_config)]
    kwargs = {"generation_config": config} if where == "the call's" else {}
    expected = model.generate(prompt(), **kwargs)
    actual = model.generate(prompt(), **kwargs, assistant_model=assistant)
    assert torch.equal(actual.sequences, expected.sequences) and len(actual.scores) == len(expected.scores)
    if where == "the call's":
        shorter = model.generate(prompt(), config, assistant_model=assistant, max_new_tokens=5)
        assert torch.equal(shorter.sequences, expected.sequences[:, :17])
    assert [one.to_dict() for one in (config, model.generation_config, assistant.generation_config)] == before


def test_a_call_warns_of_nothing(assistant, target, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    arguments = {"attention_mask": torch.ones(1, 12, dtype=torch.int64), "min_new_tokens": 3, "eos_token_id": EOS}
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="transformers"):
        warnings.simplefilter("error")
        for do_sample in (False, True):
            generate(target, assistant, do_sample=do_sample, **arguments)
    assert [record.getMessage() for record in caplog.records] == []


REAL = 280
ROWS = [(400, VOCABULARY), (VOCABULARY, 400), (400, 400)]


@pytest.mark.parametrize(
    ("rows", "name", "do_sample"),
    pairwise("families", ROWS, ("hybrid", "full", "in_context", "random"), (False, True)),
)
def test_padding_rows_are_never_drafted(rows, name, do_sample, rounds):
    """Padded siblings: more embedding rows than the tokenizer has entries, and not the same number."""
    target, drafter = tiny(vocabulary=rows[0]), tiny(seed=1, vocabulary=rows[1])
    with torch.no_grad():
        # A padding row that the drafter likes better than anything: random rows may be like that.
        drafter.get_output_embeddings().weight[REAL:].mul_(20)
    policy = (POLICIES | POLICY_CASES)[name]()
    assistant = DynSpecAssistant(drafter, policy, target=target, tokenizer=word_tokenizer(REAL))
    output = generate(target, assistant, prompt(vocabulary=REAL), do_sample=do_sample)
    for _, _, drafted in rounds:
        assert int(drafted.token_ids.max()) < REAL
        assert all(int(one.scored_slots.max()) < REAL for one in drafted.shortlists)
    assert rounds and (do_sample or torch.equal(output, generate(target, None, prompt(vocabulary=REAL))))


def test_without_a_tokenizer_the_smaller_model_sets_the_limit():
    target, drafter = tiny(vocabulary=400), tiny(seed=1, vocabulary=VOCABULARY)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_same(target, assistant)
    assert assistant.stats.active_vocabulary == VOCABULARY


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    pairwise("families", ("hybrid", "in_context", "frequency", "full"), (5, 12, 40), list(SHAPES)),
)
def test_vocabularies_smaller_than_a_policys_numbers(name, size, shape):
    """The default policy wants the target's 50 likeliest tokens."""
    target = tiny(vocabulary=size)
    assistant = DynSpecAssistant(perturbed(target), name, target=target, tree=SHAPES[shape])
    ids = prompt(vocabulary=size)
    assert_same(target, assistant, ids, max_new_tokens=12)
    generate(target, assistant, ids, max_new_tokens=12, do_sample=True)
    assert assistant.stats_total.accepted > 0


def test_the_targets_fast_head_may_be_switched_off(drafter, target):
    assistant = DynSpecAssistant(drafter, target=target, fast_target_head=False)
    assert not assistant.fast_target_head and assistant.forward._head.fast(target) is None
    assert_same(target, assistant)
    assistant.fast_target_head = True
    assert_same(target, assistant)


def test_logits_under_autocast_are_plain_generations(drafter, target, compiled_kernels, monkeypatch):
    """Rounded as there, though the weights are fp32."""
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)
    outside = DynSpecAssistant(drafter, target=target)
    assert outside.forward._head.fast(target) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = DynSpecAssistant(drafter, target=target, tree=TreeConfig(12, 2, 4))
        asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        expected, *logits = (generate(target, one, **asked).logits[0] for one in (None, outside, inside))
    assert torch.equal(expected, expected.bfloat16().float())
    assert all(torch.equal(one, expected) for one in logits)
