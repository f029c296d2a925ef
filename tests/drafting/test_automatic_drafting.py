"""`num_assistant_tokens="auto"` and `policy="auto"`: what is chosen, what it costs to find out, and that greedy tokens
never show the choice."""

import copy
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls import assert_same, generate
from cases import representatives
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import (
    AutomaticShortlist,
    ConfigurationError,
    DynSpecAssistant,
    FullShortlist,
    InContextShortlist,
    TreeConfig,
    UnionShortlist,
)
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.drafting import automatic
from hf_dynspec.drafting.automatic import (
    LONGEST,
    NO_DRAFT,
    AutomaticCall,
    ChooserPool,
    DraftChooser,
    DraftPlan,
    RoundLatency,
    plans_of,
)
from hf_dynspec.generation.feedback import TargetFeedback
from hf_dynspec.shortlists import POLICIES

TREE = TreeConfig(24, 3, 4)
# Seconds of a round without drafts, and of each draft step.
ALONE, STEP = 1.0, 0.1


# The choice, by a clock that is set --------------------------------------------------------------------------------


class Machine:
    """Rounds of a clock of their own, with a drafter whose stated probabilities hold, times `quality`.

    Args:
        quality: 0 is a drafter that is never right.
        step: seconds of a draft step.
        noise: the spread of a round's time, as a share of it.
    """

    def __init__(self, quality: float, step: float = STEP, noise: float = 0.05, seed: int = 0):
        self.quality, self.step, self.noise = quality, step, noise
        self.now = 0.0
        self.random = random.Random(seed)

    def generate(self, tokens: int, draft: Callable[[int], tuple[int, Callable[[float], bool]]], end=None) -> int:
        """Generate a text. `draft` says how many tokens to draft at most, and if to go on after a probability.
        Returns the rounds that drafted."""
        count = rounds = 0
        while count < tokens:
            most, goes_on = draft(tokens - count - 1)
            drafted, accepted, is_right = 0, 0, True
            while drafted < most:
                probability = self.random.betavariate(0.9, 0.5)
                drafted += 1
                is_right = is_right and self.random.random() < probability * self.quality
                accepted += is_right
                if not goes_on(probability):
                    break
            seconds = ALONE + (self.step + 0.03) * drafted
            stall = 2.0 if self.random.random() < 0.01 else 1.0
            self.now += seconds * stall * (1.0 + abs(self.random.gauss(0, self.noise)))
            count += accepted + 1
            rounds += drafted > 0
            if end is not None:
                end(drafted, accepted, count >= tokens)
        return rounds

    def fixed(self, length: int, tokens: int) -> float:
        """Tokens per second with a fixed length."""
        self.generate(tokens, lambda most: (min(length, most), lambda probability: True))
        return tokens / self.now

    def automatic(self, chooser: DraftChooser, stops_early: bool, tokens: int) -> int:
        """Generate a text under automatic drafting. Returns the rounds that drafted."""
        call = AutomaticCall(chooser, stops_early, lambda: self.now)

        def draft(most: int) -> tuple[int, Callable[[float], bool]]:
            goes_on = call.goes_on if stops_early else lambda probability: True
            return min(call.begin_round(most).steps, most), goes_on

        def end(drafted: int, accepted: int, is_last: bool) -> None:
            call.has_drafted(drafted)
            call.end_round(accepted, is_last)

        rounds = self.generate(tokens, draft, end)
        call.end_call()
        return rounds


def chooser(stops_early: bool = True, policies: int = 1, tree: TreeConfig | None = None, fixed=None) -> DraftChooser:
    return DraftChooser(tree, policies, stops_early, fixed)


EARLY = pytest.mark.parametrize("stops_early", [True, False], ids=["early stop", "chosen length"])


