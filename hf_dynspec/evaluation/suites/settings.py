"""What an evaluation runs, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ...alignment.settings import OnlineAlignment
from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..bench.systems import BASELINES
from ..policy_text import shorten_paths
from ..prompts import WorkloadPrompt
from ..provenance import describe_policies
from ..settings import SystemsSettings
from .data import describe_data, read_suite, suite_named
from .methods import Method, make_methods, make_policies, require_peft


@dataclass(frozen=True)
class SuiteSettings(SystemsSettings):
    """What to run, and on what. `SystemsSettings` has the models and drafts; `prompts` are the suite's files.

    Every drafter drafts by every method, in chains and in trees of every shape. Every system draws a prompt with the
    same seed, and each repeat has seeds of its own.

    Args:
        suite: its name, see `data.SUITES`.
        table: the name of a table of a paper whose rows the methods are (None: of none).
        given: what the table's rows were made with, by the names in `paper_tables.GIVEN`.
        methods: how systems draft. Where there are none, `policies` are, each with the drafter as it is.
        expected_prompts: along the target's texts of so many prompts of each category of each file, whether they are
            timed or not, compute what to expect of the policies (None: of none).
        recall_k: compute there which share of the target's so many likeliest tokens the shortlists hold, for each of
            these numbers, at least one.

    Raises:
        ConfigurationError: a setting is out of range, or there is nothing to draft.
    """

    suite: str = "domains"
    table: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[Method] = ()
    top_k: int = 0
    repeats: int = 1
    expected_prompts: int | None = None
    recall_k: Sequence[int] = ()

    _LEAST: ClassVar[Mapping[str, int]] = {**SystemsSettings._LEAST, "expected_prompts": 0}

    def __post_init__(self):
        super().__post_init__()
        suite_named(self.suite)
        for method in self.resolved_methods():
            if method.label in BASELINES:
                raise ConfigurationError(
                    f"a policy cannot be shown as {method.label!r}, which is one of the baselines"
                )
        make_policies(self.resolved_methods(), ())
        require_peft(self.resolved_methods())

    def resolved_methods(self) -> Sequence[Method]:
        """How systems draft."""
        return self.methods or make_methods(self.policies)

    def alignments(self) -> dict[str, OnlineAlignment | None]:
        """By method how its drafter is aligned."""
        return {method.label: method.online_alignment() for method in self.resolved_methods()}

    def read_prompts(self) -> list[WorkloadPrompt]:
        """The suite's prompts, see `read_suite`: those that are timed and those with expectations."""
        limit = None if self.limit is None else max(self.limit, self.expected_prompts or 0)
        return read_suite(self.suite, self.prompts, limit)

    def numbers_within(self, limit: int | None, prompts: Sequence[WorkloadPrompt]) -> list[int]:
        """The places of those of the prompts that a limit of so many takes."""
        taken = {one.identifier for one in read_suite(self.suite, self.prompts, limit)}
        return [number for number, one in enumerate(prompts) if one.identifier in taken]

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        return {
            **super().to_dict(),
            "given": {name: shorten_paths(folder) for name, folder in self.given.items()},
            "methods": [{**asdict(one), "policy": shorten_paths(one.policy)} for one in self.resolved_methods()],
            **{name: list(getattr(self, name)) for name in ("temperatures", "recall_k")},
        }

    def fingerprint(self, policies: Mapping[str, Mapping[str, ShortlistPolicy]]) -> dict[str, Any]:
        """All that results depend on, as JSON values: two runs with equal ones may go on with one another's. The
        policies are by method and domain."""
        # Most methods have one policy for all domains, which is described once.
        distinct = {label: dict.fromkeys(by_domain.values()) for label, by_domain in policies.items()}
        return {
            **self.to_dict(),
            "device": self.resolved_device().type,
            "prompts": describe_data(self.prompts),
            "policies": {
                label: [describe_policies({label: policy})[label] for policy in ones]
                for label, ones in distinct.items()
            },
        }
