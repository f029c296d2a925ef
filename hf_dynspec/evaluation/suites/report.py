"""The tables of an evaluation, in Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

from ...errors import counted
from ...files import replacing
from ..bench.systems import BASELINES, COMPILED, HEAD_PRODUCT, PLAIN, TRANSFORMERS
from ..coverage.estimates import Estimate
from ..provenance import cpu_threads
from ..tables import FittedTable
from ..tables import cell as number_cell
from .data import SUITES
from .figures import Evaluation, by_turn, identity, mean_over_domains, relative_length, summarize
from .paper_tables import IN_GENERATION, LEAST_TOKENS, LENGTH, PAPER_TABLES, PaperTable, why_left_out
from .runs import EXPECTED

TABLES = "tables.md"
# Cells without a figure, and the mark of a figure that is not from where its column is.
_NOTHING, _MARK = "–", " †"

# What figures are called, and how they are written.
_NAMES = {
    "tokens_per_second": ("tokens/s", ".1f"),
    "acceptance_length": ("acceptance length", ".2f"),
    "expected_length": ("acceptance length", ".2f"),
    "counted_length": ("acceptance length", ".2f"),
    "active_vocabulary": ("active vocabulary", ",.0f"),
    "shortlist_size": ("shortlist size", ",.0f"),
    "coverage": ("coverage", ".4f"),
    "oov_rate": ("OOV rate", ".4f"),
    "draft_ms": ("draft ms", ".2f"),
    "verification_ms": ("verification ms", ".2f"),
    "mass": ("mass", ".4f"),
    "oracle_mass": ("oracle mass", ".4f"),
    "training_bytes": ("training bytes", ",.0f"),
    "peak_bytes": ("peak GPU bytes", ",.0f"),
}
_SYSTEM_COLUMNS = ("acceptance_length", "active_vocabulary", "oov_rate", "coverage", "draft_ms", "verification_ms")


def write_tables(evaluation: Evaluation) -> Path:
    """Write `tables.md` into the folder of an evaluation, and return its path, or raise `OSError`."""
    path = evaluation.folder.path / TABLES
    with replacing(path) as scratch:
        scratch.write_text(make_tables(evaluation), encoding="utf-8")
    return path


def make_tables(evaluation: Evaluation) -> str:
    """All tables of an evaluation, with what they were measured on and by."""
    table = evaluation.settings["table"]
    title = PAPER_TABLES[table].title if table else SUITES[evaluation.settings["suite"]].title
    parts = [f"# {title}", conditions(evaluation)]
    if not evaluation.is_complete:
        parts.append("**Not complete**: the same command goes on. Speeds are of what all systems have finished.")
    if table:
        parts += paper_tables(evaluation, PAPER_TABLES[table])
    for temperature in evaluation.temperatures:
        parts += [f"## {evaluation.decoding(temperature)}", markdown(*_systems(evaluation, temperature))]
        if len(evaluation.domains) > 1:
            for name in ("tokens_per_second", "acceptance_length"):
                parts += [f"### {_NAMES[name][0].capitalize()} by domain", domain_table(evaluation, temperature, name)]
        turns = turn_table(evaluation, temperature)
        if turns:
            parts += ["### Acceptance length by turn", turns]
    return "\n\n".join([*parts, *notes(evaluation)]) + "\n"


def conditions(evaluation: Evaluation) -> str:
    """What was measured, on what and how, in a paragraph."""
    settings, session = evaluation.settings, evaluation.folder.sessions[-1]
    models, origin = session["models"], session["provenance"]
    hardware, git = origin["hardware"], origin["git"]
    names = [models[role]["name"] for role in ("target", "drafter") if role in models]
    names += [one["name"] for one in models.get("eagle", {}).values()]
    expected = len({line["prompt"] for line in evaluation.folder.lines.values() if line["kind"] == EXPECTED})
    prompts = counted(len(evaluation.prompts), "timed prompt" if expected else "prompt")
    parts = [
        f"{prompts}{f' and {expected:,} with expectations' * bool(expected)} of {', '.join(evaluation.domains)}",
        counted(settings["max_new_tokens"], "new token") + (" a turn" if _has_turns(evaluation) else ""),
        counted(settings["repeats"], "repeat"),
    ]
    parts += [f"chains of {settings['num_assistant_tokens']}"] * settings["chains"]
    parts += [f"trees of {one['total_tokens']}/{one['depth']}/{one['top_k']}" for one in settings["trees"]]
    parts += [models["target"]["dtype"], f"{cpu_threads(hardware['threads'])} of {hardware['cpu']}", *hardware["gpus"]]
    if hardware["load_average"]:
        parts.append(f"load average {hardware['load_average']['1_minute']:.1f} at the start")
    revision = "" if git is None else f", commit {git['commit'][:12]}{' with changes' * git['changed']}"
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("hf_dynspec", "torch", "transformers"))
    return f"Target, then drafters: {', '.join(names)}. {'; '.join(parts)}. {versions}{revision}, {origin['started']}."


def _has_turns(evaluation: Evaluation) -> bool:
    return any(len(line.get("turns", ())) > 1 for line in evaluation.folder.lines.values())


def shown_tables(evaluation: Evaluation) -> list[FittedTable]:
    """What a terminal shows: the paper's tables where one was measured, else that of systems for each temperature."""
    name = evaluation.settings["table"]
    if name is not None:
        paper = PAPER_TABLES[name]
        found = [(f"{paper.title}: {title}", *rest) for title, *rest in _paper_tables(evaluation, paper)]
    else:
        count = len(evaluation.prompts)
        found = [
            (f"{evaluation.decoding(value)}, {counted(count, 'prompt')}", *_systems(evaluation, value))
            for value in evaluation.temperatures
        ]
    return [FittedTable(title, headings, rows=rows) for title, headings, rows in found]


