"""Where chains end early: by how probable the drafter found their tokens, and by what the text says of these."""

import pytest
import torch

from hf_dynspec.drafting import early_ends, recurrences
from hf_dynspec.drafting.early_ends import DraftedToken, EarlyEnd, RunningConfidence, range_of
from hf_dynspec.drafting.recurrences import Recurrence, Recurrences

NEW, SAME, OTHER = Recurrence


def seen(recurrences: Recurrences, text: list[int], draft: list[int]) -> list[Recurrence]:
    """What a text says of each token of a draft."""
    recurrences.begin_draft(torch.tensor(text))
    return [recurrences.go_on(token_id) for token_id in draft]


def test_a_text_tells_what_came_after_the_same_tokens():
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert seen(Recurrences(), text, [4, 5, 9, 1, 7, 8]) == [SAME, SAME, SAME, SAME, OTHER, NEW]
    assert seen(Recurrences(), text, [6, 4, 5]) == [OTHER, NEW, NEW]


def test_what_came_last_counts():
    assert seen(Recurrences(), [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [4]) == [OTHER]
    assert seen(Recurrences(), [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [5]) == [SAME]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3], [7, 7, 7]])
def test_a_short_text_tells_nothing(text):
    assert seen(Recurrences(), text, [1, 2, 3, 1]) == [NEW] * 4


def test_a_text_is_read_as_it_grows():
    """Whatever was drafted between, and however little comes at a time."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, (400,), generator=generator).tolist()
    growing, length = Recurrences(), 0
    while length < len(text):
        length += int(torch.randint(1, 6, (), generator=generator))
        draft = torch.randint(3, (8,), generator=generator).tolist()
        assert seen(growing, text[:length], draft) == seen(Recurrences(), text[:length], draft)


def test_only_the_end_of_a_long_prompt_is_looked_at(monkeypatch):
    monkeypatch.setattr(recurrences, "_MOST_OF_PROMPT", 6)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 5, 6]
    assert seen(Recurrences(), [*text[:9], 1, 2, 3], [4]) == [NEW]
    assert seen(Recurrences(), [*text[3:], 4, 5, 6], [4, 5]) == [SAME, SAME]


def confident(rounds: int, *outcomes: tuple[DraftedToken, bool]) -> RunningConfidence:
    """One that has seen tokens accepted, or missed."""
    confidence = RunningConfidence()
    for _ in range(rounds):
        for token, is_accepted in outcomes:
            confidence.add([token], int(is_accepted))
    return confidence


def acceptance(confidence: RunningConfidence, token: DraftedToken) -> float:
    """How likely a token is to be accepted by what was seen."""
    return confidence.acceptances()[token.recurrence][range_of(token.probability)]


def test_it_learns_what_a_text_says_of_tokens_that_are_as_probable():
    confidence = confident(20, (DraftedToken(0.9, SAME), True), (DraftedToken(0.9, OTHER), False))
    assert acceptance(confidence, DraftedToken(0.9, SAME)) > 0.9
    assert acceptance(confidence, DraftedToken(0.9, OTHER)) < 0.1
    # Half of those as probable were accepted.
    assert acceptance(confidence, DraftedToken(0.9, NEW)) == pytest.approx(0.5, abs=0.1)
    # It tells more than how probable they are.
    assert acceptance(confidence, DraftedToken(0.1, SAME)) > 0.9
    assert acceptance(confidence, DraftedToken(0.1, OTHER)) < 0.1


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.98])
def test_what_a_text_says_is_believed_from_the_first_draft_on(probability):
    """A loop would be left at the same place a few times before it is known what comes there."""
    same, other = (acceptance(RunningConfidence(), DraftedToken(probability, one)) for one in (SAME, OTHER))
    assert same > 0.85 and other < 0.5
    once = confident(1, (DraftedToken(probability, OTHER), False))
    assert acceptance(once, DraftedToken(0.7, OTHER)) < 0.35


def test_where_the_text_says_nothing_that_counts_all_is_as_without_it():
    """The recurrences are what tells tokens apart, and here they do not."""
    tokens = [(DraftedToken(0.9, recurrence), place % 2 == 0) for place in range(2) for recurrence in Recurrence]
    confidence = confident(30, *tokens)
    acceptances = [acceptance(confidence, DraftedToken(0.9, recurrence)) for recurrence in Recurrence]
    assert acceptances == pytest.approx([0.5] * 3, abs=0.05)


def test_a_chain_ends_where_the_text_says_that_it_is_missed():
    confidence = confident(20, (DraftedToken(0.9, SAME), True), (DraftedToken(0.9, OTHER), False))
    for draft, steps in ([SAME] * 5, 5), ([SAME, SAME, OTHER, SAME, SAME], 3), ([OTHER, SAME, SAME, SAME, SAME], 1):
        end = EarlyEnd(confidence.acceptances(), [0.5] * 4 + [float("inf")])
        tokens = [DraftedToken(0.9, recurrence) for recurrence in draft]
        assert next(step for step, token in enumerate(tokens, 1) if not end.goes_on(token)) == steps
        assert end.tokens == tokens[:steps]


def test_what_counts_more_and_more_is_made_small_again(monkeypatch):
    def seen() -> list[float]:
        confidence = confident(200, (DraftedToken(0.9, SAME), True), (DraftedToken(0.9, OTHER), False))
        kinds = [DraftedToken(0.9, recurrence) for recurrence in Recurrence]
        return [confidence.mean_acceptance(), *(acceptance(confidence, kind) for kind in kinds)]

    expected = seen()
    monkeypatch.setattr(early_ends, "_LARGEST_WEIGHT", 4.0)
    assert seen() == pytest.approx(expected)


def test_what_has_faded_counts_for_few_tokens():
    token = DraftedToken(0.9, SAME)
    faded, fresh = confident(200, (token, True)), confident(6, (token, True))
    for one in (faded, fresh):
        one.fade_to(6)
        for _ in range(3):
            one.add([token], 0)
    assert acceptance(faded, token) == pytest.approx(acceptance(fresh, token), abs=0.02)
    # What counts for less is not made to count for more.
    before = acceptance(fresh, token)
    fresh.fade_to(100)
    assert acceptance(fresh, token) == before
