"""Verifications by traces of the target's decoder: what they return is the decoder's own, and they run only while the
decoder is what it was."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import FAMILIES, POLICY_CASES, VOCABULARY, perturbed, prompt, tiny
from transformers import DynamicCache, LogitsProcessor, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_dynspec import DynSpecAssistant, TreeConfig
from hf_dynspec.generation import traced_decoder
from hf_dynspec.generation.binding import forward_of
from hf_dynspec.generation.traced_decoder import TracedDecoder
from hf_dynspec.kernels import cpu

SHAPES = {"chain": False, "tree": TreeConfig(total_tokens=12, depth=3, top_k=3)}
TRACED_FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "phi", "cohere", "granite")


@pytest.fixture(autouse=True)
def small_targets_are_taken_apart(monkeypatch):
    assert cpu._kernels(), "a C++ compiler is needed, as targets are taken apart only where there is one"
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)


class Rounds:
    """How many forwards of several rows, after the first of a call, were left to the decoder, and how many were
    traced, each of which was compared with what the decoder does with the same inputs."""

    def __init__(self):
        self.eager = self.traced = 0

    def watch(self, run):
        def watching(decoder: TracedDecoder, inputs):
            own = copy.deepcopy(inputs["past_key_values"])
            outputs = run(decoder, inputs)
            if outputs is None:
                self.eager += inputs["input_ids"].shape[1] > 1
                return None
            self.traced += 1
            cache = inputs["past_key_values"]
            assert outputs.past_key_values is cache
            expected = decoder._model().get_decoder()(**{**inputs, "past_key_values": own})
            close(outputs.last_hidden_state, expected.last_hidden_state)
            states, own_states = outputs.hidden_states or (), expected.hidden_states or ()
            assert [one is None for one in states] == [one is None for one in own_states]
            for state, own_state in zip(states, own_states, strict=True):
                if state is not None:
                    close(state, own_state)
            for layer, own_layer in zip(cache.layers, own.layers, strict=True):
                close(layer.keys, own_layer.keys)
                close(layer.values, own_layer.values)
            return outputs

        return watching


def close(ours: torch.Tensor, own: torch.Tensor) -> None:
    """The same operations in the same order; the tolerance is for kernels that go by where in memory tensors begin."""
    torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-5)


@pytest.fixture
def rounds(monkeypatch) -> Rounds:
    counted = Rounds()
    monkeypatch.setattr(TracedDecoder, "run", counted.watch(TracedDecoder.run))
    return counted


def bound(target, shape: str = "chain", policy: str = "hybrid", drafter=None) -> DynSpecAssistant:
    drafter = perturbed(target) if drafter is None else drafter
    return DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=SHAPES[shape])


def generate(target, assistant=None, input_ids=None, **arguments):
    defaults = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": VOCABULARY - 1}
    input_ids = prompt() if input_ids is None else input_ids
    return target.generate(input_ids, assistant_model=assistant, **{**defaults, **arguments})


def assert_same(target, assistant, **arguments) -> None:
    assert torch.equal(generate(target, assistant, **arguments), generate(target, **arguments))


# What is traced ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TRACED_FAMILIES)
def test_what_a_trace_returns_is_the_decoders_own(family, attention, shape, rounds):
    target = tiny(family, attn_implementation=attention)
    assistant = bound(target, shape)
    rounds.eager = 0  # a small tree is verified before anything is traced
    assert_same(target, assistant, max_new_tokens=40)
    assert rounds.traced > 3 and rounds.eager == 0


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(TRACED_FAMILIES)))
def test_families_with_sliding_windows_and_those_that_split_by_sizes_are_not_traced(family, rounds):
    target = tiny(family)
    assert_same(target, bound(target))
    assert rounds.traced == 0 and rounds.eager > 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_the_hidden_states_that_a_head_reads(layout, shape, rounds):
    target = soft()
    assistant = bound(target, shape, drafter=drafter_of(agreeing_head(layout), target))
    rounds.eager = 0
    assert_same(target, assistant)
    assert rounds.traced > 3 and rounds.eager == 0


def test_two_assistants_that_read_different_states(rounds):
    target = soft()
    assistants = [bound(target, drafter=drafter_of(agreeing_head(layout), target)) for layout in ("eagle2", "eagle3")]
    for assistant in (*assistants, *assistants):
        assert_same(target, assistant)
    assert rounds.traced > 10 and len(forward_of(target)._traced_decoder._traces) == 2


def test_a_prompt_with_padding(rounds):
    target = tiny()
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[:, :4] = 0
    for shape in SHAPES:
        assert_same(target, bound(target, shape), attention_mask=mask)
    assert rounds.traced > 5


def test_the_callers_cache_and_what_else_is_returned(rounds):
    target = tiny()
    assistant = bound(target, policy="in_context")
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    first, own = generate(target, assistant, **wanted), generate(target, **wanted)
    for one, theirs in zip(first.scores, own.scores, strict=True):
        torch.testing.assert_close(one, theirs, rtol=1e-4, atol=1e-3)
    traced = rounds.traced
    assert traced > 3
    cache = first.past_key_values
    longer = torch.cat([first.sequences, prompt(3, seed=5)], dim=1)
    second = generate(target, assistant, input_ids=longer, past_key_values=cache, **wanted)
    assert second.past_key_values is cache and rounds.traced > traced
    assert torch.equal(second.sequences, generate(target, input_ids=longer))


def test_the_prompt_single_rows_and_many_rows_are_left_to_the_decoder(rounds, monkeypatch):
    target = tiny()
    assistant = bound(target)
    generate(target, assistant, max_new_tokens=1)
    assert rounds.traced == rounds.eager == 0
    monkeypatch.setattr(traced_decoder, "_MOST_ROWS", 2)
    assert_same(target, assistant)
    assert rounds.traced <= 1 and rounds.eager > 3


@pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
def test_what_else_is_asked_for_comes_from_the_decoder(wanted, rounds):
    target = tiny(attn_implementation="eager")
    arguments = {"return_dict_in_generate": True, wanted: True}
    theirs, own = generate(target, bound(target), **arguments), generate(target, **arguments)
    assert rounds.traced == 0 and rounds.eager > 3
    assert torch.equal(theirs.sequences, own.sequences)
    name = wanted.removeprefix("output_")
    for one, other in zip(theirs[name], own[name], strict=True):
        for state, own_state in zip(one, other, strict=True):
            torch.testing.assert_close(state, own_state, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["inputs_embeds", "token_type_ids", "cache_position", "something"])
def test_inputs_that_are_not_understood(name):
    target = tiny()
    bound_to = bound(target)
    cache = DynamicCache()
    target.get_decoder()(input_ids=prompt(), past_key_values=cache)
    inputs = {"input_ids": prompt(4), "past_key_values": cache, "use_cache": True}
    decoder = forward_of(target)._traced_decoder
    with torch.no_grad():
        assert decoder.run({**inputs, name: torch.zeros(1, 4)}) is None
        assert decoder.run({**inputs, "use_cache": False}) is None
        assert decoder.run({**inputs, "past_key_values": DynamicCache()}) is None
        assert decoder.run({**inputs, "past_key_values": DynamicCache(config=tiny("mistral").config)}) is None
        assert decoder.run({**inputs, "input_ids": prompt(4).expand(2, -1)}) is None
        assert cache.get_seq_length() == 12
        assert decoder.run({**inputs, name: None}) is not None
        assert cache.get_seq_length() == 16
    assert decoder.run(inputs) is None, "no gradients come out of a trace"
    del bound_to


# What has changed since ----------------------------------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """A layer with something added to it, as adapters come."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.layer = layer
        self.added = torch.nn.Parameter(torch.randn(layer.out_features, generator=torch.Generator().manual_seed(3)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden) + self.added


def layer_of(target):
    return target.model.layers[1]


def replace_parameter(target):
    projection = layer_of(target).mlp.down_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach() * -1.0)


