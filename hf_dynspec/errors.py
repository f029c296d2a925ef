"""The errors and warnings of hf_dynspec. Each message names the fault and the fix."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_MESSAGE = 4000
# Packages below the user's own line.
_INNER = ("hf_dynspec", "transformers", "torch", "peft", "accelerate")
_LONGEST_FIELD = 200
_LONGEST_FIX = 800


def shown_text(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Make a text from a file fit for a message, a card or a terminal.

    Args:
        text: any text.
        longest: the most characters; an ellipsis stands for the rest.

    Returns:
        The text with control characters, line breaks, marks that reverse the direction of writing, invisible
        characters and lone surrogates escaped, as in Python's `repr`. Idempotent.
    """
    # A character becomes ten at most, so that a huge text need not be looked at as a whole.
    start = text[: longest + 1]
    if not start.isprintable():
        start = "".join([one if one.isprintable() else ascii(one)[1:-1] for one in start])
    return start if len(start) <= longest else f"{start[: longest - 1]}…"


def shown_value(value: object) -> str:
    """A value for a message, in one line."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**60:
        return "an absurdly large number"
    return shown_text(repr(value), 80)


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number of things in words: `1 token`, `1,024 tokens`. `many` is the plural (None: `one` with an s)."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class DynSpecError(Exception):
    """Base class of this package's errors. Texts from files are escaped, and long messages are cut."""

    def __init__(self, *arguments: object):
        super().__init__(*(shown_text(one) if isinstance(one, str) else one for one in arguments))


class NotBoundError(DynSpecError, RuntimeError):
    """The assistant is not bound to this model."""


class TargetError(DynSpecError, RuntimeError):
    """No token can be drawn from the target's logits."""


class UnsupportedError(DynSpecError, ValueError):
    """A model, a pair of models or a `generate` argument that speculative decoding here cannot serve."""


class ConfigurationError(DynSpecError, ValueError):
    """A setting of a policy, an assistant or a configuration file is unknown, mistyped or out of range."""


class PolicyError(DynSpecError, ValueError):
    """A policy broke the contract of policies (`shortlists.base`, `protocol.Shortlist`).

    Attributes:
        policy: the name of the policy's class.
        depth: the draft step, or None if it was at no draft step.
    """

    def __init__(self, policy: str, depth: int | None, problem: str, fix: str):
        self.policy, self.depth, self._problem, self._fix = policy, depth, problem, fix
        at = "" if depth is None else f", at draft step {depth}"
        super().__init__(f"{policy}{at}: {problem}. {fix}")

    def __reduce__(self) -> tuple:
        return type(self), (self.policy, self.depth, self._problem, self._fix)


class ArtifactError(DynSpecError, ValueError):
    """An artifact (configuration, ranking, router, …) is damaged, hostile or made for other models.

    Attributes:
        field: the faulty part of the artifact, such as `"model.safetensors: ranking"`.
    """

    def __init__(self, field: str, problem: str, fix: str, source: str | None = None):
        # Each part has a bound of its own, so that a long name does not crowd out the fix.
        self.field, self._fix = shown_text(field, _LONGEST_FIELD), shown_text(fix, _LONGEST_FIX)
        self._source = None if source is None else shown_text(source, _LONGEST_FIELD)
        start = self.field if self._source is None else f"{self._source}: {self.field}"
        self._problem = shown_text(problem, LONGEST_MESSAGE - len(start) - len(self._fix) - len(": . "))
        super().__init__(f"{start}: {self._problem}. {self._fix}")

    def of(self, source: str) -> "ArtifactError":
        """The same error with the name of the folder or repository, if the message lacks it."""
        if self._source is not None or shown_text(source, _LONGEST_FIELD) in str(self):
            return self
        return type(self)(self.field, self._problem, self._fix, source)

    def __reduce__(self) -> tuple:
        return type(self), (self.field, self._problem, self._fix, self._source)


@contextmanager
def naming_source(source: str | os.PathLike) -> Iterator[None]:
    """Add the name of the folder, repository or policy to the `ArtifactError`s of the block."""
    try:
        yield
    except ArtifactError as error:
        named = error.of(str(source))
        if named is error:
            raise
        raise named from error.__cause__


class DynSpecWarning(UserWarning):
    """A warning of hf_dynspec during a call."""


def warn_user(message: str) -> None:
    """Warn at the user's own line, not at a line of this package or of its callers in other packages."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DynSpecWarning, stacklevel=level)
