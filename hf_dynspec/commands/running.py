"""How commands end and what they write to: interrupts, what the operating system refuses, folders and files in use."""

import errno
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

INTERRUPTED = 130
# Under this name a context holds what an interrupt leaves, or gives it when it is called.
_KEPT = "hf_dynspec.kept"
# Under this one, what the command writes to, for errors that do not name it.
_PLACE = "hf_dynspec.place"
_NOTHING_KEPT = "nothing is left half-written, and nothing is kept; run the same command to begin anew"
# The system's number of an error in a message of safetensors, which wraps it.
_WRAPPED_NUMBER = re.compile(r"(?:code: |os error )(\d+)")
_FIXES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EFBIG: "write to another disk, or raise the limit of file sizes",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose another one, or mend its permissions",
    errno.EPERM: "choose another one, or mend its permissions",
    errno.ENOTDIR: "a file stands where a folder should be; choose another place or move it away",
    errno.EEXIST: "a file stands where a folder should be; choose another place or move it away",
    errno.EISDIR: "a folder stands where a file should be; choose another name",
    errno.ENOENT: "see whether the name is right",
    errno.ENOTEMPTY: "another process may be writing there; wait for it to end",
}


# The parameters of commands that give settings of other names.
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


class CommandApp(typer.Typer):
    """A group of commands: its help is plain, and its commands name their options in errors."""

    def __init__(self, **settings: Any):
        # Rich's boxes cut the names of options short where the terminal has 80 columns.
        super().__init__(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)

    def command(self, *arguments: Any, **settings: Any) -> Callable:
        """See `typer.Typer.command`."""
        return super().command(*arguments, cls=OptionNamingCommand, **settings)


class OptionNamingCommand(TyperCommand):
    """A command that names the option where a setting that it gives is out of range."""

    def invoke(self, context: Any) -> Any:
        """See `click.Command.invoke`.

        Raises:
            ConfigurationError: a setting is out of range.
        """
        from ..errors import ConfigurationError
        from ..fields import ChangedSettings, SettingError

        try:
            return super().invoke(context)
        except SettingError as error:
            option = self._options().get(error.field)
            if option is None:
                raise
            raise ConfigurationError(f"{option} {error.problem}") from error
        except ChangedSettings as error:
            raise error.renamed(self._options()) from error

    def _options(self) -> dict[str, str]:
        """How the options are written that give settings, by the settings' names."""
        options = {one.name: one.opts[0] for one in self.params if one.param_type_name == "option"}
        return options | {setting: options[name] for setting, name in _GIVEN_BY.items() if name in options}


class Commands(TyperGroup):
    """A group whose commands end in one line when they are interrupted or the operating system refuses something."""

    def invoke(self, context: Any) -> Any:
        """See `click.Group.invoke`.

        Raises:
            DynSpecError: a file or folder could not be read or written.
            Exit: the command was interrupted.
        """
        from safetensors import SafetensorError

        from ..errors import DynSpecError

        try:
            with _noted_interrupts():
                return super().invoke(context)
        except BaseException as error:
            # A library in whose code an interrupt arrives may raise an error of its own, and one compiled from Rust
            # such as is no Exception. A command may make a failure of that.
            has_ended = isinstance(error, typer.Exit) and error.exit_code in (0, INTERRUPTED)
            if isinstance(error, KeyboardInterrupt) or (_was_interrupted.is_set() and not has_ended):
                end_interrupted(_kept(context))
            if not isinstance(error, (OSError, SafetensorError)):
                raise
            # Whoever read the output has gone, as in `| head`; click ends quietly then.
            if getattr(error, "errno", None) == errno.EPIPE:
                raise
            kept = _kept(context) if _KEPT in context.meta else ""
            kept = f". {kept[0].upper()}{kept[1:]}" if kept else ""
            problem = describe_os_error(error)
            if getattr(error, "filename", None) is None and _PLACE in context.meta:
                problem = f"{context.meta[_PLACE]}: {problem}"
            raise DynSpecError(problem + kept) from error


def end_interrupted(kept: str) -> None:
    """Say what is kept of a command that was interrupted.

    Raises:
        Exit: with the status of an interrupt.
    """
    typer.echo(f"interrupted: {kept}", err=True)
    # CPython notes an interrupt that leaves a text given to `exec`, as libraries do, and would end the process by the
    # signal later, whatever status was asked for. Another text makes it forget.
    exec("")
    raise typer.Exit(INTERRUPTED) from None


_was_interrupted = threading.Event()


@contextmanager
def _noted_interrupts() -> Iterator[None]:
    """Note an interrupt from the keyboard besides raising it: raised in a destructor it would be lost."""
    _was_interrupted.clear()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: Any) -> None:
        _was_interrupted.set()
        raise KeyboardInterrupt

    def show_unraisable(unraisable: Any) -> None:
        # It is heard of all the same, and a traceback through somebody's destructor says nothing.
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            show_others(unraisable)

    show_others, sys.unraisablehook = sys.unraisablehook, show_unraisable
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = show_others


