"""What policies keep from call to call, and the hybrid's core and window against a plain model of them."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from calls import assert_same, generate
from models import VOCABULARY, perturbed
from transformers import PreTrainedModel

from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    FrequencyShortlist,
    HybridShortlist,
    InContextShortlist,
    UnionShortlist,
    devices,
)
from hf_dynspec.protocol import Prompt, Shortlist, Verdict, VocabularyInfo
from hf_dynspec.shortlists import ShortlistPolicy
from hf_dynspec.shortlists.recent_tokens import RecentTokens, RecentTokensState

PADDED = VOCABULARY + 20
FEATURES = torch.zeros(1, 32)


# The hybrid against a plain model ------------------------------------------------------------------------------------


class CoreAndWindow:
    """The hybrid on Python lists: a core, and the other tokens in the order in which they were last seen."""

    def __init__(self, ranking: list[int], core_size: int, window: int, info: VocabularyInfo):
        allowed = [i for i in range(info.size) if info.draftable is None or i in info.draftable.tolist()]
        ranked = [*info.eos_token_ids, *(i for i in ranking if i in allowed and i not in info.eos_token_ids)]
        core_size = max(core_size, len(info.eos_token_ids))
        self.core = ranked[:core_size]
        others = [i for i in allowed if i not in self.core]
        first = [*ranked[core_size:], *(i for i in others if i not in ranked)]
        self._others, self._size = set(others), min(window, len(others))
        self._first = first[: self._size][::-1]  # the rarest is the one that was seen longest ago
        self.restart()

    def restart(self) -> None:
        self._seen = list(self._first)

    def show(self, event: Prompt | Verdict) -> None:
        top_ids = [] if event.top_ids is None else event.top_ids.flatten().tolist()
        if isinstance(event, Prompt):
            new = event.token_ids.tolist() + top_ids
        else:
            new = event.drafted.tolist() + top_ids + event.verified.tolist()
        for token in new:
            if token in self._others:
                self._seen = [one for one in self._seen if one != token] + [token]
        self._seen = self._seen[len(self._seen) - self._size :]

    @property
    def window(self) -> set[int]:
        return set(self._seen)


def events(seed: int, prompt_length: int, rounds: int) -> Iterator[Prompt | Verdict]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, PADDED, shape, generator=generator)

    yield Prompt(ids(prompt_length).clamp_max(VOCABULARY - 1), 0)
    yield Prompt(ids(0), prompt_length, top_ids=ids(5, 4))
    for index in range(rounds):
        drafted = ids(index % 6).clamp_max(VOCABULARY - 1)
        accepted = int(torch.randint(0, drafted.shape[0] + 1, (), generator=generator))
        verified = torch.cat([drafted[:accepted], ids(1)])
        yield Verdict(drafted, verified, prompt_length, top_ids=ids(accepted + 1, 4) if index % 4 else None)


def show(state: RecentTokensState, event: Prompt | Verdict) -> None:
    (state.observe_prompt if isinstance(event, Prompt) else state.observe)(event)


def select(state: RecentTokensState) -> Shortlist:
    return state.select(0, torch.tensor([5]), FEATURES)


@pytest.mark.parametrize("draftable", [None, torch.arange(0, VOCABULARY, 3)], ids=["all", "every third"])
@pytest.mark.parametrize("eos", [(), (0, 77 * 3)])
@pytest.mark.parametrize(
    ("core_size", "window"), [(1, 1), (1, 7), (40, 12), (30, 60), (90, 3), (5, 10**4), (10**4, 50)]
)
@pytest.mark.parametrize("looks", [True, False], ids=["looks at numbers", "waits for none"])
def test_core_and_window_are_disjoint_and_hold_what_they_should(core_size, window, eos, draftable, looks, monkeypatch):
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    info = VocabularyInfo(VOCABULARY, eos, torch.device("cpu"), draftable)
    # A ranking without most tokens: the window begins with others then.
    ranking = torch.randperm(PADDED, generator=torch.Generator().manual_seed(0))[:120].tolist()
    state = HybridShortlist(ranking, core_size, window).start(info)
    model = CoreAndWindow(ranking, core_size, window, info)
    for seed, prompt_length in enumerate((3, 40, 300)):
        for event in events(seed, prompt_length, rounds=25):
            before = select(state)
            show(state, event)
            model.show(event)
            shortlist = select(state)
            core, held = shortlist.slots[: len(model.core)], shortlist.slots[len(model.core) :]
            assert core.tolist() == model.core
            assert set(held.tolist()) == model.window and held.unique().shape == held.shape
            assert not set(held.tolist()) & set(core.tolist())
            # Every slot counts, and those that changed are named.
            assert shortlist.occupied is None
            if shortlist is not before:
                assert shortlist.version == before.version + 1
                changed = (shortlist.slots != before.slots).nonzero().flatten().tolist()
                assert set(changed) <= set(shortlist.replaced.tolist())
        state.restart()
        model.restart()
        assert set(select(state).slots[len(model.core) :].tolist()) == model.window


def test_several_events_are_shown_as_one_change():
    """What a session learns before the next draft step moves each row once, and never one of the core's."""
    state = HybridShortlist(core_size=50, window=40).start(VocabularyInfo(VOCABULARY, (2,), torch.device("cpu")))
    before = select(state)
    for event in events(1, 30, rounds=3):
        show(state, event)
    shortlist = select(state)
    assert shortlist.version == before.version + 1 and select(state) is shortlist
    assert shortlist.replaced.min() >= 50 and shortlist.replaced.shape[0] <= 40


