"""The doctor: what it expects follows from what it timed, it says so where drafting loses, and it changes nothing."""

import ast
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import perturbed, tiny, word_tokenizer
from rich.console import Console
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_dynspec import AutomaticShortlist, DynSpecAssistant, FrequencyShortlist, FullShortlist, HybridShortlist
from hf_dynspec.commands import app
from hf_dynspec.drafters import Drafter
from hf_dynspec.drafting.expected_speed import RoundCosts
from hf_dynspec.errors import ConfigurationError, NotBoundError
from hf_dynspec.evaluation.coverage.settings import CoverageSettings
from hf_dynspec.evaluation.doctor.diagnosis import OWN_POLICY, Diagnosis
from hf_dynspec.evaluation.doctor.expectations import Profile
from hf_dynspec.evaluation.doctor.measure import _Measurement, _with_own, by_turns, diagnose_pair
from hf_dynspec.evaluation.doctor.prediction import (
    acceptance_by_step,
    chain_costs,
    drafted_steps,
    pace_of,
    rounds_along,
    verdicts_of,
)
from hf_dynspec.evaluation.doctor.settings import POLICIES, DoctorSettings
from hf_dynspec.evaluation.doctor.timing import RoundClock, TimedCall, time_forwards
from hf_dynspec.evaluation.pair import generation_config
from hf_dynspec.evaluation.policy_text import policy_in_python
from hf_dynspec.evaluation.prompts import WorkloadPrompt
from hf_dynspec.evaluation.trace.settings import TraceSettings
from hf_dynspec.shortlists import as_policy
from hf_dynspec.stats import SECTIONS, DraftingStatistics, Stopwatch
from hf_dynspec.tree_config import TreeConfig

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
NEW_TOKENS = 40


ROLES = ("target", "drafter")
TOKENIZER = word_tokenizer()
TEXTS = ("t5 t6 t7 t8 t9 t10", "t50 t60 t70")
PROMPTS = [WorkloadPrompt(text, text, text) for text in TEXTS]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(seed=0)


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    """Agrees with the target in most of its choices."""
    return perturbed(target)


# Tokens --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts_at_once", [True, False])
def test_verdicts_along_a_text_are_what_its_own_rounds_were(drafts_at_once):
    chance = random.Random(7)
    verdicts = [chance.random() < 0.7 for _ in range(100)]
    call = simulated(verdicts, 8, drafts_at_once, costs=lambda steps: 1.0, start=0.0)
    (found,) = verdicts_of([call], 8, drafts_at_once)
    assert rounds_along(found, 8, drafts_at_once) == rounds_along(verdicts, 8, drafts_at_once)
    assert sum(map(int.__ne__, found, verdicts)) <= 3


def test_tokens_without_a_verdict_are_rejected_as_often_as_those_before_them():
    # Chains of two, of which two were accepted as a whole and two were not by their last token.
    call = TimedCall(0, 100, 1.0, (0.1,) * 5, (3, 2, 3, 2, 1))
    assert verdicts_of([call], 2, True) == [
        [True, True, False, True, False, True, True, True, True, False, False],
    ]


@pytest.fixture(scope="module")
def with_head() -> tuple[PreTrainedModel, Drafter]:
    """A target whose layers change so little that a head agrees with it in half of its choices, and the head."""
    target = soft(seed=1)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.3)
    return target, drafter_of(agreeing_head("eagle2"), target)


