"""Memory and graphs, which may have gigabytes, die with their owner, and wait for no garbage collector."""

import copy
import gc
import weakref

import pytest
import torch
from calls import SHAPES
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt, tiny

from hf_dynspec import DynSpecAssistant
from hf_dynspec.generation import fixed_lane
from hf_dynspec.memory.fixed import FixedMemory
from hf_dynspec.rounds import RecordedRound, Round


@pytest.fixture
def alive(monkeypatch):
    """The memories and rounds that are alive. No collector runs."""
    found: weakref.WeakSet = weakref.WeakSet()
    for kind in (FixedMemory, Round, RecordedRound):
        made = kind.__init__

        def init(self, *args, made=made, **kwargs):
            made(self, *args, **kwargs)
            found.add(self)

        monkeypatch.setattr(kind, "__init__", init)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def pair(kind: str):
    target = tiny() if kind == "independent" else soft()
    return target, perturbed(target) if kind == "independent" else drafter_of(agreeing_head(kind), target)


CALLS = {
    "one text": {"cache_implementation": "static"},
    "a batch": {},
    "a sampled batch": {"do_sample": True, "top_k": 5},
}


def generate(target, assistant, call: str, **arguments) -> None:
    count = 1 if call == "one text" else 3
    inputs = torch.cat([prompt(12, seed) for seed in range(count)])
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **CALLS[call], **arguments}
    target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=assistant, **settings)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["independent", "eagle3"])
@pytest.mark.parametrize("policy", ["hybrid", "union with a router"])
def test_memory_dies_with_its_call_or_with_the_binding(policy, kind, shape, call, alive, monkeypatch):
    target, drafter = pair(kind)
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=SHAPES[shape])
    monkeypatch.setattr(fixed_lane, "_MOST_KEPT_BYTES", 0)
    for _ in range(2):
        generate(target, assistant, call)
        assert not alive
    monkeypatch.setattr(fixed_lane, "_MOST_KEPT_BYTES", 2**31)
    generate(target, assistant, call)
    assistant.unbind()
    assert not alive


@pytest.mark.parametrize("shape", SHAPES)
def test_a_kept_graph_dies_with_the_binding(shape, alive, graphs):
    """A lane waits for the next call with its memory and its graph, of which nothing is left after `unbind`."""
    from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device

    with pretended_device():
        target = tiny()
        there, drafter = move(copy.deepcopy(target)), move(perturbed(target))
        assistant = DynSpecAssistant(drafter, target=there, tree=SHAPES[shape], num_assistant_tokens=3)
        mask = to_device(torch.ones(1, 12, dtype=torch.int64))
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "assistant_model": assistant}
        there.generate(to_device(prompt()), attention_mask=mask, **settings)
        assert assistant.stats.lane == "fixed memory, as a graph" and len(alive) == 4
        assistant.unbind()
    assert not alive
