"""A policy and a state that pass every call on: the base of wrappers and unions."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..protocol import BackgroundWork, Needs, Shortlist, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState, start_state


class ForwardingPolicy(ShortlistPolicy):
    """Starts the states of the wrapped `policy`. It is never stored."""

    name = "forwarding"

    def __init__(self, policy: ShortlistPolicy):
        self.policy = policy

    @property
    def needs(self) -> Needs:
        return self.policy.needs

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        return self.policy.tokenizer_fingerprints

    def new_memory(self) -> Any:
        return self.policy.new_memory()

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        return start_state(self.policy, vocabulary, memory)


def _passed_on(name: str) -> Callable[..., None]:
    """A method that calls the method of that name of all `states`."""

    def call(self: "ForwardingState", *arguments: Any) -> None:
        for state in self.states:
            getattr(state, name)(*arguments)

    return call


class ForwardingState(ShortlistState):
    """Passes every call on to one or more `states`, and selects with the first."""

    def __init__(self, *states: ShortlistState):
        self.layout = states[0].layout
        self.states = states

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self.states[0].select(depth, token_ids, features)

    def settle(self) -> Shortlist | None:
        return self.states[0].settle()

    begin_round = _passed_on("begin_round")
    observe_draft_inputs = _passed_on("observe_draft_inputs")
    restart = _passed_on("restart")
    resume = _passed_on("resume")
    end_call = _passed_on("end_call")
    observe_prompt = _passed_on("observe_prompt")
    observe = _passed_on("observe")
    exchange = _passed_on("exchange")
    follow_weights = _passed_on("follow_weights")
    finish_background_work = _passed_on("finish_background_work")

    def take_background_work(self) -> BackgroundWork:
        return sum((state.take_background_work() for state in self.states), BackgroundWork())

    def close(self) -> None:
        with ExitStack() as stack:
            for state in self.states:
                stack.callback(state.close)