@pytest.mark.parametrize("drafts_at_once", [True, False], ids=["small model", "EAGLE head"])
def test_real_rounds_of_every_length_are_foreseen_from_those_of_the_longest(
    target, drafter, with_head, drafts_at_once
):
    target, drafter = (target, drafter) if drafts_at_once else with_head
    input_ids = TOKENIZER(TEXTS[0], return_tensors="pt")["input_ids"]
    assistant = DynSpecAssistant(drafter, "full", target=target, tokenizer=TOKENIZER)
    calls = {}
    for steps in (1, 2, 3, 5, 8):
        assistant.generation_config.num_assistant_tokens = steps
        clock = RoundClock(lambda: 0.0)
        config = generation_config(target, NEW_TOKENS, 0.0)
        target.generate(input_ids, generation_config=config, assistant_model=assistant, streamer=clock)
        calls[steps] = clock.call(0, NEW_TOKENS)
        assert calls[steps].new_tokens == assistant.stats.tokens
        assert len(calls[steps].tokens) == assistant.stats.rounds
        assert sum(drafted_steps(calls[steps], steps, drafts_at_once)) == assistant.stats.drafted
    assistant.unbind()
    (verdicts,) = verdicts_of([calls[8]], 8, drafts_at_once)
    assert False in verdicts and True in verdicts
    for steps, call in calls.items():
        assert len(rounds_along(verdicts, steps, drafts_at_once)) == pytest.approx(len(call.tokens), abs=1)


def test_acceptance_by_step_counts_what_was_tried():
    # Of three drafts each: all accepted, one accepted, none accepted; then the end, with room for one.
    call = TimedCall(0, 9, 1.0, (0.1, 0.2, 0.3, 0.4), (4, 2, 1, 2))
    assert acceptance_by_step([call], 3, True) == pytest.approx((3 / 4, 1 / 2, 1.0))


# Seconds -------------------------------------------------------------------------------------------------------------


def simulated(
    verdicts: Sequence[bool], steps: int, drafts_at_once: bool, costs: Callable[[int], float], start: float
) -> TimedCall:
    """A call along a text whose rounds take what is said."""
    drafted = rounds_along(verdicts, steps, drafts_at_once) if steps else [0] * len(verdicts)
    tokens, place = [], 0
    for count in drafted:
        accepted = next((n for n in range(count) if not verdicts[place + n]), count)
        tokens.append(accepted + 1)
        place += accepted + 1
    ends = list(itertools.accumulate([start, *(costs(count) for count in drafted[1:])]))
    return TimedCall(0, len(verdicts), ends[-1], tuple(ends), tuple(tokens))


VERIFICATION = RoundCosts(0.0, (1, 2, 4, 9, 61), (0.010, 0.0105, 0.011, 0.014, 0.05), other_alone=0.001)


def diagnosed(
    draft_step: float = 0.002,
    acceptance: float = 0.8,
    prompts: int = 2,
    policies: Sequence[str] = ("full", "hybrid"),
    tree: str | None = None,
) -> Diagnosis:
    """A pair of which everything is known, and `full` drafts three times as long as others."""
    settings = DoctorSettings("target", "drafter", policies=policies, tree=tree)
    chance = random.Random(3)
    texts = [[chance.random() < acceptance for _ in range(128)] for _ in range(prompts)]
    measured = Diagnosis(
        settings,
        settings.resolved_policies(),
        models={role: {"name": role, "parameters": 9e6, "dtype": "float32", "device": "cpu"} for role in ROLES},
        vocabulary={"tokens": 151_665, "target_rows": 151_936, "drafter_rows": 151_936},
        prompts=[{"identifier": f"one/{n}", "domain": "one", "tokens": 9} for n in range(prompts)],
        threads=1,
        started="",
        short_chain=2,
        drafts_at_once=True,
        verified_rows=VERIFICATION.verified_rows,
        verification=VERIFICATION.verification,
    )
    measured.plain = [simulated(text, 0, True, lambda steps: 0.011, 0.05) for text in texts]
    for name in policies:
        costs = replace(VERIFICATION, draft_step=draft_step * (3 if name == "full" else 1), other=0.0015)
        measured.short_chains[name] = [simulated(text, 2, True, costs.of_round, 0.06) for text in texts]
        measured.long_chains[name] = [simulated(text, 8, True, costs.of_round, 0.06 + 6 * 0.002) for text in texts]
        if tree is not None:
            measured.trees[name] = [simulated(text[:64], 6, False, lambda steps: 0.07, 0.06) for text in texts]
        seconds = {"backbone": 0.004, "head": 0.03, "policy": 0.001, "choice": 0.005, "verification": 0.014}
        measured.profiles[name] = Profile({**seconds, "other": 0.0015}, 8)
        measured.drafting[name] = DraftingStatistics()
    return measured


