"""A policy and a state that pass everything on to others: what looks at a policy from outside is built on them."""

from typing import Any

import torch

from ..protocol import BackgroundWork, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState, start_state


class ForwardingPolicy(ShortlistPolicy):
    """Starts the states of a policy, and is not stored.

    Args:
        policy: which does the work.

    Attributes:
        policy: the same.
    """

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
    """Passes everything on to a state.

    Args:
        state: which does the work.

    Attributes:
        state: the same.
    """

    def __init__(self, state: ShortlistState):
        self.layout = state.layout
        self.state = state

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self.state.select(depth, token_ids, features)

    def begin_round(self) -> None:
        self.state.begin_round()

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        self.state.observe_draft_inputs(embeddings, features)

    def restart(self) -> None:
        self.state.restart()

    def resume(self, token_ids: torch.Tensor) -> None:
        self.state.resume(token_ids)

    def end_call(self) -> None:
        self.state.end_call()

    def observe_prompt(self, prompt: Prompt) -> None:
        self.state.observe_prompt(prompt)

    def observe(self, verdict: Verdict) -> None:
        self.state.observe(verdict)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        self.state.follow_weights(vocabulary)

    def finish_background_work(self) -> None:
        self.state.finish_background_work()

    def take_background_work(self) -> BackgroundWork:
        return self.state.take_background_work()

    def close(self) -> None:
        self.state.close()
