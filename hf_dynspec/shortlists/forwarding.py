"""A policy and a state that pass every call on: the base of wrappers and unions."""

from contextlib import ExitStack
from typing import Any

import torch

from ..protocol import BackgroundWork, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
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


class ForwardingState(ShortlistState):
    """Passes every call on to one or more `states`, and selects with the first."""

    def __init__(self, *states: ShortlistState):
        self.layout = states[0].layout
        self.states = states

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self.states[0].select(depth, token_ids, features)

    def begin_round(self) -> None:
        for state in self.states:
            state.begin_round()

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        for state in self.states:
            state.observe_draft_inputs(embeddings, features)

    def restart(self) -> None:
        for state in self.states:
            state.restart()

    def resume(self, token_ids: torch.Tensor) -> None:
        for state in self.states:
            state.resume(token_ids)

    def end_call(self) -> None:
        for state in self.states:
            state.end_call()

    def observe_prompt(self, prompt: Prompt) -> None:
        for state in self.states:
            state.observe_prompt(prompt)

    def observe(self, verdict: Verdict) -> None:
        for state in self.states:
            state.observe(verdict)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        for state in self.states:
            state.follow_weights(vocabulary)

    def finish_background_work(self) -> None:
        for state in self.states:
            state.finish_background_work()

    def take_background_work(self) -> BackgroundWork:
        return sum((state.take_background_work() for state in self.states), BackgroundWork())

    def close(self) -> None:
        with ExitStack() as stack:
            for state in self.states:
                stack.callback(state.close)