def test_seconds_of_every_length_follow_from_two():
    measured = diagnosed()
    costs = measured.chain_costs("hybrid", range(2))
    assert costs.costs.draft_step == pytest.approx(0.002) and costs.costs.other == pytest.approx(0.0015)
    chance = random.Random(3)
    texts = [[chance.random() < 0.8 for _ in range(128)] for _ in range(2)]
    known = replace(VERIFICATION, draft_step=0.002, other=0.0015)
    plain = 0.05 + 127 * 0.011
    for steps in (1, 3, 5, 7, 8):
        (one,) = (one for one in measured.expectations if (one.policy, one.steps) == ("hybrid", steps))
        start = 0.06 + 0.002 * max(0, steps - 2)
        calls = [simulated(text, steps, True, known.of_round, start) for text in texts]
        seconds = sum(call.seconds for call in calls) / 2
        # Tokens that followed a chain accepted as a whole have no verdict.
        assert one.ratio == pytest.approx(plain / seconds, rel=0.05)
        assert one.tokens_per_second == pytest.approx(128 / seconds, rel=0.05)
        rounds = sum(len(call.tokens) for call in calls) / 2
        assert one.tokens_per_round == pytest.approx(128 / rounds, rel=0.05)
        assert one.round_seconds == pytest.approx(known.of_round(steps))


@pytest.mark.parametrize(
    "rounds",
    [
        (0.010, 0.022),  # shorter than forwards on their own
        (0.010, 0.010),  # no longer with more draft steps
        (0.022, 0.010),
        (0.010, 0.100),  # longer by more than the draft steps
    ],
)
def test_no_part_of_a_round_takes_less_than_no_time_whatever_disturbed_the_clock(rounds):
    call = TimedCall(0, 9, 1.0, (1.0,), (1,))
    short, long = (replace(pace_of([call]), round_seconds=seconds) for seconds in rounds)
    for factor in (0.5, 1, 4, 20):
        verification = replace(VERIFICATION, verification=tuple(factor * one for one in VERIFICATION.verification))
        costs = chain_costs(short, long, (2, 8), verification).costs
        assert costs.draft_step >= 0 and costs.other >= 0 and min(costs.verification) >= 0
        assert min(rounds) / 2 <= costs.of_round(1) <= costs.of_round(2) <= costs.of_round(8) <= 1.5 * max(rounds)
        if rounds == (0.010, 0.022):
            assert [costs.of_round(steps) for steps in (2, 8)] == pytest.approx(rounds)


def test_a_round_that_something_else_interrupted_does_not_count():
    verdicts = [False] * 30
    calm = simulated(verdicts, 2, True, lambda steps: 0.01, 0.1)
    ends = [end + (1.0 if number > 9 else 0.0) for number, end in enumerate(calm.ends)]
    shaken = replace(calm, ends=tuple(ends), seconds=calm.seconds + 1.0)
    assert pace_of([shaken], 2, True).round_seconds == pytest.approx(0.01)


def test_trees_are_taken_on_with_what_chains_say_of_the_rest_of_the_text():
    (tree,) = (one for one in diagnosed(tree="default").expectations if one.tree and one.policy == "hybrid")
    assert tree.tree == TreeConfig() and tree.round_seconds == pytest.approx(0.07)
    # The trees of this pair accept what chains of 6 do.
    (chain,) = (one for one in diagnosed().expectations if (one.policy, one.steps) == ("hybrid", 6))
    assert tree.tokens_per_round == pytest.approx(chain.tokens_per_round, rel=0.05)


