"""`check_policy`: the contract of policies, tried on anybody's policy. It takes seconds, and no test framework.

Half of the checks lead a state through made-up rounds; the other half draft with the policy, for tiny random models.
"""

import copy
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from .assistant import DynSpecAssistant
from .drafting.tree_config import TreeConfig
from .errors import DynSpecError, PolicyError
from .protocol import HeadRows, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from .shortlists import FrequencyShortlist, InContextShortlist, ShortlistPolicy, ShortlistState, UnionShortlist
from .shortlists.base import start_state
from .shortlists.validation import validated
from .stats import DraftingStatistics

# Rows of the made-up target's head past the vocabulary, whose ids it may name and no shortlist may hold.
_PADDING = 20
_PROMPT_LENGTH, _NEW_TOKENS, _ROUNDS = 12, 14, 12
# How long a thread may take to end after its state was closed, in seconds.
_PATIENCE = 5.0
_SHAPES = {"chains": False, "trees": TreeConfig(12, 2, 4)}


@dataclass(frozen=True)
class PolicyReport:
    """What `check_policy` found in order.

    Args:
        policy: the name of the policy's class.
        checks: what was checked, one sentence each.
        acceptance_length: tokens per round with the tiny random models, which says nothing about others.
        active_vocabulary: mean number of ids on a shortlist there.
        seconds: how long the checks took.
    """

    policy: str
    checks: tuple[str, ...]
    acceptance_length: float
    active_vocabulary: float
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.policy}: in order, after {self.seconds:.1f} s", *(f"  {check}" for check in self.checks)]
        return "\n".join(lines)


def check_policy(
    policy: ShortlistPolicy, *, vocabulary_size: int = 301, hidden_size: int = 32, is_stored: bool = True
) -> PolicyReport:
    """Check that a policy keeps the contract of policies.

    Args:
        policy: one with settings that are small enough for the vocabulary.
        vocabulary_size: of the tiny models, at least 100; give another one to a policy that was made for one.
        hidden_size: of both models' hidden states, a multiple of 8; likewise.
        is_stored: whether `settings()` and `tensors()` have to rebuild the policy.

    Returns:
        What was checked.

    Raises:
        PolicyError: the contract is broken. The message says where, what is wrong and how to mend it. What the policy
            itself raises goes through as it is.
    """
    started, threads = time.perf_counter(), set(threading.enumerate())
    case = _Case(policy, vocabulary_size, hidden_size)
    checks = [one for one in _CHECKS if is_stored or one is not _check_settings]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the tokenizers of target and drafter")
        for check in checks:
            check(case)
    _check_threads(case, threads)
    return PolicyReport(
        case.label,
        (*(check.__doc__ for check in checks), _check_threads.__doc__),
        case.stats.acceptance_length,
        case.stats.active_vocabulary,
        time.perf_counter() - started,
    )


class _Case:
    """A policy, and the vocabulary and models that it is tried with."""

    def __init__(self, policy: ShortlistPolicy, vocabulary_size: int, hidden_size: int):
        self.label = type(policy).__qualname__
        if not isinstance(policy, ShortlistPolicy):
            self.fail(
                "it is no ShortlistPolicy", "Pass an object whose class derives from hf_dynspec.ShortlistPolicy."
            )
        self.policy, self.vocabulary_size, self.hidden_size = policy, vocabulary_size, hidden_size
        # Everything is checked here as it is with `validate=True`.
        self.checked = validated(policy)
        self.needs = self.checked.needs
        self.target = _tiny_model(vocabulary_size, hidden_size)
        self.drafter = _perturbed(self.target)
        # Of the calls with the policy alone.
        self.stats = DraftingStatistics()
        self._plain: dict[tuple[int, ...], torch.Tensor] = {}

    def fail(self, problem: str, fix: str) -> NoReturn:
        raise PolicyError(self.label, None, problem, fix)

    def vocabulary(self, eos: tuple[int, ...] = (2, 77), draftable: torch.Tensor | None = None) -> VocabularyInfo:
        """A made-up vocabulary, with made-up rows of heads if the policy asks for them."""
        size, generator = self.vocabulary_size, torch.Generator().manual_seed(1)
        rows = {}
        if self.needs.drafter_rows:
            count = size if draftable is None else draftable.shape[0]
            weight = torch.randn(count, self.hidden_size, generator=generator)
            rows["drafter_rows"] = HeadRows(weight, token_ids=draftable)
        if self.needs.target_rows:
            rows["target_rows"] = HeadRows(torch.randn(size + _PADDING, self.hidden_size, generator=generator))
        return VocabularyInfo(size, eos, torch.device("cpu"), draftable, self.hidden_size, **rows)

    def state(self, policy: ShortlistPolicy | None = None) -> ShortlistState:
        return (self.checked if policy is None else policy).start(self.vocabulary())

    def prompt(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.vocabulary_size, (1, _PROMPT_LENGTH), generator=generator)

    def plain(self, text: torch.Tensor) -> torch.Tensor:
        """What the target says greedily, without an assistant."""
        key = tuple(text[0].tolist())
        if key not in self._plain:
            self._plain[key] = self.target.generate(text, do_sample=False, max_new_tokens=_NEW_TOKENS)
        return self._plain[key]


