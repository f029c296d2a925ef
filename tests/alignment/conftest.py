"""What tests of alignment share."""

import pytest
from models import perturbed


@pytest.fixture
def drafter(target):
    """A drafter that sometimes agrees with the target, for one test: learning changes it."""
    return perturbed(target, 0.3)
