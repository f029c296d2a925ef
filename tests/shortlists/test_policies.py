"""What every policy promises, over the whole table; and the in-context window against an obvious reference."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from cases import representatives
from models import POLICY_CASES, VOCABULARY, RandomShortlist, random_router

from hf_dynspec import ConfigurationError, devices
from hf_dynspec.protocol import Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from hf_dynspec.shortlists import (
    POLICIES,
    FrequencyShortlist,
    FullShortlist,
    HybridShortlist,
    InContextShortlist,
    RouterShortlist,
    ShortlistPolicy,
    ShortlistState,
    UnionShortlist,
    as_policy,
    policy_class,
)
from hf_dynspec.shortlists.frequency import position_aware_size
from hf_dynspec.testing import check_policy

PADDED = VOCABULARY + 20  # ids that a padded target may name and the drafter must not draft
FEATURES = torch.zeros(1, 32)


def vocabulary(eos: tuple[int, ...] = (2, 77)) -> VocabularyInfo:
    return VocabularyInfo(VOCABULARY, eos, torch.device("cpu"))


def random_ids(generator: torch.Generator, *shape: int, limit: int = PADDED) -> torch.Tensor:
    return torch.randint(0, limit, shape, generator=generator)


def conversation(seed: int, needs: Needs, rounds: int = 25, prompt_length: int = 30) -> Iterator[Prompt | Verdict]:
    """What a state is shown in one call: random tokens, with the shapes that the needs ask for."""
    generator = torch.Generator().manual_seed(seed)
    yield Prompt(random_ids(generator, prompt_length, limit=VOCABULARY), 0)
    if needs.prompt_top_k:
        positions = min(prompt_length, needs.prompt_positions or prompt_length)
        top_ids = random_ids(generator, positions, needs.prompt_top_k)
        yield Prompt(torch.empty(0, dtype=torch.int64), prompt_length, top_ids)
    start = prompt_length
    for _ in range(rounds):
        drafted = int(torch.randint(0, 7, (), generator=generator))
        accepted = int(torch.randint(0, drafted + 1, (), generator=generator))
        draft = random_ids(generator, drafted, limit=VOCABULARY)
        verified = torch.cat([draft[:accepted], random_ids(generator, 1)])
        top_ids = random_ids(generator, accepted + 1, needs.verify_top_k) if needs.verify_top_k else None
        yield Verdict(draft, verified, start, top_ids=top_ids)
        start += accepted + 1


def show(state: ShortlistState, event: Prompt | Verdict) -> None:
    (state.observe_prompt if isinstance(event, Prompt) else state.observe)(event)


def select(state: ShortlistState, depth: int = 0) -> Shortlist:
    state.observe_draft_inputs(FEATURES, FEATURES)
    return state.select(depth, torch.tensor([5]), FEATURES)


def ids_of(shortlist: Shortlist) -> set[int]:
    ids = shortlist.ids().tolist()
    assert len(ids) == len(set(ids)), "an id is scored twice"
    return set(ids)


# Every policy --------------------------------------------------------------------------------------------------------

contract = pytest.mark.parametrize("make", POLICY_CASES.values(), ids=POLICY_CASES)
Make = Callable[[], ShortlistPolicy]


def test_every_policy_of_the_table_is_covered():
    assert set(POLICIES) <= set(POLICY_CASES)
    for name, policy in POLICIES.items():
        assert policy.name == name and policy_class(name) is policy
        assert isinstance(POLICY_CASES[name](), policy)


@pytest.mark.parametrize(
    "name", representatives("families", sorted(POLICY_CASES, key=lambda one: one not in POLICIES), keep=len(POLICIES))
)
def test_the_contract_of_policies(name: str):
    report = check_policy(POLICY_CASES[name]())
    assert len(report.checks) == 11 and 0 < report.active_vocabulary <= VOCABULARY


@contract
def test_unknown_settings_are_refused(make: Make):
    policy = make()
    with pytest.raises(ConfigurationError):
        type(policy).from_settings({**policy.settings(), "no_such_setting": 1}, policy.tensors())


def test_policies_by_name():
    assert isinstance(as_policy(None), HybridShortlist)
    assert isinstance(as_policy("full"), FullShortlist)
    policy = InContextShortlist(5)
    assert as_policy(policy) is policy
    for wrong in ("nonsense", 3, "Full"):
        with pytest.raises(ConfigurationError, match="the policies are full"):
            as_policy(wrong)
    with pytest.raises(ConfigurationError, match="at least one policy"):
        as_policy("union")


WRONG = {
    "window": lambda: InContextShortlist(window=0),
    "window, a number": lambda: InContextShortlist(window=2.5),
    "window, true": lambda: InContextShortlist(window=True),
    "prompt_top_k": lambda: InContextShortlist(prompt_top_k=-1),
    "verify_top_k": lambda: InContextShortlist(verify_top_k="3"),
    "prompt_positions": lambda: InContextShortlist(prompt_positions=0),
    "eviction": lambda: InContextShortlist(eviction="fifo"),
    "size": lambda: FrequencyShortlist(size=0),
    "position_aware": lambda: FrequencyShortlist(position_aware="yes"),
    "ranking must not repeat": lambda: FrequencyShortlist([1, 2, 1]),
    "ranking must not hold negative": lambda: FrequencyShortlist([1, -2]),
    "ranking must be a non-empty": lambda: FrequencyShortlist([]),
    "ranking must hold integer": lambda: FrequencyShortlist([0.5, 1.0]),
    "policies, got": lambda: UnionShortlist(FullShortlist(), "full"),
    "policies": lambda: UnionShortlist.from_settings({"policies": 3}, {}),
    "policy 0": lambda: UnionShortlist.from_settings({"policies": [{"name": "full"}]}, {}),
    "no policy 'x'": lambda: UnionShortlist.from_settings({"policies": [{"name": "x", "settings": {}}]}, {}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_by_name(case):
    with pytest.raises(ConfigurationError, match=case.split(",")[0]):
        WRONG[case]()


# Static shortlists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 40, VOCABULARY, 10**6])
def test_a_frequency_shortlist_is_the_head_of_its_ranking(size):
    ranking = torch.randperm(PADDED, generator=torch.Generator().manual_seed(0))
    kept = [token for token in ranking.tolist() if token < VOCABULARY and token not in (2, 77)]
    expected = {2, 77, *kept[: max(0, size - 2)]}
    assert ids_of(select(FrequencyShortlist(ranking, size=size).start(vocabulary()))) == expected
    merge_order = [token for token in range(VOCABULARY) if token not in (2, 77)]
    expected = {2, 77, *merge_order[: max(0, size - 2)]}
    assert ids_of(select(FrequencyShortlist(size=size).start(vocabulary()))) == expected


def test_position_aware_shortlists_are_nested_and_shrink_as_published():
    ranking = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    state = FrequencyShortlist(ranking, size=60, position_aware=True).start(vocabulary())
    shortlists = [ids_of(select(state, depth)) for depth in range(70)]
    # DynaSpec, appendix A.1: all at depths 0 and 1, then 1/(depth + 1) of them; here never fewer than the two EOS ids.
    assert [len(ids) for ids in shortlists] == [60, 60, *(max(2, 60 // (depth + 1)) for depth in range(2, 70))]
    assert all(deeper <= shallower for shallower, deeper in pairwise(shortlists))
    assert position_aware_size(60, 100) == 1


# The in-context window against a reference ---------------------------------------------------------------------------


class Window:
    """MicroSpec's window as its equations say it, on a Python list. EOS ids and padding never enter the stream."""

    def __init__(self, window: int, eviction: str, info: VocabularyInfo):
        self._window, self._eviction, self._info = window, eviction, info
        self.stream: list[int] = []

    def _append(self, ids: list[int]) -> None:
        self.stream += [token for token in ids if token < self._info.size and token not in self._info.eos_token_ids]

    def _append_set(self, ids: list[int]) -> None:
        """Each id once, where it occurs last."""
        self._append([token for i, token in enumerate(ids) if token not in ids[i + 1 :]])

    def show(self, event: Prompt | Verdict) -> None:
        if isinstance(event, Prompt):
            self._append(event.token_ids.tolist())
            if event.top_ids is not None:
                self._append_set(event.top_ids.flatten().tolist())
        else:
            self._append_set(event.drafted.tolist())
            likely = [] if event.top_ids is None else event.top_ids.flatten().tolist()
            self._append_set(likely + event.verified.tolist())

    def ids(self) -> set[int]:
        recent = self.stream[-self._window :]
        if self._eviction == "lru":
            recent = list(dict.fromkeys(reversed(self.stream)))[: self._window]
        return {*recent, *self._info.eos_token_ids}


