"""The replay of automatic drafting, at its smallest on the embedded pair, and on rounds whose outcome is known."""

import json
import sys
from pathlib import Path

import pytest
from transformers.utils import logging
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from automatic_drafting_replayed import RECORDED, Clock, Round, app, compare, replay, replay_auto, replay_fixed, speed

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


def test_of_a_draft_that_was_accepted_whole_the_targets_own_token_is_left():
    seen = []
    rounds = list(replay([Round([0.9, 0.8], 2)], lambda coming: seen.append(coming) or 1, lambda *_: None))
    assert seen == [[0.9, 0.8], [0.0]]
    assert rounds == [(1, 2), (1, 1)]


def test_each_round_is_counted_with_the_time_of_its_length():
    assert speed([(0, 1), (8, 5)], SECONDS) == 6 / 3


@pytest.mark.filterwarnings("ignore:drafting does not pay here")
@pytest.mark.parametrize("ends_early", [False, True])
def test_automatic_drafting_finds_what_pays(ends_early):
    """Where all is accepted it drafts what is long, and where nothing is, mostly nothing."""
    sure, never = ([[Round(RECORDED * [one], accepted)] * 40] * 5 for one, accepted in ((0.9, RECORDED), (0.1, 0)))
    drafted = [one for one, _ in replay_auto(sure, Clock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) > 6
    drafted = [one for one, _ in replay_auto(never, Clock(SECONDS, 0.0, 0), ends_early)]
    assert sum(drafted) / len(drafted) < 0.5


def test_chance_changes_what_it_is_told_and_not_what_is_counted():
    texts = [[Round(RECORDED * [0.9], number % 5) for number in range(60)] for _ in range(4)]
    quiet, noisy = (compare(texts, SECONDS, True, noise, 2) for noise in (0.0, 0.1))
    assert {name: quiet[name] for name in quiet if name != "auto"} == {
        name: noisy[name] for name in noisy if name != "auto"
    }
    assert 0.9 < noisy["auto"] / quiet["auto"] < 1.1
