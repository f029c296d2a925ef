"""How systems draft: a policy as a text, and how their drafter is aligned."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...alignment.settings import OnlineAlignment
from ...errors import ConfigurationError, shown_value
from ...shortlists import ShortlistPolicy
from ..coverage.settings import policies_by_domain
from ..policy_text import policy_labels

# Every update is finished before the next request begins, so that acceptance is the same in every run.
ALIGNMENTS: Mapping[str, Callable[..., OnlineAlignment]] = {
    "default": OnlineAlignment,
    "paper": OnlineAlignment.paper,
    "osd": OnlineAlignment.osd,
}


@dataclass(frozen=True)
class Method:
    """A way to draft."""

    label: str  # what it is shown as
    policy: str  # what `parse_policy` understands; `{domain}` stands for the domain of a prompt
    alignment: str | None = None  # how the drafter is aligned, a name in `ALIGNMENTS`; None leaves it as it is

    def online_alignment(self) -> OnlineAlignment | None:
        """The settings of the alignment."""
        return None if self.alignment is None else ALIGNMENTS[self.alignment](synchronous=True)


def make_methods(policies: Sequence[str], alignments: Sequence[str] = ()) -> tuple[Method, ...]:
    """Every policy with the drafter as it is, and then aligned in each of these ways. Raises `ConfigurationError` if
    there is no such alignment, or a policy is given twice."""
    for name in alignments:
        if name not in ALIGNMENTS:
            raise ConfigurationError(f"there is no alignment {shown_value(name)}; there are {', '.join(ALIGNMENTS)}")
    labels = policy_labels(policies)
    frozen = [Method(label, policy) for label, policy in zip(labels, policies, strict=True)]
    aligned = [
        Method(f"{one.label}, aligned ({name})", one.policy, name)
        for name in dict.fromkeys(alignments)
        for one in frozen
    ]
    return (*frozen, *aligned)


def require_peft(methods: Sequence[Method]) -> None:
    """Raise `ConfigurationError` if a method needs peft and it is missing."""
    with_lora = [one for one in methods if one.alignment and not one.online_alignment().trains_all_parameters]
    if with_lora and importlib.util.find_spec("peft") is None:
        raise ConfigurationError(f"{with_lora[0].label} needs peft; install it with: pip install 'hf-dynspec[align]'")


def make_policies(methods: Sequence[Method], domains: Sequence[str]) -> dict[str, dict[str, ShortlistPolicy]]:
    """By the methods' labels, the policy for each domain. Methods with one text share its policies. Raises as
    `policies_by_domain`, and `ConfigurationError` if two methods have one label."""
    by_text: dict[str, dict[str, ShortlistPolicy]] = {}
    made: dict[str, dict[str, ShortlistPolicy]] = {}
    for method in methods:
        if method.label in made:
            raise ConfigurationError(f"two methods would be shown as {method.label!r}")
        if method.policy not in by_text:
            (by_text[method.policy],) = policies_by_domain([method.policy], domains).values()
        made[method.label] = by_text[method.policy]
    return made
