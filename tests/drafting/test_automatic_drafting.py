"""`num_assistant_tokens="auto"`: what is chosen, what it costs to find out, and that it never shows in the tokens."""

import copy
import functools
import gc
import math
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import GenerationConfig, PreTrainedModel

from hf_dynspec import (
    AutomaticShortlist,
    ConfigurationError,
    DynSpecAssistant,
    DynSpecCandidateGenerator,
    FullShortlist,
    InContextShortlist,
    OnlineAlignment,
    TreeConfig,
    UnionShortlist,
)
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.drafters.base import Drafter, DrafterState
from hf_dynspec.drafting import automatic_call
from hf_dynspec.drafting.automatic import AutomaticDrafting
from hf_dynspec.drafting.automatic_call import AutomaticCall, LearntDrafting
from hf_dynspec.drafting.draft_shapes import ALONE, LONGEST, DraftShape, shape_of, shapes_of
from hf_dynspec.drafting.early_ends import Acceptances, DraftedToken, EarlyEnd
from hf_dynspec.drafting.expected_speed import expected_tokens
from hf_dynspec.drafting.recurrences import Recurrence
from hf_dynspec.drafting.rests import FEATURES_BEFORE_RETRIAL
from hf_dynspec.drafting.round_times import RoundTimes
from hf_dynspec.drafting.side_by_side import SideBySide
from hf_dynspec.generation.feedback import TargetFeedback
from hf_dynspec.shortlists import POLICIES

TREE, FIVE = TreeConfig(24, 3, 4), DraftShape(5, 5)

# The choice, on a machine that is not there --------------------------------------------------------------------------


class Machine:
    """Rounds that take `alone` seconds without a draft, and `fixed + step · steps` more with one of a chain.

    Args:
        again: seconds more each time that the target has scored `rows` tokens, and goes through its weights once more.
        busy: the share of rounds at which other work on the machine begins or ends, which slows down all that follow.
        drift: by what share of it the pace goes up and down, slowly.
        noise: the spread of a round's time, as a share of it.
        stalls: the share of rounds that take two to ten times as long.
        prompts: seconds that the target takes to read a prompt, and the drafter.
    """

    def __init__(
        self,
        alone=10.0,
        fixed=0.7,
        step=1.0,
        noise=0.05,
        stalls=0.01,
        seed=0,
        again=0.0,
        rows=6,
        busy=0.0,
        drift=0.0,
        prompts=(0.0, 0.0),
    ):
        self.alone, self.fixed, self.step = alone, fixed, step
        self.again, self.rows = again, rows
        self.prompts = prompts
        self.noise, self.stalls, self.busy, self.drift = noise, stalls, busy, drift
        self.pace, self.drifted = 1.0, 0.0
        self.now = 0.0
        self.random = random.Random(seed)

    def seconds(self, steps: int) -> float:
        again = steps // self.rows * self.again
        return self.alone + again + (self.fixed + self.step * steps if steps else 0.0)

    def run(self, steps: int, has_drafted: Callable[[], None] = lambda: None) -> None:
        if self.busy and self.random.random() < self.busy:
            self.pace = self.random.choice((1.0, 1.5, 2.2, 3.0))
        stall = self.random.uniform(2, 10) if self.random.random() < self.stalls else 1.0
        # Half of where it was is forgotten after 20 rounds.
        self.drifted = 0.966 * self.drifted + 0.26 * self.random.gauss(0, self.drift) if self.drift else 0.0
        pace = self.pace * math.exp(self.drifted)
        seconds = pace * self.seconds(steps) * self.random.lognormvariate(0, self.noise) * stall
        drafting = seconds * (self.fixed + self.step * steps) / self.seconds(steps) if steps else 0.0
        self.now += drafting
        if steps:
            has_drafted()
        self.now += seconds - drafting


class Token(NamedTuple):
    """One of a text: whether the drafter knows it, how probable it finds it, and what the text says of it."""

    is_known: bool
    probability: float
    recurrence: Recurrence = Recurrence.NEW

    @property
    def drafted(self) -> DraftedToken:
        return DraftedToken(self.probability, self.recurrence)


def text(acceptance: float, tokens: int, seed: int, probability: float = 0.6) -> list[Token]:
    """A text whose drafter is never more sure than at other times."""
    rng = random.Random(seed)
    return [Token(rng.random() < acceptance, probability) for _ in range(tokens)]


def uneven_text(acceptance: float, tokens: int, seed: int) -> list[Token]:
    """One whose drafter is sure of some tokens, and guesses others. `acceptance` is that of all of them."""
    rng = random.Random(seed)
    return [
        Token(rng.random() < probability ** (1 / acceptance - 1), probability)
        for probability in (rng.random() for _ in range(tokens))
    ]


def generate_text(
    machine: Machine,
    known: Sequence[Token],
    draft: Callable[[Sequence[Token]], int],
    has_drafted=lambda: None,
    tell=lambda accepted: None,
) -> list:
    """Speculative decoding of one text. Returns how many steps each round drafted."""
    done, steps = 0, []
    by_target, by_drafter = machine.prompts
    while done < len(known):
        steps.append(min(draft(known[done:]), len(known) - done - 1))
        if steps[-1]:
            machine.now += by_drafter
            by_drafter = 0.0
        accepted = 0
        while accepted < steps[-1] and known[done + accepted].is_known:
            accepted += 1
        machine.run(steps[-1], has_drafted)
        machine.now += by_target
        by_target = 0.0
        tell(accepted)
        done += accepted + 1
    return steps


def automatically(
    machine: Machine, texts: Sequence[Sequence[Token]], drafting: AutomaticDrafting, prompt_tokens: int = 0
) -> list[int]:
    """One call for each text, after prompts of so many tokens. Returns how many steps each round drafted."""
    behind = 0

    def draft(call: AutomaticCall, coming: Sequence[Token]) -> int:
        nonlocal behind
        most = call.begin_round(len(coming) - 1, behind=behind).steps
        behind = 0 if most else behind
        if call.ends_early:
            for step, token in enumerate(coming[: min(most, len(coming) - 1)], start=1):
                if not call.goes_on(token.drafted):
                    return step
        return most

    steps = []
    for known in texts:
        call, behind = AutomaticCall(drafting, lambda: machine.now), prompt_tokens
        steps += generate_text(machine, known, functools.partial(draft, call), call.has_drafted, call.end_round)
        call.end_call()
    return steps


def best_fixed(machine: Machine, texts: Sequence[Sequence[Token]]) -> float:
    """Seconds of the best fixed length, on the same machine without noise."""
    seconds = []
    for length in range(LONGEST + 1):
        quiet = copy.copy(machine)
        quiet.now, quiet.noise, quiet.stalls = 0.0, 0.0, 0.0
        for known in texts:
            generate_text(quiet, known, lambda _, length=length: length)
        seconds.append(quiet.now)
    return min(seconds)


