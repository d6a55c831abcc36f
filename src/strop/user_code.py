"""User code: import ``module:name`` or ``path/to/file.py:name``, suggest the nearest known name, describe errors."""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from strop.safety.printable import shorten

MAX_NAMES = 120  # known names listed by a message
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
    """Explain why a value is not of the type ``kind``: pydantic's first reason, with the key inside the value and the nearest
    name.
    """
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
    """Return the type, text and location of an exception from user code, shortened in the middle if long."""
    try:
        text = str(error)
    except Exception as failed:  # its own __str__ raises
        text = f"(its text cannot be read: {type(failed).__name__})"
    place = find_user_place(error)
    said = place is None or f"({place})" in text  # by a wrapping error
    return f"{type(error).__name__}: {shorten(text, MAX_ERROR_TEXT)}" + ("" if said else f" ({place})")


def describe_value(value: Any) -> str:
    """Return the first 80 characters of ``repr(value)``, or its type if ``repr`` fails, as for very long integers."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"an object of type {type(value).__name__}"


@dataclass(frozen=True)
class UserPlace:
    """The last line of user code that an exception passed through."""

    file: str
    line: int
    function: str  # with its class, such as Objective.loss
    traceback: str  # starts at the first line of user code

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}"


def find_user_place(error: BaseException) -> UserPlace | None:
    """Return where in user code an exception, or its cause, was raised or passed through; None if it was not."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = list(traceback.walk_tb(cause.__traceback__))
        own = [index for index, (frame, _) in enumerate(frames) if is_user_file(frame.f_code.co_filename)]
        if own:
            frame, line = frames[own[-1]]
            shown = traceback.StackSummary.extract(iter(frames[own[0] :]), lookup_lines=True)
            text = "".join([*shown.format(), *traceback.format_exception_only(cause)])
            return UserPlace(_shorten_path(frame.f_code.co_filename), line, frame.f_code.co_qualname, text.rstrip())
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def is_user_file(file: str) -> bool:
    """Whether a code file was imported because a configuration or a call names it, or by such a file."""
    return file in _user_files or any(Path(file) in state for state in _states.values())


def remember_code(function: Any) -> None:
    """Register the file of a function passed in Python as user code."""
    with suppress(TypeError, OSError):
        _user_files.add(str(inspect.getsourcefile(inspect.unwrap(getattr(function, "func", function)))))


def _shorten_path(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def import_attribute(path: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``; the current folder is searched too. Raises UserCodeError."""
    module_name, _, attribute = path.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except BaseException as error:  # user code may raise anything, including SystemExit
        from strop.safety.exits import is_interrupt  # imports asyncio, which suggesting a name does not need

        if is_interrupt(error):
            raise
        raise UserCodeError(
            f"{path}: importing {module_name!r} failed: {describe_error(error)}{_find_moved(error, attribute)}"
        ) from error
    if module.__name__.partition(".")[0] not in {"strop", *sys.stdlib_module_names}:
        _user_files.add(str(getattr(module, "__file__", "")))
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if isinstance(value, type | FunctionType)]
        raise UserCodeError(f"{module_name!r} has no {attribute!r}{suggest_names(attribute, public)}")
    return getattr(module, attribute)


def _find_moved(error: BaseException, attribute: str) -> str:
    """Return where a module of Strop is now that an import did not find, or what was imported from it; "" if nothing is found.

    ``attribute``: what is wanted of the module, where no line of user code imports it.
    """
    name = str(getattr(error, "name", None)) if isinstance(error, ModuleNotFoundError) else ""
    root, last = Path(__file__).parent, name.rpartition(".")[2]
    if not name.startswith("strop."):
        return ""
    found = [*root.rglob(f"{last}.py"), *(file.parent for file in root.rglob(f"{last}/__init__.py"))]
    if not found:  # it was joined with another
        lines = (frame.line or "" for frame in traceback.extract_tb(error.__traceback__))
        wanted = next((line.partition(" import ")[2] for line in lines if line.startswith(f"from {name} import ")), attribute)
        names = "|".join(re.findall(r"\w+", wanted))
        defined = re.compile(rf"^(?:class|def) (?:{names})\b", re.MULTILINE)
        found = [file for file in root.rglob("*.py") if defined.search(file.read_text(encoding="utf-8"))]
    modules = sorted(".".join(("strop", *path.relative_to(root).with_suffix("").parts)) for path in found)
    return f"; it is now {' or '.join(modules)}" if 0 < len(modules) <= 3 else ""


def _import_module(name: str) -> ModuleType:
    """Import a module by name. One in or below the current folder is reloaded if it, or a file it imports, was edited."""
    folder = Path.cwd()
    if str(folder) in sys.path or "" in sys.path:
        return _import_current(name, folder)
    sys.path.append(str(folder))  # last, so that it shadows nothing; console scripts do not search it by default
    importlib.invalidate_caches()
    try:
        return _import_current(name, folder)
    finally:
        sys.path.remove(str(folder))


def _import_current(name: str, folder: Path) -> ModuleType:
    file = next((path for path in _module_paths(folder, name) if path.is_file()), None)
    if file is None or name == "__main__":
        return importlib.import_module(name)
    state = _read_state(file, folder)
    if name in sys.modules and _states.setdefault(name, state) != state:
        for path in state:
            _forget_modules(path, keep=())
    module = importlib.import_module(name)
    _states[name] = state
    return module


_found_files: dict[Path, Path] = {}
_user_files: set[str] = set()  # files of modules and functions that users name
_State = dict[Path, bytes]  # contents of code files
_states: dict[str, _State] = {}  # of modules when they were loaded, by name


def _find_file(path: Path) -> Path:
    """Return the full path. If a reward has changed the working directory since, return the path found before."""
    full = path.expanduser().resolve()
    if full.is_file():
        _found_files[path] = full
    return _found_files.get(path, full)


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name derived from its full path, and again if it, or a file next to it that it imports, was edited.

    Its imports are first looked up in its folder, as Python does for a script. These files are modules of that folder only: two
    rewards in two folders may each have a ``utils.py``, and neither replaces a library's module elsewhere.
    """
    full = _find_file(path)
    name = f"strop_plugin_{full.stem}_{hashlib.blake2b(str(full).encode(), digest_size=4).hexdigest()}"
    if not full.is_file():
        if name in sys.modules:
            return sys.modules[name]
        raise FileNotFoundError(f"there is no file {full}")
    state = _read_state(full, full.parent)
    if name in sys.modules and _states.get(name) == state:
        return sys.modules[name]
    for edited in state:
        _forget_modules(edited, keep=(name,))
    linecache.checkcache()
    neighbours = _Neighbours.of(full.parent)
    spec = importlib.util.spec_from_loader(name, _NeighbourLoader(name, str(full), neighbours))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _states[name] = state  # first: errors raised during the import refer to it
    sys.modules[name] = sys.modules[f"{neighbours.package}.{full.stem}"] = module  # first: dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], sys.modules[f"{neighbours.package}.{full.stem}"]
        raise
    return module


def list_own_files(file: Path, folder: Path) -> list[Path]:
    """Return a code file and all files in ``folder`` that it imports, directly or indirectly."""
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        for name in _imported_names(path):
            bases = {folder, path.parent}  # of a package in the folder, relative names
            waiting += [each for base in bases for each in _module_paths(base, name) if each.is_file()]
    return list(found)


def _module_paths(folder: Path, name: str) -> tuple[Path, ...]:
    """Return where a module, or the packages that contain it, may be in a folder."""
    parts = name.split(".")
    packages = (folder.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts) + 1))
    return (folder.joinpath(*parts).with_suffix(".py"), *reversed(list(packages)))


