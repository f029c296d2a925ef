"""Coverage of shortlists: known answers, agreement with real runs, policies' observations, and the command."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from cases import representatives
from command_line import invoke, shown, write_rows
from eagle_heads import DRAFTABLE, Head, SlowHead, agreeing_head, drafter_of, soft, target_features, trimmed_head
from models import EOS, POLICY_CASES, TERRIBLE, VOCABULARY, perturbed, prompt, tiny, word_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_dynspec import (
    DynSpecAssistant,
    DynSpecError,
    EagleDrafter,
    FrequencyShortlist,
    FullShortlist,
    InContextShortlist,
)
from hf_dynspec.artifacts import write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.drafters import Drafter, as_drafter
from hf_dynspec.errors import ConfigurationError
from hf_dynspec.evaluation.coverage import report, teacher_forcing
from hf_dynspec.evaluation.coverage.estimates import FIGURES, Estimate, oracle_curve, summarize
from hf_dynspec.evaluation.coverage.measure import measure_coverage
from hf_dynspec.evaluation.coverage.report import coverage_table, depth_table, domain_tables, to_dict, write_plot
from hf_dynspec.evaluation.coverage.result import CoverageResult, DepthCoverage, TextCoverage
from hf_dynspec.evaluation.coverage.rounds import (
    RoundFigures,
    RoundsAlongText,
    draft_steps,
    expected_acceptance_length,
    expected_tokens,
    rejected_draft,
)
from hf_dynspec.evaluation.coverage.settings import CoverageSettings
from hf_dynspec.evaluation.coverage.teacher_forcing import ForcedText, Rows
from hf_dynspec.evaluation.pair import generation_config
from hf_dynspec.evaluation.prompts import WorkloadPrompt
from hf_dynspec.protocol import Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from hf_dynspec.shortlists import ShortlistPolicy
from hf_dynspec.shortlists.forwarding import ForwardingState
from hf_dynspec.shortlists.frequency import FrequencyState, position_aware_size
from hf_dynspec.shortlists.in_context import InContextState
from hf_dynspec.vocabulary import fingerprint_tokenizer

CPU = torch.device("cpu")
FULL = {"full": FullShortlist()}


HEADS = ("trimmed", "eagle2", "eagle3")
KINDS = ("independent", *HEADS)


def head_of(name: str, target: PreTrainedModel) -> Head:
    return trimmed_head("eagle3", target) if name == "trimmed" else agreeing_head(name)


@pytest.fixture(scope="module")
def drafters(target, drafter) -> dict[str, tuple[PreTrainedModel, PreTrainedModel | Drafter]]:
    """By name a target and a drafter: an independent one, and heads, one of which drafts a third of the vocabulary."""
    of_heads = soft(seed=1)
    # Its layers change so little that heads agree with it in half of its choices, even after their own outputs.
    with torch.no_grad():
        for name, parameter in of_heads.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.3)
    heads = {name: (of_heads, drafter_of(head_of(name, of_heads), of_heads)) for name in HEADS}
    return {"independent": (target, drafter), **heads}


def words(count: int, length: int = 12, domain: Callable[[int], str] = lambda seed: "words") -> list[WorkloadPrompt]:
    texts = [" ".join(f"t{i}" for i in prompt(length, seed=seed)[0].tolist()) for seed in range(count)]
    return [WorkloadPrompt(f"words/{seed}", domain(seed), text) for seed, text in enumerate(texts)]


def measure(
    target: PreTrainedModel,
    drafter: PreTrainedModel | Drafter,
    policies: dict[str, ShortlistPolicy],
    prompts: int | list[WorkloadPrompt] = 2,
    hooks: dict[str, Any] | None = None,
    **settings: Any,
) -> CoverageResult:
    given = {"max_new_tokens": 24, "num_assistant_tokens": 3, "temperature": 0.5, "device": "cpu"}
    return measure_coverage(
        CoverageSettings(policies=policies, **{**given, **settings}),
        target=target,
        drafter=drafter,
        tokenizer=word_tokenizer(),
        prompts=words(prompts) if isinstance(prompts, int) else prompts,
        **(hooks or {}),
    )


def figures(result: CoverageResult, policy: str) -> dict[str, float]:
    (row,) = (row for row in summarize(result) if row.policy == policy and row.domain is None)
    means = {name: estimate.mean for name, estimate in row.figures.items()}
    return {**means, "expected_acceptance_length": row.expected_acceptance_length}


def by_policy(rows: list[TextCoverage], label: str) -> list[TextCoverage]:
    """One policy's rows, without its label."""
    return [replace(row, policy="") for row in rows if row.policy == label]


# One draft step ------------------------------------------------------------------------------------------------------


def rows_of(target: list[float], drafter: list[float], count: int = 1) -> Rows:
    p = torch.tensor([target] * count)
    order = p.sort(descending=True)
    return Rows(p, order.values.cumsum(-1), order.indices, torch.tensor([drafter] * count).log())


def shortlist_of(*ids: int) -> Shortlist:
    """With empty slots that hold ids, which must not count."""
    occupied = torch.tensor([True] * len(ids) + [False, False])
    return Shortlist(torch.tensor([*ids, ids[0], 1]), version=0, occupied=occupied)


P = [0.5, 0.3, 0.15, 0.05]
UNIFORM = [0.25, 0.25, 0.25, 0.25]


def test_a_draft_step_by_hand():
    token_ids = torch.tensor([0, 1, 2])
    steps = draft_steps(rows_of(P, UNIFORM, 3), shortlist_of(2, 0), token_ids, recall_k=3, is_greedy=False)
    assert steps.size.tolist() == [2.0] * 3
    assert steps.mass.tolist() == pytest.approx([0.65] * 3)  # p(0) + p(2)
    assert steps.oracle_mass.tolist() == pytest.approx([0.8] * 3)  # p(0) + p(1)
    assert steps.recall.tolist() == pytest.approx([2 / 3] * 3)  # 0 and 2 of 0, 1, 2
    assert steps.oov.tolist() == [0.0, 1.0, 0.0]
    # q is a half on each of the two: min(0.5, 0.5) + min(0.15, 0.5).
    assert steps.acceptance.tolist() == pytest.approx([0.65] * 3)
    assert steps.is_draft.tolist() == pytest.approx([1.0, 0.0, 1.0])  # min(1, 0.5 / 0.5), 0 and min(1, 0.5 / 0.15)
    # Renormalised over the shortlist, q is 0.25 on token 0 and 0.75 on token 2.
    steps = draft_steps(rows_of(P, [0.1, 0.1, 0.3, 0.5]), shortlist_of(0, 2), torch.tensor([0]), 2, is_greedy=False)
    assert steps.acceptance.item() == pytest.approx(0.25 + 0.15)
    assert steps.is_draft.item() == pytest.approx(0.25 / 0.5)


def test_greedy_drafts_are_accepted_if_they_are_the_texts_token():
    # Of tokens 0 and 2 the drafter prefers 2; it likes 3 best, which is not on the shortlist.
    rows, shortlist = rows_of(P, [0.1, 0.1, 0.3, 0.5], 3), shortlist_of(0, 2)
    steps = draft_steps(rows, shortlist, torch.tensor([2, 0, 3]), 2, is_greedy=True)
    assert steps.acceptance.tolist() == steps.is_draft.tolist() == [1.0, 0.0, 0.0]
    assert steps.oov.tolist() == [0.0, 0.0, 1.0]
    assert rejected_draft(rows.part(0, 1), shortlist, True, torch.Generator()).tolist() == [2]


