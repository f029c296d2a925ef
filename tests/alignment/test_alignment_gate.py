"""What was learnt is served while it has earned it."""

import pytest
from aligned import QUICK, generated, recorded, stream

from hf_dynspec import DynSpecAssistant, OnlineAlignment
from hf_dynspec.alignment.adapter import HOPELESS, WORTHWHILE, Gate
from hf_dynspec.alignment.statistics import AlignmentStatistics


def after(*scores: tuple[float, float], window: int = 8, least: int = 4) -> Gate:
    gate = Gate(window, least)
    for one in scores:
        gate.record(*one)
    return gate


def test_it_opens_with_enough_requests_alone():
    assert not after(*[(0.2, 0.9)] * 3).is_open
    assert after(*[(0.2, 0.9)] * 4).is_open


@pytest.mark.parametrize(("gain", "is_open"), [(WORTHWHILE + 0.01, True), (WORTHWHILE - 0.01, False), (-0.01, False)])
def test_it_opens_for_a_gain_that_is_worthwhile(gain, is_open):
    assert after(*[(0.5, 0.5 * (1 + gain))] * 8).is_open == is_open


def test_what_counts_is_the_mean_of_the_last_requests():
    gate = after(*[(0.5, 0.9)] * 8)
    for _ in range(7):
        gate.record(0.5, 0.4)
    assert not gate.is_open and gate.means == pytest.approx((0.5, (7 * 0.4 + 0.9) / 8))
    # One good request among bad ones does not open it; several do.
    for _ in range(4):
        gate.record(0.5, 0.9)
    assert gate.is_open


def test_a_window_that_is_full_and_far_below_is_hopeless():
    bad = (0.5, 0.5 * (1 - HOPELESS) - 0.01)
    assert not after(*[bad] * 7).is_hopeless
    assert after(*[bad] * 8).is_hopeless
    assert after(*[(0.5, float("nan"))] * 8).is_hopeless
    assert not after(*[(0.5, 0.49)] * 8).is_hopeless


def test_a_request_for_which_nothing_was_drafted_is_learnt_from_and_not_scored(target, drafter):
    """As one of a single token, which would leave the gate no numbers to compare."""
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK | {"gate": True}))
    stream(target, assistant, 2)
    before = assistant.alignment.stats
    generated(target, assistant, max_new_tokens=1)
    assert not assistant.stats.drafted and len(recorded(assistant)) == 3
    after = assistant.alignment.stats
    assert after.updates == before.updates + 1
    assert (after.acceptance_before, after.acceptance_after) == (before.acceptance_before, before.acceptance_after)
    assert 0 < after.acceptance_before < 1


def test_a_closed_gate_says_why():
    """Learned weights that are better, but by less than is worthwhile, are not served either."""
    assert after(*[(0.5, 0.9)] * 3).why_closed == "3 of gate_least=4 requests are scored"
    few = after(*[(0.5, 0.501)] * 8)
    assert not few.is_open and "times the acceptance" in few.why_closed
    assert after(*[(0.5, 0.9)] * 8).why_closed is None
    said = str(AlignmentStatistics(why_not_served=few.why_closed))
    assert few.why_closed in said and max(map(len, said.splitlines())) < 80
