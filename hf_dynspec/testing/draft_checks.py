"""What is checked of a policy that tiny models draft with."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..assistant import DynSpecAssistant
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..drafting.tree_config import TreeConfig
from ..protocol import VocabularyInfo
from ..shortlists import FrequencyShortlist, InContextShortlist, ShortlistPolicy, ShortlistState, UnionShortlist
from ..shortlists.forwarding import ForwardingPolicy
from .case import NEW_TOKENS, PolicyCase

_SHAPES = {"chains": False, "trees": TreeConfig(12, 2, 4)}
# Models this small gain nothing by drafts, and would be left to generate without.
_IN_ALL_ROUNDS = {"num_assistant_tokens": DEFAULT_NUM_ASSISTANT_TOKENS}


class _Counted(ForwardingPolicy):
    """Counts what becomes of the states."""

    name = "counted"

    def __init__(self, policy: ShortlistPolicy):
        super().__init__(policy)
        self.started = self.closed = self.rows_followed = 0

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        state = super().start(vocabulary, memory)
        self.started += 1
        state.close = self._counting("closed", state.close)
        state.follow_weights = self._counting("rows_followed", state.follow_weights)
        return state

    def _counting(self, count: str, method: Callable) -> Callable:
        def counted(*args: object) -> None:
            setattr(self, count, getattr(self, count) + 1)
            method(*args)

        return counted


def check_drafting(case: PolicyCase) -> None:
    """It drafts chains and trees for calls, texts and turns of a conversation, and the output stays the same."""
    policy = _Counted(case.checked)
    for shape, tree in _SHAPES.items():
        _draft(case, policy, tree, f"drafting {shape}")
    if policy.closed != policy.started:
        case.fail(f"{policy.started} states were started and {policy.closed} closed", "Let `close` return.")


def check_unions(case: PolicyCase) -> None:
    """It does so as the first and as the last part of a union, told more than it asked for."""
    window = InContextShortlist(20, prompt_top_k=6, verify_top_k=6)
    if not case.policy.can_be_part:
        return
    unions = ((case.policy, window), (window, FrequencyShortlist(size=20), case.policy))
    for parts, (shape, tree) in zip(unions, _SHAPES.items(), strict=True):
        _draft(case, UnionShortlist(*parts), tree, f"drafting {shape} in a union", validate=True)


def _draft(
    case: PolicyCase, policy: ShortlistPolicy, tree: bool | TreeConfig, doing: str, validate: bool = False
) -> None:
    """Draft with a policy in every way, and compare what comes out with what does without."""
    target = case.target
    assistant = DynSpecAssistant(case.drafter, policy, target=target, tree=tree, validate=validate, **_IN_ALL_ROUNDS)
    conversation = assistant.conversation()
    turn = case.prompt(1)
    for seed in (1, 2):
        _require_same_output(case, case.prompt(seed), assistant, doing)
        turn = _require_same_output(case, turn, conversation, f"{doing} in a conversation")
    # The most probable token alone: sampling has no choice then.
    _require_same_output(case, case.prompt(1), assistant, f"{doing} and sampling", do_sample=True, top_k=1)
    torch.manual_seed(0)
    target.generate(case.prompt(1), assistant_model=assistant, do_sample=True, max_new_tokens=NEW_TOKENS)
    assistant.unbind()
    if not validate:
        case.stats.add(assistant.stats_total)


def _require_same_output(
    case: PolicyCase, text: torch.Tensor, assistant: object, doing: str, **arguments: object
) -> torch.Tensor:
    expected = case.plain(text)
    named = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "assistant_model": assistant}
    actual = case.target.generate(text, **named | arguments)
    if not torch.equal(actual, expected):
        case.fail(
            f"{doing}, the target's output is not what it is without",
            "Return shortlists whose tensors nobody changes afterwards: make new ones, and count the version up.",
        )
    return actual


def check_weights(case: PolicyCase) -> None:
    """Where it asks for the rows of heads, it goes on when their weights change."""
    if not (case.needs.drafter_rows or case.needs.target_rows):
        return
    target, drafter = copy.deepcopy(case.target), copy.deepcopy(case.drafter)
    policy = _Counted(case.checked)
    assistant = DynSpecAssistant(drafter, policy, target=target, **_IN_ALL_ROUNDS)
    for turn in range(2):
        expected = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8)
        actual = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8, assistant_model=assistant)
        if not torch.equal(actual, expected):
            case.fail("after weights changed, the output is not what it is without", "Take up the new rows.")
        if bool(policy.rows_followed) != bool(turn):
            case.fail("its states were not told new rows", "Do not replace methods of the state.")
        with torch.no_grad():
            for model in (target, drafter):
                model.get_output_embeddings().weight.mul_(-0.5)
    assistant.unbind()
