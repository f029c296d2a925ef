"""What was learnt stands in the drafter's place while it has earned that, and the drafter's own weights come back."""

import copy
import gc
import warnings

import peft
import pytest
import torch
from aligned import QUICK, digest, generated, quick_assistant, stream, taught
from eagle_heads import agreeing_head, drafter_of, soft
from models import perturbed, tiny

from hf_dynspec import ConfigurationError, DynSpecAssistant, OnlineAlignment

# What is served ------------------------------------------------------------------------------------------------------


def test_what_is_learnt_is_served_when_it_has_earned_that(target, drafter):
    own = digest(drafter)
    assistant = quick_assistant(drafter, target, gate=True, gate_least=4)
    for index in range(5):
        assert digest(drafter) == own, "served before four requests were scored"
        generated(target, assistant, index % 3)
    stats = assistant.alignment.stats
    assert stats.acceptance_after > stats.acceptance_before
    assert stats.is_served and stats.kept == 1 and digest(drafter) != own


@pytest.mark.parametrize("learning_rate", [0.3, 3.0])
def test_a_learning_rate_that_is_far_too_high_is_never_served(learning_rate, target):
    """The drafter is the target itself, so that every change is for the worse."""
    drafter = copy.deepcopy(target)
    own = digest(drafter)
    assistant = quick_assistant(drafter, target, gate=True, learning_rate=learning_rate)
    for index in range(14):
        generated(target, assistant, index)
        assert digest(drafter) == own
    stats = assistant.alignment.stats
    assert stats.kept == 0 and stats.updates == 14
    assert stats.rolled_back >= 1, "what was learnt was hopeless, and was given up"


def test_numbers_that_are_none_are_never_served(target, drafter):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))
    state = assistant.alignment.state_dict()
    assert state["adapters"]["default"]["updates"] == 0
    stream(target, assistant, 1)
    for parameter in assistant.alignment.learner._trained.values():
        parameter.data.fill_(torch.inf)
    generated(target, assistant)
    assert digest(drafter) == own


@pytest.mark.parametrize("change", ["in place", "loaded"])
def test_a_drafter_that_somebody_changes_is_learnt_anew(change, target, drafter):
    assistant = taught(2, drafter, target)
    if change == "in place":
        assistant.alignment.reset()
        with torch.no_grad():
            drafter.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    else:
        drafter.load_state_dict(perturbed(target, 0.2, seed=5).state_dict())
    changed = copy.deepcopy(drafter)
    with pytest.warns(UserWarning, match="weights were changed"):
        stream(target, assistant, 1)
    stream(target, assistant, 1)
    assistant.alignment.reset()
    for name, one in drafter.named_parameters():
        assert torch.equal(one, changed.get_parameter(name)), name