@pytest.fixture(autouse=True)
def quiet():
    """Whether it warns has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "drafting does not pay here")
        yield


@pytest.fixture(params=[False, True], ids=["as long as chosen", "ending early"])
def chains(request) -> Callable[..., AutomaticDrafting]:
    """Makes what chooses chains, for so many policies."""
    return lambda policies=1: AutomaticDrafting(shapes_of(None, request.param), policies, request.param)


COSTS = {"cheap drafts": (10.0, 0.7, 1.0), "dear drafts": (12.0, 1.0, 3.0), "flat": (20.0, 0.0, 1.5)}


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("cost", COSTS)
def test_little_is_lost_to_the_best_fixed_length_known_in_hindsight(cost, acceptance, chains):
    """What was not known at first included: over 12 calls of 200 tokens on a machine without noise."""
    texts = [text(acceptance, 200, seed) for seed in range(12)]
    machine = Machine(*COSTS[cost], noise=0.0, stalls=0.0)
    automatically(machine, texts, chains())
    assert machine.now < best_fixed(machine, texts) / 0.96


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", COSTS)
def test_neither_noise_nor_stalls_mislead_it(cost, acceptance, chains):
    """The same choices on average, priced without the noise that nobody can help."""
    texts = [text(acceptance, 200, seed) for seed in range(12)]
    ratios = []
    for seed in range(5):
        machine = Machine(*COSTS[cost], noise=0.1, stalls=0.02, seed=seed)
        steps = automatically(machine, texts, chains())
        ratios.append(best_fixed(machine, texts) / sum(map(machine.seconds, steps)))
    assert sum(ratios) / len(ratios) > 0.94
    assert min(ratios) > 0.88


@pytest.mark.parametrize("cost", COSTS)
def test_it_follows_texts_that_change(cost, chains):
    """No fixed length suits all of these: it loses little to the best of them, and learns anew what is right."""
    texts = [text(acceptance, 300, seed) for seed, acceptance in enumerate([0.9, 0.2, 0.9, 0.05, 0.9, 0.2])]
    machine = Machine(*COSTS[cost], noise=0.0, stalls=0.0)
    automatically(machine, texts, chains())
    assert machine.now < best_fixed(machine, texts) / 0.95


def test_other_work_on_the_machine_changes_no_choice(chains):
    """Everything takes three times as long from one round on, and only what is being drafted is seen to."""
    machine, drafting = Machine(noise=0.03, stalls=0.0), chains()
    automatically(machine, [text(0.8, 600, 1)], drafting)
    machine.pace = 3.0
    steps = automatically(machine, [text(0.8, 600, 2)], drafting)
    assert steps.count(0) <= 3
    assert sum(steps) / len(steps) > 4


def test_other_work_that_comes_and_goes_does_not_keep_it_from_drafting(chains, request):
    """Where drafting brings 2.2 times as much. Times of shapes must not drift apart by chance, and not drafting must
    not seem better because it met a quiet machine. Where drafts do not end early one length is drafted for long, and
    nothing tells that another one was timed while the machine was slow."""
    ratios = []
    for seed in range(24):
        texts = [uneven_text(0.75, 64, 1000 * seed + index) for index in range(24)]
        machine = Machine(*COSTS["flat"], noise=0.15, stalls=0.05, seed=seed, busy=0.1)
        steps = automatically(machine, texts, chains())
        ratios.append(best_fixed(Machine(*COSTS["flat"]), texts) / sum(map(machine.seconds, steps)))
    mean, least = (0.98, 0.9) if request.node.callspec.params["chains"] else (0.93, 0.75)
    assert sum(ratios) / len(ratios) > mean
    assert min(ratios) > least


def decoding_seconds(machine: Machine, texts: Sequence[Sequence[Token]], drafting: AutomaticDrafting) -> float:
    """What these calls take, but for what the target takes to read their prompts."""
    before = machine.now
    automatically(machine, texts, drafting)
    return machine.now - before - machine.prompts[0] * len(texts)


@pytest.mark.parametrize("is_first", [False, True], ids=["after longer ones", "from the first on"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5])
@pytest.mark.parametrize("tokens", [3, 4, 6])
def test_short_calls_are_hardly_slower_than_without_drafts(tokens, acceptance, is_first, chains):
    """Most of whose rounds read more than others, and tell nothing of times, and have no room for long drafts."""
    shares = []
    for first in range(0, 6000, 1000):
        machine, drafting = Machine(12.0, 3.0, 7.0, noise=0.0, stalls=0.0, prompts=(50.0, 2.0)), chains()
        if not is_first:
            automatically(machine, [text(acceptance, 80, first + seed) for seed in range(2)], drafting)
        texts = [text(acceptance, tokens, first + 100 + seed) for seed in range(400)]
        shares.append(decoding_seconds(machine, texts, drafting) / (len(texts) * tokens * machine.alone))
    assert sum(shares) / len(shares) < 1.02
    assert max(shares) < 1.03


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_calls_of_two_tokens_are_not_drafted_for(acceptance, chains):
    """None of their rounds tells whether that pays, and the drafter has to read their prompts for it."""
    machine = Machine(noise=0.0, stalls=0.0, prompts=(50.0, 40.0))
    assert set(automatically(machine, [text(acceptance, 2, seed) for seed in range(50)], chains())) == {0}


@pytest.mark.parametrize("is_first", [False, True], ids=["after longer ones", "from the first on"])
@pytest.mark.parametrize("acceptance", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("tokens", [3, 4, 8, 16])
def test_answers_that_do_not_pay_for_reading_their_prompts_are_not_drafted(tokens, acceptance, is_first, chains):
    """With a drafter as large as its target, which reads them as slowly, and a head that it would pay for to spare.
    What it takes to find out is left out: a call or two."""
    machine, drafting = Machine(10.0, 0.5, 3.0, noise=0.05, stalls=0.01, prompts=(150.0, 150.0)), chains()
    if not is_first:
        automatically(machine, [text(acceptance, 100, seed) for seed in range(4)], drafting, 1000)
    texts = [text(acceptance, tokens, 100 + seed) for seed in range(260)]
    automatically(machine, texts[:10], drafting, 1000)
    before = machine.now
    automatically(machine, texts[10:], drafting, 1000)
    assert machine.now - before < 1.04 * 250 * (150.0 + tokens * 10.0)


def test_long_answers_to_long_prompts_are_drafted(chains):
    """Also where short ones came before, and from where their length pays for it on."""
    machine, drafting = Machine(10.0, 0.5, 3.0, noise=0.0, stalls=0.0, prompts=(150.0, 150.0)), chains()
    automatically(machine, [text(0.95, 100, seed) for seed in range(4)], drafting, 1000)
    for seed in range(10):
        steps = automatically(machine, [text(0.95, 4, seed)], drafting, 1000)
        assert seed < 8 or not any(steps)
    steps = automatically(machine, [text(0.95, 400, 7)], drafting, 1000)
    assert sum(steps[-20:]) / 20 > 3 and steps.index(next(filter(None, steps))) < 60


@pytest.mark.parametrize("stall", [3.0, 6.0, 10.0])
@pytest.mark.parametrize("unlucky", [1, 2, 3])
def test_a_stall_in_the_first_drafts_does_not_keep_it_from_drafting(stall, unlucky, chains):
    """Also where they are missed. The rest after it is short, and the next trial takes their time anew."""
    rng, shares = random.Random(1), []
    for stalled in range(5):
        known = [Token(place >= unlucky and rng.random() < 0.8, 0.6) for place in range(400)]
        machine, drafting, rounds = Machine(*COSTS["flat"], noise=0.0, stalls=0.0), chains(2), 0
        call = AutomaticCall(drafting, lambda machine=machine: machine.now)

        def tell(accepted, call=call, stalled=stalled, machine=machine):
            nonlocal rounds
            machine.now += (stall - 1) * machine.alone if rounds == stalled else 0.0
            rounds += 1
            call.end_round(accepted)

        def draft(coming, call=call):
            most = min(call.begin_round(len(coming) - 1).steps, len(coming) - 1)
            if call.ends_early:
                return next((n for n, one in enumerate(coming[:most], 1) if not call.goes_on(one.drafted)), most)
            return most

        generate_text(machine, known, draft, call.has_drafted, tell)
        shares.append(best_fixed(machine, [known]) / (machine.now - (stall - 1) * machine.alone))
    assert min(shares) > 0.55


@pytest.mark.parametrize("stalled", [2, 5])
@pytest.mark.parametrize("cost", COSTS)
def test_stalls_in_the_first_longer_drafts_do_not_keep_drafts_short(cost, stalled, chains):
    """As where a computer does something once for each length. No other length tells that it does not any more."""
    ratios = []
    for seed in range(4):
        machine, texts = Machine(*COSTS[cost], stalls=0.0, seed=seed), [uneven_text(0.7, 250, seed) for _ in range(12)]
        best, run, longer = best_fixed(machine, texts), machine.run, 0

        def run_and_stall(steps: int, *others, machine=machine, run=run) -> None:
            nonlocal longer
            run(steps, *others)
            longer += steps > 2
            if steps > 2 and longer <= stalled:
                machine.now += 4 * machine.seconds(steps)

        machine.run = run_and_stall
        ratios.append(best / sum(map(machine.seconds, automatically(machine, texts, chains()))))
    assert min(ratios) > 0.95


@pytest.mark.parametrize("tree", [TREE, TreeConfig()], ids=str)
@pytest.mark.parametrize("acceptance", [0.0, 0.5])
@pytest.mark.parametrize("cost", [(12.0, 3.0, 7.0), (5.0, 1.0, 10.0)], ids=str)
@pytest.mark.parametrize("tokens", [3, 4, 6])
def test_trees_in_calls_that_never_have_room_for_them_rest_where_they_lose(tokens, cost, acceptance, tree):
    """A tree that is cut tells of one with as many steps as there was room for. Deeper ones are still thought to be
    better than those, where the steps that were seen are many of them accepted."""
    alone, fixed, step = cost
    shares, count = [], 300
    for first in range(0, 6000, 1000):
        machine = Machine(alone, fixed, step, noise=0.0, stalls=0.0)
        texts = [text(acceptance, tokens, first + seed) for seed in range(count)]
        drafting = AutomaticDrafting(shapes_of(tree))
        for known in texts:
            call = AutomaticCall(drafting, lambda machine=machine: machine.now)
            # The target reads the prompt first, with which a tree cannot be verified.
            call.begin_round(0)
            machine.now += 50.0
            call.end_round(0)
            draft = lambda coming, call=call: call.begin_round(len(coming) - 1).steps  # noqa: E731
            generate_text(machine, known, draft, call.has_drafted, call.end_round)
        shares.append((machine.now - count * 50.0) / (count * tokens * alone))
    assert sum(shares) / len(shares) < 1.08
    assert max(shares) < 1.2


def test_a_settled_tree_that_texts_have_no_room_for_does_not_keep_other_policies_from_being_tried():
    drafting, machine, chosen = AutomaticDrafting(shapes_of(TREE), 2), Machine(noise=0.0, stalls=0.0), set()
    for _ in range(30):
        call = AutomaticCall(drafting, lambda: machine.now)
        for room in (3, 2, 1):
            shape = call.begin_round(room, shape_of(5, TREE))
            chosen.add(shape.policy)
            machine.run(min(room, shape.steps))
            call.end_round(0)
    assert chosen == {0, 1}


@pytest.mark.parametrize(("tokens", "acceptance"), [(3, 0.7), (4, 0.7), (3, 0.8), (6, 0.9), (8, 0.9)])
def test_short_calls_gain_what_drafts_of_one_length_would(tokens, acceptance, chains):
    """What is accepted to the end of a text counts as what is missed before it does."""
    texts = [text(acceptance, tokens, seed, probability=acceptance) for seed in range(600)]
    machine = Machine(12.0, 1.0, 3.0, noise=0.0, stalls=0.0)
    automatically(machine, texts, chains())
    assert machine.now < best_fixed(machine, texts) / 0.95


def test_prompts_that_the_target_reads_in_any_case_are_no_cost_of_drafts(chains):
    """Drafting gains here, in every other pair of texts, and has to be tried again soon in the next one."""
    shares = []
    for seed in range(4):
        texts = [text(0.9 if index % 4 < 2 else 0.0, 32, 100 * seed + index) for index in range(200)]
        machine = Machine(noise=0.0, stalls=0.0, prompts=(200.0, 0.0))
        unread = Machine(noise=0.0, stalls=0.0)
        shares.append(decoding_seconds(machine, texts, chains()) / decoding_seconds(unread, texts, chains()))
    assert sum(shares) / len(shares) < 1.03


@pytest.mark.parametrize("acceptance", [0.0, 0.9])
@pytest.mark.parametrize("room", [2, 3])
def test_drafts_that_there_is_little_room_for_tell_of_acceptance(room, acceptance, chains):
    """They are shorter ones, and the last round of a call tells of them too."""
    machine, drafting = Machine(), chains()
    automatically(machine, [text(acceptance, room + 1, seed) for seed in range(300)], drafting)
    assert drafting._expected.tokens(DraftShape(1, 1)) == pytest.approx(1 + acceptance, abs=0.2)


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_the_token_that_ends_a_text_in_the_midst_of_a_draft_is_no_miss(accepted):
    """Whether it was drafted too nobody says."""
    drafting = AutomaticDrafting(shapes_of(None))
    call = AutomaticCall(drafting)
    call.begin_round(99, DraftShape(4, 4))
    before = drafting._expected.tokens(DraftShape(4, 4))
    call.end_round(accepted, is_last=True)
    call.end_call()
    after = drafting._expected.tokens(DraftShape(4, 4))
    assert after > before if accepted == 4 else after == before


def test_a_draft_that_something_else_ended_is_as_short_as_it_was():
    """As one that a threshold ended, which is no miss of all that was not drafted."""
    drafting, recorded = AutomaticDrafting(shapes_of(None)), []
    drafting.record = lambda round, ended: recorded.append(round)
    call = AutomaticCall(drafting)
    call.begin_round(99, DraftShape(4, 4))
    call.has_drafted(1)
    call.end_round(1, is_last=True)
    call.begin_round(99, DraftShape(4, 4))
    call.has_drafted()
    call.end_round(1, is_last=True)
    call.end_call()
    assert [(one.steps, one.is_known) for one in recorded] == [(1, True), (4, False)]


def test_rounds_that_change_nothing_are_learnt_of_together():
    """None is forgotten, also where a call or all rounds end before anything is settled anew."""
    machine, drafting = Machine(noise=0.0, stalls=0.0), AutomaticDrafting(shapes_of(None, True), ends_early=True)
    told, learnt, waiting = [], [], []
    for name, seen in ("record", told), ("_learn_from", learnt):
        method = getattr(drafting, name)
        setattr(drafting, name, lambda round, *ended, m=method, s=seen: (s.append(round), m(round, *ended)))
    for tokens in (200, 1, 5, 33, 200):
        automatically(machine, [text(0.7, tokens, tokens)], drafting)
        waiting.append(len(told) - len(learnt))
    assert 0 < max(waiting) < 8
    drafting.begin_call(machine.now)
    assert learnt == told


@pytest.mark.parametrize("tree", [TreeConfig(5, 3, 2), TREE, TreeConfig(32, 5, 8), TreeConfig(60, 7, 10)], ids=str)
def test_trees_that_look_like_chains_are_cut_like_trees(tree):
    """Where there is no room for them. No size of tree that nothing is known of comes of it."""
    for shape in shapes_of(tree):
        drafting, now = AutomaticDrafting(shapes_of(tree)), [0.0]
        call = AutomaticCall(drafting, lambda now=now: now[0])
        for room in (99, *range(shape.steps), 99):
            call.begin_round(room, shape)
            now[0] += 10.0
            call.end_round(0)
        assert set(drafting._expected._acceptance._counts) == {one.nodes for one in shapes_of(tree)}


def test_first_rounds_are_no_credit_for_trials_where_the_target_alone_was_never_timed():
    """As where only the policy is to be chosen."""
    drafting, now, recorded = AutomaticDrafting(shapes_of(None), 2), [0.0], []
    drafting.record = lambda round, ended: recorded.append(round.seconds)
    call = AutomaticCall(drafting, lambda: now[0])
    call.begin_round(99, FIVE)
    now[0] += 5.0
    call.has_drafted()
    now[0] += 45.0
    call.end_round(2)
    call.begin_round(99, FIVE)
    assert recorded == [pytest.approx(50.0)]


def test_a_settled_length_that_texts_have_no_room_for_does_not_keep_other_policies_from_being_tried():
    drafting, machine, chosen = AutomaticDrafting(shapes_of(None), 2), Machine(noise=0.0, stalls=0.0), set()
    for _ in range(30):
        call = AutomaticCall(drafting, lambda: machine.now)
        for room in (8, 5, 2):
            shape = call.begin_round(room, DraftShape(LONGEST, LONGEST))
            chosen.add(shape.policy)
            machine.run(min(room, shape.steps))
            call.end_round(2)
    assert chosen == {0, 1}


@pytest.mark.parametrize("early", [False, True])
def test_drafts_without_room_are_no_trials(early):
    """What they cost is not taken from what trials of other policies may."""
    drafting = AutomaticDrafting(shapes_of(None, early), 2, early)
    machine = Machine(noise=0.0, stalls=0.0)
    automatically(machine, [text(0.8, 400, 1)], drafting)
    lost, policies = drafting._trials._lost, set()
    for _ in range(20):
        call, room = AutomaticCall(drafting, lambda: machine.now), 3
        while room:
            shape = call.begin_round(room)
            policies.add(shape.policy if shape.steps else None)
            machine.run(min(shape.steps, room))
            call.end_round(0)
            room -= 1
        if len(policies) == 1:
            assert drafting._trials._lost <= lost


@pytest.mark.parametrize(
    ("tree", "recorded"), [(None, DraftShape(3, 3)), (TREE, DraftShape(3, 23))], ids=["chain", "tree"]
)
def test_drafts_that_there_is_little_room_for_are_timed_as_shorter_ones(tree, recorded):
    machine, drafting = Machine(noise=0.0, stalls=0.0), AutomaticDrafting(shapes_of(tree))
    call, whole = AutomaticCall(drafting, lambda: machine.now), shape_of(5, tree)
    for room in (9, 3, 0):
        machine.run(call.begin_round(room, whole).steps)
        call.end_round(0)
    assert drafting._expected.count(recorded) == 1
    assert drafting._expected.count(whole) == 0


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_trials_that_there_is_little_room_for_are_paid_for_too(tree):
    machine, drafting = Machine(noise=0.0, stalls=0.0), AutomaticDrafting(shapes_of(tree))
    automatically(machine, [text(0.9, 600, 1)], drafting)
    drafting._compare()
    call = AutomaticCall(drafting, lambda: machine.now)
    assert call.begin_round(2).steps > 2
    machine.now += 500.0
    call.has_drafted()
    # The target reads the prompt, which it would without drafts too.
    machine.now += 1000.0
    call.end_round(0)
    call.begin_round(0)
    assert drafting._rests._lost == pytest.approx(500.0)


def test_while_it_loses_next_to_nothing_is_drafted(chains):
    """The trials that find out whether it still does take their share of the time at most, after the first ones."""
    machine, drafting = Machine(fixed=2.0, step=4.0), chains()
    automatically(machine, [text(0.1, 200, 1)], drafting)
    steps = automatically(machine, [text(0.1, 2000, 2), text(0.1, 2000, 3)], drafting)
    lost = sum(machine.seconds(one) - machine.alone for one in steps if one)
    assert 0 < lost < 0.015 * sum(map(machine.seconds, steps))


def test_drafts_that_end_early_bring_more_than_the_best_length():
    """Where drafters are sure of some tokens and guess others; on a machine with its noise, priced without."""
    ratios = []
    for cost in COSTS.values():
        for acceptance in (0.5, 0.7, 0.85):
            texts = [uneven_text(acceptance, 200, seed) for seed in range(12)]
            machine = Machine(*cost, noise=0.1, stalls=0.02)
            steps = automatically(machine, texts, AutomaticDrafting(shapes_of(None, True), ends_early=True))
            ratios.append(best_fixed(machine, texts) / sum(map(machine.seconds, steps)))
    assert min(ratios) > 0.97
    assert sum(ratios) / len(ratios) > 1.0


def test_a_drafter_that_finds_all_of_its_tokens_improbable_is_told_apart_too():
    """Where some of them are four times as probable as others."""
    ratios = []
    for cost in COSTS.values():
        rng = random.Random(1)
        sure = [[rng.random() < 0.7 for _ in range(200)] for _ in range(12)]
        texts = [[Token(rng.random() < (0.9 if one else 0.2), 0.08 if one else 0.02) for one in of] for of in sure]
        machine = Machine(*cost, noise=0.1, stalls=0.02)
        steps = automatically(machine, texts, AutomaticDrafting(shapes_of(None, True), ends_early=True))
        ratios.append(best_fixed(machine, texts) / sum(map(machine.seconds, steps)))
    assert sum(ratios) / len(ratios) > 1.03


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_a_draft_ends_before_a_length_that_costs_much_or_goes_well_past_it(rows):
    """As on a CPU, where the target's projection is read once more for every few tokens."""
    ratios = []
    for acceptance in (0.5, 0.7, 0.85):
        texts = [uneven_text(acceptance, 200, seed) for seed in range(12)]
        machine = Machine(18.0, 2.0, 1.3, noise=0.1, stalls=0.02, again=10.0, rows=rows)
        steps = automatically(machine, texts, AutomaticDrafting(shapes_of(None, True), ends_early=True))
        ratios.append(best_fixed(machine, texts) / sum(map(machine.seconds, steps)))
    assert min(ratios) > 0.95


