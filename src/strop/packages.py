"""Which optional packages and programs are installed, or assumed to be where a run on other machines is looked at."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_assumed: ContextVar[set[str] | None] = ContextVar("assumed packages", default=None)


@contextmanager
def assume_packages() -> Iterator[None]:
    """Count missing packages as installed, to look at a run on other machines; ``describe_assumed`` says which were asked for."""
    token = _assumed.set(set() if (names := _assumed.get()) is None else names)
    try:
        yield
    finally:
        _assumed.reset(token)


def are_assumed() -> bool:
    """Return whether a run on other machines is looked at, within ``assume_packages``: what they have is not known here."""
    return _assumed.get() is not None


def assume(package: str) -> bool:
    """Return whether a package that is missing here is assumed to be installed, as all are within ``assume_packages``."""
    if (names := _assumed.get()) is not None:
        names.add(package)
    return names is not None


def describe_assumed() -> list[str]:
    """Return the line that says which packages are assumed to be installed; none where nothing was asked for that is missing."""
    listed = ", ".join(sorted(name.replace(".", "-").replace("_", "-") for name in _assumed.get() or ()))
    return [f"not installed here, and assumed to be on the machines of the run: {listed}"] if listed else []


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, or is assumed to be."""
    return is_here(package) or assume(package)


def is_here(package: str) -> bool:
    """Return whether a package can be imported in this process. A folder of that name, such as wandb's run folder, does not count."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None


def has_cpp_compiler() -> bool:
    """Return whether a C++ compiler is installed that torch.compile finds."""
    return any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++"))


def find_program(name: str, folder: str | None = None, path: str | None = None) -> str | None:
    """Return where a program is that is started in ``folder``, and which PATH (that of this process) leads to; None if there is none."""
    return shutil.which(Path(folder or "", name) if "/" in name else name, path=path)


def install_command(extra: str) -> str:
    """Return how one of Strop's extras is installed, for an error or a hint.

    Strop is on no package index: by that name pip would install whatever a stranger may put there.
    """
    return f"pip install -e '.[{extra}]' in Strop's checkout"
