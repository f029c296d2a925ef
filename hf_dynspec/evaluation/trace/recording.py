"""What is noted while a traced call runs, at the seams that every call has: what a policy is shown and selects, what
retrieval says, and the sections of the stopwatch. Nothing is read from the device but what a change of the shortlist
copies, so that the times stay those of a call that nobody traces, and everything else is worked out afterwards."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...assistant import DynSpecAssistant
from ...generation.generate_call import GenerateCall
from ...protocol import Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from ...shortlists import RetrievalShortlist, ShortlistPolicy, ShortlistState, UnionShortlist
from ...shortlists.forwarding import ForwardingPolicy, ForwardingState
from ...shortlists.retrieval.retriever import Retrieval, RetrievalListener
from ...stats import Stopwatch


@dataclass
class RecordedRound:
    """One round.

    Args:
        has_begun: whether anything was to be drafted in it.
        shortlists: what was selected before each of its draft steps, but for what was chosen for that step alone.
        prompts: what the policy was shown of the prompt, in this round or before the first.
        verdict: what came of it.
        end: when the policy had seen the verdict, in seconds of `time.perf_counter`.
    """

    has_begun: bool = False
    shortlists: list[Shortlist | None] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    verdict: Verdict | None = None
    end: float = 0.0


@dataclass(frozen=True)
class RecordedSpan:
    """A section of the stopwatch, from `start` to `end` in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


class SpanStopwatch(Stopwatch):
    """A stopwatch that keeps each section's beginning and end, beside the sums."""

    def __init__(self, devices: tuple[torch.device, ...] = ()):
        super().__init__(True, devices)
        self.spans: list[RecordedSpan] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = self.now()
        try:
            with super().section(name):
                yield
        finally:
            self.spans.append(RecordedSpan(name, start, self.now()))


class HeardRetrievals(RetrievalListener):
    """What one part of a policy told of its retrievals.

    Attributes:
        retrievals: what was retrieved, in order.
        taken: for each of the first of them the round that took it up.
    """

    def __init__(self, recording: "Recording"):
        self.retrievals: list[Retrieval] = []
        self.taken: list[int] = []
        self._recording = recording

    def hear(self, retrieval: Retrieval) -> None:
        # By the worker's thread, while nobody else looks.
        self.retrievals.append(retrieval)

    def on_taken(self, count: int) -> None:
        self.taken += [len(self._recording.rounds) - 1] * count


class Recording:
    """What was noted of one call.

    Attributes:
        vocabulary: what the policy was told when the session began.
        first_ids: int64 `[n]`, what the policy's shortlists hold before there is any context; None where they depend
            on the draft step, so that no token ever comes in.
        rounds: the rounds, in order. The last one may be empty.
        heard: what each part of the policy told that retrieves.
        stopwatch: the sections of the generating thread.
    """

    def __init__(self, devices: tuple[torch.device, ...] = ()):
        self.vocabulary: VocabularyInfo | None = None
        self.first_ids: torch.Tensor | None = None
        self.rounds = [RecordedRound()]
        self.heard: list[HeardRetrievals] = []
        self.stopwatch = SpanStopwatch(devices)

    def end_round(self, verdict: Verdict) -> None:
        """Note what came of a round, and go on to the next."""
        now = self.rounds[-1]
        now.verdict, now.end = verdict, self.stopwatch.now()
        self.rounds.append(RecordedRound())


def recorded(policy: ShortlistPolicy, recording: Recording) -> ShortlistPolicy:
    """A policy that selects what another one does, and notes what goes in and out."""
    return _RecordedPolicy(_heard(policy, recording), recording)


def _heard(policy: ShortlistPolicy, recording: Recording) -> ShortlistPolicy:
    """The policy with those parts that retrieve telling what they do."""
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
        # Before the other one, which then shares what was made of the target's head.
        state = super().start(vocabulary, memory)
        self._recording.vocabulary, self._recording.first_ids = vocabulary, self._first_ids(vocabulary)
        return _RecordedState(state, self._recording)

    def _first_ids(self, vocabulary: VocabularyInfo) -> torch.Tensor | None:
        """See `Recording`: what a session that is given up at once selects."""
        if self.policy.needs.draft_inputs or vocabulary.width is None:
            return None
        state = self.policy.start(vocabulary)
        try:
            state.begin_round()
            token = torch.zeros(1, dtype=torch.int64, device=vocabulary.device)
            features = torch.zeros(1, vocabulary.width, device=vocabulary.device)
            shortlist = state.select(0, token, features)
            return None if shortlist.steady is None else shortlist.steady.ids().clone()
        finally:
            state.close()


class _RecordedState(ForwardingState):
    """Notes what a state is shown and what it selects."""

    def __init__(self, state: ShortlistState, recording: Recording):
        super().__init__(state)
        self._recording = recording
        self._last: tuple[Shortlist | None, Shortlist | None] = None, None

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        shortlist = super().select(depth, token_ids, features)
        steady = shortlist.steady
        if steady is None or steady is not self._last[0]:
            self._last = steady, _kept(steady)
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
        self._recording.end_round(verdict)


def _kept(steady: Shortlist | None) -> Shortlist | None:
    """What of a shortlist stays after the draft step, as it is now, as slots may be changed in place."""
    if steady is None:
        return None
    occupied = steady.scored_occupied
    return Shortlist(
        steady.scored_slots.clone(), steady.version, occupied=None if occupied is None else occupied.clone()
    )


class RecordedAssistant(DynSpecAssistant):
    """An assistant whose calls are timed by a recording's stopwatch.

    Args:
        recording: of what the assistant's policy, `recorded`, does.
    """

    recording: Recording

    def open_call(self) -> GenerateCall:
        return _RecordedCall(self)


class _RecordedCall(GenerateCall):
    # The last round is shown to the policy too, which otherwise nothing would follow.
    is_kept = True

    def __init__(self, assistant: RecordedAssistant):
        super().__init__(assistant)
        self._stopwatch = assistant.recording.stopwatch