def test_a_text_that_ends_at_once_counts_for_its_one_token():
    measured = diagnosed(tree="default")
    ended = TimedCall(0, 128, 0.06, (0.06,), (1,))
    names = ("short_chains", "long_chains", "trees")
    for calls in (measured.plain, *(getattr(measured, name)["hybrid"] for name in names)):
        calls[0] = ended
    for calls in (getattr(measured, name)["full"] for name in names):
        calls[0] = ended
    (second,) = diagnosed(tree="default").long_chains["hybrid"][1:]
    for one in measured.expectations:
        if (one.policy, one.steps, one.tree) == ("hybrid", 8, None):
            assert one.tokens_per_round == pytest.approx(129 / (1 + len(second.tokens)))
        assert 1 < one.tokens_per_round < 8 and one.ratio > 0


def test_the_break_even_acceptance_is_where_the_best_chain_is_plain():
    verification = RoundCosts(0.0, (1,), (1.0,))
    # One draft that costs half a token, or several: nothing is won below one half.
    pace = [replace(pace_of([TimedCall(0, 9, 1.0, (1.0,), (1,))]), round_seconds=1 + 0.5 * n) for n in (2, 8)]
    costs = chain_costs(*pace, (2, 8), verification)
    assert costs.break_even(1.0) == pytest.approx(0.5, abs=1e-4)
    assert costs.break_even(0.1) is None


def test_the_oracle_drafts_like_full_and_pays_for_the_layers_alone():
    measured = diagnosed()
    share = (0.03 + 0.005) / (0.004 + 0.03 + 0.001 + 0.005)
    assert measured.profiles["full"].head_share == pytest.approx(share)
    oracle = measured.oracle
    (full,) = (one for one in measured.expectations if (one.policy, one.steps) == ("full", oracle.steps))
    assert oracle.tokens_per_round == full.tokens_per_round
    # At least what full's head takes, and more where another policy's rounds are shorter still without theirs.
    assert full.round_seconds - oracle.round_seconds > oracle.steps * 0.006 * share
    assert all(oracle.ratio >= one.ratio for one in measured.expectations)


# The answer ----------------------------------------------------------------------------------------------------------


def test_the_answer_is_a_sentence_and_a_line():
    measured = diagnosed()
    best = measured.best
    assert measured.pays and best.policy == "hybrid" and best.ratio > 1.5
    assert measured.sentence.startswith(f"Use hybrid with chains of {best.steps}: {best.ratio:.2f} times (±")
    expected = f'DynSpecAssistant(drafter, "hybrid", target=target, num_assistant_tokens={best.steps})'
    assert measured.line == expected
    text = str(measured)
    assert measured.sentence in " ".join(text.split()) and measured.line in text
    assert "drafter: drafter, 9.0M parameters, float32 on cpu" in " ".join(text.split())
    # A policy that loses nothing has no percentage.
    assert " -0%" not in text and " +0%" not in text


def test_what_there_was_no_time_for_and_what_is_no_shortlist_is_said():
    measured = diagnosed()
    assert "were measured in" not in str(measured) and "whole vocabulary here" not in str(measured)
    measured.prompts.append(measured.prompts[-1])
    for stats in measured.drafting.values():
        stats._active_sum, stats._draft_steps = 3 * measured.vocabulary["tokens"], 3
    text = " ".join(str(measured).split())
    assert f"2 of 3 prompts were measured in {measured.settings.seconds:g} s: --seconds takes more." in text
    assert "The shortlist of hybrid is the whole vocabulary here" in text and "shortlist of full" not in text


@pytest.mark.parametrize(("acceptance", "draft_step"), [(0.05, 0.002), (0.8, 0.02)])
def test_use_none_where_drafting_loses(acceptance, draft_step):
    measured = diagnosed(draft_step, acceptance)
    assert not measured.pays and measured.best.ratio < 1
    assert measured.sentence.startswith("Use none: ") and "Assistant" not in measured.line
    assert "Use none" in str(measured)