def replace_storage(target):
    projection = layer_of(target).mlp.down_proj
    projection.weight.data = projection.weight.data * -1.0


def replace_buffer(target):
    target.model.rotary_emb.inv_freq = target.model.rotary_emb.inv_freq * 0.5


def replace_decoder(target):
    target.model = tiny(seed=4).model


# How a model may be changed after it was bound, so that it says something else, and the last two so that it does not.
CHANGES = {
    "hook": lambda target: layer_of(target).mlp.register_forward_hook(lambda module, args, out: out * -1.0),
    "hook before": lambda target: layer_of(target).mlp.register_forward_pre_hook(lambda module, args: -args[0]),
    "parameter": replace_parameter,
    "storage": replace_storage,
    "buffer": replace_buffer,
    "decoder": replace_decoder,
    "module": lambda target: setattr(layer_of(target).mlp, "down_proj", Adapter(layer_of(target).mlp.down_proj)),
    "module more": lambda target: target.model.layers.append(copy.deepcopy(target.model.layers[0])),
    "forward": lambda target: setattr(layer_of(target).mlp, "forward", lambda hidden: -hidden),
    "setting": lambda target: setattr(layer_of(target).self_attn, "scaling", 3.0),
    "class": lambda target: setattr(
        layer_of(target).mlp, "__class__", type("Other", (LlamaMLP,), {"forward": negated})
    ),
    "attention": lambda target: target.set_attn_implementation("eager"),
    "training": lambda target: target.train(),
}