def test_a_token_that_is_seen_again_stays():
    info = VocabularyInfo(VOCABULARY, (2,), torch.device("cpu"))
    state = HybridShortlist(core_size=3, window=3, prompt_top_k=0, verify_top_k=0).start(info)
    for ids, expected in [
        ([50], {50, 3, 4}),
        ([60, 70], {50, 60, 70}),
        ([50], {50, 60, 70}),
        ([80], {50, 70, 80}),
        ([90, 80, 95], {90, 80, 95}),
        ([1, 2, VOCABULARY + 3], {90, 80, 95}),
    ]:
        show(state, Verdict(torch.tensor(ids[:-1], dtype=torch.int64), torch.tensor(ids), 0))
        assert set(select(state).ids().tolist()) == {0, 1, 2} | expected, ids


# What is kept when another call begins -------------------------------------------------------------------------------

# Texts of tokens of their own, none of which a new window holds.
FIRST, SECOND, THIRD = (torch.arange(start, start + 12).unsqueeze(0) for start in (100, 140, 180))
EOS = 2


def hybrid(memory: str) -> HybridShortlist:
    """One that learns from texts alone, so that what it should hold is easily told."""
    return HybridShortlist(core_size=4, window=60, prompt_top_k=0, verify_top_k=0, memory=memory)


def in_context(memory: str) -> InContextShortlist:
    return InContextShortlist(150, 0, 0, "lru", memory=memory)


def stream(memory: str) -> InContextShortlist:
    return InContextShortlist(150, 0, 0, memory=memory)


def union(memory: str) -> UnionShortlist:
    return UnionShortlist(FrequencyShortlist(size=9), UnionShortlist(hybrid(memory)))


KINDS = pytest.mark.parametrize("make", [hybrid, in_context, stream, union])


@contextmanager
def selections() -> Iterator[list[set[int]]]:
    """The ids of all shortlists that windows select in the meantime."""
    seen: list[set[int]] = []
    select = RecentTokensState.select

    def recording(self: RecentTokensState, *arguments: object) -> Shortlist:
        shortlist = select(self, *arguments)
        seen.append(set(shortlist.ids().tolist()))
        return shortlist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecentTokensState, "select", recording)
        yield seen


