"""The replay of automatic drafting, at its smallest on the embedded pair, and on rounds whose outcome is known."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result
from rich.progress import Progress
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from automatic_drafting_replayed import (
    RECORDED,
    LongDrafts,
    NoisyClock,
    Round,
    RoundEnds,
    Seconds,
    app,
    best_fixed,
    bound_assistants,
    compare,
    in_turn,
    median_round,
    record,
    replay,
    replay_auto,
    replay_fixed,
    speed,
)

from hf_dynspec.drafting.draft_shapes import LONGEST, DraftShape
from hf_dynspec.drafting.early_ends import DraftedToken
from hf_dynspec.drafting.recurrences import Recurrence
from hf_dynspec.evaluation.pair import PairSettings, generation_config, open_pair

POCKET = Path(__file__).parents[2] / "examples/pocket"
PROMPTS = ("--prompts", POCKET / "prompts.jsonl")


def seconds_of(policies: int, slower: float = 1.0) -> Seconds:
    """Rounds that take a second each, and drafting as long again for eight tokens; with a second policy all of that
    takes so many times as long."""
    lengths = range(LONGEST + 1)
    factors = (1.0, slower)[:policies]
    return Seconds(
        [[one * (1 + length / 8) for length in lengths] for one in factors],
        [[one * length / 8 for length in lengths] for one in factors],
    )


SECONDS, OF_TWO = seconds_of(1), seconds_of(2)


def recorded(tokens: int, probability: float, accepted: int) -> Round:
    """A round whose drafted tokens the drafter found all as probable."""
    return Round(tokens * [DraftedToken(probability)], accepted)


def drafts_of(length: int, policy: int = 0) -> DraftShape:
    return DraftShape(length, length, policy)


def of_one_policy(texts: list[list[Round]]) -> list[tuple[list[Round]]]:
    """Prompts of which one policy has led to these texts."""
    return [(text,) for text in texts]


def run(*arguments: object) -> Result:
    try:
        return CliRunner().invoke(app, list(map(str, arguments)))
    finally:
        logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("drafter", "policies"), [(("--drafter", POCKET / "drafter"), 1), (("--eagle", POCKET / "eagle"), 2)]
)
def test_every_setting_is_timed_and_replayed_in_every_domain(drafter, policies, tmp_path):
    pair = ("--target", POCKET / "target", *drafter, *PROMPTS)
    small = ("--limit", 1, "--max-new-tokens", 40, "--temperature", 0, "--seeds", 1, "--out", tmp_path / "out.json")
    names = ("hybrid", "screen")[:policies]
    done = run(*pair, *small, *(part for name in names for part in ("--policy", name)))
    assert done.exit_code == 0, done.exception or done.output
    assert "auto /" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]["0"]
    assert len(result["seconds_of_rounds"]) == len(result["seconds_of_drafting"]) == policies
    for seconds, drafting in zip(result["seconds_of_rounds"], result["seconds_of_drafting"], strict=True):
        assert len(seconds) == len(drafting) == LONGEST + 1
        assert min(seconds) > 0
        assert drafting[0] == 0
        assert all(0 < own < whole for own, whole in zip(drafting[1:], seconds[1:], strict=True))
    assert set(result["tokens_per_second"]) == {"all", *result["texts"]}
    lengths = range(1, LONGEST + 1)
    for (speeds,) in result["tokens_per_second"].values():
        assert set(speeds) == {
            *("auto", "auto, worst", "no drafts"),
            *(f"{name} {length}" for name in names for length in lengths),
        }
        assert min(speeds.values()) > 0
    prompts = [texts for (of_domain,) in result["texts"].values() for texts in of_domain]
    assert {len(texts) for texts in prompts} == {policies}
    rounds = [one for texts in prompts for text in texts for one in text]
    assert rounds
    for tokens, accepted in rounds:
        assert len(tokens) == RECORDED
        assert 0 <= accepted <= RECORDED
        assert all(0 < probability <= 1 and recurrence in list(Recurrence) for probability, recurrence in tokens)
    assert any(accepted for _, accepted in rounds)


def test_recorded_texts_outlive_what_comes_after_them(tmp_path, monkeypatch):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    arguments = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", *PROMPTS, "--limit", 1)
    arguments += ("--max-new-tokens", 24, "--temperature", 0, "--seeds", 1)
    with monkeypatch.context() as stopped:
        stopped.setattr("automatic_drafting_replayed.time_rounds", lambda *_: sys.exit(3))
        assert run(*arguments, "--out", first).exit_code == 3
    assert run(*arguments, "--texts", first, "--out", again).exit_code == 0
    one, other = (json.loads(path.read_text(encoding="utf-8"))["results"]["0"] for path in (first, again))
    assert set(one) == {"texts"}
    assert one["texts"] == other["texts"]


def test_texts_are_drawn_several_times_and_gone_through_again(tmp_path):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    pair = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", *PROMPTS, "--limit", 1)
    done = run(*pair, "--max-new-tokens", 24, "--temperature", 0.8, "--draws", 2, "--seeds", 1, "--out", first)
    assert done.exit_code == 0, done.exception or done.output
    assert "1 prompts, each 2 times" in done.stdout
    assert run(*pair, "--texts", first, "--temperature", 0.8, "--seeds", 1, "--out", again).exit_code == 0
    one, other = (json.loads(path.read_text(encoding="utf-8"))["results"]["0.8"] for path in (first, again))
    assert one["texts"] == other["texts"]
    for draws in one["texts"].values():
        assert draws[0] != draws[1]
    for draws in other["tokens_per_second"].values():
        assert len(draws) == 2
    (no_recording := tmp_path / "none.json").write_text("[]", encoding="utf-8")
    for wrong, said in (
        (("--texts", first, "--temperature", 0), "no texts at T = 0"),
        (("--texts", first, "--policy", "full"), "other models or policies"),
        (("--texts", no_recording), "is no --out of this example"),
        (("--texts", tmp_path / "missing.json"), "does not exist"),
    ):
        refused = run(*pair, *wrong)
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.replace("│", " ").split())


def test_luck_with_a_draw_does_not_choose_what_it_is_compared_with():
    """But there is nothing else where there is one draw."""
    lucky = {"no drafts": 1.0, "auto": 9.0, "hybrid 3": 6.0, "hybrid 5": 4.0}
    usual = lucky | {"hybrid 3": 4.0, "hybrid 5": 5.0}
    assert best_fixed([lucky]) == ["hybrid 3"]
    assert best_fixed([lucky, usual]) == ["hybrid 5", "hybrid 3"]
    assert best_fixed([lucky, usual, usual]) == ["hybrid 5", "hybrid 3", "hybrid 3"]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 6 * [(0, 1)]),
        (1, [(1, 2), (1, 1), (1, 2), (1, 1)]),
        (2, [(2, 3), (2, 2), (2, 1)]),
        (9, [(9, 5), (9, 1)]),
    ],
)
def test_each_place_has_a_draft_of_its_own(length, expected):
    """Of which as many tokens come out as there were accepted, and the target's own after them."""
    text = [recorded(RECORDED, 0.5, accepted) for accepted in (4, 3, 0, 1, 2, 0)]
    rounds = replay_fixed(of_one_policy([text]), drafts_of(length))
    assert [(drafted.steps, came) for drafted, came in rounds] == expected


