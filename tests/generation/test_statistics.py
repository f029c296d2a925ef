"""The statistics say what happened: counted here a second time from what the target and the session did."""

import json
from collections import Counter
from itertools import permutations

import pytest
import torch
from models import POLICY_CASES, RandomShortlist, perturbed, prompt, tiny

from hf_dynspec import DynSpecAssistant, FrequencyShortlist, UnionShortlist, devices
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.protocol import BackgroundWork, Candidates, Shortlist
from hf_dynspec.stats import SECTIONS, DraftingStatistics, Stopwatch


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def drafter(target):
    return perturbed(target)


class Pieces:
    """A streamer: the prompt, then the tokens of each round."""

    def __init__(self):
        self.pieces: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", ["full", "frequency", "in_context", "hybrid", "frequency, position-aware", "random"])
def test_counts(name, target, drafter, monkeypatch):
    drafts: list[tuple[list[int], list[set[int]]]] = []
    draft = DraftSession.draft_chain

    def recording(self, prefix, count, choose, threshold=0.0):
        candidates = draft(self, prefix, count, choose, threshold)
        drafts.append((candidates.token_ids.tolist(), [set(one.ids().tolist()) for one in candidates.shortlists]))
        return candidates

    monkeypatch.setattr(DraftSession, "draft_chain", recording)
    policy = RandomShortlist(30) if name == "random" else POLICY_CASES[name]()
    assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=4)
    streamer = Pieces()
    # The budget is not a multiple of a round's tokens, so that the last draft is cut short or left out.
    target.generate(prompt(), max_new_tokens=39, do_sample=False, assistant_model=assistant, streamer=streamer)
    rounds = streamer.pieces[1:]
    stats = assistant.stats

    assert stats.calls == 1 and stats.rounds == len(rounds)
    assert stats.tokens == sum(map(len, rounds)) and stats.accepted == stats.tokens - stats.rounds
    assert stats.drafted == sum(len(tokens) for tokens, _ in drafts)
    assert stats.acceptance_length == stats.tokens / stats.rounds
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    lengths = [len(one) for one in rounds]
    assert stats.tokens_per_round == [lengths.count(n) for n in range(max(lengths) + 1)]
    by_position = [
        sum(length > depth + 1 for length in lengths) / sum(len(tokens) > depth for tokens, _ in drafts)
        for depth in range(max(len(tokens) for tokens, _ in drafts))
    ]
    assert stats.acceptance_rate_by_position == by_position
    reached = [sum(length > depth + 1 for length in lengths) for depth in range(len(by_position))]
    assert stats.accepted_per_round == [count / len(lengths) for count in reached]
    assert 1 + sum(stats.accepted_per_round) == pytest.approx(stats.acceptance_length)

    sizes = [len(ids) for _, shortlists in drafts for ids in shortlists]
    assert stats.active_vocabulary == pytest.approx(sum(sizes) / len(sizes))
    assert stats.active_vocabulary_max == max(sizes)
    checked = missed = 0
    for verified, (_, shortlists) in zip(rounds, drafts, strict=False):
        for token, ids in zip(verified, shortlists, strict=False):
            checked += 1
            missed += token not in ids
    assert stats.oov_rate == pytest.approx(missed / checked)
    assert (missed > 0) == (name != "full")
    assert stats.coverage is None and stats.draft_seconds is None and stats.seconds == {}