# Where drafting is seldom or never worth it: what a round alone takes, and how much longer one with a draft does.
LOSING = {"as small as its drafter": (5.0, 1.0, 5.0), "half as small": (5.0, 0.7, 2.5), "usual": (12.9, 1.5, 1.9)}


@pytest.mark.parametrize("acceptance", [0.0, 0.1])
@pytest.mark.parametrize("cost", LOSING)
def test_a_first_call_in_which_drafting_loses_is_hardly_slower_than_without(cost, acceptance, chains):
    """Nothing is known before it, and it is short. The time is priced without the noise that nobody can help."""
    shares = []
    for seed in range(16):
        machine, known = Machine(*LOSING[cost], seed=seed), text(acceptance, 128, 100 + seed)
        steps = automatically(machine, [known], chains(2))
        shares.append(len(known) * machine.alone / sum(map(machine.seconds, steps)))
    assert sum(shares) / len(shares) > 0.97


def test_where_no_acceptance_would_do_next_to_nothing_is_drafted(chains):
    """The costs alone tell, so that it does not matter that the drafter is always right."""
    machine = Machine(*LOSING["as small as its drafter"], noise=0.0, stalls=0.0)
    steps = automatically(machine, [text(1.0, 128, 1)], chains(2))
    assert sum(steps) <= 4