def test_rejected_drafts_are_less_likely_for_the_target():
    generator = torch.Generator().manual_seed(0)
    # On 1, 2, 3 the drafter's distribution is 0.2, 0.2, 0.6; only of 3 is that more than the target's.
    rows = rows_of([0.1, 0.3, 0.3, 0.3], [0.5, 0.1, 0.1, 0.3])
    assert {rejected_draft(rows, shortlist_of(1, 2, 3), False, generator).item() for _ in range(20)} == {3}
    # Equal distributions reject nothing but by rounding, and then any draft will do.
    assert rejected_draft(rows_of(UNIFORM, UNIFORM), shortlist_of(0, 1, 2, 3), False, generator).item() in range(4)


def test_expected_lengths_by_hand():
    assert expected_acceptance_length(0.5, 3) == 1.0 + 0.5 + 0.25 + 0.125 == (1 - 0.5**4) / (1 - 0.5)
    assert [expected_acceptance_length(alpha, 5) for alpha in (1.0, 0.0)] == [6.0, 1.0]
    halves = torch.full((3,), 0.5)
    assert expected_tokens(halves, halves).item() == expected_acceptance_length(0.5, 3)
    acceptance, is_draft = torch.tensor([0.9, 0.5, 0.4]), torch.tensor([0.8, 1.0, 0.1])
    assert expected_tokens(acceptance, is_draft).item() == pytest.approx(1 + 0.9 + 0.8 * 0.5 + 0.8 * 1.0 * 0.4)


def test_averaged_over_the_targets_texts_a_round_has_as_many_tokens_as_speculative_sampling_accepts():
    """All texts of three tokens over a vocabulary of three, for random distributions that depend on the context."""
    generator = torch.Generator().manual_seed(0)
    contexts = [context for length in range(3) for context in product(range(3), repeat=length)]
    p, q = ({one: torch.rand(3, generator=generator).double().mul(3).softmax(-1) for one in contexts} for _ in "pq")
    overlap = {one: torch.minimum(p[one], q[one]) for one in contexts}
    averaged = 0.0
    for text in product(range(3), repeat=3):
        before = [text[:i] for i in range(3)]
        probability = math.prod(p[one][token].item() for one, token in zip(before, text, strict=True))
        acceptance = torch.stack([overlap[one].sum() for one in before])
        is_draft = torch.stack([overlap[one][token] / p[one][token] for one, token in zip(before, text, strict=True)])
        averaged += probability * expected_tokens(acceptance, is_draft).item()
    # The probability of drafting these tokens and having them all accepted.
    accepted = (
        math.prod(overlap[drafted[:i]][drafted[i]].item() for i in range(length))
        for length in (1, 2, 3)
        for drafted in product(range(3), repeat=length)
    )
    assert averaged == pytest.approx(1.0 + sum(accepted), abs=1e-9)


# Agreement with real runs --------------------------------------------------------------------------------------------


class WatchedShortlist(ShortlistPolicy):
    """Notes everything that it observes."""

    name = "watched"
    needs = Needs(4, 3, 5, draft_inputs=True, top_logits=True, out_of_vocabulary=True, hidden_states=True)
    needs |= Needs(prompt_hidden_states=True, prompt_positions=5)

    def __init__(self):
        self.seen: list[tuple] = []
        self.started = self.closed = 0

    def start(self, vocabulary: VocabularyInfo) -> "WatchedState":
        self.started += 1
        state = WatchedState(FrequencyShortlist(size=250).start(vocabulary))
        state.policy = self
        return state


class WatchedState(ForwardingState):
    policy: WatchedShortlist

    def note(self, *what: Any, numbers: tuple = ()) -> None:
        """What must be equal, and numbers that may differ by rounding."""
        flat = [torch.zeros(0), *(one.flatten() for one in numbers if one is not None)]
        what = [one.tolist() if isinstance(one, torch.Tensor) else one for one in what]
        self.policy.seen.append((*what, torch.cat(flat)))

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        self.inputs = embeddings, features

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        self.note("select", depth, token_ids, numbers=(features, *self.inputs))
        return super().select(depth, token_ids, features)

    def observe_prompt(self, prompt: Prompt) -> None:
        self.note(
            "prompt", prompt.start, prompt.token_ids, prompt.top_ids, numbers=(prompt.top_logits, prompt.hidden_states)
        )

    def observe(self, verdict: Verdict) -> None:
        # Drafts after the rejected one follow a text that is not there when texts are given.
        drafted = verdict.drafted[: verdict.verified.shape[0]]
        seen = verdict.start, verdict.verified, drafted, verdict.out_of_vocabulary, verdict.top_ids
        self.note("verdict", *seen, numbers=(verdict.top_logits, verdict.hidden_states))

    def begin_round(self) -> None:
        self.note("round")

    def close(self) -> None:
        self.policy.closed += 1


def steps_that_count(seen: list[tuple]) -> list[tuple]:
    """The draft steps after accepted drafts, of which the text is the same in a run and where it is given."""
    kept, steps = [], []
    for one in seen:
        if one[0] == "select":
            steps = [one] if one[1] == 0 else [*steps, one]
        elif one[0] == "verdict":
            kept += steps[: len(one[2])]
            steps = []
    # A run shows no verdict on its last round.
    return kept + steps[:1]


@pytest.mark.parametrize("name", representatives("families", KINDS, keep=2))
def test_policies_observe_the_same_as_in_a_session(name, drafters):
    """Greedily, where nothing is left to chance, a run and the measurement are the same round for round."""
    target, drafter = drafters[name]
    real, forced = WatchedShortlist(), WatchedShortlist()
    with torch.no_grad():
        assistant = DynSpecAssistant(drafter, real, target=target, num_assistant_tokens=3)
        config = generation_config(target, 24, temperature=0.0)
        target.generate(prompt(12, seed=0), generation_config=config, assistant_model=assistant)
        assistant.unbind()
    result = measure(target, drafter, {"watched": forced}, 1, temperature=0.0)
    assert figures(result, "watched")["acceptance_length"] == pytest.approx(assistant.stats.acceptance_length)
    assert 1.2 < assistant.stats.acceptance_length < 3.8
    assert result.measured[0].rounds == assistant.stats.rounds
    assert result.measured[0].oov == pytest.approx(assistant.stats.oov_rate)
    assert name != "trimmed" or result.measured[0].oov > 0
    runs = [[one for one in policy.seen if one[0] != "select"] for policy in (real, forced)]
    assert len(runs[1]) - len(runs[0]) in (0, 1)
    steps = [steps_that_count(policy.seen) for policy in (real, forced)]
    assert len(steps[0]) == len(steps[1]) and {one[1] for one in steps[0]} >= {0, 1}
    for ours, theirs in zip(runs[0] + steps[0], runs[1][: len(runs[0])] + steps[1], strict=True):
        assert ours[:-1] == theirs[:-1]
        # Reading a text at once or token by token rounds differently, and a head's outputs are fed back.
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)
    (of_prompt,) = (one for one in runs[1] if one[0] == "prompt" and one[3])
    assert of_prompt[1] == 12 and len(of_prompt[3]) == 5 and len(of_prompt[3][0]) == 3
    assert of_prompt[-1].shape[0] == 5 * (3 + target.config.hidden_size)
    assert {one[0] for one in runs[1]} == {"prompt", "round", "verdict"}
    assert forced.started == forced.closed > 0


