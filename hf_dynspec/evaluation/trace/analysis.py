"""From what was noted of a call to what a trace says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median
from typing import Any

import torch

from ...protocol import Shortlist
from ...shortlists.retrieval.retriever import NO_TOKEN, Retrieval
from ...stats import DraftingStatistics
from .recording import RecordedRound, Recording
from .result import TracedToken, TraceEntry, TraceEvent, TraceSummary

# Tokens of the text before an event that are shown with it.
_CONTEXT = 8


@dataclass
class _Offer:
    """A position at which something was found, before it is known what came of it. `due` and `taken` as for
    `TraceEvent`; `wanted` are the ids that may have come in by it."""

    position: int
    token_id: int | None
    found: dict[str, list[int]]
    wanted: list[int]
    due: int | None
    taken: int | None
    is_verified: bool
    entered: list[int] = field(default_factory=list)


@dataclass
class Analysis:
    """What came of a recorded call.

    Args:
        recording: what was noted.
        pieces: what each token of the text, the prompt's too, adds to it.
    """

    recording: Recording
    pieces: list[str]

    def __post_init__(self):
        self._rounds = [one for one in self.recording.rounds if one.verdict is not None]
        # Where no part tells what it retrieves, what came in is of what the policy was shown.
        self._retrieves = bool(self.recording.heard)
        self._offers = list(self._retrieved() if self._retrieves else self._shown())
        self._is_out = self._out_of_vocabulary()
        self._held = [self._from_context(one) for one in self._rounds]
        self.entries = self._entries()
        self.events = self._events()
        self.tokens = list(self._tokens())

    # What was found ------------------------------------------------------------------------------------------------

    def _due(self, given: int) -> int | None:
        """The first round that drafts, from the one before which something was given on."""
        return next((n for n in range(given, len(self._rounds)) if self._rounds[n].has_begun), None)

    def _results(self) -> Iterator[tuple[Retrieval, int | None, int | None]]:
        """What was retrieved, with the rounds in which it was due and taken up."""
        for part in self.recording.heard:
            for one, taken in zip_longest(part.retrievals, part.taken):
                yield one, self._due(self._given(one)), taken

    def _retrieved(self) -> Iterator[_Offer]:
        """What the workers found, position by position."""
        for one, due, taken in self._results():
            came_in = set(one.changes.values())
            for found in one.found:
                ways = {"likely": found.likely.tolist(), "near": found.near.tolist()}
                # What follows one of several tokens may follow others too.
                ways["following"] = list(dict.fromkeys(found.following.tolist()))
                token_id = None if found.trigger == NO_TOKEN else found.trigger
                named = self._named({"text": () if token_id is None else (token_id,), **ways})
                # By the first position that named it.
                wanted = [new for ids in named.values() for new in ids if new in came_in]
                came_in.difference_update(wanted)
                yield _Offer(found.position, token_id, named, wanted, due, taken, one.event.is_verified)

    def _given(self, one: Retrieval) -> int:
        """The round before which an event was given to the worker."""
        for number, of_round in enumerate(self._rounds):
            if one.event.is_verified and of_round.verdict.start == one.event.start:
                return number + 1
        # What the target says of the prompt is known when it has read it, in the first round.
        return 0 if one.event.top_ids is None else 1

    def _shown(self) -> Iterator[_Offer]:
        """What the policy was shown of the target, position by position."""
        for number, one in enumerate(self._rounds):
            for prompt in one.prompts:
                ids = prompt.token_ids.tolist()
                given = number if ids else number + 1
                for place, token_id in enumerate(ids):
                    yield self._offer(prompt.start + place, token_id, None, given, False)
                rows = [] if prompt.top_ids is None else prompt.top_ids.tolist()
                for place, likely in enumerate(rows):
                    yield self._offer(prompt.start + 1 - len(rows) + place, None, likely, given, False)
            verdict = one.verdict
            rows = [None] * verdict.verified.shape[0] if verdict.top_ids is None else verdict.top_ids.tolist()
            for place, (token_id, likely) in enumerate(zip(verdict.verified.tolist(), rows, strict=True)):
                yield self._offer(verdict.start + place, token_id, likely, number + 1, True)

    def _named(self, ways: dict[str, Sequence[int]]) -> dict[str, list[int]]:
        """Ways that found something, without what is no token: the padding of a head and of a graph."""
        size = self.recording.vocabulary.size
        tokens = {name: [token_id for token_id in ids if 0 <= token_id < size] for name, ids in ways.items()}
        return {name: ids for name, ids in tokens.items() if ids}

    def _offer(
        self, position: int, token_id: int | None, likely: list[int] | None, given: int, is_verified: bool
    ) -> _Offer:
        found = self._named({"text": () if token_id is None else (token_id,), "likely": likely or ()})
        due = self._due(given)
        wanted = [one for ids in found.values() for one in ids]
        return _Offer(position, token_id, found, wanted, due, due, is_verified)

    # What came of it -----------------------------------------------------------------------------------------------

    def _from_context(self, one: RecordedRound) -> set[int] | None:
        """What a round's shortlists held that the policy does not hold without context; None where it chooses anew for
        each draft step."""
        first = self.recording.first_ids
        if first is None or any(shortlist is None for shortlist in one.shortlists):
            return None
        table = torch.zeros(self.recording.vocabulary.size, dtype=torch.bool, device=first.device)
        is_first = table.index_fill_(0, first, True)
        ids = [shortlist.ids() for shortlist in _distinct(one.shortlists)]
        return {token_id for some in ids for token_id in some[~is_first[some]].tolist()}

    @property
    def chooses_anew(self) -> bool:
        """Whether the policy chooses anew for each draft step, so that nothing comes in from the context."""
        return any(held is None for held in self._held)

    def _entries(self) -> list[TraceEntry]:
        """What came onto the shortlist, each time that it did."""
        if self.chooses_anew:
            return []
        latest: dict[int, int] = {}
        offered: set[int] = set()
        entries: list[TraceEntry] = []
        staying: dict[int, int] = {}
        for number, (one, held) in enumerate(zip(self._rounds, self._held, strict=True)):
            if not one.shortlists:
                continue
            for index, offer in enumerate(self._offers):
                if index not in offered and offer.taken is not None and offer.taken <= number:
                    offered.add(index)
                    latest.update(dict.fromkeys(offer.wanted, index))
            for token_id in [token_id for token_id in staying if token_id not in held]:
                index = staying.pop(token_id)
                entries[index] = replace(entries[index], left=number)
            for token_id in sorted(held - set(staying)):
                staying[token_id] = len(entries)
                entries.append(self._entry(token_id, latest.get(token_id), number))
            self._count(entries, staying, one)
        return entries

    def _entry(self, token_id: int, event: int | None, number: int) -> TraceEntry:
        ways = ["unknown"]
        if event is not None:
            self._offers[event].entered.append(token_id)
            ways = [name for name, ids in self._offers[event].found.items() if token_id in ids]
        return TraceEntry(token_id, event, ways, number, None, 0, [])

    def _count(self, entries: list[TraceEntry], staying: dict[int, int], one: RecordedRound) -> None:
        """Count what was drafted of the entries in a round, and accepted."""
        for token_id in one.verdict.drafted.tolist():
            if token_id in staying:
                index = staying[token_id]
                entries[index] = replace(entries[index], drafted=entries[index].drafted + 1)
        for place, token_id in enumerate(one.verdict.verified[:-1].tolist()):
            if token_id in staying:
                entries[staying[token_id]].accepted.append(one.verdict.start + place)

    def _out_of_vocabulary(self) -> dict[int, bool]:
        """By position whether the shortlist lacked a token, of those that had one."""
        is_out = {}
        for one in self._rounds:
            missed = one.verdict.out_of_vocabulary.tolist()
            for place in range(min(len(missed), len(one.shortlists))):
                is_out[one.verdict.start + place] = missed[place]
        return is_out

    def _events(self) -> list[TraceEvent]:
        """The positions, in order; entries then name events by their index."""
        # Where nobody tells what was retrieved, most of what was shown comes to nothing.
        told = [
            index
            for index, one in enumerate(self._offers)
            if self._retrieves or one.entered or (one.is_verified and self._is_out.get(one.position))
        ]
        order = sorted(told, key=lambda index: self._offers[index].position)
        place_of = {index: place for place, index in enumerate(order)}
        self.entries = [one if one.event is None else replace(one, event=place_of[one.event]) for one in self.entries]
        return [
            TraceEvent(
                position=one.position,
                token_id=one.token_id,
                context="".join(self.pieces[max(0, one.position - _CONTEXT) : one.position]),
                in_prompt=not one.is_verified,
                out_of_vocabulary=one.is_verified and self._is_out.get(one.position, False),
                found=one.found,
                entered=one.entered,
                due=one.due,
                taken=one.taken,
            )
            for one in (self._offers[index] for index in order)
        ]

    def _tokens(self) -> Iterator[TracedToken]:
        entry_at = {position: index for index, one in enumerate(self.entries) for position in one.accepted}
        for number, one in enumerate(self._rounds):
            ids = one.verdict.verified.tolist()
            for place, token_id in enumerate(ids):
                position, drafted = one.verdict.start + place, place < len(ids) - 1
                yield TracedToken(
                    position=position,
                    token_id=token_id,
                    text=self.pieces[position],
                    round=number,
                    drafted=drafted,
                    out_of_vocabulary=self._is_out.get(position),
                    by_context=None if self.chooses_anew else position in entry_at,
                    entry=entry_at.get(position),
                )

    # Figures -------------------------------------------------------------------------------------------------------

    def summary(self, stats: DraftingStatistics) -> TraceSummary:
        """The figures, those that the call counted among them."""
        entries, chooses_anew = self.entries, self.chooses_anew
        figures: dict[str, Any] = dict.fromkeys(
            ("entered", "entered_drafted", "entered_accepted", "accepted_by_context")
        )
        if not chooses_anew:
            figures["entered"] = len(entries)
            figures["entered_drafted"] = sum(one.drafted > 0 for one in entries)
            figures["entered_accepted"] = sum(bool(one.accepted) for one in entries)
            figures["accepted_by_context"] = sum(len(one.accepted) for one in entries)
        figures.update(dict.fromkeys(("results", "late", "retrieval_milliseconds")))
        if self._retrieves:
            figures.update(self._lateness())
        return TraceSummary(
            tokens=len(self.tokens),
            rounds=len(self._rounds),
            acceptance_length=stats.acceptance_length,
            checked=len(self._is_out),
            out_of_vocabulary=sum(self._is_out.values()),
            active_vocabulary=stats.active_vocabulary,
            accepted=stats.accepted,
            **figures,
        )

    def _lateness(self) -> dict[str, Any]:
        results = list(self._results())
        late = [taken is None or taken > due for _, due, taken in results if due is not None]
        seconds = median(one.end - one.start for one, _, _ in results) if results else 0.0
        return {"results": len(late), "late": sum(late), "retrieval_milliseconds": 1e3 * seconds}


def _distinct(shortlists: list[Shortlist]) -> list[Shortlist]:
    return list({id(one): one for one in shortlists}.values())


def text_pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """What each token adds to the text, as some tokenizers put a space before a word only where another one stands
    before it. A part of a character is shown as "�"."""
    pieces = []
    for place in range(len(token_ids)):
        start = max(0, place - _CONTEXT)
        before, after = (_decoded(tokenizer, token_ids[start:end]) for end in (place, place + 1))
        kept = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        pieces.append(after[min(len(before), len(after)) if kept is None else kept :])
    return pieces


def text_of(tokenizer: Any, token_id: int) -> str:
    """The text of one token by itself."""
    return _decoded(tokenizer, [token_id])


def _decoded(tokenizer: Any, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # What no file could hold.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
