"""The faults of `mutations.py` can be written, each in one place."""

import pytest
from mutations import MUTATIONS, PACKAGE, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.fault)
def test_a_fault_has_one_place(mutation: Mutation):
    text = (ROOT / PACKAGE / mutation.file).read_text()
    assert text.count(mutation.before) == 1 and mutation.after != mutation.before
    assert all((ROOT / tests).exists() for tests in mutation.tests.split())