def test_use_none_where_nothing_is_accepted():
    """What is faster then is a product of this package's, or chance."""
    measured = diagnosed(0.0001, 0.0)
    slower = [simulated([False] * 128, 0, True, lambda steps: 0.02, 0.05) for _ in measured.plain]
    measured.plain = slower
    assert measured.best.ratio > 1.1 and not measured.pays
    assert measured.sentence.startswith("Use none: with ") and "a round brings 1.00 tokens" in measured.sentence
    assert measured.sentence.endswith(
        f"makes it {measured.best.ratio:.2f} times as fast as plain generate is no draft."
    )
    assert "Assistant" not in measured.line


def test_a_policy_with_settings_can_be_pasted():
    measured = diagnosed(policies=("full", "frequency:size=1024"))
    shown = str(measured).splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("from "))
    assert ast.dump(ast.parse("\n".join(shown[start:]))) == ast.dump(ast.parse(measured.line))
    given = {}

    def assistant(drafter, policy, **settings):
        given.update(settings, policy=policy)

    # Beside what the documentation imports, whoever pastes it has the models.
    exec(measured.line, {"DynSpecAssistant": assistant, "drafter": "drafter", "target": "target"})
    policy = given.pop("policy")
    assert policy.settings() == FrequencyShortlist(size=1024).settings()
    assert given == {"target": "target", "num_assistant_tokens": measured.best.steps}


def test_a_policy_is_written_in_python_as_it_was_named():
    texts = ["full", "frequency:ranking=/data/made/rank,size=3"]
    before, argument = policy_in_python("frequency:ranking=made/rank,size=3", texts)
    assert before and argument == f"parse_policy({texts[1]!r})"
    assert policy_in_python("screen", texts) == ("", '"screen"')
    assert policy_in_python(OWN_POLICY, {OWN_POLICY: FullShortlist()}) == ("", OWN_POLICY)


def test_one_prompt_has_no_spread_and_makes_nothing_sure():
    measured = diagnosed(prompts=1)
    assert measured.best.error is None and "±" not in measured.sentence
    assert measured.pays and measured.sentence.startswith("Try hybrid")


def test_prompts_that_differ_much_make_nothing_sure():
    measured = diagnosed()
    # The first prompt, without a draft that is accepted.
    text = [False] * 128
    costs = replace(VERIFICATION, draft_step=0.002, other=0.0015)
    measured.short_chains["hybrid"][0] = simulated(text, 2, True, costs.of_round, 0.06)
    measured.long_chains["hybrid"][0] = simulated(text, 8, True, costs.of_round, 0.072)
    (one,) = (one for one in measured.expectations if (one.policy, one.steps) == ("hybrid", 4))
    (calm,) = (one for one in diagnosed().expectations if (one.policy, one.steps) == ("hybrid", 4))
    assert one.error > 10 * calm.error


def test_tables_fit_80_columns_without_being_broken_up():
    measured = diagnosed(policies=POLICIES, tree="default", prompts=3)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(measured)
    shown = capture.get()
    # Forwards, acceptance, speeds, and the best.
    assert shown.count("┏") == 4 and max(map(len, shown.splitlines())) <= 80
    for name in POLICIES:
        assert shown.count(f"│ {name} ") == 3


# Measuring -----------------------------------------------------------------------------------------------------------


def test_forwards_leave_the_target_as_it_was_and_have_a_median_each(target):
    seconds = time_forwards(target, [5, 6, 7], (1, 4, 61), 0.01, surroundings=torch.inference_mode)
    assert len(seconds) == 3 and all(one > 0 for one in seconds)