# Made-up rounds ------------------------------------------------------------------------------------------------------


def _events(case: _Case, needs: Needs, seed: int) -> Iterator[Prompt | Verdict]:
    """What a state is told in one call: random tokens, with all that the needs ask for."""
    generator = torch.Generator().manual_seed(seed)
    size, padded = case.vocabulary_size, case.vocabulary_size + _PADDING

    def ids(*shape: int, limit: int = padded) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    def shown(rows: int, top_k: int, states: bool) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        if top_k:
            order = torch.rand(rows, padded, generator=generator).topk(min(top_k, padded))
            values["top_ids"] = order.indices
            if needs.top_logits:
                values["top_logits"] = order.values
        if states:
            values["hidden_states"] = torch.randn(rows, case.hidden_size, generator=generator)
        return values

    yield Prompt(ids(30, limit=size), 0)
    if needs.of_prompt:
        positions = min(30, needs.prompt_positions or 30)
        yield Prompt(ids(0), 30, **shown(positions, needs.prompt_top_k, needs.prompt_hidden_states))
    start = 30
    for index in range(_ROUNDS):
        # Now and then nothing was drafted.
        drafted = ids(index % 5, limit=size)
        accepted = int(ids(1, limit=drafted.shape[0] + 1))
        verified = torch.cat([drafted[:accepted], ids(1)])
        values = shown(accepted + 1, needs.verify_top_k, needs.hidden_states)
        if needs.out_of_vocabulary:
            values["out_of_vocabulary"] = torch.tensor([False] * accepted + [index % 3 == 0])
        yield Verdict(drafted, verified, start, **values)
        start += accepted + 1


def _shortlists(case: _Case, state: ShortlistState, needs: Needs, seed: int) -> Iterator[tuple[str, Shortlist]]:
    """Where it is, and the shortlist, for every draft step of a call. Chains and trees take turns."""
    generator = torch.Generator().manual_seed(seed)
    for index, event in enumerate(_events(case, needs, seed)):
        (state.observe_prompt if isinstance(event, Prompt) else state.observe)(event)
        state.begin_round()
        for depth in range(3):
            nodes = 1 if depth == 0 or index % 2 else 3
            token_ids = torch.randint(0, case.vocabulary_size, (nodes,), generator=generator)
            embeddings, before, features = torch.randn(3, nodes, case.hidden_size, generator=generator)
            if needs.draft_inputs:
                state.observe_draft_inputs(embeddings, before)
            shortlist = state.select(depth, token_ids, features)
            yield f"after {index + 1} events, at draft step {depth}", shortlist
            again = state.select(depth, token_ids, features)
            if again.version != shortlist.version or not torch.equal(again.slots, shortlist.slots):
                case.fail(
                    f"asked twice for one draft step it selects other slots ({depth=})",
                    "Let `select` depend on what the state was told, and on nothing else.",
                )


