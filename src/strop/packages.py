"""Which optional packages and programs are installed, or assumed to be when checking a run for other machines."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_assumed: ContextVar[set[str] | None] = ContextVar("assumed packages", default=None)


@contextmanager
def assume_packages() -> Iterator[None]:
    """Count missing packages as installed while checking a run for other machines; ``describe_assumed`` lists those requested."""
    token = _assumed.set(set() if (names := _assumed.get()) is None else names)
    try:
        yield
    finally:
        _assumed.reset(token)


def are_assumed() -> bool:
    """Return whether a run for other machines is being checked (within ``assume_packages``), whose packages are not known here."""
    return _assumed.get() is not None


def assume(package: str) -> bool:
    """Return whether a missing package is assumed to be installed, as all are within ``assume_packages``."""
    if (names := _assumed.get()) is not None:
        names.add(package)
    return names is not None


def describe_assumed() -> list[str]:
    """Return a line listing the packages assumed to be installed; empty if no missing package was requested."""
    listed = ", ".join(sorted(name.replace(".", "-").replace("_", "-") for name in _assumed.get() or ()))
    return [f"not installed here, and assumed to be on the machines of the run: {listed}"] if listed else []


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, or is assumed to be."""
    return is_here(package) or assume(package)


def is_here(package: str) -> bool:
    """Return whether a package can be imported in this process. A folder of the same name, such as wandb's run folder, does not
    count.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of its parent package
        return False
    return spec is not None and spec.origin is not None


def is_in(python: str, package: str) -> bool:
    """Return whether an interpreter can import a package. Raises OSError if it cannot be started."""
    if python == sys.executable:
        return is_here(package)
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode == 0


def has_cpp_compiler() -> bool:
    """Return whether a C++ compiler is installed that torch.compile finds."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def find_program(name: str, folder: str | None = None, path: str | None = None) -> str | None:
    """Resolve a program name as a shell started in ``folder`` would, by ``path`` or this process's PATH. Returns None if it is
    not found.
    """
    return shutil.which(Path(folder or "", name) if "/" in name else name, path=path)


def install_command(extra: str) -> str:
    """Return the command that installs one of Strop's extras, for an error or a hint.

    Strop is on no package index, so installing it by name would install someone else's package.
    """
    return f"pip install -e '.[{extra}]' in Strop's checkout"
