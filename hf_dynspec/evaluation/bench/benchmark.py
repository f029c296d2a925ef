"""The benchmark: plain generation, transformers' assisted generation and shortlists on the same prompts.

All systems run in one process and take turns on every prompt, so that whatever else the computer does meanwhile slows
all of them alike. What is timed is `target.generate`, prompt included, and nothing else; where time goes and what the
shortlists cover is measured in passes of their own, because measuring it takes time.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from ...drafters import CausalLMDrafter
from ...errors import ConfigurationError
from ...stats import DraftingStatistics, Stopwatch
from ..pair import INTERRUPTION, Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt
from .result import BenchmarkResult, Generation
from .settings import BenchmarkSettings
from .systems import DRAFTING_BASELINES, PLAIN, System, combine, open_systems


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
    policies = settings.resolved_policies()
    heads = {"eagle": settings.eagle, "allow_pickle": settings.allow_pickle}
    with open_pair(settings, target, drafter, tokenizer, prompts, **heads) as pair:
        result = BenchmarkResult(
            settings=settings,
            policies=policies,
            combinations=combine(list(pair.drafters), policies, settings.resolved_shapes()),
            prompts=pair.described_prompts(),
            models=pair.described_models(),
            threads=torch.get_num_threads(),
            started=utc_now(),
        )
        baselines = settings.num_assistant_tokens, settings.transformers_assisted, settings.rivals
        with open_systems(pair, policies, result.combinations, *baselines, result.notes) as systems:
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
        self._configs = {}
        for value, system in product(self._temperatures, systems):
            config = generation_config(target, self._settings.max_new_tokens, value, self._settings.top_k)
            config.update(**system.generation)
            self._configs[value, system.label] = config
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
            if system.label in DRAFTING_BASELINES:
                self._count_forwards(system, temperature)
            if system.is_ours:
                self._profile(system, temperature)
        self._report("done", self._done, self._total)

    def _count_generations(self) -> int:
        assistants = sum(system.is_ours for system in self._systems)
        counting = sum(system.label in DRAFTING_BASELINES for system in self._systems)
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
        """Count the target's forwards, which are the rounds of a baseline that drafts."""
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
            key = temperature, system.label, prompt.domain
            all_tokens, all_forwards = self._result.forwards.get(key, (0, 0))
            self._result.forwards[key] = (all_tokens + len(tokens), all_forwards + count)

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
        config = self._configs[temperature, system.label]
        arguments = {"attention_mask": torch.ones_like(input_ids), "generation_config": config}
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
