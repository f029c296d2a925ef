"""What users pass to `generate` works as without an assistant, or as in transformers' own assisted generation."""

import contextlib
import copy
import logging
import types
from collections.abc import Callable

import families
import pytest
import torch
from eagle_heads import random_head
from models import (
    BOS,
    EOS,
    POLICY_CASES,
    TERRIBLE,
    VOCABULARY,
    RandomShortlist,
    character_tokenizer,
    perturbed,
    prompt,
    tiny,
    word_tokenizer,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.utils import generic

from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    EagleDrafter,
    InContextShortlist,
    TreeConfig,
    UnsupportedError,
    devices,
)
from hf_dynspec.cache_names import CACHE, CACHE_NAMES, returned_cache
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from hf_dynspec.kernels import cpu

# fp32 logits of a batched forward and of one-token forwards, where logits reach about 30.
CLOSE = {"rtol": 1e-4, "atol": 1e-3}

# A Phi-3 that reads everything anew past 32 tokens.
PHI3_SWITCH = {
    "sliding_window": None,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 3.0, 2.0, 5.0],
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 1.0,
    },
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target)


@pytest.fixture(params=["full", "hybrid", "random"])
def assistant(request, target, drafter) -> DynSpecAssistant:
    policy = RandomShortlist(60) if request.param == "random" else POLICY_CASES[request.param]()
    return DynSpecAssistant(drafter, policy, target=target)


@pytest.fixture
def full(target, drafter) -> DynSpecAssistant:
    return DynSpecAssistant(drafter, "full", target=target)


@pytest.fixture
def hybrid(target, drafter) -> DynSpecAssistant:
    return DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target)


def generate(target, assistant=None, input_ids=None, **arguments):
    input_ids = prompt() if input_ids is None else input_ids
    return target.generate(
        input_ids, **{"max_new_tokens": 24, "do_sample": False, "assistant_model": assistant, **arguments}
    )


def assert_same(target, assistant, input_ids=None, **arguments) -> torch.Tensor:
    """The output with the assistant, which is the one without."""
    actual = generate(target, assistant, input_ids, **arguments)
    expected = generate(target, None, input_ids, **arguments)
    assert torch.equal(actual, expected)
    return actual


# Lengths and ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("drafted", [1, 2, 5, 20])
def test_short_outputs_are_not_overshot(new_tokens, drafted, target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, num_assistant_tokens=drafted)
    assert assert_same(target, assistant, max_new_tokens=new_tokens).shape[1] == 12 + new_tokens
    assert assistant.stats.tokens == new_tokens
    # Drafts are cut to what can still be accepted, as the target adds one token of its own.
    assert all(depth < new_tokens - 1 for depth in range(len(assistant.stats.drafted_at)))


def test_max_length_counts_the_prompt(assistant, target):
    assert assert_same(target, assistant, max_new_tokens=None, max_length=20).shape[1] == 20


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length, assistant, target):
    assert_same(target, assistant, prompt(length))


def test_a_prompt_of_the_bos_alone(assistant, target):
    assert_same(target, assistant, torch.tensor([[BOS]]))
    actual = target.generate(max_new_tokens=8, do_sample=False, bos_token_id=BOS, assistant_model=assistant)
    assert torch.equal(actual, target.generate(max_new_tokens=8, do_sample=False, bos_token_id=BOS))


@pytest.mark.parametrize("place", range(8))
def test_the_end_of_the_text_within_an_accepted_draft(place, target):
    """A drafter that is always right drafts past the end, at every place within a draft."""
    plain = generate(target)[0, 12:].tolist()
    end = plain[place]
    place = plain.index(end)
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=5)
    output = assert_same(target, assistant, eos_token_id=end)
    assert output.shape[1] == 12 + place + 1 and output[0, -1] == end
    assert assistant.stats.tokens == place + 1


def test_several_ends(assistant, target):
    plain = generate(target)[0, 12:].tolist()
    ends = [plain[9], EOS, plain[6], plain[13]]
    output = assert_same(target, assistant, eos_token_id=ends)
    assert output[0, -1] in ends and output.shape[1] <= 12 + 7
    session = assistant.take_session(assistant.scored_eos_token_ids(GenerationConfig(eos_token_id=ends)))
    assert set(ends) <= set(session._selector.state.select(0, prompt()[0, -1:], torch.empty(0)).ids().tolist())
    assert_same(target, assistant, eos_token_id=torch.tensor(ends))
    # The next call has the model's own EOS again.
    assert assert_same(target, assistant).shape[1] > output.shape[1]