def test_time_that_went_to_something_else_is_told_of(target, drafter, monkeypatch):
    def diagnose() -> Diagnosis:
        settings = DoctorSettings("", "", policies=["full"], tree=None, max_new_tokens=16, seconds=0.1)
        return diagnose_pair(
            settings, DynSpecAssistant, target=target, drafter=drafter, tokenizer=TOKENIZER, prompts=PROMPTS
        )

    # Whoever gets no processor is not told.
    monkeypatch.setattr(time, "thread_time", lambda: 0.5 * time.monotonic())
    disturbed = diagnose()
    assert "50% of the time went to something else" in str(disturbed)
    monkeypatch.setattr(time, "thread_time", time.monotonic)
    assert "something else" not in str(diagnose())
    assert disturbed.to_dict()["notes"] == disturbed.notes


def test_a_head_product_that_wins_nothing_is_no_merit_to_subtract():
    measured = diagnosed()
    for seconds, said in (
        (0.010, "would make plain generate 1.10 times"),
        (0.012, "would not make plain generate faster."),
    ):
        texts = [[False] * 128 for _ in range(2)]
        measured.head_product = [simulated(text, 0, True, lambda _, one=seconds: one, 0.05) for text in texts]
        assert said in " ".join(str(measured).split())


def test_domains_take_turns():
    prompts = [WorkloadPrompt(f"{domain}/{n}", domain, "x") for domain in ("a", "b") for n in range(2)]
    assert [one.identifier for one in by_turns(prompts)] == ["a/0", "b/0", "a/1", "b/1"]


def test_an_assistant_is_diagnosed_and_stays_as_it_was(target, drafter):
    own, bound = FrequencyShortlist(size=64), vars(target).get("generate")
    assistant = DynSpecAssistant(drafter, own, target=target, tokenizer=TOKENIZER, num_assistant_tokens=4)
    inputs = TOKENIZER(TEXTS[0], return_tensors="pt")
    before = target.generate(**inputs, assistant_model=assistant, max_new_tokens=12)
    parameters = [*target.parameters(), *drafter.parameters()]
    weights = [one.clone() for one in parameters]
    stats, policy, steps = assistant.stats, assistant.policy, assistant.generation_config.num_assistant_tokens
    drafters = drafter.generation_config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    activities = []
    diagnosis = assistant.diagnose(
        TEXTS,
        report=lambda activity, done, total: activities.append(activity),
        seconds=0.1,
        max_new_tokens=16,
        tree=TreeConfig(8, 2, 3),
        num_assistant_tokens=4,
    )
    assert torch.equal(torch.rand(1), expected)
    assert (assistant.stats, assistant.policy, assistant.target) == (stats, policy, target)
    assert assistant.generation_config.num_assistant_tokens == steps
    assert drafter.generation_config.to_dict() == drafters
    assert all(map(torch.equal, parameters, weights))
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, max_new_tokens=12), before)
    assert list(diagnosis.policies) == [*POLICIES, OWN_POLICY] and diagnosis.policies[OWN_POLICY] is own
    assert {(one.policy, one.shape) for one in diagnosis.expectations} == {
        (policy, shape)
        for policy in diagnosis.policies
        for shape in ("chains of 1", "chains of 2", "chains of 3", "chains of 4", "trees of 8/2/3")
    }
    assert diagnosis.measured_prompts == 2 and activities[-1] == "done"
    assert set(diagnosis.profiles["full"].seconds) == {*SECTIONS, "other"}
    assert diagnosis.sentence in " ".join(str(diagnosis).split())
    assistant.unbind()
    assert vars(target).get("generate") is bound


