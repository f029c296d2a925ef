"""The figures of an evaluation, for a paper: each as PNG and as SVG, with a panel for each temperature."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...stats import DRAFT_SECTIONS
from ..bench.systems import BASELINES, PLAIN
from ..coverage.estimates import Estimate
from ..plots import MARKERS, plot_style, require_plot_file, save_figure
from .data import EVERYTHING, PROMPT, SUITES
from .figures import Evaluation, by_request, by_turn, round_times, summarize

SUFFIXES = (".png", ".svg")
# Told apart by readers who do not see all colours (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
_GREY = "0.55"
_WIDTH = 6.8  # inches: a page's text
# Requests of a stream over which an acceptance length is averaged, to see its course.
_WINDOW = 8


def write_charts(evaluation: Evaluation) -> list[Path]:
    """Draw what there is to draw into the folder of an evaluation, and return the images. Raises `ConfigurationError`
    if matplotlib is not installed, and `OSError` if an image cannot be written."""
    require_plot_file(evaluation.folder.path / f"figure{SUFFIXES[0]}")
    from matplotlib.figure import Figure

    written: list[Path] = []
    style = {"axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    for (name, draw), suffix in product(_CHARTS.items(), SUFFIXES):
        path = evaluation.folder.path / f"{name}{suffix}"
        with plot_style(8, style):
            figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
            if draw(figure, evaluation):
                save_figure(figure, path, dpi=200)
                written.append(path)
    return written


def _panels(figure: Any, evaluation: Evaluation, height: float, across: bool = True) -> list[tuple[float, Any]]:
    """Axes for each temperature, side by side or below one another, with one scale for what they have in common."""
    figure.set_figheight(height)
    count = len(evaluation.temperatures)
    shape = {"ncols": count, "sharey": True} if across else {"nrows": count, "sharex": True}
    found = list(zip(evaluation.temperatures, figure.subplots(squeeze=False, **shape).flat, strict=True))
    for temperature, axes in found:
        axes.set_title(evaluation.decoding(temperature), loc="left")
    return found


def _style(evaluation: Evaluation, system: str) -> dict[str, str]:
    """Colour and marker of a system, the same in all figures."""
    number = [label for label in evaluation.systems if label != PLAIN].index(system)
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _speed_by_domain(figure: Any, evaluation: Evaluation) -> bool:
    def ratio(temperature: float, label: str, domain: str | None) -> Estimate | None:
        own, plain = (
            summarize(evaluation, temperature, one, domain).get("tokens_per_second") for one in (label, PLAIN)
        )
        if own is None or plain is None:
            return None
        error = None if own.standard_error is None else own.standard_error / plain.mean
        return Estimate(own.mean / plain.mean, error)

    systems = [label for label in evaluation.systems if label != PLAIN]
    return _by_domain(figure, evaluation, systems, ratio, "speed, times plain generate", 1.0)


def _acceptance_by_domain(figure: Any, evaluation: Evaluation) -> bool:
    def length(temperature: float, label: str, domain: str | None) -> Estimate | None:
        return summarize(evaluation, temperature, label, domain).get("acceptance_length")

    return _by_domain(figure, evaluation, evaluation.assistants, length, "acceptance length (tokens per round)", None)


def _by_domain(
    figure: Any,
    evaluation: Evaluation,
    systems: Sequence[str],
    value: Callable[[float, str, str | None], Estimate | None],
    label: str,
    reference: float | None,
) -> bool:
    """A row of dots for each domain, and one for all together."""
    rows = [*evaluation.domains, *([None] if len(evaluation.domains) > 1 else [])]
    panels = _panels(figure, evaluation, 0.9 + 0.17 * len(systems) + 0.055 * len(rows) * (len(systems) + 2))
    drawn = False
    for temperature, axes in panels:
        for (place, domain), (number, system) in product(enumerate(rows), enumerate(systems)):
            one = value(temperature, system, domain)
            if one is not None:
                drawn = True
                # Side by side within the row, so that none hides another.
                height = place + 0.7 * ((number + 0.5) / len(systems) - 0.5)
                style = {"linestyle": "none", "markersize": 4, "elinewidth": 0.8} | _style(evaluation, system)
                axes.errorbar(one.mean, height, xerr=one.standard_error, label=system, **style)
        if reference is not None:
            axes.axvline(reference, color=_GREY, linewidth=0.8)
        for border in range(1, len(rows)):
            axes.axhline(border - 0.5, color="0.85", linewidth=0.6)
        axes.set_yticks(range(len(rows)), ["all" if one is None else one for one in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.25)
    _legend(figure, panels[0][1], systems)
    return drawn


def _legend(figure: Any, axes: Any, systems: Sequence[str]) -> None:
    """Below the axes, in the order of the systems, each once."""
    handles, labels = axes.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    known = [one for one in systems if one in found]
    names = [BASELINES.get(one, one) for one in known]
    columns = 2 if max(map(len, names), default=0) > 30 else 3
    figure.legend([found[one] for one in known], names, loc="outside lower center", ncols=columns, fontsize=7)


def _acceptance_by_size(figure: Any, evaluation: Evaluation) -> bool:
    return _against_size(figure, evaluation, "active_vocabulary", "acceptance_length", "acceptance length")


def _coverage(figure: Any, evaluation: Evaluation) -> bool:
    teacher_forced = any(
        "mass" in summarize(evaluation, t, s) for t in evaluation.temperatures for s in evaluation.systems
    )
    size, mass = ("shortlist_size", "mass") if teacher_forced else ("active_vocabulary", "coverage")
    return _against_size(figure, evaluation, size, mass, "target's probability mass on the shortlist")


def _against_size(figure: Any, evaluation: Evaluation, size: str, name: str, label: str) -> bool:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    systems = evaluation.assistants
    panels = _panels(figure, evaluation, 2.6 + 0.09 * len(systems))
    drawn = False
    for temperature, axes in panels:
        for system in systems:
            found = summarize(evaluation, temperature, system)
            if size in found and name in found:
                drawn = True
                style = {"linestyle": "none", "markersize": 5, "capsize": 2} | _style(evaluation, system)
                place = found[size].mean, found[name].mean
                axes.errorbar(*place, yerr=found[name].standard_error, label=system, **style)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        short = FuncFormatter(lambda count, _: f"{count:g}" if count < 1e3 else f"{count / 1e3:g}k")
        axes.xaxis.set_major_formatter(short)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.12, y=0.12)
        axes.set_xlabel("mean shortlist size (tokens)")
        axes.grid(alpha=0.25)
    panels[0][1].set_ylabel(label)
    _legend(figure, panels[0][1], systems)
    return drawn


def _round_time(figure: Any, evaluation: Evaluation) -> bool:
    """Where a round's time goes: stacked bars of profiled calls."""
    sections = (*DRAFT_SECTIONS, "verification")
    panels = []
    for temperature in evaluation.temperatures:
        times = {system: round_times(evaluation, temperature, system) for system in evaluation.assistants}
        times = {system: one for system, one in times.items() if one}
        if times:
            panels.append((temperature, times))
    if not panels:
        return False
    figure.set_figheight(0.9 + sum(0.4 + 0.24 * len(times) for _, times in panels))
    heights = [len(times) + 1 for _, times in panels]
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (temperature, times) in zip(all_axes, panels, strict=True):
        names = (*sections, *dict.fromkeys(name for one in times.values() for name in one if name not in sections))
        left = [0.0] * len(times)
        for number, name in enumerate(names):
            widths = [one.get(name, 0.0) for one in times.values()]
            colour = _GREY if name not in sections else _COLOURS[number]
            axes.barh(range(len(times)), widths, left=left, height=0.7, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(times)), list(times))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_title(evaluation.decoding(temperature), loc="left")
    all_axes[-1].set_xlabel("milliseconds of a round")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)
    return True


