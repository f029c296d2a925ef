"""How commands end and what they write to: interrupts, errors of the operating system, folders and files in use."""

import errno
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import ConfigurationError, DynSpecError

INTERRUPTED = 130
# Files by which a folder is known to hold an artifact or a model.
MODEL_FILES = ("config.json", "model.safetensors")
# Parameters that name what is read.
_READ = {"prompts", "data", "more", "text", "held_out", "file", "check", "results", "directory"}
# Those that name a model or an artifact: a folder, or what may be a repository's name.
_FOLDERS_OR_HUB_IDS = set("target drafter eagle tokenizer from_target artifact head source config clusters".split())
_FOLDERS_OR_HUB_IDS |= set("compare ranking vocabtrim router coral graph".split())
# Those that take one of a few names; of several commands, all of them.
_NAMES = {"method": ("dynaspec", "coral"), "layout": ("eagle3", "eagle2")}
_NAMES["schedule"] = ("fitted", "dynaspec", "fixed", "cosine", "constant")
_NAMES["suite"] = ("spec-bench", "speed-bench", "domains", "topic-switch", "multi-turn")
_NAMES["table"] = tuple(f"{paper}-{n}" for paper, all in (("microspec", "23"), ("dynaspec", "12")) for n in all)
_NAMES["table"] += tuple(f"evospec-{n}" for n in (1, 2, 4, 6, 7, 10))
_NAMES["align"] = ("default", "paper", "osd")
_POLICIES = "full frequency in_context router union hybrid retrieval screen coral native auto".split()
# The name of a policy, the first of those that a plus sign joins. A user's own class has a module before it.
_POLICY = re.compile(r"(\w+)(?=$|\+|:\w+=)")
_HUB_IDS = {"repo_id", "dataset"}
# Whole numbers are 1 at least, but for these; other numbers 0, and these above it.
_FROM_0 = {"seed", "top_k", "pinned", "profile_prompts", "expected_prompts", "cached_tokens"}
_ABOVE_0 = {"seconds", "minutes", "decay", "learning_rate", "share", "mass", "device_memory_bandwidth", "device_flops"}
# Keys of a context: what an interrupt leaves, or a function that says it; and the folder that a command writes to.
_KEPT, _PLACE = "hf_dynspec.kept", "hf_dynspec.place"
_NOTHING_KEPT = "nothing is left half-written, and nothing is kept; run the same command to begin anew"
# safetensors wraps an error of the system in a text with its number.
_WRAPPED_NUMBER = re.compile(r"(?:code: |os error )(\d+)")
_NO_SPACE = "free some space, or write to another disk"
_NO_PERMISSION = "choose another one, or mend its permissions"
_FILE_IN_THE_WAY = "a file stands where a folder should be; choose another place or move it away"
_FIXES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: "write to another disk, or raise the limit of file sizes",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.EISDIR: "a folder stands where a file should be; choose another name",
    errno.ENOENT: "check the name",
    errno.ENOTEMPTY: "another process may be writing there; wait for it to end",
}
# Parameters of commands by the settings that they give, if the names differ.
_GIVEN_BY = {
    "temperatures": "temperature",
    "chains": "chain",
    "trees": "tree",
    "methods": "policy",
    "policies": "policy",
    "prompts": "data",
    "memory_bandwidth": "device_memory_bandwidth",
    "flops": "device_flops",
    "max_steps": "max_batches",
}
_was_interrupted = threading.Event()


class CommandApp(typer.Typer):
    """A group of commands with plain help, whose errors name options."""

    def __init__(self, **settings: Any):
        # Rich's boxes cut the names of options short on a terminal of 80 columns.
        super().__init__(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)

    def command(self, *arguments: Any, **settings: Any) -> Callable:
        """See `typer.Typer.command`."""
        return super().command(*arguments, cls=OptionNamingCommand, **settings)


