"""Time a few calls of each policy, with chains of two lengths and with trees, taking turns on every prompt."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from ...drafters import CausalLMDrafter, Drafter
from ...errors import ConfigurationError, DynSpecError, NotBoundError, UnsupportedError, shown_value
from ...kernels import prepare_kernels
from ...loading import shared_vocabulary_size
from ...shortlists import ShortlistPolicy, as_policy
from ...stats import DraftingStatistics, Stopwatch
from ..head_product import head_product, why_not_head_product
from ..pair import Pair, generation_config, open_pair, utc_now
from ..prompts import WorkloadPrompt, read_workload
from .diagnosis import OWN_POLICY, Diagnosis
from .expectations import Profile
from .prompts import PROMPTS
from .settings import FULL, POLICIES, DoctorSettings
from .timing import RoundClock, TimedCall, time_forwards

# Rows of the verifications that are timed.
VERIFIED_ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 61)
SHORT_CHAIN = 2
# Of the tokens that speeds are expected for, the share that is generated: all with long chains, as acceptance changes
# within a text; fewer where little but the time of a round is wanted.
_SHARES = {"plain": 0.5, "short": 0.5, "long": 1.0, "tree": 0.75}
_FEWEST_TOKENS = 16
_FEWEST_PROMPTS = 2
_WARM_UP_TOKENS = 12
# Of two profiled calls, whose difference is what rounds take that read no prompt.
_PROFILED_TOKENS = (12, 48)
# On a CPU, the share of the time in which this thread did not run that tells of other work on the computer.
_MUCH_WAITING = 0.15
# Of the whole time.
_SHARE_OF_FORWARDS, _SHARE_OF_PROFILES = 0.05, 0.1


@dataclass(frozen=True)
class _Way:
    """One way to generate that is timed.

    Args:
        kind: one of `_SHARES`.
        label: the policy's, or what plain generation is shown as.
        calls: where its calls are kept.
        assistant: None for plain generation.
        steps: of a chain; None where there are none.
        surroundings: makes what its calls are made in.
    """

    kind: str
    label: str
    calls: list[TimedCall]
    assistant: Any = None
    steps: int | None = None
    surroundings: Callable[[], AbstractContextManager] = nullcontext


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
    report: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> Diagnosis:
    """Measure a pair, and say what to expect of it. Settings, prompts and EAGLE heads are checked before any model is
    loaded, and models are left as they were.

    Args:
        settings: what to measure.
        make_assistant: `DynSpecAssistant`.
        target: the loaded model, in place of the one that the settings name; likewise the next three.
        drafter: the loaded small model or EAGLE head.
        tokenizer: the tokenizer of both.
        prompts: prompts that are not read from files.
        fast_target_head: as for `DynSpecAssistant`.
        optional: labels of policies that are left out, with a note, where the pair cannot have them; as are those
            that nobody asked for.
        report: called between generations with what is being done, how many seconds it took so far and how many it is
            expected to take in all.

    Raises:
        ConfigurationError: a model or head cannot be loaded, or there is no drafter.
        WorkloadError: the prompts cannot be read or are too long.
        UnsupportedError: the models cannot be used together.
    """
    if prompts is None:
        prompts = read_workload(settings.prompts, settings.limit) if settings.prompts else PROMPTS
    policies = settings.resolved_policies()
    heads = {"eagle": [settings.eagle] if settings.eagle else [], "allow_pickle": settings.allow_pickle}
    with open_pair(settings, target, drafter, tokenizer, by_turns(prompts), **heads) as pair, ExitStack() as stack:
        (own,) = pair.drafters.values()
        diagnosis = Diagnosis(
            settings=settings,
            policies=policies,
            models=pair.described_models(),
            vocabulary=_describe_vocabulary(pair, own),
            prompts=pair.described_prompts(),
            threads=torch.get_num_threads(),
            started=utc_now(),
            short_chain=SHORT_CHAIN,
            drafts_at_once=isinstance(own, CausalLMDrafter),
            verified_rows=VERIFIED_ROWS,
        )
        report("setting up", 0, max(1, round(settings.seconds)))
        began = time.monotonic()
        if "cpu" in {pair.target.device.type, own.head.device.type}:
            prepare_kernels()
        # What the target's forwards run in as verifications do.
        surroundings = nullcontext
        if fast_target_head and why_not_head_product(pair.target) is None:
            surroundings = partial(head_product, pair.target)
        models = {"target": pair.target, "tokenizer": pair.tokenizer, "fast_target_head": fast_target_head}
        make_assistant = partial(make_assistant, own, **models)
        optional = POLICIES if settings.policies == POLICIES else optional
        ways = _ways(diagnosis, make_assistant, surroundings, optional, stack)
        _Measurement(diagnosis, pair, ways, surroundings, began, report).everything()
        diagnosis.finished = utc_now()
    return diagnosis


def diagnose_assistant(
    assistant: Any,
    make_assistant: Callable[..., Any],
    prompts: Sequence[str] | None,
    report: Callable[[str, int, int], None],
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
    """The policies that are diagnosed unless others are asked for, and an assistant's own where it is none of them;
    where it chooses from several, each of these."""
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
    """The prompts with domains taking turns, as there may be time for the first of them only."""
    of_domain: dict[str, list[WorkloadPrompt]] = {}
    for prompt in prompts:
        of_domain.setdefault(prompt.domain, []).append(prompt)
    return [prompt for turn in zip_longest(*of_domain.values()) for prompt in turn if prompt is not None]


def _describe_vocabulary(pair: Pair, drafter: Drafter) -> dict[str, Any]:
    """How many tokens there are, and how many rows of both heads."""
    size = shared_vocabulary_size(pair.target, drafter, pair.tokenizer)
    rows = pair.target.get_output_embeddings().weight.shape[0], drafter.head.weight.shape[0]
    return {"tokens": size, "target_rows": rows[0], "drafter_rows": rows[1]}


def _ways(
    diagnosis: Diagnosis,
    make_assistant: Callable[..., Any],
    surroundings: Callable[[], AbstractContextManager],
    optional: Collection[str],
    stack: ExitStack,
) -> list[_Way]:
    """All that is timed. The assistants leave the target when the stack is closed."""
    tree, longest = diagnosis.settings.resolved_tree(), diagnosis.settings.num_assistant_tokens
    ways = [_Way("plain", "plain generate", diagnosis.plain)]
    if surroundings is not nullcontext:
        ways.append(_Way("plain", "head product", diagnosis.head_product, surroundings=surroundings))

    def make(policy: ShortlistPolicy, **settings: Any) -> Any:
        assistant = make_assistant(policy, num_assistant_tokens=longest, **settings)
        stack.callback(assistant.unbind)
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        return assistant

    for label, policy in list(diagnosis.policies.items()):
        try:
            chains = make(policy)
        except DynSpecError as error:
            if label == FULL or label not in optional:
                raise
            diagnosis.notes.append(f"{label} was left out: {error}")
            del diagnosis.policies[label]
            continue
        ways.append(_Way("long", label, diagnosis.long_chains.setdefault(label, []), chains, longest))
        ways.append(_Way("short", label, diagnosis.short_chains.setdefault(label, []), chains, SHORT_CHAIN))
        if tree is not None:
            try:
                assistant = make(policy, tree=tree)
            except UnsupportedError as error:
                # Whatever the policy is.
                diagnosis.notes.append(f"trees were left out: {error}")
                tree = None
            else:
                ways.append(_Way("tree", label, diagnosis.trees.setdefault(label, []), assistant))
    return ways


class _Measurement:
    """What is timed, within the seconds that there are.

    Args:
        diagnosis: takes what is measured.
        pair: the models and prompts.
        ways: what to time.
        surroundings: makes what the target's forwards run in as verifications do.
        began: when the seconds began, by `time.monotonic`.
        report: as for `diagnose_pair`.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        pair: Pair,
        ways: list[_Way],
        surroundings: Callable[[], AbstractContextManager],
        began: float,
        report: Callable[[str, int, int], None],
    ):
        self._diagnosis, self._settings, self._target = diagnosis, diagnosis.settings, pair.target
        self._ways, self._surroundings = ways, surroundings
        self._prompts = [torch.tensor([token_ids], device=pair.target.device) for token_ids in pair.encoded]
        self._clock = Stopwatch(
            enabled=False, devices=(pair.target.device, *(one.head.device for one in pair.drafters.values()))
        )
        self._report = report
        self._began = began
        self._share = 1.0

    def everything(self) -> None:
        """Forwards, then calls after a warm-up, then where the time goes."""
        began, worked = time.monotonic(), time.thread_time()
        self._measure()
        seconds, work = time.monotonic() - began, time.thread_time() - worked
        if self._target.device.type == "cpu" and work < (1 - _MUCH_WAITING) * seconds:
            self._diagnosis.notes.append(
                f"{1 - work / seconds:.0%} of the time went to something else that runs on this computer, so all of "
                "this is rough. Ask again when nothing else runs."
            )
        self._tell("done")

    def _measure(self) -> None:
        self._tell("forwards of the target")
        self._diagnosis.verification = time_forwards(
            self._target,
            self._prompts[0][0].tolist(),
            VERIFIED_ROWS,
            _SHARE_OF_FORWARDS * self._settings.seconds,
            self._surroundings,
        )
        for way in self._ways:
            self._tell(f"warming up, {way.label}")
            self._generate(way, 0, _WARM_UP_TOKENS)
        one_turn = self._fit_to_time()
        for number in range(len(self._prompts)):
            if number >= _FEWEST_PROMPTS and self._left() * (1 - _SHARE_OF_PROFILES) < one_turn:
                break
            began = time.monotonic()
            self._take_turns(number)
            one_turn = max(one_turn, time.monotonic() - began) if number else time.monotonic() - began
        for way in self._ways:
            if way.kind == "long":
                self._tell(f"profiling, {way.label}")
                self._diagnosis.profiles[way.label] = self._profile(way)

    def _fit_to_time(self) -> float:
        """Shorten the texts where not even two prompts fit into the time. Returns the seconds that one takes."""
        token_seconds = 0.0
        for way in self._ways:
            self._tell(f"warming up, {way.label}")
            call = self._generate(way, 0, _WARM_UP_TOKENS)
            token_seconds += _SHARES[way.kind] * call.ends[-1] / call.new_tokens
        one_turn = token_seconds * self._settings.max_new_tokens
        self._share = min(1.0, max(0.0, self._left() * (1 - _SHARE_OF_PROFILES) / 2 / one_turn))
        return one_turn * self._share

    def _take_turns(self, number: int) -> None:
        """Time all ways on one prompt. They take turns in going first, so that none always finds the caches that
        another one left."""
        turn = number % len(self._ways)
        for way in self._ways[turn:] + self._ways[:turn]:
            self._tell(f"prompt {number + 1}, {way.label}")
            tokens = round(self._settings.max_new_tokens * _SHARES[way.kind] * self._share)
            tokens = min(self._settings.max_new_tokens, max(_FEWEST_TOKENS, tokens))
            way.calls.append(self._generate(way, number, tokens))
            if way.kind == "long":
                self._diagnosis.drafting.setdefault(way.label, DraftingStatistics()).add(way.assistant.stats)

    def _profile(self, way: _Way) -> Profile:
        """Where the time of a round goes: the difference of two calls that begin alike."""
        way.assistant.profile = True
        counted = []
        try:
            for tokens in _PROFILED_TOKENS:
                self._generate(way, 0, min(tokens, self._settings.max_new_tokens))
                counted.append(way.assistant.stats)
        finally:
            way.assistant.profile = False
        few, many = counted
        # The text ended, or something of the first call was held up for longer than the second has to take.
        was_held_up = any(many.seconds.get(name, 0.0) < seconds for name, seconds in few.seconds.items())
        if many.rounds <= few.rounds or was_held_up:
            few = DraftingStatistics()
        rounds = many.rounds - few.rounds
        seconds = {name: value - few.seconds.get(name, 0.0) for name, value in many.seconds.items()}
        return Profile({name: max(0.0, value) / rounds for name, value in seconds.items()}, way.steps)

    def _generate(self, way: _Way, number: int, new_tokens: int) -> TimedCall:
        """Generate once."""
        settings, input_ids = self._settings, self._prompts[number]
        config = generation_config(self._target, new_tokens, settings.temperature, settings.top_k)
        arguments = {"attention_mask": torch.ones_like(input_ids), "generation_config": config}
        if way.assistant is not None:
            arguments["assistant_model"] = way.assistant
            if way.steps is not None:
                way.assistant.generation_config.num_assistant_tokens = way.steps
        torch.manual_seed(settings.seed + number)
        with way.surroundings():
            clock = RoundClock(self._clock.now)
            self._target.generate(input_ids, streamer=clock, **arguments)
            return clock.call(number, new_tokens)

    def _left(self) -> float:
        return self._settings.seconds - (time.monotonic() - self._began)

    def _tell(self, activity: str) -> None:
        total = max(1, round(self._settings.seconds))
        done = total if activity == "done" else min(total, round(time.monotonic() - self._began))
        self._report(activity, done, total)
