"""The timeline of a round: what the generating thread does, and retrieval beside it (EvoSpec, figure 4)."""

from pathlib import Path
from typing import Any

from ...stats import SECTIONS
from ..plots import plot_style, require_plot_file, save_figure
from ..tables import fold_label
from .recording import RecordedSpan, Recording
from .result import Timeline, TimelineSpan, Trace

RETRIEVAL = "retrieval"
# Of sections, in the order of the legend. Readable on white and on black paper, and by those who see no red or green.
COLORS = dict(
    zip((*SECTIONS, RETRIEVAL), ("#4477aa", "#66ccee", "#ccbb44", "#228833", "#999999", "#ee6677"), strict=True)
)
THREADS = {"generation": "generating thread", "retrieval": "retrieval"}
_INK, _PAPER = "0.15", "white"
# Characters of a line of the title.
_WIDEST_TITLE = 90


def median_round(recording: Recording) -> Timeline | None:
    """The timeline of the round of median length among those that drafted as much as any and beside which something
    was retrieved, where that is so of some. A round is timed from when the policy had seen the last verdict, and the
    first does not count, as it reads the prompt. None where no other round drafted."""
    rounds = [one for one in recording.rounds if one.verdict is not None]
    drafted = [one.verdict.drafted.shape[0] for one in rounds]
    compared = [n for n in range(1, len(rounds)) if drafted[n] and drafted[n] == max(drafted[1:])]
    ends = {n: (rounds[n - 1].end, rounds[n].end) for n in compared}
    beside = {n: _beside(recording, *ends[n]) for n in compared}
    compared = [n for n in compared if beside[n]] or compared
    if not compared:
        return None
    lengths = {n: ends[n][1] - ends[n][0] for n in compared}
    chosen = sorted(compared, key=lengths.get)[(len(compared) - 1) // 2]
    start, end = ends[chosen]
    within = [one for one in recording.stopwatch.spans if start <= one.start < end]
    shown = [("generation", one) for one in within] + [("retrieval", one) for one in beside[chosen]]
    spans = [
        TimelineSpan(thread, one.name, 1e3 * (one.start - start), 1e3 * (one.end - start)) for thread, one in shown
    ]
    spans.sort(key=lambda one: (one.thread, one.start))
    return Timeline(chosen, len(compared), 1e3 * lengths[chosen], spans)


def _beside(recording: Recording, start: float, end: float) -> list[RecordedSpan]:
    """What was retrieved meanwhile."""
    heard = [one for part in recording.heard for one in part.retrievals]
    return [RecordedSpan(RETRIEVAL, one.start, one.end) for one in heard if one.start < end and one.end > start]


def sections_of(timeline: Timeline) -> list[tuple[str, float]]:
    """The sections that a timeline shows, with the milliseconds that each took in all."""
    sums = dict.fromkeys(COLORS, 0.0)
    for one in timeline.spans:
        sums[one.section] += one.end - one.start
    return [(name, milliseconds) for name, milliseconds in sums.items() if milliseconds > 0]


def timeline_title(trace: Trace) -> str:
    """What a timeline is of."""
    timeline = trace.timeline
    compared = f"of median length among {timeline.compared}" if timeline.compared > 1 else "the only one to compare"
    return f"{trace.policy}: round {timeline.round + 1} of {trace.summary.rounds}, {compared}"


def write_timeline(path: Path, trace: Trace) -> None:
    """Draw the timeline.

    Args:
        path: the image; its suffix says the format.
        trace: one that has a timeline.

    Raises:
        ConfigurationError: see `require_plot_file`.
        OSError: the file cannot be written.
    """
    require_plot_file(path)
    from matplotlib.figure import Figure

    timeline = trace.timeline
    threads = [name for name in THREADS if any(one.thread == name for one in timeline.spans)]
    with plot_style(font_size=9):
        figure = Figure(figsize=(8.0, 1.6 + 0.5 * len(threads)), layout="constrained")
        figure.set_facecolor(_PAPER)
        axes = figure.add_subplot()
        for place, thread in enumerate(threads):
            # What is retrieved may take too little time to be seen without an edge.
            edge = 1.0 if thread == RETRIEVAL else 0.0
            for one in (one for one in timeline.spans if one.thread == thread):
                color = COLORS[one.section]
                axes.barh(place, one.end - one.start, 0.6, left=one.start, color=color, ec=color, lw=edge)
        _finish(axes, figure, trace, threads)
        save_figure(figure, path)


def _finish(axes: Any, figure: Any, trace: Trace, threads: list[str]) -> None:
    from matplotlib.patches import Patch

    timeline = trace.timeline
    for edge in (0.0, timeline.milliseconds):
        axes.axvline(edge, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(threads)), [THREADS[name] for name in threads], color=_INK)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds from the round's begin (dotted: its begin and end)", color=_INK)
    # A label is a text, and no formula between dollar signs.
    title = fold_label(timeline_title(trace), _WIDEST_TITLE)
    axes.set_title(title, loc="left", fontsize=9, color=_INK, parse_math=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    patches = [Patch(color=COLORS[name], label=f"{name} {sum_:.2f} ms") for name, sum_ in sections_of(timeline)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
