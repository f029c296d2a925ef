"""The checks of `check_policy`. Their docstrings are the lines of its report.

Half of them lead states through random rounds, and half draft with the policy for tiny models.
"""

import copy
import json
from typing import Any

import torch

from ..assistant import DynSpecAssistant
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..errors import DynSpecError
from ..protocol import VocabularyInfo
from ..shortlists import FrequencyShortlist, InContextShortlist, ShortlistPolicy, ShortlistState, UnionShortlist
from ..shortlists.forwarding import ForwardingPolicy, ForwardingState
from ..tree_config import TreeConfig
from .case import NEW_TOKENS, PolicyCase

_SHAPES = {"chains": False, "trees": TreeConfig(12, 2, 4)}
# Models this small gain nothing by drafts, and would be left to generate without.
_IN_ALL_ROUNDS = {"num_assistant_tokens": DEFAULT_NUM_ASSISTANT_TOKENS}


def check_needs(case: PolicyCase) -> None:
    """It uses everything that it needs."""
    needs = case.needs
    counts = (needs.verify_top_k, needs.prompt_top_k, needs.prompt_positions or 0)
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in counts):
        case.fail(f"{needs} has counts that are none", "Ask for 0 tokens or more.")
    if needs.top_logits and not (needs.verify_top_k or needs.prompt_top_k):
        case.fail("it asks for logits of top tokens, and for no top tokens", "Set verify_top_k or prompt_top_k too.")
    asked = {
        "observe": needs.verify_top_k or needs.hidden_states or needs.out_of_vocabulary,
        "observe_prompt": needs.of_prompt,
        "observe_draft_inputs": needs.draft_inputs,
    }
    state = type(case.state().states[0])
    for method, is_asked in asked.items():
        if is_asked and getattr(state, method) is getattr(ShortlistState, method):
            case.fail(
                f"its needs ask for what `{method}` is given, and its state does not override that",
                "Override it, or remove from `needs` what is not used: it takes time in every round.",
            )


def check_shortlists(case: PolicyCase) -> None:
    """Its shortlists are well-formed in every round, for any end-of-sequence ids and for heads that lack ids."""
    size = case.vocabulary_size
    vocabularies = [case.vocabulary(eos) for eos in ((), (2,), (2, 77), (size - 1,))]
    for vocabulary in (*vocabularies, case.vocabulary((0,), torch.arange(0, size, 3))):
        state = case.state(vocabulary=vocabulary)
        for seed in (1, 2):
            for place, shortlist in case.shortlists(state, seed):
                ids, columns = shortlist.ids(), torch.arange(shortlist.width)
                is_on = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
                if (
                    not torch.equal(shortlist.contains(torch.arange(size)), is_on)
                    or int(shortlist.count) != ids.shape[0]
                    or not torch.equal(shortlist.ids_at(columns), shortlist.scored_slots)
                ):
                    case.fail(
                        f"{place}, `contains`, `count` or `ids_at` disagrees with the slots of the shortlist",
                        "Return a Shortlist as it is, or override all of them alike.",
                    )
            state.restart()


def check_states_are_apart(case: PolicyCase) -> None:
    """Its states share nothing that changes, and the policy itself does not change."""
    settings = repr(case.policy.settings())
    first, second, alone = case.state(), case.state(), case.state()
    expected = case.selected(alone, 8)
    case.selected(first, 7)
    case.require_equal(
        case.selected(second, 8),
        expected,
        "the observations of one state change what another selects",
        "Keep whatever changes in the state, not in the policy or its class.",
    )
    if repr(case.policy.settings()) != settings:
        case.fail("its settings changed while it drafted", "Keep whatever changes in the state.")


def check_restart(case: PolicyCase) -> None:
    """After restart() it selects as a new state does."""
    used = case.state()
    case.selected(used, 5)
    used.restart()
    case.require_equal(
        case.selected(used, 6),
        case.selected(case.state(), 6),
        "after restart() it remembers an earlier text",
        "Forget in `restart` whatever came from the context.",
    )


def check_memory(case: PolicyCase) -> None:
    """It keeps in its memory, and nowhere else, whatever lasts from call to call, for any end-of-sequence ids."""
    memory, other = case.checked.new_memory(), case.checked.new_memory()
    if memory is None:
        return
    used, apart, without = (case.state(memory=one) for one in (memory, other, None))
    for state in (used, apart, without):
        state.restart()
    case.selected(used, 5)
    used.end_call()
    case.require_equal(
        case.selected(apart, 6),
        case.selected(without, 6),
        "one memory changes what a session with another memory selects",
        "Keep it in the object that `new_memory` returns, a new one each time, not in the policy or its class.",
    )
    late = case.state(memory=memory)
    used.restart()
    late.restart()
    case.require_equal(
        case.selected(used, 7),
        case.selected(late, 7),
        "after restart() it remembers an earlier text beside its memory",
        "Forget in `restart` whatever came from the context, and put into the memory in `end_call` whatever lasts.",
    )
    size = case.vocabulary_size
    for eos, draftable in (((), None), ((size - 1,), None), ((0,), torch.arange(0, size, 3))):
        elsewhere = case.state(vocabulary=case.vocabulary(eos, draftable), memory=memory)
        elsewhere.restart()
        case.selected(elsewhere, 8)
        elsewhere.end_call()


