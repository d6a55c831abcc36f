"""Code and names that users write: import ``module:name`` or ``path/to/file.py:name``, suggest the nearest known name, describe errors."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from strop.safety.printable import shorten

MAX_NAMES = 120  # of known names that a message lists
MAX_ERROR_TEXT = 2000  # characters of an exception's text that are stored or shown


class UserCodeError(ValueError):
    """A name that cannot be imported. The message says why."""


def suggest_names(name: str, known: Iterable[str], most: int = MAX_NAMES) -> str:
    """Return "; did you mean 'X'?" if a known name is close, and a list of the known names, or of the nearest of very many."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed, rest = names, ""
    if len(names) > most:
        listed = difflib.get_close_matches(name, names, n=10, cutoff=0.3) or names[:10]
        rest = f" and {len(names) - len(listed)} others"
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" there are: {', '.join(listed) or 'none'}{rest}"


def explain_invalid(kind: Any, value: Any, error: Exception) -> str:
    """Return why a value is not of the type ``kind``: pydantic's first reason, with the key inside of the value and the nearest name."""
    if not hasattr(error, "errors"):  # pydantic's ValidationError has
        return str(error)
    first = error.errors()[0]
    *parents, last = first["loc"] or ("",)
    for parent in parents:
        kind = get_type_hints(kind).get(str(parent), kind) if is_dataclass(kind) else kind
    if first["type"] == "unexpected_keyword_argument" and is_dataclass(kind):
        where = ".".join(map(str, parents)) or "it"
        return f"{where} has no key {last!r}{suggest_names(str(last), (each.name for each in fields(kind)))}"
    if first["type"] in ("list_type", "tuple_type") and isinstance(value, str) and not first["loc"]:
        return f"it must be a list, such as [{', '.join(value.split())}]"
    return f"{'.'.join(map(str, first['loc']))}{': ' if first['loc'] else ''}{first['msg']}"


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
        from strop.safety.exits import is_interrupt  # it loads asyncio, which no hint at a name needs

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
