"""A trace as one page of HTML that needs nothing else: no script, no font, no picture from elsewhere.

All text of a page comes through `_text`, as tokens may hold anything; the page forbids scripts on top of that.
"""

import html
from collections.abc import Iterable
from pathlib import Path

from ...errors import counted
from ...files import replacing
from .report import later, note, origin, shown_lines, shown_token, summary_rows, way_names, ways_of
from .result import WAYS, Trace, TracedToken, TraceEntry, TraceEvent
from .timeline import COLORS, THREADS, sections_of, timeline_title

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc; --dim: #666;
  --draft: #dce9f7; --out: #f9cfd3; --thanks: #cdeac9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --line: #444; --dim: #9a9a9a;
  --draft: #203348; --out: #6b2530; --thanks: #1f4d2a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.text { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); padding: 1rem; }
.prompt, .dim { color: var(--dim); }
.draft { background: var(--draft); } .thanks { background: var(--thanks); outline: 1px solid; }
.out { background: var(--out); text-decoration: underline; }
.key span { padding: .1rem .4rem; margin-right: .6rem; display: inline-block; }
a { color: inherit; text-decoration-thickness: 1px; } a.out, a.thanks { text-decoration: underline; }
table { border-collapse: collapse; width: 100%; } td, th { border: 1px solid var(--line); padding: .3rem .5rem;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; }
code { font: 13px ui-monospace, monospace; white-space: pre-wrap; } :target { outline: 2px solid currentColor; }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; } svg { max-width: 100%; height: auto; }
"""


def write_page(path: Path, trace: Trace) -> None:
    """Write the page; a file that is there is replaced in one step.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as scratch:
        scratch.write_text(page_of(trace), encoding="utf-8")


def page_of(trace: Trace) -> str:
    """The page's HTML."""
    title = _text(f"{trace.policy} on {trace.prompt['identifier']}")
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="dim">{_text(_about(trace))}</p>',
        _table((), ((_text(name), _text(value)) for name, value in summary_rows(trace))),
        *([f"<p>{_text(note(trace))}</p>"] if note(trace) else []),
        "<h2>The text</h2>",
        _key(),
        _marked_text(trace),
        *_events(trace),
        *_entries(trace),
        *_timeline(trace),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Text as HTML, in an attribute's value too."""
    return html.escape(shown_lines(text), quote=True)