def negated(self, hidden: torch.Tensor) -> torch.Tensor:
    return -self.down_proj(hidden.repeat(1, 1, 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_runs_itself(name, shape, rounds):
    target = tiny()
    drafter = perturbed(target)
    assistant = bound(target, shape, drafter=drafter)
    before = generate(target, assistant)
    traced = rounds.traced
    assert traced > 3
    CHANGES[name](target)
    if name == "module more":
        target.config.num_hidden_layers = 3
        target.model.layers[2].self_attn.layer_idx = 2
    after = generate(target, assistant)
    assert torch.equal(after, generate(target))
    assert rounds.traced == traced and rounds.eager > 1
    assert torch.equal(after, before) == (name in ("attention", "training"))


def test_what_is_listened_to_in_all_modules(rounds):
    target = tiny()
    assistant = bound(target)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert_same(target, assistant)
        assert rounds.traced == 0
    finally:
        handle.remove()
    assert_same(target, assistant)
    assert rounds.traced > 3


def test_a_method_replaced_for_all_models(rounds, monkeypatch):
    target = tiny()
    assistant = bound(target)
    before = generate(target, assistant)
    traced, forward = rounds.traced, LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: -forward(self, hidden))
    after = generate(target, assistant)
    assert torch.equal(after, generate(target)) and not torch.equal(after, before)
    assert rounds.traced == traced > 3


def test_a_hook_added_in_the_middle_of_a_call(rounds):
    """As each use of the trace is preceded by a look."""
    target = tiny()
    assistant = bound(target)

    class Adding(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not layer_of(target).mlp._forward_hooks and rounds.traced == 2:
                layer_of(target).mlp.register_forward_hook(lambda module, args, out: None)
            return scores

    generate(target, assistant, logits_processor=[Adding()])
    assert rounds.traced == 2 and rounds.eager > 1


def test_a_hook_that_goes_away_and_states_that_are_recorded(rounds):
    target = tiny()
    assistant = bound(target)
    handle = CHANGES["hook"](target)
    assert_same(target, assistant)
    assert rounds.traced == 0
    handle.remove()
    target(prompt(), output_hidden_states=True, output_attentions=False)
    assert_same(target, assistant)
    assert rounds.traced > 3


def test_weights_changed_in_place_are_heard(rounds):
    target = tiny()
    assistant = bound(target)
    before = generate(target, assistant)
    traced = rounds.traced
    with torch.no_grad():
        layer_of(target).mlp.down_proj.weight.mul_(-1.0)
        target.model.rotary_emb.inv_freq.mul_(0.5)
    after = generate(target, assistant)
    assert torch.equal(after, generate(target)) and not torch.equal(after, before)
    assert rounds.traced > traced > 3


# What is not traced at all -------------------------------------------------------------------------------------------


def assert_never_traced(target, rounds) -> None:
    assert_same(target, bound(target))
    assert rounds.traced == 0 and rounds.eager > 1


@pytest.mark.parametrize("name", ["hook", "module", "forward", "class", "training"])
def test_models_that_were_changed_before_they_were_bound(name, rounds):
    target = tiny()
    drafter = perturbed(target)
    CHANGES[name](target)
    assert_same(target, bound(target, drafter=drafter))
    assert rounds.traced == 0 and rounds.eager > 1


def test_a_rotary_embedding_that_changes_with_the_length(rounds):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert_never_traced(tiny(rope_parameters=rope, max_position_embeddings=20), rounds)


BRANCHES = {
    "on a number in a tensor": lambda hidden: hidden * 2.0 if hidden[0, 0, 0] > 0 else hidden,
    "on the number of rows": lambda hidden: hidden * 2.0 if hidden.shape[1] > 3 else hidden,
    "as many times as there are rows": lambda hidden: torch.stack(list(hidden[0])).unsqueeze(0),
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_forwards_that_branch(branch, rounds, monkeypatch):
    """Agreement with a few examples does not tell that it would agree with all."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: BRANCHES[branch](forward(self, hidden)))
    monkeypatch.setattr(traced_decoder, "_agrees", lambda *_: True)
    target = tiny()
    bound_to = bound(target)
    assert list(forward_of(target)._traced_decoder._traces.values()) == [None]
    generate(target, bound_to)
    assert rounds.traced == 0


def test_forwards_that_say_something_else_each_time(monkeypatch):
    """What Python counts is a constant in the trace, and nothing warns of it."""
    target = tiny()
    traced = TracedDecoder(target)
    traced.prepare(False)
    assert traced._traces[False] is not None
    calls, forward = [], LlamaMLP.forward
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, hidden: (calls.append(1), forward(self, hidden) * len(calls))[1]
    )
    traced = TracedDecoder(target)
    traced.prepare(False)
    assert traced._traces == {False: None}


@pytest.mark.parametrize(("experts", "is_traced"), [("eager", False), ("grouped_mm", True)])
def test_a_mixture_of_experts_is_traced_only_where_the_choice_is_in_the_operations(experts, is_traced, rounds):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=16,
        max_position_embeddings=512,
        experts_implementation=experts,
    )
    target = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    target.generation_config.pad_token_id = 0
    assert_same(target, bound(target))
    assert (rounds.traced > 3) == is_traced


# Sharing -------------------------------------------------------------------------------------------------------------


def test_two_threads_on_one_trace(rounds):
    target = tiny()
    prompts = [prompt(10 + seed, seed) for seed in range(6)]
    expected = [generate(target, input_ids=one) for one in prompts]
    assistants = [bound(target), bound(target, "tree")]
    together = threading.Barrier(2)

    def run(index: int) -> list[torch.Tensor]:
        together.wait(timeout=60)
        return [generate(target, assistants[index], one) for one in prompts]

    with ThreadPoolExecutor(2) as pool:
        for outputs in pool.map(run, range(2), timeout=200):
            assert all(torch.equal(one, own) for one, own in zip(outputs, expected, strict=True))
    assert rounds.traced > 30 and len(forward_of(target)._traced_decoder._traces) == 1


def test_a_trace_lives_no_longer_than_the_model_and_the_assistants_that_are_bound_to_it():
    target = tiny()
    assistant = bound(target)
    generate(target, assistant)
    decoder = weakref.ref(forward_of(target)._traced_decoder)
    weight = weakref.ref(layer_of(target).mlp.down_proj.weight)
    assistant.unbind()
    gc.collect()
    assert decoder() is None
    assistant.bind(target)
    generate(target, assistant)
    model = weakref.ref(target)
    del target
    gc.collect()
    assert model() is None and weight() is None
