"""Which optional packages and programs are installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder of that name, such as wandb's run folder, does not count."""
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