@pytest.mark.parametrize("eviction", ["stream", "lru"])
@pytest.mark.parametrize("eos", [(), (2,), (2, 77, 40)])
@pytest.mark.parametrize("window", [1, 2, 7, 40, 200, 700])
def test_the_window_is_the_published_one(window, eos, eviction):
    info = vocabulary(eos)
    policy = InContextShortlist(window, 3, 2, eviction)
    state = policy.start(info)
    for seed in range(6):
        reference = Window(window, eviction, info)
        length = (3, 40, 300)[seed % 3]
        for event in conversation(seed, policy.needs, rounds=40, prompt_length=length):
            version = select(state).version
            show(state, event)
            reference.show(event)
            shortlist = select(state)
            assert ids_of(shortlist) == reference.ids()
            assert shortlist.version == version + 1
        state.restart()
        assert ids_of(select(state)) == set(eos)


@pytest.mark.parametrize("looks", [True, False], ids=["looks at numbers", "waits for none"])
@pytest.mark.parametrize("eviction", ["stream", "lru"])
def test_tokens_that_repeat_and_hardly_change(eviction, looks, monkeypatch):
    """A tiny alphabet: nearly every token is held already, is a repeat, an EOS or padding."""
    if not looks:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    info = vocabulary((2,))
    for window in (1, 2, 3, 5):
        state = InContextShortlist(window, 0, 2, eviction).start(info)
        reference = Window(window, eviction, info)
        generator = torch.Generator().manual_seed(window)
        alphabet = torch.tensor([2, 3, 4, 5, 6, VOCABULARY, PADDED])
        for step in range(300):
            count = 1 + step % 4
            draft = alphabet[torch.randint(0, 7, (count,), generator=generator)]
            top_ids = alphabet[torch.randint(0, 7, (1, 2), generator=generator)] if step % 3 else None
            event = Verdict(draft, draft[-1:], step, top_ids=top_ids)
            show(state, event)
            reference.show(event)
            assert ids_of(select(state)) == reference.ids(), step