def _followed(case: _Case, state: ShortlistState, seed: int) -> list[tuple[str, list[int]]]:
    """The ids of every shortlist of a call."""
    return [(place, shortlist.ids().tolist()) for place, shortlist in _shortlists(case, state, case.needs, seed)]


def _require_equal(case: _Case, actual: list, expected: list, problem: str, fix: str) -> None:
    for (place, own), (_, other) in zip(actual, expected, strict=True):
        if set(own) != set(other):
            case.fail(f"{problem}: {place} it selects {len(own)} ids, others than the {len(other)} expected", fix)


def _check_needs(case: _Case) -> None:
    """What it asks to be shown it looks at."""
    needs = case.needs
    counts = (needs.verify_top_k, needs.prompt_top_k, needs.prompt_positions or 0)
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in counts):
        case.fail(f"{needs} has counts that are none", "Ask for 0 tokens or more.")
    if needs.top_logits and not (needs.verify_top_k or needs.prompt_top_k):
        case.fail("it asks for logits of top tokens, and for no top tokens", "Set verify_top_k or prompt_top_k too.")
    state = case.checked.start(case.vocabulary()).state
    asked = {
        "observe": needs.verify_top_k or needs.hidden_states or needs.out_of_vocabulary,
        "observe_prompt": needs.of_prompt,
        "observe_draft_inputs": needs.draft_inputs,
    }
    for method, is_asked in asked.items():
        if is_asked and getattr(type(state), method) is getattr(ShortlistState, method):
            state.close()
            case.fail(
                f"its needs ask for what `{method}` is given, and its state does not override that",
                "Override it, or leave out of `needs` what is not used: it takes time in every round.",
            )
    state.close()


def _check_shortlists(case: _Case) -> None:
    """Its shortlists are well-formed in every round, with any end-of-sequence ids, and where a head leaves ids out."""
    size = case.vocabulary_size
    leaves_out = torch.arange(0, size, 3)
    vocabularies = [case.vocabulary(eos) for eos in ((), (2,), (2, 77), (size - 1,))]
    vocabularies.append(case.vocabulary((0,), leaves_out))
    everything = torch.arange(size)
    for vocabulary in vocabularies:
        state = case.checked.start(vocabulary)
        for seed in (1, 2):
            for place, shortlist in _shortlists(case, state, case.needs, seed):
                ids = shortlist.ids()
                is_on = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
                columns = torch.arange(shortlist.width)
                if (
                    not torch.equal(shortlist.contains(everything), is_on)
                    or int(shortlist.count) != ids.shape[0]
                    or not torch.equal(shortlist.ids_at(columns), shortlist.scored_slots)
                ):
                    case.fail(
                        f"{place}, `contains`, `count` or `ids_at` disagrees with the slots of the shortlist",
                        "Return a Shortlist as it is, or override all of them alike.",
                    )
            state.restart()
        state.close()


def _check_states_are_apart(case: _Case) -> None:
    """Its states share nothing that changes, and the policy itself does not change."""
    settings = repr(case.policy.settings())
    first, second, alone = case.state(), case.state(), case.state()
    expected = _followed(case, alone, 8)
    _followed(case, first, 7)
    _require_equal(
        case,
        _followed(case, second, 8),
        expected,
        "what one state was told changes what another selects",
        "Keep in the state, and not in the policy or its class, what changes.",
    )
    if repr(case.policy.settings()) != settings:
        case.fail("its settings changed while it drafted", "Keep in the state what changes.")
    for state in (first, second, alone):
        state.close()


def _check_restart(case: _Case) -> None:
    """After restart() it knows no more than a new state."""
    used, fresh = case.state(), case.state()
    _followed(case, used, 5)
    used.restart()
    _require_equal(
        case,
        _followed(case, used, 6),
        _followed(case, fresh, 6),
        "after restart() it remembers an earlier text",
        "Forget in `restart` whatever came from the context.",
    )
    used.close()
    fresh.close()


