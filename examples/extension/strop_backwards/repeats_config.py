"""Section ``repeats`` of a run that samples."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig


class RepeatsConfig(BaseConfig):
    """How often the policy gives one answer to everything."""

    enabled: bool = Field(False, description="Log train/repeated_answers.")
