"""The benchmark: plain generation, transformers' assisted generation and shortlist policies on the same prompts.

All systems run in one process and take turns on every prompt, so that whatever else the computer does meanwhile slows
all of them alike. What is timed is `target.generate`, prompt included, and nothing else; where time goes and what the
shortlists cover is measured in passes of their own, because measuring it takes time.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..assistant import DynSpecAssistant
from ..drafters import Drafter, as_drafter
from ..errors import ConfigurationError
from ..shortlists import ShortlistPolicy, UnionShortlist, policy_class
from ..stats import DraftingStatistics, Stopwatch
from ..vocabulary import shared_vocabulary_size
from .workloads import WorkloadPrompt, encode_workload, read_workload

PLAIN = "plain"
TRANSFORMERS = "transformers"
DEFAULT_POLICIES = ("full", "frequency", "in_context", "hybrid")

# All systems that draft do so by the same number of tokens in every round, or their rounds would not be comparable: by
# default transformers also ends a draft at the first token of which the drafter is less sure than 0.4.
CONSTANT_DRAFT_LENGTH = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}

# In `a+b:size=1` a plus sign joins policies; in a path it is followed by something that is not a policy with settings.
_JOINT = re.compile(r"\+(?=[a-z_]+(?:[:+]|$))")
_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")
_PATH = re.compile(r"(^|[=:])((?:~|\.{1,2})?/[^,=:]*)")


# What to measure ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchmarkSettings:
    """What to measure, and on what.

    Args:
        target: folder or Hub id of the model to speed up. May be left out where loaded models are passed.
        drafter: folder or Hub id of the small model.
        prompts: JSON lines files, see `read_workload`.
        policies: what `parse_policy` understands, or policies by the name to show.
        max_new_tokens: tokens to generate for each prompt.
        num_assistant_tokens: tokens drafted per round, by transformers' assisted generation too.
        temperatures: each is measured for itself; 0 decodes greedily.
        top_k: for sampling: draw from the so many most probable tokens (0: from all).
        repeats: how often each prompt is run by each system.
        limit: take the first so many prompts of each category of each file (None: all).
        profile_prompts: prompts of each domain that time per section and coverage are measured on, apart from the
            timed runs (0: do not measure either).
        measure_coverage: measure the target's probability mass on the shortlists.
        transformers_assisted: run transformers' assisted generation too.
        chat_template: make each prompt the user's turn of a chat.
        max_prompt_tokens: keep the last so many tokens of longer prompts (None: refuse prompts that do not fit).
        dtype: of both models: a torch dtype's name or "auto" for that of the weights (None: float32 on a CPU, where
            all systems must then give the same tokens, and "auto" elsewhere).
        device: where both models run; "auto" is the first CUDA device if there is one, else the CPU.
        threads: CPU threads (None: torch's choice).
        seed: for sampling. Every system draws a prompt with the same seed, and each repeat has seeds of its own.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy.
    """

    target: str | None = None
    drafter: str | None = None
    prompts: Sequence[str | Path] = ()
    policies: Sequence[str] | Mapping[str, ShortlistPolicy] = DEFAULT_POLICIES
    max_new_tokens: int = 128
    num_assistant_tokens: int = 5
    temperatures: Sequence[float] = (0.0,)
    top_k: int = 50
    repeats: int = 3
    limit: int | None = None
    profile_prompts: int = 2
    measure_coverage: bool = True
    transformers_assisted: bool = True
    chat_template: bool = False
    max_prompt_tokens: int | None = None
    dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name, least in (
            ("max_new_tokens", 1),
            ("num_assistant_tokens", 1),
            ("top_k", 0),
            ("repeats", 1),
            ("limit", 1),
            ("profile_prompts", 0),
            ("max_prompt_tokens", 1),
            ("threads", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not self.temperatures or not all(_is_temperature(value) for value in self.temperatures):
            raise ConfigurationError(f"temperatures must be numbers of at least 0, got {self.temperatures!r}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigurationError(f"a temperature is given twice: {self.temperatures!r}")
        self._require_device_and_dtype()
        self.resolved_policies()

    def _require_device_and_dtype(self) -> None:
        if self.device != "auto":
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                problem = str(error).splitlines()[0]
                raise ConfigurationError(f"device {self.device!r} cannot be used: {problem}") from error
        if self.dtype not in (None, "auto") and not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise ConfigurationError(f"dtype must be auto or a torch dtype such as float32, got {self.dtype!r}")

    def resolved_device(self) -> torch.device:
        """The device that `device` means on this computer."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """The policies by the names they are shown under, which are their texts with paths shortened.

        Raises:
            ConfigurationError: a text is no policy, a name is taken, or there are no policies.
        """
        named = self.policies
        if not isinstance(named, Mapping):
            pairs = [(shorten_paths(text), parse_policy(text)) for text in named]
            named = dict(pairs)
            twice = next((label for label, _ in pairs if [one for one, _ in pairs].count(label) > 1), None)
            if twice is not None:
                raise ConfigurationError(f"the policy {twice!r} is given twice")
        if not named:
            raise ConfigurationError("there is no policy to measure")
        for label in (PLAIN, TRANSFORMERS):
            if label in named:
                raise ConfigurationError(f"a policy cannot be shown as {label!r}, which is one of the baselines")
        return dict(named)


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")


def parse_policy(text: str) -> ShortlistPolicy:
    """Make the policy that a text describes.

    The text is a policy's name, then after a colon its settings separated by commas: `hybrid`,
    `frequency:size=32768`, `frequency:ranking=FOLDER,position_aware=true`. A plus sign makes a union of several:
    `frequency:size=1024+in_context:window=3072,eviction=lru`. `none` stands for None.

    Raises:
        ConfigurationError: there is no such policy or setting, or a value is mistyped or out of range.
    """
    parts = [_parse_single_policy(part) for part in _JOINT.split(text)]
    return parts[0] if len(parts) == 1 else UnionShortlist(*parts)


def _parse_single_policy(text: str) -> ShortlistPolicy:
    name, colon, listed = text.partition(":")
    policy = policy_class(name)
    known = inspect.signature(policy).parameters
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in known.values()):
        raise ConfigurationError(
            f"policy {text!r}: join policies with + instead, as in frequency:size=1024+in_context"
        )
    settings: dict[str, Any] = {}
    for item in _NEXT_SETTING.split(listed) if colon else ():
        setting, equals, value = item.partition("=")
        if not equals or not value:
            raise ConfigurationError(f"policy {text!r}: settings are written name=value, got {item!r}")
        if setting not in known:
            raise ConfigurationError(
                f"policy {text!r}: {name} has no setting {setting!r}; it has {', '.join(known) or 'none'}"
            )
        if setting in settings:
            raise ConfigurationError(f"policy {text!r}: {setting} is given twice")
        settings[setting] = _parse_value(value)
    try:
        return policy(**settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"policy {text!r}: {error}") from error


def _parse_value(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def shorten_paths(text: str) -> str:
    """Reduce the paths in a word of a command line to their last two parts, so that results can be published."""

    def shorten(match: re.Match[str]) -> str:
        path = match[2].replace(f"{Path.home()}/", "~/")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        return match[1] + "/".join(parts[-2:])

    return _PATH.sub(shorten, text)


# What was measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One way to generate.

    Args:
        label: what it is shown as.
        policy: its shortlist policy; None for the two baselines.
        assistant: what is passed as `assistant_model`; None for plain generation.
    """

    label: str
    policy: ShortlistPolicy | None
    assistant: Any


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
    """Everything that was measured, as far as it was; `hf_dynspec.evaluation.report` makes figures of it.

    Keys that name a domain or a system hold its label.

    Args:
        settings: what was asked for.
        policies: the policies by label, in the order of the table.
        prompts: identifier, domain and number of tokens of each prompt.
        models: what is known of the target and the drafter.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: UTC time; None while the run is not complete.
        notes: what a reader should know, such as a baseline that could not run.
        generations: the timed calls.
        drafting: by temperature, policy and domain: the counts of the timed calls.
        forwards: by temperature and domain: new tokens and target forwards of transformers' assisted generation.
        profiles: by temperature and policy: the counts of the profiled calls, with seconds by section.
        coverages: by temperature and policy: the counts of the calls in which coverage was measured.
        compared: by system: the prompts whose greedy tokens were compared with plain generation's.
        mismatches: by system: prompts whose greedy tokens differ, with the first position that does, from 0.
    """

    settings: BenchmarkSettings
    policies: dict[str, ShortlistPolicy]
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
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
    save: Callable[[BenchmarkResult], None] = lambda result: None,
) -> BenchmarkResult:
    """Measure. Settings and prompts are checked before any model is loaded.

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
        ConfigurationError: a setting is out of range, or a model cannot be loaded.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
    """
    policies = settings.resolved_policies()
    prompts = read_workload(settings.prompts, settings.limit) if prompts is None else list(prompts)
    if not prompts:
        raise ConfigurationError("there is no prompt to measure on")
    with ExitStack() as stack:
        stack.enter_context(_cpu_threads(settings.threads))
        target = target or _load_model(settings, "target")
        drafter = drafter or _load_model(settings, "drafter")
        tokenizer = tokenizer or _load_tokenizer(settings.target or target.name_or_path)
        encoded = encode_workload(
            prompts,
            tokenizer,
            _room_for_prompt(settings, target, _model_of(drafter)),
            truncate_to=settings.max_prompt_tokens,
            use_chat_template=settings.chat_template,
        )
        result = BenchmarkResult(
            settings=settings,
            policies=policies,
            prompts=[
                {"identifier": prompt.identifier, "domain": prompt.domain, "tokens": len(token_ids)}
                for prompt, token_ids in zip(prompts, encoded, strict=True)
            ],
            models={"target": _describe(target), "drafter": _describe(_model_of(drafter))},
            threads=torch.get_num_threads(),
            started=_utc_now(),
        )
        stack.enter_context(_fewer_messages())
        systems = stack.enter_context(_systems(result, target, drafter, tokenizer))
        stack.enter_context(torch.random.fork_rng([target.device] if target.device.type == "cuda" else []))
        try:
            _Run(result, target, drafter, systems, prompts, encoded, report, save).everything()
            result.finished = _utc_now()
        except KeyboardInterrupt:
            result.notes.append("interrupted before all was measured")
    save(result)
    return result