def _check_memory(case: _Case) -> None:
    """What it keeps from call to call is in its memory, and nowhere else, whatever the end-of-sequence ids."""
    memory, other = case.checked.new_memory(), case.checked.new_memory()
    if memory is None:
        return
    used, apart, without = (start_state(case.checked, case.vocabulary(), known) for known in (memory, other, None))
    for state in (used, apart, without):
        state.restart()
    _followed(case, used, 5)
    used.end_call()
    _require_equal(
        case,
        _followed(case, apart, 6),
        _followed(case, without, 6),
        "what one memory was told changes what a session with another memory selects",
        "Keep it in the object that `new_memory` returns, a new one each time, and not in the policy or its class.",
    )
    late = start_state(case.checked, case.vocabulary(), memory)
    used.restart()
    late.restart()
    _require_equal(
        case,
        _followed(case, used, 7),
        _followed(case, late, 7),
        "after restart() it remembers an earlier text beside its memory",
        "Forget in `restart` whatever came from the context, and put into the memory in `end_call` what is to last.",
    )
    size = case.vocabulary_size
    others = [case.vocabulary(()), case.vocabulary((size - 1,)), case.vocabulary((0,), torch.arange(0, size, 3))]
    elsewhere = [start_state(case.checked, vocabulary, memory) for vocabulary in others]
    for state in elsewhere:
        state.restart()
        _followed(case, state, 8)
        state.end_call()
    for state in (used, apart, without, late, *elsewhere):
        state.close()


def _check_settings(case: _Case) -> None:
    """settings() and tensors() rebuild it."""
    policy = case.policy
    if not isinstance(getattr(policy, "name", None), str):
        case.fail("it has no `name`", "Set the class attribute `name`, by which it is found.")
    try:
        settings = json.loads(json.dumps(policy.settings()))
    except (TypeError, ValueError) as error:
        case.fail(f"settings() is not JSON ({error})", "Put tensors into tensors(), and plain values here.")
    tensors = policy.tensors()
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            case.fail(f"the tensor {name!r} is not contiguous, or not on the CPU", "Return it .cpu().contiguous().")
    try:
        rebuilt = type(policy).from_settings(settings, {name: tensor.clone() for name, tensor in tensors.items()})
    except (DynSpecError, TypeError) as error:
        case.fail(
            f"it cannot be rebuilt from settings() and tensors(): {error}",
            "Name there the arguments of __init__, and declare the settings in `setting_rules`; or override "
            "from_settings. check_policy(…, is_stored=False) leaves this out.",
        )
    again = rebuilt.tensors()
    if (
        rebuilt.settings() != policy.settings()
        or rebuilt.needs != policy.needs
        or again.keys() != tensors.keys()
        or not all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    ):
        case.fail("rebuilt from settings() and tensors(), it has others", "Return all that __init__ was given.")
    states = case.state(), case.state(rebuilt)
    _require_equal(
        case,
        _followed(case, states[1], 4),
        _followed(case, states[0], 4),
        "rebuilt from settings() and tensors(), it selects other ids",
        "Return all that __init__ was given.",
    )
    for state in states:
        state.close()


# Drafting ------------------------------------------------------------------------------------------------------------


class _Counted(ShortlistPolicy):
    """Passes on, and counts what becomes of the states."""

    name = "counted"

    def __init__(self, policy: ShortlistPolicy):
        self._policy = policy
        self.started = self.closed = self.rows_followed = 0

    @property
    def needs(self) -> Needs:
        return self._policy.needs

    def new_memory(self) -> Any:
        return self._policy.new_memory()

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        state = start_state(self._policy, vocabulary, memory)
        self.started += 1
        state.close = self._counting("closed", state.close)
        state.follow_weights = self._counting("rows_followed", state.follow_weights)
        return state

    def _counting(self, count: str, method: Callable) -> Callable:
        def counted(*args: object) -> None:
            setattr(self, count, getattr(self, count) + 1)
            method(*args)

        return counted


