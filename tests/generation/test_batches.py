"""Several texts in one call, and single texts with a static cache: each is generated as it is alone."""

import copy
import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import disk_offload
from aligned import quick_assistant, recorded
from calls import SHAPES, Pieces
from cases import pairwise
from eagle_heads import agreeing_head, drafter_of, random_head, soft
from families import model_of
from models import EOS, PAD, POLICY_CASES, TERRIBLE, character_tokenizer, perturbed, prompt, tiny, word_tokenizer
from peft import LoraConfig, get_peft_model
from sampled_texts import FALSE_ALARM, processors_of, uniform_numbers, uniformity
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

from hf_dynspec import DynSpecAssistant, OnlineAlignment, RetrievalShortlist
from hf_dynspec.cache_names import CACHE
from hf_dynspec.errors import NotBoundError, UnsupportedError
from hf_dynspec.generation import fixed_lane, text_by_text
from hf_dynspec.memory import fixed_decoder
from hf_dynspec.memory.fixed_decoder import FixedDecoder
from hf_dynspec.rounds import Round
from hf_dynspec.shortlists import POLICIES
from hf_dynspec.shortlists.retrieval.retriever import RetrievalListener
from hf_dynspec.stats import SECTIONS

LENGTHS = (5, 30, 14)
FAMILIES = ("llama", "gemma3", "gemma2", "mistral", "gpt2", "cohere2", "granite")
DRAFTERS = ("independent", "eagle2", "eagle3")


# How the texts of a batch draft: all at once, and one after another if a processor looks at the order of tokens.
WAYS = {"in rounds": {}, "text by text": {"no_repeat_ngram_size": 4}}


def assert_lane(assistant: DynSpecAssistant, settings: dict) -> None:
    expected = (
        "fixed memory, drafts text by text: a logits processor looks at the order of tokens"
        if settings
        else "fixed memory"
    )
    assert assistant.stats.lane == expected


@functools.cache
def pair(kind: str, family: str):
    """A target and what drafts for it."""
    if kind == "independent":
        return tiny(family), perturbed(tiny(family))
    target = soft(family)
    return target, drafter_of(agreeing_head(kind), target)


def texts(lengths=LENGTHS) -> list[torch.Tensor]:
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


