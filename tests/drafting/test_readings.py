"""Whether an answer pays for having its prompt read: what is believed of readings, and of how long answers are."""

from math import inf

import pytest

from hf_dynspec.drafting.readings import Readings

# Seconds that drafting saves for each token, that a token of a prompt takes to be read, and tokens of a prompt.
GAIN, READ, PROMPT = 1.0, 0.02, 1000


def readings(*lengths: tuple[int, int]) -> Readings:
    """Two prompts were read, and answers were so long, of so many tokens that they could have been."""
    known = Readings()
    for _ in range(2):
        known.add(PROMPT, 1, PROMPT * READ)
    for tokens, limit in lengths:
        known.end_call(tokens, limit)
    return known


@pytest.mark.parametrize(("room", "after"), [(8, inf), (20, 0), (100, 0)])
def test_a_first_answer_is_taken_to_be_as_long_as_it_may_be(room, after):
    assert readings().worth_after(PROMPT, room, GAIN) == after


@pytest.mark.parametrize(("usual", "after"), [(5, 20.0), (19, 20.0), (20, 0), (200, 0)])
def test_an_answer_that_usually_is_too_short_is_drafted_when_it_has_missed_as_much(usual, after):
    known = readings(*[(usual, 500)] * 8)
    assert known.worth_after(PROMPT, 500, GAIN) == after
    assert known.worth_after(PROMPT, 39, GAIN) == (inf if after else 0)


def test_answers_that_were_cut_tell_nothing_of_longer_ones():
    known = readings(*[(2, 2)] * 7, (30, 100))
    assert known.worth_after(PROMPT, 100, GAIN) == 0
    assert known.worth_after(PROMPT, 2, GAIN) == inf


def test_one_reading_is_not_believed_nor_a_first_one_that_took_long():
    known = Readings()
    known.add(PROMPT, 1, 300 * READ * PROMPT)
    assert known.worth_after(PROMPT, 50, GAIN) == 0
    known.add(PROMPT, 1, READ * PROMPT)
    assert known.worth_after(PROMPT, 50, GAIN) == 0
    assert known.worth_after(PROMPT, 10, GAIN) == inf


def test_what_drafting_takes_is_no_reading_and_short_prompts_tell_little_of_long_ones():
    known = Readings()
    for _ in range(5):
        known.add(3, 4, 4 * 0.5)
        known.add(40, 4, 4 * 0.5 - 0.1)
        known.add(PROMPT, 4, 4 * 0.5 + PROMPT * READ)
    assert known._seconds_per_token() == pytest.approx(READ)


def test_a_prompt_is_read_once_more_when_that_is_little_beside_what_went_by_without_drafts():
    known = readings(*[(5, 500)] * 8)
    known.wait(99 * READ * PROMPT)
    assert known.worth_after(PROMPT, 500, GAIN) == 20.0
    known.wait(2 * READ * PROMPT)
    assert known.worth_after(PROMPT, 500, GAIN) == 0
    known.add(PROMPT, 1, READ * PROMPT)
    assert known.worth_after(PROMPT, 500, GAIN) == 20.0
