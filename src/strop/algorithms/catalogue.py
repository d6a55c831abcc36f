"""Algorithms and their parts by name: each class of this package, named after itself, and those that extensions declare.

class LitePPO(PolicyGradient)   ->  algorithm.name: lite_ppo
class SequenceClip(Objective)   ->  {name: sequence_clip}
name: ClassVar[str] = "maxrl"   ->  that name instead
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import strop.algorithms
from strop import plugins
from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.parts import Part

Kind = TypeVar("Kind")
ALGORITHM: Any = Algorithm  # abstract, and so no type[Algorithm] to mypy


@cache
def all_algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm of the package, and those that extensions declare, by its name."""
    return dict(sorted({**_by_name(_classes_of(_modules(), ALGORITHM)), **_declared(ALGORITHM)}.items()))


@cache
def find_in_package(name: str) -> type[Algorithm] | None:
    """Return the algorithm with this name; None if there is none. A file of this name is read first, often without the others."""
    if name in plugins.declared("algorithms"):
        return _declared(ALGORITHM, name).get(name)
    own_file = [module for module in _modules() if module.rpartition(".")[2] == name]
    return _by_name(_classes_of(own_file, ALGORITHM)).get(name) or all_algorithms().get(name)


@cache
def all_parts() -> dict[str, type[Part]]:
    """Return every part of the package, and those that extensions declare, by its name."""
    return {**_by_name(kind for kind in _classes_of(_modules(), Part) if kind is not Part), **_declared(Part)}


def _declared(base: type[Kind], *names: str) -> dict[str, type[Kind]]:
    """Return the algorithms or parts among the entry points ``strop.algorithms``: all, or those of some names."""
    kinds = {name: plugins.load("algorithms", name) for name in names or plugins.declared("algorithms")}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, base)}


def name_of(kind: type) -> str:
    """Return the name of an algorithm or part in a configuration: ``name``, or the class name in snake case."""
    return vars(kind).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _by_name(kinds: Iterable[type[Kind]]) -> dict[str, type[Kind]]:
    """Return classes by name, in alphabetical order. Raises TypeError if two have one name."""
    found: dict[str, type[Kind]] = {}
    for kind in kinds:
        if (other := found.setdefault(name_of(kind), kind)) is not kind:
            raise TypeError(f"{kind.__module__} and {other.__module__} both define {name_of(kind)!r}")
    return dict(sorted(found.items()))


def _modules() -> list[str]:
    found = (info.name for info in pkgutil.walk_packages(strop.algorithms.__path__, "strop.algorithms.") if not info.ispkg)
    return sorted(name for name in found if name != __name__)


def _classes_of(modules: Iterable[str], base: type[Kind]) -> Iterable[type[Kind]]:
    """Yield the classes that the modules define, without base classes: those are abstract, or have a field without a default."""
    for module in map(importlib.import_module, modules):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__ and not _is_base(kind):
                yield kind


def _is_base(kind: type) -> bool:
    parameters = inspect.signature(kind).parameters.values()
    return inspect.isabstract(kind) or any(field.default is inspect.Parameter.empty for field in parameters)