def test_a_change_of_policy_goes_on_at_the_same_place_of_the_text():
    """The first policy's drafts are accepted up to the third token, the second one's never; texts are as long as the
    shorter of them."""
    texts, shapes = (
        ([recorded(RECORDED, 0.9, 3)] * 7, [recorded(RECORDED, 0.1, 0)] * 9),
        [drafts_of(2), drafts_of(5, policy=1)],
    )
    told, chosen = [], iter(3 * shapes)
    rounds = list(replay(texts, lambda _: next(chosen), lambda *of: told.append(of)))
    assert rounds == [(shapes[0], 3), (shapes[1], 1), (shapes[0], 3)]
    assert told == [(shapes[0], 2), (shapes[1], 0), (shapes[0], 2)]


@pytest.mark.parametrize("drafter", ["drafter", "eagle"])
def test_a_replay_has_the_rounds_that_a_call_has(drafter):
    """Greedily, and by a policy that remembers nothing: after short drafts and long ones."""
    model, heads = (POCKET / drafter, []) if drafter == "drafter" else (None, [POCKET / drafter])
    settings = PairSettings(POCKET / "target", model, [POCKET / "prompts.jsonl"], limit=1, threads=2)
    with open_pair(settings, eagle=heads) as pair, Progress(disable=True) as progress:
        (assistant,) = bound_assistants(pair, ["full"])
        config = generation_config(pair.target, 32 + RECORDED, 0.0)
        recordings = record(pair, [assistant], config, 1, progress)
        for prompt, token_ids in zip(pair.prompts, pair.encoded, strict=True):
            assistant = bound_assistants(pair, ["full"])[0]
            for length in (1, 3, RECORDED):
                ends = RoundEnds()
                assistant.generation_config.num_assistant_tokens = length
                pair.target.generate(
                    torch.tensor([token_ids]), generation_config=config, assistant_model=assistant, streamer=ends
                )
                # A head's first round drafts nothing.
                tokens = [after - before for (_, before), (_, after) in pairwise(ends.ends)][drafter == "eagle" :]
                replayed = [came for _, came in replay_fixed(recordings[prompt.domain][0], drafts_of(length))]
                # Drafts of the last rounds may be shorter in a call.
                assert len(replayed) > 2
                assert tokens[: len(replayed) - 1] == replayed[:-1]


