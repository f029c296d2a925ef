"""Single values of settings and files: what each may be, said in one manner."""

import math
import re
from collections.abc import Mapping
from typing import Any

from .errors import ConfigurationError, shown_value

DEEPEST_JSON = 32
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


# What every reader of JSON takes for a whole number.
_LARGEST_NUMBER = 2**63


LONGEST_NAME = 1024


class FieldError(ConfigurationError):
    """A field of a configuration holds what it must not.

    Attributes:
        field: the field's name within its section.
        problem: what is wrong with it.
        fix: how to mend it.
    """

    def __init__(self, field: str, problem: str, fix: str):
        self.field, self.problem, self.fix = field, problem, fix
        super().__init__(f"{field}: {problem}. {fix}.")


def require_integer(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        problem = f"must be a whole number from {least} to {most}, got {shown_value(value)}"
        raise FieldError(name, problem, "Give a number in that range")


def require_probability(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise FieldError(
            name, f"must be a number from 0 to 1, got {shown_value(value)}", "Give a number in that range"
        )


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or _LONE_SURROGATE.search(value):
        raise FieldError(name, f"must be text, got {shown_value(value)}", "Give Unicode text that is not empty")


def require_name(name: str, value: Any) -> None:
    require_text(name, value)
    if len(value) > LONGEST_NAME:
        raise FieldError(name, f"has {len(value)} characters, and {LONGEST_NAME} are the most", "Give a name")


def require_pattern(name: str, value: Any, pattern: re.Pattern[str], description: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FieldError(name, f"must be {description}, got {shown_value(value)}", f"Give {description}")


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
