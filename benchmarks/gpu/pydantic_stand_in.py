"""What Strop's sections need of pydantic, for a machine without it: they become plain frozen dataclasses whose values nobody checks.

Enough for the learner and the embedded engine with sections that are made in code. Reading a configuration needs the real one.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def install_if_missing() -> bool:
    """Put the stand-in where ``import pydantic`` finds it, unless pydantic can be imported. Return whether it was put there."""
    try:
        importlib.import_module("pydantic")
    except ImportError:
        for name, content in _modules().items():
            sys.modules[name] = _make_module(name, content)
        return True
    return False


class StandInField:
    """Stands for pydantic's ``FieldInfo`` in type hints."""

    annotation: Any = None
    json_schema_extra: Any = None


class StandInAdapter:
    """Stands for pydantic's ``TypeAdapter``. Raises RuntimeError when something is to be validated."""

    def __init__(self, kind: Any, *_: Any, **__: Any) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"pydantic is not installed, so nothing can be validated as {self.kind} ({name}); pip install pydantic"
        )


def make_field(default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING, **_: Any) -> Any:
    """Return a dataclass field: ``Field(...)`` is required, and its limits and description are dropped."""
    if default is ... or (default is dataclasses.MISSING and default_factory is dataclasses.MISSING):
        return dataclasses.field(kw_only=True)
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, kw_only=True)
    if isinstance(default, (list, dict, set)):
        return dataclasses.field(default_factory=lambda: type(default)(default), kw_only=True)
    return dataclasses.field(default=default, kw_only=True)


def make_dataclass(kind: type | None = None, *, frozen: bool = False, kw_only: bool = False, **_: Any) -> Any:
    """Make a dataclass of a class in place, as ``pydantic.dataclasses.dataclass`` does."""

    def make(cls: type) -> type:
        refuses = cls.__setattr__ is not object.__setattr__  # sections say themselves that they are frozen
        return dataclasses.dataclass(frozen=frozen or refuses, kw_only=kw_only)(cls)

    return make if kind is None else make(kind)


def ignore_decorator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Stands for a decorator of validators and serializers, which nobody calls here."""
    return lambda function: function.__func__ if isinstance(function, classmethod) else function


def ignore_annotation(*_: Any, **__: Any) -> None:
    """Stands for what pydantic reads in ``Annotated``."""


def _modules() -> dict[str, dict[str, Any]]:
    main: dict[str, Any] = {
        "Field": make_field,
        "ConfigDict": dict,
        "TypeAdapter": StandInAdapter,
        "ValidationError": type("ValidationError", (ValueError,), {}),
        "BaseModel": type("BaseModel", (), {}),
        **dict.fromkeys(("BeforeValidator", "AfterValidator", "PlainSerializer"), ignore_annotation),
        **dict.fromkeys(("model_validator", "field_validator", "model_serializer", "field_serializer"), _bare_or_called),
        **dict.fromkeys(("ValidationInfo", "GetCoreSchemaHandler"), Any),
    }
    return {
        "pydantic": {**main, "__path__": []},
        "pydantic.dataclasses": {"dataclass": make_dataclass},
        "pydantic.fields": {"FieldInfo": StandInField},
        "pydantic_core": {"ArgsKwargs": type("ArgsKwargs", (), {}), "CoreSchema": Any},
    }


def _bare_or_called(*arguments: Any, **options: Any) -> Any:
    """``@model_serializer`` and ``@model_serializer(mode="plain")``."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return arguments[0]
    return ignore_decorator()


def _make_module(name: str, content: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "a stand-in: pydantic is not installed")
    module.__spec__ = ModuleSpec(name, None)  # who looks for the package with find_spec must not fail
    module.__dict__.update(content)
    return module
