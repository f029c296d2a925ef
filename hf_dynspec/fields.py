"""Rules for single values of settings and files. Values are plain: none can name a file, a repository or a class."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError, shown_value

# Several times the largest vocabularies in use.
LARGEST_COUNT = 2**22
# Ids of the target's most probable tokens that a policy may ask for at each position.
LARGEST_TOP_K = 1024
# torch takes larger seeds for negative ones, or not at all.
LARGEST_SEED = 2**63 - 1
DEEPEST_JSON = 32
LONGEST_NAME = 1024

_LARGEST_NUMBER = 2**63
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SettingError(ConfigurationError):
    """A setting is out of range.

    Attributes:
        field: the setting's name. On a command line it is the option's.
        problem: what follows the name in the message.
    """

    def __init__(self, field: str, problem: str):
        self.field, self.problem = field, problem
        super().__init__(f"{field} {problem}")


class FieldError(SettingError):
    """A field of a configuration has a value that is not allowed.

    Attributes:
        field: the field's name within its section.
        fix: how to mend it.
    """

    def __init__(self, field: str, problem: str, fix: str):
        super().__init__(field, problem)
        self.fix = fix
        ConfigurationError.__init__(self, f"{field}: {problem}. {fix}.")


class ChangedSettings(ConfigurationError):
    """Settings differ from an earlier run's.

    Attributes:
        before_and_now: both values by setting. On a command line the names are those of options.
    """

    def __init__(self, problem: str, before_and_now: Mapping[str, tuple[Any, Any]], fix: str):
        self.before_and_now = before_and_now
        self._problem, self._fix = problem, fix
        changes = "; ".join(f"{name} {_change(*values)}" for name, values in before_and_now.items())
        super().__init__(f"{problem}: {changes}; {fix}")

    def renamed(self, names: Mapping[str, str]) -> "ChangedSettings":
        """The same with other names for some of the settings. The first of several that get one name is shown."""
        shown: dict[str, tuple[Any, Any]] = {}
        for name, values in self.before_and_now.items():
            shown.setdefault(names.get(name, name), values)
        return type(self)(self._problem, shown, self._fix)


def _change(before: Any, now: Any) -> str:
    if any(isinstance(part, dict) for one in (before, now) for part in (one if isinstance(one, list) else [one])):
        return "changed"
    return f"was {_in_words(before)} and is {_in_words(now)}"


def _in_words(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(shown_value, value)) if isinstance(value, list) else shown_value(value)


@dataclass(frozen=True)
class SettingRule:
    """The allowed values of a setting.

    Args:
        text: the allowed values, after "must be".
        allows: whether the setting may have a value.
    """

    text: str
    allows: Callable[[Any], bool]

    def __str__(self) -> str:
        return self.text

    def require(self, name: str, value: Any) -> None:
        """Refuse a value that is not allowed.

        Raises:
            FieldError: it is not. Its `field` is `name`.
        """
        if not self.allows(value):
            raise FieldError(name, f"must be {self}, got {shown_value(value)}", f"Give {self}")


def _is(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


# The rules have names of classes, as settings are declared by them.


def WholeNumber(least: int, most: int = LARGEST_COUNT, optional: bool = False, word: str | None = None) -> SettingRule:
    """A whole number from `least` to `most`, or None if `optional`, or the `word`."""
    text = f"a whole number from {least} to {most}" + " or None" * optional + (f', or "{word}"' if word else "")

    def allows(value: Any) -> bool:
        if value is None or isinstance(value, str):
            return optional if value is None else value == word
        return _is(value, int) and least <= value <= most

    return SettingRule(text, allows)


def Number(least: float, most: float, or_least: bool = False) -> SettingRule:
    """A number above `least` and up to `most`; `least` itself if `or_least`."""

    def allows(value: Any) -> bool:
        return _is(value, int, float) and (least < value <= most or (or_least and value == least))

    return SettingRule(f"a number {'from' if or_least else 'above'} {least:g} and up to {most:g}", allows)


def Share(or_nothing: bool = False) -> SettingRule:
    """A number above 0 and up to 1; 0 itself if `or_nothing`."""
    return Number(0, 1, or_nothing)


def Switch() -> SettingRule:
    """True or False."""
    return SettingRule("True or False", lambda value: isinstance(value, bool))


def OneOf(names: Sequence[str]) -> SettingRule:
    """One of a few names."""
    return SettingRule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in tuple(names))


def Digits(count: int) -> SettingRule:
    """`count` hexadecimal digits in lower case, such as a digest's."""
    allowed = re.compile(f"[0-9a-f]{{{count}}}")
    return SettingRule(
        f"{count} hexadecimal digits", lambda value: isinstance(value, str) and bool(allowed.fullmatch(value))
    )


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or _LONE_SURROGATE.search(value):
        raise FieldError(name, f"must be text, got {shown_value(value)}", "Give Unicode text that is not empty")


def require_name(name: str, value: Any) -> None:
    require_text(name, value)
    if len(value) > LONGEST_NAME:
        raise FieldError(name, f"has {len(value)} characters, and {LONGEST_NAME} are the most", "Give a name")


def json_object(
    name: str, value: Any, deepest: int = DEEPEST_JSON, largest: float = _LARGEST_NUMBER
) -> dict[str, Any]:
    """A deep copy of a mapping, of JSON values only."""
    if not isinstance(value, Mapping):
        raise FieldError(name, f"must be a JSON object, got {shown_value(value)}", "Give a dictionary of JSON values")
    return _plain_json(name, value, deepest, largest)


def _plain_json(name: str, value: Any, deepest: int, largest: float) -> Any:
    if deepest < 0:
        raise FieldError(name, "is nested too deeply", f"Nest values at most {DEEPEST_JSON} deep")
    if isinstance(value, Mapping):
        for key in value:
            require_text(f"{name}: a key", key)
        return {key: _plain_json(name, item, deepest - 1, largest) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_json(name, item, deepest - 1, largest) for item in value]
    if isinstance(value, str) and value:
        require_text(name, value)
    elif not (value is None or isinstance(value, bool | str | int)):
        if not isinstance(value, float) or not math.isfinite(value):
            raise FieldError(name, f"holds {shown_value(value)}, which JSON cannot say", "Give only JSON values")
    if isinstance(value, int) and abs(value) > largest:
        raise FieldError(name, f"holds {shown_value(value)}", "Give numbers of at most 64 bits")
    return value
