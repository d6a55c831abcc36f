"""Section ``env``: alias -> environment. What an environment takes beyond its type, it validates itself."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from strop.config.model import Model


class EnvironmentConfig(Model):
    """An environment and its options."""

    model_config = ConfigDict(extra="allow")

    type: str | None = Field(
        None,
        min_length=1,
        description="A registered name, or module:Class; null is the alias. Any further key is an option of the environment.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Every key but ``type``."""
        return dict(self.model_extra or {})