@pytest.mark.parametrize("change", ["in place", "another parameter", "cast"])
@pytest.mark.parametrize("taken_up_by", ["bind", "set_adapter", "load_state_dict", "load"])
def test_a_drafter_that_somebody_changes_is_not_drafted_with_what_was_learnt_before(
    taken_up_by, change, target, drafter, tmp_path
):
    assistant = quick_assistant(drafter, target)
    alignment = assistant.alignment
    stream(target, assistant, 2)
    state = alignment.state_dict()
    alignment.save_pretrained(tmp_path)
    alignment.add_adapter("law")
    alignment.reset() if taken_up_by.startswith("load") else alignment.set_adapter("law")
    if taken_up_by == "bind":
        alignment.set_adapter("default")
        assistant.unbind()
    projection = drafter.model.layers[0].self_attn.q_proj
    if change == "in place":
        with torch.no_grad():
            projection.weight.mul_(1.5)
    elif change == "another parameter":
        projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.5)
    else:
        drafter.to(torch.bfloat16)
    changed = digest(drafter)
    with pytest.warns(UserWarning, match="learning begins anew"):
        if taken_up_by == "bind":
            assistant.bind(target)
            assert digest(drafter) == changed
        elif taken_up_by == "set_adapter":
            alignment.set_adapter("default")
            assert digest(drafter) == changed
        elif taken_up_by == "load_state_dict":
            alignment.load_state_dict(state)
        else:
            alignment.load(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the drafter's weights")
        stream(target, assistant, 1)
    assert digest(drafter) != changed and len({one.dtype for one in drafter.parameters()}) == 1
    assistant.unbind()
    assert digest(drafter) == changed


def test_a_drafter_that_is_cast_while_others_weights_stand_in_it(target, drafter):
    own = {name: one.detach().clone() for name, one in drafter.named_parameters()}
    assistant = taught(2, drafter, target)
    drafter.double()
    assistant.alignment.reset()
    for name, one in drafter.named_parameters():
        assert torch.equal(one, own[name].double()), name
    with pytest.warns(UserWarning, match="weights were changed"):
        stream(target, assistant, 1)


@pytest.mark.parametrize("end", ["unbind", "del", "another drafter", "alignment error"])
def test_the_drafter_gets_its_own_weights_back(end, target, drafter, monkeypatch):
    own = digest(drafter)
    assistant = taught(2, drafter, target)
    assert digest(drafter) != own
    if end == "unbind":
        assistant.unbind()
    elif end == "del":
        del assistant
        gc.collect()
    elif end == "another drafter":
        other = perturbed(target, 0.3, seed=3)
        others = digest(other)
        assistant.drafter = other
        stream(target, assistant, 2)
        assert digest(other) != others
    else:
        monkeypatch.setattr(assistant.alignment.learner, "weights", lambda: 1 / 0)
        with pytest.warns(UserWarning, match="alignment failed"):
            generated(target, assistant)
    assert digest(drafter) == own


@pytest.mark.parametrize("kind", ["causal", "eagle3"])
def test_a_drafter_can_be_trained_after_its_assistant_was_dropped_in_inference_mode(kind, drafter):
    target = tiny() if kind == "causal" else soft()
    drafter = drafter if kind == "causal" else drafter_of(agreeing_head(kind), target)
    module = drafter if kind == "causal" else drafter.module
    own = digest(module)
    with torch.inference_mode():
        assistant = quick_assistant(drafter, target)
        generated(target, assistant)
        assert digest(module) != own
        del assistant
        gc.collect()
    assert digest(module) == own
    assert not any(one.is_inference() for one in module.parameters())


def test_binding_again_serves_again(target, drafter):
    assistant = taught(2, drafter, target)
    learnt = digest(drafter)
    assistant.unbind()
    assert digest(drafter) != learnt
    assistant.bind(target)
    assert digest(drafter) == learnt


def test_copies_of_an_assistant_share_what_is_learnt(target, drafter):
    own = digest(drafter)
    assistant = quick_assistant(drafter, target)
    twin = copy.deepcopy(assistant)
    assert twin.alignment is assistant.alignment
    stream(target, twin, 2)
    assistant.unbind()
    assert digest(drafter) != own, "the copy still drafts with it"
    twin.unbind()
    assert digest(drafter) == own


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_copy_that_gets_another_drafter_leaves_the_others_what_they_learn(is_bound, target, drafter):
    own = digest(drafter)
    settings = OnlineAlignment(**QUICK)
    assistant = DynSpecAssistant(drafter, "full", target=target if is_bound else None, alignment=settings)
    twin = copy.deepcopy(assistant)
    if is_bound:
        stream(target, assistant, 2)
    learnt = digest(drafter)
    twin.drafter = perturbed(target, 0.3, seed=3)
    assert twin.alignment is not assistant.alignment and digest(drafter) == learnt
    stream(target, assistant.bind(target), 2)
    assert assistant.alignment.stats.requests == (4 if is_bound else 2) and digest(drafter) != own
    assistant.unbind()
    assert digest(drafter) == own


def test_a_drafter_that_is_refused_leaves_everything_as_it_was(target, drafter):
    assistant = taught(2, drafter, target)
    learnt, alignment = digest(drafter), assistant.alignment
    with pytest.raises(ConfigurationError, match="target's too"):
        assistant.drafter = target
    assert digest(drafter) == learnt and assistant.alignment is alignment
    stream(target, assistant, 1)
    assert alignment.stats.updates == 3


def test_an_adapter_that_somebody_injects_ends_learning_and_not_generation(target, drafter):
    own = {id(one): one.detach().clone() for one in drafter.parameters()}
    assistant = taught(2, drafter, target)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), drafter, "one")
    with pytest.warns(UserWarning, match="merge_and_unload"):
        generated(target, assistant)
    assert "adapters of peft" in assistant.alignment.stats.error
    stream(target, assistant, 2)
    for parameter in drafter.parameters():
        assert id(parameter) not in own or torch.equal(parameter, own[id(parameter)])
