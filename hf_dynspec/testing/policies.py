"""`check_policy`: the contract of policies, checked on any policy. It takes seconds, and no test framework."""

import threading
import time
import warnings
from dataclasses import dataclass

import torch

from ..fields import FieldError, WholeNumber
from ..shortlists import ShortlistPolicy
from .case import SMALLEST_VOCABULARY, WIDTH_UNIT, PolicyCase
from .checks import CHECKS, check_settings

# How long a thread may take to end after its state was closed, in seconds.
_PATIENCE = 5.0


@dataclass(frozen=True)
class PolicyReport:
    """The checks that a policy passed."""

    policy: str  # the name of its class
    checks: tuple[str, ...]  # one sentence each
    acceptance_length: float  # tokens per round with the tiny random models, which says nothing about others
    active_vocabulary: float  # mean number of ids on a shortlist there
    seconds: float  # how long the checks took

    def __str__(self) -> str:
        lines = [f"{self.policy}: in order, after {self.seconds:.1f} s", *(f"  {check}" for check in self.checks)]
        return "\n".join(lines)


def check_policy(
    policy: ShortlistPolicy, *, vocabulary_size: int = 301, hidden_size: int = 32, is_stored: bool = True
) -> PolicyReport:
    """Check that a policy keeps the contract of policies.

    Args:
        policy: one with settings that are small enough for the vocabulary.
        vocabulary_size: of the tiny models, at least 100; for policies that were made for a certain one.
        hidden_size: of both models' hidden states, a multiple of 8; likewise.
        is_stored: whether `settings()` and `tensors()` have to rebuild the policy.

    Raises:
        PolicyError: the contract is broken. The message says where, what is wrong and how to mend it. Errors that the
            policy itself raises are not caught.
        ConfigurationError: there can be no tiny models of these sizes.
    """
    WholeNumber(SMALLEST_VOCABULARY).require("vocabulary_size", vocabulary_size)
    WholeNumber(WIDTH_UNIT).require("hidden_size", hidden_size)
    if hidden_size % WIDTH_UNIT:
        raise FieldError("hidden_size", f"must be a multiple of {WIDTH_UNIT}, got {hidden_size}", "Give one")
    started, threads = time.perf_counter(), set(threading.enumerate())
    case = PolicyCase(policy, vocabulary_size, hidden_size)
    checks = [one for one in CHECKS if is_stored or one is not check_settings]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the tokenizers of target and drafter")
        for check in checks:
            check(case)
            case.close_states()
    _check_threads(case, threads)
    return PolicyReport(
        case.label,
        (*(check.__doc__ for check in checks), _check_threads.__doc__),
        case.stats.acceptance_length,
        case.stats.active_vocabulary,
        time.perf_counter() - started,
    )


def _check_threads(case: PolicyCase, before: set[threading.Thread]) -> None:
    """close() was called once for every state, and no thread is left."""
    deadline = time.monotonic() + _PATIENCE
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            case.fail(
                f"the thread {thread.name!r} runs {_PATIENCE:.0f} s after its state was closed",
                "End it in `close`, and wait there for it if that is short.",
            )