@pytest.mark.statistical
@pytest.mark.parametrize(("name", "size"), [("independent", 150), ("eagle2", 150), ("eagle3", 150), ("trimmed", 60)])
def test_acceptance_agrees_with_real_runs_at_a_temperature(name, size, drafters):
    """Two estimates of one number from 24 texts each. Chance exceeds four standard errors of their difference once in
    some 10,000 seeds."""
    target, drafter = drafters[name]
    policies, count = {**FULL, "frequency": FrequencyShortlist(size=size)}, 24
    result = measure(target, drafter, policies, count, seed=7)
    config = generation_config(target, 24, temperature=0.5)
    for label, policy in policies.items():
        assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=3)
        lengths, rates = [], []
        for seed in range(count):
            torch.manual_seed(100 + seed)
            target.generate(prompt(12, seed=seed), generation_config=config, assistant_model=assistant)
            lengths.append(assistant.stats.acceptance_length)
            rates.append(assistant.stats.oov_rate)
        assistant.unbind()
        measured = [row for row in result.measured if row.policy == label]
        for real, figure in ((lengths, "acceptance_length"), (rates, "oov")):
            ours = [getattr(row, figure) for row in measured]
            error = math.sqrt((stdev(real) ** 2 + stdev(ours) ** 2) / count)
            assert abs(fmean(real) - fmean(ours)) <= 4 * error < 0.6
    assert figures(result, "full")["acceptance_length"] > figures(result, "frequency")["acceptance_length"] > 1.1


# Whole measurements --------------------------------------------------------------------------------------------------


def test_a_target_that_drafts_for_itself(target):
    found = figures(measure(target, target, FULL, 2, num_assistant_tokens=4), "full")
    exact = {"size": VOCABULARY, "mass": 1.0, "oracle_mass": 1.0, "recall": 1.0, "oov": 0.0, "acceptance": 1.0}
    assert {name: found[name] for name in exact} == pytest.approx(exact, abs=1e-4)
    assert found["expected_acceptance_length"] == pytest.approx(5.0, abs=1e-2)
    # 24 tokens are four rounds of five and one of four, whose last draft `generate` leaves out too.
    assert found["acceptance_length"] == pytest.approx(24 / 5, abs=1e-2)


def test_nothing_covers_more_than_the_oracle(target, drafter):
    policies = {name: make() for name, make in {**POLICY_CASES, **TERRIBLE}.items() if name != "auto"}
    result = measure(target, drafter, policies, 1, recall_k=5)
    assert {row.policy for row in result.measured} == set(policies)
    for row in result.measured:
        assert row.mass <= row.oracle_mass + 1e-5
        # The largest acceptance probability for this support (lemma 1).
        assert 0.0 <= row.acceptance <= row.mass + 1e-5
        assert 0.0 <= row.recall <= 1.0 + 1e-9 and 0.0 <= row.oov <= 1.0 + 1e-9
        assert 1.0 - 1e-9 <= row.acceptance_length <= 4.0 and 1.0 - 1e-9 <= row.size <= VOCABULARY + 1e-9
    curve = dict(oracle_curve(result))
    assert list(curve) == [1, 2, 4, 8, 16, 32, 64, 128, 256, VOCABULARY]
    assert list(curve.values()) == sorted(curve.values()) and curve[VOCABULARY] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", representatives("families", KINDS, keep=2))
def test_policies_do_not_change_each_others_figures(name, drafters, monkeypatch):
    window = {"window": InContextShortlist(window=60, verify_top_k=7)}
    alone = measure(*drafters[name], window).measured
    together = measure(*drafters[name], FULL | window)
    assert [row for row in together.measured if row.policy == "window"] == alone
    # Nor does the number of rows that are read at a time, but for rounding.
    monkeypatch.setattr(teacher_forcing, "CHUNK", 4)
    for few, many in zip(measure(*drafters[name], window).measured, alone, strict=True):
        assert (few.positions, few.rounds) == (many.positions, many.rounds)
        for figure in FIGURES:
            assert getattr(few, figure) == pytest.approx(getattr(many, figure), abs=1e-4)


def result_of(*policies: str) -> CoverageResult:
    """A result to which rows of prompts in the domains a and b are added by hand."""
    settings = CoverageSettings(policies=("full",), num_assistant_tokens=2, device="cpu")
    of_domains = {"a": FullShortlist(), "b": FullShortlist()}
    return CoverageResult(settings, dict.fromkeys(policies, of_domains), [], {}, 1, "now")


def test_summaries_average_over_prompts():
    result = result_of("one")
    for domain, mass, acceptance in (("a", 0.2, 0.5), ("a", 0.4, 0.7), ("b", 0.9, 0.9)):
        by_depth = (DepthCoverage(0, 4, 4, 6.0, mass, acceptance), DepthCoverage(1, 3, 1.5, 3.0, mass / 2, 0.5))
        numbers = (12, 10, 4, 5.0, mass, 0.9, 0.5, 0.1, acceptance, 2.0)
        depths = by_depth[: 1 + (domain == "a")]
        result.measured.append(TextCoverage(f"{domain}{mass}", 0, domain, "one", 0, *numbers, depths))
    overall, a, b = summarize(result)
    counts = [(one.domain, one.prompts, one.positions) for one in (overall, a, b)]
    assert counts == [(None, 3, 30), ("a", 2, 20), ("b", 1, 10)]
    assert overall.figures["mass"].mean == pytest.approx(0.5)
    assert overall.figures["mass"].standard_error == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2 / 3))
    assert b.figures["mass"].standard_error is None
    assert a.expected_acceptance_length == pytest.approx(1 + 0.6 + 0.36)
    first, second = overall.by_depth
    assert [(one.depth, one.prompts, one.positions) for one in (first, second)] == [(0, 3, 12), (1, 2, 3)]
    assert first.figures["mass"].mean == pytest.approx(0.5) and second.figures["mass"].mean == pytest.approx(0.15)
    assert len(a.by_depth) == 2 and len(b.by_depth) == 1
    table = depth_table(result)
    assert table.rows[-1] == ["", "1", "3.0", "3", "0.1500", "0.500"]
    assert shown(table, width=80).count("┏") == 1


def test_acceptance_lengths_are_compared_prompt_by_prompt():
    result = result_of("base", "other")
    for prompt_id, domain, *lengths in ((0, "a", 2.0, 1.9), (1, "a", 3.0, 2.8), (2, "b", 4.0, 4.0)):
        for policy, length in zip(result.policies, lengths, strict=True):
            numbers = (12, 10, 4, 5.0, 0.5, 0.9, 0.5, 0.1, 0.6, length)
            by_depth = (DepthCoverage(0, 4, 4, 5.0, 0.5, 0.6),)
            result.measured.append(TextCoverage(str(prompt_id), 0, domain, policy, 0, *numbers, by_depth))
    found = {(row.policy, row.domain): row.relative_acceptance_length for row in summarize(result)}
    assert {found["base", domain] for domain in (None, "a")} == {Estimate(1.0, 0.0)}
    assert found["other", None].mean == pytest.approx(8.7 / 9.0)
    # With a ratio of 29 / 30, residuals of −1, −3 and 4 thirtieths.
    assert found["other", None].standard_error == pytest.approx(math.sqrt(13) / 30 / math.sqrt(3) / 3.0)
    assert found["other", "a"].mean == pytest.approx(4.7 / 5.0)
    assert found["other", "b"] == Estimate(1.0, None)
    # If every prompt has nine tenths of the baseline, nothing is uncertain.
    in_proportion = Estimate.of_ratio([1.8, 2.7, 3.6], [2.0, 3.0, 4.0])
    assert in_proportion.mean == pytest.approx(0.9) and in_proportion.standard_error == pytest.approx(0.0, abs=1e-12)

    table = coverage_table(result)
    column = table.headings.index("of\nbase")
    assert [cells[column] for cells in table.rows] == ["100%", "96.67%\n±2.31%"]
    masses, relative = domain_tables(result)
    assert masses.title == "Mass on the shortlist, greedy" and masses.rows[1] == ["other", "0.5000\n±0.0000", "0.5000"]
    assert relative.title == "Acceptance length relative to base, greedy"
    assert [cells[1:] for cells in relative.rows] == [["100%", "100%"], ["94.00%\n±0.80%", "100.00%"]]


