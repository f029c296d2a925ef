"""A trace as plain values."""

from dataclasses import dataclass, field
from typing import Any

from .settings import TraceSettings

# How a token was found, in the order in which the ways are shown.
WAYS = {
    "text": "in the text",
    "likely": "the target's likeliest",
    "near": "near it",
    "following": "graph successors",
    "unknown": "another part of the policy",
}
# Tokens at the end of the prompt that are shown.
PROMPT_END = 40


@dataclass(frozen=True)
class TracedToken:
    """A token that was generated."""

    position: int  # in the text, counted from the prompt's first token
    token_id: int
    text: str  # what it adds to the text
    round: int  # the round that produced it, from 0
    drafted: bool  # an accepted draft, not the target's own token of the round
    out_of_vocabulary: bool | None  # whether the shortlist of its draft step lacked it; None without such a step
    # An accepted draft that was on the shortlist because of the context alone. None, as the entry, for policies that
    # select from scratch at each draft step.
    by_context: bool | None
    entry: int | None  # the index of the entry that it was drafted from, if `by_context`


@dataclass
class TraceEvent:
    """A position at which tokens were found that could enter the shortlist."""

    position: int  # in the text
    token_id: int | None  # the token there; None if it did not matter
    context: str  # the end of the text before it
    in_prompt: bool
    out_of_vocabulary: bool  # whether the shortlist lacked the token; never in the prompt
    found: dict[str, list[int]]  # ids by way (`WAYS`), each in the order of its way
    due: int | None  # the first round that could have used them; None after the last
    taken: int | None  # the round that used them
    entered: list[int] = field(default_factory=list)  # the ids that entered the shortlist by this event


@dataclass
class TraceEntry:
    """A token that entered the shortlist from the context, and its use while it stayed."""

    token_id: int
    event: int | None  # the index of the event that brought it, if known
    ways: list[str]  # how it was found there
    round: int  # the first round that had it
    left: int | None = None  # the first later round without it
    drafted: int = 0  # how often; nodes of a tree count each
    accepted: list[int] = field(default_factory=list)  # the positions at which it was an accepted draft


@dataclass(frozen=True)
class TraceSummary:
    """The figures of a trace. Policies that select from scratch have None of `entered` to `accepted_by_context`, and
    policies that do not retrieve have None of the last three."""

    tokens: int  # new tokens
    rounds: int
    acceptance_length: float  # tokens per round, the target's own included
    checked: int  # new tokens that had a shortlist
    out_of_vocabulary: int  # how many of these it lacked
    active_vocabulary: float  # mean number of ids on a shortlist
    accepted: int  # accepted drafts
    entered: int | None = None  # entries, and how many of them were drafted, and accepted
    entered_drafted: int | None = None
    entered_accepted: int | None = None
    accepted_by_context: int | None = None  # accepted drafts that were on the shortlist because of the context alone
    results: int | None = None  # retrievals that a round could have used
    late: int | None = None  # how many of these were used a round too late, or never
    retrieval_milliseconds: float | None = None  # median


@dataclass(frozen=True)
class Trace:
    """One prompt, traced."""

    settings: TraceSettings
    policy: str  # its label
    prompt: dict[str, Any]  # identifier, domain and number of tokens
    prompt_end: str  # the end of its text
    models: dict[str, Any]  # descriptions of target and drafter
    described_policy: dict[str, Any]  # name, settings and digests of its tensors
    threads: int  # CPU threads in use
    started: str  # UTC time in ISO format
    finished: str
    tokens: list[TracedToken]  # in the order of the text, as the events
    events: list[TraceEvent]
    entries: list[TraceEntry]  # in the order in which they entered
    texts: dict[int, str]  # of every id that the others name
    summary: TraceSummary

    @property
    def useful(self) -> list[TraceEntry]:
        """The entries that were accepted at least once."""
        return [entry for entry in self.entries if entry.accepted]

    @property
    def triggers(self) -> list[TraceEvent]:
        """The events at tokens that were out of vocabulary."""
        return [event for event in self.events if event.out_of_vocabulary]