def knows(target: PreTrainedModel, assistant: object, text: torch.Tensor, of: torch.Tensor, **arguments) -> bool:
    """Generate for a text, and tell whether the window held the tokens of another one from the beginning."""
    with selections() as seen:
        assert_same(target, assistant, text, **{**ARGUMENTS, **arguments})
    held = set(of[0].tolist()) & seen[0]
    assert held in (set(), set(of[0].tolist())), "some are held, and some are not"
    return bool(held)


ARGUMENTS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": EOS}


def new_assistant(target, drafter, policy: ShortlistPolicy, **arguments) -> DynSpecAssistant:
    return DynSpecAssistant(drafter, policy, target=target, **arguments)


@KINDS
@pytest.mark.parametrize("memory", ["call", "conversation", "assistant"])
def test_what_is_kept_from_call_to_call(memory, make, target, drafter):
    assistant = new_assistant(target, drafter, make(memory))
    assert knows(target, assistant, FIRST, FIRST)
    assert knows(target, assistant, SECOND, FIRST) == (memory == "assistant")
    conversation = assistant.conversation()
    assert knows(target, conversation, THIRD, FIRST) == (memory == "assistant")
    # A turn about something else, in which nothing of the text before is left.
    assert knows(target, conversation, SECOND, THIRD) == (memory != "call")
    assert knows(target, assistant, FIRST, THIRD) == (memory == "assistant")


@KINDS
def test_a_call_of_a_conversation_without_memory_is_shown_all_of_its_text(make, target, drafter):
    """It begins as a call outside of the conversation does, though the session goes on."""
    assistant = new_assistant(target, drafter, make("call"))
    conversation = assistant.conversation()
    longer = torch.cat([generate(target, conversation, FIRST, **ARGUMENTS), SECOND], dim=1)
    held = []
    for one in (conversation, assistant):
        with selections() as seen:
            generate(target, one, longer, **ARGUMENTS)
        held.append(seen[0])
    assert held[0] == held[1] and set(longer[0].tolist()) <= held[0]


@KINDS
@pytest.mark.parametrize("validate", [False, True])
def test_a_memory_belongs_to_one_assistant(make, validate, target, drafter):
    policy = make("assistant")
    one, other = (new_assistant(target, drafter, policy, validate=validate) for _ in range(2))
    knows(target, one, FIRST, FIRST)
    assert not knows(target, other, SECOND, FIRST)
    assert knows(target, one, SECOND, FIRST)
    twin = copy.deepcopy(one)
    assert not knows(target, twin, THIRD, FIRST)
    assert knows(target, twin, SECOND, THIRD) and not knows(target, one, SECOND, THIRD)