def bring_to_rest(machine: Machine, drafting: AutomaticDrafting) -> None:
    """By texts of which the drafter knows nothing, of which the last does not end while drafting is tried again."""
    automatically(machine, [text(0.0, 300, 1)], drafting)
    for seed in range(50):
        if drafting.is_resting:
            return
        automatically(machine, [text(0.0, 20, 100 + seed)], drafting)
    raise AssertionError("it does not come to rest")


def test_it_drafts_again_when_drafts_are_good_again(chains):
    machine, drafting = Machine(), chains()
    bring_to_rest(machine, drafting)
    steps = automatically(machine, [text(0.9, 1500, 2)], drafting)
    assert not drafting.is_resting
    assert sum(steps[-50:]) / 50 > 4


def test_after_many_texts_that_it_cannot_draft_it_drafts_the_next_one(chains):
    """Rests end, however often drafting has lost."""
    machine, drafting = Machine(), chains()
    automatically(machine, [text(0.0, 300, seed) for seed in range(40)], drafting)
    steps = automatically(machine, [text(0.9, 1500, 100)], drafting)
    assert sum(steps[-50:]) / 50 > 4


def test_a_passage_that_it_cannot_draft_costs_little_of_a_text_that_it_can():
    """A rest would go on into what is easy again, where drafts had gained what it takes to try sooner."""
    ratios = []
    for seed in range(12):
        rng, texts = random.Random(seed), []
        for _ in range(16):
            is_easy, known = rng.random() < 0.6, []
            for _ in range(128):
                is_easy ^= rng.random() < 1 / 40
                probability = rng.random()
                is_known = rng.random() < probability ** (1 / (0.8 if is_easy else 0.1) - 1)
                known.append(Token(is_known, probability))
            texts.append(known)
        machine = Machine(18.0, 4.0, 1.3, stalls=0.01, seed=seed)
        steps = automatically(machine, texts, AutomaticDrafting(shapes_of(None, True), ends_early=True))
        ratios.append(best_fixed(machine, texts) / sum(map(machine.seconds, steps)))
    assert sum(ratios) / len(ratios) > 0.97


def test_bad_luck_with_the_first_drafts_costs_little_of_the_text_after_them(chains):
    """The first rests are short, and what it takes to try again is one draft."""
    ratios = []
    for seed in range(24):
        known = [*text(0.0, 8, seed), *text(0.8, 250, 100 + seed)]
        machine = Machine(14.5, 3.6, 1.6, seed=seed)
        steps = automatically(machine, [known], chains())
        ratios.append(best_fixed(machine, [known]) / sum(map(machine.seconds, steps)))
    assert sum(ratios) / len(ratios) > 0.89
    assert min(ratios) > 0.65


def test_what_is_never_right_is_tried_with_one_draft_at_a_time(chains):
    machine, drafting = Machine(stalls=0.0), chains()
    bring_to_rest(machine, drafting)
    steps = automatically(machine, [text(0.0, 3000, 1)], drafting)
    assert 3 < sum(one > 0 for one in steps) < 20
    assert not any(one and other for one, other in pairwise(steps))


@pytest.mark.parametrize("stalled", ["drafted", "alone"])
def test_two_stalls_do_not_decide_a_comparison(stalled):
    compared = SideBySide(DraftShape(2, 2))
    while not compared.is_over:
        shape = compared.choose()
        is_first = len(compared._drafted if shape.steps else compared._alone) < 2
        has_stalled = is_first and (stalled == "drafted") == (shape.steps > 0)
        compared.add(shape, 6.0 if has_stalled else 1.0)
    assert compared.alone_is_longer_by(lambda shape: 2.0 if shape.steps else 1.0) == 2.0


@pytest.mark.parametrize("stalled", [1, 2])
def test_a_stall_while_drafting_is_tried_again_does_not_make_the_next_rest_long(stalled, chains):
    """Nor does the first round, which reads the text too and may well take that long."""
    machine, drafting = Machine(stalls=0.0), chains()
    bring_to_rest(machine, drafting)
    run, drafts = machine.run, []

    def run_and_stall(steps: int, *others) -> None:
        run(steps, *others)
        drafts.extend([steps] * (steps > 0))
        if steps and len(drafts) == stalled:
            # For less than the time without a round after which drafting is tried again anyway.
            machine.now += 40 * machine.seconds(steps)

    machine.run = run_and_stall
    while len(drafts) < stalled or not drafting.is_resting:
        automatically(machine, [text(0.0, 20, 3)], drafting)
    steps = automatically(machine, [text(0.9, 1500, 2)], drafting)
    assert sum(steps[-50:]) / 50 > 4


@pytest.mark.parametrize("stalled", [0, 1])
def test_what_takes_long_is_found_out_in_a_few_rounds(stalled):
    """Though a stall is not believed, and without taking other shapes for shorter than they are."""
    times = RoundTimes()
    for _ in range(10):
        for shape, seconds in (((0, 0), 10.0), ((1, 1), 12.0), ((4, 4), 15.0)):
            times.add(shape, seconds)
    for seconds in [*stalled * [600.0], *4 * [69.0]]:
        times.add((12, 12), seconds)
    assert times.typical((12, 12)) == pytest.approx(69.0, rel=0.05)
    for _ in range(10):
        times.add((4, 4), 15.0)
    assert times.typical((4, 4)) == pytest.approx(15.0, rel=0.01)


@pytest.mark.parametrize("tokens", [4, 5, 8])
def test_a_short_call_at_first_does_not_keep_it_from_trying_longer_drafts(tokens, chains):
    """Where a draft of one token loses, and one of four gains."""
    shares = []
    for seed in range(40):
        machine, drafting = Machine(10.0, 7.0, 1.0, noise=0.0, stalls=0.0), chains()
        texts = [text(0.7, tokens, seed), *[text(0.7, 128, 100 * seed + index) for index in range(1, 4)]]
        automatically(machine, texts, drafting)
        shares.append(machine.now / (machine.alone * sum(map(len, texts))))
    assert sum(shares) / len(shares) < 0.835


def test_a_comparison_without_times_ends_with_drafts_where_they_pay(chains):
    """Its turns were used up by rounds that tell nothing, while drafts were accepted."""
    machine, drafting = Machine(noise=0.0, stalls=0.0), chains()
    automatically(machine, [text(0.9, 600, 1)], drafting)
    drafting._compare()
    drafting._comparison.turns = 24
    assert drafting.choose().steps > 0
    assert not drafting.is_resting


def test_what_takes_no_longer_is_told_of_the_same_policy_alone():
    """A draft with another one may take less, and nothing is told of drafts by rounds without."""
    times = RoundTimes()
    for shape, seconds in (((0, 0, 0), 10.0), ((1, 1, 0), 40.0), ((4, 4, 0), 50.0), ((2, 2, 2), 15.0)):
        times.add(shape, seconds)
    within = [
        times.longest_within(shape) for shape in ((0, 0, 0), (1, 1, 0), (3, 3, 0), (5, 5, 0), (1, 1, 1), (3, 3, 3))
    ]
    assert within == pytest.approx([0.0, 40.0, 40.0, 50.0, 0.0, 15.0], rel=0.01)
    times.forget_drafts()
    assert times.longest_within((5, 5, 0)) == times.drafted == 0
    assert times.count((0, 0, 0)) == 1


class ColdMachine(Machine):
    """Of the first ten rounds three in ten are stalls, of up to so many times the usual length."""

    def __init__(self, longest: float, seed: int):
        super().__init__(20.0, 4.0, 2.4, noise=0.08, stalls=0.0, seed=seed)
        self.longest, self.rounds = longest, 0

    def run(self, steps: int, has_drafted: Callable[[], None] = lambda: None) -> None:
        self.rounds += 1
        is_stall = self.rounds <= 10 and self.random.random() < 0.3
        self.pace = self.random.uniform(2, self.longest) if is_stall else 1.0
        super().run(steps, has_drafted)