@EARLY
@pytest.mark.parametrize("step", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("quality", [0.6, 0.8, 1.0])
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_little_is_lost_to_the_best_fixed_length(quality, step, stops_early):
    """Over eight texts of 128 tokens, the first ones included, with stalls and noise."""
    speeds, seeds = {}, range(6)
    for length in (0, 1, 2, 3, 5, 8, LONGEST):
        speeds[length] = sum(Machine(quality, step, seed=seed).fixed(length, 1024) for seed in seeds)
    total = 0.0
    for seed in seeds:
        machine, learned = Machine(quality, step, seed=seed), chooser(stops_early)
        for _ in range(8):
            machine.automatic(learned, stops_early, 128)
        total += 1024 / machine.now
    # Single texts and seeds vary by two percent.
    assert total > 0.93 * max(speeds.values())


@EARLY
@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_a_drafter_that_is_never_right_costs_little(tokens, stops_early):
    plain = automatically = 0.0
    for seed in range(8):
        machine, learned = Machine(0.0, seed=seed), chooser(stops_early)
        rounds = machine.automatic(learned, stops_early, tokens)
        assert learned._backoff.length and 4 <= rounds < 32
        automatically += machine.now
        alone = Machine(0.0, seed=seed)
        alone.fixed(0, tokens)
        plain += alone.now
    assert plain > 0.95 * automatically


@EARLY
@pytest.mark.parametrize("tokens", [3, 4, 6])
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_texts_without_room_for_whole_drafts_are_judged_too(tokens, stops_early):
    """Whatever is drafted in them is shorter than planned."""
    machine, learned = Machine(0.0), chooser(stops_early)
    rounds = sum(machine.automatic(learned, stops_early, tokens) for _ in range(200))
    assert learned._backoff.length and rounds < 100


def test_other_weights_are_tried_at_once():
    learned, machine = chooser(), Machine(0.0)
    with pytest.warns(UserWarning, match="does not pay"):
        machine.automatic(learned, True, 400)
    for _ in range(3):
        learned.renew()
        assert machine.automatic(learned, True, 8) >= 3


def test_backoff_grows_and_a_new_text_shortens_it():
    learned, machine = chooser(), Machine(0.0)
    with pytest.warns(UserWarning, match=r"drafting does not pay here: .* tokens per second with drafts") as warned:
        machine.automatic(learned, True, 2000)
    assert len(warned) == 1, "the warning is given once"
    assert learned._backoff.length == 512
    assert machine.automatic(learned, True, 60) == 0
    assert machine.automatic(learned, True, 200) > 0


@pytest.mark.parametrize("change", ["better texts", "weights"])
@pytest.mark.filterwarnings("ignore:drafting does not pay")
def test_drafting_comes_back(change):
    learned, machine = chooser(), Machine(0.0)
    machine.automatic(learned, True, 1000)
    assert learned.is_backing_off
    machine.quality = 1.0
    if change == "weights":
        learned.renew()
        assert not learned.is_backing_off
    for _ in range(4):
        machine.automatic(learned, True, 400)
    assert not learned.is_backing_off
    assert machine.automatic(learned, True, 200) > 60


def test_early_stop_follows_the_worth_of_a_step():
    """Costly steps end drafts after fewer tokens."""

    def drafted_per_round(step: float) -> float:
        machine, learned = Machine(1.0, step), chooser()
        for _ in range(4):
            machine.automatic(learned, True, 300)
        recent = learned._recent[0]
        return sum(steps for _, steps in recent) / len(recent)

    cheap, costly = drafted_per_round(0.02), drafted_per_round(0.4)
    assert cheap > costly + 1


def test_the_better_of_two_policies_is_found():
    """The second one drafts as well in half the time."""
    learned, machine = chooser(False, policies=2), Machine(0.9)
    call = AutomaticCall(learned, False, lambda: machine.now)
    chosen = []
    for _ in range(400):
        plan = call.begin_round(1000)
        chosen.append(plan.policy)
        machine.step = 0.2 if plan.policy == 0 else 0.1
        accepted = next((n for n in range(plan.steps) if machine.random.random() > 0.8), plan.steps)
        machine.now += ALONE + machine.step * plan.steps
        call.end_round(accepted)
    assert sum(chosen[-100:]) > 80


def test_a_fixed_length_leaves_the_policy_alone_to_be_chosen():
    five = DraftPlan(5, 5)
    learned = chooser(False, policies=2, fixed=five)
    call = AutomaticCall(learned, False, itertools.count().__next__)
    for _ in range(100):
        plan = call.begin_round(1000)
        assert plan.steps == 5
        call.end_round(0)
    assert {plan.policy for plan in learned._latency._recent} == {0, 1}


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_the_token_that_ends_a_text_within_a_draft_is_no_miss(accepted):
    learned = chooser(False)
    before = learned._rates(DraftPlan(5, 5)).rates()
    call = AutomaticCall(learned, False)
    call.begin_round(100)
    call.has_drafted(5)
    call.end_round(accepted, is_last=True)
    call.end_call()
    after = learned._rates(DraftPlan(5, 5)).rates()
    assert all(new >= old for new, old in zip(after, before, strict=True))


def test_the_latency_of_a_shape_is_the_median_of_its_recent_rounds():
    latency = RoundLatency()
    for seconds in (1.0, 1.1, 9.0):
        latency.add(DraftPlan(2, 2), seconds)
    assert latency.of_round(DraftPlan(2, 2)) == 1.1
    for seconds in (1.7, 1.7, 1.7):
        latency.add(DraftPlan(5, 5), seconds)
    assert latency.of_step(0) == pytest.approx(0.2)
    assert latency.of_round(DraftPlan(6, 6)) == pytest.approx(1.9)
    assert latency.of_round(DraftPlan(2, 2, policy=1)) is None


def test_trees_are_chosen_up_to_the_given_one():
    plans = plans_of(TREE, False)
    assert all(plan.nodes <= 23 and plan.steps <= 4 for plan in plans)
    assert DraftPlan(4, 23) in plans and len({plan.nodes for plan in plans}) == 3
    assert plans_of(TreeConfig(2, 1, 1), False)


def test_choosers_are_bounded_and_follow_the_weights():
    pool = ChooserPool()

    def of(temperature: float, version: int = 0) -> DraftChooser:
        return pool.chooser(temperature, version, None, 1, True, None)

    first = of(0.0)
    assert of(0.0) is first
    first._backoff.begin()
    assert of(0.0, version=1) is first and not first.is_backing_off
    for temperature in range(1, 12):
        of(temperature)
    assert len(pool._choosers) == 8
    pool.forget()
    assert not pool._choosers


# In generate ---------------------------------------------------------------------------------------------------------


class Whim(DraftChooser):
    """Drafts something else every few rounds, and backs off in between, whatever that costs."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._random, self._left = random.Random(5), 0

    @property
    def is_backing_off(self) -> bool:
        return self._left > 0

    @property
    def keeps_features(self) -> bool:
        return self._left <= 3

    def choose(self) -> DraftPlan:
        if self._is_fixed:
            return self._random.choice(self._plans)
        if self._left:
            self._left -= 1
            return NO_DRAFT
        if self._random.random() < 0.3:
            self._left = self._random.choice([0, 1, 7])
            return NO_DRAFT
        return self._random.choice(self._plans)

    def early_stop(self, policy: int) -> tuple[float, list[float]]:
        return self._random.random(), super().early_stop(policy)[1]


@pytest.fixture
def whims(monkeypatch):
    """Plans follow no reason."""
    monkeypatch.setattr(automatic, "DraftChooser", Whim)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return soft()


def drafters(target: PreTrainedModel) -> dict[str, Callable]:
    return {
        "the target itself": lambda: copy.deepcopy(target),
        "another model": lambda: perturbed(target),
        "EAGLE-2": lambda: drafter_of(agreeing_head("eagle2"), target),
        "EAGLE-3": lambda: drafter_of(agreeing_head("eagle3"), target),
    }


GREEDY = {"max_new_tokens": 60, "eos_token_id": 299}


def assert_same_in_calls_and_turns(target, assistant) -> None:
    """A call, and two turns of a conversation."""
    conversation, text = assistant.conversation(), prompt()
    for one in (assistant, conversation, conversation):
        text = assert_same(target, one, text, **GREEDY)


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["the target itself", "another model", "EAGLE-2", "EAGLE-3"])
def test_greedy_tokens_are_the_same_whatever_is_chosen(drafter, tree, target, whims):
    """In calls and in a conversation, with backoffs that a head is given no hidden states in."""
    own = drafters(target)[drafter]()
    assistant = DynSpecAssistant(own, "full", target=target, tree=tree, num_assistant_tokens="auto")
    assert_same_in_calls_and_turns(target, assistant)
    if drafter == "the target itself" and not tree:
        assert_same(target, assistant, **GREEDY)
        assert assistant.stats.accepted == assistant.stats.drafted, "it has read the text of all backoffs"
    assert assistant.stats_total.drafted


@pytest.mark.parametrize("length", [5, "auto"])
@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["the target itself", "EAGLE-3"])
def test_tokens_are_the_same_whichever_policy_drafts(drafter, tree, length, target, whims):
    names = ("hybrid", "screen", "full", "retrieval", "router", "union")
    own, policy = drafters(target)[drafter](), AutomaticShortlist([POLICY_CASES[name]() for name in names])
    assistant = DynSpecAssistant(own, policy, target=target, tree=tree, num_assistant_tokens=length, validate=True)
    assert_same_in_calls_and_turns(target, assistant)
    assert len(assistant.stats_total.rounds_of) >= 3
    assert "rounds drafted with" in str(assistant.stats_total)


@pytest.mark.parametrize("policy", representatives("families", POLICY_CASES, keep=4))
def test_every_policy_goes_on_after_a_backoff(policy, target, drafter, whims):
    """Its shortlists are held against the contract, and the tokens against the target's own."""
    settings = {"num_assistant_tokens": "auto", "validate": True}
    assert_same_in_calls_and_turns(
        target, DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, **settings)
    )


