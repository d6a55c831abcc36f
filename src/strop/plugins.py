"""Extensions by name: engines, learners, environments, commands and so on, as packages declare them.

An extension is a package with entry points in groups ``strop.*`` of its ``pyproject.toml``. Strop's own (``strop.extensions``)
are found in the same way. Only what a configuration or a command line names is imported (``docs/extensions.md``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from strop.user_code import UserCodeError, suggest_names


@cache
def declared(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of ``strop.GROUP`` whose modules are installed, by name.

    Raises UserCodeError if two packages use one name for different things.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"strop.{group}"):
        if not _is_there(point.module):
            continue
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UserCodeError(
                f"two packages declare {point.name!r} in strop.{group}: {_describe(other)} and {_describe(point)}; uninstall one of them"
            )
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent package
        return False


def _describe(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown package'}"


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
