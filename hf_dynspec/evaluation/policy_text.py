"""Policies as the texts of a command line: `hybrid`, `frequency:size=32768`, `frequency:size=1024+in_context`, and
`package.module:Class` for a class of one's own."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, naming_source
from ..shortlists import POLICIES, ShortlistPolicy, UnionShortlist, policy_class
from ..shortlists.registry import require_arguments, require_policy_class

DEFAULT_POLICIES = ("full", "frequency", "in_context", "hybrid")

# In `a+b:size=1` a plus sign joins policies; in a path it is followed by something that is not a policy with settings.
_NAMED = r"[a-z_]+"
_CLASS = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")
_PATH = re.compile(r"(^|[=:])((?:~|\.{1,2})?/[^,=:]*)")


def parse_policy(text: str) -> ShortlistPolicy:
    """Make the policy that a text describes.

    The text is a policy's name, then after a colon its settings separated by commas: `hybrid`,
    `frequency:size=32768`, `frequency:ranking=FOLDER,position_aware=true`. A plus sign makes a union of several:
    `frequency:size=1024+in_context:window=3072,eviction=lru`. `none` stands for None.

    In place of a name there may be the class of a policy that is written elsewhere, `package.module:Class`, with its
    settings behind a second colon: `my_package.policies:Recent:window=3`. The module is imported, also from the
    current folder, as by `python -m`. So a text must come from whoever runs the command, and never from a file.

    Raises:
        ConfigurationError: there is no such policy or setting, a class cannot be imported or is no policy, or a value
            is mistyped or out of range.
    """
    parts = [_parse_single_policy(part) for part in _split_at_joints(text)]
    return parts[0] if len(parts) == 1 else UnionShortlist(*parts)


def _split_at_joints(text: str) -> list[str]:
    # Names that others registered may hold digits, which in a path behind a plus sign are more likely.
    known = "|".join(map(re.escape, POLICIES))
    return re.split(rf"\+(?=(?:{_NAMED}|{known}|{_CLASS})(?:[:+]|$))", text)


def _parse_single_policy(text: str) -> ShortlistPolicy:
    policy, listed = _class_and_settings(text)
    known = inspect.signature(policy).parameters
    settings: dict[str, Any] = {}
    for item in [] if listed is None else _NEXT_SETTING.split(listed):
        setting, equals, value = item.partition("=")
        if not equals or not value:
            raise ConfigurationError(f"policy {text!r}: settings are written name=value, got {item!r}")
        if setting not in known:
            raise ConfigurationError(
                f"policy {text!r}: {policy.name} has no setting {setting!r}; it has {', '.join(known) or 'none'}"
            )
        if setting in settings:
            raise ConfigurationError(f"policy {text!r}: {setting} is given twice")
        settings[setting] = _parse_value(value)
    require_arguments(policy, settings)
    try:
        with naming_source(f"policy {text}"):
            return policy(**settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"policy {text!r}: {error}") from error


def _class_and_settings(text: str) -> tuple[type[ShortlistPolicy], str | None]:
    """The class that a text begins with, and what stands behind its colon, None where there is none."""
    first, *rest = text.split(":", maxsplit=1)
    if _MODULE.fullmatch(first) and rest:
        second, *listed = rest[0].split(":", maxsplit=1)
        # A module may be named as a policy, its own among them.
        if second.isidentifier() and (first not in POLICIES or _is_module(first)):
            return import_policy(first, second), (listed or [None])[0]
    try:
        return policy_class(first), (rest or [None])[0]
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; a class of your own is written package.module:Class") from error


def _is_module(name: str) -> bool:
    _find_modules_here()
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # of a module that was made by hand
        return False
    # Any folder would be a namespace, such as one that holds an artifact.
    return found is not None and found.origin is not None


def _find_modules_here() -> None:
    """Let modules in the current folder be found, as by `python -m`."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def import_policy(module: str, name: str) -> type[ShortlistPolicy]:
    """Import the class of a policy from a module, in the current folder too, as by `python -m`.

    Raises:
        ConfigurationError: the module cannot be imported or has no such class, or that is no policy or abstract.
    """
    _find_modules_here()
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a module of somebody else's, which may raise anything when it is run
        problem = f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"policy {module}:{name}: the module cannot be imported: {problem}. Install it, or run the command in the "
            "folder that holds it"
        ) from error
    if found is None:
        raise ConfigurationError(
            f"policy {module}:{name}: the module {module} has no {name}; correct the class's name"
        )
    try:
        require_policy_class(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"policy {module}:{name}: {error}") from error
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(f"policy {module}:{name}: the class lacks {', '.join(missing)}; write them")
    return found


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
    """The policies by the names they are shown under, see `policy_labels`. Raises `ConfigurationError` if a text is no
    policy, a name is taken, or there are no policies."""
    if isinstance(policies, Mapping) and policies:
        return dict(policies)
    return {label: parse_policy(text) for label, text in zip(policy_labels(policies), policies, strict=True)}


def require_no_choice(policies: Iterable[ShortlistPolicy]) -> None:
    """Raise `ConfigurationError` for a policy that chooses from others by the clock, where one policy is measured."""
    for policy in policies:
        parts = [one.name for one, _ in policy.alternatives(None)]
        if len(parts) > 1:
            raise ConfigurationError(
                f"the policy {policy.name!r} chooses by the clock from {', '.join(parts)}, and no one policy can be "
                "measured in it: name these, each by itself"
            )


def policy_in_python(label: str, policies: Sequence[str] | Mapping[str, ShortlistPolicy]) -> tuple[str, str]:
    """How to write one of the named policies, which is shown as `label`, as an assistant's argument: a line that has
    to stand before, or nothing, and the argument. Policies by label have labels that are Python."""
    if label in POLICIES:
        return "", f'"{label}"'
    if isinstance(policies, Mapping):
        return "", label
    text = dict(zip(policy_labels(policies), policies, strict=True))[label]
    return "from hf_dynspec.evaluation import parse_policy\n", f"parse_policy({text!r})"


def policy_labels(texts: Sequence[str]) -> list[str]:
    """The names that policies are shown under, which are their texts with paths shortened. Raises `ConfigurationError`
    if one is taken, or there are none."""
    if not texts:
        raise ConfigurationError("there is no policy to measure")
    labels = [shorten_paths(text) for text in texts]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the policy {twice!r} is given twice")
    return labels
