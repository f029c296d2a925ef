"""Single values of settings and files: what each may be, said in one manner."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError, shown_value

# No setting counts tokens, clusters or positions beyond this: several times the largest vocabularies in use.
LARGEST_COUNT = 2**22
# Ids of the target's most probable tokens that a policy may ask for at each position.
LARGEST_TOP_K = 1024
# torch takes larger seeds for negative ones, or not at all.
LARGEST_SEED = 2**63 - 1
DEEPEST_JSON = 32
LONGEST_NAME = 1024

# What every reader of JSON takes for a whole number.
_LARGEST_NUMBER = 2**63
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SettingError(ConfigurationError):
    """A setting is out of range.

    Attributes:
        field: the setting's name. On a command line it is that of an option.
        problem: what is wrong with it, to follow upon the name.
    """

    def __init__(self, field: str, problem: str):
        self.field, self.problem = field, problem
        super().__init__(f"{field} {problem}")


class ChangedSettings(ConfigurationError):
    """Settings are not those that something was begun with.

    Attributes:
        before_and_now: by the settings' names the values that they had and have. On a command line the names are those
            of options.
    """

    def __init__(self, problem: str, before_and_now: Mapping[str, tuple[Any, Any]], fix: str):
        self.before_and_now = before_and_now
        self._problem, self._fix = problem, fix
        changes = "; ".join(f"{name} {_change(*values)}" for name, values in before_and_now.items())
        super().__init__(f"{problem}: {changes}; {fix}")

    def renamed(self, names: Mapping[str, str]) -> "ChangedSettings":
        """The same with other names for some of the settings. Of several that get one name the first is shown."""
        shown: dict[str, tuple[Any, Any]] = {}
        for name, values in self.before_and_now.items():
            shown.setdefault(names.get(name, name), values)
        return type(self)(self._problem, shown, self._fix)


def _change(before: Any, now: Any) -> str:
    both = [part for one in (before, now) for part in (one if isinstance(one, list) else [one])]
    if any(isinstance(one, dict) for one in both):
        return "changed"
    return f"was {_in_words(before)} and is {_in_words(now)}"


def _in_words(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(shown_value, value)) if isinstance(value, list) else shown_value(value)


class FieldError(SettingError):
    """A field of a configuration holds what it must not.

    Attributes:
        field: the field's name within its section.
        fix: how to mend it.
    """

    def __init__(self, field: str, problem: str, fix: str):
        super().__init__(field, problem)
        self.fix = fix
        ConfigurationError.__init__(self, f"{field}: {problem}. {fix}.")


# What a value may be. A rule knows plain values only: none can name a file, a repository or a class.


class SettingRule(ABC):
    """What values a setting may have."""

    @abstractmethod
    def allows(self, value: Any) -> bool:
        """Whether the setting may have this value."""

    @abstractmethod
    def __str__(self) -> str:
        """What the setting must be, to follow upon "must be"."""

    def require(self, name: str, value: Any) -> None:
        """Refuse a value that is not allowed.

        Raises:
            FieldError: it is not. Its `field` is `name`.
        """
        if not self.allows(value):
            raise FieldError(name, f"must be {self}, got {shown_value(value)}", f"Give {self}")


@dataclass(frozen=True)
class WholeNumber(SettingRule):
    """A whole number from `least` to `most`, or None where it is `optional`."""

    least: int
    most: int = LARGEST_COUNT
    optional: bool = False

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a whole number from {self.least} to {self.most}" + (" or None" if self.optional else "")


@dataclass(frozen=True)
class WholeNumberOrWord(WholeNumber):
    """A whole number as above, or one word."""

    word: str = ""

    def allows(self, value: Any) -> bool:
        return super().allows(value) or (isinstance(value, str) and value == self.word)

    def __str__(self) -> str:
        return f'{super().__str__()}, or "{self.word}"'


@dataclass(frozen=True)
class Share(SettingRule):
    """A number from 0 to 1; 0 itself only where it is `or_nothing`."""

    or_nothing: bool = False

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (0 < value <= 1 or (self.or_nothing and value == 0))

    def __str__(self) -> str:
        return "a number from 0 to 1" if self.or_nothing else "a share above 0 and up to 1"


@dataclass(frozen=True)
class Number(SettingRule):
    """A number above `least` and up to `most`; `least` itself only where it is `or_least`."""

    least: float
    most: float
    or_least: bool = False

    def allows(self, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (self.least < value <= self.most or (self.or_least and value == self.least))

    def __str__(self) -> str:
        return f"a number {'from' if self.or_least else 'above'} {self.least:g} and up to {self.most:g}"


@dataclass(frozen=True)
class Switch(SettingRule):
    """True or False."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


@dataclass(frozen=True)
class OneOf(SettingRule):
    """One of a few names."""

    names: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.names

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class Digits(SettingRule):
    """So many hexadecimal digits in lower case, such as a digest's."""

    count: int

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) == self.count and set(value) <= set("0123456789abcdef")

    def __str__(self) -> str:
        return f"{self.count} hexadecimal digits"


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or _LONE_SURROGATE.search(value):
        raise FieldError(name, f"must be text, got {shown_value(value)}", "Give Unicode text that is not empty")


def require_name(name: str, value: Any) -> None:
    require_text(name, value)
    if len(value) > LONGEST_NAME:
        raise FieldError(name, f"has {len(value)} characters, and {LONGEST_NAME} are the most", "Give a name")


def _plain_json(name: str, value: Any, deepest: int, largest: float) -> Any:
    """A deep copy made of nothing but what JSON can say."""
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


def json_object(
    name: str, value: Any, deepest: int = DEEPEST_JSON, largest: float = _LARGEST_NUMBER
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FieldError(name, f"must be a JSON object, got {shown_value(value)}", "Give a dictionary of JSON values")
    return _plain_json(name, value, deepest, largest)
