"""Policies as the texts of a command line: `hybrid`, `frequency:size=32768`, `frequency:size=1024+in_context`."""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..shortlists import ShortlistPolicy, UnionShortlist, policy_class, require_settings

DEFAULT_POLICIES = ("full", "frequency", "in_context", "hybrid")

# In `a+b:size=1` a plus sign joins policies; in a path it is followed by something that is not a policy with settings.
_JOINT = re.compile(r"\+(?=[a-z_]+(?:[:+]|$))")
_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")
_PATH = re.compile(r"(^|[=:])((?:~|\.{1,2})?/[^,=:]*)")


def parse_policy(text: str) -> ShortlistPolicy:
    """Make the policy that a text describes.

    The text is a policy's name, then after a colon its settings separated by commas: `hybrid`,
    `frequency:size=32768`, `frequency:ranking=FOLDER,position_aware=true`. A plus sign makes a union of several:
    `frequency:size=1024+in_context:window=3072,eviction=lru`. `none` stands for None.

    Raises:
        ConfigurationError: there is no such policy or setting, or a value is mistyped or out of range.
    """
    parts = [_parse_single_policy(part) for part in _JOINT.split(text)]
    return parts[0] if len(parts) == 1 else UnionShortlist(*parts)


def _parse_single_policy(text: str) -> ShortlistPolicy:
    name, colon, listed = text.partition(":")
    policy = policy_class(name)
    known = inspect.signature(policy).parameters
    settings: dict[str, Any] = {}
    for item in _NEXT_SETTING.split(listed) if colon else ():
        setting, equals, value = item.partition("=")
        if not equals or not value:
            raise ConfigurationError(f"policy {text!r}: settings are written name=value, got {item!r}")
        if setting not in known:
            raise ConfigurationError(
                f"policy {text!r}: {name} has no setting {setting!r}; it has {', '.join(known) or 'none'}"
            )
        if setting in settings:
            raise ConfigurationError(f"policy {text!r}: {setting} is given twice")
        settings[setting] = _parse_value(value)
    require_settings(name, settings)
    try:
        return policy(**settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"policy {text!r}: {error}") from error


def _parse_value(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def shorten_paths(text: str) -> str:
    """Reduce the paths in a word of a command line to their last two parts, so that results can be published."""

    def shorten(match: re.Match[str]) -> str:
        path = match[2].replace(f"{Path.home()}/", "~/")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        return match[1] + "/".join(parts[-2:])

    return _PATH.sub(shorten, text)


def named_policies(policies: Sequence[str] | Mapping[str, ShortlistPolicy]) -> dict[str, ShortlistPolicy]:
    """The policies by the names they are shown under, which are their texts with paths shortened.

    Args:
        policies: what `parse_policy` understands, or policies by the name to show.

    Raises:
        ConfigurationError: a text is no policy, a name is taken, or there are no policies.
    """
    if not policies:
        raise ConfigurationError("there is no policy to measure")
    if isinstance(policies, Mapping):
        return dict(policies)
    pairs = [(shorten_paths(text), parse_policy(text)) for text in policies]
    named = dict(pairs)
    twice = next((label for label in named if [one for one, _ in pairs].count(label) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the policy {twice!r} is given twice")
    return named