def together(some: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The prompts as a tokenizer returns them with padding_side="left"."""
    longest = max(text.shape[1] for text in some)
    padded = [torch.nn.functional.pad(text, (longest - text.shape[1], 0), value=PAD) for text in some]
    masks = [(torch.arange(longest) >= longest - text.shape[1]).long()[None] for text in some]
    return {"input_ids": torch.cat(padded), "attention_mask": torch.cat(masks)}


def assert_each_as_alone(
    target: PreTrainedModel, assistant: DynSpecAssistant, some: list[torch.Tensor] | None = None, **arguments
) -> torch.Tensor:
    """Greedily, every text of the batch has the tokens of plain generate on it alone, and padding after them."""
    some = texts() if some is None else some
    arguments = {"max_new_tokens": 40, "do_sample": False, **arguments}
    inputs = together(some)
    output = target.generate(**inputs, assistant_model=assistant, **arguments)
    n = inputs["input_ids"].shape[1]
    assert torch.equal(output[:, :n], inputs["input_ids"])
    for row, text in zip(output, some, strict=True):
        alone = target.generate(text, attention_mask=torch.ones_like(text), **arguments)[0, text.shape[1] :]
        assert row[n : n + len(alone)].tolist() == alone.tolist()
        assert (row[n + len(alone) :] == PAD).all()
    return output


# Exactness -----------------------------------------------------------------------------------------------------------


CASES = pairwise("families", tuple(POLICIES), DRAFTERS, ("llama", "gemma3"), tuple(SHAPES), ("greedy", "sampled"))


@pytest.mark.parametrize(("policy", "kind", "family", "shape", "mode"), CASES)
def test_every_policy(policy, kind, family, shape, mode):
    target, drafter = pair(kind, family)
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=SHAPES[shape])
    if mode == "greedy":
        assert_each_as_alone(target, assistant, eos_token_id=300)
    else:
        settings = {"temperature": 3.0, "top_k": 8, "eos_token_id": 300, "suppress_tokens": [300]}
        torch.manual_seed(3)
        inputs = together(texts((12, 12, 12)))
        sampled = target.generate(**inputs, assistant_model=assistant, max_new_tokens=40, do_sample=True, **settings)
        processors = processors_of(target, **settings)
        numbers = [uniform_numbers(target, perturbed(target), processors, one[None], 12) for one in sampled]
        assert uniformity(torch.cat(numbers)) > FALSE_ALARM / 10
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assistant.unbind()


@pytest.mark.parametrize(("family", "shape"), pairwise("families", FAMILIES, tuple(SHAPES)))
def test_every_kind_of_attention(family, shape):
    """Windows that the texts pass, soft caps, learned positions."""
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), target=target, tree=SHAPES[shape])
    assert_each_as_alone(target, assistant, eos_token_id=None)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_that_disagree_with_every_draft(shape, target):
    assistant = DynSpecAssistant(perturbed(target), TERRIBLE["eos_only"](), target=target, tree=SHAPES[shape])
    assert_each_as_alone(target, assistant)
    assert assistant.stats.accepted == 0


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_memory_grows_with_the_texts(settings, target, monkeypatch):
    for module in (fixed_lane, text_by_text):
        monkeypatch.setattr(module, "FIRST_POSITIONS", 2)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    assert_each_as_alone(target, assistant, max_new_tokens=120, eos_token_id=None, **settings)
    assert_lane(assistant, settings)


def test_texts_end_by_themselves(target):
    """At EOS tokens of their own, at stop strings, and all at the length of the call."""
    assistant = DynSpecAssistant(perturbed(target), target=target)
    some = texts()
    plain = [target.generate(text, max_new_tokens=40, do_sample=False, eos_token_id=None)[0] for text in some]
    ends = [int(plain[0][len(some[0][0]) + 3]), int(plain[1][len(some[1][0]) + 20])]
    output = assert_each_as_alone(target, assistant, some, eos_token_id=ends)
    lengths = [(row[30:] != PAD).sum().item() for row in output]
    assert len(set(lengths)) > 1
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(plain[2][20:22])
    assert_each_as_alone(target, assistant, some, stop_strings=[stop], tokenizer=tokenizer)


def test_lengths_are_those_of_the_padded_prompt(target):
    """As in plain generate on the batch: a text ends where the whole batch is as long as it may be."""
    assistant = DynSpecAssistant(perturbed(target), target=target)
    arguments = {**together(texts()), "max_length": 50, "do_sample": False, "eos_token_id": None}
    output = target.generate(**arguments, assistant_model=assistant)
    assert output.shape == (3, 50) and torch.equal(output, target.generate(**arguments))


def test_processors_see_each_text_alone(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    settings = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 10, "eos_token_id": 7}
    assert_each_as_alone(target, assistant, **settings)


def test_padding_is_told_by_its_token_without_a_mask(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    inputs = together(texts())
    arguments = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
    output = target.generate(inputs["input_ids"], assistant_model=assistant, **arguments)
    assert torch.equal(output, target.generate(**inputs, assistant_model=assistant, **arguments))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_penalty_on_repetitions_in_rounds(kind, shape):
    target, drafter = pair(kind, "llama")
    assistant = DynSpecAssistant(drafter, target=target, tree=SHAPES[shape])
    assert_each_as_alone(target, assistant, repetition_penalty=1.4, eos_token_id=None)
    assert_lane(assistant, {})
    assert assistant.stats.accepted > 0


def test_a_sampled_batch_with_a_penalty_on_repetitions():
    target, drafter = pair("independent", "llama")
    assistant = DynSpecAssistant(drafter, target=target)
    settings = {"repetition_penalty": 1.5, "temperature": 2.0, "top_k": 8, "eos_token_id": None}
    torch.manual_seed(3)
    inputs = together(texts((12, 12, 12)))
    sampled = target.generate(**inputs, assistant_model=assistant, max_new_tokens=40, do_sample=True, **settings)
    processors = processors_of(target, **settings)
    numbers = [uniform_numbers(target, perturbed(target), processors, one[None], 12) for one in sampled]
    assert uniformity(torch.cat(numbers)) > FALSE_ALARM / 10
    assert_lane(assistant, {})


# Criteria of a user's own --------------------------------------------------------------------------------------------


class EndsOfLines(StoppingCriteria):
    """Ends the batch when each text has had one of these tokens, as benchmark harnesses do. It remembers which texts
    had one, and looks at new tokens only."""

    def __init__(self, token_ids: list[int], prompt: int):
        self._token_ids, self._prompt, self._done, self.asked = token_ids, prompt, None, []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> bool:
        self.asked.append(input_ids.tolist())
        if self._done is None:
            self._done = [False] * len(input_ids)
        for number, row in enumerate(input_ids[:, self._prompt :].tolist()):
            self._done[number] |= row[-1] in self._token_ids
        return all(self._done)


class EachAlone(StoppingCriteria):
    """Ends each text at its second token among these."""

    def __init__(self, token_ids: list[int], prompt: int):
        self._token_ids, self._prompt, self.asked = token_ids, prompt, []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.asked.append(input_ids.tolist())
        return torch.isin(input_ids[:, self._prompt :], torch.tensor(self._token_ids)).sum(1) > 1


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [EndsOfLines, EachAlone])
def test_criteria_of_a_user_are_asked_about_the_whole_batch(kind, shape, settings, target):
    """With the same batches, in the same order, as in plain generate on the whole batch, and so with its output."""
    assistant = DynSpecAssistant(perturbed(target), target=target, tree=SHAPES[shape])
    inputs = together(texts((12, 12, 12)))
    call = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [7], "pad_token_id": PAD, **settings}
    written = target.generate(**inputs, **call)[:, 12:]
    ends = [int(row[place]) for row, place in zip(written, (4, 11, 19), strict=True)]
    own, ours = kind(ends, 12), kind(ends, 12)
    expected = target.generate(**inputs, stopping_criteria=StoppingCriteriaList([own]), **call)
    output = target.generate(
        **inputs, stopping_criteria=StoppingCriteriaList([ours]), assistant_model=assistant, **call
    )
    assert torch.equal(output, expected)
    # Some text has ended before the others' length.
    assert expected.shape[1] < 52 or bool((expected[:, -1] == PAD).any())
    assert ours.asked == own.asked
    assert_lane(assistant, settings)


# A static cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), pairwise("families", FAMILIES, tuple(SHAPES)))
def test_a_text_with_a_static_cache(family, shape):
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), target=target, tree=SHAPES[shape])
    streamer = Pieces()
    arguments = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None}
    output = target.generate(
        prompt(30), cache_implementation="static", streamer=streamer, assistant_model=assistant, **arguments
    )
    assert torch.equal(output, target.generate(prompt(30), **arguments)) and assistant.stats.accepted > 0
    assert streamer.tokens == output[0].tolist() and streamer.ends == 1


def test_a_static_cache_that_a_configuration_asks_for(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    config = GenerationConfig(max_new_tokens=20, cache_implementation="static", pad_token_id=PAD, eos_token_id=EOS)
    output = target.generate(prompt(), generation_config=config, assistant_model=assistant)
    assert torch.equal(output, target.generate(prompt(), max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize(
    "arguments", [{"return_dict_in_generate": True, "output_scores": True}, {CACHE: DynamicCache()}]
)
def test_what_a_static_cache_has_no_place_for(arguments, target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(UnsupportedError, match="leave cache_implementation unset"):
        target.generate(prompt(), cache_implementation="static", assistant_model=assistant, **arguments)


# What comes back -----------------------------------------------------------------------------------------------------


def test_several_texts_of_each_prompt(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    inputs = together(texts())
    arguments = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 20, "temperature": 3.0}
    torch.manual_seed(0)
    output = target.generate(**inputs, assistant_model=assistant, **arguments)
    assert torch.equal(output[:, :30], inputs["input_ids"].repeat_interleave(2, 0))
    assert not torch.equal(output[0], output[1])
    torch.manual_seed(0)
    assert torch.equal(output, target.generate(**inputs, assistant_model=assistant, **arguments))
    one = target.generate(prompt(), assistant_model=assistant, **arguments)
    assert one.shape[0] == 2


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_call_in_inference_mode(kind):
    target, drafter = pair(kind, "llama")
    assistant = DynSpecAssistant(drafter, target=target)
    expected = assert_each_as_alone(target, assistant, eos_token_id=300)
    with torch.inference_mode():
        assert torch.equal(assert_each_as_alone(target, assistant, eos_token_id=300), expected)
    assert torch.equal(assert_each_as_alone(target, assistant, eos_token_id=300), expected)


def test_two_threads_share_an_assistant(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    arguments = {"max_new_tokens": 30, "do_sample": False, "assistant_model": assistant}
    inputs = [together(texts()), together(texts((9, 20)))]
    expected = [target.generate(**one, **arguments) for one in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            actual = list(pool.map(lambda one: target.generate(**one, **arguments), inputs))
            assert all(map(torch.equal, actual, expected))


def test_a_dictionary_holds_the_sequences(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    arguments = {**together(texts()), "max_new_tokens": 12, "do_sample": False, "assistant_model": assistant}
    output = target.generate(**arguments, return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(**arguments))


def test_counts_are_those_of_all_texts(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    output = assert_each_as_alone(target, assistant, eos_token_id=None)
    assert assistant.stats.calls == 3 and assistant.stats.tokens == 3 * (output.shape[1] - 30)
    assert assistant.stats_total.tokens == assistant.stats.tokens


def test_a_profile_divides_the_time_of_the_call(target):
    assistant = DynSpecAssistant(perturbed(target), target=target, profile=True, measure_coverage=True, validate=True)
    start = time.perf_counter()
    target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=24, do_sample=False)
    elapsed = time.perf_counter() - start
    seconds = assistant.stats.seconds
    assert set(seconds) == {*SECTIONS, "other"} and min(seconds.values()) >= 0 and seconds["verification"] > 0
    assert 0.5 * elapsed < sum(seconds.values()) <= elapsed
    assert 0 < assistant.stats.coverage <= 1


def test_the_drafter_learns_from_every_text(target):
    alignment = OnlineAlignment(synchronous=True)
    assistant = DynSpecAssistant(perturbed(target), target=target, alignment=alignment)
    start = time.perf_counter()
    assert_each_as_alone(target, assistant, max_new_tokens=60, eos_token_id=None)
    elapsed = time.perf_counter() - start
    assert assistant.alignment.stats.requests == 3 and assistant.alignment.stats.updates > 0
    assert assistant.stats.lane == "fixed memory"
    # Together they took the time of one call.
    assert assistant.alignment.stats.generation_seconds < elapsed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_rounds_record_what_the_general_lane_records(kind, shape):
    """Each token with the target's answer there, and the drafter's inputs."""
    target, drafter = pair(kind, "llama")
    requests = []
    for cache in (None, "static"):
        assistant = quick_assistant(drafter, target, SHAPES[shape])
        call = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
        target.generate(prompt(30), assistant_model=assistant, **call)
        assert assistant.stats.lane == ("general: no graphs on cpu" if cache is None else "fixed memory")
        requests.append(vars(recorded(assistant)[0]))
        assistant.unbind()
    # In the general lane an independent drafter drafts before the target has read the prompt, so rounds end elsewhere.
    left_out = {"is_wrong"} if (kind, SHAPES[shape]) == ("independent", False) else set()
    for name in requests[0].keys() - left_out:
        torch.testing.assert_close(requests[1][name], requests[0][name], msg=name)


def test_rounds_record_sampled_texts_at_their_temperature(target):
    assistant = quick_assistant(perturbed(target), target)
    call = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 30, "cache_implementation": "static"}
    target.generate(prompt(30), assistant_model=assistant, eos_token_id=None, **call)
    (request,) = recorded(assistant)
    assert assistant.stats.lane == "fixed memory" and request.temperature == 0.7
    with torch.no_grad():
        logits = target(request.token_ids[None]).logits[0, request.first - 1 : -1]
    torch.testing.assert_close(request.log_normalisers, (logits / 0.7).logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_retrieval_reads_hidden_states_in_rounds(target):
    pytest.importorskip("hnswlib")
    found = []

    class Listener(RetrievalListener):
        def hear(self, retrieval):
            found[-1].append([(one.position, one.trigger, one.near.tolist()) for one in retrieval.found])

        def on_taken(self, count):
            pass

    policy = RetrievalShortlist(size=40, dynamic=20, semantic="index", likely=4, neighbours=3, synchronous=True)
    for cache in (None, "static"):
        found.append([])
        assistant = DynSpecAssistant(perturbed(target), policy.heard_by(Listener()), target=target)
        target.generate(
            prompt(30), assistant_model=assistant, max_new_tokens=24, do_sample=False, cache_implementation=cache
        )
    assert found[0] == found[1] and any(near for event in found[0] for *_, near in event)


def test_a_text_generation_pipeline(target):
    tokenizer = word_tokenizer()
    tokenizer.pad_token_id = PAD
    tokenizer.padding_side = "left"
    assistant = DynSpecAssistant(perturbed(target), target=target, tokenizer=tokenizer)
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer)
    prompts = [tokenizer.decode(text[0]) for text in texts()]
    settings = {"do_sample": False, "eos_token_id": None}
    arguments = {"max_new_tokens": 16, "return_tensors": True, **settings}
    output = generator(prompts, batch_size=3, assistant_model=assistant, **arguments)
    assert assistant.stats.calls == 3
    for one, text in zip(output, prompts, strict=True):
        alone = generator(text, **arguments)[0]["generated_token_ids"]
        assert one[0]["generated_token_ids"][-16:] == alone[-16:]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_model_is_what_a_single_text_leaves_of_it(kind):
    """Its settings, parts and hooks: transformers adds hooks of its own when an EAGLE head reads hidden states."""

    def left(inputs: dict[str, torch.Tensor]) -> tuple:
        target = tiny() if kind == "independent" else soft("llama")
        drafter = perturbed(target) if kind == "independent" else drafter_of(agreeing_head(kind), target)
        assistant = DynSpecAssistant(drafter, target=target)
        for _ in range(2):
            target.generate(**inputs, assistant_model=assistant, max_new_tokens=12)
        modules = list(target.modules())
        hooks = [[getattr(hook, "__module__", None) for hook in one._forward_hooks.values()] for one in modules]
        settings = {name: value for name, value in vars(target.config).items() if name != "_name_or_path"}
        return hooks, [sorted(vars(module)) for module in modules], settings

    assert left(together(texts())) == left(together(texts()[:1]))


@pytest.mark.parametrize("state", ["on", "off", "merged"])
def test_a_target_with_adapters(state):
    """They are what they are at the time of the call."""
    target = tiny()
    model = get_peft_model(target, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    assistant = DynSpecAssistant(perturbed(tiny()), target=model)
    before = assert_each_as_alone(target, assistant)
    if state == "merged":
        model.merge_adapter()
        assert_each_as_alone(target, assistant)
    elif state == "off":
        with model.disable_adapter():
            assert not torch.equal(before, assert_each_as_alone(target, assistant))


def test_a_target_whose_weights_lie_on_the_disk(tmp_path, target):
    """accelerate puts them into a layer while that computes."""
    offloaded = disk_offload(copy.deepcopy(target), tmp_path, execution_device="cpu", offload_buffers=False)
    assistant = DynSpecAssistant(perturbed(target), target=offloaded)
    output = assert_each_as_alone(offloaded, assistant)
    assert offloaded.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(output, assert_each_as_alone(target, DynSpecAssistant(perturbed(target), target=target)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_rounding_is_no_reason_to_refuse_a_target_in_16_bits(family, monkeypatch):
    """Keys are larger than values here, as in real models: attention over made-up keys and values would carry rounding
    errors on through all layers, far more than that over the model's own."""
    target = tiny(family, num_hidden_layers=6, layer_types=None)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith("k_norm.weight"):
                weight.fill_(20)
            elif name.endswith("v_proj.weight"):
                weight.mul_(0.1)
    target, generator = target.to(torch.bfloat16), torch.Generator().manual_seed(0)
    usual = fixed_decoder.round_attention_for

    def rounded_elsewhere(*arguments, **settings):
        attended = usual(torch.device("cpu"))(*arguments, **settings)
        return attended * (1 + 2**-8 * torch.randn(attended.shape, generator=generator).to(attended))

    monkeypatch.setattr(fixed_decoder, "round_attention_for", lambda device: rounded_elsewhere)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=8, do_sample=False)
    assert assistant.stats.lane == "fixed memory"


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_target_whose_numbers_fp16_cannot_hold(tree):
    """As Gemma 3's."""
    target = tiny().half()
    with torch.no_grad():
        target.get_output_embeddings().weight.fill_(6e4)
    with pytest.raises(UnsupportedError, match="computes NaN or infinity in torch"):
        assistant = DynSpecAssistant(perturbed(target), target=target, tree=tree)
        target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=8)


