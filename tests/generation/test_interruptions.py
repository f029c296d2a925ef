"""Calls that fail, calls within calls, forks and copies change no later token, and nothing waits for them."""

import copy
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import SHAPES, assert_same, generate
from cases import pairwise
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, VOCABULARY, perturbed, prompt, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_dynspec import DynSpecAssistant, RetrievalShortlist, UnsupportedError
from hf_dynspec.cache_names import CACHE
from hf_dynspec.generation import generate_call

CALL = {"max_new_tokens": 12, "eos_token_id": VOCABULARY - 1}
CALLERS = ("streamer", "criterion", "processor")


class Stop(Exception):
    """What users raise to end a text."""


class Caller:
    """A streamer, criterion or processor that calls something each time."""

    def __init__(self, call: Callable[[], None]):
        self._call = call
        self.arguments: dict[str, dict[str, Any]] = {
            "streamer": {"streamer": self},
            "criterion": {"stopping_criteria": [self._criterion]},
            "processor": {"logits_processor": [self._processor]},
        }

    def put(self, token_ids: torch.Tensor) -> None:
        self._call()

    def end(self) -> None:
        """The text is over."""

    def _criterion(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        self._call()
        return torch.zeros(1, dtype=torch.bool)

    def _processor(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._call()
        return scores


def stops(at: int) -> Callable[[], None]:
    """Raises `Stop` in call number `at`."""
    calls = iter(range(1, at + 1))

    def call() -> None:
        if next(calls) == at:
            raise Stop

    return call


# gemma3's cache forgets what lies before the windows.
TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny,
    "gemma3": lambda: tiny("gemma3"),
    "eagle3": soft,
}


@pytest.mark.parametrize(("kind", "raises", "shape"), pairwise("families", list(TARGETS), CALLERS, list(SHAPES)))
def test_going_on_with_the_cache_of_a_call_that_an_error_ended(kind, raises, shape):
    """As in a chat whose streamer raises an error when the user stops the text."""
    target = TARGETS[kind]()
    drafter = drafter_of(agreeing_head(kind), target) if kind == "eagle3" else perturbed(target, 0.2)
    assistant = DynSpecAssistant(drafter, "hybrid", target=target, tree=SHAPES[shape])
    text, drafted = generate(target, **CALL), 0
    for at in (1, 3, 4):
        cache = DynamicCache(config=target.config.get_text_config())
        with pytest.raises(Stop):
            generate(target, assistant, **CALL, **{CACHE: cache}, **Caller(stops(at)).arguments[raises])
        drafted += assistant.stats.drafted
        assert cache.get_seq_length() < text.shape[1]
        assert len({layer.get_seq_length() for layer in cache.layers if layer.is_initialized}) <= 1
        following = torch.cat([text[:, : cache.get_seq_length() + 1], prompt(9, seed=5)], dim=1)
        output = generate(target, assistant, following, **CALL, **{CACHE: cache})
        assert torch.equal(output, generate(target, None, following, **CALL))
    assert drafted


def test_a_call_that_an_error_ends_before_it_begins(target, drafter, monkeypatch):
    """It counts for nothing, and its session is given up."""
    assistant = DynSpecAssistant(drafter, "hybrid", target=target)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    made, take = [], assistant.take_session
    monkeypatch.setattr(assistant, "take_session", lambda ends: made.append(take(ends)) or made[-1])
    with monkeypatch.context() as patch:
        patch.setattr(generate_call, "VerifiedText", lambda *_: stops(1)())
        with pytest.raises(Stop):
            generate(target, assistant)
    assert made[0].is_closed and assistant.stats_total.calls == 0
    assert_same(target, assistant)


@pytest.mark.parametrize("shape", SHAPES)
def test_going_on_with_the_cache_of_a_call_that_an_error_ended_within_a_forward(shape, target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target, tree=SHAPES[shape])
    cache, stop = DynamicCache(config=target.config), stops(3)
    # One layer has read the candidates then, and the other has not.
    hook = target.model.layers[0].register_forward_hook(lambda *unused: stop())
    with pytest.raises(Stop):
        generate(target, assistant, **{CACHE: cache})
    hook.remove()
    following = torch.cat([prompt(), prompt(9, seed=5)], dim=1)
    assert torch.equal(generate(target, assistant, following, **{CACHE: cache}), generate(target, None, following))


@pytest.mark.parametrize(
    ("inner", "caller", "shape"),
    pairwise("families", ("plain", "assistant", "conversation"), CALLERS, list(SHAPES)),
)
def test_a_call_within_a_call(inner, caller, shape, target):
    assistant = DynSpecAssistant(perturbed(target), "hybrid", target=target, tree=SHAPES[shape])
    conversation = assistant.conversation()
    expected = {seed: generate(target, None, prompt(20, seed=seed), **CALL) for seed in (0, 1)}
    model = {"plain": None, "assistant": assistant, "conversation": conversation}[inner]
    within: list[torch.Tensor] = []

    def call():
        if len(within) < 2:
            within.append(generate(target, model, prompt(20, seed=1), **CALL))

    for outer in (assistant, conversation):
        within.clear()
        output = generate(target, outer, prompt(20), **CALL, **Caller(call).arguments[caller])
        assert torch.equal(output, expected[0])
        assert len(within) == 2 and all(torch.equal(one, expected[1]) for one in within)
    assert_same(target, conversation, torch.cat([expected[0], prompt(5, seed=3)], dim=1))
    assert assistant.stats.accepted > 0


# Forks and copies ----------------------------------------------------------------------------------------------------


def in_a_fork(run: Callable[[], bool]) -> bool:
    """Whether a function returns True in a forked process, within a minute."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            os._exit(0 if run() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("policy", ["hybrid", "retrieval"])
def test_a_forked_process_waits_for_no_thread_of_the_other(policy, target, drafter):
    retrieval = RetrievalShortlist(size=40, dynamic=20, likely=8)
    assistant = DynSpecAssistant(drafter, retrieval if policy == "retrieval" else policy, target=target)
    conversation = assistant.conversation()
    following = torch.cat([generate(target, conversation, **CALL), prompt(9, seed=5)], dim=1)
    expected = generate(target, None, following, **CALL)
    # Leaves a session that waits, with its thread.
    generate(target, assistant, **CALL)

    def goes_on() -> bool:
        outputs = [generate(target, one, following, **CALL) for one in (conversation, assistant)]
        assistant.unbind()
        return all(torch.equal(one, expected) for one in outputs)

    def forks() -> None:
        if not forked:
            forked.append(in_a_fork(goes_on))

    forked: list[bool] = []
    output = generate(target, conversation, following, **CALL, **Caller(forks).arguments["criterion"])
    assert forked[0] and in_a_fork(goes_on)
    assert torch.equal(output, expected)
    assert torch.equal(generate(target, conversation, following, **CALL), expected)


def test_policies_are_immutable_and_so_are_their_copies():
    for make in POLICY_CASES.values():
        policy = make()
        assert copy.deepcopy([policy])[0] is policy


def test_what_belongs_to_models_is_not_pickled_and_a_copied_conversation_begins_anew(target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target)
    conversation = assistant.conversation()
    following = torch.cat([generate(target, conversation), prompt(9, seed=5)], dim=1)
    for one in (assistant, conversation):
        with pytest.raises(UnsupportedError, match="in the other process"):
            pickle.dumps(one)
    for twin in (copy.copy(conversation), copy.deepcopy(conversation)):
        assert twin.session is None is not conversation.session
        assert_same(target, twin, following)
