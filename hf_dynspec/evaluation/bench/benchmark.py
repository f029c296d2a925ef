"""The benchmark: plain generation, transformers' assisted generation and shortlists on the same prompts.

All systems run in one process and take turns on every prompt, so that whatever else the computer does meanwhile slows
all of them alike. What is timed is `target.generate`, prompt included, and nothing else; where time goes and what the
shortlists cover is measured in passes of their own, because measuring it takes time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ...drafters import CausalLMDrafter
from ...drafting.tree_config import TreeConfig
from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ...stats import DraftingStatistics, Stopwatch
from ..pair import INTERRUPTION, Pair, PairSettings, generation_config, head_labels, is_temperature, open_pair, utc_now
from ..policy_text import shorten_paths
from ..prompts import WorkloadPrompt
from ..tree_text import parse_trees
from .systems import HEAD_PRODUCT, PLAIN, TRANSFORMERS, Combination, System, combine, open_systems

# What to measure ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkSettings(PairSettings):
    """What to measure, and on what. `PairSettings` has the models, policies and prompts.

    Every drafter runs with every policy, in chains and in trees of every shape. Every system draws a prompt with the
    same seed, and each repeat has seeds of its own. Transformers' assisted generation drafts chains of
    `num_assistant_tokens` too, with the independent drafter. Where verifications compute the target's logits by this
    package's own product, plain generation runs with that product too.

    Args:
        eagle: folders or Hub ids of EAGLE heads for the target, beside the drafter or in its place.
        allow_pickle: read heads that are not in safetensors, as `EagleDrafter.from_pretrained`.
        chains: draft chains of `num_assistant_tokens`.
        trees: draft trees of each of these shapes: a `TreeConfig`, or what `parse_tree` understands.
        temperatures: each is measured for itself; 0 decodes greedily.
        top_k: for sampling: draw from the so many most probable tokens (0: from all).
        repeats: how often each prompt is run by each system.
        profile_prompts: prompts of each domain that time per section and coverage are measured on, apart from the
            timed runs (0: do not measure either).
        measure_coverage: measure the target's probability mass on the shortlists.
        transformers_assisted: run transformers' assisted generation too.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy or no tree.
    """

    eagle: Sequence[str] = ()
    allow_pickle: bool = False
    chains: bool = True
    trees: Sequence[str | TreeConfig] = ()
    temperatures: Sequence[float] = (0.0,)
    top_k: int = 50
    repeats: int = 3
    profile_prompts: int = 2
    measure_coverage: bool = True
    transformers_assisted: bool = True

    _LEAST: ClassVar[Mapping[str, int]] = {**PairSettings._LEAST, "top_k": 0, "repeats": 1, "profile_prompts": 0}

    def __post_init__(self):
        super().__post_init__()
        if not self.temperatures or not all(is_temperature(value) for value in self.temperatures):
            raise ConfigurationError(f"temperatures must be numbers of at least 0, got {self.temperatures!r}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigurationError(f"a temperature is given twice: {self.temperatures!r}")
        head_labels(self.eagle)
        if not self.resolved_shapes():
            raise ConfigurationError("there is nothing to draft: name a tree, or leave chains on")

    def resolved_shapes(self) -> list[TreeConfig | None]:
        """The shapes of the drafts; None for chains."""
        return [None] * bool(self.chains) + parse_trees(self.trees)

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """See `named_policies`. The labels of the baselines are taken."""
        named = super().resolved_policies()
        for label in (PLAIN, HEAD_PRODUCT, TRANSFORMERS):
            if label in named:
                raise ConfigurationError(f"a policy cannot be shown as {label!r}, which is one of the baselines")
        return named

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        eagle = [shorten_paths(str(source)) for source in self.eagle]
        return {**super().to_dict(), "eagle": eagle, "trees": [asdict(tree) for tree in parse_trees(self.trees)]}


# What was measured -------------------------------------------------------------------------------------------------


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
    """Everything that was measured, as far as it was; `evaluation.bench.report` makes figures of it.

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
        forwards: by temperature and domain: new tokens and target forwards of transformers' assisted generation.
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
    forwards: dict[tuple[float, str], tuple[int, int]] = field(default_factory=dict)
    profiles: dict[tuple[float, str], DraftingStatistics] = field(default_factory=dict)
    coverages: dict[tuple[float, str], DraftingStatistics] = field(default_factory=dict)
    compared: dict[str, set[str]] = field(default_factory=dict)
    mismatches: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        return self.finished is not None