def test_a_profiled_call_that_was_held_up_leaves_no_round_without_time(target, drafter, monkeypatch):
    """The shorter of the two calls, whose difference is a round's profile, takes longer than the longer one."""
    generate, held_up = _Measurement._generate, {}

    def held_up_once(self, way, number, new_tokens):
        call = generate(self, way, number, new_tokens)
        is_profiled = way.assistant is not None and way.assistant.profile
        if is_profiled and held_up.setdefault(way.label, new_tokens) == new_tokens:
            stats = way.assistant.stats
            stats.seconds = {name: seconds + 10.0 for name, seconds in stats.seconds.items()}
        return call

    monkeypatch.setattr(_Measurement, "_generate", held_up_once)
    assistant = DynSpecAssistant(drafter, "hybrid", target=target, tokenizer=TOKENIZER)
    policies = {name: as_policy(name) for name in ("full", "hybrid")}
    diagnosis = assistant.diagnose(TEXTS, seconds=0.1, max_new_tokens=24, num_assistant_tokens=3, policies=policies)
    assistant.unbind()
    assert held_up.keys() == diagnosis.profiles.keys() == {"full", "hybrid"}
    for profile in diagnosis.profiles.values():
        assert 0 < sum(profile.seconds.values()) < 1
    assert "%" in str(diagnosis)


def test_of_an_assistant_that_chooses_every_policy_is_diagnosed():
    frequent = FrequencyShortlist(size=64)
    own = AutomaticShortlist([HybridShortlist(), frequent, FullShortlist()])
    policies = _with_own(own)
    assert list(policies) == [*POLICIES, f"{OWN_POLICY}.policies[1]"]
    assert policies[f"{OWN_POLICY}.policies[1]"] is frequent


@pytest.mark.parametrize("settings", [DoctorSettings, CoverageSettings, TraceSettings])
def test_what_is_measured_of_one_policy_is_not_measured_of_a_choice(settings):
    with pytest.raises(ConfigurationError, match="'auto' chooses by the clock from hybrid, screen"):
        made = settings(policies={"chosen": AutomaticShortlist()})
        made.policies_by_domain(["code"])


def test_a_drafter_that_is_never_right_is_of_no_use(target, monkeypatch):
    # Other work on the computer must not decide it.
    monkeypatch.setattr(Stopwatch, "now", lambda self: time.thread_time())
    random_drafter, bound = tiny(seed=9), vars(target).get("generate")
    settings = DoctorSettings(policies=("full",), tree=None, num_assistant_tokens=3, max_new_tokens=24, seconds=0.1)
    diagnosis = diagnose_pair(
        settings,
        DynSpecAssistant,
        target=target,
        drafter=random_drafter,
        tokenizer=TOKENIZER,
        prompts=PROMPTS,
    )
    assert max(diagnosis.acceptance("full")) < 0.2
    assert not diagnosis.pays and diagnosis.sentence.startswith("Use none")
    assert "beside it" not in str(diagnosis), "nothing stands beside a figure that no shortlist changed"
    assert vars(target).get("generate") is bound


def test_default_policies_that_a_pair_cannot_have_are_left_out(target, drafter, monkeypatch):
    def refuse(self, vocabulary, memory=None):
        raise ConfigurationError("not with this drafter")

    monkeypatch.setattr(type(as_policy("screen")), "start", refuse)
    given = {
        "target": target,
        "drafter": drafter,
        "tokenizer": TOKENIZER,
        "prompts": PROMPTS[:1],
    }
    settings = DoctorSettings(tree=None, num_assistant_tokens=3, max_new_tokens=8, seconds=0.1)
    diagnosis = diagnose_pair(settings, DynSpecAssistant, **given)
    assert "screen" not in diagnosis.policies and "hybrid" in diagnosis.policies
    assert "screen was left out: not with this drafter" in diagnosis.notes
    assert "Note: screen was left out" in str(diagnosis)
    with pytest.raises(ConfigurationError, match="not with this drafter"):
        diagnose_pair(replace(settings, policies=("screen",)), DynSpecAssistant, **given)


# The command ---------------------------------------------------------------------------------------------------------


def invoke(*words: object):
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


PAIR = ("--target", POCKET / "target", "--drafter", POCKET / "drafter")