@pytest.mark.parametrize("name", ["full", "frequency", "in_context"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_coverage_is_the_targets_mass_on_the_shortlists(name, temperature, target, drafter, monkeypatch):
    """Recomputed from one forward over the output."""
    starts, shortlists = [], []
    draft = DraftSession.draft_chain

    def recording(self, prefix, count, choose, threshold=0.0):
        candidates = draft(self, prefix, count, choose, threshold)
        starts.append(prefix.shape[0])
        shortlists.append([one.ids() for one in candidates.shortlists])
        return candidates

    monkeypatch.setattr(DraftSession, "draft_chain", recording)
    assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, measure_coverage=True)
    streamer = Pieces()
    torch.manual_seed(0)
    output = target.generate(
        prompt(), max_new_tokens=30, do_sample=True, top_k=0, temperature=temperature, assistant_model=assistant,
        streamer=streamer,
    )  # fmt: skip
    with torch.no_grad():
        probabilities = (target(output).logits[0].float() / temperature).softmax(-1)
    mass = [
        float(probabilities[start - 1 + i, ids].sum())
        for start, verified, own in zip(starts, streamer.pieces[1:], shortlists, strict=False)
        for i, (_, ids) in enumerate(zip(verified, own, strict=False))
    ]
    # fp32 sums of probabilities in another order.
    assert assistant.stats.coverage == pytest.approx(sum(mass) / len(mass), abs=1e-4)
    assert (assistant.stats.coverage > 0.9999) == (name == "full")


def test_the_total_is_the_sum_of_the_calls(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, measure_coverage=True)
    calls = []
    for seed, new_tokens in enumerate((5, 30, 1)):
        target.generate(prompt(seed=seed), max_new_tokens=new_tokens, do_sample=False, assistant_model=assistant)
        calls.append(assistant.stats)
    total = assistant.stats_total
    assert total.calls == 3
    for name in ("rounds", "tokens", "drafted", "accepted"):
        assert getattr(total, name) == sum(getattr(one, name) for one in calls)
    assert total.rounds_of == sum((one.rounds_of for one in calls), Counter()) and total.rounds_of["hybrid"] > 1
    assert total.active_vocabulary_max == max(one.active_vocabulary_max for one in calls)
    assert total.coverage == pytest.approx(
        sum(float(one._coverage_sum) for one in calls) / sum(one._covered_positions for one in calls)
    )
    assert total.tokens_per_round == [
        sum(one.tokens_per_round[n] for one in calls if n < len(one.tokens_per_round))
        for n in range(len(total.tokens_per_round))
    ]


def test_profiling_divides_the_call(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, profile=True)
    hooks = len(target._forward_hooks), len(target._forward_pre_hooks)
    target.generate(prompt(), max_new_tokens=20, do_sample=False, assistant_model=assistant)
    seconds = assistant.stats.seconds
    assert set(seconds) == {*SECTIONS, "other"}
    assert all(value > 0 for value in seconds.values())
    assert assistant.stats.draft_seconds == pytest.approx(sum(seconds[name] for name in SECTIONS[:-1]))
    assert (len(target._forward_hooks), len(target._forward_pre_hooks)) == hooks
    one_call = dict(seconds)
    target.generate(prompt(), max_new_tokens=20, do_sample=False, assistant_model=assistant)
    for name, value in assistant.stats_total.seconds.items():
        assert value == pytest.approx(one_call[name] + assistant.stats.seconds[name])


def test_a_stopwatch_charges_time_to_its_section_only():
    watch = Stopwatch(enabled=True)
    with watch.section("head"):
        torch.randn(200, 200) @ torch.randn(200, 200)
    once = watch.seconds["head"]
    assert once > 0
    with watch.section("head"):
        pass
    assert watch.seconds["head"] > once
    assert all(value == 0 for name, value in watch.seconds.items() if name != "head")
    with pytest.raises(ZeroDivisionError), watch.section("policy"):
        1 / 0  # noqa: B018
    assert watch.seconds["policy"] > 0
    idle = Stopwatch(enabled=False)
    with idle.section("head"):
        pass
    assert idle.seconds == {}


def test_nothing_happened_yet(drafter):
    stats = DynSpecAssistant(drafter).stats
    assert stats.acceptance_length == stats.acceptance_rate == stats.oov_rate == stats.active_vocabulary == 0.0
    assert stats.acceptance_rate_by_position == stats.accepted_per_round == [] and stats.coverage is None
    assert "new tokens" in str(stats)


def test_figures_can_be_printed_and_stored(target, drafter):
    policy = FrequencyShortlist(size=50)
    assistant = DynSpecAssistant(drafter, policy, target=target, profile=True, measure_coverage=True)
    target.generate(prompt(), max_new_tokens=12, do_sample=False, assistant_model=assistant)
    figures = json.loads(json.dumps(assistant.stats.to_dict()))
    assert figures["tokens"] == 12 and figures["active_vocabulary"] == 50.0
    text = str(assistant.stats)
    names = ("acceptance length", "acceptance rate", "accepted per round, by draft step", "coverage")
    for shown in (*names, "out of vocabulary", "time: backbone", "50 (at most 50)"):
        assert shown in text


def test_the_token_after_a_fully_accepted_draft_had_no_shortlist():
    stats = DraftingStatistics()
    shortlist = Shortlist(torch.tensor([4, 5]), 0)
    candidates = Candidates(torch.tensor([4, 5]), (shortlist, shortlist), (torch.zeros(1), torch.zeros(1)))
    stats.record_draft(candidates, "full")
    stats.record_verification(2)
    stats.record_verified_tokens(2, candidates.has_missed(torch.tensor([4, 5, 9])))
    assert stats.oov_rate == 0.0
    stats.record_draft(candidates, "full")
    stats.record_verification(1)
    stats.record_verified_tokens(1, candidates.has_missed(torch.tensor([4, 9])))
    assert stats.oov_rate == 1 / 4


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_sizes_are_counted_where_looking_at_them_would_make_wait(order, monkeypatch):
    """Of shortlists some slots of which do not count, and of others, whichever comes first."""
    monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    slots = torch.arange(4)
    of_size = [
        Shortlist(slots, 0, occupied=torch.tensor([True, True, True, False])),
        Shortlist(slots, 0, size=2),
        Shortlist(slots, 0, occupied=torch.tensor([False, False, False, True])),
    ]
    stats = DraftingStatistics()
    stats.record_draft(Candidates(slots[:3], tuple(of_size[place] for place in order), 3 * (torch.zeros(1),)), "full")
    assert (stats.active_vocabulary, stats.active_vocabulary_max) == (2.0, 3)


class DiligentShortlist(FrequencyShortlist):
    """Its states say that they work beside the thread that generates."""

    def start(self, vocabulary):
        state = super().start(vocabulary)
        state.take_background_work = lambda: BackgroundWork(jobs=2, seconds=0.5, exposed_seconds=0.125, late_rounds=1)
        return state


@pytest.mark.parametrize("validate", [False, True])
def test_work_in_the_background(validate, target, drafter):
    policy = UnionShortlist(DiligentShortlist(size=20), FrequencyShortlist(size=30), DiligentShortlist(size=40))
    assistant = DynSpecAssistant(drafter, policy, target=target, validate=validate)
    for _ in range(2):
        target.generate(prompt(), max_new_tokens=8, do_sample=False, assistant_model=assistant)
        assert assistant.stats.background_work == BackgroundWork(4, 1.0, 0.25, 2)
    assert assistant.stats.background_work.hidden_share == 0.75
    assert "4 jobs, 1.000 s, 75.0% of it hidden; 2 rounds" in str(assistant.stats)
    total = json.loads(json.dumps(assistant.stats_total.to_dict()))["background_work"]
    assert total == {"jobs": 8, "seconds": 2.0, "exposed_seconds": 0.5, "late_rounds": 4, "hidden_share": 0.75}


def test_no_work_in_the_background(target, drafter):
    assistant = DynSpecAssistant(drafter, FrequencyShortlist(size=20), target=target)
    target.generate(prompt(), max_new_tokens=8, do_sample=False, assistant_model=assistant)
    assert assistant.stats.to_dict()["background_work"] is None and "background" not in str(assistant.stats)