@pytest.mark.parametrize("longest", [10.0, 50.0])
def test_stalls_at_first_do_not_keep_it_from_drafting(longest):
    """Trials after a rest began with a round that reads more, which nobody believed, and ended with it: as all drafts
    that were timed had been stalls, no other was timed ever after."""
    shares = []
    for seed in range(60):
        machine, drafting = ColdMachine(longest, seed), AutomaticDrafting(shapes_of(None, True), ends_early=True)
        steps = automatically(machine, [text(0.72, 128, 100 * seed + index) for index in range(18)], drafting)
        shares.append(sum(one > 0 for one in steps) / len(steps))
    assert min(shares) > 0.5


def test_each_trial_goes_by_what_is_known_then():
    """How sure a draft has to be to go on is not kept from one trial for all later ones."""
    drafting = AutomaticDrafting(shapes_of(None, True), ends_early=True)
    machine, seen = Machine(noise=0.0, stalls=0.0), []
    bring_to_rest(machine, drafting)
    for _ in range(3):
        drafting._compare()
        seen.append(drafting.early_end(drafting.choose())._least)
        automatically(machine, [text(0.0, 40, 1)], drafting)
    assert len({id(least) for least in seen}) == 3


@pytest.mark.parametrize("change", ["weights", "time"])
def test_a_change_ends_a_rest(change, monkeypatch, chains):
    machine, drafting = Machine(), chains()
    bring_to_rest(machine, drafting)
    drafting._rests._tokens += 1000
    # As many as the trial before is paid for by.
    assert automatically(machine, [text(0.9, 100, 2)], drafting).count(0) == 100
    if change == "weights":
        drafting.renew()
    else:
        machine.now += 3600
    assert automatically(machine, [text(0.9, 10, 2)], drafting)[0] > 0


def test_calls_of_one_token_do_not_count_as_time_without_calls(chains):
    """Whose only round ends with them, so that nothing is recorded of it."""
    machine, drafting = Machine(), chains()
    bring_to_rest(machine, drafting)
    drafting._rests._tokens += 1000
    assert not any(automatically(machine, [text(0.9, 1, seed) for seed in range(200)], drafting))
    assert machine.now > 1200
    assert drafting.is_resting


def test_it_says_once_that_drafting_rests(chains):
    machine, drafting = Machine(fixed=5.0), chains()
    with pytest.warns(UserWarning, match="drafting does not pay here") as said:
        automatically(machine, [text(0.0, 500, seed) for seed in range(3)], drafting)
        drafting.renew()
        automatically(machine, [text(0.0, 500, 4)], drafting)
    assert len(said) == 1


@pytest.mark.parametrize("seed", range(8))
def test_it_says_by_how_much_drafting_loses(seed, chains):
    """By what it rests for, also where drafts are nearly worth it."""
    machine = Machine(alone=0.010, fixed=0.002, step=0.003, noise=0.1, stalls=0.0, seed=seed)
    with pytest.warns(UserWarning, match="drafting does not pay here") as said:
        automatically(machine, [text(0.42, 500, 10 * seed + one) for one in range(4)], chains())
    alone, drafted = map(float, re.findall(r"([\d.]+) ms", str(said[0].message)))
    # To three figures, of two speeds that may be nearly the same.
    assert 8 < alone <= drafted < 16


def test_the_sizes_of_trees_are_told_apart():
    """Large trees bring a little more and cost much more here, and deep ones nothing."""
    drafting, rng, chosen = AutomaticDrafting(shapes_of(TreeConfig(60, 5, 10))), random.Random(0), []
    now = [0.0]
    call = AutomaticCall(drafting, lambda: now[0])
    for _ in range(400):
        shape = call.begin_round(99)
        chosen.append(shape)
        now[0] += 10 + 0.5 * shape.steps + 0.5 * shape.nodes
        accepted = 0
        while accepted < min(shape.steps, 3) and rng.random() < 0.7 + shape.nodes / 600:
            accepted += 1
        call.end_round(accepted)
    latest = chosen[-100:]
    assert max(set(latest), key=latest.count) == DraftShape(3, 7)


@pytest.mark.parametrize("power", [0.1, 0.2, 0.3])
def test_little_is_lost_to_the_best_size_of_trees(power):
    """Larger ones miss less often, by a power of their size; which power that is nobody knows beforehand."""
    shapes, speeds = shapes_of(TreeConfig(60, 5, 10)), []

    def acceptance(shape: DraftShape) -> float:
        return 1.0 - 0.45 * (7 / shape.nodes) ** power

    def seconds(shape: DraftShape) -> float:
        return 10.0 + 0.5 * shape.steps + 0.05 * shape.nodes

    best = max(expected_tokens([acceptance(one)], one.steps) / seconds(one) for one in shapes)
    for seed in range(5):
        drafting, rng, now = AutomaticDrafting(shapes), random.Random(seed), [0.0]
        call, took, tokens = AutomaticCall(drafting, lambda now=now: now[0]), 0.0, 0
        for _ in range(300):
            shape, accepted = call.begin_round(99), 0
            while accepted < shape.steps and rng.random() < acceptance(shape):
                accepted += 1
            now[0] += seconds(shape) * rng.lognormvariate(0, 0.05)
            took, tokens = took + seconds(shape), tokens + accepted + 1
            call.end_round(accepted)
        speeds.append(tokens / took)
    assert sum(speeds) / len(speeds) > 0.94 * best


@pytest.mark.parametrize(
    "tree",
    [TreeConfig(), TreeConfig(2, 0, 1), TreeConfig(3, 5, 2), TreeConfig(4096, 128, 512), TreeConfig(9, 12, 2), TREE],
    ids=str,
)
def test_every_shape_of_a_tree_can_be_drafted_and_is_weighed(tree):
    shapes = shapes_of(tree)
    assert 0 < len(shapes) <= 4 * LONGEST
    for shape in shapes:
        TreeConfig(shape.nodes + 1, shape.steps - 1, tree.top_k)
        assert shape.nodes < tree.total_tokens
        assert shape.steps <= tree.depth + 1
    now, drafting = [0.0], AutomaticDrafting(shapes)
    call, chosen = AutomaticCall(drafting, lambda: now[0]), []
    for _ in range(60):
        chosen.append(call.begin_round(99))
        now[0] += 10 + chosen[-1].steps
        call.end_round(chosen[-1].steps)
    # All of every path is accepted, and nodes cost nothing.
    assert max(set(chosen[-20:]), key=chosen[-20:].count).steps == shapes[-1].steps


def test_what_a_seldom_tried_shape_takes_follows_from_the_others():
    times = RoundTimes()
    for _ in range(5):
        for steps in (2, 5):
            times.add(DraftShape(steps, steps), 10.0 + steps)
    assert times.expected(DraftShape(9, 9)) == pytest.approx(19.0, rel=0.01)
    times.add(ALONE, 8.0)
    assert times.expected(ALONE) == 8.0


def test_no_draft_is_expected_to_take_less_than_its_steps_and_the_target():
    """Where the longer drafts met a quieter machine than the short one, the line through both falls."""
    times = RoundTimes()
    times.add((0,), 22.0)
    times.add((1,), 27.0, 2.0)
    for _ in range(2):
        times.add((4,), 25.0, 5.0)
    for steps in (6, 8, 12):
        assert times.expected((steps,)) > 20.0 + steps


@pytest.mark.parametrize("drift", [0.0, 0.08], ids=["at one pace", "drifting"])
def test_what_another_step_takes_is_told_though_the_machine_drifts(drift):
    """It is less than what the pace goes up and down by, and less than the noise of a round."""
    errors = []
    for seed in range(20):
        times, machine = RoundTimes(), Machine(22.0, 4.4, 1.35, noise=0.06, stalls=0.02, seed=seed, drift=drift)
        for index in range(400):
            steps, began = min(LONGEST, int(machine.random.expovariate(0.3))), machine.now
            machine.run(steps)
            times.add((steps, steps), machine.now - began)
            if index > 80 and index % 40 == 0:
                seconds = [times.expected((steps, steps)) for steps in range(1, 9)]
                errors += [abs(more - less - machine.step) for less, more in pairwise(seconds)]
    assert sum(errors) / len(errors) < machine.step / 4


def test_a_step_that_takes_next_to_nothing_is_told_beside_others_that_do():
    """As a fifth row does where a kernel works on several at once: though none of it is noise or drift, what is held
    for that must not take the step to the line through all lengths."""
    seconds = (25.5, 29.3, 32.4, 36.0, 37.1, 37.6, 43.4)
    times, chosen = RoundTimes(), random.Random(0)
    for steps in [*range(7), *chosen.choices((2, 3, 4, 5), k=600)]:
        times.add((steps,), seconds[steps], steps)
        step = times.expected((5,)) - times.expected((4,))
    assert step < 1.0
    assert times.typical((5,)) - times.typical((4,)) == pytest.approx(0.5, abs=0.1)