class _Run:
    """The passes over prompts and systems that make up a benchmark."""

    def __init__(
        self,
        result: BenchmarkResult,
        target: PreTrainedModel,
        drafter: PreTrainedModel | Drafter,
        systems: list[System],
        prompts: list[WorkloadPrompt],
        encoded: list[list[int]],
        report: Callable[[str, int, int], None],
        save: Callable[[BenchmarkResult], None],
    ):
        self._result = result
        self._settings = result.settings
        self._target = target
        self._systems = systems
        self._prompts = [
            (index, prompt, torch.tensor([token_ids], device=target.device))
            for index, (prompt, token_ids) in enumerate(zip(prompts, encoded, strict=True))
        ]
        self._few = _first_of_each_domain(self._prompts, self._settings.profile_prompts)
        self._configs = {value: _generation_config(self._settings, target, value) for value in self._temperatures}
        self._clock = Stopwatch(enabled=False, devices=(target.device, _model_of(drafter).device))
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
            if system.policy is not None:
                self._profile(system, temperature)
        self._report("done", self._done, self._total)

    def _count_generations(self) -> int:
        policies = sum(system.policy is not None for system in self._systems)
        counting = any(system.label == TRANSFORMERS for system in self._systems)
        timed = self._settings.repeats * len(self._systems) * len(self._prompts)
        studied = policies * len(self._few) * (1 + self._settings.measure_coverage)
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
        if system.policy is not None:
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


