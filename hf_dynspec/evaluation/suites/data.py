"""The suites: which prompts each reads, what their rows must hold, and how far what is learnt on them reaches.

Their files are read from where a user has them. Spec-Bench is Xia et al. 2024 ("Unlocking Efficiency in Large Language
Model Inference: A Comprehensive Survey of Speculative Decoding"), SPEED-Bench is arXiv 2604.09557.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...build.prompts import CATEGORY, QUESTION, PromptRow, find_prompt_files
from ...errors import ConfigurationError, shown_value
from ..prompts import WorkloadError, WorkloadPrompt, read_workload

# How far what a policy or an aligned drafter learns reaches: where the next of these begins, it starts anew.
PROMPT, DOMAIN, EVERYTHING = "prompt", "domain", "everything"

# These categories are the tasks of MT-bench, which Spec-Bench counts as one.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
# What stands in place of texts that SPEED-Bench may not pass on, until its own program has fetched them.
_NOT_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Suite:
    """One suite."""

    title: str  # what it is shown as
    fields: tuple[str, ...] = ()  # what each row must have
    learns_within: str = DOMAIN  # `PROMPT`, `DOMAIN` or `EVERYTHING`
    least_turns: int = 1  # how many turns each row must have at least
    least_domains: int = 1  # how many categories there must be at least
    merged: tuple[tuple[str, str], ...] = ()  # categories by the domain that they are counted as


SUITES = {
    "spec-bench": Suite(
        "Spec-Bench", fields=(QUESTION, CATEGORY, "turns"), merged=tuple((one, "mt_bench") for one in _MT_BENCH)
    ),
    # The last two tell its rows from those of Spec-Bench, which have the others too.
    "speed-bench": Suite("SPEED-Bench", fields=(QUESTION, CATEGORY, "turns", "source", "multiturn")),
    "domains": Suite("Domains"),
    "topic-switch": Suite("A stream of requests that switches topics", learns_within=EVERYTHING, least_domains=2),
    "multi-turn": Suite("Conversations", learns_within=PROMPT, least_turns=2),
}


def suite_named(name: str) -> Suite:
    """The suite of that name. Raises `ConfigurationError` if there is none."""
    if name not in SUITES:
        raise ConfigurationError(f"there is no suite {shown_value(name)}; the suites are {', '.join(SUITES)}")
    return SUITES[name]


def read_suite(name: str, paths: Sequence[str | Path], limit: int | None = None) -> list[WorkloadPrompt]:
    """Read the prompts of a suite, in the order of its files, which are those that `read_workload` takes. Of
    SPEED-Bench, they are the Parquet files of one configuration that its own `prepare_data.py` has written.

    Raises:
        ConfigurationError: there is no such suite.
        WorkloadError: a file cannot be read, or is not of this suite; names the file and the line.
    """
    suite = suite_named(name)

    def require(row: PromptRow) -> None:
        missing = [field for field in suite.fields if field not in row.values]
        if missing:
            those, which = (", ".join(map(repr, missing)), "fields" if len(missing) > 1 else "field")
            problem = f"lacks the {which} {those}, which {suite.title} has in every row"
            raise WorkloadError(f"{row.place}: {problem}; {_fix(name)}")
        for other, wider in SUITES.items():
            if set(wider.fields) > set(suite.fields) > set() and row.values.keys() >= set(wider.fields):
                raise WorkloadError(f"{row.place}: is a row of {wider.title}; read it with --suite {other}")
        if suite.fields and not isinstance(row.values["turns"], list):
            raise WorkloadError(f"{row.place}: 'turns' is a list of texts in {suite.title}; {_fix(name)}")
        if len(row.turns) < suite.least_turns:
            problem = f"{len(row.turns)} turn, and {name} takes conversations of {suite.least_turns} at least"
            raise WorkloadError(f"{row.place}: {row.field} has {problem}; read it with --suite domains")
        if not all(row.turns):
            raise WorkloadError(f"{row.place}: a turn is empty; give each a text")
        if any(turn.startswith(_NOT_FETCHED) for turn in row.turns):
            raise WorkloadError(
                f"{row.place}: holds a placeholder in place of its text; let SPEED-Bench's own prepare_data.py fetch "
                "the texts, and name the files that it writes"
            )

    merged = dict(suite.merged)
    prompts = [
        replace(prompt, domain=merged.get(prompt.domain, prompt.domain))
        for prompt in read_workload(paths, limit, require, suite.fields)
    ]
    domains = dict.fromkeys(prompt.domain for prompt in prompts)
    if len(domains) < suite.least_domains:
        raise WorkloadError(
            f"{name} needs prompts of {suite.least_domains} categories, and all are of {next(iter(domains))}"
        )
    return prompts


def _fix(name: str) -> str:
    return f"name files of {SUITES[name].title}, or read others with --suite domains"


def describe_data(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The name and the SHA-256 of each file that these paths name or hold, in their order."""
    files = map(Path, find_prompt_files(paths))
    return [{"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files]


def streams(name: str, prompts: Sequence[WorkloadPrompt]) -> list[list[int]]:
    """The numbers of the prompts within which what is learnt on one is known on the next, in their order."""
    within = suite_named(name).learns_within
    if within == PROMPT:
        return [[number] for number in range(len(prompts))]
    by_key: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_key.setdefault(prompt.domain if within == DOMAIN else "", []).append(number)
    return list(by_key.values())