def test_no_end_at_all(assistant, target):
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = None
    assistant.bind(model)
    assert assert_same(model, assistant).shape[1] == 12 + 24


def test_minimum_lengths(assistant, target):
    plain = generate(target)[0, 12:].tolist()
    for arguments in ({"min_new_tokens": 20}, {"min_length": 30}):
        output = assert_same(target, assistant, eos_token_id=plain[4], **arguments)
        assert output.shape[1] > 12 + 5


# Streamers -----------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.tokens: list[int] = []
        self.puts = self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0 and value.device.type == "cpu"
        self.puts += 1
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_every_token_once(assistant, target):
    streamer = Recorder()
    output = generate(target, assistant, streamer=streamer)
    assert streamer.tokens == output[0].tolist() and streamer.ends == 1
    assert streamer.puts == 1 + assistant.stats.rounds


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_streamed_text(skip_prompt, assistant, target, capsys):
    tokenizer = word_tokenizer()
    texts = []
    for one in (assistant, None):
        generate(target, one, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        texts.append(capsys.readouterr().out)
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=120)
        generate(target, one, streamer=streamer)
        assert "".join(streamer).split() == texts[-1].split()
    assert texts[0] == texts[1] and len(texts[0].split()) >= 24


# Stopping criteria ---------------------------------------------------------------------------------------------------


class LongEnough(StoppingCriteria):
    """Stays true once it is, as criteria are asked after each round and not after each token."""

    def __init__(self, length: int):
        self.length = length
        self.asked = 0

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.asked += 1
        return torch.full((1,), input_ids.shape[1] >= self.length)


def test_a_users_own_criterion_is_asked_after_every_token(assistant, target):
    criterion = LongEnough(19)
    output = generate(target, assistant, stopping_criteria=StoppingCriteriaList([criterion]))
    plain = generate(target)
    assert output.shape[1] == 19
    assert torch.equal(output, plain[:, :19])


def test_a_criterion_that_counts_is_obeyed_by_the_token(assistant, target):
    output = generate(target, assistant, stopping_criteria=[MaxLengthCriteria(17)])
    assert output.shape[1] == 17


@pytest.mark.parametrize("place", [2, 5, 6, 11])
def test_stop_strings(place, target, drafter, hybrid):
    """The text ends with the token that completes the string, as in plain generation, wherever in a round that is."""
    tokenizer = character_tokenizer()
    plain = generate(target)
    stop = tokenizer.decode(plain[0, 12 + place : 14 + place])
    arguments = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = generate(target, None, **arguments)
    assert expected.shape[1] <= 14 + place
    one_by_one = DynSpecAssistant(drafter, TERRIBLE["eos_only"](), target=target)
    assert torch.equal(generate(target, one_by_one, **arguments), expected)
    assert torch.equal(generate(target, hybrid, **arguments), expected)


# Logits processors ---------------------------------------------------------------------------------------------------


class Favour(LogitsProcessor):
    """Depends on which token a logit belongs to, on how many there are so far, and on the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (1, VOCABULARY), "a processor must see the whole vocabulary"
        assert input_ids.shape[0] == 1
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + input_ids.shape[1]) % VOCABULARY] += 4.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "bad_words_ids": lambda plain: {"bad_words_ids": [[plain[3]], [plain[5], plain[6]]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": lambda plain: {"suppress_tokens": plain[2:9]},
    "begin_suppress_tokens": lambda plain: {"begin_suppress_tokens": plain[:1]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "sequence_bias": lambda plain: {"sequence_bias": {(plain[4],): -20.0, (9,): 5.0}},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.2)},
    "a user's own": {"logits_processor": LogitsProcessorList([Favour()])},
    "nearly everything forbidden": {"prefix_allowed_tokens_fn": lambda batch, ids: [7, 8, 250 + len(ids) % 40]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(name, assistant, target):
    plain = generate(target)
    arguments = PROCESSORS[name]
    arguments = arguments(plain[0, 12:].tolist()) if callable(arguments) else arguments
    output = assert_same(target, assistant, **arguments)
    assert not torch.equal(output, plain), "the processor changed nothing"


def test_drafting_under_the_processors_is_accepted_more_often(target, drafter):
    """Were they left out of the draft, most of it would be refused; with the target as drafter none is."""
    plain = generate(target)[0, 12:].tolist()
    assistant = DynSpecAssistant(target, "full", target=target)
    names = ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "sequence_bias", "min_new_tokens")
    for name in names:
        arguments = (PROCESSORS | {"min_new_tokens": {"min_new_tokens": 20, "eos_token_id": plain[2:12]}})[name]
        assert_same(target, assistant, **(arguments(plain) if callable(arguments) else arguments))
        assert assistant.stats.acceptance_rate > (0.7 if name == "sequence_bias" else 0.99), name


def test_processors_do_not_share_state_with_drafts(full, target):
    """A processor is asked about the target's logits at the positions, and in the order, of the output."""

    class Order(LogitsProcessor):
        def __init__(self):
            self.seen: list[list[int]] = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids[0].tolist())
            return scores

    order = Order()
    output = generate(target, full, logits_processor=[order])[0].tolist()
    for length in range(12, len(output)):
        assert output[:length] in order.seen


