"""Which cases of a large family of tests run by default. The others carry a marker and run with `make test-all`."""

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def representatives(marker: str, cases: Iterable[Any], keep: int = 1) -> list[Any]:
    """The first `keep` cases unmarked, the others marked. A case is a value, a tuple of them, or a `pytest.param`."""
    return [case if place < keep else _marked(marker, case) for place, case in enumerate(cases)]


def pairwise(marker: str, *axes: Sequence[Any]) -> list[Any]:
    """The whole product of the axes. Cases that together show every pair of values of two axes are unmarked.

    The unmarked ones are found greedily: the next case is one that shows the most new pairs. Equally good ones are
    taken in a shuffled order, so that the values of a long axis meet different combinations of the others.
    """
    cases = list(product(*(range(len(axis)) for axis in axes)))
    shuffled = random.Random(0).sample(cases, len(cases))
    pairs_of = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs_of.values())
    chosen = set()
    while missing:
        best = max(shuffled, key=lambda case: len(pairs_of[case] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    values = {case: tuple(axis[place] for axis, place in zip(axes, case, strict=True)) for case in cases}
    return [values[case] if case in chosen else _marked(marker, values[case]) for case in cases]


def _marked(marker: str, case: Any) -> Any:
    mark = getattr(pytest.mark, marker)
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, mark])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
