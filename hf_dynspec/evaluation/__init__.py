"""What tells whether drafting with a shortlist pays, and why: prompts, what runs them, and its reports.

Names are loaded when they are first used: a command refuses a wrong argument before torch is imported.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BenchmarkSettings": ".bench.benchmark",
    "parse_policy": ".policy_text",
    "read_workload": ".prompts",
    "run_benchmark": ".bench.benchmark",
}
__all__ = [*_HOMES]  # noqa: PLE0604 (ruff does not see that the keys are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