# Outputs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def outputs(target, assistant):
    """Everything that can be returned, with the assistant and without."""
    model = copy.deepcopy(target)
    model.set_attn_implementation("eager")
    assistant.bind(model)
    arguments = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "repetition_penalty": 1.3,
    }
    return generate(model, assistant, **arguments), generate(model, None, **arguments)


def test_scores_and_logits_have_one_entry_per_token(outputs):
    actual, expected = outputs
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs) == actual.sequences.shape[1] - 12
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(one, other, **CLOSE)
    assert not torch.allclose(actual.scores[5], actual.logits[5])


def test_hidden_states_and_attentions_are_the_targets(outputs):
    actual, expected = outputs
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert [tensor.shape for tensor in one] == [tensor.shape for tensor in other]
            for mine, its in zip(one, other, strict=True):
                torch.testing.assert_close(mine, its, **CLOSE)


class Pieces:
    def __init__(self):
        self.pieces: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        pass


def test_nothing_is_returned_that_was_not_asked_for(hybrid, target):
    """The policy's need for hidden states is not the user's."""
    actual = generate(target, hybrid, return_dict_in_generate=True)
    expected = generate(target, None, return_dict_in_generate=True)
    assert actual.keys() == expected.keys()
    assert actual.hidden_states is None and actual.scores is None


# Prompts and caches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [1, 5])
def test_left_padding(padding, assistant, target):
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.int64), prompt()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= padding).long().unsqueeze(0)
    output = assert_same(target, assistant, padded, attention_mask=mask)
    assert torch.equal(output[:, padding:], generate(target))


def test_the_drafter_does_not_see_padding(target, drafter, monkeypatch):
    prefixes = []
    draft = DraftSession.draft_chain

    def recording(self, prefix, *arguments):
        prefixes.append(prefix)
        return draft(self, prefix, *arguments)

    monkeypatch.setattr(DraftSession, "draft_chain", recording)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), prompt()], dim=1)
    mask = (torch.arange(16) >= 4).long().unsqueeze(0)
    output = generate(target, assistant, padded, attention_mask=mask)
    assert len(prefixes) > 2
    for prefix in prefixes:
        assert torch.equal(prefix, output[0, 4 : 4 + prefix.shape[0]])
    padded_stats = assistant.stats.to_dict()
    generate(target, assistant)
    assert assistant.stats.to_dict() == padded_stats


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_a_cache_from_an_earlier_turn(family, name):
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), POLICY_CASES[name](), target=target)
    text = {True: prompt(20), False: prompt(20)}
    cache = {True: None, False: None}
    for turn in range(3):
        sequences = {}
        for assisted in (True, False):
            output = generate(
                target,
                assistant if assisted else None,
                text[assisted],
                **{CACHE: cache[assisted]},
                return_dict_in_generate=True,
                max_new_tokens=10,
                eos_token_id=VOCABULARY - 1,
            )
            sequences[assisted] = output.sequences
            cache[assisted] = returned_cache(output)
            # The last token was not fed to the target yet.
            assert returned_cache(output).get_seq_length() == output.sequences.shape[1] - 1
            text[assisted] = torch.cat([output.sequences, prompt(4, seed=30 + turn)], dim=1)
        assert torch.equal(sequences[True], sequences[False])
    assert assistant.stats_total.accepted > 0 or name != "full"