def test_texts_of_one_prompt_count_as_one(target, drafter):
    once, twice = (measure(target, drafter, FULL, 2, continuations=count) for count in (1, 2))
    texts = [(f"words/{prompt_id}", text) for text in (0, 1) for prompt_id in (0, 1)]
    assert [(row.prompt, row.continuation) for row in twice.measured] == list(twice.oracle_curves) == texts
    # The first texts are those of a run with one each, and the others are not.
    assert twice.measured[:2] == once.measured
    assert twice.measured[2].acceptance != twice.measured[0].acceptance
    assert coverage_table(twice).title == "Coverage, temperature 0.5, 2 prompts, 4 texts"
    # A text that was left out does not make its prompt weigh less.
    del twice.measured[3], twice.oracle_curves["words/1", 1]
    (row, _), (one, other, again) = summarize(twice), twice.measured
    assert row.prompts == 2 and row.positions == pytest.approx(one.positions + other.positions + again.positions)
    for name in FIGURES:
        a, b, c = (getattr(text, name) for text in (one, other, again))
        assert row.figures[name] == Estimate.of([(a + c) / 2, b])
    masses = [text.by_depth[1].mass for text in (one, other, again)]
    assert row.by_depth[1].figures["mass"] == Estimate.of([(masses[0] + masses[2]) / 2, masses[1]])
    points = [curve[3][1] for curve in twice.oracle_curves.values()]
    assert oracle_curve(twice)[3] == (8, pytest.approx(((points[0] + points[2]) / 2 + points[1]) / 2))


def test_a_text_that_ends_at_once_is_left_out(target, drafter):
    ending = tiny("llama", seed=0)
    ending.generation_config.eos_token_id = list(range(VOCABULARY))
    result = measure(ending, drafter, FULL, 1)
    assert result.complete and not result.measured and not coverage_table(result).rows
    assert result.notes == ["words/0 was left out: the target ends it before there is anything to draft"]