def _imported_names(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):  # reported when it is imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            yield from ([node.module] if node.module else [])
            yield from (f"{prefix}{alias.name}" for alias in node.names if alias.name != "*")


def _read_state(file: Path, folder: Path) -> _State:
    return {path: hashlib.blake2b(path.read_bytes()).digest() for path in list_own_files(file, folder)}


def _forget_modules(file: Path, keep: Collection[str]) -> None:
    """Force a reload of a file's module at the next import."""
    for name, module in list(sys.modules.items()):
        if name not in keep and name != "__main__" and getattr(module, "__file__", None) == str(file):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


@dataclass(frozen=True)
class _Neighbours:
    """``__import__`` for the files of a folder: neighbouring files come first, as modules of a package that stands for the
    folder.
    """

    folder: Path
    package: str

    @classmethod
    def of(cls, folder: Path) -> _Neighbours:
        package = f"strop_beside_{hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()}"
        if package not in sys.modules:
            module = ModuleType(package, f"The files in {folder}.")
            module.__path__ = [str(folder)]
            sys.modules[package] = module
        if not any(isinstance(finder, _NeighbourFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _NeighbourFinder())
        return cls(folder, package)

    def import_name(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> Any:
        top = name.partition(".")[0]
        if level or not any(path.is_file() for path in _module_paths(self.folder, top)):
            return builtins.__import__(name, globals, locals, fromlist, level)
        leaf = importlib.import_module(f"{self.package}.{name}")
        if not fromlist:
            return sys.modules[f"{self.package}.{top}"]
        for item in fromlist:
            if hasattr(leaf, "__path__") and not hasattr(leaf, item) and item != "*":
                with suppress(ModuleNotFoundError):
                    importlib.import_module(f"{leaf.__name__}.{item}")
        return leaf


class _NeighbourLoader(SourceFileLoader):
    """Loads a file whose imports are first looked up in its folder."""

    def __init__(self, name: str, path: str, neighbours: _Neighbours) -> None:
        super().__init__(name, path)
        self.neighbours = neighbours

    def get_code(self, fullname: str) -> Any:
        """Compile from source: cached bytecode is keyed by mtime in whole seconds and size, which an edit may leave unchanged."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self.neighbours.import_name}
        super().exec_module(module)


class _NeighbourFinder(MetaPathFinder):
    """Finds the modules of packages that stand for folders."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if not package.startswith("strop_beside_") or package == fullname:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
            folder = Path(sys.modules[package].__path__[0])
            spec.loader = _NeighbourLoader(fullname, spec.origin, _Neighbours(folder, package))
        return spec


def find_near_paths(path: Path) -> list[Path]:
    """Return paths with similar spelling next to the first missing part of a path."""
    missing = path
    while missing != missing.parent and not missing.parent.is_dir():
        missing = missing.parent
    if not missing.parent.is_dir():
        return []
    names = [each.name for each in missing.parent.iterdir()]
    return [missing.parent / name for name in difflib.get_close_matches(missing.name, names, n=2, cutoff=0.6)]