def _generation_config(settings: BenchmarkSettings, target: PreTrainedModel, temperature: float) -> GenerationConfig:
    """What all systems generate with: nothing of the target's own taste but its end-of-sequence tokens."""
    defaults = target.generation_config
    eos = defaults.eos_token_id
    first_eos = eos[0] if isinstance(eos, list | tuple) else eos
    sampling = {"temperature": temperature, "top_k": settings.top_k} if temperature > 0 else {}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=eos,
        pad_token_id=defaults.pad_token_id if defaults.pad_token_id is not None else first_eos,
        **{"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, **sampling},
    )


# The systems -------------------------------------------------------------------------------------------------------


@contextmanager
def _systems(
    result: BenchmarkResult, target: PreTrainedModel, drafter: PreTrainedModel | Drafter, tokenizer: Any
) -> Iterator[list[System]]:
    """Set up the baselines and an assistant for each policy; put the models back as they were."""
    settings = result.settings
    own_drafter = as_drafter(drafter)
    # Refuses a drafter with another tokenizer. The assistants are then told the tokenizer, to look it up only once.
    shared_vocabulary_size(target, own_drafter, None)
    systems = [System(PLAIN, None, None)]
    with ExitStack() as stack:
        if settings.transformers_assisted:
            model = _model_of(drafter)
            rows, drafter_rows = (one.config.get_text_config().vocab_size for one in (target, model))
            if rows == drafter_rows:
                stack.enter_context(_draft_length(model, settings.num_assistant_tokens))
                systems.append(System(TRANSFORMERS, None, model))
            else:
                result.notes.append(
                    "transformers' assisted generation was left out: it takes two models for users of one tokenizer "
                    f"only if their vocabularies have equally many rows, and these have {rows:,} and {drafter_rows:,}"
                )
        for label, policy in result.policies.items():
            assistant = DynSpecAssistant(
                own_drafter,
                policy,
                target=target,
                tokenizer=tokenizer,
                num_assistant_tokens=settings.num_assistant_tokens,
            )
            stack.callback(assistant.unbind)
            for name, value in CONSTANT_DRAFT_LENGTH.items():
                setattr(assistant.generation_config, name, value)
            systems.append(System(label, policy, assistant))
        yield systems