def _token(trace: Trace, token_id: int) -> str:
    return f"<code>{_text(shown_token(trace.texts[token_id], 60))}</code>"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already; nothing where there are no rows."""
    head = "".join(f"<th>{_text(one)}</th>" for one in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    if not body:
        return ""
    return f"<table>{f'<tr>{head}</tr>' if head else ''}\n{body}</table>"


def _about(trace: Trace) -> str:
    drafter = trace.models.get("drafter") or next(iter(trace.models.get("eagle", {}).values()))
    settings = trace.settings
    how = f"temperature {settings.temperature:g}" if settings.temperature else "greedy"
    return f"{trace.models['target']['name']} with {drafter['name']}, {how}, {trace.finished}"


# The text ------------------------------------------------------------------------------------------------------------

_KINDS = {
    "own": "the target's own",
    "draft": "an accepted draft",
    "thanks": "accepted, thanks to the context alone",
    "out": "out of vocabulary",
}


def _kind(token: TracedToken) -> str:
    if token.out_of_vocabulary:
        return "out"
    if token.by_context:
        return "thanks"
    return "draft" if token.drafted else "own"


def _key() -> str:
    spans = "".join(f'<span class="{kind}">{_text(meaning)}</span>' for kind, meaning in _KINDS.items())
    return f'<p class="key">{spans}</p>'


def _marked_text(trace: Trace) -> str:
    places = {event.position: place for place, event in enumerate(trace.events) if not event.in_prompt}
    tokens = "".join(_marked(trace, token, places.get(token.position)) for token in trace.tokens)
    return f'<div class="text"><span class="prompt">{_text(trace.shown_prompt)}</span>{tokens}</div>'


def _marked(trace: Trace, token: TracedToken, event: int | None) -> str:
    """A token that leads to where it was retrieved from or to what it brought."""
    kind = _kind(token)
    says = f"position {token.position}, round {token.round + 1}: {_KINDS[kind]}"
    link = None
    if token.entry is not None:
        says += f"; retrieved at {origin(trace, trace.entries[token.entry])}"
        link = f"entry{token.entry}"
    elif token.out_of_vocabulary and event is not None:
        link = f"event{event}"
    shown = f'class="{kind}" title="{_text(says)}">{_text(token.text)}'
    return f"<span {shown}</span>" if link is None else f'<a href="#{link}" {shown}</a>'


# Tables --------------------------------------------------------------------------------------------------------------


def _events(trace: Trace) -> list[str]:
    if not trace.events:
        return []
    used = {entry.event for entry in trace.useful}
    shown = [(n, one) for n, one in enumerate(trace.events) if one.out_of_vocabulary or n in used]
    others = [one for n, one in enumerate(trace.events) if not (one.out_of_vocabulary or n in used)]
    brought = sum(len(one.entered) for one in others)
    rows = (
        (
            f'<span id="event{n}">{one.position}</span>{" (prompt)" if one.in_prompt else ""}',
            f'<span class="dim">…{_text(one.context)}</span>{_event_token(trace, one)}',
            _found(trace, one),
        )
        for n, one in shown
    )
    rest = f"{counted(len(others), 'other position')} brought {counted(brought, 'token')}, of which none was accepted."
    return [
        "<h2>Where tokens were out of vocabulary, or something was found that was accepted later</h2>",
        _table(("position", "token in its context", "what was found"), rows),
        f'<p class="dim">{rest}</p>',
    ]


def _event_token(trace: Trace, event: TraceEvent) -> str:
    if event.token_id is None:
        return ""
    kind = "out" if event.out_of_vocabulary else ""
    return f'<span class="{kind}">{_token(trace, event.token_id)}</span>'


def _found(trace: Trace, event: TraceEvent) -> str:
    ways = "".join(
        f"<details><summary>{_text(WAYS[name])}: {len(ids)}</summary>{_listed(trace, ids)}</details>"
        for name, ids in ways_of(event).items()
    )
    return f"{ways}<div>{len(event.entered)} came in: {_listed(trace, event.entered)}</div>"


def _listed(trace: Trace, ids: list[int]) -> str:
    return " · ".join(_token(trace, token_id) for token_id in ids) or "none"


def _entries(trace: Trace) -> list[str]:
    if not trace.entries:
        return []
    drafted = [(n, one) for n, one in enumerate(trace.entries) if one.drafted]
    headings = ("token", "retrieved at", "by way of", "from round", "to round", "drafted", "accepted", "first after")
    return [
        "<h2>What came in from the context and was drafted</h2>",
        _table(headings, (_entry_cells(trace, n, one) for n, one in drafted)),
        f'<p class="dim">{counted(len(trace.entries) - len(drafted), "other")} came in and never into a draft.</p>',
    ]


def _entry_cells(trace: Trace, number: int, entry: TraceEntry) -> Iterable[str]:
    where = _text(origin(trace, entry))
    if entry.event is not None and entry.accepted:
        where = f'<a href="#event{entry.event}">{where}</a>'
    return (
        f'<span id="entry{number}">{_token(trace, entry.token_id)}</span>',
        where,
        _text(way_names(entry)),
        str(entry.round + 1),
        "" if entry.left is None else str(entry.left),
        str(entry.drafted),
        str(len(entry.accepted)),
        _text(later(trace, entry)) if entry.accepted else "",
    )


# The timeline --------------------------------------------------------------------------------------------------------

# Of the picture, in its own units: where bars begin, how wide all are, and how high a thread's row is.
_LEFT, _WIDTH, _ROW = 130, 800, 34


def _timeline(trace: Trace) -> list[str]:
    timeline = trace.timeline
    if timeline is None:
        return []
    threads = [name for name in THREADS if any(one.thread == name for one in timeline.spans)]
    first = min(0.0, *(one.start for one in timeline.spans))
    scale = _WIDTH / (max(timeline.milliseconds, *(one.end for one in timeline.spans)) - first)
    bars = "".join(
        f'<rect x="{_LEFT + scale * (one.start - first):.2f}" y="{_ROW * threads.index(one.thread) + 6}" '
        f'width="{max(0.3, scale * (one.end - one.start)):.2f}" height="{_ROW - 12}" fill="{COLORS[one.section]}">'
        f"<title>{_text(one.section)}: {one.start:.2f} to {one.end:.2f} ms</title></rect>"
        for one in timeline.spans
    )
    labels = "".join(
        f'<text x="0" y="{_ROW * place + _ROW / 2 + 4}">{_text(THREADS[name])}</text>'
        for place, name in enumerate(threads)
    )
    height = _ROW * len(threads)
    edges = "".join(
        f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="2 3"/>'
        f'<text x="{x:.2f}" y="{height + 16}" text-anchor="middle">{at:.1f} ms</text>'
        for at in (0.0, timeline.milliseconds)
        for x in (_LEFT + scale * (at - first),)
    )
    key = "".join(
        f'<span><svg width="12" height="12"><rect width="12" height="12" fill="{COLORS[name]}"/></svg> '
        f"{_text(name)} {milliseconds:.2f} ms</span>"
        for name, milliseconds in sections_of(timeline)
    )
    return [
        "<h2>A round's time</h2>",
        f'<p class="dim">{_text(timeline_title(trace))}</p>',
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 40} {height + 22}" role="img">{labels}{bars}{edges}</svg>',
        f'<p class="key">{key}</p>',
    ]