def _systems(evaluation: Evaluation, temperature: float) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the table of systems: speed, ratios to what users have without this package,
    acceptance, and whether the tokens are plain's."""
    bases = [base for base in (PLAIN, HEAD_PRODUCT, COMPILED, TRANSFORMERS) if base in evaluation.systems]
    figures = {label: summarize(evaluation, temperature, label) for label in evaluation.systems}
    columns = [name for name in _SYSTEM_COLUMNS if any(name in one for one in figures.values())]
    headings = ["system", "tokens/s", *(f"vs {BASELINES[base]}" for base in bases), *map(_name, columns)]
    rows = []
    for label, own in figures.items():
        row = [BASELINES.get(label, label), cell(own.get("tokens_per_second"), "tokens_per_second", with_error=True)]
        for other in (figures[base] for base in bases):
            both = [one["tokens_per_second"].mean for one in (own, other) if "tokens_per_second" in one]
            row.append(f"{both[0] / both[1]:.2f}×" if len(both) > 1 else "–")
        row += [cell(own.get(name), name) for name in columns]
        if temperature == 0:
            compared, mismatches = identity(evaluation, label)
            row.append(f"{compared - len(mismatches)}/{compared}")
        rows.append(row)
    return headings + ["tokens as plain's"] * (temperature == 0), rows


def domain_table(evaluation: Evaluation, temperature: float, name: str) -> str:
    """A figure: a row per system and a column per domain."""
    rows = []
    for label in evaluation.systems:
        found = [summarize(evaluation, temperature, label, domain).get(name) for domain in evaluation.domains]
        rows.append([BASELINES.get(label, label), *(cell(one, name) for one in found)])
    return markdown(["system", *evaluation.domains], rows)


def turn_table(evaluation: Evaluation, temperature: float) -> str | None:
    """Acceptance lengths: a row per system and a column per turn; None where nothing has turns."""
    if not _has_turns(evaluation):
        return None
    courses = {label: by_turn(evaluation, temperature, label) for label in evaluation.systems if label != PLAIN}
    by_turn_of_all = list(zip_longest(*courses.values()))
    rows = [
        [BASELINES.get(label, label), *(number_cell(one[place], ".2f") for one in by_turn_of_all)]
        for place, label in enumerate(courses)
    ]
    return markdown(["system", *range(1, len(by_turn_of_all) + 1)], rows)


def paper_tables(evaluation: Evaluation, table: PaperTable) -> list[str]:
    """A paper's table for each drafter, shape of its drafts and temperature, and which rows are left out."""
    parts = [f"What it shows: {table.shows}. Averages are means over domains; ± is the standard error over prompts."]
    for title, headings, rows in _paper_tables(evaluation, table):
        parts += [f"**{title}**", markdown(headings, rows)]
    if any(_MARK in part for part in parts):
        parts.append(f"{_MARK.strip()} counted in the timed runs, not expected along given texts.")
    left_out = [(row.label, why_left_out(row, evaluation.settings["given"])) for row in table.rows]
    said = [f"- {label}: {reason}." for label, reason in left_out if reason is not None]
    for domain, count in evaluation.folder.sessions[-1].get("left_out", {}).items():
        said.append(f"- {counted(count, 'prompt')} of {domain}: the text ends within {LEAST_TOKENS} tokens.")
    return [*parts, *(["Left out:", "\n".join(said)] if said else [])]