def test_a_cache_of_the_prompt_but_its_last_token(assistant, target):
    """As made by hand for a prompt that many calls share."""
    with torch.no_grad():
        cache = returned_cache(target(prompt()[:, :-1], **{CACHE: DynamicCache(config=target.config)}))
    actual = generate(target, assistant, **{CACHE: copy.deepcopy(cache)})
    assert torch.equal(actual, generate(target, None, **{CACHE: cache}))
    assert torch.equal(actual, generate(target))


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_under_either_of_its_names(name, assistant, target):
    """As transformers takes it: versions with the newer name take the older one too, with a warning of their own."""
    if CACHE_NAMES.index(name) < CACHE_NAMES.index(CACHE):
        pytest.skip("transformers has no such name yet")
    with torch.no_grad():
        cache = returned_cache(target(prompt()[:, :-1], **{CACHE: DynamicCache(config=target.config)}))
    with contextlib.nullcontext() if name == CACHE else pytest.warns(FutureWarning, match=name):
        assert torch.equal(generate(target, assistant, **{name: cache}), generate(target))
    assert cache.get_seq_length() > prompt().shape[1]
    with pytest.raises(UnsupportedError, match=f"{CACHE} holds"):
        generate(target, assistant, **{name: cache})


@pytest.mark.parametrize("name", ["full", "hybrid"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
def test_nothing_that_transformers_gave_up_is_asked_of_it(name, head, tree, drafter, tmp_path, caplog):
    """Its warnings would be the user's to read, and what they warn of is taken away in the end. Of arguments they are
    errors in all tests."""
    target, own = tiny(num_hidden_layers=4), drafter
    if head:
        random_head("eagle3").write(tmp_path)
        own = EagleDrafter.from_pretrained(tmp_path, target=target)
    generic.logger.warning_once.cache_clear()
    root = logging.getLogger("transformers")
    root.addHandler(caplog.handler)
    try:
        assistant = DynSpecAssistant(own, POLICY_CASES[name](), target=target, tree=tree)
        generate(target, assistant, return_dict_in_generate=True)
    finally:
        root.removeHandler(caplog.handler)
    assert not [message for message in caplog.messages if "deprecated" in message]


def test_a_cache_and_left_padding(hybrid, target):
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt()], dim=1)
    mask = (torch.arange(15) >= 3).long().unsqueeze(0)
    sequences = []
    for assistant in (hybrid, None):
        first = generate(
            target, assistant, padded, attention_mask=mask, return_dict_in_generate=True, max_new_tokens=8
        )
        text = torch.cat([first.sequences, prompt(4, seed=9)], dim=1)
        longer = torch.cat([mask, mask.new_ones(1, text.shape[1] - 15)], dim=1)
        sequences.append(generate(target, assistant, text, attention_mask=longer, **{CACHE: returned_cache(first)}))
    assert torch.equal(*sequences)


# Draft length and threshold ------------------------------------------------------------------------------------------


def test_settings_come_from_the_constructor_the_drafter_or_the_defaults(target, drafter):
    plain = DynSpecAssistant(drafter).generation_config
    # How much is drafted then is settled in each call.
    assert (plain.num_assistant_tokens, plain.num_assistant_tokens_schedule) == (None, "constant")
    assert plain.assistant_confidence_threshold == 0.0
    own = copy.deepcopy(drafter)
    own.generation_config.num_assistant_tokens = 7
    own.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    own.generation_config.assistant_confidence_threshold = 0.25
    config = DynSpecAssistant(own).generation_config
    assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (7, "heuristic_transient")
    assert config.assistant_confidence_threshold == 0.25
    config = DynSpecAssistant(own, num_assistant_tokens=3, assistant_confidence_threshold=0.0).generation_config
    assert config.num_assistant_tokens == 3 and config.assistant_confidence_threshold == 0.0
    assert own.generation_config.num_assistant_tokens == 7


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "5"])
def test_a_wrong_draft_length_is_refused(wrong, drafter):
    with pytest.raises(ConfigurationError, match="num_assistant_tokens must be a whole number"):
        DynSpecAssistant(drafter, num_assistant_tokens=wrong)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_a_wrong_threshold_is_refused(wrong, drafter):
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        DynSpecAssistant(drafter, assistant_confidence_threshold=wrong)


@pytest.mark.parametrize("drafted", [1, 2, 20])
def test_draft_lengths(drafted, assistant, target):
    assistant.generation_config.num_assistant_tokens = drafted
    assert_same(target, assistant)
    assert len(assistant.stats.drafted_at) == min(drafted, 23)
    assert assistant.generation_config.num_assistant_tokens == drafted


