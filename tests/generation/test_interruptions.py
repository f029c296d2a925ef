"""What is left behind by calls that end in an error, by calls within calls, by forks and by copies: nothing that
changes a later token, and nothing that is waited for."""

import copy
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, VOCABULARY, perturbed, prompt, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_dynspec import DynSpecAssistant, RetrievalShortlist, UnsupportedError
from hf_dynspec.cache_names import CACHE
from hf_dynspec.drafting.tree_config import TreeConfig
from hf_dynspec.generation.call import Bindable

SHAPES = pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])


def greedy(
    target: PreTrainedModel, input_ids: torch.Tensor, assistant: Bindable | None = None, **arguments: Any
) -> torch.Tensor:
    arguments = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": VOCABULARY - 1} | arguments
    return target.generate(input_ids, assistant_model=assistant, **arguments)


class Stop(Exception):
    """What users raise to end a text."""


class Caller:
    """A streamer, criterion and processor that calls something each time, and keeps what is streamed."""

    def __init__(self, call: Callable[[], None]):
        self._call = call
        self.streamed: list[int] = []
        self.arguments: dict[str, dict[str, Any]] = {
            "streamer": {"streamer": self},
            "criterion": {"stopping_criteria": [self._criterion]},
            "processor": {"logits_processor": [self._processor]},
        }

    def put(self, token_ids: torch.Tensor) -> None:
        self.streamed += token_ids.flatten().tolist()
        self._call()

    def end(self) -> None:
        """The text is over."""

    def _criterion(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        self._call()
        return torch.zeros(1, dtype=torch.bool)

    def _processor(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._call()
        return scores


def _stops(at: int) -> Callable[[], None]:
    """Raises `Stop` when it is called for the so many-th time."""
    calls = iter(range(1, at + 1))

    def call() -> None:
        if next(calls) == at:
            raise Stop

    return call


PAIRS: dict[str, Callable[[], tuple[PreTrainedModel, Any]]] = {
    "llama": lambda: _with_copy(tiny()),
    # Its cache forgets what lies before the windows.
    "gemma3": lambda: _with_copy(tiny("gemma3")),
    "eagle3": lambda: _with_head(soft(), "eagle3"),
}


def _with_copy(target: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    return target, perturbed(target, 0.2)


def _with_head(target: PreTrainedModel, layout: str) -> tuple[PreTrainedModel, Any]:
    return target, drafter_of(agreeing_head(layout), target)


@SHAPES
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("raises", ["streamer", "criterion", "processor"])
def test_a_cache_of_a_call_that_was_ended_by_an_error(raises, pair, tree):
    """As of a chat whose streamer raises where the user stops the text, and goes on with the cache."""
    target, drafter = PAIRS[pair]()
    assistant = DynSpecAssistant(drafter, "hybrid", target=target, tree=tree)
    text = greedy(target, prompt())
    drafts_were_there = 0
    for at in (1, 3, 4):
        cache = DynamicCache(config=target.config.get_text_config())
        with pytest.raises(Stop):
            greedy(target, prompt(), assistant, **{CACHE: cache}, **Caller(_stops(at)).arguments[raises])
        drafts_were_there += assistant.stats.drafted > 0
        assert cache.get_seq_length() < text.shape[1]
        assert len({layer.get_seq_length() for layer in cache.layers if layer.is_initialized}) <= 1
        text_so_far = text[:, : cache.get_seq_length() + 1]
        following = torch.cat([text_so_far, prompt(9, seed=5)], dim=1)
        assert torch.equal(greedy(target, following, assistant, **{CACHE: cache}), greedy(target, following))
    assert drafts_were_there


@SHAPES
def test_a_cache_of_a_call_that_was_interrupted_within_a_forward(tree, target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target, tree=tree)
    cache, stop = DynamicCache(config=target.config), _stops(3)
    # One layer has read the candidates then, and the other has not.
    hook = target.model.layers[0].register_forward_hook(lambda *unused: stop())
    with pytest.raises(Stop):
        greedy(target, prompt(), assistant, **{CACHE: cache})
    hook.remove()
    following = torch.cat([prompt(), prompt(9, seed=5)], dim=1)
    assert torch.equal(greedy(target, following, assistant, **{CACHE: cache}), greedy(target, following))


@SHAPES
@pytest.mark.parametrize("caller", ["streamer", "criterion", "processor"])
@pytest.mark.parametrize("inner", ["plain", "assistant", "conversation"])
def test_a_call_within_a_call(inner, caller, tree, target):
    assistant = DynSpecAssistant(perturbed(target), "hybrid", target=target, tree=tree)
    conversation = assistant.conversation()
    expected = {seed: greedy(target, prompt(20, seed=seed)) for seed in (0, 1)}
    model = {"plain": None, "assistant": assistant, "conversation": conversation}[inner]
    within: list[torch.Tensor] = []

    def call():
        if len(within) < 2:
            within.append(greedy(target, prompt(20, seed=1), model))

    for outer in (assistant, conversation):
        within.clear()
        output = greedy(target, prompt(20), outer, **Caller(call).arguments[caller])
        assert torch.equal(output, expected[0])
        assert len(within) == 2 and all(torch.equal(one, expected[1]) for one in within)
    following = torch.cat([expected[0], prompt(5, seed=3)], dim=1)
    assert torch.equal(greedy(target, following, conversation), greedy(target, following))
    assert assistant.stats.accepted > 0


# Forks and copies ----------------------------------------------------------------------------------------------------


def in_a_fork(run: Callable[[], bool]) -> bool:
    """Whether it is so in a forked process, within a minute."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            os._exit(0 if run() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("policy", ["hybrid", "retrieval"])
def test_a_forked_process_waits_for_no_thread_of_the_other(policy, target, drafter):
    retrieval = RetrievalShortlist(size=40, dynamic=20, likely=8)
    assistant = DynSpecAssistant(drafter, retrieval if policy == "retrieval" else policy, target=target)
    conversation = assistant.conversation()
    text = greedy(target, prompt(), conversation)
    following = torch.cat([text, prompt(9, seed=5)], dim=1)
    expected = greedy(target, following)
    # Leaves a session that waits, with its thread.
    greedy(target, prompt(), assistant)

    def goes_on() -> bool:
        is_same = all(torch.equal(greedy(target, following, one), expected) for one in (conversation, assistant))
        assistant.unbind()
        return is_same

    def forks() -> None:
        if not forked:
            forked.append(in_a_fork(goes_on))

    forked: list[bool] = []
    output = greedy(target, following, conversation, **Caller(forks).arguments["criterion"])
    assert forked[0] and in_a_fork(goes_on)
    assert torch.equal(output, expected) and torch.equal(greedy(target, following, conversation), expected)


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_policies_are_immutable_and_so_are_their_copies(policy):
    policy = POLICY_CASES[policy]()
    assert copy.deepcopy([policy])[0] is policy


def test_what_belongs_to_models_is_not_pickled_and_copies_of_a_conversation_reset_after_fork(target, drafter):
    assistant = DynSpecAssistant(drafter, "hybrid", target=target)
    conversation = assistant.conversation()
    text = greedy(target, prompt(), conversation)
    for one in (assistant, conversation):
        with pytest.raises(UnsupportedError, match="in the other process"):
            pickle.dumps(one)
    for twin in (copy.copy(conversation), copy.deepcopy(conversation)):
        assert twin.session is None is not conversation.session
        following = torch.cat([text, prompt(9, seed=5)], dim=1)
        assert torch.equal(greedy(target, following, twin), greedy(target, following))
