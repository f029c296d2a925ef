"""What to measure, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..pair import PairSettings, is_temperature
from ..policy_text import DEFAULT_POLICIES, require_no_choice, shorten_paths
from .domain_policies import policies_by_domain


@dataclass(frozen=True)
class CoverageSettings(PairSettings):
    """What to measure, and on what. `PairSettings` has the models and prompts.

    Args:
        policies: what `parse_policy` understands, where `{domain}` stands for the domain of a prompt; or policies, or
            policies by domain, by the name to show. See `domain_policies`.
        eagle: folder or Hub id of an EAGLE head for the target, in place of the drafter.
        allow_pickle: read a head that is not in safetensors, as `EagleDrafter.from_pretrained`.
        temperature: of the target and the drafter. At 0 the target decodes greedily and a draft is accepted where the
            two argmaxes agree; masses are then those of the target's distribution at temperature 1.
        recall_k: `k` of Recall@k.
        continuations: texts that the target draws for each prompt. The figures of a prompt are means over its texts.
        draws: how many courses of rounds are drawn along each text for policies that learn from verdicts.
        stream: keep what a policy has learned from prompt to prompt, in their order, instead of starting it anew for
            each. The second texts of all prompts are a stream of their own, and so is every draw. A policy that
            differs by domain keeps what it has learned among the prompts of each domain. Standard errors take prompts
            as independent all the same: they say nothing of what another order would give.

    Raises:
        ConfigurationError: a setting is out of range, a text is no policy, there are two drafters, or several greedy
            continuations or draws, which would all be one.
    """

    policies: Sequence[str] | Mapping[str, ShortlistPolicy | Mapping[str, ShortlistPolicy]] = DEFAULT_POLICIES
    eagle: str | None = None
    allow_pickle: bool = False
    temperature: float = 0.0
    recall_k: int = 10
    continuations: int = 1
    draws: int = 1
    stream: bool = False

    # A text of one token leaves nothing to draft, as the last token of a text never is.
    _LEAST: ClassVar[Mapping[str, int]] = {
        **PairSettings._LEAST,
        "max_new_tokens": 2,
        "recall_k": 1,
        "continuations": 1,
        "draws": 1,
    }

    def __post_init__(self):
        super().__post_init__()
        if not is_temperature(self.temperature):
            raise ConfigurationError(f"temperature must be a number of at least 0, got {self.temperature!r}")
        for count, what in ((self.continuations, "continuations of a prompt"), (self.draws, "draws along a text")):
            if count > 1 and self.temperature == 0:
                raise ConfigurationError(f"{count:,} greedy {what} would all be one; set a temperature")
        if self.drafter and self.eagle:
            raise ConfigurationError("name a drafter or an EAGLE head, not both: each is measured by itself")
        self.policies_by_domain(())

    def policies_by_domain(self, domains: Sequence[str]) -> dict[str, dict[str, ShortlistPolicy]]:
        """See `domain_policies.policies_by_domain`."""
        policies = policies_by_domain(self.policies, domains)
        require_no_choice(policy for of_domain in policies.values() for policy in of_domain.values())
        return policies

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        return {**super().to_dict(), "eagle": None if self.eagle is None else shorten_paths(str(self.eagle))}
