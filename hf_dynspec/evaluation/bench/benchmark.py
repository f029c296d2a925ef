"""The benchmark: plain generation, transformers' assisted generation and shortlists on the same prompts. It is an
evaluation whose results stay in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ...drafters import CausalLMDrafter
from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ...tree_config import TreeConfig
from ..pair import INTERRUPTION, open_pair, utc_now
from ..policy_text import named_policies
from ..prompts import WorkloadPrompt, read_workload
from ..settings import SystemsSettings
from ..suites.runner import Run
from ..suites.runs import COVERAGE, PROFILE, TIMED, RunMemory
from .systems import BASELINES, Combination, open_systems


@dataclass(frozen=True)
class BenchmarkSettings(SystemsSettings):
    """What to measure. `SystemsSettings` has the models, prompts and drafts.

    Every drafter runs with every policy, in chains and in trees of every shape. Every system draws a prompt with the
    same seed, and each repeat has seeds of its own. Transformers' assisted generation drafts chains of
    `num_assistant_tokens` too (5 if that is `"auto"`), with the independent drafter. If verifications use this
    package's product for the target's logits, plain generation runs with that product too.

    Args:
        measure_coverage: measure the target's probability mass on the shortlists.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy or no tree.
    """

    measure_coverage: bool = True

    _TAKES_AUTO: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.resolved_policies()

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """See `named_policies`. The labels of the baselines are taken."""
        named = named_policies(self.policies)
        for label in BASELINES:
            if label in named:
                raise ConfigurationError(f"a policy cannot be shown as {label!r}, which is one of the baselines")
        return named


@dataclass(frozen=True)
class Generation:
    """One timed call."""

    prompt: str
    domain: str
    system: str
    temperature: float  # 0 for greedy decoding
    repeat: int  # counted from 0
    tokens: int  # new tokens
    seconds: float  # wall time of `generate`, the prompt included
    rounds: int  # verifications; of a baseline, forwards of the target


@dataclass
class BenchmarkResult:
    """The measurements so far; `figures.summarize` computes the figures."""

    settings: BenchmarkSettings
    policies: dict[str, ShortlistPolicy]
    prompts: list[dict[str, Any]]  # identifier, domain and number of tokens of each prompt
    models: dict[str, Any]  # descriptions of the target and the drafters
    threads: int  # CPU threads in use
    started: str  # UTC time in ISO format
    finished: str | None = None  # UTC time; None while the run is not complete
    notes: list[str] = field(default_factory=list)  # notes for the reader, such as a baseline that could not run
    # The parts of each assistant by its label, in the order of the tables.
    combinations: dict[str, Combination] = field(default_factory=dict)
    memory: RunMemory = field(default_factory=RunMemory)  # a line for each call, see `suites.runs`

    @property
    def complete(self) -> bool:
        """Whether everything was measured."""
        return self.finished is not None

    def lines(self, kind: str, **only: Any) -> list[dict[str, Any]]:
        """The lines of a kind with these values; None stands for all values."""
        wanted = {"kind": kind, **{name: value for name, value in only.items() if value is not None}}
        return [line for line in self.memory.lines.values() if wanted.items() <= line.items()]

    @property
    def generations(self) -> list[Generation]:
        """The timed calls, in their order."""
        names = ("prompt", "domain", "system", "temperature", "repeat")
        return [
            Generation(*(line[name] for name in names), len(turn["tokens"]), turn["seconds"], turn["rounds"])
            for line in self.lines(TIMED)
            for turn in line["turns"]
        ]

    @property
    def labels(self) -> list[str]:
        """The systems that ran, in the order of the tables."""
        ran = {line["system"] for line in self.lines(TIMED)}
        return [label for label in (*BASELINES, *self.combinations) if label in ran]

    @property
    def groups(self) -> list[tuple[str, TreeConfig | None]]:
        """The pairs of a drafter and a shape, in the order of the tables."""
        return list(dict.fromkeys(combination.group for combination in self.combinations.values()))

    def policy_name(self, label: str) -> str | None:
        """The name of the class of a system's policy; None for baselines."""
        return self.policies[self.combinations[label].policy].name if label in self.combinations else None


def run_benchmark(
    settings: BenchmarkSettings,
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | CausalLMDrafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
    save: Callable[[BenchmarkResult], None] = lambda result: None,
) -> BenchmarkResult:
    """Measure. Settings, prompts and EAGLE heads are checked before any model is loaded.

    Args:
        settings: what to measure.
        target, drafter, tokenizer, prompts: used instead of what the settings name, see `open_pair`. The
            drafter's generation settings are put back at the end.
        report: called between generations with the activity, the generations done and those in all.
        save: called after each repeat and at the end, so that results survive a kill.

    Returns:
        The result. After an interrupt from the keyboard, the measurements so far.

    Raises:
        ConfigurationError: a setting is out of range, nothing drafts, or a model or head cannot be loaded.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
    """
    if drafter is not None and not isinstance(drafter, PreTrainedModel | CausalLMDrafter):
        raise ConfigurationError(f"drafter must be a small model, got {type(drafter).__name__}; name heads in eagle")
    policies = settings.resolved_policies()
    given = read_workload(settings.prompts, settings.limit) if prompts is None else prompts
    # Of a conversation, the first turn is measured.
    first_turns = [replace(prompt, later_turns=()) for prompt in given]
    heads = {"eagle": settings.eagle, "allow_pickle": settings.allow_pickle}
    with open_pair(settings, target, drafter, tokenizer, first_turns, **heads) as pair:
        result = BenchmarkResult(
            settings=settings,
            policies=policies,
            prompts=pair.described_prompts(),
            models=pair.described_models(),
            threads=torch.get_num_threads(),
            started=utc_now(),
        )
        domains = dict.fromkeys(prompt.domain for prompt in pair.prompts)
        by_domain = {label: dict.fromkeys(domains, policy) for label, policy in policies.items()}
        kinds = (PROFILE, COVERAGE) if settings.measure_coverage else (PROFILE,)
        with open_systems(pair, settings, by_domain, result.notes) as systems:
            result.combinations = {one.label: one.parts for one in systems if one.parts is not None}
            run = Run(settings, result.memory, pair, systems, None, report, kinds=kinds)
            try:
                run.everything(after_repeat=lambda: save(result))
                result.finished = utc_now()
            except KeyboardInterrupt:
                result.notes.append(INTERRUPTION)
    save(result)
    return result
