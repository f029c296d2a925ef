"""A trace as text for a terminal, and as JSON values that say where the figures come from."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ...errors import counted, shown_text
from ..provenance import provenance
from ..tables import FittedTable
from .result import WAYS, Trace, TracedToken, TraceEntry, TraceEvent

SCHEMA_VERSION = 1

# How many are shown of the tokens of a way, of the characters of a context and of the rows of a list; files have all.
_TOKENS, _CONTEXT, _ROWS = 8, 40, 24
# Columns before what was found.
_INDENT = 8
# Of the characters that Python takes for not printable, those that are seen as what they are: a line break, and the
# spaces beside the usual one, such as French puts before a colon.
_BREAKS_AND_SPACES = {"\n", *(chr(code) for code in range(0x80, 0x3001) if unicodedata.category(chr(code)) == "Zs")}
_STRETCHES = re.compile(f"[{''.join(_BREAKS_AND_SPACES)}]|[^{''.join(_BREAKS_AND_SPACES)}]+")
# Marks and colours of tokens in the text.
_OUT, _THANKS = ("⟦", "⟧", "bold red"), ("«", "»", "bold green")


# What all readings have in common ------------------------------------------------------------------------------------


def shown_token(text: str, longest: int = 24) -> str:
    """A token's text by itself: spaces at its ends can be seen, and whatever it holds stays on its line."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or "(nothing)"
    start, end = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return shown_text("␣" * start + inner + "␣" * end, longest)


def shown_lines(text: str) -> str:
    """A stretch of text: line breaks and spaces of every width stay, and nothing else that a terminal or a page could
    take for its own."""
    return "".join(one if one in _BREAKS_AND_SPACES else shown_text(one) for one in _STRETCHES.findall(text))


def summary_rows(trace: Trace) -> list[tuple[str, str]]:
    """The figures, by their names."""
    one = trace.summary
    missed = f"{one.out_of_vocabulary} of {one.checked}"
    rows = [
        (
            "new tokens",
            f"{one.tokens} in {counted(one.rounds, 'round')}, acceptance length {one.acceptance_length:.2f}",
        ),
        ("out of vocabulary", f"{missed} ({_share(one.out_of_vocabulary, one.checked)})"),
        ("active vocabulary", f"{counted(round(one.active_vocabulary), 'token')}"),
    ]
    if one.entered is not None:
        came_of_it = f"drafted {one.entered_drafted:,}, accepted {one.entered_accepted:,}"
        share = _share(one.accepted_by_context, one.accepted)
        by_context = f"{one.accepted_by_context} ({share}) only the context made possible"
        rows.append(("came in from the context", f"{one.entered:,}, of which {came_of_it}"))
        rows.append(("accepted drafts", f"{one.accepted}, of which {by_context}"))
    if one.results is not None:
        late = f"{one.late} of {counted(one.results, 'result')} came after the next round's begin"
        rows.append(("retrieval", f"{one.retrieval_milliseconds:.2f} ms in the median; {late}"))
    return rows


def note(trace: Trace) -> str | None:
    """Why nothing came in, where nothing could or did."""
    if trace.summary.entered is None:
        return "This policy chooses anew for each draft step: no token comes in from the context and stays."
    if trace.summary.entered == 0:
        return "Nothing came in from the context: the shortlist is what it was before the prompt."
    return None


def later(trace: Trace, entry: TraceEntry) -> str:
    """How long after it was retrieved a token was first accepted."""
    if entry.event is None:
        return ""
    tokens = entry.accepted[0] - trace.events[entry.event].position
    return counted(tokens, "token")


def origin(trace: Trace, entry: TraceEntry) -> str:
    """At which token something was retrieved."""
    if entry.event is None:
        return "elsewhere"
    event = trace.events[entry.event]
    where = "the prompt, " if event.in_prompt else ""
    at = "" if event.token_id is None else f" {shown_token(trace.texts[event.token_id])}"
    return f"{where}{event.position}{at}"


def ways_of(event: TraceEvent) -> dict[str, list[int]]:
    """What was found at a position besides the token that stands there."""
    return {name: ids for name, ids in event.found.items() if name != "text"}


def way_names(entry: TraceEntry) -> str:
    """By which ways it was found, in words."""
    return ", ".join(WAYS[name] for name in entry.ways)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


# The terminal --------------------------------------------------------------------------------------------------------


