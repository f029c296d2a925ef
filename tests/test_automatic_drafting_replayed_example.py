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
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from automatic_drafting_replayed import (
    RECORDED,
    LongDrafts,
    NoisyClock,
    Round,
    RoundEnds,
    app,
    compare,
    median_round,
    replay,
    replay_auto,
    replay_fixed,
    speed,
)

from hf_dynspec.drafting.automatic import AutomaticDrafting
from hf_dynspec.drafting.draft_shapes import LONGEST

POCKET = Path(__file__).parents[1] / "examples/pocket"
# Rounds that take a second each, and as long again for eight tokens.
SECONDS = [1 + length / 8 for length in range(LONGEST + 1)]


@pytest.mark.parametrize("drafter", [("--drafter", POCKET / "drafter"), ("--eagle", POCKET / "eagle")])
def test_every_length_is_timed_and_replayed_in_every_domain(drafter, tmp_path):
    pair = ("--target", POCKET / "target", *drafter, "--prompts", POCKET / "prompts.jsonl")
    small = ("--limit", 1, "--max-new-tokens", 40, "--temperature", 0, "--seeds", 1, "--out", tmp_path / "out.json")
    try:
        done = CliRunner().invoke(app, list(map(str, (*pair, *small))))
    finally:
        logging.enable_progress_bar()
    assert done.exit_code == 0, done.exception or done.output
    assert "auto /" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]["0"]
    assert len(result["seconds_of_rounds"]) == LONGEST + 1
    assert min(result["seconds_of_rounds"]) > 0
    assert set(result["tokens_per_second"]) == {"all", *result["texts"]}
    for speeds in result["tokens_per_second"].values():
        assert set(speeds) == {"auto", *map(str, range(LONGEST + 1))}
        assert min(speeds.values()) > 0
    rounds = [one for texts in result["texts"].values() for text in texts for one in text]
    assert rounds
    for probabilities, accepted in rounds:
        assert len(probabilities) == RECORDED
        assert 0 <= accepted <= RECORDED
        assert all(0 < one <= 1 for one in probabilities)
    assert any(accepted for _, accepted in rounds)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 5 * [(0, 1)]), (1, [(1, 2), (1, 2), (1, 1)]), (2, [(2, 3), (2, 2)]), (9, [(6, 5)])],
)
def test_a_shorter_draft_goes_on_where_the_recorded_one_did(length, expected):
    """Of six tokens four were accepted; the fifth that comes out is the target's own."""
    assert replay_fixed([[Round(6 * [0.5], 4)]], length) == expected


def test_nothing_is_replayed_beyond_what_was_recorded():
    """Neither a draft nor a rejection is invented for what follows a draft that was accepted whole."""
    seen = []
    rounds = list(replay([Round([0.9, 0.8], 2)], lambda coming: seen.append(coming) or 1, lambda *_: None))
    assert seen == [[0.9, 0.8]]
    assert rounds == [(1, 2)]
    assert replay_fixed([[Round(3 * [0.9], 3)]], 2) == [(2, 3)]
    assert replay_fixed([[Round(4 * [0.9], 4)]], 2) == [(2, 3), (1, 2)]


def test_nothing_is_learnt_of_drafts_that_are_cut_short(monkeypatch):
    """They would seem to be rejected where a recording ends."""
    learn, learnt = AutomaticDrafting.record, []
    monkeypatch.setattr(AutomaticDrafting, "record", lambda self, *of: (learnt.append(of[0].steps), learn(self, *of)))
    sure = [[Round(5 * [0.9], 5)] * 60] * 4
    drafted = [one for one, _ in replay_auto(sure, NoisyClock(SECONDS, 0.0, 0), ends_early=False)]
    assert drafted.count(5) > len(drafted) / 2
    assert 0 < max(learnt) <= 5


def test_each_round_is_counted_with_the_time_of_its_length():
    assert speed([(0, 1), (8, 5)], SECONDS) == 6 / 3


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
@pytest.mark.parametrize("ends_early", [False, True])
def test_automatic_drafting_finds_what_pays(ends_early):
    """Where all is accepted it drafts what is long, and where nothing is, mostly nothing."""
    sure, never = ([[Round(RECORDED * [one], accepted)] * 40] * 5 for one, accepted in ((0.9, RECORDED), (0.1, 0)))
    drafted = [one for one, _ in replay_auto(sure, NoisyClock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) > 6
    drafted = [one for one, _ in replay_auto(never, NoisyClock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) < 0.5


def test_the_clock_is_noisy_where_it_is_to_be():
    def told(noise: float, seed: int) -> list[float]:
        clock, times = NoisyClock(SECONDS, noise, seed), [0.0]
        for _ in range(2000):
            clock.round(4)
            times.append(clock.now)
        return [later - before for before, later in pairwise(times)]

    assert told(0.0, 0) == pytest.approx(2000 * [SECONDS[4]])
    assert told(0.1, 0) != told(0.1, 1)
    assert median(told(0.1, 0)) == pytest.approx(SECONDS[4], rel=0.02)
    assert sum(abs(one / SECONDS[4] - 1) > 0.05 for one in told(0.1, 0)) > 1000
    assert 0.003 < sum(one > 1.6 * SECONDS[4] for one in told(0.1, 0)) / 2000 < 0.03


def test_what_it_chose_is_counted_without_noise():
    """Where all lengths take the same time and nothing is accepted, they all bring the same."""
    texts = [[Round(RECORDED * [0.9], 0)] * 60] * 4
    speeds = compare(texts, [1.0] * (LONGEST + 1), ends_early=True, noise=0.1, seeds=2)
    assert set(speeds.values()) == {1.0}


def test_rounds_that_read_the_prompt_are_not_timed(monkeypatch):
    """Neither the target's nor a head's: here these take a second, and all others a hundredth."""

    class Target:
        device = torch.device("cpu")

        def generate(self, input_ids: torch.Tensor, streamer: RoundEnds, **_: object) -> None:
            for at, tokens in ((0.0, 3), (1.0, 1), (2.0, 2), (2.01, 2), (2.5, 99)):
                monkeypatch.setattr(time, "perf_counter", lambda at=at: at)
                streamer.put(torch.zeros(tokens))

    pair, assistant = SimpleNamespace(target=Target()), SimpleNamespace(generation_config=SimpleNamespace())
    assert median_round(pair, assistant, 3, [1, 2, 3], None) == pytest.approx(0.01)
    assert assistant.generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--policy", "auto"), "one policy"), (("--max-new-tokens", 1, "--temperature", 0), "end within a round")],
)
def test_what_cannot_be_replayed_is_refused(options, said, monkeypatch):
    monkeypatch.setattr(LongDrafts, "record", lambda *_: None)
    pair = ("--target", POCKET / "target", "--drafter", POCKET / "drafter", "--prompts", POCKET / "prompts.jsonl")
    try:
        refused = CliRunner().invoke(app, list(map(str, (*pair, "--limit", 1, *options))))
    finally:
        logging.enable_progress_bar()
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.replace("│", " ").split())
