"""Build environments from a configuration: built-in ones by name, others as ``module:Class``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from strop.data.sources.records import suggest_names
from strop.environments.base import Environment, EnvironmentConfigError

ENVIRONMENTS = {
    "arithmetic": "strop.environments.arithmetic:Arithmetic",
    "math": "strop.environments.math:MathEnvironment",
    "reasoning_gym": "strop.environments.reasoning_gym:ReasoningGym",
    "reward_model": "strop.environments.reward_model_environment:RewardModelEnvironment",
}


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment[Any]:
    """Build the environment ``name``. Raises EnvironmentConfigError for an unknown name and for unknown, ill-typed or missing options."""
    from pydantic import TypeAdapter, ValidationError

    kind = environment_class(name)
    known = {item.name: item for item in fields(kind) if item.init}
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in (options or {}).items():
        if option not in known:
            raise EnvironmentConfigError(f"the environment {name} has no option {option!r}{suggest_names(option, known)}")
        try:  # in JSON mode a list may stand for a tuple, while "3" is not a number
            values[option] = TypeAdapter(types[option]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise EnvironmentConfigError(f"the option {option} of the environment {name} is {value!r}: {why}") from error
    for option, item in known.items():
        if option not in values and item.default is MISSING and item.default_factory is MISSING:
            raise EnvironmentConfigError(f"the environment {name} needs the option {option}; set it")
    return kind(**values)


def environment_class(name: str) -> type[Environment[Any]]:
    """Return the class of a registered name, ``module:Class`` or ``path/to/file.py:Class``. Raises EnvironmentConfigError."""
    path = ENVIRONMENTS.get(name, name)
    if ":" not in path:
        raise EnvironmentConfigError(
            f"there is no environment {name!r}{suggest_names(name, ENVIRONMENTS)}. Name your own as module:Class or file.py:Class"
        )
    kind = import_attribute(path)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise EnvironmentConfigError(f"{name} is {kind!r:.80}, not a subclass of strop.environments.base.Environment")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise EnvironmentConfigError(f"{name} does not define {', '.join(missing)}, which an environment must")
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        raise EnvironmentConfigError(f"{name} has options but is not decorated with @dataclass(frozen=True, kw_only=True)")
    return kind


def import_attribute(path: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``; the current folder is searched too. Raises EnvironmentConfigError."""
    module_name, _, attribute = path.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except Exception as error:  # user code may raise anything
        raise EnvironmentConfigError(f"{path}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name, value in vars(module).items() if isinstance(value, type)]
        raise EnvironmentConfigError(f"{module_name!r} has no {attribute!r}{suggest_names(attribute, public)}")
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


def _import_file(path: Path) -> ModuleType:
    """Import a file once, under a name derived from its full path."""
    full = path.resolve()
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