def test_what_a_shape_took_while_the_machine_was_slow_is_forgotten():
    """Of one that is not drafted any more nothing else would tell that the machine is faster now. Of those that are,
    and of the target alone, all stays as it is."""
    times, slow, lasting = RoundTimes(), DraftShape(3, 3), (DraftShape(2, 2), DraftShape(5, 5))
    times.add(ALONE, 8.0)
    for _ in range(20):
        for shape in (slow, *lasting):
            times.add(shape, 1.2 * (10.0 + shape.steps), 1.2 * shape.steps)
    for _ in range(400):
        for shape in lasting:
            times.add(shape, 10.0 + shape.steps, shape.steps)
    for shape in lasting:
        assert times.expected(shape) == pytest.approx(10.0 + shape.steps, rel=0.03)
    assert times.expected(slow) == pytest.approx(13.0, rel=0.06)
    assert times.count(slow) >= 3 and times.expected(ALONE) == pytest.approx(8.0, rel=0.03)


def test_what_takes_long_is_seldom_told_anew():
    """A length that does take long is drafted again for that, and another policy's is not forgotten for it."""
    times, again, dear, other = RoundTimes(), 0, (6, 0), (6, 6)
    for _ in range(3):
        for shape, seconds in (((0, 0), 10.0), ((2, 0), 12.0), (dear, 40.0), (other, 40.0)):
            times.add(shape, seconds, shape[0])
    for _ in range(8000):
        times.add((2, 0), 12.0, 2.0)
        if not times.count(dear):
            assert times.expected(dear) < 20.0
            times.add(dear, 40.0, 6.0)
            again += 1
        assert times.expected(other) > 25.0
    assert 4 <= again <= 7


def test_what_was_learnt_is_bounded_and_follows_the_weights():
    learnt = LearntDrafting()
    first = learnt.under("greedy", None, 1)
    assert learnt.under("greedy", None, 1) is first
    for temperature in range(50):
        learnt.under(temperature, None, 1)
    assert len(learnt._learnt) <= 8
    assert learnt.under("greedy", None, 1) is not first
    machine, resting = Machine(), learnt.under("other", None, 1)
    bring_to_rest(machine, resting)
    resting._rests._tokens += 1000
    automatically(machine, [text(0.0, 100, 1)], resting)
    assert not learnt.under("other", None, 2).is_resting
    learnt.forget()
    assert learnt.under("other", None, 2) is not resting


# The choice of a policy, on such a machine ---------------------------------------------------------------------------


class Policies:
    """How long a draft step of each policy takes on a machine, and how likely its tokens are to be right, as shares of
    those of the first one."""

    def __init__(self, *steps_and_shares: tuple[float, float]):
        self._of = steps_and_shares
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def run(
        self,
        texts: int,
        choose: Callable[[AutomaticCall], DraftShape],
        drafting: AutomaticDrafting,
        noise: float,
        seed: int,
    ) -> tuple[float, list[int]]:
        """Rounds of so many texts of 200 tokens. Returns the seconds that they would take without noise, and how often
        each policy drafted."""
        rng, seconds, chosen = random.Random(seed), 0.0, [0] * len(self)
        for _ in range(texts):
            call, done = AutomaticCall(drafting, lambda: self._now), 0
            while done < 200:
                shape = choose(call)
                step, share = self._of[shape.policy]
                accepted = 0
                while accepted < shape.steps and rng.random() < 0.75 * share:
                    accepted += 1
                took = 10.0 + (1.0 + step * shape.steps if shape.steps else 0.0)
                seconds += took
                self._now += took * rng.lognormvariate(0, noise)
                chosen[shape.policy] += shape.steps > 0
                done += accepted + 1
                call.end_round(accepted)
        return seconds, chosen

    def best(self, texts: int, lengths: Sequence[int], seed: int) -> float:
        """Seconds of the best policy and length."""
        shapes = [DraftShape(steps, steps, policy) for policy in range(len(self)) for steps in lengths]
        unused = AutomaticDrafting(shapes_of(None))
        return min(self.run(texts, lambda call, shape=shape: shape, unused, 0.0, seed)[0] for shape in shapes)


PAIRS_OF_POLICIES = {
    "the first is faster": (Policies((1.0, 1.0), (1.6, 1.02), (2.5, 1.03)), 0),
    "the last is faster": (Policies((2.5, 1.03), (1.6, 1.02), (1.0, 1.0)), 2),
    "all are alike": (Policies((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), None),
}


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("fixed", [FIVE, None], ids=["chains of five", "any length"])
@pytest.mark.parametrize("case", PAIRS_OF_POLICIES)
def test_little_is_lost_to_the_best_policy_known_in_hindsight(case, fixed, noise):
    policies, best = PAIRS_OF_POLICIES[case]
    shares = []
    for seed in range(4):
        drafting = AutomaticDrafting(shapes_of(None), len(policies))
        seconds, chosen = policies.run(16, lambda call: call.begin_round(99, fixed), drafting, noise, seed)
        shares.append(policies.best(16, [5] if fixed else [3, 4, 5, 6, 8], seed) / seconds)
        assert best is None or chosen[best] == max(chosen)
    assert sum(shares) / len(shares) > (0.985 if fixed else 0.94)


def test_a_policy_whose_drafts_are_better_is_found():
    """It is hardly slower, so that only the tokens tell."""
    often = [0, 0]
    for seed in range(4):
        drafting, policies = AutomaticDrafting(shapes_of(None), 2), Policies((1.0, 0.9), (1.02, 1.0))
        policies.run(60, lambda call: call.begin_round(99, FIVE), drafting, 0.05, seed)
        _, chosen = policies.run(20, lambda call: call.begin_round(99, FIVE), drafting, 0.05, 10 + seed)
        often = [before + now for before, now in zip(often, chosen, strict=True)]
    assert often[1] > 2 * often[0]


@pytest.mark.parametrize(("shares", "least"), [((0.9, 1.1), 0.9), ((1.1, 0.9), 0.97)], ids=["first", "second"])
def test_a_policy_whose_drafts_are_much_worse_is_found_out(shares, least):
    """By few trials, though it takes as long as the other one. Put first it costs more until that one is tried."""
    policies, parts = Policies(*((1.0, share) for share in shares)), []
    for seed in range(6):
        drafting = AutomaticDrafting(shapes_of(None), 2)
        seconds, _ = policies.run(16, lambda call: call.begin_round(99, FIVE), drafting, 0.05, seed)
        parts.append(policies.best(16, [5], seed) / seconds)
    assert sum(parts) / len(parts) > least


@pytest.mark.parametrize("fixed", [FIVE, None], ids=["chains of five", "any length"])
def test_calls_of_one_round_each_are_never_timed_and_go_on(fixed):
    drafting, now = AutomaticDrafting(shapes_of(None), 3), 0.0
    for _ in range(60):
        call = AutomaticCall(drafting, lambda: now)
        assert call.begin_round(99, fixed).steps > 0
        call.end_round(2)
        call.begin_round(0)


def test_a_policy_that_became_faster_is_found():
    drafting = AutomaticDrafting(shapes_of(None), 2)
    Policies((1.0, 1.0), (3.0, 1.0)).run(8, lambda call: call.begin_round(99, FIVE), drafting, 0.05, 1)
    _, chosen = Policies((1.0, 1.0), (0.3, 1.0)).run(60, lambda call: call.begin_round(99, FIVE), drafting, 0.05, 2)
    assert chosen[1] > chosen[0]


# In several threads --------------------------------------------------------------------------------------------------


def interrupted(reads: Callable[[], object], interrupt: Callable[[], None], moment: int) -> bool:
    """Read, and before the operation of the interpreter of that number let another thread's work come in between.
    Returns whether there was such an operation."""
    left = [moment]

    def before_operation(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                interrupt()
        return before_operation

    sys.settrace(before_operation)
    try:
        reads()
    finally:
        sys.settrace(None)
    return left[0] <= 0


@pytest.mark.parametrize("name", ["is_resting", "reads_features"])
def test_a_rest_may_end_while_another_call_asks_about_it(name):
    drafting, moment = AutomaticDrafting(shapes_of(None)), 1
    drafting._rests._tokens = 24
    while interrupted(lambda: getattr(drafting, name), drafting.renew, moment):
        drafting._rests._tokens, moment = 24, moment + 1
    assert moment > 5


def test_what_was_learnt_is_read_by_one_call_at_a_time(monkeypatch):
    """Also for the warning, while other calls go on to learn."""
    machine, drafting, expected = Machine(fixed=2.0, step=4.0), AutomaticDrafting(shapes_of(None)), RoundTimes.expected
    read_alone = []
    monkeypatch.setattr(
        RoundTimes, "expected", lambda self, shape: read_alone.append(drafting._lock.locked()) or expected(self, shape)
    )
    with pytest.warns(UserWarning, match="rests"):
        automatically(machine, [text(0.0, 20, 1)] * 10, drafting)
    assert read_alone and all(read_alone)


# In generate ---------------------------------------------------------------------------------------------------------


class Whim(AutomaticDrafting):
    """Drafts something else every few rounds, and rests in between, whatever it costs."""

    def __init__(self, shapes: Sequence[DraftShape], policies: int = 1, ends_early: bool = False):
        super().__init__(shapes, policies, ends_early)
        self._random = random.Random(5)
        self._plan: list[DraftShape] = []
        self._left = 0

    @property
    def is_resting(self) -> bool:
        return self._left > 0

    @property
    def reads_features(self) -> bool:
        return self._left <= 3

    def choose(self, fixed: DraftShape | None = None, room: int = LONGEST) -> DraftShape:
        if fixed is not None:
            return fixed._replace(policy=self._random.randrange(self._policies))
        if self._left:
            self._left -= 1
            return ALONE
        if self._random.random() < 0.3:
            self._left = self._random.choice([0, 1, 7])
            return ALONE
        return self._random.choice(self._shapes)

    def early_end(self, shape: DraftShape) -> EarlyEnd | None:
        if not self._expected.tells_tokens_apart:
            return None
        likely = self._random.uniform(0.2, 0.9)
        acceptances = Acceptances([7 * [likely] + 5 * [0.3]] * len(Recurrence))
        return EarlyEnd(acceptances, LONGEST * (self._random.random(),))


class Overtaken(Whim):
    """Right after each choice to draft, another call finds that drafting is to rest."""

    _has_drafted = False

    @property
    def is_resting(self) -> bool:
        return self._has_drafted or super().is_resting

    @property
    def reads_features(self) -> bool:
        return not self._has_drafted

    def choose(self, fixed: DraftShape | None = None, room: int = LONGEST) -> DraftShape:
        shape = super().choose(fixed)
        self._has_drafted = shape.steps > 0
        return shape


@pytest.fixture
def even_pace(monkeypatch):
    """Rounds take what their shape says, whatever else the machine does meanwhile."""
    record = AutomaticDrafting.record

    def record_evenly(self, round, ended):
        record(self, round._replace(seconds=10.0 + 1.7 * round.steps), ended)

    monkeypatch.setattr(AutomaticDrafting, "record", record_evenly)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return soft()


def drafters(target: PreTrainedModel) -> dict[str, Callable]:
    return {
        "the target itself": lambda: copy.deepcopy(target),
        "another model": lambda: perturbed(target),
        "EAGLE-3": lambda: drafter_of(agreeing_head("eagle3"), target),
        "EAGLE-2": lambda: drafter_of(agreeing_head("eagle2"), target),
    }


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["the target itself", "another model", "EAGLE-2", "EAGLE-3"])
@pytest.mark.parametrize("policy", ["full", "hybrid"])
def test_tokens_are_the_same_whatever_is_drafted(policy, drafter, tree, target, monkeypatch):
    monkeypatch.setattr(automatic_call, "AutomaticDrafting", Whim)
    drafts = drafters(target)[drafter]()
    assistant = DynSpecAssistant(drafts, POLICY_CASES[policy](), target=target, tree=tree, num_assistant_tokens="auto")
    for seed in range(3):
        arguments = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 299}
        expected = target.generate(prompt(seed=seed), **arguments)
        assert torch.equal(target.generate(prompt(seed=seed), assistant_model=assistant, **arguments), expected)
    stats = assistant.stats_total
    assert 0 < sum(stats.drafted_at[:1]) and stats.tokens_per_round[1] > 0
    if drafter == "the target itself" and policy == "full" and not tree:
        # Whatever it had not read meanwhile, it has read by then.
        assert stats.accepted == stats.drafted


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["another model", "EAGLE-3"])
def test_what_was_drafted_is_shown_though_another_call_rests_meanwhile(drafter, tree, target, monkeypatch):
    monkeypatch.setattr(automatic_call, "AutomaticDrafting", Overtaken)
    drafts = drafters(target)[drafter]()
    assistant = DynSpecAssistant(drafts, target=target, tree=tree, num_assistant_tokens="auto")
    for seed in range(3):
        arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 299}
        expected = target.generate(prompt(seed=seed), **arguments)
        assert torch.equal(target.generate(prompt(seed=seed), assistant_model=assistant, **arguments), expected)
    assert assistant.stats_total.drafted


