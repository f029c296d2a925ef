"""Policies that differ by the domain of a prompt, such as rankings that were built without the domain under test."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..policy_text import parse_policy, policy_labels

# Stands for the domain of a prompt in a policy's text.
PLACEHOLDER = "{domain}"
# What a policy's text is taken apart by.
_SEPARATORS = ",=:+{}"


def policies_by_domain(
    policies: Sequence[str] | Mapping[str, ShortlistPolicy | Mapping[str, ShortlistPolicy]], domains: Sequence[str]
) -> dict[str, dict[str, ShortlistPolicy]]:
    """The policies by the names they are shown under, and of each the policy for every domain.

    In most texts that is one policy for all. In a text that holds `{domain}`, each domain stands in its place: of
    `frequency:ranking=rankings/without-{domain},size=32768` there is a policy for every folder.

    Args:
        policies: what `parse_policy` understands; or policies, or policies by domain, by the name to show.
        domains: the domains of the prompts. Without any, only what holds for all of them is checked.

    Raises:
        ConfigurationError: a text is no policy for a domain, a domain has no policy or cannot stand in a text, a name
            is taken, or there are no policies.
        ArtifactError: a text names an artifact that is not there, or damaged.
    """
    if not isinstance(policies, Mapping):
        labels = policy_labels(policies)
        return {label: _from_text(text, domains) for label, text in zip(labels, policies, strict=True)}
    if not policies:
        raise ConfigurationError("there is no policy to measure")
    return {label: _from_policies(label, given, domains) for label, given in policies.items()}


def _from_text(text: str, domains: Sequence[str]) -> dict[str, ShortlistPolicy]:
    if PLACEHOLDER not in text:
        return dict.fromkeys(domains, parse_policy(text))
    for domain in domains:
        separator = next((one for one in _SEPARATORS if one in domain), None)
        if separator is not None or ".." in PurePath(domain).parts:
            problem = f"the domain {domain!r} cannot stand in it, as it holds {separator or '..'!r}"
            raise ConfigurationError(f"policy {text!r}: {problem}; rename the prompts' category")
    return {domain: parse_policy(text.replace(PLACEHOLDER, domain)) for domain in domains}


def _from_policies(
    label: str, given: ShortlistPolicy | Mapping[str, ShortlistPolicy], domains: Sequence[str]
) -> dict[str, ShortlistPolicy]:
    if isinstance(given, ShortlistPolicy):
        return dict.fromkeys(domains, given)
    missing = next((domain for domain in domains if domain not in given), None)
    if missing is not None:
        raise ConfigurationError(f"the policy {label!r} has none for the domain {missing!r}; it has {sorted(given)}")
    return {domain: given[domain] for domain in domains}