def test_an_interrupted_measurement_keeps_whole_prompts(target, drafter, monkeypatch):
    def interrupt(activity: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    saved, watched = [], WatchedShortlist()
    hooks = {"report": interrupt, "save": lambda one: saved.append(len(one.measured))}
    result = measure(target, drafter, {"watched": watched}, 3, hooks, stream=True)
    assert not result.complete and result.notes == ["interrupted before all was measured"]
    assert saved == [1, 1] and watched.started == watched.closed > 0
    assert "generate" not in vars(target)

    overall, calls = RoundFigures.overall, []

    def interrupted(figures: RoundFigures) -> dict[str, float]:
        calls.append(figures)
        if len(calls) == 5:  # Of each text there are one expectation and two that are drawn.
            raise KeyboardInterrupt
        return overall(figures)

    monkeypatch.setattr(RoundFigures, "overall", interrupted)
    result = measure(target, drafter, {**FULL, "window": InContextShortlist(window=64)}, 3)
    assert not result.complete and [row.prompt for row in result.measured] == ["words/0", "words/0"]
    assert [row.prompt for row in result.drawn] == ["words/0", "words/0"]
    assert list(result.oracle_curves) == [("words/0", 0)] and len(coverage_table(result).rows) == 2


# Predictions of the models -------------------------------------------------------------------------------------------


def forced_text(
    target: PreTrainedModel, drafter: Drafter, text: torch.Tensor, length: int, temperature: float, **settings: Any
) -> ForcedText:
    size = settings.pop("size", VOCABULARY)
    given = CoverageSettings(temperature=temperature, recall_k=6, num_assistant_tokens=3, device="cpu", **settings)
    vocabulary = VocabularyInfo(size, (EOS,), CPU, drafter.head.token_ids)
    return ForcedText(target, drafter, text, length, vocabulary, given, Needs())


@torch.no_grad()
@pytest.mark.parametrize("family", representatives("families", ["gemma2", "llama", "mistral", "gpt2"]))
def test_rows_are_those_of_one_forward(family, monkeypatch):
    monkeypatch.setattr(teacher_forcing, "CHUNK", 5)
    target = tiny(family, seed=3)
    drafter, text = perturbed(target, noise=0.2), prompt(40, seed=3)[0]
    forced = forced_text(target, as_drafter(drafter), text, 23, 0.5, size=VOCABULARY - 4)
    p = (target(text[None]).logits[0] / 0.5).softmax(-1)
    logits = drafter(text[None]).logits[0, :, : VOCABULARY - 4] / 0.5
    # What rounding in another order does to probabilities and logits.
    close = {"atol": 2e-4, "rtol": 1e-3}
    assert torch.equal(forced.top_ids, p[:-1].topk(6).indices)
    visited = []
    for starts in forced.blocks():
        assert len(starts) <= 5
        oracle = p.sort(descending=True).values.cumsum(-1)
        torch.testing.assert_close(forced.oracle(starts), oracle[starts.start - 1 : starts.stop - 1], **close)
        for start in starts:
            rows, about = forced.round(start, min(3, 40 - start)), slice(start - 1, min(start + 2, 39))
            visited.append(start)
            torch.testing.assert_close(rows.target, p[about], **close)
            torch.testing.assert_close(rows.drafter, logits[about], **close)
            assert torch.equal(rows.top_ids, p[about].topk(6).indices)
    assert visited == list(range(23, 40))


def slow_logits(head: Head, target: PreTrainedModel, drafter: EagleDrafter, text: torch.Tensor) -> Callable:
    """The logits `[V]` of a round's draft step, computed from the whole text by the reference head."""
    slow = SlowHead(head, target.get_input_embeddings().weight.detach())
    features = target_features(target, text, drafter.reads)

    def logits(start: int, depth: int) -> torch.Tensor:
        path = text[start : start + depth].tolist()
        scores = slow.after(text[:start], features[: start - 1], path) @ drafter.head.weight.T
        if drafter.head.token_ids is None:
            return scores
        return torch.full((VOCABULARY,), -torch.inf).index_put((drafter.head.token_ids,), scores)

    return logits


# Rounds, against the formulas ----------------------------------------------------------------------------------------


class RememberingShortlist(FrequencyShortlist):
    """Observes verdicts, so that it could learn from them, and ignores them."""

    def start(self, vocabulary: VocabularyInfo) -> "RememberingState":
        return RememberingState(self.leading_ids(vocabulary), vocabulary, self.position_aware)


class RememberingState(FrequencyState):
    def observe(self, verdict: Verdict) -> None:
        pass


class SlowRounds:
    """Rounds of three drafts along a text that a target wrote: every step of every round by the paper's formulas."""

    length, drafted, temperature = 12, 3, 0.8

    def __init__(self, name: str, drafters: dict, new_tokens: int):
        self.target, drafter = drafters[name]
        self.drafter = as_drafter(drafter)
        torch.manual_seed(5)
        config = generation_config(self.target, new_tokens, self.temperature)
        self.text = self.target.generate(prompt(self.length, seed=4), generation_config=config)[0]
        self.p = (self.target(self.text[None]).logits[0] / self.temperature).softmax(-1)
        if self.drafter.reads:
            self._logits = slow_logits(head_of(name, self.target), self.target, self.drafter, self.text)
        else:
            said = drafter(self.text[None]).logits[0]
            self._logits = lambda start, depth: said[start + depth - 1]
        self.vocabulary = VocabularyInfo(VOCABULARY, (), CPU, self.drafter.head.token_ids)

    def measured(self, policy: ShortlistPolicy, *seeds: int | None, draws: int = 1) -> list[RoundFigures]:
        """The figures of each seed, or of so many together; None computes expectations."""
        text = forced_text(self.target, self.drafter, self.text, self.length, self.temperature)
        text.settings = replace(text.settings, recall_k=5)
        figures = [RoundFigures(self.drafted, draws) for _ in range(len(seeds) // draws)]
        along = [
            RoundsAlongText(policy.start(self.vocabulary), policy.needs, text, figures[place // draws], seed)
            for place, seed in enumerate(seeds)
        ]
        for starts in text.blocks():
            for rounds in along:
                rounds.follow(starts)
        return figures

    def steps(self, start: int, policy: ShortlistPolicy) -> list[tuple[tuple[float, ...], float]]:
        """For each draft step of the round that starts there, its figures, and the probability that the draft is the
        text's token."""
        state, steps = policy.start(self.vocabulary), []
        # In the first round of a head the target reads the prompt, and there is no draft.
        none = start == self.length and self.drafter.reads
        for depth in range(0 if none else min(self.drafted, self.text.shape[0] - start - 1)):
            ids = state.select(depth, self.text[:0], self.text[:0]).ids()
            of_target, token = self.p[start + depth - 1], self.text[start + depth]
            logits = self._logits(start, depth)[ids] / self.temperature
            q = torch.zeros(VOCABULARY).index_put((ids,), logits.softmax(-1))
            mass = of_target[ids].sum().item()
            oracle = of_target.topk(ids.shape[0]).values.sum().item()
            recall = torch.isin(of_target.topk(5).indices, ids).float().mean().item()
            acceptance = torch.minimum(of_target, q).sum().item()
            figures = (float(ids.shape[0]), mass, oracle, recall, float(token not in ids), acceptance)
            steps.append((figures, min(1.0, (q[token] / of_target[token]).item())))
        return steps


def slow_figures(rounds: list[tuple[float, list, int]]) -> dict[str, float]:
    """The figures of rounds: the probability of each, its steps, and how many drafts were accepted."""
    drafted = [(weight, figures) for weight, steps, _ in rounds for figures, _ in steps]
    verified = [(weight, one) for weight, steps, accepted in rounds for one, _ in steps[: accepted + 1]]
    tokens = []
    for weight, steps, _ in rounds:
        reached = [math.prod(is_draft for _, is_draft in steps[:depth]) for depth in range(len(steps))]
        expected = 1.0 + sum(one[-1] * probability for (one, _), probability in zip(steps, reached, strict=True))
        tokens.append((weight, (expected,)))
    means = (weighted_means(drafted)[0], *weighted_means(verified)[1:], *weighted_means(tokens))
    counts = [sum(weight for weight, *_ in some) for some in (drafted, verified, rounds)]
    return dict(zip(("draft_steps", "positions", "rounds", *FIGURES), (*counts, *means), strict=True))


def weighted_means(weighted: list[tuple[float, tuple[float, ...]]]) -> list[float]:
    whole = sum(weight for weight, _ in weighted)
    columns = zip(*(values for _, values in weighted), strict=True)
    return [sum(weight * value for (weight, _), value in zip(weighted, one, strict=True)) / whole for one in columns]


# What rounding in another order does to logits that reach 20.
SLOW = 2e-3


@torch.no_grad()
@pytest.mark.parametrize("name", representatives("families", KINDS, keep=2))
def test_rounds_of_a_policy_with_a_memory_are_drawn(name, drafters):
    slow, seed = SlowRounds(name, drafters, new_tokens=60), 5
    policy = RememberingShortlist(size=295, position_aware=True)
    luck = torch.rand(slow.text.shape, generator=torch.Generator().manual_seed(seed)).tolist()
    rounds, start = [], slow.length
    while start < slow.text.shape[0]:
        steps, accepted = slow.steps(start, policy), 0
        while accepted < len(steps) and luck[start + accepted] < steps[accepted][1]:
            accepted += 1
        rounds.append((1.0, steps, accepted))
        start += accepted + 1
    of_seed, of_another = slow.measured(policy, seed, seed + 1)
    measured, expected = of_seed.overall(), slow_figures(rounds)
    for count in ("draft_steps", "positions", "rounds"):
        assert measured[count] == expected[count]
    assert measured["positions"] > measured["rounds"] > 10
    assert measured == pytest.approx(expected, abs=SLOW)
    another = of_another.overall()
    assert measured != another
    # Pooled counts are those of one draw, and means weigh each draw by its rounds or positions.
    (both,) = slow.measured(policy, seed, seed + 1, draws=2)
    for figure, count in (("acceptance_length", "rounds"), ("acceptance", "positions"), ("mass", "positions")):
        assert both.overall()[count] == (measured[count] + another[count]) / 2
        mean = (measured[figure] * measured[count] + another[figure] * another[count]) / (2 * both.overall()[count])
        assert both.overall()[figure] == pytest.approx(mean)
    with pytest.raises(ValueError, match="have to be drawn"):
        slow.measured(policy, None)


@torch.no_grad()
@pytest.mark.parametrize("name", representatives("families", ["independent", "eagle3", "eagle2"], keep=2))
def test_rounds_of_a_policy_without_memory_are_all_that_chance_could_do(name, drafters, monkeypatch):
    """Against the list of all sequences of rounds that a text of twelve tokens can have, each with its probability."""
    slow = SlowRounds(name, drafters, new_tokens=12)
    # Nearly all tokens at first: those of a short list are drafted more often than the target draws them, which leaves
    # nothing to chance.
    policy = FrequencyShortlist(size=295, position_aware=True)
    steps = {start: slow.steps(start, policy) for start in range(slow.length, slow.text.shape[0])}

    def sequences(start: int, probability: float) -> list[tuple[float, list[tuple[int, int]]]]:
        if start == slow.text.shape[0]:
            return [(probability, [])]
        found, reached = [], probability
        for accepted in range(len(steps[start]) + 1):
            is_draft = steps[start][accepted][1] if accepted < len(steps[start]) else 0.0
            later = sequences(start + accepted + 1, reached * (1.0 - is_draft))
            found += [(one, [(start, accepted), *rest]) for one, rest in later]
            reached *= is_draft
        return found

    every = sequences(slow.length, 1.0)
    assert len(every) > 300 and sum(probability for probability, _ in every) == pytest.approx(1.0)
    rounds = [(probability, start, accepted) for probability, one in every for start, accepted in one]
    expected = slow_figures([(probability, steps[start], accepted) for probability, start, accepted in rounds])
    monkeypatch.setattr(teacher_forcing, "CHUNK", 5)
    (measured,) = slow.measured(policy, None)
    assert measured.overall() == pytest.approx(expected, rel=SLOW, abs=SLOW)
    assert sum(0.05 < is_draft < 0.95 for one in steps.values() for _, is_draft in one) >= 3
    for depth, found in enumerate(measured.by_depth()):
        verified = [
            (probability, steps[start][depth][0])
            for probability, start, accepted in rounds
            if depth < len(steps[start]) and depth <= accepted
        ]
        means = dict(zip(FIGURES[:-1], weighted_means(verified), strict=True))
        means |= {"positions": sum(weight for weight, _ in verified), "size": position_aware_size(295, depth)}
        wanted = ("mass", "acceptance", "positions", "size")
        assert [found[one] for one in wanted] == pytest.approx([means[one] for one in wanted], rel=SLOW, abs=SLOW)


def test_greedy_rounds_are_not_drawn(target, drafter):
    policies = {"without": FrequencyShortlist(size=90), "with": RememberingShortlist(size=90)}
    result = measure(target, drafter, policies, 3, temperature=0.0)
    assert by_policy(result.measured, "without") == by_policy(result.measured, "with")
    assert not result.drawn and {row.draws for row in (*result.measured, *summarize(result))} == {0}
    result = measure(target, drafter, FULL, 2, draws=5)
    assert not result.drawn and {row.draws for row in result.measured} == {0}
    assert result.notes == ["nothing is drawn, however many draws: no policy learns from verdicts"]


def test_if_one_policy_is_drawn_all_are_with_the_same_luck(target, drafter):
    window = {"window": 60, "prompt_top_k": 1, "verify_top_k": 1, "eviction": "lru"}
    policies = {
        **FULL,
        "window": InContextShortlist(**window),
        "some": FrequencyShortlist(size=200),
        "the same window": InContextShortlist(**window),
        "some with a memory": RememberingShortlist(size=200),
    }
    result = measure(target, drafter, policies, 3, draws=3)
    assert not result.notes and [row.policy for row in result.drawn] == list(policies) * 3
    learners = {"window", "the same window", "some with a memory"}
    assert {row.policy: row.draws for row in result.measured} == {one: 3 * (one in learners) for one in policies}
    assert all(row.draws == 3 for row in result.drawn)
    for label in learners:
        assert by_policy(result.measured, label) == by_policy(result.drawn, label)
    # Equal policies have equal rounds, and a memory that changes nothing is no difference.
    assert by_policy(result.drawn, "window") == by_policy(result.drawn, "the same window")
    assert by_policy(result.drawn, "some") == by_policy(result.drawn, "some with a memory")
    assert by_policy(result.measured, "some") != by_policy(result.drawn, "some")
    # The order of policies changes the order of the rows only.
    others = measure(target, drafter, dict(reversed(policies.items())), 3, draws=3)
    for label in policies:
        assert by_policy(others.measured, label) == by_policy(result.measured, label)
        assert by_policy(others.drawn, label) == by_policy(result.drawn, label)
    # Expectations are compared with expectations, and draws with draws.
    relative = {row.policy: row.relative_acceptance_length for row in summarize(result) if row.domain is None}
    for label, rows in (("window", result.drawn), ("some with a memory", result.drawn), ("some", result.measured)):
        lengths = ([row.acceptance_length for row in by_policy(rows, one)] for one in (label, "full"))
        assert relative[label] == Estimate.of_ratio(*lengths)
    first = {row.policy: row.relative_acceptance_length for row in summarize(others) if row.domain is None}
    assert first["some"] == Estimate(1.0, 0.0), "the difference of two that are drawn alike has no noise of its own"
    table = shown(coverage_table(result), width=80)
    assert "the rounds along each text are drawn 3 times" in " ".join(table.split())
    assert max(map(len, table.splitlines())) <= 80


def test_the_number_of_draws_changes_no_text(target, drafter):
    policies = {"window": InContextShortlist(window=60)}
    single, several = (measure(target, drafter, policies, 2, draws=draws) for draws in (1, 4))
    assert [row.draws for row in single.measured] == [1, 1] and [row.draws for row in several.measured] == [4, 4]
    for one, four in zip(single.measured, several.measured, strict=True):
        assert one.rounds == round(one.rounds) and four.rounds == pytest.approx(round(4 * four.rounds) / 4)
        assert one.acceptance_length != four.acceptance_length
    assert single.oracle_curves == several.oracle_curves


# Streams -------------------------------------------------------------------------------------------------------------


class NotingShortlist(InContextShortlist):
    """Notes its states, and the first shortlist of every text."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.states: list[NotingState] = []

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> "NotingState":
        self.states.append(NotingState(self.window, self.eviction == "stream", vocabulary, self.memory, memory))
        return self.states[-1]

    @property
    def used(self) -> "list[NotingState]":
        return [one for one in self.states if one.prompts]


class NotingState(InContextState):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.prompts: list[list[int]] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.first: list[set[int]] = []

    def observe_prompt(self, prompt: Prompt) -> None:
        if prompt.top_ids is None:
            self.prompts.append(prompt.token_ids.tolist())
            self.starts.append(prompt.start)
            self.ends.append(prompt.start)
        super().observe_prompt(prompt)

    def observe(self, verdict: Verdict) -> None:
        self.ends[-1] = verdict.start + verdict.verified.shape[0]
        super().observe(verdict)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        shortlist = super().select(depth, token_ids, features)
        if len(self.first) < len(self.prompts):
            self.first.append(set(shortlist.ids().tolist()))
        return shortlist


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_stream_keeps_states_in_the_order_of_the_prompts(target, drafter, temperature):
    prompts = words(3, domain=lambda seed: "ab"[seed % 2])
    settings = {"prompts": prompts, "temperature": temperature}
    window = {"window": 250, "prompt_top_k": 0, "verify_top_k": 0, "eviction": "lru"}
    some, noting = FrequencyShortlist(size=64), NotingShortlist(**window)
    stream = measure(target, drafter, {"window": noting, "some": some}, stream=True, **settings)
    fresh = measure(target, drafter, {"window": InContextShortlist(**window), "some": some}, **settings)

    (state,) = noting.used
    given = [[int(word[1:]) for word in one.text.split()] for one in prompts]
    assert state.prompts == given
    assert state.starts == [0, *state.ends[:-1]] and state.ends[0] == 36, "positions go on from text to text"
    with torch.no_grad():
        torch.manual_seed(0)
        config = generation_config(target, 24, temperature)
        text = set(target.generate(torch.tensor([given[0]]), generation_config=config)[0].tolist())
    assert state.first[0] == {*given[0], EOS}
    assert text | set(given[1]) <= state.first[1] and set(given[0]) | state.first[1] | set(given[2]) <= state.first[2]

    ours, theirs = by_policy(stream.measured, "window"), by_policy(fresh.measured, "window")
    assert ours[0] == theirs[0] and all(one.size > other.size for one, other in zip(ours[1:], theirs[1:], strict=True))
    # A policy that learns nothing is the same, and so are the texts.
    assert by_policy(stream.measured, "some") == by_policy(fresh.measured, "some")
    assert stream.oracle_curves == fresh.oracle_curves
    assert coverage_table(stream).title.endswith("3 prompts, as a stream")
    measure(target, drafter, {"window": noting}, stream=True, prompts=prompts[::-1])
    assert noting.used[-1].prompts == given[::-1]


def test_every_draw_and_every_round_of_texts_is_a_stream_of_its_own(target, drafter):
    noting = NotingShortlist(window=60, prompt_top_k=0)
    result = measure(target, drafter, {"window": noting}, 2, stream=True, draws=3, continuations=2)
    led = [one.prompts for one in noting.used]
    assert len(led) == 2 * 3 and all(len(prompts) == 2 for prompts in led) and len(result.measured) == 4
    fresh = measure(target, drafter, {"window": noting}, 2, draws=3, continuations=2)
    same = [one == other for one, other in zip(result.measured, fresh.measured, strict=True)]
    assert same == [True, False, True, False]


# Policies by domain, and heads ---------------------------------------------------------------------------------------


def rankings(root: Path, *domains: str) -> str:
    """Writes rankings, each the reverse of the one before, and returns what names them."""
    fingerprint = fingerprint_tokenizer(word_tokenizer())
    for number, domain in enumerate(domains):
        order = torch.arange(VOCABULARY) if number % 2 else torch.arange(VOCABULARY).flip(0)
        policy = FrequencyShortlist(order)
        config = DynSpecConfig(PolicyConfig(policy.name, policy.settings()), tokenizer=fingerprint)
        write_artifact(root / f"without-{domain}", config, tensors=policy.tensors())
    return f"frequency:size=64,ranking={root}/without-{{domain}}"


@pytest.mark.parametrize("stream", [False, True])
def test_each_domain_has_the_policy_that_names_it(tmp_path, target, drafter, stream):
    prompts = words(4, domain=lambda seed: ("a", "b/c")[seed % 2])
    text = rankings(tmp_path, "a", "b/c")
    one, other = (FrequencyShortlist(order, size=64) for order in (torch.arange(VOCABULARY).flip(0), None))
    settings = {"prompts": prompts, "stream": stream}
    result = measure(target, drafter, ("full", text, f"{text}+in_context:window=20"), **settings)
    label, union = list(result.policies)[1:]
    assert label == f"frequency:size=64,ranking={tmp_path.name}/without-{{domain}}"
    single = measure(target, drafter, {"one": one, "other": other}, **settings)
    for of_domain, name in (("a", "one"), ("b/c", "other")):
        ours = [row for row in by_policy(result.measured, label) if row.domain == of_domain]
        assert ours == [row for row in by_policy(single.measured, name) if row.domain == of_domain]
        assert ours != [row for row in by_policy(single.measured, "other") if row.domain == "a"]
    by_domain = {"left out": {"a": one, "b/c": other, "unused": FullShortlist()}}
    given = measure(target, drafter, by_domain, **settings)
    assert by_policy(given.measured, "left out") == by_policy(result.measured, label)

    described = to_dict(result)["policies"]
    assert described["full"]["name"] == "full" and set(described[label]) == {"by_domain"}
    digests = {domain: one["tensors"]["ranking"] for domain, one in described[label]["by_domain"].items()}
    assert set(digests) == {"a", "b/c"} and len(set(digests.values())) == 2
    assert [row.policy for row in summarize(result)][:3] == ["full", label, union]


def test_policies_of_domains_that_cannot_be_are_refused(tmp_path, target, drafter):
    text = rankings(tmp_path, "a")
    with pytest.raises(DynSpecError, match="without-words"):
        measure(target, drafter, ("full", text))
    for domain, problem in (("a,size=3", "holds ','"), ("a/../b", r"holds '\.\.'"), ("c++", r"holds '\+'")):
        with pytest.raises(ConfigurationError, match=f"{problem}; rename the prompts' category"):
            measure(target, drafter, (text,), prompts=words(1, domain=lambda _, domain=domain: domain))
    with pytest.raises(ConfigurationError, match=r"'one' has none for the domain 'words'; it has .'a'."):
        measure(target, drafter, {"one": {"a": FullShortlist()}})
    with pytest.raises(ConfigurationError, match=r"without-{domain}' is given twice"):
        CoverageSettings(policies=(text, text))


def test_heads_with_a_vocabulary_of_their_own_and_short_texts(drafters):
    found = figures(measure(*drafters["trimmed"], FULL), "full")
    assert found["size"] == pytest.approx(DRAFTABLE)
    assert 0.1 < found["mass"] < 0.9 and 0.1 < found["oov"] < 0.9
    assert found["acceptance"] <= found["mass"] <= found["oracle_mass"]
    with pytest.raises(ConfigurationError, match="max_new_tokens must be at least 3 for an EAGLE head"):
        measure(*drafters["eagle3"], FULL, max_new_tokens=2)
    (row,) = measure(*drafters["eagle3"], FULL, 1, max_new_tokens=3).measured
    assert row.positions == 1 and 2 <= row.rounds <= 3
    # The target's first token, and the head's one draft with the target's own token.
    assert row.acceptance_length == pytest.approx((row.rounds + row.acceptance) / row.rounds)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target, drafter) -> Path:
    """A target, a drafter and two files of prompts."""
    root = tmp_path_factory.mktemp("coverage")
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(root / name)
        word_tokenizer().save_pretrained(root / name)
    for name, prompts in (("code", words(2)), ("law", words(3)[2:])):
        rows = [{"question_id": index, "turns": [one.text]} for index, one in enumerate(prompts)]
        write_rows(root / f"{name}.jsonl", rows)
    return root


POLICIES = ("full", "frequency:size=64", "in_context:window=32,eviction=lru")


def test_the_whole_command(folder):
    out, plot = folder / "out.json", folder / "out.png"
    arguments = ["--target", folder / "target", "--drafter", folder / "drafter", "--prompts", folder / "code.jsonl"]
    arguments += [word for policy in POLICIES for word in ("--policy", policy)]
    arguments += ["--temperature", 0.8, "--max-new-tokens", 16, "--num-assistant-tokens", 2, "--device", "cpu"]
    arguments += ["--threads", 1, "--by-domain", "--json", out, "--plot", plot, "--stream", "--draws", 2]
    done = invoke("coverage", *arguments, folder / "law.jsonl")
    assert done.exit_code == 0, done.exception
    headings = ("oracle", "recall", "OOV", "acceptance", "equation 1", "±", "law", "Mass on the shortlist", "100%")
    titles = ("Coverage, temperature 0.8, 3 prompts, as a stream", "Acceptance length relative to full")
    assert all(one in done.stdout for one in (*headings, *titles))
    assert all(done.stdout.count(f"│ {policy} ") == 3 for policy in POLICIES)

    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["complete"] and not written["notes"] and written["schema_version"] == 4
    assert str(folder.parent) not in json.dumps(written)
    assert written["provenance"]["command"][:4] == ["hf-dynspec", "coverage", "--target", f"{folder.name}/target"]
    settings = {"temperature": 0.8, "recall_k": 10, "stream": True, "draws": 2}
    assert settings.items() <= written["settings"].items()
    assert written["models"]["drafter"]["class"] == "LlamaForCausalLM"
    assert written["policies"]["frequency:size=64"]["settings"]["size"] == 64
    # What a script needs to compare any two policies prompt by prompt.
    pairs = {(row["prompt"], row["policy"]): row["acceptance_length"] for row in written["measured"]}
    assert len(pairs) == len(written["measured"]) == 3 * len(POLICIES) and min(pairs.values()) >= 1.0
    places = {(row["policy"], row["domain"]) for row in written["results"]}
    assert places == set(product(POLICIES, (None, "code", "law")))
    full, frequency, _ = (row for row in written["results"] if row["domain"] is None)
    assert full["figures"]["size"]["mean"] == pytest.approx(VOCABULARY)
    assert full["relative_acceptance_length"] == {"mean": 1.0, "standard_error": 0.0}
    assert frequency["relative_acceptance_length"]["mean"] < 1.0
    assert full["figures"]["mass"]["mean"] > frequency["figures"]["mass"]["mean"]
    assert written["oracle_curve"][-1]["size"] == VOCABULARY
    # The window learns, so that all are drawn to be compared with it.
    assert {(row["prompt"], row["policy"]) for row in written["drawn"]} == set(pairs)
    assert {row["policy"]: row["draws"] for row in written["measured"]} == dict(zip(POLICIES, (0, 0, 2), strict=True))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_whole_command_with_a_head(tmp_path, drafters):
    target, head = drafters["trimmed"]
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    head_of("trimmed", target).write(tmp_path / "trimmed")
    head_of("eagle2", target).write(tmp_path / "pickled", pickled=True)
    prompts, out = tmp_path / "code.jsonl", tmp_path / "out.json"
    write_rows(prompts, ({"text": one.text} for one in words(2)))
    arguments = ["--target", tmp_path / "target", "--prompts", prompts, "--device", "cpu"]
    arguments += ["--policy", "full", "--policy", "frequency:size=64,position_aware=true", "--temperature", 0.5]
    arguments += ["--max-new-tokens", 24, "--num-assistant-tokens", 3, "--by-depth", "--json", out]
    done = invoke("coverage", *arguments, "--eagle", tmp_path / "trimmed")
    assert done.exit_code == 0, done.exception
    by_depth = done.stdout.partition("By draft depth, temperature 0.5")[2]
    rows = [line.split("│") for line in by_depth.splitlines() if "│" in line]
    assert [row[2].strip() for row in rows] == ["0", "1", "2"] * 2 and rows[3][1].strip().startswith("frequency")

    written = json.loads(out.read_text(encoding="utf-8"))
    assert "drafter" not in written["models"] and written["models"]["eagle"]["trimmed"]["head_rows"] == DRAFTABLE
    assert written["settings"]["eagle"] == f"{tmp_path.name}/trimmed" and not written["settings"]["drafter"]
    assert str(tmp_path.parent) not in json.dumps(written)
    aware = next(row for row in written["results"] if "aware" in row["policy"] and row["domain"] is None)
    assert [one["figures"]["size"]["mean"] for one in aware["by_depth"]] == pytest.approx([64, 64, 21])
    # The same from Python, with the head as it is loaded.
    policies = {**FULL, "aware": FrequencyShortlist(size=64, position_aware=True)}
    for one, theirs in zip(measure(target, head, policies).measured, written["measured"], strict=True):
        assert one.by_depth[0].positions > 0
        for name in FIGURES:
            assert getattr(one, name) == pytest.approx(theirs[name], abs=1e-6)

    done = invoke("coverage", *arguments, "--eagle", tmp_path / "pickled")
    assert isinstance(done.exception, ConfigurationError) and "the EAGLE head pickled: " in str(done.exception)
    done = invoke("coverage", *arguments, "--eagle", tmp_path / "pickled", "--allow-pickle")
    assert done.exit_code == 0, done.exception


def test_the_plot_has_a_point_for_each_policy(tmp_path, target, drafter, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: drawn.append(figure))
    result = measure(target, drafter, {"a": FullShortlist(), "b": FrequencyShortlist(size=64)})
    write_plot(tmp_path / "drawn.svg", result)
    ((axes,),) = (figure.axes for figure in drawn)
    points = {one.get_label(): one.lines[0].get_xydata().tolist() for one in axes.containers}
    for label in ("a", "b"):
        found = figures(result, label)
        assert points[label] == [pytest.approx([found["size"], found["mass"]])]
    curve = axes.lines[0].get_xydata().tolist()
    assert curve == [pytest.approx(point) for point in oracle_curve(result)]
    assert axes.get_xscale() == "log" and "size" in axes.get_xlabel() and "mass" in axes.get_ylabel()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"recall_k": 0}, "recall_k must be"),
        ({"continuations": 0, "temperature": 1.0}, "continuations must be"),
        ({"continuations": 2}, "2 greedy continuations of a prompt would all be one"),
        ({"draws": 0, "temperature": 1.0}, "draws must be"),
        ({"draws": 2}, "2 greedy draws along a text would all be one"),
        ({"max_new_tokens": 1}, "max_new_tokens must be a whole number of at least 2"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens must be"),
        ({"policies": ()}, "no policy to measure"),
        ({"policies": {}}, "no policy to measure"),
        ({"policies": ("full", "full")}, "given twice"),
    ],
)
def test_settings_out_of_range_are_refused(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        CoverageSettings(**changes)


DRAFTER = ("--drafter", "no-model")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*DRAFTER, "--policy", "nonsense"], "no policy 'nonsense'"),
        ([*DRAFTER, "--temperature", "-1"], "temperature must be"),
        ([*DRAFTER, "--continuations", "4"], "set a temperature"),
        ([*DRAFTER, "--policy", "frequency:ranking=no/such-{domain}"], "no/such-good"),
        ([*DRAFTER, "--json", "no/such/folder/out.json"], "--json takes a file in an existing folder"),
        ([*DRAFTER, "--plot", "no/such/folder/out.png"], "--plot takes a file in an existing folder"),
        ([*DRAFTER, "--plot", "out.txt"], "no suffix of an image"),
        ([*DRAFTER, "missing.jsonl"], "missing.jsonl: no such file or directory"),
        ([], "name the drafter: a folder or a Hub id of a small model, or of an EAGLE head"),
        ([*DRAFTER, "--eagle", "no-head"], "name a drafter or an EAGLE head, not both"),
        (["--eagle", "./no/such/head"], "--eagle ./no/such/head: there is no such folder"),
        (["--eagle", "empty"], "the EAGLE head empty: config.json: is not in empty"),
        (["--eagle", "empty", "--max-new-tokens", "2"], "--max-new-tokens must be at least 3 for an EAGLE head"),
    ],
)
def test_bad_input_ends_before_models_are_loaded(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"text": "a"}\n')
    Path("empty").mkdir()
    result = invoke("coverage", "--target", "no-model", "--prompts", "good.jsonl", *arguments)
    assert result.exit_code != 0 and isinstance(result.exception, DynSpecError)
    assert problem in str(result.exception) and "\n" not in str(result.exception)


def test_models_and_settings_that_do_not_fit_are_refused(target, drafter, drafters):
    with pytest.raises(ConfigurationError, match="recall_k must be at most the size of the vocabulary, 301"):
        measure(target, drafter, FULL, recall_k=302)
    with pytest.raises(ConfigurationError, match="drafter must be a small model or an EAGLE head, got str"):
        measure(target, "a name", FULL)
    with pytest.raises(DynSpecError, match="hidden_size"):
        measure(soft(hidden_size=64, head_dim=16), drafters["eagle3"][1], FULL)
