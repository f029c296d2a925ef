"""Updates when the buffer is full, as EvoSpec has them: what fills it, and when it is learnt from and cleared."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from aligned import LORA, generated, made_up_request, recorded
from drafters import LAYERS, drafter_named
from models import perturbed, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, OnlineAlignment
from hf_dynspec.alignment import FillingBuffer, Learner, Trajectory, choose_places, loss_of
from hf_dynspec.drafters import Drafter

NEW_TOKENS = 24


def assistant_for(target: PreTrainedModel, **settings) -> DynSpecAssistant:
    settings = OnlineAlignment(**{"update_at": "full_buffer", "gate": False} | settings)
    return DynSpecAssistant(perturbed(target, 0.3), "full", target=target, alignment=settings)


def generate(target: PreTrainedModel, assistant: DynSpecAssistant, requests: int) -> None:
    for _ in range(requests):
        generated(target, assistant, max_new_tokens=NEW_TOKENS)


def places(assistant: DynSpecAssistant) -> int:
    return sum(one.places for one in recorded(assistant))


def drafted(drafter: Drafter) -> Trajectory:
    """A request of which all verified tokens but the first could have been drafted."""
    trajectory = made_up_request(drafter)
    tokens = trajectory.token_ids[trajectory.first :]
    shortlist = trajectory.shortlist_ids[trajectory.shortlist_ids != tokens[0]]
    return replace(trajectory, shortlist_ids=torch.cat([tokens[tokens != tokens[0]], shortlist]).unique())


# What is learnt from -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_places_of_one_request_weigh_alike_wherever_it_is_cut(kind):
    target = tiny(num_hidden_layers=LAYERS)
    drafter, settings = drafter_named(kind, target), replace(LORA, fill="gate", align_threshold=0.0)
    whole = choose_places(drafter, drafted(drafter), settings)
    buffer = FillingBuffer(capacity=whole.places - 1)
    buffer.add(whole)
    (most,), (one,) = buffer.take(), buffer.take()
    assert (most.places, one.places) == (whole.places - 1, 1)
    expected = loss_of(drafter, whole, settings).detach()
    losses = torch.stack([loss_of(drafter, part, settings) for part in (most, one)])
    weights = torch.tensor([most.places, one.places]) / whole.places
    torch.testing.assert_close((losses * weights).sum(), expected)
    assert Learner(drafter, settings).step([most, one]) == pytest.approx(float(expected), rel=1e-5)


def test_the_gate_passes_what_was_rejected_or_diverges_and_could_be_drafted(target):
    drafter = drafter_named("llama", target)
    trajectory = drafted(drafter)
    tokens = trajectory.token_ids[trajectory.first :]
    could = tokens != tokens[0]
    rejected = could & trajectory.is_wrong
    assert 0 < int(rejected.sum()) < int(could.sum()) < tokens.shape[0]
    for threshold, expected in ((0.0, could), (1e3, rejected)):
        settings = replace(LORA, fill="gate", align_threshold=threshold)
        assert torch.equal(choose_places(drafter, trajectory, settings).is_chosen, expected)
    nothing = replace(trajectory, shortlist_ids=trajectory.shortlist_ids[:0])
    assert choose_places(drafter, nothing, settings) is None
    assert choose_places(drafter, trajectory, LORA) is trajectory
    assert choose_places(drafter, trajectory, replace(LORA, update_at="full_buffer")).places == tokens.shape[0]


# In real calls -------------------------------------------------------------------------------------------------------


def test_an_update_is_made_whenever_so_many_places_have_come_together(target):
    """Every verified token of a request is a place, and a call of 24 tokens verifies 24."""
    assistant = assistant_for(target, buffer=32)
    seen = []
    for _ in range(5):
        generate(target, assistant, 1)
        seen.append((assistant.alignment.stats.updates, places(assistant)))
    assert seen == [(0, 24), (1, 16), (2, 8), (3, 0), (3, 24)]
    assert assistant.alignment.stats.requests == 5


def test_a_request_may_fill_it_several_times(target):
    assistant = assistant_for(target, buffer=10)
    generate(target, assistant, 1)
    assert (assistant.alignment.stats.updates, places(assistant)) == (2, 4)
    assert assistant.alignment.update_now() > 0
    assert (assistant.alignment.stats.updates, places(assistant)) == (3, 0)
    assert assistant.alignment.update_now() is None


def test_updates_do_not_depend_on_the_time_that_they_take(target, monkeypatch):
    """A hundred-thousandth of the time affords none, unless other work on the machine makes it long."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    assistant = assistant_for(target, buffer=24, max_overhead=1e-5)
    generate(target, assistant, 4)
    assert assistant.alignment.stats.updates == 4
    by_the_clock = assistant_for(target, update_at="request", max_overhead=1e-5)
    generate(target, by_the_clock, 4)
    assert by_the_clock.alignment.stats.updates == 0


def test_it_learns_the_same_whoever_looks_at_the_time(target):
    states = []
    for changes in ({}, {"synchronous": True}):
        assistant = DynSpecAssistant(
            perturbed(target, 0.3), "full", target=target, alignment=OnlineAlignment.paper(**changes, buffer=8)
        )
        generate(target, assistant, 4)
        assert assistant.alignment.stats.updates > 1
        states.append(assistant.alignment.state_dict()["adapters"]["default"]["weights"])
    assert states[0] and all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def test_reset_erases_what_waits(target):
    assistant = assistant_for(target, buffer=1000)
    generate(target, assistant, 2)
    assert places(assistant) == 2 * NEW_TOKENS and assistant.alignment.stats.buffer_bytes > 0
    assistant.alignment.reset()
    assert places(assistant) == 0 and assistant.alignment.stats.buffer_bytes == 0


def test_what_was_taken_is_gone_from_memory(target):
    assistant = assistant_for(target, buffer=NEW_TOKENS)
    generate(target, assistant, 1)
    held = copy.copy(assistant.alignment.stats)
    assert held.updates == 1 and held.buffer_bytes == 0