def lengths_of_drafts(assistant, target, monkeypatch, **arguments) -> tuple[list[int], list[int]]:
    """How many tokens each round drafted, and how many of them were accepted."""
    drafted = []
    draft = DraftSession.draft_chain

    def recording(self, *args):
        candidates = draft(self, *args)
        drafted.append(candidates.token_ids.shape[0])
        return candidates

    streamer = Pieces()
    with monkeypatch.context() as patch:
        patch.setattr(DraftSession, "draft_chain", recording)
        generate(target, assistant, streamer=streamer, **arguments)
    return drafted, [len(piece) - 1 for piece in streamer.pieces[1:]]


def test_a_schedule_leaves_trees_and_the_default_alone(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, tree=True)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assert_same(target, assistant)
    assert assistant.generation_config.num_assistant_tokens is None


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
def test_schedules(schedule, target, drafter, monkeypatch):
    """Two more after a draft that was accepted as a whole, one fewer after any other (transformers' heuristic)."""
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=3)
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    assert_same(target, assistant)
    assistant.generation_config.num_assistant_tokens = 3
    drafted, accepted = lengths_of_drafts(assistant, target, monkeypatch, max_new_tokens=60, eos_token_id=300)
    length, expected = 3, []
    left = 60
    for own, taken in zip(drafted, accepted, strict=False):
        expected.append(min(length, left - 1))
        left -= taken + 1
        if schedule != "constant":
            length = length + 2 if taken == own else max(1, length - 1)
    assert drafted == expected
    assert len(set(drafted[:-1])) > 1 or schedule == "constant"
    assert assistant.generation_config.num_assistant_tokens == (length if schedule == "heuristic" else 3)


@pytest.fixture
def lengths_under(monkeypatch) -> Callable[[float], list[int]]:
    """Has each draft of a call looked at: it ends with the first token below a threshold, which is still drafted, as
    in transformers. Returns the lengths of the drafts."""
    draft = DraftSession.draft_chain

    def watch(threshold: float) -> list[int]:
        lengths = []

        def checking(self, prefix, count, choose, goes_on):
            candidates = draft(self, prefix, count, choose, goes_on)
            for depth, (token, logits, shortlist) in enumerate(
                zip(candidates.token_ids, candidates.logits, candidates.shortlists, strict=True)
            ):
                probability = logits.softmax(-1)[shortlist.scored_slots == token].max()
                is_last = depth == candidates.token_ids.shape[0] - 1
                assert is_last or probability >= threshold
                assert not is_last or depth == count - 1 or probability < threshold
            lengths.append(candidates.token_ids.shape[0])
            return candidates

        monkeypatch.setattr(DraftSession, "draft_chain", checking)
        return lengths

    return watch


def test_the_threshold_ends_a_draft_after_an_improbable_token(target, drafter, lengths_under):
    totals = []
    for threshold in (0.0, 0.05, 1.0):
        lengths = lengths_under(threshold)
        assistant = DynSpecAssistant(drafter, "full", target=target, assistant_confidence_threshold=threshold)
        assert_same(target, assistant, max_new_tokens=40, eos_token_id=300)
        totals.append(sum(lengths) / len(lengths))
    assert totals[0] > totals[1] > totals[2] == 1.0


