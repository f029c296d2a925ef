"""What tells whether drafting with a shortlist pays: prompts, the benchmark that runs them, and its reports."""

from .benchmark import BenchmarkResult, BenchmarkSettings, parse_policy, run_benchmark
from .workloads import WorkloadError, WorkloadPrompt, read_workload

__all__ = [
    "BenchmarkResult",
    "BenchmarkSettings",
    "WorkloadError",
    "WorkloadPrompt",
    "parse_policy",
    "read_workload",
    "run_benchmark",
]
