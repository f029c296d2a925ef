"""Sessions: what is kept from call to call is bounded, holds no text, and may be used in any mode of torch."""

import contextlib
import gc
import itertools
import os

import psutil
import pytest
import torch
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig
from hf_dynspec.shortlists import POLICIES

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "neither": torch.enable_grad}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target)


def greedy(target, assistant=None, seed=0, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 12, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(seed=seed), **named | arguments)


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", POLICY_CASES)
def test_modes_of_torch_follow_each_other_in_any_order(policy, tree, target, drafter):
    for order in itertools.permutations(MODES):
        with MODES[order[0]]():
            assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=tree)
        conversation = assistant.conversation()
        for turn, mode in enumerate((*order, *order)):
            with MODES[mode]():
                for one in (assistant, conversation):
                    penalty = {"repetition_penalty": 1.2, "do_sample": turn == 3}
                    output = greedy(target, one, turn, **penalty)
                    assert turn == 3 or torch.equal(output, greedy(target, None, turn, **penalty)), (order, mode)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# A device on which nothing can be computed stands for any that the models are not on.
DEFAULTS = {"bfloat16": lambda: default_dtype(torch.bfloat16), "another device": lambda: torch.device("meta")}


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", POLICIES)
def test_torchs_defaults_have_no_say(policy, tree, target, drafter):
    """Another thread may set the default dtype at any time, as transformers does while it loads a model, and many set
    the default device once for all."""

    def texts() -> list[list[int]]:
        assistant = DynSpecAssistant(drafter, made, target=target, tree=tree)
        arguments = {"max_new_tokens": 9, "assistant_model": assistant, "repetition_penalty": 1.1}
        torch.manual_seed(3)
        return [
            target.generate(text, do_sample=top_k is not None, top_k=top_k, **arguments)[0].tolist()
            for top_k in (None, 0, 9)
        ]

    made, text = POLICY_CASES[policy](), prompt()
    expected = texts()
    for name, default in DEFAULTS.items():
        with default():
            assert texts() == expected, name


def tensors_in(thing, seen: set[int]) -> int:
    """The bytes of all tensors that are reached from an object, but for the models'."""
    total, waiting = 0, [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            total += one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        elif type(one).__module__.startswith("hf_dynspec"):
            waiting += vars(one).values() if hasattr(one, "__dict__") else ()
    return total


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_idle_sessions_hold_no_text(policy, target, drafter):
    """What they hold after a long text is what they held after a short one, buffers of the shortlist apart."""
    held = []
    for length in (4, 300):
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
        text = prompt(length)
        target.generate(text, assistant_model=assistant, max_new_tokens=8, do_sample=False)
        (session,) = assistant._sessions._idle
        assert session._prefix.numel() == 0 and session._backbone.length == 0 and session._features.rows is None
        held.append(tensors_in([session._backbone, session._features, session._prefix, session._candidates], set()))
    assert held[0] == held[1]


@pytest.mark.parametrize("policy", ["hybrid", "router"])
def test_the_pool_is_bounded(policy, target, drafter):
    """Sixty different sets of EOS ids, and as many threads as one likes."""
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
    sizes = []
    for ids in itertools.islice(itertools.combinations(range(3, 20), 2), 60):
        output = greedy(target, assistant, eos_token_id=list(ids))
        assert torch.equal(output, greedy(target, eos_token_id=list(ids)))
        sizes.append(len(assistant._sessions._idle))
    assert max(sizes) <= 4
    assert len(assistant.drafter.head._blocks) <= 5


def resident() -> float:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


@pytest.mark.parametrize("what", ["assistants", "bindings", "copies", "sets of EOS ids"])
def test_nothing_grows(what, target, drafter):
    import copy

    assistant = DynSpecAssistant(drafter, target=target)

    def once(index: int) -> None:
        one = assistant
        if what == "assistants":
            one = DynSpecAssistant(drafter, target=target)
        elif what == "bindings":
            one.unbind()
            one.bind(target)
        elif what == "copies":
            one = copy.deepcopy(assistant)
        greedy(target, one, eos_token_id=3 + index if what == "sets of EOS ids" else 2, max_new_tokens=4)

    for index in range(20):
        once(index)
    before = resident()
    for index in range(60):
        once(20 + index)
    assert resident() - before < 12
