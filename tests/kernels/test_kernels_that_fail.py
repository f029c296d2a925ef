"""A kernel that cannot be launched gives way to plain torch, and the call says so."""

import pytest
import torch
from calls import generate
from models import perturbed, tiny

from hf_dynspec import DynSpecAssistant
from hf_dynspec.kernels import KernelOrPlain, attention, given_way
from hf_dynspec.memory import fixed_decoder


class OutOfResources(Exception):
    """As triton's."""

    def __init__(self):
        super().__init__("out of resource: shared memory, Required: 143360, Hardware limit: 101376")


def failing(error: Exception, asked: list) -> KernelOrPlain:
    def launch(query, *others, **settings):
        asked.append(query.shape)
        raise error

    either = KernelOrPlain("attention", attention.round_attention)
    vars(either)["kernel"] = launch
    return either


def test_plain_torch_takes_its_place(monkeypatch):
    target, asked = tiny(), []
    either = failing(OutOfResources(), asked)
    monkeypatch.setattr(fixed_decoder, "round_attention_for", lambda device: either)
    assistant = DynSpecAssistant(perturbed(target), target=target, num_assistant_tokens=3)
    for _ in range(2):
        output = generate(target, assistant, cache_implementation="static")
        assert torch.equal(output, generate(target))
        reason = f"round_attention in plain torch: OutOfResources: {OutOfResources()}"
        assert assistant.stats.lane == f"fixed memory; {reason}"
    # Asked once for each shape: to compile takes seconds.
    assert 0 < len(asked) == len(set(asked))
    assert generate(target, assistant).shape == output.shape and assistant.stats.lane == "general: no graphs on cpu"


def test_texts_that_draft_alone_say_so_too(monkeypatch):
    target = tiny()
    monkeypatch.setattr(fixed_decoder, "round_attention_for", lambda device: failing(OutOfResources(), []))
    assistant = DynSpecAssistant(perturbed(target), target=target, assistant_confidence_threshold=0.3)
    generate(target, assistant, cache_implementation="static")
    assert "text by text" in assistant.stats.lane and "; round_attention in plain torch: " in assistant.stats.lane


def test_memory_that_does_not_suffice_is_an_error():
    either = failing(torch.OutOfMemoryError("CUDA out of memory"), [])
    with pytest.raises(torch.OutOfMemoryError):
        either(torch.zeros(1, 1, 1, 8))
    assert not given_way()
