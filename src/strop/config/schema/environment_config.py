"""Section ``env``: alias -> environment."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from strop.config.schema.base import BaseConfig


class EnvironmentConfig(BaseConfig):
    """An environment. It validates its own options."""

    model_config = ConfigDict(extra="allow")

    type: str | None = Field(
        None,
        min_length=1,
        description="A registered name, or module:Class; null is the alias. All other keys are options of the environment.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Every key but ``type``."""
        return dict(self.model_extra or {})