def check_fixed_memory(case: PolicyCase) -> None:
    """If its states say that they can be in rounds over fixed memory, they select there as elsewhere."""
    state, other = case.state(case.policy), case.state(case.policy)
    if state.carried is None:
        return
    missing = [name for name in state.carried if not hasattr(state, name)]
    if missing:
        case.fail(f"`carried` names {', '.join(missing)}, which its state does not have", "Name what it holds.")
    if any(part.observes_on_host for part in state.parts):
        # It is shown verdicts as elsewhere, and takes up results when they are there.
        return
    case.require_equal(
        case.selected(state, 9, in_fixed_memory=True),
        case.selected(other, 9),
        "in rounds over fixed memory",
        "Treat ids at or past the vocabulary's size as no tokens, and take up in `settle` what was observed; or set "
        "`carried = None`.",
    )


def check_settings(case: PolicyCase) -> None:
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
        case.fail("rebuilt from settings() and tensors(), it has others", "Return all arguments of __init__.")
    case.require_equal(
        case.selected(case.state(rebuilt), 4),
        case.selected(case.state(), 4),
        "rebuilt from settings() and tensors(), it selects other ids",
        "Return all arguments of __init__.",
    )


def check_drafting(case: PolicyCase) -> None:
    """It drafts chains and trees for calls, texts and turns of a conversation, and the output stays the same."""
    policy = _Counted(case.checked)
    for shape, tree in _SHAPES.items():
        _draft(case, policy, tree, f"drafting {shape}")
    if policy.closed != policy.started:
        case.fail(f"{policy.started} states were started and {policy.closed} closed", "Let `close` return.")


def check_unions(case: PolicyCase) -> None:
    """It does so as the first and as the last part of a union, and ignores what the other parts need."""
    window = InContextShortlist(20, prompt_top_k=6, verify_top_k=6)
    if not case.policy.can_be_part:
        return
    unions = ((case.policy, window), (window, FrequencyShortlist(size=20), case.policy))
    for parts, (shape, tree) in zip(unions, _SHAPES.items(), strict=True):
        _draft(case, UnionShortlist(*parts), tree, f"drafting {shape} in a union", validate=True)


def check_weights(case: PolicyCase) -> None:
    """If it needs the rows of heads, it follows their weights."""
    if not (case.needs.drafter_rows or case.needs.target_rows):
        return
    target, drafter = copy.deepcopy(case.target), copy.deepcopy(case.drafter)
    assistant = DynSpecAssistant(drafter, case.checked, target=target, **_IN_ALL_ROUNDS)
    for _ in range(2):
        expected = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8)
        actual = target.generate(case.prompt(1), do_sample=False, max_new_tokens=8, assistant_model=assistant)
        if not torch.equal(actual, expected):
            case.fail("after weights changed, the output differs from plain generate's", "Use the new rows.")
        with torch.no_grad():
            for model in (target, drafter):
                model.get_output_embeddings().weight.mul_(-0.5)
    assistant.unbind()


class _Counted(ForwardingPolicy):
    """Counts states that were started and closed."""

    name = "counted"

    def __init__(self, policy: ShortlistPolicy):
        super().__init__(policy)
        self.started = self.closed = 0

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        self.started += 1
        return _CountedState(super().start(vocabulary, memory), self)


class _CountedState(ForwardingState):
    def __init__(self, state: ShortlistState, policy: _Counted):
        super().__init__(state)
        self._policy = policy

    def close(self) -> None:
        super().close()
        self._policy.closed += 1


def _draft(
    case: PolicyCase, policy: ShortlistPolicy, tree: bool | TreeConfig, doing: str, validate: bool = False
) -> None:
    """Draft with a policy in every way, and compare the output with plain generate's."""
    target = case.target
    assistant = DynSpecAssistant(case.drafter, policy, target=target, tree=tree, validate=validate, **_IN_ALL_ROUNDS)
    conversation, turn = assistant.conversation(), case.prompt(1)
    for seed in (1, 2):
        _require_same_output(case, case.prompt(seed), assistant, doing)
        turn = _require_same_output(case, turn, conversation, f"{doing} in a conversation")
    # With one candidate, sampling gives the greedy text.
    _require_same_output(case, case.prompt(1), assistant, f"{doing} and sampling", do_sample=True, top_k=1)
    torch.manual_seed(0)
    target.generate(case.prompt(1), assistant_model=assistant, do_sample=True, max_new_tokens=NEW_TOKENS)
    assistant.unbind()
    if not validate:
        case.stats.add(assistant.stats_total)


def _require_same_output(
    case: PolicyCase, text: torch.Tensor, assistant: object, doing: str, **arguments: object
) -> torch.Tensor:
    expected = case.plain(text)
    named = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "assistant_model": assistant}
    actual = case.target.generate(text, **named | arguments)
    if not torch.equal(actual, expected):
        case.fail(
            f"{doing}, the output differs from plain generate's",
            "Return shortlists whose tensors do not change afterwards: make new ones, and increase the version.",
        )
    return actual


CHECKS = (
    check_needs,
    check_shortlists,
    check_states_are_apart,
    check_restart,
    check_memory,
    check_fixed_memory,
    check_settings,
    check_drafting,
    check_unions,
    check_weights,
)