def test_the_command_from_end_to_end(tmp_path, monkeypatch):
    # Other work on the computer must not decide it.
    monkeypatch.setattr(Stopwatch, "now", lambda self: time.thread_time())
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "doctor.json"
    words = [*PAIR, "--prompts", POCKET / "prompts.jsonl", "--limit", 2, "--policy", "hybrid", "--tree", "8/2/3"]
    words += ["--num-assistant-tokens", 4, "--max-new-tokens", 48, "--seconds", 0.1, "--threads", 1]
    result = invoke(*words, "--temperature", 0.8, "--json", file)
    assert result.exit_code == 0, result.exception
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["line"] in result.stdout and written["sentence"] in " ".join(result.stdout.split())
    assert written["settings"]["temperature"] == 0.8 and written["settings"]["tree"] == "8/2/3"
    assert list(written["policies"]) == ["full", "hybrid"] == list(written["measured"])
    settings = [(one["policy"], one["steps"], one["tree"] is not None) for one in written["expected"]]
    assert settings == [
        (policy, *shape)
        for policy in ("full", "hybrid")
        for shape in [(1, False), (2, False), (3, False), (4, False), (3, True)]
    ]
    best = max(written["expected"], key=lambda one: one["ratio"])
    assert written["best"] == best
    assert len(written["verification"]["rows"]) == len(written["verification"]["seconds"]) > 5
    assert len(written["measured"]["hybrid"]["acceptance"]) == 4
    assert 0 < written["head_share"] < 1 and len(written["prompts"]) == 2
    assert written["provenance"]["command"][:3] == ["hf-dynspec", "doctor", "--target"]
    assert str(POCKET.parent) not in file.read_text(encoding="utf-8")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--target", "nowhere"), "name the drafter"),
        (("--drafter", "nowhere"), "name the target"),
        (("--target", "nowhere", "--drafter", "x", "--eagle", "y"), "name a drafter or an EAGLE head, not both"),
        (("--target", "nowhere", "--drafter", "x"), "nowhere"),
        (("--target", "nowhere", "--drafter", "x", "--prompts", "none.jsonl"), "none.jsonl"),
        (("--target", "nowhere", "--drafter", "x", "--policy", "best"), "there is no policy 'best'"),
        (("--target", "nowhere", "--drafter", "x", "--tree", "tall"), "total_tokens/depth/top_k"),
        (("--target", "nowhere", "--drafter", "x", "--temperature", -1), "temperature must be"),
        (("--target", "nowhere", "--drafter", "x", "--seconds", 0), "seconds must be"),
        (("--target", "nowhere", "--drafter", "x", "--num-assistant-tokens", 2), "--num-assistant-tokens must be"),
        (("--target", "nowhere", "--drafter", "x", "--json", "none/x.json"), "--json takes a file"),
    ],
)
def test_bad_input_is_refused_before_models_are_loaded(words, problem):
    result = invoke(*words)
    assert result.exit_code != 0
    assert problem in str(result.exception)


def test_an_assistant_without_a_target_or_a_tokenizer_is_refused(target, drafter):
    with pytest.raises(NotBoundError, match="bind"):
        DynSpecAssistant(drafter, tokenizer=TOKENIZER).diagnose()
    assistant = DynSpecAssistant(drafter, target=target, tokenizer=TOKENIZER)
    assistant._tokenizer = None
    with pytest.raises(ConfigurationError, match="tokenizer"):
        assistant.diagnose()
    assistant.unbind()


@pytest.mark.parametrize("prompts", ["def read_csv(path):", ["def read_csv(path):", 3]], ids=["a text", "a number"])
def test_prompts_that_are_no_list_of_texts_are_refused(prompts, target, drafter, monkeypatch):
    """A text by itself would be measured letter by letter."""
    monkeypatch.setattr("hf_dynspec.evaluation.doctor.measure.diagnose_pair", lambda *_, **__: pytest.fail("measured"))
    assistant = DynSpecAssistant(drafter, target=target, tokenizer=TOKENIZER)
    with pytest.raises(ConfigurationError, match="prompts must be a list of texts"):
        assistant.diagnose(prompts)
    assistant.unbind()