def test_the_targets_memory_is_not_taken_twice(target):
    decoder = FixedDecoder(target)._module
    for name, parameter in target.model.named_parameters():
        assert decoder.get_parameter(name) is parameter
    assert decoder.config is not target.config


# Bad inputs ----------------------------------------------------------------------------------------------------------


class Remembering(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "no prompt": ({"input_ids": None, "do_sample": True, "num_return_sequences": 2}, "pass input_ids"),
    "a streamer": ({"streamer": TextStreamer(word_tokenizer())}, "a streamer shows one text"),
    "healing": ({"token_healing": True, "tokenizer": word_tokenizer()}, "token_healing cannot be used in a batch"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores cannot be used in a batch"),
    "positions": ({"position_ids": torch.arange(30).expand(3, -1)}, "position_ids cannot be used in a batch"),
    "a prefix function": ({"prefix_allowed_tokens_fn": lambda text, ids: [7]}, "prefix_allowed_tokens_fn cannot be"),
    "a cache": ({CACHE: DynamicCache()}, f"{CACHE} cannot be used in a batch"),
    "a processor of a user": ({"logits_processor": LogitsProcessorList([Remembering()])}, "may keep a state"),
    "beams": ({"num_beams": 2}, "set num_beams=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_reason(case, target):
    arguments, reason = REFUSED[case]
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(UnsupportedError, match=reason):
        target.generate(**{**together(texts()), "assistant_model": assistant, "max_new_tokens": 4, **arguments})
    assert assistant.stats_total.rounds == 0


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.tensor([[1, 1, 1], [1, 1, 0]]), "pad at the left"),
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), "pad at the left"),
    ],
)
def test_padding_at_the_wrong_side(mask, reason, target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(UnsupportedError, match=reason):
        target.generate(prompt(3).expand(2, -1), attention_mask=mask, assistant_model=assistant)


def test_a_conversation_is_one_text(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(UnsupportedError, match="a conversation is not kept in a batch"):
        target.generate(**together(texts()), assistant_model=assistant.conversation(), max_new_tokens=4)


def test_a_target_whose_positions_change_with_the_text():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny("llama", rope_parameters=rope, max_position_embeddings=64)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(UnsupportedError, match="changes with the length of the text"):
        target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=4)


def test_a_target_that_cannot_read_fixed_memory(target, monkeypatch):
    """Its attention asks for biases by distance."""
    assistant = DynSpecAssistant(perturbed(target), target=target)
    real = type(target.model.layers[0].self_attn).forward

    def biased(self, *args, **kwargs):
        return real(self, *args, position_bias=torch.zeros(1), **kwargs)

    monkeypatch.setattr(type(target.model.layers[0].self_attn), "forward", biased)
    with pytest.raises(UnsupportedError, match="cannot read the texts of a batch in memory of fixed size"):
        target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=4)


