"""Section ``env``: the environments of a run, by alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_serializer, model_validator

from strop.base_config import BaseConfig


class EnvironmentConfig(BaseConfig):
    """An environment. It validates its own options."""

    type: str | None = Field(
        None,
        min_length=1,
        description="A registered name, or module:Class; null is the alias. All other keys are options of the environment.",
    )
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)  # every key but ``type``

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {"type": values.get("type"), "options": {name: value for name, value in values.items() if name != "type"}}

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        return {"type": self.type, **self.options}