@pytest.mark.parametrize("looks", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("top_k", [0, 8])
def test_the_threshold_goes_by_what_was_drawn(top_k, looks, target, drafter, lengths_under, monkeypatch):
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    totals = []
    for threshold in (0.0, 0.004 if top_k == 0 else 0.13, 1.0):
        lengths = lengths_under(threshold)
        assistant = DynSpecAssistant(drafter, "full", target=target, assistant_confidence_threshold=threshold)
        torch.manual_seed(0)
        target.generate(
            prompt(), assistant_model=assistant, max_new_tokens=60, do_sample=True, top_k=top_k, eos_token_id=300
        )
        totals.append(sum(lengths) / len(lengths))
    assert totals[0] > totals[1] > totals[2] == 1.0


def test_the_drafters_own_configuration_is_left_alone(target, drafter):
    before = drafter.generation_config.to_dict()
    assistant = DynSpecAssistant(drafter, target=target, num_assistant_tokens=2)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    generate(target, assistant)
    assert drafter.generation_config.to_dict() == before


# Configurations and vocabularies -------------------------------------------------------------------------------------


def test_a_generation_config_object(assistant, target):
    config = GenerationConfig(
        max_new_tokens=15, do_sample=False, repetition_penalty=1.4, eos_token_id=EOS, pad_token_id=0
    )
    before = config.to_dict()
    actual = target.generate(prompt(), generation_config=config, assistant_model=assistant)
    assert torch.equal(actual, target.generate(prompt(), generation_config=config))
    assert torch.equal(actual, target.generate(prompt(), config, assistant_model=assistant))
    assert config.to_dict() == before


def test_sampled_outputs_come_with_everything_too(assistant, target):
    torch.manual_seed(0)
    output = generate(
        target,
        assistant,
        do_sample=True,
        temperature=1.5,
        top_k=30,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        max_new_tokens=20,
        eos_token_id=300,
        suppress_tokens=[300],  # never ends early
    )
    assert len(output.scores) == 20 == output.sequences.shape[1] - 12
    for token, scores in zip(output.sequences[0, 12:], output.scores, strict=True):
        assert scores[0, token] > -torch.inf


REAL = 280


@pytest.mark.parametrize(("target_rows", "drafter_rows"), [(400, VOCABULARY), (VOCABULARY, 400), (400, 400)])
@pytest.mark.parametrize("name", ["full", "hybrid", "in_context", "random"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_padding_rows_are_never_drafted(target_rows, drafter_rows, name, do_sample, monkeypatch):
    """Padded siblings: more embedding rows than the tokenizer has entries, and not the same number."""
    target, drafter = tiny(vocabulary=target_rows), tiny(seed=1, vocabulary=drafter_rows)
    with torch.no_grad():
        # A padding row that the drafter likes better than anything: what random rows may well be.
        drafter.get_output_embeddings().weight[REAL:].mul_(20)
    policy = RandomShortlist(60) if name == "random" else POLICY_CASES[name]()
    assistant = DynSpecAssistant(drafter, policy, target=target, tokenizer=word_tokenizer(REAL))
    drafted = []
    draft = DraftSession.draft_chain

    def recording(self, *arguments):
        candidates = draft(self, *arguments)
        drafted.extend(candidates.token_ids.tolist())
        assert all(int(one.scored_slots.max()) < REAL for one in candidates.shortlists)
        return candidates

    monkeypatch.setattr(DraftSession, "draft_chain", recording)
    output = generate(target, assistant, prompt(vocabulary=REAL), do_sample=do_sample)
    assert drafted and max(drafted) < REAL
    if not do_sample:
        assert torch.equal(output, generate(target, None, prompt(vocabulary=REAL)))


def test_without_a_tokenizer_the_smaller_model_sets_the_limit():
    target, drafter = tiny(vocabulary=400), tiny(seed=1, vocabulary=VOCABULARY)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert_same(target, assistant)
    assert assistant.stats.active_vocabulary == VOCABULARY


# What else is asked of generate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("chunk", [1, 5, 12, 40])
@pytest.mark.parametrize("drafter_kind", ["independent", "eagle"])
def test_prompts_are_read_in_chunks_of_the_size_that_was_asked_for(drafter_kind, chunk, shape, drafter, tmp_path):
    """The policy and an EAGLE head are shown all of them."""
    target = tiny(num_hidden_layers=4)
    if drafter_kind == "eagle":
        random_head("eagle3").write(tmp_path)
        drafter = EagleDrafter.from_pretrained(tmp_path, target=target)
    policy = InContextShortlist(60, prompt_top_k=3)
    assistant = DynSpecAssistant(drafter, policy, target=target, tree=shape)
    sizes: list[int] = []
    forward = type(target.model).forward

    def watched(self, input_ids=None, **kwargs):
        sizes.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    expected = generate(target)
    whole = generate(target, assistant)
    accepted = assistant.stats.to_dict()
    target.model.forward = types.MethodType(watched, target.model)
    output = generate(target, assistant, prefill_chunk_size=chunk)
    first = sizes[: -(-12 // chunk)]
    drafts_at_once = drafter_kind == "independent" and not shape
    assert torch.equal(output, expected) and torch.equal(whole, expected)
    assert first[:-1] == [chunk] * (len(first) - 1)
    drafted = DEFAULT_NUM_ASSISTANT_TOKENS * drafts_at_once
    assert first[-1] == 12 - chunk * (len(first) - 1) + drafted
    assert assistant.stats.to_dict() == accepted


@pytest.mark.parametrize("where", ["call", "configuration of the call", "configuration of the target"])
def test_stop_strings_and_healing_wherever_they_are_asked_for(where, drafter):
    tokenizer = character_tokenizer()
    target = tiny()
    plain = generate(target)[0]
    stop = tokenizer.decode(plain[18:20])
    assistant = DynSpecAssistant(drafter, target=target)
    for settings in ({"stop_strings": [stop]}, {"token_healing": True}, {"stop_strings": stop, "token_healing": True}):
        target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
        arguments = {"tokenizer": tokenizer}
        if where == "call":
            arguments |= settings
        elif where == "configuration of the call":
            arguments["generation_config"] = GenerationConfig(**settings, max_new_tokens=24, do_sample=False)
        else:
            target.generation_config = GenerationConfig(**settings, eos_token_id=EOS, pad_token_id=0)
        before = target.generation_config.to_dict()
        expected = generate(target, **arguments)
        output = generate(target, assistant, **arguments)
        assert torch.equal(output, expected)
        assert "stop_strings" not in settings or expected.shape[1] < plain.shape[0]
        assert target.generation_config.to_dict() == before
        with pytest.raises(UnsupportedError, match="tokenizer="):
            generate(target, assistant, **{**arguments, "tokenizer": None})


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("size", [5, 12, 40])
@pytest.mark.parametrize("name", ["hybrid", "in_context", "frequency", "full"])
def test_vocabularies_smaller_than_a_policys_numbers(name, size, tree):
    """The default policy wants the target's 50 likeliest tokens."""
    target = tiny(vocabulary=size)
    assistant = DynSpecAssistant(perturbed(target), name, target=target, tree=tree)
    ids = prompt(vocabulary=size)
    arguments = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=assistant, **arguments), target.generate(ids, **arguments))
    target.generate(ids, assistant_model=assistant, max_new_tokens=20, do_sample=True)
    assert assistant.stats_total.accepted > 0


def test_the_targets_fast_head_may_be_switched_off(drafter, target):
    assistant = DynSpecAssistant(drafter, target=target, fast_target_head=False)
    assert not assistant.fast_target_head and assistant.forward._head.fast(target) is None
    assert_same(target, assistant)
    assistant.fast_target_head = True
    assert_same(target, assistant)


def test_logits_under_autocast_are_plain_generations(drafter, target, compiled_kernels, monkeypatch):
    """Rounded as there, though the weights are fp32, and a target is no other one in it."""
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)
    outside = DynSpecAssistant(drafter, target=target)
    assert outside.forward._head.fast(target) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = DynSpecAssistant(drafter, target=target, tree=True)
        asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        expected, *logits = (
            target.generate(prompt(), assistant_model=one, **asked).logits[0] for one in (None, outside, inside)
        )
    assert torch.equal(expected, expected.bfloat16().float())
    assert all(torch.equal(one, expected) for one in logits)


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_new_tokens_alone_after_a_cache(family, pads, tree):
    """With the mask of the whole text, as a conversation is continued by hand."""
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), "hybrid", target=target, tree=tree)
    whole = torch.cat([torch.zeros(1, pads, dtype=torch.int64), prompt(30)], dim=1)
    mask = (torch.arange(whole.shape[1]) >= pads).long()[None]

    def continued(length: int, with_assistant: bool) -> torch.Tensor:
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(whole[:, :length], attention_mask=mask[:, :length], **{CACHE: cache})
        arguments = {"attention_mask": mask, CACHE: cache, "max_new_tokens": 20, "do_sample": False}
        model = assistant if with_assistant else None
        return target.generate(whole[:, length:], assistant_model=model, **arguments)

    for length in (10, 24):
        assert torch.equal(continued(length, True), continued(length, False))
        assert assistant.stats.drafted > 0


