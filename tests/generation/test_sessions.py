"""Sessions: what is kept from call to call is bounded, holds no text, and may be used in any mode of torch."""

import contextlib
import copy
import functools
import gc
import itertools
import os

import psutil
import pytest
import torch
from calls import SHAPES, generate
from cases import representatives
from models import POLICY_CASES, prompt
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant
from hf_dynspec.shortlists import POLICIES

MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "neither": torch.enable_grad}
# Each mode follows each other one.
TURNS = ("inference", "no_grad", "neither", "inference", "neither", "no_grad", "inference")
MODE_CASES = [
    (policy, *case)
    for policy, case in zip(POLICY_CASES, itertools.cycle(itertools.product(SHAPES, MODES)), strict=False)
]


@functools.cache
def plain(target: PreTrainedModel, turn: int) -> torch.Tensor:
    return generate(target, None, prompt(seed=turn), max_new_tokens=6, repetition_penalty=1.2)


@pytest.mark.parametrize(("policy", "shape", "made_in"), representatives("families", MODE_CASES, keep=len(POLICIES)))
def test_modes_of_torch_follow_each_other_in_any_order(policy, shape, made_in, target, drafter):
    with MODES[made_in]():
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=SHAPES[shape])
    conversation = assistant.conversation()
    for turn, mode in enumerate(TURNS):
        with MODES[mode]():
            for one in (assistant, conversation):
                output = generate(target, one, prompt(seed=turn), max_new_tokens=6, repetition_penalty=1.2)
                assert torch.equal(output, plain(target, turn))
    generate(target, assistant, do_sample=True)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# A device on which nothing can be computed stands for any that the models are not on.
DEFAULTS = {"bfloat16": lambda: default_dtype(torch.bfloat16), "another device": lambda: torch.device("meta")}


@pytest.mark.parametrize(("policy", "shape"), list(zip(POLICIES, itertools.cycle(SHAPES))))
def test_torchs_defaults_have_no_say(policy, shape, target, drafter):
    """Another thread may set the default dtype at any time, as transformers does while it loads a model, and many set
    the default device once for all."""

    def texts() -> list[list[int]]:
        assistant = DynSpecAssistant(drafter, made, target=target, tree=SHAPES[shape])
        arguments = {"max_new_tokens": 6, "assistant_model": assistant, "repetition_penalty": 1.1}
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


def tensor_bytes(thing) -> int:
    """The bytes of all tensors that are reached from an object of this package, but for the models'."""
    total, seen, waiting = 0, set(), [thing]
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
    """After a long text they hold what they held after a short one, buffers of the shortlist apart."""
    held = []
    for length in (4, 300):
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
        generate(target, assistant, prompt(length), max_new_tokens=8)
        (session,) = assistant._sessions._idle
        assert session._prefix.numel() == 0 and session._backbone.length == 0 and session._features.rows is None
        held.append(tensor_bytes([session._backbone, session._features, session._prefix, session._candidates]))
    assert held[0] == held[1]


@pytest.mark.parametrize("policy", representatives("families", ["router", "hybrid"]))
def test_the_pool_is_bounded(policy, target, drafter):
    """By each set of EOS ids there is another session."""
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target)
    sizes = []
    for ids in itertools.islice(itertools.combinations(range(3, 20), 2), 12):
        generate(target, assistant, eos_token_id=list(ids), max_new_tokens=4)
        sizes.append(len(assistant._sessions._idle))
    assert max(sizes) <= 4
    assert len(assistant.drafter.head._blocks) <= 5


def resident() -> float:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


@pytest.mark.simulation
@pytest.mark.parametrize("what", ["assistants", "bindings", "copies", "sets of EOS ids"])
def test_memory_does_not_grow(what, target, drafter):
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
        generate(target, one, eos_token_id=3 + index if what == "sets of EOS ids" else 2, max_new_tokens=4)

    for index in range(15):
        once(index)
    before = resident()
    for index in range(30):
        once(15 + index)
    assert resident() - before < 12
