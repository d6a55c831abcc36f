"""Section ``env``: the environments of a run, by alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_serializer, model_validator
from pydantic_core import ArgsKwargs

from strop.base_config import BaseConfig, expand_home


class EnvironmentConfig(BaseConfig):
    """An environment. It validates its own options."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    type: str | None = Field(
        None,
        min_length=1,
        description="A registered name, or module:Class; null is the alias, or reward_function if reward or rewards is set, or agent if "
        "agent or command is set. All other keys are options of the environment.",
    )
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)  # every key but ``type``

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, values: Any) -> Any:
        if isinstance(values, ArgsKwargs):
            values = dict(values.kwargs or {})
            if set(values) <= {"type", "options"}:
                return values
        if not isinstance(values, Mapping):
            return values
        options = {name: _expand_homes(value) for name, value in values.items() if name != "type"}
        return {"type": _expand_homes(values.get("type")), "options": options}

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        """Write functions, which can be set from Python, as names, so that a configuration can be saved and compared."""
        return {"type": self.type, **_name_functions(self.options)}

    def type_of(self, alias: str) -> str:
        if self.type:
            return self.type
        if {"agent", "command"} & set(self.options):
            return "agent"
        return "reward_function" if {"reward", "rewards"} & set(self.options) else alias


def _expand_homes(value: Any) -> Any:
    """Expand ``~/`` at the beginning of texts, because options have no types that identify paths."""
    if isinstance(value, dict):
        return {key: _expand_homes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expand_homes(inner) for inner in value]
    return expand_home(value) if isinstance(value, str) and value.startswith("~/") else value


def _name_functions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _name_functions(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_name_functions(inner) for inner in value]
    return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}" if callable(value) else value