@pytest.mark.parametrize("length", [5, "auto"])
@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["the target itself", "EAGLE-3"])
def test_tokens_are_the_same_whichever_policy_drafts(drafter, tree, length, target, monkeypatch):
    """Each round has another policy, in a conversation too; what one has not seen of the text it reads later."""
    monkeypatch.setattr(automatic_call, "AutomaticDrafting", Whim)
    policies = [POLICY_CASES[name]() for name in ("hybrid", "screen", "full", "retrieval", "router", "union")]
    assistant = DynSpecAssistant(
        drafters(target)[drafter](),
        AutomaticShortlist(policies),
        target=target,
        tree=tree,
        num_assistant_tokens=length,
        validate=True,
    )
    text, arguments = prompt(), {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 299}
    for assistant_model in (assistant, conversation := assistant.conversation(), conversation):
        expected = target.generate(text, **arguments)
        assert torch.equal(target.generate(text, assistant_model=assistant_model, **arguments), expected)
        text = expected
    assert len(assistant.stats_total.rounds_of) >= 3
    assert "rounds drafted with" in str(assistant.stats_total)


def test_what_is_chosen_finds_out_by_itself(target, even_pace):
    """No policy is given up without a trial, and the counts say how often each one drafted."""
    assistant = DynSpecAssistant(copy.deepcopy(target), "auto", target=target)
    for seed in range(10):
        target.generate(prompt(seed=seed), assistant_model=assistant, max_new_tokens=60, do_sample=False)
    assert set(assistant.stats_total.rounds_of) == {"hybrid", "screen"}
    assert assistant.stats_total.to_dict()["rounds_of"] == dict(assistant.stats_total.rounds_of)


def test_all_policies_are_bound_and_closed_together(target):
    """What one of them cannot do is told when the assistant is bound, and nothing of the others is left open."""
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


def test_one_that_chooses_is_no_part_of_another():
    automatically = AutomaticShortlist([FullShortlist()])
    for make in (UnionShortlist, lambda *policies: AutomaticShortlist(policies)):
        with pytest.raises(ConfigurationError, match="the policy 'auto' cannot be a part"):
            make(FullShortlist(), automatically)
    for wrong in ("hybrid", FullShortlist(), 3, [], ["full"]):
        with pytest.raises(ConfigurationError, match="an automatic policy"):
            AutomaticShortlist(wrong)


def test_an_assistant_that_chooses_is_stored_with_all_its_policies(target, tmp_path):
    assistant = DynSpecAssistant(perturbed(target), AutomaticShortlist([FullShortlist(), InContextShortlist(30)]))
    config = DynSpecConfig(PolicyConfig("auto", assistant.policy.settings()))
    stored = DynSpecConfig.from_dict(config.to_dict()).policy
    loaded = POLICIES["auto"].from_settings(stored.settings, {})
    assert isinstance(loaded, AutomaticShortlist) and repr(loaded.policies) == repr(assistant.policy.policies)


@pytest.mark.parametrize("policy", POLICY_CASES)
def test_every_policy_goes_on_after_a_rest(policy, target, monkeypatch):
    """Its shortlists are held against the contract, and the tokens against the target's own."""
    monkeypatch.setattr(automatic_call, "AutomaticDrafting", Whim)
    assistant = DynSpecAssistant(
        perturbed(target), POLICY_CASES[policy](), target=target, num_assistant_tokens="auto", validate=True
    )
    conversation = assistant.conversation()
    expected = target.generate(prompt(), max_new_tokens=60, do_sample=False, eos_token_id=299)
    for assistant_model in (assistant, conversation):
        output = target.generate(
            prompt(), assistant_model=assistant_model, max_new_tokens=60, do_sample=False, eos_token_id=299
        )
        assert torch.equal(output, expected)


def test_a_drafter_that_is_never_right_is_left_alone(target, even_pace, monkeypatch):
    """It drafts a few tokens, rests longer and longer, and in a call that it rests through is not even shown the
    prompt."""
    assistant = DynSpecAssistant(tiny(seed=77), "full", target=target, num_assistant_tokens="auto")
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 299}
    with pytest.warns(UserWarning, match="drafting does not pay here") as told:
        for _ in range(3):
            target.generate(prompt(), assistant_model=assistant, **arguments)
    assert told[0].filename == __file__, "the user's line is named"
    assert assistant.stats_total.drafted < 80
    states = states_of(assistant.drafter, monkeypatch)
    for _ in range(3):
        states.clear()
        target.generate(prompt(), assistant_model=assistant, **arguments)
        if not assistant.stats.drafted:
            break
        assert any(one.length for one in states)
    assert assistant.stats.drafted == 0
    assert states and not any(one.length for one in states)


def states_of(drafter: Drafter, monkeypatch) -> list[DrafterState]:
    """What the drafter starts from now on, in order."""
    states, start = [], drafter.start
    monkeypatch.setattr(drafter, "start", lambda: states.append(start()) or states[-1])
    return states


@pytest.mark.parametrize("drafter", ["another model", "EAGLE-2", "EAGLE-3"])
def test_a_call_that_waits_with_its_prompt_is_drafted_later_and_stays_the_same(
    drafter, target, monkeypatch, even_pace
):
    """It is asked with what the drafter has not read, once, and the drafter reads nothing before the tokens that it is
    told to wait for."""
    asked, after = [], 12
    monkeypatch.setattr(AutomaticDrafting, "worth_after", lambda self, *given: asked.append(given) or after)
    assistant = DynSpecAssistant(drafters(target)[drafter](), target=target, num_assistant_tokens="auto")
    states, has_to_wait = states_of(assistant.drafter, monkeypatch), drafter.startswith("EAGLE")
    arguments = {"do_sample": False, "eos_token_id": 299}
    expected = target.generate(prompt(), max_new_tokens=60, **arguments)
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, max_new_tokens=60, **arguments), expected)
    # A head, which reads fast, drafts nothing before the target has read the prompt and chosen a token.
    assert asked == [(0, 59) if has_to_wait else (prompt().shape[1], 60)]
    assert assistant.stats.drafted and any(one.length for one in states)
    states.clear()
    assistant.unbind()
    assistant.bind(target)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=after, **arguments)
    assert not assistant.stats.drafted and states and not any(one.length for one in states)