def test_a_target_that_asks_for_the_length_of_its_cache_is_told_what_to_do():
    """Also one text in a static cache. What the message says works."""
    target = model_of("opt")
    assistant = DynSpecAssistant(perturbed(target), target=target)
    settings = {"max_new_tokens": 8, "do_sample": False}
    for arguments in (together(texts()), {"input_ids": prompt(), "cache_implementation": "static"}):
        with pytest.raises(UnsupportedError, match="once for each prompt, with cache_implementation unset") as caught:
            target.generate(**arguments, **settings, assistant_model=assistant)
        assert "position_ids" not in str(caught.value)
    output = target.generate(prompt(), **settings, assistant_model=assistant)
    assert torch.equal(output, target.generate(prompt(), **settings))


@pytest.mark.parametrize(
    ("family", "kind", "shape", "settings"),
    pairwise("families", ("llama", "gemma3", "gpt2"), ("independent", "eagle2"), list(SHAPES), list(WAYS.values())),
)
def test_under_autocast(family, kind, shape, settings):
    """Keys may be fp32 there, and values bf16. With clear preferences, so that rounding decides about no token."""
    target = tiny(family)
    drafter = perturbed(target) if kind == "independent" else drafter_of(random_head(kind), target)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    settings = {**settings, "max_new_tokens": 12, "do_sample": False}
    ids = torch.stack([prompt(seed=seed)[0] for seed in range(3)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = target.generate(ids, **settings, assistant_model=assistant)
        alone = target.generate(ids[:1], **settings, cache_implementation="static", assistant_model=assistant)
        assert torch.equal(output, target.generate(ids, **settings))
        assert torch.equal(alone, target.generate(ids[:1], **settings))
    outside = target.generate(ids, **settings, assistant_model=assistant)
    assert torch.equal(outside, target.generate(ids, **settings))


def test_an_assistant_that_is_bound_elsewhere(target):
    assistant = DynSpecAssistant(perturbed(target), target=tiny("llama", seed=3))
    DynSpecAssistant(perturbed(target), target=target)
    with pytest.raises(NotBoundError):
        target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=4)


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_an_interrupted_batch_leaves_the_assistant_usable(settings, target, monkeypatch):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    holder = text_by_text.TextByText if settings else Round
    real, rounds = holder._verify, itertools.count()

    def interrupted(self, *arguments):
        if next(rounds) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(holder, "_verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**together(texts()), assistant_model=assistant, max_new_tokens=40, **settings)
    assert_each_as_alone(target, assistant, **settings)
    assert_lane(assistant, settings)


def test_settings_in_a_configuration(target):
    assistant = DynSpecAssistant(perturbed(target), target=target)
    config = GenerationConfig(max_new_tokens=9, do_sample=True, num_return_sequences=3, pad_token_id=PAD)
    output = target.generate(prompt(), generation_config=config, assistant_model=assistant)
    assert output.shape == (3, 21)