def _course(figure: Any, evaluation: Evaluation) -> bool:
    """Acceptance along a stream of requests with its switches of topic, or turn by turn."""
    within = SUITES[evaluation.settings["suite"]].learns_within
    if within not in (EVERYTHING, PROMPT):
        return False
    systems = evaluation.assistants
    height = 0.6 + 2.0 * len(evaluation.temperatures) + 0.09 * len(systems)
    panels = _panels(figure, evaluation, height, across=False)
    for temperature, axes in panels:
        for system in systems:
            measured = (by_request if within == EVERYTHING else by_turn)(evaluation, temperature, system)
            values = _running_means(measured, evaluation) if within == EVERYTHING else measured
            places = [place for place, value in enumerate(values, 1) if value is not None]
            style = {"linewidth": 1.2, "markersize": 4} | _style(evaluation, system)
            if within == EVERYTHING:
                style["marker"] = ""
            axes.plot(places, [values[place - 1] for place in places], label=system, **style)
        if within == EVERYTHING:
            _mark_switches(axes, evaluation)
            # Above the topics' names.
            axes.set_title(evaluation.decoding(temperature), loc="left", pad=14)
        axes.set_ylabel("acceptance length")
        axes.grid(alpha=0.25)
    what = f"request (lines are means of up to {_WINDOW} requests of a topic)" if within == EVERYTHING else "turn"
    panels[-1][1].set_xlabel(what)
    panels[-1][1].xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, panels[0][1], systems)
    return True


def _running_means(values: Sequence[float | None], evaluation: Evaluation) -> list[float | None]:
    """Each value's mean with the measured ones of the same topic among the `_WINDOW` up to it."""
    means: list[float | None] = []
    begin = 0
    for place, prompt in enumerate(evaluation.prompts):
        if place and prompt["domain"] != evaluation.prompts[place - 1]["domain"]:
            begin = place
        known = [value for value in values[max(begin, place + 1 - _WINDOW) : place + 1] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _mark_switches(axes: Any, evaluation: Evaluation) -> None:
    """A dashed line where a topic begins, and its name above."""
    before = None
    for number, prompt in enumerate(evaluation.prompts, 1):
        if prompt["domain"] != before:
            before = prompt["domain"]
            if number > 1:
                axes.axvline(number - 0.5, color=_GREY, linestyle="--", linewidth=0.8)
            axes.annotate(
                before, (number, 1.0), (0, 2), xycoords=("data", "axes fraction"), textcoords="offset points"
            )


_CHARTS: dict[str, Callable[[Any, Evaluation], bool]] = {
    "speed-by-domain": _speed_by_domain,
    "acceptance-by-domain": _acceptance_by_domain,
    "acceptance-by-size": _acceptance_by_size,
    "round-time": _round_time,
    "coverage": _coverage,
    "course": _course,
}