class OptionNamingCommand(TyperCommand):
    """A command whose errors about settings name the options that gave them. What can be refused by itself is refused
    before the command imports torch, which takes seconds."""

    def invoke(self, context: Any) -> Any:
        """See `click.Command.invoke`. Raises `ConfigurationError` for a value that is of no use anywhere."""
        for parameter in sorted(self.params, key=lambda one: one.param_type_name == "argument"):
            value = context.params.get(parameter.name)
            for one in value if isinstance(value, list | tuple) else [value]:
                problem = None if one is None or isinstance(one, bool) else _problem(parameter.name, one)
                if problem is not None:
                    option = f"{parameter.opts[0]} " if parameter.param_type_name == "option" else ""
                    raise ConfigurationError(f"{option}{problem}")
        from ..fields import ChangedSettings, SettingError

        options = {one.name: one.opts[0] for one in self.params if one.param_type_name == "option"}
        options |= {setting: options[name] for setting, name in _GIVEN_BY.items() if name in options}
        try:
            return super().invoke(context)
        except SettingError as error:
            if error.field not in options:
                raise
            raise ConfigurationError(f"{options[error.field]} {error.problem}") from error
        except ChangedSettings as error:
            raise error.renamed(options) from error


def _problem(name: str, value: Any) -> str | None:
    """What is wrong with a value of a parameter, as far as can be told without torch; None if nothing is."""
    if isinstance(value, int | float):
        if not math.isfinite(value):
            return f"must be finite, got {value!r}"
        kind, least = ("whole number", int(name not in _FROM_0)) if isinstance(value, int) else ("number", 0)
        if value < least or (name in _ABOVE_0 and value == 0):
            return f"must be a {kind} {'above' if name in _ABOVE_0 else 'of at least'} {least}, got {value!r}"
        return None
    if name in _READ:
        return None if os.path.exists(value) else f"{value}: no such file or directory"
    if name == "dtype" and not value.startswith(("auto", "float", "bfloat")):
        return f"must be auto or a torch dtype such as float32, got {value!r}"
    if name in _NAMES and value not in _NAMES[name]:
        return f"must be one of {', '.join(_NAMES[name])}, got {value!r}"
    named = _POLICY.match(str(value)) if name == "policy" else None
    if named and named[1] not in _POLICIES:
        known = f"the policies are {', '.join(_POLICIES)}; a class of your own is written package.module:Class"
        return f"there is no policy {named[1]!r}; {known}"
    if name == "tree" and value != "none":
        from ..evaluation.tree_text import parse_tree

        parse_tree(value)
    if name == "config" and value.startswith("--"):
        return f"takes two configurations, the target's and the drafter's, got {value}"
    # The domain of each prompt takes the place of {domain}.
    is_folder = name in _FOLDERS_OR_HUB_IDS and "{" not in str(value)
    if name in _HUB_IDS or (is_folder and not os.path.exists(value)):
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(str(value))
        except HFValidationError:
            return f"{value}: there is no such folder" if is_folder else f"{value!r} cannot be a name on the Hub"
    return None


class Commands(TyperGroup):
    """A group whose commands end in one line if they are interrupted or the operating system refuses something."""

    def invoke(self, context: Any) -> Any:
        """See `click.Group.invoke`. Raises a `DynSpecError` if a file cannot be read or written."""
        from safetensors import SafetensorError

        try:
            with _noted_interrupts():
                return super().invoke(context)
        except BaseException as error:
            # A library that is interrupted may raise an error of its own, and one in Rust such as is no Exception.
            has_ended = isinstance(error, typer.Exit) and error.exit_code in (0, INTERRUPTED)
            if isinstance(error, KeyboardInterrupt) or (_was_interrupted.is_set() and not has_ended):
                end_interrupted(_kept(context))
            # A broken pipe means that the reader has gone, as in `| head`; click ends quietly then.
            is_of_system = isinstance(error, OSError | SafetensorError) and getattr(error, "errno", 0) != errno.EPIPE
            if not is_of_system:
                raise
            kept = _kept(context) if _KEPT in context.meta else ""
            problem = describe_os_error(error)
            if getattr(error, "filename", None) is None and _PLACE in context.meta:
                problem = f"{context.meta[_PLACE]}: {problem}"
            raise DynSpecError(f"{problem}. {kept[0].upper()}{kept[1:]}" if kept else problem) from error