def raise_lost_interrupt() -> None:
    """Raise an interrupt that was noted, and of which the command has not heard.

    Raises:
        KeyboardInterrupt: there was one.
    """
    if _was_interrupted.is_set():
        raise KeyboardInterrupt


def keeps(context: typer.Context, what: str | Callable[[], str]) -> None:
    """Note what is kept of a command, and how to go on, should it be stopped from here on."""
    context.meta[_KEPT] = what


def _kept(context: Any) -> str:
    what = context.meta.get(_KEPT, _NOTHING_KEPT)
    return what() if callable(what) else what


def describe_os_error(error: Exception, says_where: bool = True) -> str:
    """What the operating system refused and what to do, in one line.

    Args:
        error: an `OSError`, or one of safetensors that wraps it.
        says_where: name the file, where the error does.
    """
    wrapped = _WRAPPED_NUMBER.search(str(error))
    number = getattr(error, "errno", None) or (int(wrapped[1]) if wrapped else None)
    reason = getattr(error, "strerror", None) or (os.strerror(number) if number else str(error))
    # Where something was renamed, the second name is the one that matters.
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    parts = [str(name)] if says_where and name is not None else []
    text = ": ".join([*parts, " ".join(reason.split()) or type(error).__name__])
    return f"{text}; {_FIXES[number]}" if number in _FIXES else text


# What is written to ------------------------------------------------------------------------------------------------


def claim_folder(
    context: typer.Context, folder: Path, option: str = "--out", own: Collection[str] | None = None
) -> None:
    """Make a folder and keep it from other commands until this one ends; refuse before any work what would fail later.

    If nothing was written by then, the folder is gone again.

    Args:
        context: of the command.
        folder: the folder.
        option: which names it.
        own: names of files by which a folder tells that an earlier run wrote it; another one must hold nothing but
            hidden files (None: it may hold anything).

    Raises:
        ConfigurationError: it holds somebody else's files, it cannot be made or written, or another process is writing
            to it.
    """
    if own is not None:
        _require_no_others(folder, option, own)
    _make_writable(context, folder, f"{option} {folder}")
    context.with_resource(_held(folder / ".hf-dynspec.lock", f"{option} {folder}"))


def claim_file(context: typer.Context, path: Path | None, option: str, make_folder: bool = False) -> None:
    """Keep a file that is going to be written from other commands until this one ends; refuse before any work what
    would fail later.

    Args:
        context: of the command.
        path: the file; None for none.
        option: which names it.
        make_folder: make the folder that it is to lie in, which is gone again if nothing was written.

    Raises:
        ConfigurationError: it is a folder or a device, it lies in no folder or in one that cannot be written, or
            another process is writing it.
    """
    from ..errors import ConfigurationError

    if path is None:
        return
    if (path.exists() and not path.is_file()) or not (make_folder or path.parent.is_dir()):
        raise ConfigurationError(f"{path} cannot be written: {option} takes a file in an existing folder")
    _make_writable(context, path.parent, f"{option} {path}")
    context.with_resource(_held(path.with_name(f".{path.name}.lock"), f"{option} {path}"))


def require_space(folder: Path, needed: float, what: str) -> None:
    """Refuse what would fill the disk.

    Args:
        folder: where it is going to be written; exists.
        needed: bytes.
        what: they are for.

    Raises:
        ConfigurationError: there is less space.
    """
    from ..errors import ConfigurationError

    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigurationError(
            f"{what} take about {needed / 2**20:,.1f} MiB, and {folder} has {free / 2**20:,.1f} MiB left; "
            f"{_FIXES[errno.ENOSPC]}"
        )


def _make_writable(context: typer.Context, folder: Path, what: str) -> None:
    """Make a folder, which is removed when the command ends if it is empty then, and write to it. Permissions alone do
    not tell whether that can be done: disks may be full or mounted to be read."""
    from ..errors import ConfigurationError

    context.meta[_PLACE] = folder
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    context.call_on_close(lambda: _remove_empty(missing))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hf-dynspec-") as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be written: {describe_os_error(error, says_where=False)}") from error


def _require_no_others(folder: Path, option: str, own: Collection[str]) -> None:
    from ..errors import ConfigurationError

    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    others = [name for name in names if not name.startswith(".")]
    if others and not set(own) & set(others):
        raise ConfigurationError(
            f"{option} {folder} holds files that are not of this command, such as {others[0]}; name a new folder, or "
            "an empty one"
        )


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that are empty, the innermost of which comes first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _held(lock_file: Path, what: str) -> Iterator[None]:
    """Hold a lock that ends with this process however it ends, and leaves no file behind."""
    from filelock import FileLock, Timeout

    from ..errors import ConfigurationError

    lock = FileLock(lock_file)
    # An interrupt may come as soon as the file is there.
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigurationError(
                f"{what} is being written by another process; wait for it to end, or choose another place"
            ) from None
        yield
    finally:
        if lock.is_locked:
            # While it is held: whoever opened the file before sees that it is gone, and makes a new one.
            with suppress(OSError):
                lock_file.unlink()
            lock.release()
