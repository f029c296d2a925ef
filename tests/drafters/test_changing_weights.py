"""Users adapt weights: the next round drafts with what is there, and the output stays the target's own."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import accelerate
import peft
import pytest
import torch
from calls import assert_same, generate
from eagle_heads import LAYOUTS, random_head
from models import POLICY_CASES, perturbed, prompt, random_router, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, EagleDrafter, RouterShortlist, TreeConfig, UnsupportedError
from hf_dynspec.drafters import CausalLMDrafter, traced_step
from hf_dynspec.drafters.weights_watch import WeightsWatch
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.kernels import cpu

TREE = TreeConfig(20, 2, 5)
POLICIES = ("full", "hybrid", "router", "in_context", "frequency")


@pytest.fixture(autouse=True)
def no_traces(monkeypatch) -> None:
    """As in a new process: others that ran before may have made as many as there can be."""
    monkeypatch.setattr(traced_step, "_traces", {})


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def drafter(target) -> PreTrainedModel:
    return perturbed(target)


def greedy(target, assistant=None, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 20, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(), **named | arguments)


def lora(seed: int = 0, **settings) -> peft.LoraConfig:
    torch.manual_seed(seed)
    everything = {"target_modules": "all-linear", "r": 4, "lora_alpha": 32, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **everything | settings)


def scores_of(assistant: DynSpecAssistant) -> torch.Tensor:
    """What the drafter makes of a text: the scores of a tree of the likeliest tokens."""
    return assistant.draft_round(prompt(20, seed=3)).scores


def inject(model, **settings):
    peft.inject_adapter_in_model(lora(**settings), model, "one")


@torch.no_grad()
def in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.3)


def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.7)


@torch.no_grad()
def head_in_place(model):
    model.get_output_embeddings().weight.mul_(0.5).add_(torch.randn(301, 32) * 0.1)


@torch.no_grad()
def one_row_of_the_head(model):
    model.get_output_embeddings().weight[7] = 3.0


def loaded(model, assign: bool = False):
    model.load_state_dict(perturbed(model, 0.5, seed=5).state_dict(), assign=assign)


def replaced_layer(model):
    model.model.layers[0] = perturbed(model, 0.5, seed=6).model.layers[0]


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "adapters injected": inject,
    "an adapter in the head": lambda model: inject(model, target_modules=["lm_head"]),
    "in place": in_place,
    "through .data": through_data,
    "the head in place": head_in_place,
    "one row of the head": one_row_of_the_head,
    "a state loaded": loaded,
    "a state assigned": lambda model: loaded(model, assign=True),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "a layer replaced": replaced_layer,
    "the head replaced": lambda model: model.set_output_embeddings(perturbed(model, 0.5, seed=6).lm_head),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_drafter_that_changes_between_calls(name, policy, target, drafter):
    make = POLICY_CASES[policy]
    assistant = DynSpecAssistant(drafter, make(), target=target, tree=TREE)
    expected = greedy(target)
    greedy(target, assistant)
    before = scores_of(assistant)
    CHANGES[name](drafter)
    after = scores_of(assistant)
    fresh = DynSpecAssistant(copy.deepcopy(drafter), make(), target=target, tree=TREE)
    torch.testing.assert_close(after, scores_of(fresh))
    # One row may be on no shortlist of the text.
    assert name == "one row of the head" or after.shape != before.shape or not torch.allclose(after, before)
    for one in (assistant, fresh):
        assert torch.equal(greedy(target, one), expected)
    assert assistant.stats.to_dict() == fresh.stats.to_dict()


def test_adapters_that_are_switched_disabled_and_merged(target, drafter):
    """Each state drafts as a new assistant on a copy in that state does."""
    model = peft.get_peft_model(drafter, lora(1, target_modules=["q_proj", "v_proj", "lm_head"]), adapter_name="one")
    model.add_adapter("two", lora(2))
    assistant = DynSpecAssistant(model, POLICY_CASES["hybrid"](), target=target, tree=TREE)

    def look(change: Callable[[], Any]) -> torch.Tensor:
        change()
        twin = DynSpecAssistant(copy.deepcopy(model), POLICY_CASES["hybrid"](), target=target, tree=TREE)
        scores = scores_of(assistant)
        torch.testing.assert_close(scores, scores_of(twin))
        assert torch.equal(greedy(target, assistant), greedy(target))
        return scores

    def scale() -> None:
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("one", 0.25)

    one, two = look(lambda: None), look(lambda: model.set_adapter("two"))
    with model.disable_adapter():
        none = look(lambda: None)
    again = look(lambda: model.set_adapter("one"))
    merged, unmerged = look(model.base_model.merge_adapter), look(model.base_model.unmerge_adapter)
    torch.testing.assert_close(one, again)
    for same in (merged, unmerged):
        torch.testing.assert_close(one, same, rtol=1e-3, atol=1e-3)
    for other in (two, none, look(scale)):
        assert one.shape != other.shape or not torch.allclose(one, other, atol=1e-2)


@pytest.mark.parametrize("name", ["in place", "the head in place", "adapters injected", "a state assigned"])
def test_a_drafter_that_changes_in_the_middle_of_a_call(name, target, drafter, monkeypatch):
    """The round after the change drafts with what is there, from the first token on: its cache is computed anew."""
    drafts, draft = [], DraftSession.draft_chain

    def changing(self, prefix, *args, **kwargs):
        if len(drafts) == 2:
            CHANGES[name](drafter)
        candidates = draft(self, prefix, *args, **kwargs)
        drafts.append((prefix.clone(), candidates))
        return candidates

    monkeypatch.setattr(DraftSession, "draft_chain", changing)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert torch.equal(greedy(target, assistant), greedy(target))
    prefix, candidates = drafts[2]
    text = torch.cat([prefix, candidates.token_ids])
    with torch.no_grad():
        expected = drafter(text[None]).logits[0, prefix.shape[0] - 1 : -1]
    torch.testing.assert_close(torch.stack(candidates.logits), expected, rtol=1e-4, atol=1e-4)


def test_a_conversation_goes_on_with_what_is_there(target, drafter):
    conversation = DynSpecAssistant(drafter, "full", target=target).conversation()
    text = greedy(target, conversation)
    in_place(drafter)
    more = torch.cat([text, prompt(4, seed=8)], dim=1)
    assert_same(target, conversation, more, max_new_tokens=10)
    fresh = DynSpecAssistant(copy.deepcopy(drafter), "full", target=target)
    generate(target, fresh, more, max_new_tokens=10)
    assert conversation.stats.accepted == fresh.stats.accepted


def test_a_router_follows_the_rows_that_it_holds_in_blocks(target, drafter):
    """All of them, so that nothing is left out."""
    policies = (RouterShortlist(random_router(), max_clusters=12, schedule="fixed"), "full")
    assistants = [DynSpecAssistant(drafter, policy, target=target, tree=TREE) for policy in policies]
    for change in (head_in_place, one_row_of_the_head, through_data):
        change(drafter)
        torch.testing.assert_close(*map(scores_of, assistants))


# EAGLE heads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["every tensor", "one row", "the target's head", "the target's embedding"])
def test_an_eagle_head_whose_weights_change(what, layout, tmp_path):
    target = tiny(num_hidden_layers=4)
    random_head(layout).write(tmp_path)
    eagle = EagleDrafter.from_pretrained(tmp_path, target=target)
    checkpoint = eagle.checkpoint
    tree = TREE
    assistant = DynSpecAssistant(eagle, POLICY_CASES["hybrid"](), target=target, tree=tree)
    greedy(target, assistant)
    before = scores_of(assistant)
    with torch.no_grad():
        if what == "every tensor":
            for tensor in checkpoint.tensors.values():
                if tensor.is_floating_point():
                    tensor.mul_(1.2)
        elif what == "one row":
            checkpoint.tensors["fc.weight"][3] += 1.0
        elif what == "the target's head":
            target.get_output_embeddings().weight.mul_(1.5)
        else:
            target.get_input_embeddings().weight.mul_(1.5)
    after = scores_of(assistant)
    fresh = DynSpecAssistant(EagleDrafter(checkpoint, target), POLICY_CASES["hybrid"](), target=target, tree=tree)
    torch.testing.assert_close(after, scores_of(fresh))
    assert after.shape != before.shape or not torch.allclose(after, before)
    assert torch.equal(greedy(target, assistant), greedy(target))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_eagle_head_follows_the_targets_dtype(dtype, layout, tmp_path):
    target = tiny(num_hidden_layers=4)
    random_head(layout).write(tmp_path)
    eagle = EagleDrafter.from_pretrained(tmp_path, target=target)
    for tree in (False, TREE):
        assistant = DynSpecAssistant(eagle, POLICY_CASES["hybrid"](), target=target.float(), tree=tree)
        conversation = assistant.conversation()
        for one in (assistant, conversation):
            greedy(target, one)
        target.to(dtype)
        for one in (assistant, conversation, assistant):
            output = greedy(target, one)
            assert dtype == torch.bfloat16 or torch.equal(output, greedy(target))
            assert one.stats.drafted > 0
    wrapped = peft.get_peft_model(target, lora())
    eagle = EagleDrafter.from_pretrained(tmp_path, target=wrapped)
    assert eagle._target() is target


# Targets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGES)
def test_a_target_that_changes_between_calls(name, target, drafter, monkeypatch):
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target)
    before = greedy(target)
    assert torch.equal(greedy(target, assistant), before)
    CHANGES[name](target)
    expected = greedy(target)
    output = greedy(target, assistant)
    if name in ("half", "bfloat16"):
        assert output.shape == expected.shape
        return
    assert torch.equal(output, expected)


def cap(target):
    target.config.final_logit_softcapping = 0.5


def scale(target):
    target.logit_scale = -1.0


def divisor(target):
    target.config.logits_scaling = -1.0


def bias_through_data(target):
    target.lm_head.bias.data = torch.randn(301, generator=torch.Generator().manual_seed(0)) * 3


def other_class(target):
    class Contrary(type(target)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.logits = -outputs.logits
            return outputs

    target.__class__ = Contrary


@pytest.mark.parametrize(
    ("change", "family"),
    [(cap, "gemma2"), (scale, "cohere"), (divisor, "granite"), (bias_through_data, "phi"), (other_class, "llama")],
)
def test_what_a_target_makes_of_its_projection_changes_between_calls(change, family, compiled_kernels, monkeypatch):
    """The faster product with a large head says what the model says, as it is in the call."""
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    greedy(target, assistant)
    assert assistant.forward._head.fast(target) is not None
    change(target)
    asked = {"return_dict_in_generate": True, "output_logits": True}
    expected, output = greedy(target, **asked), greedy(target, assistant, **asked)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.cat(output.logits), torch.cat(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_peft_models_in_either_role(tree, target, drafter):
    """The wrapper's own `generate` ends in the model's, which is the one that is bound."""
    model = peft.get_peft_model(target, lora(3)).eval()
    assistant = DynSpecAssistant(peft.get_peft_model(drafter, lora(4, r=2)).eval(), target=model, tree=tree)
    arguments = {"input_ids": prompt(), "max_new_tokens": 20, "do_sample": False}
    for adapted in (nullcontext(), model.disable_adapter()):
        with adapted:
            assert torch.equal(model.generate(**arguments, assistant_model=assistant), model.generate(**arguments))
        assert assistant.stats.rounds > 0
    assert assistant.target is model.get_base_model()


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_compiled_wrappers_in_either_role(tree, target, drafter):
    compiled, other = (torch.compile(model, backend="eager") for model in (target, drafter))
    assistant = DynSpecAssistant(other, target=compiled, tree=tree)
    assert_same(compiled, assistant)
    assert assistant.stats.accepted > 0


VIRTUAL = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P_TUNING": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens_are_refused_by_name(kind, target, drafter):
    """When they are bound, in either role, and when they come after binding."""
    assistant = DynSpecAssistant(drafter, target=target)
    model = peft.get_peft_model(target, VIRTUAL[kind]()).eval()
    other = peft.get_peft_model(tiny(), VIRTUAL[kind]())
    for refused in (
        lambda: DynSpecAssistant(drafter, target=model),
        lambda: DynSpecAssistant(other, target=tiny()),
        lambda: model.generate(input_ids=prompt(), max_new_tokens=4, do_sample=False, assistant_model=assistant),
    ):
        with pytest.raises(UnsupportedError, match=rf"{kind}.*virtual tokens"):
            refused()


# The watch and the trace ---------------------------------------------------------------------------------------------


def test_the_watch_sees_no_change_where_there_is_none(drafter):
    watch = WeightsWatch(drafter, samples=True)
    drafter(prompt())
    assert not watch.has_changed()
    for change in (one_row_of_the_head, through_data, loaded, inject):
        change(drafter)
        assert watch.has_changed(), change
        assert not watch.has_changed(), change


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "default"])
def test_a_forward_is_no_change(rope, target):
    """Some rotary embeddings write into their buffers in every forward; a cache that is thrown away in every round
    would be read again in every round."""
    settings: dict = {"rope_type": rope, "rope_theta": 1e4}
    if rope == "longrope":
        settings |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
        settings |= {"original_max_position_embeddings": 24}
    elif rope == "dynamic":
        settings |= {"factor": 4.0}
    drafter = tiny(seed=4, rope_parameters=settings, max_position_embeddings=512 if rope != "dynamic" else 16)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    greedy(target, assistant)
    version = assistant.drafter.weights_version
    assert torch.equal(greedy(target, assistant, max_new_tokens=40), greedy(target, max_new_tokens=40))
    assert assistant.drafter.weights_version == version


def test_weights_that_accelerate_keeps_elsewhere(target, drafter):
    """They are there in a forward alone."""
    accelerate.cpu_offload(drafter, execution_device=torch.device("cpu"))
    assert next(drafter.parameters()).device.type == "meta"
    for tree in (False, True):
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, tree=tree)
        version = assistant.drafter.weights_version
        assert torch.equal(greedy(target, assistant), greedy(target))
        assert assistant.stats.accepted > 0 and assistant.drafter.weights_version == version
    accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    assistant = DynSpecAssistant(tiny(seed=2), POLICY_CASES["hybrid"](), target=target, tree=True)
    assert torch.equal(greedy(target, assistant), greedy(target))


def test_models_of_one_architecture_share_a_trace():
    """Weights are its inputs, so it says of each model what that model says."""
    target = tiny()
    for seed in range(3):
        model = tiny(seed=seed)
        assistant = DynSpecAssistant(model, "full", target=target)
        assert assistant.drafter.step is not None
        greedy(target, assistant)
    assert len(traced_step._traces) == 1
    DynSpecAssistant(tiny("phi"), target=target)
    assert len(traced_step._traces) == 2


def test_a_vocabulary_may_be_smaller_than_what_is_compared(target):
    """On a GPU an id that a vocabulary does not have ends all work of the process, and not only the trace."""
    assert CausalLMDrafter(tiny(vocabulary=14)).step is not None


@pytest.mark.parametrize("kind", ["adapters", "hook"])
def test_steps_are_traced_again_when_adapters_or_a_hook_are_gone(kind, target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target)
    assert assistant.drafter.step is not None
    if kind == "adapters":
        take_away = peft.get_peft_model(drafter, lora()).merge_and_unload
    else:
        take_away = drafter.model.layers[0].register_forward_hook(lambda *args: None).remove
    scores_of(assistant)
    assert assistant.drafter.step is None
    take_away()
    scores_of(assistant)
    assert assistant.drafter.step is not None


def test_traces_hold_no_weights(target):
    """torch keeps what is traced for ever, so that it must not be a model."""
    drafter = tiny(seed=11, intermediate_size=72)  # an architecture that no other test has
    weights = [weakref.ref(one) for one in drafter.parameters()]
    assistant = DynSpecAssistant(drafter, target=target)
    assert assistant.drafter.step is not None
    greedy(target, assistant)
    del assistant, drafter
    gc.collect()
    assert not any(one() is not None for one in weights)


def test_a_change_that_could_not_be_taken_up_is_not_forgotten(target):
    drafter = tiny("gpt2", seed=3)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    greedy(target, assistant)
    drafter.set_output_embeddings(perturbed(drafter, 0.5, seed=6).get_output_embeddings())
    drafter.train()
    with pytest.raises(UnsupportedError, match=r"eval\(\)"):
        greedy(target, assistant)
    drafter.eval()
    fresh = DynSpecAssistant(copy.deepcopy(drafter), "full", target=target)
    assert torch.equal(greedy(target, assistant), greedy(target, fresh))
    assert assistant.stats.to_dict() == fresh.stats.to_dict()


@pytest.mark.parametrize("policy", ["full", "hybrid"])
@pytest.mark.parametrize("resized", ["drafter", "target", "both"])
def test_embeddings_that_are_resized_to_fewer_rows_ask_for_another_binding(resized, policy):
    target = tiny()
    drafter = perturbed(target)
    assistant = DynSpecAssistant(drafter, policy, target=target)
    for name, model in (("drafter", drafter), ("target", target)):
        if resized in (name, "both"):
            model.resize_token_embeddings(250)
    text, arguments = prompt() % 240, {"max_new_tokens": 20, "do_sample": False}
    with pytest.raises(UnsupportedError, match=r"score 250 token ids .*bind\(target\) again"):
        target.generate(text, assistant_model=assistant, **arguments)
    assistant.bind(target)
    output = target.generate(text, assistant_model=assistant, **arguments)
    assert torch.equal(output, target.generate(text, **arguments)) and assistant.stats.drafted