def test_attentions_after_a_cache_have_plain_generations_shapes():
    target = tiny()
    target.set_attn_implementation("eager")
    assistant = DynSpecAssistant(perturbed(target), "full", target=target)
    mask = torch.ones(1, 30, dtype=torch.int64)
    outputs = []
    for model in (assistant, None):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(prompt(30)[:, :20], **{CACHE: cache})
        outputs.append(
            target.generate(
                prompt(30)[:, 20:],
                attention_mask=mask,
                **{CACHE: cache},
                assistant_model=model,
                max_new_tokens=10,
                do_sample=False,
                return_dict_in_generate=True,
                output_attentions=True,
            ).attentions
        )
    ours, theirs = ([[layer.shape for layer in token] for token in one] for one in outputs)
    assert ours == theirs


def test_prompts_of_other_integers(assistant, target):
    ids = prompt().to(torch.int32)
    for arguments in ({}, {"repetition_penalty": 1.5}):
        expected = target.generate(ids, max_new_tokens=20, do_sample=False, **arguments)
        output = target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant, **arguments)
        assert torch.equal(output.long(), expected.long())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("num_assistant_tokens", 0),
        ("num_assistant_tokens", -1),
        ("num_assistant_tokens", 2.5),
        ("num_assistant_tokens", True),
        ("assistant_confidence_threshold", "x"),
        ("assistant_confidence_threshold", 2.0),
        ("num_assistant_tokens_schedule", "sometimes"),
    ],
)
def test_settings_that_are_assigned_are_looked_at_before_work(name, wrong, target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    before = getattr(assistant.generation_config, name)
    setattr(assistant.generation_config, name, wrong)
    with pytest.raises(ConfigurationError, match=name):
        generate(target, assistant)
    setattr(assistant.generation_config, name, before)
    assert_same(target, assistant)


def test_a_schedule_stays_where_nothing_is_drafted_and_below_the_longest_draft(target):
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=1023)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    target.generate(prompt(4), assistant_model=assistant, max_new_tokens=30, do_sample=False)
    assert assistant.generation_config.num_assistant_tokens <= 1024
    type(target).generate(
        target, prompt(), assistant_model=assistant, max_new_tokens=30, do_sample=False, guidance_scale=1.5
    )
    assert assistant.generation_config.num_assistant_tokens <= 1024