def test_a_conversation_is_read_at_once_as_later_turns_are_served_by_it_too(target, monkeypatch):
    asked = []
    monkeypatch.setattr(AutomaticDrafting, "worth_after", lambda self, *given: asked.append(given) or 0)
    assistant = DynSpecAssistant(perturbed(target), target=target, num_assistant_tokens="auto")
    conversation, text = assistant.conversation(), prompt()
    for _ in range(3):
        text = target.generate(text, assistant_model=conversation, max_new_tokens=8, do_sample=False)
    assert [behind for behind, _ in asked] == [0, 0, 0]


def test_how_long_a_call_took_is_learnt_where_its_end_is_known(target, monkeypatch):
    """What is given up by the garbage collector ended at another time, and may be given up while much is locked."""
    ended = []
    monkeypatch.setattr(AutomaticDrafting, "end_call", lambda self, *given: ended.append(given))
    assistant = DynSpecAssistant(perturbed(target), target=target, num_assistant_tokens="auto")
    config = GenerationConfig(max_length=28)
    generator = DynSpecCandidateGenerator(assistant, input_ids=prompt(), generation_config=config)
    generator.get_candidates(prompt())
    del generator
    gc.collect()
    assert not ended
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=16, do_sample=False, eos_token_id=299)
    assert ended == [(16, 16)]


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", ["another model", "EAGLE-2", "EAGLE-3"])
def test_a_rest_ends_also_for_a_head_that_is_not_shown_the_text_meanwhile(drafter, tree, target, even_pace):
    drafts = drafters(target)[drafter]()
    assistant = DynSpecAssistant(drafts, target=target, tree=tree, num_assistant_tokens="auto")
    arguments = {"assistant_model": assistant, "max_new_tokens": 60, "do_sample": False, "eos_token_id": 299}
    target.generate(prompt(), **arguments)
    ((drafting, _),) = assistant.learnt_drafting._learnt.values()
    drafting._rests._tokens, drafting._rests._rested = FEATURES_BEFORE_RETRIAL + 70, 0
    drafted = []
    for seed in range(4):
        target.generate(prompt(seed=seed), **arguments)
        drafted.append(assistant.stats.drafted)
    assert drafted[0] == 0 and drafted[-1] > 0


def test_what_is_learnt_belongs_to_the_setting(target):
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, num_assistant_tokens="auto")
    arguments = {"max_new_tokens": 20, "eos_token_id": 299, "assistant_model": assistant}
    target.generate(prompt(), do_sample=False, **arguments)
    target.generate(prompt(), do_sample=True, temperature=0.8, **arguments)
    assistant.tree = TREE
    assert not assistant.learnt_drafting._learnt
    twin = copy.copy(assistant)
    assert twin.learnt_drafting is not assistant.learnt_drafting


def test_two_threads_share_what_is_learnt(target):
    assistant = DynSpecAssistant(perturbed(target), target=target, num_assistant_tokens="auto")
    arguments = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 299}
    expected = [target.generate(prompt(seed=seed), **arguments) for seed in range(2)]
    outputs: dict[int, list] = {0: [], 1: []}

    def run(seed: int) -> None:
        for _ in range(3):
            outputs[seed].append(target.generate(prompt(seed=seed), assistant_model=assistant, **arguments))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in outputs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for seed, made in outputs.items():
        assert len(made) == 3
        assert all(torch.equal(one, expected[seed]) for one in made)
    assert len(assistant.learnt_drafting._learnt) == 1


@pytest.mark.parametrize("wrong", ["sometimes", "AUTO", "", 0, -1, True, 2.5])
def test_other_words_are_refused_before_any_work(wrong, target):
    drafter = perturbed(target)
    with pytest.raises(ConfigurationError, match=r'num_assistant_tokens must be a whole number .* or "auto"'):
        DynSpecAssistant(drafter, target=target, num_assistant_tokens=wrong)
    assistant = DynSpecAssistant(drafter, target=target)
    assistant.generation_config.num_assistant_tokens = wrong
    with pytest.raises(ConfigurationError, match="num_assistant_tokens"):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=4)


def test_it_may_be_assigned_and_is_stored(target, monkeypatch):
    assistant = DynSpecAssistant(perturbed(target), "full", target=target)
    assistant.generation_config.num_assistant_tokens = "auto"
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    chosen = []
    choose = AutomaticDrafting.choose
    monkeypatch.setattr(
        AutomaticDrafting, "choose", lambda self, *given: chosen.append(choose(self, *given)) or chosen[-1]
    )
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, do_sample=False)
    assert chosen
    assert assistant.generation_config.num_assistant_tokens == "auto"
    # Study is of one fixed length.
    assert assistant.draft_round(prompt()).token_ids.shape[0] == 5
    config = DynSpecConfig(PolicyConfig("full", {}), num_assistant_tokens="auto")
    assert DynSpecConfig.from_dict(config.to_dict()).num_assistant_tokens == "auto"


@pytest.mark.parametrize(
    ("given", "arguments", "is_chosen"),
    [
        ({}, {}, True),
        ({"policy": "auto"}, {}, True),
        ({"assistant_confidence_threshold": 0.4}, {}, True),
        ({"num_assistant_tokens": 5}, {}, False),
        ({}, {"do_sample": True}, False),
        ({"tree": True}, {}, False),
        ({"measure_coverage": True}, {}, False),
        ({"profile": True}, {}, False),
        ({"validate": True}, {}, False),
        ({"alignment": OnlineAlignment()}, {}, False),
    ],
    ids=["greedily", "policy", "threshold", "number", "sampling", "tree", "mass", "profile", "checks", "alignment"],
)
def test_it_is_the_default_where_nothing_shows_what_was_drafted(
    given, arguments, is_chosen, target, monkeypatch, drafts_as_shipped
):
    fixed = draft_shapes_chosen(monkeypatch)
    assistant = DynSpecAssistant(perturbed(target), target=target, **given)
    call = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 299, **arguments}
    output = target.generate(prompt(), assistant_model=assistant, **call)
    assert (None in fixed) == is_chosen
    if not call["do_sample"]:
        assert torch.equal(output, target.generate(prompt(), **call))


@pytest.mark.parametrize("where", ["16 bits", "autocast", "matrix products", "those of one device"])
def test_it_is_no_default_where_rounding_may_decide(where, target, monkeypatch, drafts_as_shipped):
    fixed = draft_shapes_chosen(monkeypatch)
    if where == "16 bits":
        target = copy.deepcopy(target).bfloat16()
    elif where == "matrix products":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    elif where == "those of one device":
        monkeypatch.setattr(torch, "get_float32_matmul_precision", unknown_precision)
    assistant = DynSpecAssistant(perturbed(target), target=target)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, do_sample=False, eos_token_id=299)
    assert None not in fixed and assistant.stats.drafted


def unknown_precision() -> str:
    """As torch's own, where `torch.backends.cuda.matmul.fp32_precision` was set alone."""
    raise RuntimeError("a mix of the legacy and new APIs")


def draft_shapes_chosen(monkeypatch) -> list[DraftShape | None]:
    """The shape that each round is told to draft from now on; None where it chooses one."""
    fixed, choose = [], AutomaticDrafting.choose
    monkeypatch.setattr(
        AutomaticDrafting, "choose", lambda self, *given: fixed.append(given[0]) or choose(self, *given)
    )
    return fixed


@pytest.mark.parametrize("where", ["the drafter's file", "a schedule of transformers'", "later"])
def test_what_a_user_settles_is_no_default(where, target, monkeypatch, drafts_as_shipped):
    fixed, drafter = draft_shapes_chosen(monkeypatch), perturbed(target)
    if where == "the drafter's file":
        drafter.generation_config.num_assistant_tokens = 3
    assistant = DynSpecAssistant(drafter, target=target)
    if where == "a schedule of transformers'":
        assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    elif where == "later":
        assistant.generation_config.num_assistant_tokens = 3
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, do_sample=False, eos_token_id=299)
    assert None not in fixed and assistant.stats.drafted


def test_the_default_is_stored_as_such(target, tmp_path, drafts_as_shipped):
    saved = DynSpecAssistant(perturbed(target), "full", target=target)
    assert saved.generation_config.num_assistant_tokens is None
    saved.save_pretrained(tmp_path)
    loaded = DynSpecAssistant.from_pretrained(tmp_path, target=target, drafter=saved.drafter)
    assert loaded.generation_config.num_assistant_tokens is None


def test_nobody_is_shown_what_is_said_while_drafting_rests(target, monkeypatch):
    """And the target is asked for no hidden states, where a head would read them."""
    wanted = []
    states = TargetFeedback.wanted_states
    monkeypatch.setattr(TargetFeedback, "wanted_states", lambda *given: wanted.append(states(*given)) or wanted[-1])
    monkeypatch.setattr(AutomaticDrafting, "is_resting", True)
    monkeypatch.setattr(AutomaticDrafting, "reads_features", False)
    monkeypatch.setattr(AutomaticDrafting, "choose", lambda self, fixed, room: ALONE)
    assistant = DynSpecAssistant(drafters(target)["EAGLE-3"](), target=target, num_assistant_tokens="auto")
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=10, do_sample=False)
    assert wanted and not any(wanted)
