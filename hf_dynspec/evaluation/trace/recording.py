"""Notes of a traced call: what its policy observes and selects, and its retrievals. Everything else is worked out
afterwards, so that the call takes little longer than usual."""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from ...assistant import DynSpecAssistant
from ...generation.generate_call import GenerateCall
from ...protocol import Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from ...shortlists import RetrievalShortlist, ShortlistPolicy, ShortlistState, UnionShortlist
from ...shortlists.forwarding import ForwardingPolicy, ForwardingState
from ...shortlists.retrieval.retriever import Retrieval, RetrievalListener
from ...stats import Stopwatch


@dataclass
class RecordedRound:
    """One round."""

    has_begun: bool = False  # whether it could draft
    # Of each draft step, without the ids that were selected for that step alone; None if all were.
    shortlists: list[Shortlist | None] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)  # in this round or before the first
    verdict: Verdict | None = None


class Recording:
    """The notes of one call."""

    def __init__(self):
        self.vocabulary: VocabularyInfo | None = None
        # int64 `[n]`: the policy's shortlist without any context; None if it depends on the draft step.
        self.first_ids: torch.Tensor | None = None
        self.rounds = [RecordedRound()]  # the last one may be empty
        self.heard: list[HeardRetrievals] = []  # of each part of the policy that retrieves


class HeardRetrievals(RetrievalListener):
    """The retrievals of one part of a policy, in order, and the rounds that used the first of them (`taken`)."""

    def __init__(self, recording: Recording):
        self.retrievals: list[Retrieval] = []
        self.taken: list[int] = []
        self._recording = recording

    def hear(self, retrieval: Retrieval) -> None:
        self.retrievals.append(retrieval)

    def on_taken(self, count: int) -> None:
        self.taken += [len(self._recording.rounds) - 1] * count


def recorded(policy: ShortlistPolicy, recording: Recording) -> ShortlistPolicy:
    """A policy that selects as another one does, and takes notes."""
    return _RecordedPolicy(_heard(policy, recording), recording)


def _heard(policy: ShortlistPolicy, recording: Recording) -> ShortlistPolicy:
    """The policy with listeners on the parts that retrieve."""
    if isinstance(policy, RetrievalShortlist):
        recording.heard.append(HeardRetrievals(recording))
        return policy.heard_by(recording.heard[-1])
    if not isinstance(policy, UnionShortlist):
        return policy
    twin = copy.copy(policy)
    twin.policies = tuple(_heard(part, recording) for part in policy.policies)
    return twin


class _RecordedPolicy(ForwardingPolicy):
    name = "recorded"

    def __init__(self, policy: ShortlistPolicy, recording: Recording):
        super().__init__(policy)
        self._recording = recording

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(out_of_vocabulary=True)

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> "_RecordedState":
        # Before the other session, which then shares what is computed from the target's head.
        state = super().start(vocabulary, memory)
        self._recording.vocabulary, self._recording.first_ids = vocabulary, self._first_ids(vocabulary)
        return _RecordedState(state, self._recording)

    def _first_ids(self, vocabulary: VocabularyInfo) -> torch.Tensor | None:
        if self.policy.needs.draft_inputs or vocabulary.width is None:
            return None
        state = self.policy.start(vocabulary)
        try:
            state.begin_round()
            token = torch.zeros(1, dtype=torch.int64, device=vocabulary.device)
            shortlist = state.select(0, token, torch.zeros(1, vocabulary.width, device=vocabulary.device))
            return None if shortlist.steady is None else shortlist.steady.ids().clone()
        finally:
            state.close()


class _RecordedState(ForwardingState):
    def __init__(self, state: ShortlistState, recording: Recording):
        super().__init__(state)
        self._recording = recording
        self._last: tuple[Shortlist | None, Shortlist | None] = None, None

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        shortlist = super().select(depth, token_ids, features)
        steady = shortlist.steady
        if steady is None or steady is not self._last[0]:
            self._last = steady, _copied(steady)
        self._recording.rounds[-1].shortlists.append(self._last[1])
        return shortlist

    def begin_round(self) -> None:
        self._recording.rounds[-1].has_begun = True
        super().begin_round()

    def observe_prompt(self, prompt: Prompt) -> None:
        self._recording.rounds[-1].prompts.append(prompt)
        super().observe_prompt(prompt)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        self._recording.rounds[-1].verdict = verdict
        self._recording.rounds.append(RecordedRound())


def _copied(steady: Shortlist | None) -> Shortlist | None:
    """A shortlist as it is now, as its slots may change in place."""
    if steady is None:
        return None
    occupied = None if steady.scored_occupied is None else steady.scored_occupied.clone()
    return Shortlist(steady.scored_slots.clone(), steady.version, occupied=occupied)


class RecordedAssistant(DynSpecAssistant):
    """An assistant that shows its policy the last round too, and names the sections of a round in a profile."""

    def open_call(self) -> GenerateCall:
        return _RecordedCall(self)


class _RecordedCall(GenerateCall):
    # As if another call followed, for which the policy observes the last round.
    keeps_session = True

    def __init__(self, assistant: RecordedAssistant):
        super().__init__(assistant)
        self._stopwatch = _NamedSections(enabled=False)


class _NamedSections(Stopwatch):
    def section(self, name: str) -> AbstractContextManager:
        return record_function(name)