@contextmanager
def _noted_interrupts() -> Iterator[None]:
    """Note an interrupt from the keyboard and raise it: a destructor, or a library, would lose what is only raised.

    Python would print a traceback of an interrupt that a destructor loses. It is noted, so that is left out."""
    _was_interrupted.clear()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: Any) -> None:
        _was_interrupted.set()
        raise KeyboardInterrupt

    def report(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            report_others(lost)

    report_others, sys.unraisablehook = sys.unraisablehook, report
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = report_others


def raise_lost_interrupt() -> None:
    """Raise a `KeyboardInterrupt` if one was noted and lost."""
    if _was_interrupted.is_set():
        raise KeyboardInterrupt


def end_interrupted(kept: str) -> None:
    """Say what an interrupted command keeps, and exit with the status of an interrupt."""
    typer.echo(f"interrupted: {kept}", err=True)
    # CPython remembers an interrupt that left `exec`, and would end the process by the signal in place of the status.
    # Another `exec` makes it forget.
    exec("")
    raise typer.Exit(INTERRUPTED) from None


def keeps(context: typer.Context, what: str | Callable[[], str]) -> None:
    """Set what a command keeps, and how to go on, if it is stopped from here on."""
    context.meta[_KEPT] = what


def _kept(context: Any) -> str:
    what = context.meta.get(_KEPT, _NOTHING_KEPT)
    return what() if callable(what) else what


def describe_os_error(error: Exception, says_where: bool = True) -> str:
    """One line that says what the operating system refused, by an `OSError` or one of safetensors that wraps it, and
    what to do."""
    wrapped = _WRAPPED_NUMBER.search(str(error))
    number = getattr(error, "errno", None) or (int(wrapped[1]) if wrapped else None)
    reason = getattr(error, "strerror", None) or (os.strerror(number) if number else str(error))
    # The second name of a renaming is the one that matters.
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    text = " ".join(reason.split()) or type(error).__name__
    text = f"{name}: {text}" if says_where and name is not None else text
    return f"{text}; {_FIXES[number]}" if number in _FIXES else text


# What is written to ------------------------------------------------------------------------------------------------


def claim_folder(
    context: typer.Context, folder: Path, option: str = "--out", own: Collection[str] | None = None
) -> None:
    """Make a folder and lock it until the command ends. If nothing was written by then, it is removed.

    Args:
        own: names of files that an earlier run leaves. A folder without any of them must hold only hidden files (None:
            it may hold anything).
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    others = [name for name in names if not name.startswith(".")]
    if own is not None and others and not set(own) & set(others):
        raise ConfigurationError(
            f"{option} {folder} holds files that are not of this command, such as {others[0]}; name a new folder, or "
            "an empty one"
        )
    context.meta[_PLACE] = folder
    context.with_resource(_claimed(folder, ".hf-dynspec.lock", f"{option} {folder}"))


def claim_file(context: typer.Context, path: Path | None, option: str, make_folder: bool = False) -> None:
    """Lock a file that is going to be written, if there is one, until the command ends. `make_folder` makes its
    folder, which is removed if nothing was written by then."""
    if path is None:
        return
    if (path.exists() and not path.is_file()) or not (make_folder or path.parent.is_dir()):
        raise ConfigurationError(f"{path} cannot be written: {option} takes a file in an existing folder")
    context.meta[_PLACE] = path.parent
    context.with_resource(_claimed(path.parent, f".{path.name}.lock", f"{option} {path}"))


def require_space(folder: Path, needed: float, what: str) -> None:
    """Raise a `ConfigurationError` if `needed` bytes for `what` do not fit on the disk of an existing folder."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        problem = f"{what} take about {needed / 2**20:,.1f} MiB, and {folder} has {free / 2**20:,.1f} MiB left"
        raise ConfigurationError(f"{problem}; {_NO_SPACE}")


@contextmanager
def _claimed(folder: Path, lock_name: str, what: str) -> Iterator[None]:
    """Make a folder and hold a lock in it, which ends with this process however that ends. Leaves neither the lock's
    file nor a folder that is empty."""
    from filelock import FileLock, Timeout

    made = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    lock = FileLock(folder / lock_name)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Permissions alone do not tell: disks may be full or read-only.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".hf-dynspec-") as file:
                file.write(b"\0")
                file.flush()
        except OSError as error:
            problem = describe_os_error(error, says_where=False)
            raise ConfigurationError(f"{what} cannot be written: {problem}") from error
        lock.acquire(timeout=0)
        yield
    except Timeout:
        raise ConfigurationError(
            f"{what} is being written by another process; wait for it to end, or choose another place"
        ) from None
    finally:
        if lock.is_locked:
            # Removed while it is held: who opened the file before sees that it is gone, and makes a new one.
            with suppress(OSError):
                (folder / lock_name).unlink()
            lock.release()
        for one in made:
            with suppress(OSError):
                one.rmdir()