def test_a_drafter_that_is_never_right_is_left_alone(target, monkeypatch):
    """In a call in which drafting backs off throughout, the drafter does not even read the prompt."""
    record = DraftChooser.record

    def record_evenly(self, done):
        record(self, done._replace(seconds=1.0 + 0.2 * done.steps))

    monkeypatch.setattr(DraftChooser, "record", record_evenly)
    assistant = DynSpecAssistant(tiny(seed=77), "full", target=target, num_assistant_tokens="auto")
    with pytest.warns(UserWarning, match="drafting does not pay here") as warned:
        for _ in range(3):
            target.generate(prompt(), assistant_model=assistant, do_sample=False, **GREEDY)
    assert len(warned) == 1 and warned[0].filename == __file__, "the user's line is named"
    states, start = [], assistant.drafter.start
    monkeypatch.setattr(assistant.drafter, "start", lambda: states.append(start()) or states[-1])
    for _ in range(8):
        states.clear()
        generate(target, assistant, **GREEDY | {"max_new_tokens": 12})
        if not assistant.stats.drafted:
            break
    assert not assistant.stats.drafted
    assert states and not any(one.length for one in states)


def test_the_target_is_asked_for_no_hidden_states_early_in_a_backoff(target, monkeypatch):
    wanted, states = [], TargetFeedback.wanted_states
    monkeypatch.setattr(TargetFeedback, "wanted_states", lambda *given: wanted.append(states(*given)) or wanted[-1])
    assistant = DynSpecAssistant(drafters(target)["EAGLE-3"](), target=target, num_assistant_tokens="auto")
    monkeypatch.setattr(DraftChooser, "is_backing_off", True)
    monkeypatch.setattr(DraftChooser, "keeps_features", False)
    monkeypatch.setattr(DraftChooser, "choose", lambda self: NO_DRAFT)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=10, do_sample=False)
    assert wanted and not any(wanted)


