"""A state that passes everything on to another one: what looks at a policy from outside is built on it."""

import torch

from ..protocol import BackgroundWork, Prompt, Shortlist, Verdict, VocabularyInfo
from .base import ShortlistState


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
