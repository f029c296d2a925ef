"""What speed is expected of drafting, from acceptance and costs."""

import pytest

from hf_dynspec.drafting.expected_speed import RoundCosts, best_chain_length, expected_speed, expected_tokens

FLAT = RoundCosts(0.1, (1,), (1.0,))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_equal_acceptances_give_the_papers_closed_form(acceptance, steps):
    papers = (1 - acceptance ** (steps + 1)) / (1 - acceptance)
    assert expected_tokens([acceptance], steps) == pytest.approx(papers)
    speedup = expected_speed([acceptance], FLAT, steps) / expected_speed([acceptance], FLAT, 0)
    assert speedup == pytest.approx(papers / (1 + 0.1 * steps))


def test_each_step_has_its_own_acceptance():
    assert expected_tokens([0.5, 0.1], 3) == pytest.approx(1 + 0.5 + 0.05 + 0.005)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.0), (7, 3.0), (11, 4.0), (15, 5.0)])
def test_verification_costs_lie_on_lines_through_the_measured_ones(rows, seconds):
    assert RoundCosts(0.0, (1, 3, 11), (1.0, 2.0, 4.0)).of_verification(rows) == pytest.approx(seconds)


def test_a_round_is_its_steps_its_verification_and_the_rest():
    costs = RoundCosts(0.1, (1, 61), (1.0, 7.0), other=0.5, other_alone=0.25)
    assert costs.of_round(0) == pytest.approx(1.25)
    assert costs.of_round(5) == pytest.approx(0.5 + 1.5 + 0.5)
    assert costs.of_round(5, candidates=60) == pytest.approx(0.5 + 7.0 + 0.5)


def test_the_best_length_is_that_of_most_tokens_per_second():
    assert best_chain_length([0.0], FLAT, 8) == 0
    assert best_chain_length([0.99], FLAT, 8) == 8
    assert best_chain_length([0.9, 0.9, 0.01], FLAT, 8) == 2
    # Where every row of a verification costs what a token of plain decoding costs, nothing can be won.
    assert best_chain_length([0.9], RoundCosts(0.0, (1, 9), (1.0, 9.0)), 8) == 0
