"""How long rests of drafting are: what trials cost is paid for, and no longer."""

import pytest

from hf_dynspec.drafting.rests import Rests

# Milliseconds that a token takes without drafts, and more than that with a draft that is missed.
ALONE, MISSED = 10.0, 2.0


def resting(gained: float = 0.0) -> Rests:
    """A first rest has begun."""
    rests = Rests()
    rests.gain(gained)
    rests.begin(MISSED, ALONE)
    return rests


def after_trial(rests: Rests, lost: float) -> int:
    """A trial has lost so much. Returns how many tokens the next rest has."""
    rests.try_again()
    rests.lose(lost)
    rests.gain(-lost)
    rests.go_on(ALONE)
    return resting_tokens(rests)


def resting_tokens(rests: Rests) -> int:
    """How many tokens the rest that has begun goes on for."""
    tokens = 0
    while rests.is_resting:
        rests.add()
        tokens += 1
    return tokens


@pytest.mark.parametrize("dear_ones", [1, 2, 5])
def test_what_dear_trials_cost_is_paid_for(dear_ones):
    """As those are that have to read a long text first: one of so many. The others do not make up for them."""
    rests, rested, lost = resting(), 0, 0.0
    for trial in range(400):
        cost = 500.0 if trial % dear_ones == 0 else 1.0
        rested += after_trial(rests, cost)
        lost += cost
    assert lost < 0.012 * rested * ALONE


def test_one_dear_trial_is_paid_for_once():
    """It may have been a stall. Rests after it are as long as they would have been."""
    dear, usual = resting(), resting()
    after_trial(dear, 500.0)
    after_trial(usual, MISSED)
    more = [after_trial(dear, MISSED) - after_trial(usual, MISSED) for _ in range(40)]
    assert more[-1] == 0
    assert 0.5 * 500.0 < 0.01 * sum(more) * ALONE < 500.0


@pytest.mark.parametrize(("lost", "shares"), [(6.0, [2.5, 2.5, 2.5, 1.0]), (10.0, [2.5, 1.0, 1.0, 1.0])])
def test_what_a_few_drafts_tell_is_soon_seen_once_more_where_that_costs_little(lost, shares):
    """They may have been bad luck. Rests are so long that trials cost these shares of them, in percent."""
    rests = Rests()
    rests.begin(lost, ALONE)
    tokens = [resting_tokens(rests), *(after_trial(rests, lost) for _ in shares[1:])]
    assert [100 * lost / (ALONE * one) for one in tokens] == pytest.approx(shares, rel=0.05)


def test_what_is_never_right_is_tried_ever_less_often():
    rests = resting()
    tokens = [after_trial(rests, MISSED) for _ in range(20)]
    assert tokens[0] == 15
    assert tokens == sorted(tokens)
    assert tokens[-1] == 256


@pytest.mark.parametrize(("lost", "longest"), [(0.1, 12), (5.0, 50), (100.0, 1000)])
def test_where_drafting_has_gained_rests_grow_to_what_pays_for_trials(lost, longest):
    rests = resting(gained=1e9)
    tokens = [after_trial(rests, lost) for _ in range(100)]
    assert tokens[0] <= 20
    assert tokens[-1] == pytest.approx(longest, rel=0.05)


def test_once_what_was_gained_is_lost_trials_are_paid_for_at_once():
    rests = resting(gained=250.0)
    tokens = [after_trial(rests, 100.0) for _ in range(4)]
    assert max(tokens[:2]) < 32
    assert min(tokens[2:]) > 200


def test_what_is_owed_for_a_dear_trial_is_not_forgotten_when_drafting_has_paid_since():
    rests = resting()
    after_trial(rests, 500.0)
    owed = after_trial(rests, MISSED)
    rests.end()
    rests.gain(1.0)
    rests.begin(MISSED, ALONE)
    # The first rest costs two and a half times the share.
    assert resting_tokens(rests) == pytest.approx(owed / 2.5, rel=0.05)


def test_rests_of_another_text_are_half_as_long_where_drafting_has_gained():
    """What was lost in the text before tells little of the next one. But they grow on where it only loses."""
    rests = resting(gained=1e9)
    before = [after_trial(rests, 1000.0) for _ in range(12)][-1]
    rests.begin_call()
    halved = after_trial(rests, 1000.0)
    assert halved == pytest.approx(1.25 * before / 2, abs=2)
    rests.begin_call()
    assert after_trial(rests, 1000.0) == pytest.approx(1.25 * halved, abs=2)


@pytest.mark.parametrize("gained", [0.0, -100.0])
def test_rests_are_not_halved_where_drafting_never_gained(gained):
    once, at_calls = resting(gained), resting(gained)
    for _ in range(20):
        at_calls.begin_call()
        assert after_trial(at_calls, MISSED) == after_trial(once, MISSED)


@pytest.mark.parametrize("gained", [-1.0, 1.0])
def test_a_rest_that_ended_though_nothing_was_gained_by_it_goes_on_growing(gained):
    """Drafting has lost more than it gained before, so that the first trials do not count as paid for."""
    rests = resting(gained=-100.0)
    before = [after_trial(rests, 0.0) for _ in range(40)][-1]
    rests.end()
    rests.gain(gained)
    rests.begin(0.0, ALONE)
    assert resting_tokens(rests) == (before if gained < 0 else 12)


def test_a_stall_in_a_trial_does_not_end_drafting_for_good():
    rests = resting(gained=1e5)
    assert after_trial(rests, 1e6) < 4000
    assert after_trial(rests, MISSED) < 4000


@pytest.mark.parametrize("dear", [MISSED, 100.0])
def test_a_change_hastens_the_next_trial_but_what_the_last_one_cost_is_paid_for(dear):
    """However often things change."""
    rests, rested, trials = resting(), 0, 0
    while rested < 20000:
        rests.hasten()
        if rests.is_resting:
            rests.add()
            rested += 1
        else:
            rests.try_again()
            rests.lose(dear)
            rests.go_on(ALONE)
            trials += 1
    # What dear ones cost is learnt little by little.
    assert 0.005 < trials * dear / (rested * ALONE) < 0.015


def test_after_a_change_rests_are_short_again():
    rests = resting()
    for _ in range(10):
        after_trial(rests, 0.0)
    rests.end(is_new=True)
    assert rests.have_ended and not rests.is_resting
    rests.begin(MISSED, ALONE)
    assert resting_tokens(rests) == 12
