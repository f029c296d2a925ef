"""What a trace says, as plain values: the tokens, what was retrieved where, what came of it, and a round's time."""

from dataclasses import dataclass
from typing import Any

from .settings import TraceSettings

# By which way a token was found, in the order in which they are shown.
WAYS = {
    "text": "stood in the text",
    "likely": "the target's likeliest",
    "near": "near it",
    "following": "graph successors",
    "unknown": "by another part of the policy",
}


@dataclass(frozen=True)
class TracedToken:
    """A token that was generated.

    Args:
        position: in the text, counted from the prompt's first token.
        token_id: its id.
        text: what it adds to the text.
        round: the round that it came out of, from 0.
        drafted: it was an accepted draft, and not the target's own token of the round.
        out_of_vocabulary: whether its draft step's shortlist lacked it; None where there was no such step.
        by_context: it was an accepted draft that only what the policy took from the context made possible; None where
            a policy chooses anew for each draft step.
        entry: the index of the entry that it was drafted from, where it is `by_context`.
    """

    position: int
    token_id: int
    text: str
    round: int
    drafted: bool
    out_of_vocabulary: bool | None
    by_context: bool | None
    entry: int | None


@dataclass(frozen=True)
class TraceEvent:
    """A position at which something was retrieved.

    Args:
        position: in the text.
        token_id: the token that stands there; None where it did not matter.
        context: the end of the text before it.
        in_prompt: whether it is one of the prompt's.
        out_of_vocabulary: whether the token was out of the shortlist, which is what a prompt's cannot be.
        found: the ids that were found, by way (`WAYS`), each in the order of its way.
        entered: those that came onto the shortlist by this event.
        due: the first round that could have had them; None after the last.
        taken: the round that had them; None where none had.
    """

    position: int
    token_id: int | None
    context: str
    in_prompt: bool
    out_of_vocabulary: bool
    found: dict[str, list[int]]
    entered: list[int]
    due: int | None
    taken: int | None


@dataclass(frozen=True)
class TraceEntry:
    """A token that came onto the shortlist from the context, and what became of it while it stayed.

    Args:
        token_id: its id.
        event: the index of the event that brought it; None where that is not known.
        ways: by which it was found there.
        round: the first round that had it.
        left: the first round after it that had it no more; None where it stayed.
        drafted: how often it was drafted; nodes of a tree count each.
        accepted: the positions at which it was an accepted draft.
    """

    token_id: int
    event: int | None
    ways: list[str]
    round: int
    left: int | None
    drafted: int
    accepted: list[int]


@dataclass(frozen=True)
class TimelineSpan:
    """What one thread did, in milliseconds from the round's begin.

    Args:
        thread: `"generation"`, or `"retrieval"` for what is retrieved, in whichever thread.
        section: what it did: a section of the stopwatch, or `"retrieval"`.
        start: when it began; before 0 where that was in the round before.
        end: when it was done; past the round's end likewise.
    """

    thread: str
    section: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The measured spans of one round (EvoSpec, figure 4).

    Args:
        round: which it is, from 0.
        compared: of how many rounds it has the median length.
        milliseconds: how long it took.
        spans: in order of their begin.
    """

    round: int
    compared: int
    milliseconds: float
    spans: list[TimelineSpan]


@dataclass(frozen=True)
class TraceSummary:
    """The figures of a trace.

    Args:
        tokens: new tokens.
        rounds: rounds.
        acceptance_length: tokens per round, the target's own included.
        checked: new tokens that had a shortlist.
        out_of_vocabulary: those of them that it lacked.
        active_vocabulary: mean number of ids on a shortlist.
        entered: how often a token came onto the shortlist from the context; None where a policy chooses anew for each
            draft step, likewise the next four.
        entered_drafted: how many of these were drafted.
        entered_accepted: how many were accepted.
        accepted: accepted drafts.
        accepted_by_context: those of them that only the context made possible.
        results: retrievals that a round could have taken up; None where no part of the policy retrieves, likewise the
            next two.
        late: those that were taken up a round too late, or never.
        retrieval_milliseconds: median time of one.
    """

    tokens: int
    rounds: int
    acceptance_length: float
    checked: int
    out_of_vocabulary: int
    active_vocabulary: float
    entered: int | None
    entered_drafted: int | None
    entered_accepted: int | None
    accepted: int
    accepted_by_context: int | None
    results: int | None
    late: int | None
    retrieval_milliseconds: float | None


# Tokens at the end of the prompt that are shown.
PROMPT_END = 40


@dataclass(frozen=True)
class Trace:
    """One prompt, traced.

    Args:
        settings: what was asked for.
        policy: the policy's label.
        prompt: identifier, domain and number of tokens.
        prompt_end: the end of the prompt's text.
        models: what is known of target and drafter.
        described_policy: name, settings and digests of the policy.
        threads: CPU threads in use.
        started, finished: UTC times in ISO format.
        tokens: what was generated.
        events: where something was retrieved, in the order of the text.
        entries: what came onto the shortlist, in order.
        texts: of every id that the others name.
        summary: the figures.
        timeline: of a round; None where none drafted.
    """

    settings: TraceSettings
    policy: str
    prompt: dict[str, Any]
    prompt_end: str
    models: dict[str, Any]
    described_policy: dict[str, Any]
    threads: int
    started: str
    finished: str
    tokens: list[TracedToken]
    events: list[TraceEvent]
    entries: list[TraceEntry]
    texts: dict[int, str]
    summary: TraceSummary
    timeline: Timeline | None

    @property
    def shown_prompt(self) -> str:
        """The end of the prompt's text, with dots before it where it is not all of the prompt."""
        return self.prompt_end if self.prompt["tokens"] <= PROMPT_END else f"…{self.prompt_end}"

    @property
    def useful(self) -> list[TraceEntry]:
        """The entries that were accepted at least once."""
        return [entry for entry in self.entries if entry.accepted]

    @property
    def triggers(self) -> list[TraceEvent]:
        """The events at tokens that were out of vocabulary."""
        return [event for event in self.events if event.out_of_vocabulary]
