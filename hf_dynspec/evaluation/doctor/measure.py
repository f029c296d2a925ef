"""Time a few calls of each policy on a pair, within a number of seconds, taking turns on every prompt."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from ...devices import multiplies_fast
from ...drafters import Drafter
from ...errors import ConfigurationError, DynSpecError, NotBoundError, UnsupportedError, shown_value
from ...kernels import most_queries, prepare_kernels
from ...loading import load_config, shared_vocabulary_size
from ...shortlists import ShortlistPolicy, as_policy
from ...stats import Stopwatch
from ...tree_config import TreeConfig
from ..head_product import head_product, why_not_head_product
from ..pair import Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from .diagnosis import OWN_POLICY, Diagnosis, TimedCall, TimedSetting
from .prompts import PROMPTS
from .settings import FULL, POLICIES, DoctorSettings

Report = Callable[[str, int, int], None]

_WARM_UP_TOKENS = 8
_FEWEST_TOKENS = 8
# Texts are cut to this number of prompts in the time of the first phase.
_WANTED_PROMPTS = 3
# Shares of the seconds at which the warm-up, the comparison of policies and that of lengths have to be over. The rest
# is for profiles.
_WARM_UP_ENDS, _POLICIES_END, _LENGTHS_END = 0.3, 0.7, 0.9
# Two profiled calls have these numbers of tokens. Their difference is rounds that read no prompt.
_PROFILED_TOKENS = (8, 32)
_NO_TIME = "--seconds has no time for it"
# Past the end, so many prompts are tried if all texts so far ended at once.
_MOST_ENDED_TEXTS = 3
# The least seconds of one call, and the least in tokens of plain generation: texts of one round cannot be timed.
_LEAST_SECONDS, _LEAST_OF_PLAIN = 0.5, 6
# After each prompt the policies go on that are nearly as fast as the fastest.
_STILL_OPEN = 0.8
# On a CPU, this share of the time without this thread shows that the computer does other work.
_MUCH_WAITING = 0.15


def diagnose_pair(
    settings: DoctorSettings,
    make_assistant: Callable[..., Any],
    *,
    target: PreTrainedModel | None = None,
    drafter: PreTrainedModel | Drafter | None = None,
    tokenizer: Any = None,
    prompts: Sequence[WorkloadPrompt] | None = None,
    fast_target_head: bool = True,
    optional: Collection[str] = (),
    report: Report = lambda activity, done, total: None,
) -> Diagnosis:
    """Measure whether drafting pays for a pair. Settings, prompts and EAGLE heads are checked before any model is
    loaded, and models are left as they were.

    Args:
        settings: what to measure.
        make_assistant: `DynSpecAssistant`.
        target, drafter, tokenizer, prompts: used instead of what the settings name, see `open_pair`.
        fast_target_head: as for `DynSpecAssistant`.
        optional: labels of policies that are left out, with a note, if they do not work for the pair. The default
            policies always are.
        report: called between generations with the activity, the seconds spent and the seconds in all.

    Raises:
        ConfigurationError: a model or head cannot be loaded, or there is no drafter.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
    """
    if prompts is None:
        prompts = read_workload(settings.prompts, settings.limit) if settings.prompts else PROMPTS
    heads = {"eagle": [settings.eagle] if settings.eagle else [], "allow_pickle": settings.allow_pickle}
    given: dict[str, Any] = {"drafter": drafter, "tokenizer": tokenizer}
    # Where the dtype is open, and everything is there that is loaded.
    tried, is_slow = {}, target is None and settings.dtype is None and _is_slow_in_16_bits(settings.resolved_device())
    if is_slow and settings.target and (settings.drafter or settings.eagle or drafter):
        more = {"prompts": prompts, "fast_target_head": fast_target_head, "report": report}
        tried = _try_dtypes(settings, partial(diagnose_pair, make_assistant=make_assistant, **given, **more))
    if tried:
        settings = replace(settings, dtype=max(tried, key=lambda dtype: max(tried[dtype])))
    prompts = by_turns(prompts)
    with open_pair(settings, target, prompts=prompts, **given, **heads) as pair, ExitStack() as stack:
        (own,) = pair.drafters.values()
        diagnosis = Diagnosis(
            settings=settings,
            policies=settings.resolved_policies(),
            models=pair.described_models(),
            vocabulary={
                "tokens": shared_vocabulary_size(pair.target, own, pair.tokenizer),
                "target_rows": pair.target.get_output_embeddings().weight.shape[0],
                "drafter_rows": own.head.weight.shape[0],
            },
            prompts=pair.described_prompts(),
            threads=torch.get_num_threads(),
            started=utc_now(),
            dtypes=tried,
        )
        if "cpu" in {pair.target.device.type, own.head.device.type}:
            prepare_kernels()
        models = {"target": pair.target, "tokenizer": pair.tokenizer, "fast_target_head": fast_target_head}
        optional = POLICIES if settings.policies == POLICIES else optional
        measurement = _Measurement(diagnosis, pair, partial(make_assistant, own, **models), report, stack)
        measurement.measure_all(optional, fast_target_head and why_not_head_product(pair.target) is None)
        diagnosis.finished = utc_now()
    return diagnosis


def _is_slow_in_16_bits(device: torch.device) -> bool:
    """Whether a few rows take as long together as one after another, in kernels of this package's or of torch's."""
    return device.type == "cpu" and not most_queries(torch.bfloat16) and not multiplies_fast(torch.bfloat16)


def _try_dtypes(settings: DoctorSettings, diagnose: Callable[..., Diagnosis]) -> dict[str, list[float]]:
    """Tokens per second of plain generation and of the better of two policies, in the 16 bits of the target's weights
    and in fp32; nothing if they have other dtypes."""
    config, speeds = load_config(settings.target, "target"), {}
    kept = config.dtype or config.get_text_config().dtype
    short = replace(settings, policies=("hybrid",), tree=None, seconds=settings.seconds / 6)
    for dtype in (kept, torch.float32) if kept in (torch.bfloat16, torch.float16) else ():
        name = str(dtype).removeprefix("torch.")
        tried, tokens = diagnose(replace(short, dtype=name)), settings.max_new_tokens
        plain = tokens / tried.plain.seconds(tokens, tried.usable_prompts())
        speeds[name] = [plain, tried.best.tokens_per_second]
    return speeds


def diagnose_assistant(
    assistant: Any,
    make_assistant: Callable[..., Any],
    prompts: Sequence[str] | None,
    report: Report,
    settings: Mapping[str, Any],
) -> Diagnosis:
    """Measure the pair of an assistant. See `DynSpecAssistant.diagnose`."""
    if assistant.target is None:
        raise NotBoundError("bind the assistant to a target before diagnosing the pair.")
    if assistant.tokenizer is None:
        raise ConfigurationError("the tokenizer of the models is not known; make the assistant with tokenizer=…")
    if prompts is not None:
        if isinstance(prompts, str) or not all(isinstance(text, str) for text in prompts):
            raise ConfigurationError(f"prompts must be a list of texts, got {shown_value(prompts)}")
        prompts = [WorkloadPrompt(f"prompt {n}", f"prompt {n}", text) for n, text in enumerate(prompts, start=1)]
    own = {"tree": assistant.tree or "default", "policies": _with_own(assistant.policy)}
    return diagnose_pair(
        DoctorSettings(**{**own, **settings}),
        make_assistant,
        target=assistant.target,
        drafter=assistant.drafter,
        tokenizer=assistant.tokenizer,
        prompts=prompts,
        fast_target_head=assistant.fast_target_head,
        optional=() if "policies" in settings else POLICIES,
        report=report,
    )


def _with_own(own: ShortlistPolicy) -> dict[str, ShortlistPolicy]:
    """The default policies, and the assistant's own if it is none of them. Of a policy that chooses from several, each
    one is added."""
    policies = {name: as_policy(name) for name in POLICIES}
    alternatives = own.alternatives(None)
    for place, (policy, _) in enumerate(alternatives):
        is_known = any(
            type(policy) is type(one) and policy.settings() == one.settings() and not policy.tensors()
            for one in policies.values()
        )
        if not is_known:
            policies[OWN_POLICY if len(alternatives) == 1 else f"{OWN_POLICY}.policies[{place}]"] = policy
    return policies


def by_turns(prompts: Sequence[WorkloadPrompt]) -> list[WorkloadPrompt]:
    """Sort prompts so that domains take turns, as there may be time for the first few only."""
    of_domain: dict[str, list[WorkloadPrompt]] = {}
    for prompt in prompts:
        of_domain.setdefault(prompt.domain, []).append(prompt)
    return [prompt for turn in zip_longest(*of_domain.values()) for prompt in turn if prompt is not None]


class _RoundClock(BaseStreamer):
    """Notes when the tokens of each round of a `generate` call arrive. The first item is the prompt."""

    def __init__(self, now: Callable[[], float]):
        self._now, self._start = now, now()
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ends.append(self._now() - self._start)
        self.tokens.append(value.numel())

    def end(self) -> None:
        pass


class _Measurement:
    """Measures within the seconds of the settings, and leaves out what there is no time for."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        pair: Pair,
        make_assistant: Callable[..., Any],
        report: Report,
        stack: ExitStack,
    ):
        self._diagnosis, self._settings, self._target = diagnosis, diagnosis.settings, pair.target
        self._make_assistant, self._report, self._stack = make_assistant, report, stack
        self._prompts = [torch.tensor([token_ids], device=pair.target.device) for token_ids in pair.encoded]
        devices = (pair.target.device, *(one.head.device for one in pair.drafters.values()))
        self._clock = Stopwatch(enabled=False, devices=devices)
        self._assistants: dict[tuple[str, TreeConfig | None], Any] = {}
        self._began, self._binding = time.monotonic(), 0.0  # seconds that went to binding are not for measuring
        # Seconds of plain generation for a token, and the most seconds of a call if not even short texts fit.
        self._token_seconds = 0.0
        self._most_seconds: float | None = None

    def measure_all(self, optional: Collection[str], has_head_product: bool) -> None:
        """Warm up, compare the policies at one length, compare lengths and trees of the best one, and profile."""
        worked = time.thread_time()
        diagnosis, (short, middle, long) = self._diagnosis, self._settings.lengths
        plain = [diagnosis.plain]
        if has_head_product:
            diagnosis.head_product = TimedSetting("plain generate, this package's head product", None)
            plain.append(diagnosis.head_product)
        self._most_seconds = self._left(_WARM_UP_ENDS) / (2 + len(diagnosis.policies))
        self._tell("warming up, plain generate")
        call = [self._generate(diagnosis.plain, 0) for _ in range(2)][-1]
        self._token_seconds = call.ends[-1] / sum(call.tokens)
        started = [label for label in list(diagnosis.policies) if self._can_start(label, optional)]
        diagnosis.timed = [TimedSetting(label, middle) for label in started]
        wanted = self._left(_POLICIES_END) / (_WANTED_PROMPTS * (len(plain) + len(started)))
        fitting = max(_FEWEST_TOKENS, int(wanted / self._token_seconds))
        prompts = self._take_turns([*plain, *diagnosis.timed], len(self._prompts), fitting, _POLICIES_END)
        best = diagnosis.best.policy
        others = [TimedSetting(best, short), TimedSetting(best, long)]
        tree = self._settings.resolved_tree()
        if tree is not None and not self._fits(len(others) + 1, _LENGTHS_END):
            diagnosis.notes.append(f"trees were left out: {_NO_TIME}")
        elif tree is not None and self._has_trees(best, tree):
            others.append(TimedSetting(best, tree))
        while others and not self._fits(len(others), _LENGTHS_END):
            left_out = others.pop().shape
            shape = f"chains of {left_out}" if isinstance(left_out, int) else "trees"
            diagnosis.notes.append(f"{shape} were left out: {_NO_TIME}")
        diagnosis.timed += others
        if others:
            self._take_turns(others, prompts, fitting, _LENGTHS_END)
        for label in dict.fromkeys((FULL, best)):
            self._tell(f"profiling, {label}")
            diagnosis.profiles[label] = self._profile(label)
        seconds = max(1e-9, time.monotonic() - self._began)
        idle = 1 - (time.thread_time() - worked) / seconds
        if self._target.device.type == "cpu" and idle > _MUCH_WAITING:
            diagnosis.notes.append(
                f"{idle:.0%} of the time went to something else that runs on this computer, so all of this is rough. "
                "Ask again when nothing else runs."
            )
        self._tell("done")

    def _can_start(self, label: str, optional: Collection[str]) -> bool:
        """Make the assistant of a policy and warm it up. False if the policy is left out."""
        if len(self._assistants) >= 2 and self._spent() > _POLICIES_END:
            self._leave_out(label, _NO_TIME)
            return False
        try:
            self._assistants[label, None] = self._make(self._diagnosis.policies[label])
        except DynSpecError as error:
            if label == FULL or label not in optional:
                raise
            self._leave_out(label, str(error))
            return False
        self._tell(f"warming up, {label}")
        self._generate(TimedSetting(label, self._settings.lengths[1]), 0)
        return True

    def _leave_out(self, label: str, reason: str) -> None:
        self._diagnosis.notes.append(f"{label} was left out: {reason}")
        del self._diagnosis.policies[label]

    def _left(self, end: float) -> float:
        """The seconds left until a share of all is spent."""
        return max(0.0, end - self._spent()) * self._settings.seconds

    def _fits(self, ways: int, end: float) -> bool:
        """Whether a short text by each of so many ways fits into the time until `end`."""
        tokens = min(_FEWEST_TOKENS, self._settings.max_new_tokens)
        return self._left(end) >= ways * tokens * self._token_seconds

    def _make(self, policy: ShortlistPolicy, **settings: Any) -> Any:
        began = time.monotonic()
        assistant = self._make_assistant(policy, num_assistant_tokens=self._settings.num_assistant_tokens, **settings)
        self._binding += time.monotonic() - began
        self._stack.callback(assistant.unbind)
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        return assistant

    def _has_trees(self, label: str, tree: TreeConfig) -> bool:
        """Make the assistant that drafts trees with a policy, and warm it up. False if the target takes none."""
        try:
            self._assistants[label, tree] = self._make(self._diagnosis.policies[label], tree=tree)
        except UnsupportedError as error:
            self._diagnosis.notes.append(f"trees were left out: {error}")
            return False
        self._generate(TimedSetting(label, tree), 0)
        return True

    def _take_turns(self, ways: Sequence[TimedSetting], prompts: int, tokens: int, end: float) -> int:
        """Time all ways on one prompt after another, until a share of the seconds is spent. The ways take turns in
        going first, so that none always finds warm caches. Returns the number of prompts: at least one whose texts
        have more than one round, if there is one."""
        self._most_seconds = None if self._fits(len(ways), end) else self._left(end) / len(ways)
        for number in range(prompts):
            began = self._spent()
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                self._tell(f"prompt {number + 1}, {way.policy}")
                way.calls.append(self._generate(way, number, tokens))
                if way.shape is not None:
                    way.stats.add(self._assistant(way).stats)
            if ways[0] is self._diagnosis.plain and (speeds := self._diagnosis.speeds):
                # Speeds are compared with plain generation on the same prompts, whichever these are.
                best = max(one.ratio for one in speeds)
                slow = {one.policy for one in speeds if one.policy != FULL and one.ratio < _STILL_OPEN * best}
                ways = [way for way in ways if way.policy not in slow]
            if 2 * self._spent() - began > end:
                if self._diagnosis.usable_prompts(*ways) or number + 1 >= _MOST_ENDED_TEXTS:
                    return number + 1
        return prompts

    def _assistant(self, way: TimedSetting) -> Any:
        return self._assistants[way.policy, None if isinstance(way.shape, int) else way.shape]

    def _profile(self, label: str) -> dict[str, float]:
        """Seconds of a round of chains by section: the difference of two calls, which begin alike."""
        way = TimedSetting(label, self._settings.lengths[1])
        assistant = self._assistant(way)
        assistant.profile = True
        few, many = [(self._generate(way, 0, tokens), assistant.stats)[1] for tokens in _PROFILED_TOKENS]
        assistant.profile = False
        rounds = many.rounds - few.rounds
        seconds = {name: value - few.seconds.get(name, 0.0) for name, value in many.seconds.items()}
        if rounds <= 0 or min(seconds.values()) < 0:
            # The text ended early, or the shorter call was disturbed: rounds that read a prompt have to do.
            rounds, seconds = many.rounds, many.seconds
        return {name: value / rounds for name, value in seconds.items()}

    def _generate(self, way: TimedSetting, number: int, new_tokens: int = _WARM_UP_TOKENS) -> TimedCall:
        """Generate once, for no longer than the seconds that are left."""
        settings, input_ids = self._settings, self._prompts[number]
        new_tokens = min(new_tokens, settings.max_new_tokens)
        config = generation_config(self._target, new_tokens, settings.temperature, settings.top_k)
        most = self._left(1.0) if self._most_seconds is None else self._most_seconds
        config.max_time = max(_LEAST_SECONDS, _LEAST_OF_PLAIN * self._token_seconds, most)
        arguments = {"attention_mask": torch.ones_like(input_ids), "generation_config": config}
        surroundings: AbstractContextManager = nullcontext()
        if way.shape is not None:
            arguments["assistant_model"] = assistant = self._assistant(way)
            if isinstance(way.shape, int):
                assistant.generation_config.num_assistant_tokens = way.shape
        elif way is self._diagnosis.head_product:
            surroundings = head_product(self._target)
        torch.manual_seed(settings.seed + number)
        with surroundings:
            clock = _RoundClock(self._clock.now)
            self._target.generate(input_ids, streamer=clock, **arguments)
        return TimedCall(number, tuple(clock.ends[1:]), tuple(clock.tokens[1:]))

    def _spent(self) -> float:
        """The share of the seconds that is spent."""
        return (time.monotonic() - self._began - self._binding) / self._settings.seconds

    def _tell(self, activity: str) -> None:
        total = max(1, round(self._settings.seconds))
        self._report(activity, total if activity == "done" else min(total, round(self._spent() * total)), total)
