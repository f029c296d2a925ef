"""What a benchmark is to measure, and on what."""

from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..policy_text import named_policies
from ..settings import SystemsSettings
from .systems import BASELINES


@dataclass(frozen=True)
class BenchmarkSettings(SystemsSettings):
    """What to measure, and on what. `SystemsSettings` has the models, prompts and drafts.

    Every drafter runs with every policy, in chains and in trees of every shape. Every system draws a prompt with the
    same seed, and each repeat has seeds of its own. Transformers' assisted generation drafts chains of
    `num_assistant_tokens` too (of five where that is `"auto"`), with the independent drafter. Where verifications
    compute the target's logits by this package's own product, plain generation runs with that product too.

    Args:
        measure_coverage: measure the target's probability mass on the shortlists.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy or no tree.
    """

    measure_coverage: bool = True

    _TAKES_AUTO: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        self.resolved_policies()

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """See `named_policies`. The labels of the baselines are taken."""
        named = named_policies(self.policies)
        for label in BASELINES:
            if label in named:
                raise ConfigurationError(f"a policy cannot be shown as {label!r}, which is one of the baselines")
        return named
