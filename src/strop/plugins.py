"""Extensions by name: engines, learners, environments, commands and so on, as packages declare them.

An extension is a package with entry points in groups ``strop.*`` of its ``pyproject.toml``. Strop's own (``strop.extensions``)
are found in the same way. Only what a configuration or a command line names is imported (``docs/extensions.md``).
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from strop.user_code import UserCodeError, suggest_names


@cache
def declared(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of ``strop.GROUP`` whose modules are installed, by name.

    Raises UserCodeError if two packages use one name for different things.
    """
    found: dict[str, EntryPoint] = {}
    for point in _find_points():
        if point.group != f"strop.{group}" or not _is_there(point.module):
            continue
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UserCodeError(
                f"two packages declare {point.name!r} in strop.{group}: {_describe(other)} and {_describe(point)}; uninstall one of them"
            )
    return found


@cache
def _find_points() -> list[EntryPoint]:
    """Return the entry points of all installed packages, and Strop's own.

    In a checkout its own are read from ``pyproject.toml``: what ``pip install -e`` wrote down is older than the source after a pull.
    """
    found = entry_points()
    points = [point for group in found.groups if group.startswith("strop.") for point in found.select(group=group)]
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return points
    declared_here = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    if declared_here.get("name") != "strop":
        return points
    own = [
        EntryPoint(name, value, group)
        for group, values in declared_here["entry-points"].items()
        for name, value in values.items()
    ]
    return [*own, *(point for point in points if package_of(point) != "strop")]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent package
        return False


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return point.dist.name if point.dist else "strop"


def _describe(point: EntryPoint) -> str:
    return f"{point.value} of {package_of(point)}"


def find_path(group: str, name: str) -> str | None:
    """Return ``module:attribute`` of a name; None if no extension declares it."""
    point = declared(group).get(name)
    return None if point is None else point.value


def load(group: str, name: str) -> Any:
    """Import an extension's object. Raises UserCodeError if no package declares the name, or if it cannot be imported."""
    point = declared(group).get(name)
    if point is None:
        raise UserCodeError(f"no extension declares {name!r} in strop.{group}{suggest_names(name, declared(group))}")
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise UserCodeError(f"the extension {name!r} ({_describe(point)}) cannot be imported: {error}") from error


def load_all(group: str) -> list[Any]:
    """Import all that is declared in ``strop.GROUP``, where each is small and says itself whether a run has it. Raises UserCodeError."""
    return [load(group, name) for name in declared(group)]
