"""What an evaluation found, computed from the lines in its folder alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ...stats import DRAFT_SECTIONS
from ..bench.systems import PLAIN
from ..coverage.estimates import Estimate
from ..tables import decoding_title
from .runs import COVERAGE, EXPECTED, PROFILE, TIMED, RunFolder, read_settings

Line = Mapping[str, Any]
# What figures of expectations are called there.
_TEACHER_FORCED = {
    "expected_length": "acceptance_length",
    "mass": "mass",
    "oracle_mass": "oracle_mass",
    "shortlist_size": "size",
}


class Evaluation:
    """An evaluation, as far as it was run: the lines of a folder, with settings as of `SuiteSettings.fingerprint`.

    Raises:
        ConfigurationError: the folder holds none, or nothing was measured.
        ArtifactError: a line is damaged.
    """

    def __init__(self, path: Path):
        self.settings = read_settings(path)
        self.folder = RunFolder(path)
        self.folder.read()
        self._by_place: dict[tuple[str, float, str], list[Line]] = {}
        for line in self.folder.lines.values():
            place = line["kind"], line["temperature"], line["system"]
            self._by_place.setdefault(place, []).append(line)
        if not any(line["kind"] == TIMED for line in self.folder.lines.values()):
            raise ConfigurationError(f"{path} holds nothing that was measured; run the evaluation")

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """Identifier, domain and number of tokens of each timed prompt."""
        return [one for one in self.folder.sessions[-1]["prompts"] if one.get("timed", True)]

    @property
    def domains(self) -> list[str]:
        """The domains in the order of the prompts."""
        return list(dict.fromkeys(prompt["domain"] for prompt in self.folder.sessions[-1]["prompts"]))

    @cached_property
    def temperatures(self) -> list[float]:
        """Those at which something was measured."""
        return [value for value in self.settings["temperatures"] if any(place[1] == value for place in self._by_place)]

    @cached_property
    def systems(self) -> list[str]:
        """The labels of the systems that ran, in their order."""
        ran = {place[2] for place in self._by_place}
        return [label for label in self.folder.systems if label in ran]

    def decoding(self, temperature: float) -> str:
        """How tokens were chosen at a temperature, as a title."""
        return decoding_title(temperature, self.settings["top_k"])

    @property
    def assistants(self) -> list[str]:
        """Those of them that are of this package."""
        return [label for label in self.systems if self.folder.described_systems[label]["method"] is not None]

    def lines(self, kind: str, temperature: float, system: str, domain: str | None = None) -> list[Line]:
        """The lines of a system, of all domains where `domain` is None."""
        found = self._by_place.get((kind, temperature, system), [])
        return [line for line in found if domain in (None, line["domain"])]

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked for was measured."""
        return self.folder.is_finished

    @cached_property
    def _finished_by_all(self) -> set[tuple[str, float, int]]:
        finished: dict[tuple[str, float, int], int] = {}
        for line in self.folder.lines.values():
            if line["kind"] == TIMED:
                place = line["prompt"], line["temperature"], line["repeat"]
                finished[place] = finished.get(place, 0) + 1
        return {place for place, count in finished.items() if count == len(self.systems)}

    def compared(self, temperature: float, system: str, domain: str | None = None) -> list[Line]:
        """The timed lines of a system on what all systems have finished, so that speeds are of the same work."""
        lines = self.lines(TIMED, temperature, system, domain)
        return [one for one in lines if (one["prompt"], one["temperature"], one["repeat"]) in self._finished_by_all]


def summarize(
    evaluation: Evaluation, temperature: float, system: str, domain: str | None = None
) -> dict[str, Estimate]:
    """The figures of a system that were measured, with standard errors that take prompts as independent.

    Speeds and acceptance lengths are those of all tokens over all seconds and rounds. Expected and counted lengths are
    means over prompts. What a draft step's shortlist held is a mean over rounds; times of a round are those of
    profiled calls. A `domain` of None is all of them.

    Returns:
        By name: `tokens_per_second`; `acceptance_length`, `counted_length`, `active_vocabulary`, `oov_rate` and
        `coverage` in real runs; `expected_length`, `mass`, `oracle_mass`, `shortlist_size` and `recall@k`
        teacher-forced; `draft_ms` and `verification_ms` of a round; `training_bytes` of an aligned drafter's gradients
        and optimizer; `peak_bytes` of a GPU's memory.
    """
    place = temperature, system, domain
    timed = evaluation.compared(*place)
    figures: dict[str, Estimate] = {}
    if timed:
        tokens = [_tokens(line) for line in timed]
        seconds = [sum(turn["seconds"] for turn in line["turns"]) for line in timed]
        figures["tokens_per_second"] = Estimate.of_ratio(tokens, seconds)
        drafted, rounds = zip(*(_tokens_and_rounds(line) for line in timed), strict=True)
        figures["acceptance_length"] = Estimate.of_ratio(drafted, rounds)
        figures["counted_length"] = Estimate.of([one / of for one, of in zip(drafted, rounds, strict=True)])
    drafting = [line["drafting"] for line in timed if "drafting" in line]
    of_coverage = [line["drafting"] for line in evaluation.lines(COVERAGE, *place)]
    for name, lines in (("active_vocabulary", drafting), ("oov_rate", drafting), ("coverage", of_coverage)):
        known = [
            (one[name] * one["rounds"], one["rounds"]) for one in lines if one[name] is not None and one["rounds"]
        ]
        if known:
            # A mean over rounds.
            figures[name] = Estimate.of_ratio(*zip(*known, strict=True))
    expected = evaluation.lines(EXPECTED, *place)
    for k in dict.fromkeys(line["repeat"] for line in expected):
        for name, field in ((f"recall@{k}", "recall"), *_TEACHER_FORCED.items()):
            figures[name] = Estimate.of([line[field] for line in expected if line["repeat"] == k])
    sections = round_times(evaluation, *place)
    if sections:
        figures["draft_ms"] = Estimate(sum(sections[name] for name in DRAFT_SECTIONS), None)
        figures["verification_ms"] = Estimate(sections["verification"], None)
    most = [line["alignment"]["training_bytes"] for line in timed if line.get("alignment")]
    peaks = [line["peak_bytes"] for line in timed if "peak_bytes" in line]
    for name, values in (("training_bytes", most), ("peak_bytes", peaks)):
        if values:
            figures[name] = Estimate(max(values), None)
    return figures


