"""From the notes of a call to a trace."""

from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest
from statistics import median
from typing import Any

import torch

from ...shortlists.retrieval.retriever import NO_TOKEN, Retrieval
from ...stats import DraftingStatistics
from .recording import RecordedRound, Recording
from .result import TracedToken, TraceEntry, TraceEvent, TraceSummary

# Tokens of the text before an event that are shown with it.
_CONTEXT = 8


class Analysis:
    """The `events`, `entries` and `tokens` of a `Trace`. `pieces` is what each token adds to the text."""

    def __init__(self, recording: Recording, pieces: list[str]):
        self._recording, self._pieces = recording, pieces
        self._rounds = [one for one in recording.rounds if one.verdict is not None]
        # By position whether the shortlist lacked a token, for tokens that had one.
        self._is_out = {
            one.verdict.start + place: missed
            for one in self._rounds
            for place, missed in zip(range(len(one.shortlists)), one.verdict.out_of_vocabulary.tolist(), strict=False)
        }
        # Events with the ids that may have entered by them.
        self._offers = list(self._retrieved() if recording.heard else self._observed())
        held = [self._from_context(one) for one in self._rounds]
        self._selects_anew = None in held
        self.entries = [] if self._selects_anew else self._entries(held)
        # Most of what a policy without retrieval observes comes to nothing.
        events = [one for one, _ in self._offers]
        self.events = [one for one in events if recording.heard or one.entered or one.out_of_vocabulary]
        self.events.sort(key=lambda one: one.position)
        places = {id(one): place for place, one in enumerate(self.events)}
        for entry in self.entries:
            entry.event = None if entry.event is None else places[id(self._offers[entry.event][0])]
        self.tokens = list(self._tokens())

    def _results(self) -> Iterator[tuple[Retrieval, int | None, int | None]]:
        """The retrievals, with the rounds that could have used them and that did."""
        for part in self._recording.heard:
            for one, taken in zip_longest(part.retrievals, part.taken):
                # The target's predictions for the prompt are known in the first round, when it has read it.
                given = 0 if one.event.top_ids is None else 1
                if one.event.is_verified:
                    starts = [of_round.verdict.start for of_round in self._rounds]
                    given = starts.index(one.event.start) + 1 if one.event.start in starts else given
                yield one, self._due(given), taken

    def _due(self, given: int) -> int | None:
        """The first round from `given` on that could draft."""
        return next((n for n in range(given, len(self._rounds)) if self._rounds[n].has_begun), None)

    def _retrieved(self) -> Iterator[tuple[TraceEvent, list[int]]]:
        for one, due, taken in self._results():
            came_in = set(one.changes.values())
            for found in one.found:
                token_id = None if found.trigger == NO_TOKEN else found.trigger
                ways = {"likely": found.likely.tolist(), "near": found.near.tolist()}
                # One token may follow several others.
                ways["following"] = list(dict.fromkeys(found.following.tolist()))
                event = self._event(found.position, token_id, ways, one.event.is_verified, due, taken)
                # By the first position that named it.
                wanted = [new for ids in event.found.values() for new in ids if new in came_in]
                came_in.difference_update(wanted)
                yield event, wanted

    def _observed(self) -> Iterator[tuple[TraceEvent, list[int]]]:
        """What the policy observed of the target, position by position."""
        for number, one in enumerate(self._rounds):
            seen: list[tuple[int, int | None, list[int], bool, int]] = []
            for prompt in one.prompts:
                ids, rows = prompt.token_ids.tolist(), [] if prompt.top_ids is None else prompt.top_ids.tolist()
                given = number if ids else number + 1
                seen += [(place, token_id, [], False, given) for place, token_id in enumerate(ids, prompt.start)]
                first = prompt.start + 1 - len(rows)
                seen += [(place, None, likely, False, given) for place, likely in enumerate(rows, first)]
            ids, top_ids = one.verdict.verified.tolist(), one.verdict.top_ids
            rows = [[]] * len(ids) if top_ids is None else top_ids.tolist()
            for place, pair in enumerate(zip(ids, rows, strict=True), one.verdict.start):
                seen.append((place, *pair, True, number + 1))
            for position, token_id, likely, is_verified, given in seen:
                due = self._due(given)
                event = self._event(position, token_id, {"likely": likely}, is_verified, due, due)
                yield event, [new for ids in event.found.values() for new in ids]

    def _event(
        self,
        position: int,
        token_id: int | None,
        ways: dict[str, Sequence[int]],
        is_verified: bool,
        due: int | None,
        taken: int | None,
    ) -> TraceEvent:
        size = self._recording.vocabulary.size
        given = {"text": [] if token_id is None else [token_id], **ways}
        # Heads and graphs are padded with ids that are no tokens.
        tokens = {name: [one for one in ids if 0 <= one < size] for name, ids in given.items()}
        found = {name: ids for name, ids in tokens.items() if ids}
        context = "".join(self._pieces[max(0, position - _CONTEXT) : position])
        is_out = is_verified and self._is_out.get(position, False)
        return TraceEvent(position, token_id, context, not is_verified, is_out, found, due, taken)

    def _from_context(self, one: RecordedRound) -> set[int] | None:
        """The ids on a round's shortlists that are not there without context; None if the policy selects from scratch
        at each draft step."""
        first = self._recording.first_ids
        if first is None or None in one.shortlists:
            return None
        distinct = {id(shortlist): shortlist for shortlist in one.shortlists}.values()
        ids = torch.cat([first[:0], *(shortlist.ids() for shortlist in distinct)])
        return set(ids[~torch.isin(ids, first)].tolist())

    def _entries(self, held: list[set[int]]) -> list[TraceEntry]:
        """An entry for each time that a token entered the shortlist."""
        entries: list[TraceEntry] = []
        staying: dict[int, TraceEntry] = {}
        latest: dict[int, int] = {}
        waiting = dict(enumerate(self._offers))
        for number, (one, ids) in enumerate(zip(self._rounds, held, strict=True)):
            if not one.shortlists:
                continue
            for index, (event, wanted) in list(waiting.items()):
                if event.taken is not None and event.taken <= number:
                    del waiting[index]
                    latest.update(dict.fromkeys(wanted, index))
            for token_id in staying.keys() - ids:
                staying.pop(token_id).left = number
            for token_id in sorted(ids - staying.keys()):
                staying[token_id] = TraceEntry(token_id, latest.get(token_id), ["unknown"], number)
                if token_id in latest:
                    event, _ = self._offers[latest[token_id]]
                    event.entered.append(token_id)
                    staying[token_id].ways = [name for name, found in event.found.items() if token_id in found]
                entries.append(staying[token_id])
            for token_id in one.verdict.drafted.tolist():
                if token_id in staying:
                    staying[token_id].drafted += 1
            for place, token_id in enumerate(one.verdict.verified[:-1].tolist()):
                if token_id in staying:
                    staying[token_id].accepted.append(one.verdict.start + place)
        return entries

    def _tokens(self) -> Iterator[TracedToken]:
        entry_at = {position: index for index, one in enumerate(self.entries) for position in one.accepted}
        for number, one in enumerate(self._rounds):
            ids = one.verdict.verified.tolist()
            for position, token_id in enumerate(ids, one.verdict.start):
                yield TracedToken(
                    position=position,
                    token_id=token_id,
                    text=self._pieces[position],
                    round=number,
                    drafted=position - one.verdict.start < len(ids) - 1,
                    out_of_vocabulary=self._is_out.get(position),
                    by_context=None if self._selects_anew else position in entry_at,
                    entry=entry_at.get(position),
                )

    def summary(self, stats: DraftingStatistics) -> TraceSummary:
        """The figures, with those that the call counted."""
        figures: dict[str, Any] = {}
        if not self._selects_anew:
            accepted = [len(one.accepted) for one in self.entries]
            figures = {"entered": len(accepted), "entered_drafted": sum(one.drafted > 0 for one in self.entries)}
            figures |= {"entered_accepted": sum(map(bool, accepted)), "accepted_by_context": sum(accepted)}
        if self._recording.heard:
            results = list(self._results())
            late = [taken is None or taken > due for _, due, taken in results if due is not None]
            seconds = median(one.end - one.start for one, _, _ in results) if results else 0.0
            figures |= {"results": len(late), "late": sum(late), "retrieval_milliseconds": 1e3 * seconds}
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


def text_pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """What each token adds to the text, as some tokenizers put a space before a word only if another one stands before
    it. A part of a character is shown as "�"."""
    pieces = []
    for place in range(len(token_ids)):
        start = max(0, place - _CONTEXT)
        before, after = (decoded(tokenizer, token_ids[start:end]) for end in (place, place + 1))
        kept = [*takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))]
        pieces.append(after[len(kept) :])
    return pieces


def decoded(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of tokens, in characters that a file can hold."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
