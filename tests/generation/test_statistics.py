"""The statistics of calls are those that a second count gives."""

import itertools
import json
from collections import Counter

import pytest
import torch
from calls import SHAPES, Pieces, generate
from cases import representatives
from models import POLICY_CASES, RandomShortlist, prompt

from hf_dynspec import DynSpecAssistant, FrequencyShortlist, UnionShortlist, devices
from hf_dynspec.protocol import BackgroundWork, Candidates, Shortlist
from hf_dynspec.stats import SECTIONS, DraftingStatistics, Stopwatch

NAMES = ("full", "random", "frequency, position-aware", "in_context", "frequency", "hybrid")


@pytest.mark.parametrize(
    ("name", "shape"), representatives("families", itertools.product(NAMES, ("chain", "tree")), keep=6)
)
@pytest.mark.parametrize("temperature", [None, 3.0])
def test_counts(name, shape, temperature, target, drafter, rounds):
    """Counted here a second time, from the drafts and the tokens that came out; coverage from one forward over them.

    The budget is no multiple of a round's tokens, so that the last draft is cut short or left out.
    """
    policy = RandomShortlist(30) if name == "random" else POLICY_CASES[name]()
    assistant = DynSpecAssistant(drafter, policy, target=target, tree=SHAPES[shape], measure_coverage=True)
    sampling = {} if temperature is None else {"do_sample": True, "top_k": 0, "temperature": temperature}
    streamer = Pieces()
    torch.manual_seed(0)
    output = generate(target, assistant, streamer=streamer, max_new_tokens=39, eos_token_id=300, **sampling)
    stats, pieces = assistant.stats, streamer.pieces[1:]
    drafts = {prefix.shape[0]: drafted for prefix, _, drafted in rounds}
    assert stats.calls == 1 and stats.rounds == len(pieces)
    assert stats.tokens == output.shape[1] - 12 and stats.accepted == stats.tokens - stats.rounds
    assert stats.acceptance_length == stats.tokens / stats.rounds
    assert stats.drafted == sum(one.token_ids.shape[0] for one in drafts.values())
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert ("tree nodes accepted" in str(stats)) == (shape == "tree") != ("acceptance rate" in str(stats))
    lengths = [len(piece) for piece in pieces]
    assert stats.tokens_per_round == [lengths.count(n) for n in range(max(lengths) + 1)]
    steps = max(len(one.shortlists) for one in drafts.values())
    depths = [torch.arange(len(one.token_ids)) if one.is_chain else one.depths for one in drafts.values()]
    assert stats.drafted_at == torch.bincount(torch.cat(depths), minlength=steps).tolist()
    accepted_at = [sum(length > step + 1 for length in lengths) for step in range(steps)]
    assert stats.accepted_per_round == [accepted / stats.rounds for accepted in accepted_at]
    assert stats.acceptance_rate_by_position == [
        accepted / max(1, drafted) for accepted, drafted in zip(accepted_at, stats.drafted_at, strict=True)
    ]
    sizes = [one.ids().shape[0] for drafted in drafts.values() for one in drafted.shortlists]
    assert stats.active_vocabulary == pytest.approx(sum(sizes) / len(sizes))
    assert stats.active_vocabulary_max == max(sizes)

    with torch.no_grad():
        probabilities = (target(output).logits[0].float() / (temperature or 1.0)).softmax(-1)
    missed, mass, length = [], [], 12
    for piece in pieces:
        shortlists = drafts[length].shortlists if length in drafts else ()
        for place, (token, shortlist) in enumerate(zip(piece, shortlists, strict=False)):
            missed.append(token not in shortlist.ids().tolist())
            mass.append(float(probabilities[length - 1 + place, shortlist.ids()].sum()))
        length += len(piece)
    assert stats.oov_rate == pytest.approx(sum(missed) / len(missed)) and any(missed) == (name != "full")
    # fp32 sums of probabilities in another order.
    assert stats.coverage == pytest.approx(sum(mass) / len(mass), abs=1e-3)
    assert (stats.coverage > 0.9999) == (name == "full")
    assert stats.draft_seconds is None and stats.seconds == {}