CHANGES = {
    "forget": lambda assistant, target: assistant.forget(),
    "unbind": lambda assistant, target: assistant.unbind() or assistant.bind(target),
    "bind": lambda assistant, target: assistant.bind(target),
    "another policy": lambda assistant, target: setattr(assistant, "policy", hybrid("assistant")),
    "another drafter": lambda assistant, target: setattr(assistant, "drafter", perturbed(target, 0.2)),
    "another tokenizer": lambda assistant, target: setattr(assistant, "tokenizer", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_ends_a_memory(change, target, drafter):
    assistant = new_assistant(target, drafter, hybrid("assistant"))
    conversation = assistant.conversation()
    knows(target, assistant, FIRST, FIRST)
    knows(target, conversation, SECOND, FIRST)
    CHANGES[change](assistant, target)
    assert not knows(target, assistant, THIRD, FIRST) and not knows(target, assistant, THIRD, SECOND)
    CHANGES[change](assistant, target)
    assert not knows(target, conversation, FIRST, SECOND)


def test_an_unbound_assistant_may_forget_too(target, drafter):
    assistant = DynSpecAssistant(drafter, hybrid("assistant"))
    assistant.forget()
    assert not knows(target, assistant.bind(target), FIRST, SECOND)


def at_once(*work: Callable[[], object]) -> list[object]:
    """What functions return that run in threads of their own."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [one.result() for one in [pool.submit(function) for function in work]]


@pytest.mark.parametrize("is_conversation", [False, True])
@pytest.mark.parametrize("memory", ["conversation", "assistant"])
def test_what_a_running_call_learns_is_forgotten_too(memory, is_conversation, target, drafter):
    assistant = new_assistant(target, drafter, hybrid(memory))
    one, times = assistant.conversation() if is_conversation else assistant, []

    def forget_in_between(input_ids: torch.Tensor, scores: torch.Tensor, **unused: object) -> torch.Tensor:
        """Has another thread call `forget` while a call runs."""
        times.append(1)
        if len(times) == 2:
            at_once(assistant.forget)
        return torch.zeros(1, dtype=torch.bool)

    generate(target, one, FIRST, **{**ARGUMENTS, "max_new_tokens": 8}, stopping_criteria=[forget_in_between])
    assert len(times) > 2
    assert not knows(target, one, SECOND, FIRST)
    assert knows(target, one, THIRD, SECOND) == (is_conversation or memory == "assistant")


@KINDS
def test_a_memory_does_not_depend_on_the_ids_that_end_a_text(make, target, drafter):
    """Each set of EOS ids has sessions of its own, whose cores differ; what they saw is one."""
    assistant = new_assistant(target, drafter, make("assistant"))
    assert knows(target, assistant, FIRST, FIRST, eos_token_id=[EOS, 250])
    assert knows(target, assistant, SECOND, FIRST, eos_token_id=EOS)
    # Its own tokens among the EOS ids, which are on every shortlist then, and remembered where they are not.
    knows(target, assistant, THIRD, FIRST, eos_token_id=[EOS, *FIRST[0, :3].tolist()])
    assert knows(target, assistant, SECOND, THIRD, eos_token_id=EOS)
    assert knows(target, assistant, SECOND, FIRST, eos_token_id=EOS)


def test_draft_round_depends_on_the_text_alone(target, drafter):
    assistant = new_assistant(target, drafter, hybrid("assistant"))
    before = assistant.draft_round(SECOND)
    knows(target, assistant, FIRST, FIRST)
    after = assistant.draft_round(SECOND)
    assert torch.equal(before.token_ids, after.token_ids)
    assert after.shortlists[0].ids().tolist() == before.shortlists[0].ids().tolist()


def test_two_threads_share_one_memory(target, drafter):
    assistant = new_assistant(target, drafter, hybrid("assistant"))

    def work(*texts: torch.Tensor) -> None:
        for text in texts * 3:
            assert_same(target, assistant, text, **ARGUMENTS)

    at_once(lambda: work(FIRST, SECOND), lambda: work(SECOND, FIRST))
    assert knows(target, assistant, THIRD, FIRST) and knows(target, assistant, THIRD, SECOND)


def test_a_memory_is_bounded_and_keeps_the_latest():
    memory = RecentTokens(5)
    memory.add([3, 2, 1])
    memory.add([7, 2])
    assert memory.ids == (7, 2, 3, 1)
    memory.add(range(100))
    assert memory.ids == (0, 1, 2, 3, 4)
    shared = RecentTokens(600)

    def work(start: int) -> None:
        for number in range(start, start + 200):
            shared.add([number, number % 7])

    at_once(lambda: work(1000), lambda: work(2000))
    assert sorted(shared.ids) == [*range(7), *range(1000, 1200), *range(2000, 2200)]


@pytest.mark.parametrize("policy", [HybridShortlist, InContextShortlist])
@pytest.mark.parametrize("memory", ["", "always", None, True])
def test_other_words_for_a_memory_are_refused(policy, memory):
    with pytest.raises(ConfigurationError, match="memory must be"):
        policy(memory=memory)


@pytest.mark.parametrize("policy", [HybridShortlist(core_size=9), InContextShortlist(window=9)])
def test_settings_from_before_there_was_a_memory(policy):
    settings = policy.settings()
    assert settings.pop("memory") == "conversation"
    assert type(policy).from_settings(settings, {}).settings() == policy.settings()
