"""What a benchmark measured, as far as it did."""

from dataclasses import dataclass, field
from typing import Any

from ...shortlists import ShortlistPolicy
from ...stats import DraftingStatistics
from ...tree_config import TreeConfig
from .settings import BenchmarkSettings
from .systems import BASELINES, Combination


@dataclass(frozen=True)
class Generation:
    """One timed call.

    Args:
        prompt: the prompt's identifier.
        domain: the prompt's domain.
        system: the system's label.
        temperature: 0 for greedy decoding.
        repeat: counted from 0.
        tokens: new tokens.
        seconds: wall time of `generate`, the prompt included.
        rounds: verifications; None for the baselines, where nobody counts them while the clock runs.
    """

    prompt: str
    domain: str
    system: str
    temperature: float
    repeat: int
    tokens: int
    seconds: float
    rounds: int | None


@dataclass
class BenchmarkResult:
    """Everything that was measured, as far as it was; `figures.summarize` makes figures of it.

    Keys that name a domain or a system hold its label.

    Args:
        settings: what was asked for.
        policies: the policies by label.
        combinations: what each system but the baselines is made of, in the order of the tables.
        prompts: identifier, domain and number of tokens of each prompt.
        models: what is known of the target and the drafters.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: UTC time; None while the run is not complete.
        notes: what a reader should know, such as a baseline that could not run.
        generations: the timed calls.
        drafting: by temperature, system and domain: the counts of the timed calls.
        forwards: by temperature, system and domain: new tokens and target forwards of the baselines that draft.
        profiles: by temperature and system: the counts of the profiled calls, with seconds by section.
        coverages: by temperature and system: the counts of the calls in which coverage was measured.
        compared: by system: the prompts whose greedy tokens were compared with plain generation's.
        mismatches: by system: prompts whose greedy tokens differ, with the first position that does, from 0.
    """

    settings: BenchmarkSettings
    policies: dict[str, ShortlistPolicy]
    combinations: dict[str, Combination]
    prompts: list[dict[str, Any]]
    models: dict[str, Any]
    threads: int
    started: str
    finished: str | None = None
    notes: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    drafting: dict[tuple[float, str, str], DraftingStatistics] = field(default_factory=dict)
    forwards: dict[tuple[float, str, str], tuple[int, int]] = field(default_factory=dict)
    profiles: dict[tuple[float, str], DraftingStatistics] = field(default_factory=dict)
    coverages: dict[tuple[float, str], DraftingStatistics] = field(default_factory=dict)
    compared: dict[str, set[str]] = field(default_factory=dict)
    mismatches: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        return self.finished is not None

    @property
    def labels(self) -> list[str]:
        """The systems that ran, in the order of the tables."""
        ran = {generation.system for generation in self.generations}
        return [label for label in (*BASELINES, *self.combinations) if label in ran]

    @property
    def groups(self) -> list[tuple[str, TreeConfig | None]]:
        """The pairs of a drafter and a shape, in the order of the tables."""
        return list(dict.fromkeys(combination.group for combination in self.combinations.values()))

    def policy_name(self, label: str) -> str | None:
        """The name of the class of a system's policy; None for the baselines."""
        return self.policies[self.combinations[label].policy].name if label in self.combinations else None