def _tokens(line: Line) -> int:
    return sum(len(turn["tokens"]) for turn in line["turns"])


def _tokens_and_rounds(line: Line) -> tuple[int, int]:
    """Of an assistant as it counts them, the tokens that came out of rounds; of a baseline, tokens and forwards."""
    if "drafting" in line:
        return line["drafting"]["tokens"], max(1, line["drafting"]["rounds"])
    return _tokens(line), max(1, sum(turn["rounds"] for turn in line["turns"]))


def round_times(
    evaluation: Evaluation, temperature: float, system: str, domain: str | None = None
) -> dict[str, float]:
    """Milliseconds of a round by section, in profiled calls; empty where none was profiled."""
    drafting = [line["drafting"] for line in evaluation.lines(PROFILE, temperature, system, domain)]
    rounds = sum(one["rounds"] for one in drafting)
    if not rounds:
        return {}
    names = dict.fromkeys(name for one in drafting for name in one["seconds"])
    return {name: 1e3 * sum(one["seconds"].get(name, 0.0) for one in drafting) / rounds for name in names}


def mean_over_domains(evaluation: Evaluation, temperature: float, system: str, name: str) -> Estimate | None:
    """The mean of a figure over domains, as papers give it, each of which weighs the same; None where one lacks it in
    which another system has it. On texts that end at once, nothing can be measured teacher-forced."""
    has_figure = (
        domain
        for domain in evaluation.domains
        if any(name in summarize(evaluation, temperature, label, domain) for label in evaluation.systems)
    )
    found = [summarize(evaluation, temperature, system, domain).get(name) for domain in has_figure]
    if not found or any(one is None for one in found):
        return None
    errors = [one.standard_error for one in found]
    error = None if None in errors else sum(one**2 for one in errors) ** 0.5 / len(errors)
    return Estimate(sum(one.mean for one in found) / len(found), error)


def relative_length(evaluation: Evaluation, temperature: float, system: str, base: str) -> Estimate | None:
    """The ratio of two systems' expected acceptance lengths, each a mean over domains, prompt by prompt: if rounds of
    either are drawn, with the same luck for both."""
    own, other = ({one["prompt"]: one for one in evaluation.lines(EXPECTED, temperature, s)} for s in (system, base))
    field = "drawn_length" if any(one["draws"] for one in (*own.values(), *other.values())) else "acceptance_length"
    both = [prompt for prompt in own if prompt in other]
    of_domain = Counter(own[prompt]["domain"] for prompt in both)
    weights = [1 / of_domain[own[prompt]["domain"]] for prompt in both]
    lengths = [
        [side[prompt][field] * weight for prompt, weight in zip(both, weights, strict=True)] for side in (own, other)
    ]
    return Estimate.of_ratio(*lengths) if both else None


def identity(evaluation: Evaluation, system: str) -> tuple[int, dict[str, int]]:
    """Compare greedy results with those of the first plain generation. Returns how many were compared, and for each
    prompt whose tokens differ the position of the first that does."""
    compared, mismatches = compare_with_plain(*(evaluation.lines(TIMED, 0.0, one) for one in (system, PLAIN)))
    return len(compared), mismatches


def compare_with_plain(lines: Iterable[Line], plain: Iterable[Line]) -> tuple[list[str], dict[str, int]]:
    """The prompts of the lines that can be compared with plain generation's first ones, and the first position at
    which each prompt's tokens differ, if they do."""

    def tokens(line: Line) -> list[int]:
        return [token for turn in line["turns"] for token in turn["tokens"]]

    expected = {line["prompt"]: tokens(line) for line in plain if line["repeat"] == 0}
    compared = [line for line in lines if line["prompt"] in expected]
    mismatches: dict[str, int] = {}
    for line in compared:
        pairs = zip_longest(tokens(line), expected[line["prompt"]])
        position = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if position is not None:
            mismatches.setdefault(line["prompt"], position)
    return [line["prompt"] for line in compared], mismatches


def by_request(evaluation: Evaluation, temperature: float, system: str) -> list[float | None]:
    """The acceptance length of each request of a stream; None where it was not measured."""
    found: dict[str, list[tuple[int, int]]] = {}
    for line in evaluation.lines(TIMED, temperature, system):
        found.setdefault(line["prompt"], []).append(_tokens_and_rounds(line))
    return [_length(found.get(prompt["identifier"], [])) for prompt in evaluation.prompts]


def by_turn(evaluation: Evaluation, temperature: float, system: str) -> list[float | None]:
    """The acceptance length of each turn, over all conversations that have it."""
    turns: list[list[tuple[int, int]]] = []
    for line in evaluation.lines(TIMED, temperature, system):
        for number, turn in enumerate(line["turns"]):
            turns += [[]] * (number == len(turns))
            turns[number] = [*turns[number], (len(turn["tokens"]), turn["rounds"])]
    return [_length(one) for one in turns]


def _length(counts: Sequence[tuple[int, int]]) -> float | None:
    rounds = sum(one for _, one in counts)
    return sum(one for one, _ in counts) / rounds if rounds else None