def text_report(trace: Trace) -> Iterator[RenderableType]:
    """What a terminal shows, from the text to the figures."""
    yield _heading(
        f"{trace.policy} on {trace.prompt['identifier']}, {counted(trace.prompt['tokens'], 'token')} of prompt"
    )
    yield _marked_text(trace)
    yield Text.assemble(
        _mark(_OUT, "out of vocabulary"), "   ", _mark(_THANKS, "accepted, thanks to the context alone"), style="dim"
    )
    if trace.triggers:
        yield _heading("What was retrieved where a token was out of vocabulary")
        for event in trace.triggers[:_ROWS]:
            yield from _trigger(trace, event)
        yield from _left_out(len(trace.triggers))
    if trace.useful:
        yield _heading("What came in from the context, and was drafted and accepted later")
        yield _entry_table(trace)
        yield from _left_out(len(trace.useful))
    yield _heading("In figures")
    for name, value in summary_rows(trace):
        yield Text.assemble((f"{name}: ", "dim"), value)
    if note(trace):
        yield Text(note(trace), style="italic")


def _left_out(count: int) -> Iterator[Text]:
    if count > _ROWS:
        yield Text(f"… {count - _ROWS} more", style="dim")


def _heading(text: str) -> Text:
    return Text(f"\n{shown_text(text)}", style="bold")


def _mark(mark: tuple[str, str, str], text: str) -> Text:
    before, after, style = mark
    return Text(f"{before}{text}{after}", style=style)


def _marked_text(trace: Trace) -> Text:
    text = Text()
    text.append(shown_lines(trace.shown_prompt), style="dim")
    for token in trace.tokens:
        mark = _mark_of(token)
        text.append(_mark(mark, shown_lines(token.text)) if mark else shown_lines(token.text))
    return text


def _mark_of(token: TracedToken) -> tuple[str, str, str] | None:
    if token.out_of_vocabulary:
        return _OUT
    return _THANKS if token.by_context else None


def _trigger(trace: Trace, event: TraceEvent) -> Iterator[RenderableType]:
    """A token in its context, and below it what was found there."""
    context = Text(f"…{shown_text(event.context[-_CONTEXT:])}", style="dim")
    token = _mark(_OUT, shown_token(trace.texts[event.token_id]))
    yield Text.assemble((f"{event.position:>6}  ", "bold"), context, token)
    yield Padding(_found(trace, event), (0, 0, 0, _INDENT))


def _found(trace: Trace, event: TraceEvent) -> Text:
    lines = [Text.assemble((f"{WAYS[name]}: ", "italic"), _listed(trace, ids)) for name, ids in ways_of(event).items()]
    came_in = f"{len(event.entered)} came in" if event.entered else "none came in"
    useful = [one for one in trace.useful if one.event is not None and trace.events[one.event] is event]
    used = f", later accepted: {_listed(trace, [one.token_id for one in useful])}" if useful else ""
    return Text("\n").join([*lines, Text(came_in + used, style="dim")])


def _listed(trace: Trace, ids: Sequence[int]) -> str:
    more = len(ids) - _TOKENS
    shown = " · ".join(shown_token(trace.texts[token_id]) for token_id in ids[:_TOKENS])
    return f"{shown} · … {more} more" if more > 0 else shown


def _entry_table(trace: Trace) -> FittedTable:
    table = FittedTable(
        "in the order in which they came in",
        ["token", "retrieved at", "by way of", "drafted", "accepted", "first after"],
        labels=3,
    )
    for entry in trace.useful[:_ROWS]:
        labels = (shown_token(trace.texts[entry.token_id]), origin(trace, entry), way_names(entry))
        table.add_row(*labels, str(entry.drafted), str(len(entry.accepted)), later(trace, entry))
    return table


# The file ------------------------------------------------------------------------------------------------------------


def to_dict(trace: Trace, command: Sequence[str] | None = None) -> dict[str, Any]:
    """All of a trace and where it comes from, as JSON values. Holds no path beyond its last two parts.

    Args:
        trace: the trace.
        command: the words of the command line (None: it was called from Python).
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "provenance": provenance(command, trace.started, trace.finished, trace.threads),
        "settings": trace.settings.to_dict(),
        "models": trace.models,
        "policy": {"label": trace.policy, **trace.described_policy},
        "prompt": {**trace.prompt, "end": trace.prompt_end},
        "summary": asdict(trace.summary),
        "tokens": [asdict(one) for one in trace.tokens],
        "events": [asdict(one) for one in trace.events],
        "entries": [asdict(one) for one in trace.entries],
        "texts": {str(token_id): text for token_id, text in trace.texts.items()},
        "timeline": None if trace.timeline is None else asdict(trace.timeline),
    }
