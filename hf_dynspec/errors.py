"""The errors that hf_dynspec raises on purpose. Each message names what was wrong and how to mend it. And how it warns
in the midst of a call."""

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_MESSAGE = 4000
# Packages whose lines tell a user nothing of what to change.
_INNER = ("hf_dynspec", "transformers", "torch", "peft", "accelerate")
_LONGEST_FIELD = 200
_LONGEST_FIX = 800


def shown_text(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Make a text that may come out of a file fit to be shown: in a message, on a card, on a terminal.

    Args:
        text: any text.
        longest: characters that are kept; the rest is left out from the end, which then says so by an ellipsis.

    Returns:
        The text without control characters, line breaks, marks that reverse the direction of writing, invisible
        characters and lone surrogates; what they were is written out, as Python's `repr` does. A text that has been
        through this once stays as it is.
    """
    # A character becomes ten at most, so that a huge text need not be looked at as a whole.
    start = text[: longest + 1]
    if not start.isprintable():
        start = "".join([one if one.isprintable() else ascii(one)[1:-1] for one in start])
    return start if len(start) <= longest else f"{start[: longest - 1]}…"


def shown_value(value: object) -> str:
    """A value for a message: no longer than a line, whatever a file held."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and abs(value) >= 10**60:
        return "an absurdly large number"
    return shown_text(repr(value), 80)


def counted(count: int, one: str, many: str | None = None) -> str:
    """So many of something, in words: `1 token`, `1,024 tokens`.

    Args:
        count: how many.
        one: what a single one is called.
        many: what several are called (None: the same with an s).
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class DynSpecError(Exception):
    """Base class of every error that this package raises on purpose. Whatever a message repeats of a file is escaped
    here, and long messages are cut off."""

    def __init__(self, *arguments: object):
        super().__init__(*(shown_text(one) if isinstance(one, str) else one for one in arguments))


class NotBoundError(DynSpecError, RuntimeError):
    """The assistant was handed to a model that it is not bound to."""


class TargetError(DynSpecError, RuntimeError):
    """The target's logits leave nothing that a token could be drawn from."""


class UnsupportedError(DynSpecError, ValueError):
    """A model, a pair of models or a `generate` argument that speculative decoding here cannot serve."""


class ConfigurationError(DynSpecError, ValueError):
    """A setting of a policy, an assistant or a configuration file is unknown, mistyped or out of range."""


class PolicyError(DynSpecError, ValueError):
    """A policy broke the contract of policies (`shortlists.base`, `protocol.Shortlist`).

    Attributes:
        policy: the name of the policy's class.
        depth: the draft step at which it broke, None where it was not at a draft step.
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
        field: the part of the artifact that is at fault, such as `"model.safetensors: ranking"`.
    """

    def __init__(self, field: str, problem: str, fix: str, source: str | None = None):
        # Each part is bounded by itself, so that a long name does not crowd out how to mend the file.
        self.field = shown_text(field, _LONGEST_FIELD)
        fix = shown_text(fix, _LONGEST_FIX)
        self._source = None if source is None else shown_text(source, _LONGEST_FIELD)
        start = self.field if self._source is None else f"{self._source}: {self.field}"
        self._problem = shown_text(problem, LONGEST_MESSAGE - len(start) - len(fix) - len(": . "))
        self._fix = fix
        super().__init__(f"{start}: {self._problem}. {fix}")

    def of(self, source: str) -> "ArtifactError":
        """The same error with the folder or repository that it is about, where its message does not name that yet.

        Args:
            source: as the user wrote it.
        """
        if self._source is not None or shown_text(source, _LONGEST_FIELD) in str(self):
            return self
        return type(self)(self.field, self._problem, self._fix, source)

    def __reduce__(self) -> tuple:
        return type(self), (self.field, self._problem, self._fix, self._source)


@contextmanager
def naming_source(source: str | os.PathLike) -> Iterator[None]:
    """Name the folder, the repository or the policy in the errors that are raised meanwhile about an artifact."""
    try:
        yield
    except ArtifactError as error:
        named = error.of(str(source))
        if named is error:
            raise
        raise named from error.__cause__


class DynSpecWarning(UserWarning):
    """What hf_dynspec warns of in the midst of a call."""


def warn_user(message: str) -> None:
    """Warn at the line of the user's that led here, and not at one of this package's, or of those that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DynSpecWarning, stacklevel=level)