def test_no_context_is_no_change():
    state = InContextShortlist(5).start(vocabulary())
    show(state, Prompt(torch.tensor([8, 9]), 0))
    before = select(state)
    show(state, Prompt(torch.empty(0, dtype=torch.int64), 2))
    assert select(state) is before


# Unions --------------------------------------------------------------------------------------------------------------

WINDOW = lambda: InContextShortlist(10, 1, 1)  # noqa: E731
ROUTER = lambda **settings: RouterShortlist(random_router(), 3, **settings)  # noqa: E731
UNIONS = {
    "static and window": lambda: [FrequencyShortlist(size=30), InContextShortlist(20, 2, 2)],
    "window and static": lambda: [InContextShortlist(20, 2, 2), FrequencyShortlist(size=30)],
    "two windows": lambda: [InContextShortlist(10, 1, 1, "lru"), InContextShortlist(60, 2, 2)],
    "position-aware": lambda: [FrequencyShortlist(size=60, position_aware=True), WINDOW()],
    "all": lambda: [FullShortlist(), WINDOW()],
    "one": lambda: [WINDOW()],
    "a union within": lambda: [UnionShortlist(FrequencyShortlist(size=9)), WINDOW()],
    "a hybrid and a window": lambda: [HybridShortlist(core_size=30, window=20), InContextShortlist(60, 2, 2)],
    "a hybrid after a router": lambda: [ROUTER(), HybridShortlist(core_size=20, window=30, memory="assistant")],
    "a router": lambda: [WINDOW(), ROUTER(), FrequencyShortlist(size=9)],
    "a router alone": lambda: [ROUTER()],
    "a router of slots": lambda: [ROUTER(packed=False), WINDOW()],
    "two routers": lambda: [RouterShortlist(random_router(seed=seed), 3) for seed in (1, 2)],
    "a router within": lambda: [UnionShortlist(ROUTER(), FrequencyShortlist(size=30)), WINDOW()],
}


@pytest.mark.parametrize("name", UNIONS)
def test_a_union_holds_what_any_of_its_parts_holds(name):
    parts = UNIONS[name]()
    union = UnionShortlist(*parts)
    assert union.needs.prompt_top_k == max(part.needs.prompt_top_k for part in parts)
    assert union.needs.verify_top_k == max(part.needs.verify_top_k for part in parts)
    state = union.start(vocabulary())
    alone = [part.start(vocabulary()) for part in parts]
    for seed in (0, 1):
        for event in conversation(seed, union.needs):
            for each in (state, *alone):
                show(each, event)
            for depth in range(4):
                shortlist = select(state, depth)
                ids = ids_of(shortlist)
                assert ids == set().union(*(ids_of(select(each, depth)) for each in alone))
                assert int(shortlist.count) == len(ids)
                columns = torch.arange(shortlist.width)
                assert torch.equal(shortlist.ids_at(columns), shortlist.scored_slots)
        for each in (state, *alone):
            each.restart()


def test_a_union_of_static_lists_never_changes():
    parts = FrequencyShortlist(size=30), FrequencyShortlist(torch.arange(200, 290), size=40)
    state = UnionShortlist(*parts).start(vocabulary())
    before = select(state)
    for event in conversation(1, Needs()):
        show(state, event)
        assert all(select(state, depth) is before for depth in range(3))


def test_a_union_with_a_transient_part_is_transient():
    state = UnionShortlist(FrequencyShortlist(size=3), RandomShortlist(5)).start(vocabulary())
    first, second = select(state), select(state)
    assert first.is_transient and first.version != second.version and ids_of(first) != ids_of(second)


def test_the_needs_of_two():
    limited, unlimited = Needs(1, 2, 5), Needs(3, 1)
    assert limited | unlimited == unlimited | limited == Needs(3, 2, None)
    assert limited | Needs(2, 4, 9) == Needs(2, 4, 9)
    # A limit counts only where prompt logits are asked for at all.
    assert limited | Needs(verify_top_k=3) == Needs(3, 2, 5)
    assert Needs() | Needs() == Needs()
    assert Needs(prompt_hidden_states=True) | Needs(2, 4, 9) == Needs(2, 4, None, prompt_hidden_states=True)
    switches = ["draft_inputs", "top_logits", "out_of_vocabulary", "hidden_states", "drafter_rows", "target_rows"]
    for name in switches:
        assert getattr(Needs(**{name: True}) | Needs(3), name) and not getattr(Needs(3) | Needs(), name)