def _paper_tables(evaluation: Evaluation, table: PaperTable) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Of each of its tables a title, headings and rows."""
    described = evaluation.folder.described_systems
    groups = dict.fromkeys((described[label]["drafter"], described[label]["tree"]) for label in evaluation.assistants)
    for temperature, (drafter, tree) in product(evaluation.temperatures, groups):
        shape = "chains" if tree is None else f"trees of {tree}"
        labels = {
            one["method"]: label
            for label, one in described.items()
            if (one["drafter"], one["tree"]) == (drafter, tree)
        }
        labels |= {name: label for label, name in BASELINES.items()}
        title = f"{evaluation.decoding(temperature)}, {drafter}, {shape}"
        yield title, _paper_headings(evaluation, table), _paper_rows(evaluation, table, temperature, labels)


def _paper_headings(evaluation: Evaluation, table: PaperTable) -> list[str]:
    several = len(evaluation.domains) > 1
    headings = ["method"]
    for name in table.by_domain:
        headings += [f"{domain}, {_name(name)}" for domain in evaluation.domains] if several else []
        headings.append(f"average {_name(name)}" if several else _name(name))
    headings += [_name(name) for name in table.overall]
    return headings + ([f"vs {table.compared_with}"] if table.compared_with else [])


def _paper_rows(
    evaluation: Evaluation, table: PaperTable, temperature: float, labels: Mapping[str, str]
) -> list[list[str]]:
    rows = []
    for row in table.rows:
        label = labels.get(row.label)
        if label not in evaluation.systems:
            continue
        cells = [row.label]
        several = len(evaluation.domains) > 1
        for name in (*table.by_domain, *table.overall):
            own = _own_name(evaluation, temperature, label, name)
            found = [mean_over_domains(evaluation, temperature, label, own)]
            if name in table.by_domain and several:
                found = [summarize(evaluation, temperature, label, one).get(own) for one in evaluation.domains] + found
            # What is measured in generation although the column is of expectations; a baseline expects 1.
            mark = _MARK if own != name and label in evaluation.assistants else ""
            *of_domains, average = found
            shown = [cell(one, own) for one in of_domains] + [cell(average, own, with_error=True)]
            cells += [one + mark * (one != _NOTHING) for one in shown]
        if table.compared_with:
            first, base = (*table.by_domain, *table.overall)[0], labels.get(table.compared_with)
            cells.append(cell(_ratio(evaluation, temperature, first, label, base), "ratio", with_error=True))
        rows.append(cells)
    return rows


def _ratio(evaluation: Evaluation, temperature: float, name: str, label: str, base: str | None) -> Estimate | None:
    """A figure of a table as a share of another system's."""
    if base not in evaluation.systems:
        return None
    names = [_own_name(evaluation, temperature, one, name) for one in (label, base)]
    if names == [LENGTH, LENGTH] and label != base:
        return relative_length(evaluation, temperature, label, base)
    both = [mean_over_domains(evaluation, temperature, *one) for one in zip((label, base), names, strict=True)]
    return None if None in both else Estimate(both[0].mean / both[1].mean, None)


def _own_name(evaluation: Evaluation, temperature: float, label: str, name: str) -> str:
    """By what name a system has a figure of a table."""
    in_trees = evaluation.folder.described_systems[label]["tree"] is not None
    has_none = in_trees or not evaluation.lines(EXPECTED, temperature, label)
    return IN_GENERATION.get(name, name) if has_none else name


def notes(evaluation: Evaluation) -> list[str]:
    """What a reader should know: what was left out, and where greedy tokens differ from plain's."""
    said = list(dict.fromkeys(note for session in evaluation.folder.sessions for note in session["notes"]))
    for label in evaluation.systems:
        for prompt, position in identity(evaluation, label)[1].items():
            said.append(f"{label} differs from plain greedy decoding on {prompt}, from new token {position} on")
    return ["## Notes", "\n".join(f"- {one}." for one in said)] if said else []


def _name(name: str) -> str:
    return _NAMES.get(name, (name, ""))[0]


def cell(estimate: Estimate | None, name: str, with_error: bool = False) -> str:
    """A figure as text."""
    form = _NAMES.get(name, (name, ".3f"))[1]
    return _NOTHING if estimate is None else estimate.shown(form) if with_error else f"{estimate.mean:{form}}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose first column is at the left."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(one).replace("|", "\\|") for one in line) + " |" for line in lines)
