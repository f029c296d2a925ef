"""What to measure, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar

from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..policy_text import DEFAULT_POLICIES, parse_policy, policy_labels, require_no_choice
from ..settings import OneDrafterSettings, PairSettings

# Stands for the domain of a prompt in a policy's text.
PLACEHOLDER = "{domain}"
# What policy texts are split at, so that no domain in one may hold it.
_SEPARATORS = ",=:+{}"


@dataclass(frozen=True)
class CoverageSettings(OneDrafterSettings):
    """What to measure, and on what. `OneDrafterSettings` has the models and prompts.

    Args:
        policies: texts for `parse_policy`, in which `{domain}` stands for the domain of a prompt; or policies, or
            policies by domain, by label.
        temperature: of the target and the drafter. At 0 the target decodes greedily and a draft is accepted if the two
            argmaxes agree; masses are then those of the target's distribution at temperature 1.
        recall_k: `k` of Recall@k.
        continuations: texts that the target draws for each prompt. A prompt's figures are means over its texts.
        draws: how often the rounds along each text are drawn, for policies that learn from verdicts.
        stream: keep a policy's state from prompt to prompt, in their order. The second texts of all prompts are a
            stream of their own, and so is every draw. A policy that differs by domain keeps one state for each domain.
            Standard errors still take prompts as independent.

    Raises:
        ConfigurationError: a setting is out of range, a text is no policy, there are two drafters, or several greedy
            continuations or draws, which would all be equal.
    """

    policies: Sequence[str] | Mapping[str, ShortlistPolicy | Mapping[str, ShortlistPolicy]] = DEFAULT_POLICIES
    recall_k: int = 10
    continuations: int = 1
    draws: int = 1
    stream: bool = False

    # The last token of a text is never drafted.
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
        """See `policies_by_domain`."""
        policies = policies_by_domain(self.policies, domains)
        require_no_choice(policy for of_domain in policies.values() for policy in of_domain.values())
        return policies


def policies_by_domain(
    policies: Sequence[str] | Mapping[str, ShortlistPolicy | Mapping[str, ShortlistPolicy]], domains: Sequence[str]
) -> dict[str, dict[str, ShortlistPolicy]]:
    """The policies by label and domain.

    Args:
        policies: see `CoverageSettings`.
        domains: of the prompts. Without any, only what holds for all of them is checked.

    Raises:
        ConfigurationError: a text is no policy for a domain, a domain has no policy or cannot stand in a text, a label
            is taken, or there are no policies.
        ArtifactError: a text names an artifact that is missing or damaged.
    """
    if not isinstance(policies, Mapping) or not policies:
        policies = dict(zip(policy_labels(policies), policies, strict=True))
    return {label: _by_domain(label, one, domains) for label, one in policies.items()}


def _by_domain(
    label: str, given: str | ShortlistPolicy | Mapping[str, ShortlistPolicy], domains: Sequence[str]
) -> dict[str, ShortlistPolicy]:
    if isinstance(given, ShortlistPolicy):
        return dict.fromkeys(domains, given)
    if isinstance(given, Mapping):
        missing = next((domain for domain in domains if domain not in given), None)
        if missing is not None:
            problem = f"has none for the domain {missing!r}; it has {sorted(given)}"
            raise ConfigurationError(f"the policy {label!r} {problem}")
        return {domain: given[domain] for domain in domains}
    if PLACEHOLDER not in given:
        return dict.fromkeys(domains, parse_policy(given))
    for domain in domains:
        separator = next((one for one in _SEPARATORS if one in domain), None)
        if separator is not None or ".." in PurePath(domain).parts:
            problem = f"the domain {domain!r} cannot stand in it, as it holds {separator or '..'!r}"
            raise ConfigurationError(f"policy {given!r}: {problem}; rename the prompts' category")
    return {domain: parse_policy(given.replace(PLACEHOLDER, domain)) for domain in domains}
