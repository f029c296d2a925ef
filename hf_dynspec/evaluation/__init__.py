"""What tells whether drafting with a shortlist pays, and why: prompts, what runs them, and its reports."""

from .bench.benchmark import BenchmarkResult, BenchmarkSettings, run_benchmark
from .coverage.measure import measure_coverage
from .coverage.result import CoverageResult
from .coverage.settings import CoverageSettings
from .policy_text import parse_policy
from .prompts import WorkloadError, WorkloadPrompt, read_workload
from .trace.measure import trace_prompt
from .trace.result import Trace
from .trace.settings import TraceSettings
from .tree_text import parse_tree

__all__ = [
    "BenchmarkResult",
    "BenchmarkSettings",
    "CoverageResult",
    "CoverageSettings",
    "Trace",
    "TraceSettings",
    "WorkloadError",
    "WorkloadPrompt",
    "measure_coverage",
    "parse_policy",
    "parse_tree",
    "read_workload",
    "run_benchmark",
    "trace_prompt",
]