def test_a_draft_is_no_shorter_because_less_of_the_other_policys_is_known():
    texts = [([recorded(RECORDED, 0.8, 4)] * 20, [recorded(2, 0.8, 1)] * 60)]
    rounds = replay_auto(texts, NoisyClock(OF_TWO, 0.0, 0), ends_early=False, fixed=drafts_of(5))
    assert {drafted.steps for drafted, _ in rounds if drafted.policy == 0} == {5}
    assert {drafted.steps for drafted, _ in rounds if drafted.policy == 1} <= {1, 2}


def test_each_round_is_counted_with_the_time_of_its_length():
    seconds = seconds_of(2, slower=2.0)
    assert speed([(drafts_of(0), 1), (drafts_of(8), 5)], seconds) == 6 / 3
    assert speed([(drafts_of(8), 5), (drafts_of(8, policy=1), 1)], seconds) == 6 / 6


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
@pytest.mark.parametrize("ends_early", [False, True])
def test_automatic_drafting_finds_what_pays(ends_early):
    """Where all is accepted it drafts what is long, and where nothing is, mostly nothing."""
    sure, never = (
        of_one_policy([[recorded(RECORDED, one, accepted)] * 40] * 5) for one, accepted in ((0.9, RECORDED), (0.1, 0))
    )
    drafted = [one.steps for one, _ in replay_auto(sure, NoisyClock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) > 6
    drafted = [one.steps for one, _ in replay_auto(never, NoisyClock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) < 0.5


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("better", [0, 1])
def test_the_better_policy_is_found(better, length):
    """One that is accepted further, at the same price: by lengths that are chosen too, or by one."""
    texts = [tuple([recorded(RECORDED, 0.8, 4 if policy == better else 1)] * 300 for policy in (0, 1))] * 12
    speeds = compare([texts], OF_TWO, ["first", "second"], ends_early=True, noise=0.05, seeds=6, length=length)
    good, bad = (
        max(speed for setting, speed in speeds.items() if setting.startswith(name))
        for name in (("first", "second") if better == 0 else ("second", "first"))
    )
    # Drafting with either in turn would bring 0.7 times as much as the better one.
    assert speeds["auto"] > max(1.2 * bad, 0.75 * good)


def test_the_clock_is_noisy_where_it_is_to_be():
    def told(noise: float, seed: int) -> list[float]:
        clock, times = NoisyClock(SECONDS, noise, seed), [0.0]
        for _ in range(2000):
            clock.draft(drafts_of(4))
            clock.end_round()
            times.append(clock.now)
        return [later - before for before, later in pairwise(times)]

    usual = SECONDS.rounds[0][4]
    assert told(0.0, 0) == pytest.approx(2000 * [usual])
    assert told(0.1, 0) != told(0.1, 1)
    assert median(told(0.1, 0)) == pytest.approx(usual, rel=0.02)
    assert sum(abs(one / usual - 1) > 0.05 for one in told(0.1, 0)) > 1000
    assert 0.003 < sum(one > 1.6 * usual for one in told(0.1, 0)) / 2000 < 0.03


def test_what_it_chose_is_counted_without_noise():
    """Where all lengths take the same time and nothing is accepted, they all bring the same."""
    texts = of_one_policy([[recorded(RECORDED, 0.9, 0)] * 60] * 4)
    seconds = Seconds([[1.0] * (LONGEST + 1)], [[0.0] * (LONGEST + 1)])
    speeds = compare([texts], seconds, ["hybrid"], ends_early=True, noise=0.1, seeds=2)
    assert set(speeds.values()) == {1.0}


@pytest.mark.parametrize("accepted", [0, 6])
def test_texts_are_gone_through_in_several_orders(accepted):
    """Where the first ones are unlike the others it takes longer to find out what those others are like."""
    texts = of_one_policy([[recorded(RECORDED, 0.8, 6)] * 100] * 2 + [[recorded(RECORDED, 0.8, accepted)] * 100] * 2)
    speeds = compare([texts], SECONDS, ["hybrid"], ends_early=True, noise=0.0, seeds=6)
    if accepted:
        assert speeds["auto"] == pytest.approx(speeds["auto, worst"])
    else:
        assert speeds["auto"] > speeds["auto, worst"]


def test_the_luck_of_a_policy_with_its_texts_is_not_held_for_its_own():
    """Two that take the same time do the same on one another's texts, however much easier those of one are."""
    easy, hard = [recorded(RECORDED, 0.8, 6)] * 20, [recorded(RECORDED, 0.8, 1)] * 20
    passes = in_turn([(easy, hard)] * 8)
    assert passes == [[(easy, hard)] * 8, [(hard, easy)] * 8]
    speeds = compare(passes, OF_TWO, ["first", "second"], ends_early=False, noise=0.05, seeds=2)
    for length in range(1, LONGEST + 1):
        assert speeds[f"first {length}"] == speeds[f"second {length}"]
    # Nothing that is learnt in one pass is known in the next.
    once, twice = (
        compare(number * passes[:1], OF_TWO, ["first", "second"], ends_early=False, noise=0.0, seeds=1)["auto"]
        for number in (1, 2)
    )
    assert twice == pytest.approx(once)
    assert in_turn(of_one_policy([easy, hard])) == [of_one_policy([easy, hard])]


def test_rounds_that_read_the_prompt_are_not_timed(monkeypatch):
    """Neither the target's nor a head's: here these take a second, and all others a hundredth."""

    class Target:
        device = torch.device("cpu")

        def generate(self, input_ids: torch.Tensor, streamer: RoundEnds, **_: object) -> None:
            for at, tokens in ((0.0, 3), (1.0, 1), (2.0, 2), (2.01, 2), (2.5, 99)):
                monkeypatch.setattr(time, "perf_counter", lambda at=at: at)
                streamer.put(torch.zeros(tokens))

    pair, assistant = SimpleNamespace(target=Target()), SimpleNamespace(generation_config=SimpleNamespace())
    assert median_round(pair, assistant, 3, [1, 2, 3], None) == (pytest.approx(0.01), 0.0)
    assert assistant.generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "auto"), "one by one"),
        (("--length", 5), "nothing to choose"),
        (("--policy", "hybrid", "--policy", "hybrid"), "each policy once"),
        (("--max-new-tokens", 1, "--temperature", 0), "end within a round"),
    ],
)
def test_what_cannot_be_replayed_is_refused(options, said, monkeypatch):
    monkeypatch.setattr(LongDrafts, "record", lambda *_: None)
    pair = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", *PROMPTS)
    refused = run(*pair, "--limit", 1, *options)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.replace("│", " ").split())
