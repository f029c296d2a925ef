"""The expected speed of drafting, from acceptance and costs."""

import pytest

from hf_dynspec.drafting.expected_speed import (
    RoundCosts,
    acceptance_for,
    best_chain_length,
    break_even_acceptance,
    expected_speed,
    expected_tokens,
)

FLAT = RoundCosts(0.1, (1.0,) * 9)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_equal_acceptances_give_the_papers_closed_form(acceptance, steps):
    papers = (1 - acceptance ** (steps + 1)) / (1 - acceptance)
    assert expected_tokens([acceptance], steps) == pytest.approx(papers)
    speedup = expected_speed([acceptance], FLAT, steps) / expected_speed([acceptance], FLAT, 0)
    assert speedup == pytest.approx(papers / (1 + 0.1 * steps))
    if steps:
        assert acceptance_for(papers, steps) == pytest.approx(acceptance, abs=1e-5)


def test_each_step_has_its_own_acceptance():
    assert expected_tokens([0.5, 0.1], 3) == pytest.approx(1 + 0.5 + 0.05 + 0.005)


def test_a_round_is_its_steps_its_verification_and_the_rest():
    costs = RoundCosts(0.1, (1.0, 1.1, 1.2), other=0.5, other_alone=0.25)
    assert costs.of_round(0) == pytest.approx(1.25)
    assert costs.of_round(2) == pytest.approx(0.2 + 1.2 + 0.5)


def test_the_best_length_has_the_most_tokens_per_second():
    assert best_chain_length([0.0], FLAT, 8) == 0
    assert best_chain_length([0.99], FLAT, 8) == 8
    assert best_chain_length([0.9, 0.9, 0.01], FLAT, 8) == 2
    # Nothing can be won if every row of a verification costs as much as a token of plain decoding.
    assert best_chain_length([0.9], RoundCosts(0.0, tuple(map(float, range(1, 10)))), 8) == 0


def test_break_even_is_where_the_best_chain_is_as_fast_as_plain_generate():
    costs = RoundCosts(0.5, (1.0,) * 9)
    # The first draft costs half a token, so nothing is won below one half.
    assert break_even_acceptance(costs, 8, 1.0) == pytest.approx(0.5, abs=1e-5)
    assert break_even_acceptance(costs, 8, 0.1) is None
    assert acceptance_for(2.5, 1) is None