def _check_drafting(case: _Case) -> None:
    """It drafts chains and trees for calls, texts and turns of a conversation, and the output stays the same."""
    policy = _Counted(case.checked)
    for shape, tree in _SHAPES.items():
        _draft(case, policy, tree, f"drafting {shape}")
    if policy.closed != policy.started:
        case.fail(f"{policy.started} states were started and {policy.closed} closed", "Let `close` return.")


def _check_unions(case: _Case) -> None:
    """It does so as the first and as the last part of a union, told more than it asked for."""
    window = InContextShortlist(20, prompt_top_k=6, verify_top_k=6)
    if not case.policy.can_be_part:
        return
    unions = ((case.policy, window), (window, FrequencyShortlist(size=20), case.policy))
    for parts, (shape, tree) in zip(unions, _SHAPES.items(), strict=True):
        _draft(case, UnionShortlist(*parts), tree, f"drafting {shape} in a union", validate=True)


def _draft(case: _Case, policy: ShortlistPolicy, tree: bool | TreeConfig, doing: str, validate: bool = False) -> None:
    """Draft with a policy in every way, and compare what comes out with what does without."""
    target = case.target
    assistant = DynSpecAssistant(case.drafter, policy, target=target, tree=tree, validate=validate)
    conversation = assistant.conversation()
    turn = case.prompt(1)
    for seed in (1, 2):
        _require_same_output(case, case.prompt(seed), assistant, doing)
        turn = _require_same_output(case, turn, conversation, f"{doing} in a conversation")
    # The most probable token alone: sampling has no choice then.
    _require_same_output(case, case.prompt(1), assistant, f"{doing} and sampling", do_sample=True, top_k=1)
    torch.manual_seed(0)
    target.generate(case.prompt(1), assistant_model=assistant, do_sample=True, max_new_tokens=_NEW_TOKENS)
    assistant.unbind()
    if not validate:
        case.stats.add(assistant.stats_total)


def _require_same_output(
    case: _Case, text: torch.Tensor, assistant: object, doing: str, **arguments: object
) -> torch.Tensor:
    expected = case.plain(text)
    named = {"do_sample": False, "max_new_tokens": _NEW_TOKENS, "assistant_model": assistant}
    actual = case.target.generate(text, **named | arguments)
    if not torch.equal(actual, expected):
        case.fail(
            f"{doing}, the target's output is not what it is without",
            "Return shortlists whose tensors nobody changes afterwards: make new ones, and count the version up.",
        )
    return actual


def _check_weights(case: _Case) -> None:
    """Where it asks for the rows of heads, it goes on when their weights change."""
    if not (case.needs.drafter_rows or case.needs.target_rows):
        return
    target, drafter = copy.deepcopy(case.target), copy.deepcopy(case.drafter)
    policy = _Counted(case.checked)
    assistant = DynSpecAssistant(drafter, policy, target=target)
    for turn in range(2):
        expected = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8)
        actual = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8, assistant_model=assistant)
        if not torch.equal(actual, expected):
            case.fail("after weights changed, the output is not what it is without", "Take up the new rows.")
        if bool(policy.rows_followed) != bool(turn):
            case.fail("its states were not told new rows", "Do not replace methods of the state.")
        with torch.no_grad():
            for model in (target, drafter):
                model.get_output_embeddings().weight.mul_(-0.5)
    assistant.unbind()


def _check_threads(case: _Case, before: set[threading.Thread]) -> None:
    """close() was called once for every state, and no thread is left."""
    deadline = time.monotonic() + _PATIENCE
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            case.fail(
                f"the thread {thread.name!r} runs {_PATIENCE:.0f} s after its state was closed",
                "End it in `close`, and wait there for it if that is short.",
            )


_CHECKS = (
    _check_needs,
    _check_shortlists,
    _check_states_are_apart,
    _check_restart,
    _check_memory,
    _check_settings,
    _check_drafting,
    _check_unions,
    _check_weights,
)


def _tiny_model(vocabulary_size: int, hidden_size: int) -> PreTrainedModel:
    """A random model, whose weights are large enough for clear preferences among tokens."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                spread = 1.0 if parameter is model.get_input_embeddings().weight else 0.2
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def _perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """A model that agrees with another one often."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(100)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())
    return other
