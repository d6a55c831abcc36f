"""Algorithms and their parts by name. There is no registry: each algorithm is a file of this package and is named after it.

gspo.py  ->  algorithm.name: gspo      the one Algorithm that the file defines
         ->  {name: sequence_clip}     every part that the file defines
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cache
from types import ModuleType

import strop.algorithms
from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.parts import Part


@cache
def all_algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm of the package by the name of its file."""
    return {name: algorithm for name in _files() if (algorithm := algorithm_of_file(name)) is not None}


@cache
def algorithm_of_file(name: str) -> type[Algorithm] | None:
    """Return the algorithm in the file with this name, without importing others; None if there is no such file, or no algorithm
    in it.
    """
    classes = [
        cls
        for file in _files().get(name, ())
        for cls in _classes_defined_in(importlib.import_module(file), Algorithm)
        if not inspect.isabstract(cls) and not _is_incomplete(cls)
    ]
    if len(classes) > 1:
        raise TypeError(f"strop.algorithms.{name} defines {[cls.__name__ for cls in classes]}: define one algorithm per file")
    return classes[0] if classes else None


@cache
def all_parts() -> dict[str, type[Part]]:
    """Return every part of the package by its name."""
    parts: dict[str, type[Part]] = {}
    for module in (importlib.import_module(name) for names in _files().values() for name in names):
        for cls in _classes_defined_in(module, Part):
            if not inspect.isabstract(cls) and cls is not Part:
                if (name := part_name(cls)) in parts:
                    raise TypeError(f"{cls.__module__} and {parts[name].__module__} both define a part {name!r}")
                parts[name] = cls
    return parts


def part_name(kind: type[Part]) -> str:
    """Return the name of a part in a configuration: ``name``, or the class name in snake case."""
    return vars(kind).get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def _is_incomplete(kind: type[Algorithm]) -> bool:
    """Whether the class is only a base class: a real algorithm has a default for every field."""
    return any(field.default is inspect.Parameter.empty for field in inspect.signature(kind).parameters.values())


@cache
def _files() -> dict[str, list[str]]:
    """Return the modules of the package by the names of their files, in alphabetical order."""
    files: dict[str, list[str]] = {}
    names = (info.name for info in pkgutil.walk_packages(strop.algorithms.__path__, "strop.algorithms.") if not info.ispkg)
    for name in sorted(names, key=lambda name: name.rpartition(".")[2]):
        if name != __name__:
            files.setdefault(name.rpartition(".")[2], []).append(name)
    return files


def _classes_defined_in(module: ModuleType, base: type) -> list[type]:
    members = (member for member in vars(module).values() if isinstance(member, type))
    return [cls for cls in members if issubclass(cls, base) and cls.__module__ == module.__name__]