@contextmanager
def _draft_length(drafter: PreTrainedModel, num_assistant_tokens: int) -> Iterator[None]:
    """Let transformers draft as many tokens as the assistants do, which it reads from the drafter's own settings."""
    config = drafter.generation_config
    wanted = {"num_assistant_tokens": num_assistant_tokens, **CONSTANT_DRAFT_LENGTH}
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


# Models and surroundings -------------------------------------------------------------------------------------------


def _load_model(settings: BenchmarkSettings, role: str) -> PreTrainedModel:
    name = getattr(settings, role)
    if not name:
        raise ConfigurationError(f"name the {role}: a folder or a Hub id")
    device = settings.resolved_device()
    dtype = settings.dtype or ("float32" if device.type == "cpu" else "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, device_map={"": device}, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigurationError(f"the {role} {name} cannot be loaded on {device} as {dtype}: {problem}") from error
    return model.eval()


def _load_tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigurationError(f"the tokenizer of {name} cannot be loaded: {problem}") from error


def _room_for_prompt(settings: BenchmarkSettings, *models: PreTrainedModel) -> int | None:
    """Most tokens of a prompt for which all models have positions, or None where none of them tells."""
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    known = [limit for limit in limits if limit]
    return min(known) - settings.max_new_tokens if known else None


def _model_of(drafter: PreTrainedModel | Drafter) -> PreTrainedModel:
    return drafter.model if isinstance(drafter, Drafter) else drafter


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": shorten_paths(str(model.name_or_path)),
        "commit": getattr(model.config, "_commit_hash", None),
        "class": type(model).__name__,
        "parameters": model.num_parameters(),
        "head_rows": model.get_output_embeddings().weight.shape[0],
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config._attn_implementation,
    }


@contextmanager
def _cpu_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _fewer_messages() -> Iterator[None]:
    """Keep transformers from printing warnings, some of which would fall into timed calls."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