def test_the_total_is_the_sum_of_the_calls(target, drafter):
    assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=target, measure_coverage=True)
    calls = []
    for seed, new_tokens in enumerate((5, 30, 1)):
        generate(target, assistant, prompt(seed=seed), max_new_tokens=new_tokens)
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
    generate(target, assistant, max_new_tokens=20)
    seconds = assistant.stats.seconds
    assert set(seconds) == {*SECTIONS, "other"}
    assert all(value > 0 for value in seconds.values())
    assert assistant.stats.draft_seconds == pytest.approx(sum(seconds[name] for name in SECTIONS[:-1]))
    assert (len(target._forward_hooks), len(target._forward_pre_hooks)) == hooks
    one_call = dict(seconds)
    generate(target, assistant, max_new_tokens=20)
    for name, value in assistant.stats_total.seconds.items():
        assert value == pytest.approx(one_call[name] + assistant.stats.seconds[name])


def test_a_stopwatch_adds_time_to_one_section_only():
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


def test_the_figures_of_no_call(drafter):
    stats = DynSpecAssistant(drafter).stats
    assert stats.acceptance_length == stats.acceptance_rate == stats.oov_rate == stats.active_vocabulary == 0.0
    assert stats.acceptance_rate_by_position == stats.accepted_per_round == [] and stats.coverage is None
    assert "new tokens" in str(stats)
    assert repr(stats) == "<DraftingStatistics: 0 tokens in 0 rounds, no round yet>"


def test_an_assistant_and_its_statistics_say_what_they_are(target, drafter):
    assistant = DynSpecAssistant(drafter, "full")
    assert repr(assistant) == "<DynSpecAssistant: CausalLMDrafter with 'full' for no target yet>"
    target.generate(prompt(), max_new_tokens=8, do_sample=False, assistant_model=assistant.bind(target))
    assert repr(assistant).endswith(f"for a {type(target).__name__}>")
    assert f"{assistant.stats.acceptance_length:.2f}>" in repr(assistant.stats) and "8 tokens in" in repr(
        assistant.stats
    )


def test_figures_can_be_printed_and_stored(target, drafter):
    policy = FrequencyShortlist(size=50)
    assistant = DynSpecAssistant(drafter, policy, target=target, profile=True, measure_coverage=True)
    generate(target, assistant, max_new_tokens=12)
    figures = json.loads(json.dumps(assistant.stats.to_dict()))
    assert figures["tokens"] == 12 and figures["active_vocabulary"] == 50.0
    text = str(assistant.stats)
    names = ("acceptance length", "acceptance rate", "accepted per round, by draft step", "coverage")
    for shown in (*names, "out of vocabulary", "time: backbone", "50 (at most 50)"):
        assert shown in text


def test_the_token_after_a_draft_that_was_accepted_as_a_whole_is_never_out_of_vocabulary():
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


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sizes_are_counted_without_waiting_for_a_device(order, monkeypatch):
    """Of shortlists with unoccupied slots and without, whichever comes first."""
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
def test_background_work_is_summed_over_a_unions_policies(validate, target, drafter):
    policy = UnionShortlist(DiligentShortlist(size=20), FrequencyShortlist(size=30), DiligentShortlist(size=40))
    assistant = DynSpecAssistant(drafter, policy, target=target, validate=validate)
    for _ in range(2):
        generate(target, assistant, max_new_tokens=8)
        assert assistant.stats.background_work == BackgroundWork(4, 1.0, 0.25, 2)
    assert assistant.stats.background_work.hidden_share == 0.75
    assert "4 jobs, 1.000 s, 75.0% of it hidden; 2 rounds" in str(assistant.stats)
    total = json.loads(json.dumps(assistant.stats_total.to_dict()))["background_work"]
    assert total == {"jobs": 8, "seconds": 2.0, "exposed_seconds": 0.5, "late_rounds": 4, "hidden_share": 0.75}


def test_there_is_no_background_work_by_default(target, drafter):
    assistant = DynSpecAssistant(drafter, FrequencyShortlist(size=20), target=target)
    generate(target, assistant, max_new_tokens=8)
    assert assistant.stats.to_dict()["background_work"] is None and "background" not in str(assistant.stats)
