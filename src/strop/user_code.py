"""Code and names that users write: import ``module:name`` or ``path/to/file.py:name``, suggest the nearest known name, describe errors,
and keep the run apart from what the code raises and forks."""

from __future__ import annotations

import asyncio
import difflib
import functools
import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from strop.printable import shorten

T = TypeVar("T")


TRUST_VARIABLE = "STROP_TRUST_REMOTE_CODE"  # environment variable

MAX_ERROR_TEXT = 2000  # characters of an exception's text that are stored or shown


class UserCodeError(ValueError):
    """A name that cannot be imported. The message says why."""


class RunExited(RuntimeError):
    """SystemExit was raised where no rollout could record it, such as a task of asyncio or a library's callback."""


class NotAnException(Exception):
    """Stands for what user code raised that is no Exception, such as SystemExit. The name of its type is the original's."""


@contextmanager
def contain_exits() -> Iterator[None]:
    """Raise a ``NotAnException`` for SystemExit, KeyboardInterrupt, CancelledError or GeneratorExit that the code inside raises itself.

    They would end the run, or the task that awaits the code, without a word. A Ctrl-C of the terminal and a cancellation from outside
    pass, and so does the closing of a coroutine that nobody awaits any more.
    """
    task = _current_task()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
        closed = isinstance(error, GeneratorExit) and task is not None and _current_task() is not task
        if cancelled or closed or is_interrupt(error):
            raise
        raise type(type(error).__name__, (NotAnException,), {})(str(error)) from error


def is_interrupt(error: BaseException) -> bool:
    """Whether this is a KeyboardInterrupt by a signal, which comes in the main thread and whose last frame is the signal's handler."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)  # of asyncio's handler; Python's own is no function of Python
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return code is None or trace is None or trace.tb_frame.f_code is code


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, which never ends with the exit code of user code. Raises RunExited if code that nobody awaits calls sys.exit()."""
    try:
        return asyncio.run(work)
    except SystemExit as error:
        raise RunExited(
            f"a reward, an environment or a library ended the run with SystemExit({error.code!r}); raise an exception there instead, which "
            "costs one rollout"
        ) from error


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # there is no event loop
        return None


def trusts_remote_code() -> bool:
    """Whether the Python code that models bring may run."""
    return os.environ.get(TRUST_VARIABLE) == "1"


@contextmanager
def trust_remote_code(trusted: bool) -> Iterator[None]:
    """Let models' own code run inside the context if ``trusted``, also in the processes that are started there."""
    before = os.environ.get(TRUST_VARIABLE)
    if trusted:
        os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if trusted and before is None:
            del os.environ[TRUST_VARIABLE]


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'X'?" if a known name is close, and a list of the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" there are: {', '.join(names) or 'none'}"


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception that user code raised, shortened in the middle if it is long."""
    try:
        text = str(error)
    except Exception as failed:  # its own __str__ raises
        text = f"(its text cannot be read: {type(failed).__name__})"
    return f"{type(error).__name__}: {shorten(text, MAX_ERROR_TEXT)}"


def describe_value(value: Any) -> str:
    """Return the first 80 characters of ``repr(value)``, or its type where it has none: integers may be too long for one."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"an object of type {type(value).__name__}"


def import_attribute(path: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``; the current folder is searched too. Raises UserCodeError."""
    module_name, _, attribute = path.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except BaseException as error:  # user code may raise anything, and end with sys.exit()
        if is_interrupt(error):
            raise
        raise UserCodeError(
            f"{path}: importing {module_name!r} failed: {type(error).__name__}: {shorten(str(error), MAX_ERROR_TEXT)}"
        ) from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if isinstance(value, type | FunctionType)]
        raise UserCodeError(f"{module_name!r} has no {attribute!r}{suggest_names(attribute, public)}")
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder in sys.path or "" in sys.path:
        return importlib.import_module(name)
    sys.path.append(folder)  # last, so that it shadows nothing; a console script does not search it by default
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


_found_files: dict[Path, Path] = {}


def _find_file(path: Path) -> Path:
    """Return the full path. A reward may change the working directory: then it is where it was found before."""
    full = path.resolve()
    if full.is_file():
        _found_files[path] = full
    return _found_files.get(path, full)


def _import_file(path: Path) -> ModuleType:
    """Import a file once, under a name derived from its full path."""
    full = _find_file(path)
    name = f"strop_plugin_{full.stem}_{hashlib.blake2b(str(full).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not full.is_file():
        raise FileNotFoundError(f"there is no file {full}")
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_near_paths(path: Path) -> list[Path]:
    """Return what lies beside the first part of a path that does not exist and is spelled nearly so."""
    missing = path
    while missing != missing.parent and not missing.parent.is_dir():
        missing = missing.parent
    if not missing.parent.is_dir():
        return []
    names = [each.name for each in missing.parent.iterdir()]
    return [missing.parent / name for name in difflib.get_close_matches(missing.name, names, n=2, cutoff=0.6)]
