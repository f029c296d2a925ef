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
    """A token that was generated.

    Args:
        position: in the text, counted from the prompt's first token.
        token_id: its id.
        text: what it adds to the text.
        round: the round that produced it, from 0.
        drafted: it was an accepted draft, not the target's own token of the round.
        out_of_vocabulary: whether the shortlist of its draft step lacked it; None without such a step.
        by_context: it was an accepted draft that was on the shortlist because of the context only; None for policies
            that select from scratch at each draft step.
        entry: the index of the entry that it was drafted from, if it is `by_context`.
    """

    position: int
    token_id: int
    text: str
    round: int
    drafted: bool
    out_of_vocabulary: bool | None
    by_context: bool | None
    entry: int | None


@dataclass
class TraceEvent:
    """A position at which tokens were found that could enter the shortlist.

    Args:
        position: in the text.
        token_id: the token there; None if it did not matter.
        context: the end of the text before it.
        in_prompt: whether it is in the prompt.
        out_of_vocabulary: whether the shortlist lacked the token; never in the prompt.
        found: the ids that were found, by way (`WAYS`), each in the order of its way.
        due: the first round that could have used them; None after the last.
        taken: the round that used them, or None.
        entered: the ids that entered the shortlist by this event.
    """

    position: int
    token_id: int | None
    context: str
    in_prompt: bool
    out_of_vocabulary: bool
    found: dict[str, list[int]]
    due: int | None
    taken: int | None
    entered: list[int] = field(default_factory=list)


@dataclass
class TraceEntry:
    """A token that entered the shortlist from the context, and its use while it stayed.

    Args:
        token_id: its id.
        event: the index of the event that brought it, if known.
        ways: how it was found there.
        round: the first round that had it.
        left: the first later round without it, or None.
        drafted: how often it was drafted; nodes of a tree count each.
        accepted: the positions at which it was an accepted draft.
    """

    token_id: int
    event: int | None
    ways: list[str]
    round: int
    left: int | None = None
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TraceSummary:
    """The figures of a trace.

    Args:
        tokens: new tokens.
        rounds: rounds.
        acceptance_length: tokens per round, the target's own included.
        checked: new tokens that had a shortlist.
        out_of_vocabulary: how many of these it lacked.
        active_vocabulary: mean number of ids on a shortlist.
        accepted: accepted drafts.
        entered: how often a token entered the shortlist from the context. This and the next three are None for
            policies that select from scratch at each draft step.
        entered_drafted: how many of these were drafted.
        entered_accepted: how many were accepted.
        accepted_by_context: accepted drafts that were on the shortlist because of the context only.
        results: retrievals that a round could have used. This and the next two are None for policies that do not
            retrieve.
        late: how many of these were used a round too late, or never.
        retrieval_milliseconds: their median time.
    """

    tokens: int
    rounds: int
    acceptance_length: float
    checked: int
    out_of_vocabulary: int
    active_vocabulary: float
    accepted: int
    entered: int | None = None
    entered_drafted: int | None = None
    entered_accepted: int | None = None
    accepted_by_context: int | None = None
    results: int | None = None
    late: int | None = None
    retrieval_milliseconds: float | None = None


@dataclass(frozen=True)
class Trace:
    """One prompt, traced.

    Args:
        settings: what was asked for.
        policy: the policy's label.
        prompt: identifier, domain and number of tokens.
        prompt_end: the end of the prompt's text.
        models: descriptions of target and drafter.
        described_policy: the policy's name, settings and digests of its tensors.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: likewise.
        tokens: the new tokens, in order.
        events: in the order of the text.
        entries: in order.
        texts: of every id that the others name.
        summary: the figures.
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

    @property
    def useful(self) -> list[TraceEntry]:
        """The entries that were accepted at least once."""
        return [entry for entry in self.entries if entry.accepted]

    @property
    def triggers(self) -> list[TraceEvent]:
        """The events at tokens that were out of vocabulary."""
        return [event for event in self.events if event.out_of_vocabulary]