# The run -----------------------------------------------------------------------------------------------------------


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
        target: the loaded model, in place of the one that the settings name; likewise the next three.
        drafter: the loaded small model. Its generation settings are put back at the end.
        tokenizer: the tokenizer of both.
        prompts: prompts that are not read from files.
        report: called between generations with what is being done, how many generations are done and how many there
            are in all.
        save: called after each repeat and at the end, to keep what was measured even if the process is killed.

    Returns:
        The result. After an interrupt from the keyboard, what was measured until then.

    Raises:
        ConfigurationError: a setting is out of range, nothing drafts, or a model or head cannot be loaded.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
    """
    if drafter is not None and not isinstance(drafter, PreTrainedModel | CausalLMDrafter):
        raise ConfigurationError(f"drafter must be a small model, got {type(drafter).__name__}; name heads in eagle")
    heads = {"eagle": settings.eagle, "allow_pickle": settings.allow_pickle}
    with open_pair(settings, target, drafter, tokenizer, prompts, **heads) as pair:
        result = BenchmarkResult(
            settings=settings,
            policies=pair.policies,
            combinations=combine(list(pair.drafters), pair.policies, settings.resolved_shapes()),
            prompts=pair.described_prompts(),
            models=pair.described_models(),
            threads=torch.get_num_threads(),
            started=utc_now(),
        )
        drafted, assisted = settings.num_assistant_tokens, settings.transformers_assisted
        with open_systems(pair, result.combinations, drafted, assisted, result.notes) as systems:
            try:
                _Run(result, pair, systems, report, save).everything()
                result.finished = utc_now()
            except KeyboardInterrupt:
                result.notes.append(INTERRUPTION)
    save(result)
    return result


class _Run:
    """The passes over prompts and systems that make up a benchmark."""

    def __init__(
        self,
        result: BenchmarkResult,
        pair: Pair,
        systems: list[System],
        report: Callable[[str, int, int], None],
        save: Callable[[BenchmarkResult], None],
    ):
        self._result = result
        self._settings = result.settings
        self._target = target = pair.target
        self._systems = systems
        self._prompts = [
            (index, prompt, torch.tensor([token_ids], device=target.device))
            for index, (prompt, token_ids) in enumerate(zip(pair.prompts, pair.encoded, strict=True))
        ]
        self._few = _first_of_each_domain(self._prompts, self._settings.profile_prompts)
        self._configs = {
            value: generation_config(target, self._settings.max_new_tokens, value, self._settings.top_k)
            for value in self._temperatures
        }
        self._clock = Stopwatch(
            enabled=False, devices=(target.device, *(drafter.head.device for drafter in pair.drafters.values()))
        )
        self._plain_tokens: dict[str, list[int]] = {}
        self._report = report
        self._save = save
        self._done = 0
        self._total = self._count_generations()

    @property
    def _temperatures(self) -> Sequence[float]:
        return self._settings.temperatures

    def everything(self) -> None:
        """Warm up, repeat the timed pass, then make the passes in which nothing is timed."""
        for temperature, system in product(self._temperatures, self._systems):
            self._generate("warming up", system, 0, temperature, 0)
        for repeat in range(self._settings.repeats):
            for temperature in self._temperatures:
                self._time_all_prompts(temperature, repeat)
            self._save(self._result)
        for temperature, system in product(self._temperatures, self._systems):
            if system.label == TRANSFORMERS:
                self._count_forwards(system, temperature)
            if system.is_ours:
                self._profile(system, temperature)
        self._report("done", self._done, self._total)

    def _count_generations(self) -> int:
        assistants = sum(system.is_ours for system in self._systems)
        counting = any(system.label == TRANSFORMERS for system in self._systems)
        timed = self._settings.repeats * len(self._systems) * len(self._prompts)
        studied = assistants * len(self._few) * (1 + self._settings.measure_coverage)
        return len(self._temperatures) * (len(self._systems) + timed + counting * len(self._prompts) + studied)

    def _time_all_prompts(self, temperature: float, repeat: int) -> None:
        for index, prompt, _ in self._prompts:
            # Systems take turns in going first, so that none always finds the caches that another one left.
            turn = (index + repeat) % len(self._systems)
            tokens_of: dict[str, list[int]] = {}
            for system in self._systems[turn:] + self._systems[:turn]:
                activity = f"repeat {repeat + 1} of {self._settings.repeats}"
                tokens, seconds = self._generate(activity, system, index, temperature, repeat)
                self._record(prompt, system, temperature, repeat, len(tokens), seconds)
                tokens_of[system.label] = tokens
            if temperature == 0:
                self._compare(prompt.identifier, tokens_of)

    def _record(
        self, prompt: WorkloadPrompt, system: System, temperature: float, repeat: int, tokens: int, seconds: float
    ) -> None:
        rounds = None
        if system.is_ours:
            stats = system.assistant.stats
            rounds = stats.rounds
            key = (temperature, system.label, prompt.domain)
            self._result.drafting.setdefault(key, DraftingStatistics()).add(stats)
        self._result.generations.append(
            Generation(prompt.identifier, prompt.domain, system.label, temperature, repeat, tokens, seconds, rounds)
        )

    def _compare(self, identifier: str, tokens_of: dict[str, list[int]]) -> None:
        """Compare greedy tokens with those of the first plain generation, which itself must repeat them."""
        expected = self._plain_tokens.setdefault(identifier, tokens_of[PLAIN])
        for label, tokens in tokens_of.items():
            self._result.compared.setdefault(label, set()).add(identifier)
            mismatches = self._result.mismatches.setdefault(label, {})
            if tokens != expected:
                pairs = enumerate(zip(tokens, expected, strict=False))
                ends_first = min(len(tokens), len(expected))
                mismatches.setdefault(identifier, next((i for i, (one, other) in pairs if one != other), ends_first))

    def _count_forwards(self, system: System, temperature: float) -> None:
        """Count the target's forwards, which are the rounds of transformers' assisted generation."""
        count = 0

        def add(*_: Any) -> None:
            nonlocal count
            count += 1

        for index, prompt, _ in self._prompts:
            count = 0
            hook = self._target.register_forward_hook(add)
            try:
                tokens, _ = self._generate("counting rounds", system, index, temperature, 0)
            finally:
                hook.remove()
            all_tokens, all_forwards = self._result.forwards.get((temperature, prompt.domain), (0, 0))
            self._result.forwards[temperature, prompt.domain] = (all_tokens + len(tokens), all_forwards + count)

    def _profile(self, system: System, temperature: float) -> None:
        """Measure where the time goes and, in calls of their own, what the shortlists cover."""
        studies = [("profile", self._result.profiles)]
        if self._settings.measure_coverage:
            studies.append(("measure_coverage", self._result.coverages))
        for (switch, results), (index, _, _) in product(studies, self._few):
            setattr(system.assistant, switch, True)
            try:
                self._generate("profiling" if switch == "profile" else "coverage", system, index, temperature, 0)
            finally:
                setattr(system.assistant, switch, False)
            results.setdefault((temperature, system.label), DraftingStatistics()).add(system.assistant.stats)

    def _generate(
        self, activity: str, system: System, index: int, temperature: float, repeat: int
    ) -> tuple[list[int], float]:
        """Generate once; return the new tokens and the seconds that it took."""
        self._report(f"{activity}, {system.label}", self._done, self._total)
        input_ids = self._prompts[index][2]
        arguments = {"attention_mask": torch.ones_like(input_ids), "generation_config": self._configs[temperature]}
        if system.assistant is not None:
            arguments["assistant_model"] = system.assistant
        torch.manual_seed(self._settings.seed + index + 1000 * repeat)
        with system.surroundings():
            start = self._clock.now()
            output = self._target.generate(input_ids, **arguments)
            seconds = self._clock.now() - start
        self._done += 1
        return output[0, input_ids.shape[1] :].tolist(), seconds


def _first_of_each_domain(prompts: list[tuple[int, WorkloadPrompt, torch.Tensor]], count: int) -> list[Any]:
    taken: dict[str, int] = {}
    chosen = []
    for entry in prompts:
        domain = entry[1].domain
        taken[domain] = taken.get(domain, 0) + 1
        if taken[domain] <= count:
            chosen.append(entry)
    return chosen
