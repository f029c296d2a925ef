"""A trace on a terminal, as an HTML page and as JSON values."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ...errors import counted, shown_text
from ...files import replacing
from ..provenance import provenance
from ..tables import FittedTable
from .result import PROMPT_END, WAYS, Trace, TraceEntry, TraceEvent

# 2: no timeline, which is a file of its own.
SCHEMA_VERSION = 2

# Most tokens of a way, characters of a context and rows of a list on a terminal; pages and files have all rows.
_TOKENS, _CONTEXT, _ROWS = 8, 40, 24
# Columns before what was found.
_INDENT = 8
# Marks and colours of tokens in the text.
_OUT, _THANKS = ("⟦", "⟧", "bold red"), ("«", "»", "bold green")
# Rich escapes the text; the policy forbids scripts on top of that.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>hf-dynspec trace</title>
<style>{stylesheet} body {{ color: {foreground}; background-color: {background}; }}</style>
</head>
<body><pre style="font-family: Menlo, 'DejaVu Sans Mono', monospace">{code}</pre></body>
</html>
"""
_PAGE_WIDTH = 120


def shown_token(text: str, longest: int = 24) -> str:
    """A token's text on one line, with visible spaces at its ends."""
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or "(nothing)"
    start, end = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return shown_text("␣" * start + inner + "␣" * end, longest)


def shown_lines(text: str) -> str:
    """Text without control and invisible characters, which are written out; line breaks and all spaces stay."""
    return "".join(one if one == "\n" or unicodedata.category(one) == "Zs" else shown_text(one) for one in text)


def text_report(trace: Trace, rows: int | None = _ROWS) -> Iterator[RenderableType]:
    """The text, the events, the entries and the figures, with at most so many rows of each (None: all)."""
    yield _heading(
        f"{trace.policy} on {trace.prompt['identifier']}, {counted(trace.prompt['tokens'], 'token')} of prompt"
    )
    dots = "…" if trace.prompt["tokens"] > PROMPT_END else ""
    text = Text.assemble((shown_lines(f"{dots}{trace.prompt_end}"), "dim"))
    for token in trace.tokens:
        mark = _OUT if token.out_of_vocabulary else _THANKS if token.by_context else None
        shown = shown_lines(token.text)
        text.append(_mark(mark, shown) if mark else shown)
    yield text
    yield Text.assemble(_mark(_OUT, "out of vocabulary"), "   ", _mark(_THANKS, "accepted, by the context alone"))
    if trace.triggers:
        yield _heading("Found at tokens that were out of vocabulary")
        for event in trace.triggers[:rows]:
            context = Text(f"…{shown_text(event.context[-_CONTEXT:])}", style="dim")
            token = _mark(_OUT, shown_token(trace.texts[event.token_id]))
            yield Text.assemble((f"{event.position:>6}  ", "bold"), context, token)
            yield Padding(_found(trace, event), (0, 0, 0, _INDENT))
        yield from _left_out(trace.triggers, rows)
    if trace.useful:
        yield _heading("Entered the shortlist from the context, and were accepted later")
        yield _entry_table(trace, trace.useful[:rows])
        yield from _left_out(trace.useful, rows)
    yield _heading("In figures")
    for name, value in summary_rows(trace):
        yield Text.assemble((f"{name}: ", "dim"), value)
    if trace.summary.entered is None:
        yield Text("This policy selects from scratch at each draft step: no token enters and stays.", style="italic")
    elif not trace.summary.entered:
        yield Text("Nothing entered from the context: the shortlist is what it was before the prompt.", style="italic")


def summary_rows(trace: Trace) -> list[tuple[str, str]]:
    """The figures, by their names."""
    one = trace.summary
    length = f"acceptance length {one.acceptance_length:.2f}"
    missed = _share(one.out_of_vocabulary, one.checked)
    rows = [
        ("new tokens", f"{one.tokens} in {counted(one.rounds, 'round')}, {length}"),
        ("out of vocabulary", f"{one.out_of_vocabulary} of {one.checked} ({missed})"),
        ("active vocabulary", counted(round(one.active_vocabulary), "token")),
    ]
    if one.entered is not None:
        used = f"{one.entered_drafted:,} drafted, {one.entered_accepted:,} accepted"
        rows.append(("entered from the context", f"{one.entered:,}; {used}"))
        share = _share(one.accepted_by_context, one.accepted)
        rows.append(("accepted drafts", f"{one.accepted}; {one.accepted_by_context} ({share}) by the context alone"))
    if one.results is not None:
        late = f"{one.late} of {counted(one.results, 'result')} came after the next round began"
        rows.append(("retrieval", f"{one.retrieval_milliseconds:.2f} ms (median); {late}"))
    return rows


def write_page(path: Path, trace: Trace) -> None:
    """Write one HTML page with everything, in one step. Raises `OSError` if it cannot be written."""
    console = Console(record=True, width=_PAGE_WIDTH, file=StringIO(), color_system="truecolor", force_terminal=True)
    for part in text_report(trace, rows=None):
        console.print(part)
    with replacing(path) as scratch:
        console.save_html(str(scratch), code_format=_PAGE)


def to_dict(trace: Trace, command: Sequence[str] | None = None) -> dict[str, Any]:
    """All of a trace and its provenance, see `provenance`, as JSON values."""
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
    }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _left_out(rows: Sequence[Any], shown: int | None) -> Iterator[Text]:
    if shown is not None and len(rows) > shown:
        yield Text(f"… {len(rows) - shown} more", style="dim")


def _heading(text: str) -> Text:
    return Text(f"\n{shown_text(text)}", style="bold")


def _mark(mark: tuple[str, str, str], text: str) -> Text:
    before, after, style = mark
    return Text(f"{before}{text}{after}", style=style)


def _found(trace: Trace, event: TraceEvent) -> Text:
    ways = {WAYS[name]: ids for name, ids in event.found.items() if name != "text"}
    lines = [Text.assemble((f"{name}: ", "italic"), _listed(trace, ids)) for name, ids in ways.items()]
    entered = f"{len(event.entered) or 'none'} entered"
    useful = [one.token_id for one in trace.useful if one.event is not None and trace.events[one.event] is event]
    used = f", later accepted: {_listed(trace, useful)}" if useful else ""
    return Text("\n").join([*lines, Text(entered + used, style="dim")])


def _listed(trace: Trace, ids: Sequence[int]) -> str:
    more = len(ids) - _TOKENS
    shown = " · ".join(shown_token(trace.texts[token_id]) for token_id in ids[:_TOKENS])
    return f"{shown} · … {more} more" if more > 0 else shown


def _entry_table(trace: Trace, entries: Sequence[TraceEntry]) -> FittedTable:
    headings = ["token", "found at", "as", "drafted", "accepted", "first after"]
    table = FittedTable("in the order in which they entered", headings, labels=3)
    for entry in entries:
        where, after = "elsewhere", ""
        if entry.event is not None:
            event = trace.events[entry.event]
            at = "" if event.token_id is None else f" {shown_token(trace.texts[event.token_id])}"
            where = f"{'the prompt, ' if event.in_prompt else ''}{event.position}{at}"
            after = counted(entry.accepted[0] - event.position, "token")
        ways = ", ".join(WAYS[name] for name in entry.ways)
        counts = str(entry.drafted), str(len(entry.accepted)), after
        table.add_row(shown_token(trace.texts[entry.token_id]), where, ways, *counts)
    return table