class Chunks:
    """A streamer that keeps the tokens."""

    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def test_healing_with_a_bos_and_without_a_prompt(drafter):
    """`generate` makes the mask before it heals."""
    tokenizer, target = character_tokenizer(), tiny()
    assistant = DynSpecAssistant(drafter, target=target)
    text = torch.cat([torch.tensor([[BOS]]), prompt()], dim=1)
    arguments = {"tokenizer": tokenizer, "token_healing": True, "max_new_tokens": 12, "do_sample": False}
    with pytest.raises(UnsupportedError, match="token_healing"):
        target.generate(None, assistant_model=assistant, **arguments)
    for ids in (text, prompt()):
        streamed: list[list[int]] = []
        for model in (assistant, None):
            streamer = Chunks()
            output = target.generate(ids, assistant_model=model, streamer=streamer, **arguments)
            streamed.append(streamer.tokens)
            assert streamer.tokens == output[0].tolist()
        assert streamed[0] == streamed[1]


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("pads", [0, 6])
@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_a_rope_that_changes_after_longer_texts_and_padding(rope, pads, tree):
    limit = 40
    settings = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0}
    if rope == "longrope":
        settings |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]}
        settings |= {"original_max_position_embeddings": limit}
    target = tiny(rope_parameters=settings, max_position_embeddings=limit if rope == "dynamic" else 512)
    target.generation_config.eos_token_id = None
    assistant = DynSpecAssistant(target, "full", target=target, tree=tree)
    text = torch.cat([torch.zeros(1, pads, dtype=torch.int64), prompt(30)], dim=1)
    mask = (torch.arange(text.shape[1]) >= pads).long()[None]
    # Beyond the limit a dynamic rope is not repeatable: what it says depends on the longest text that it has read.
    new = 24 if rope == "longrope" else limit - text.shape[1]
    for longer in (0, 30):
        if longer:
            target(prompt(limit + longer))
        arguments = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
        expected = target.generate(text, **arguments)
        if longer:
            target(prompt(limit + longer))
        assert torch.equal(target.generate(text, assistant_model=assistant, **arguments), expected)


@pytest.mark.parametrize("chunk", [8, 33, 40])
@pytest.mark.parametrize("length", [30, 40])
def test_chunks_of_a_model_that_reads_anew_past_a_limit(length, chunk, drafter):
    target = families.model_of("phi3", **PHI3_SWITCH)
    target.generation_config.eos_token_id = None
    assistant = DynSpecAssistant(drafter, "full", target=target)
    arguments = {"max_new_tokens": 20, "do_sample": False, "prefill_chunk_size": chunk}
    expected = target.generate(prompt(length), **arguments)
    assert torch.equal(target.generate(prompt(length), assistant_model=assistant, **arguments), expected)