def test_two_threads_share_what_is_learned(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, num_assistant_tokens="auto")

    def run(seed: int) -> list[torch.Tensor]:
        return [generate(target, assistant, prompt(seed=seed), **GREEDY) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for seed, made in enumerate(pool.map(run, range(2))):
            expected = generate(target, None, prompt(seed=seed), **GREEDY)
            assert all(torch.equal(one, expected) for one in made)
    assert len(assistant.choosers._choosers) == 1


def test_what_is_learned_belongs_to_the_setting(target):
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, num_assistant_tokens="auto")
    arguments = {"max_new_tokens": 20, "eos_token_id": 299, "assistant_model": assistant}
    target.generate(prompt(), do_sample=False, **arguments)
    target.generate(prompt(), do_sample=True, temperature=0.8, **arguments)
    assert len(assistant.choosers._choosers) == 2
    assistant.tree = TREE
    assert not assistant.choosers._choosers
    assert copy.copy(assistant).choosers is not assistant.choosers


def test_the_default_is_five_tokens_and_the_clock_decides_nothing(target, monkeypatch):
    monkeypatch.setattr(automatic, "DraftChooser", None)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    assert assistant.generation_config.num_assistant_tokens == 5
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=True))
    assert torch.equal(*outputs)
    drafter = perturbed(target)
    drafter.generation_config.num_assistant_tokens = 3
    assert DynSpecAssistant(drafter, target=target).generation_config.num_assistant_tokens == 3
    assistant.generation_config.num_assistant_tokens = None
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("wrong", ["sometimes", "AUTO", "", 0, -1, True, 2.5])
def test_other_words_are_refused_before_any_work(wrong, target):
    drafter = perturbed(target)
    with pytest.raises(ConfigurationError, match=r'num_assistant_tokens must be a whole number .* or "auto"'):
        DynSpecAssistant(drafter, target=target, num_assistant_tokens=wrong)
    assistant = DynSpecAssistant(drafter, target=target)
    assistant.generation_config.num_assistant_tokens = wrong
    with pytest.raises(ConfigurationError, match="num_assistant_tokens"):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=4)


