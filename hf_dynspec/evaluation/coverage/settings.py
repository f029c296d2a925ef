"""What to measure, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..policy_text import DEFAULT_POLICIES, require_no_choice
from ..settings import OneDrafterSettings, PairSettings
from .domain_policies import policies_by_domain


@dataclass(frozen=True)
class CoverageSettings(OneDrafterSettings):
    """What to measure, and on what. `OneDrafterSettings` has the models and prompts.

    Args:
        policies: what `parse_policy` understands, where `{domain}` stands for the domain of a prompt; or policies, or
            policies by domain, by the name to show. See `domain_policies`.
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
        for count, what in ((self.continuations, "continuations of a prompt"), (self.draws, "draws along a text")):
            if count > 1 and self.temperature == 0:
                raise ConfigurationError(f"{count:,} greedy {what} would all be one; set a temperature")
        self.policies_by_domain(())

    def policies_by_domain(self, domains: Sequence[str]) -> dict[str, dict[str, ShortlistPolicy]]:
        """See `domain_policies.policies_by_domain`."""
        policies = policies_by_domain(self.policies, domains)
        require_no_choice(policy for of_domain in policies.values() for policy in of_domain.values())
        return policies