def test_it_may_be_assigned_and_is_stored(target):
    assistant = DynSpecAssistant(perturbed(target), "full", target=target)
    assistant.generation_config.num_assistant_tokens = "auto"
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, do_sample=False)
    assert assistant.choosers._choosers and assistant.generation_config.num_assistant_tokens == "auto"
    # Study is of one fixed length.
    assert assistant.draft_round(prompt()).token_ids.shape[0] == 5
    config = DynSpecConfig(PolicyConfig("full", {}), num_assistant_tokens="auto")
    assert DynSpecConfig.from_dict(config.to_dict()).num_assistant_tokens == "auto"


# Several policies ----------------------------------------------------------------------------------------------------


def test_policies_are_tried_and_counted(target):
    assistant = DynSpecAssistant(copy.deepcopy(target), "auto", target=target)
    for seed in range(10):
        target.generate(prompt(seed=seed), assistant_model=assistant, max_new_tokens=60, do_sample=False)
    assert set(assistant.stats_total.rounds_of) == {"hybrid", "screen"}
    assert assistant.stats_total.to_dict()["rounds_of"] == dict(assistant.stats_total.rounds_of)


def test_all_policies_are_bound_and_closed_together(target):
    """If one of them cannot be used, binding says so and leaves nothing of the others open."""
    opened = []

    class Counting(FullShortlist):
        name = "counting"

        def start(self, vocabulary, memory=None):
            state = super().start(vocabulary)
            opened.append(state)
            state.close = lambda: opened.remove(state)
            return state

    class Refusing(FullShortlist):
        name = "refusing"

        def start(self, vocabulary, memory=None):
            raise ConfigurationError("not for this pair")

    drafter = perturbed(target)
    with pytest.raises(ConfigurationError, match="not for this pair"):
        DynSpecAssistant(drafter, AutomaticShortlist([Counting(), Refusing()]), target=target)
    assert not opened
    assistant = DynSpecAssistant(drafter, AutomaticShortlist([Counting(), Counting()]), target=target)
    assert len(opened) == 2
    assistant.unbind()
    assert not opened


def test_an_automatic_policy_is_no_part_of_another():
    automatically = AutomaticShortlist([FullShortlist()])
    for make in (UnionShortlist, lambda *policies: AutomaticShortlist(policies)):
        with pytest.raises(ConfigurationError, match="the policy 'auto' cannot be a part"):
            make(FullShortlist(), automatically)
    for wrong in ("hybrid", FullShortlist(), 3, [], ["full"]):
        with pytest.raises(ConfigurationError, match="an automatic policy"):
            AutomaticShortlist(wrong)


def test_an_automatic_policy_is_stored_with_all_its_policies(target):
    policy = AutomaticShortlist([FullShortlist(), InContextShortlist(30)])
    config = DynSpecConfig(PolicyConfig("auto", policy.settings()))
    stored = DynSpecConfig.from_dict(config.to_dict()).policy
    loaded = POLICIES["auto"].from_settings(stored.settings, {})
    assert isinstance(loaded, AutomaticShortlist) and repr(loaded.policies) == repr(policy.policies)
