"""Section ``megatron_cfg``: the Megatron Core learner, which is not in this version."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from strop.base_config import BaseConfig


class MegatronConfig(BaseConfig):
    """The Megatron Core learner, which is not in this version."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(
        False,
        description="Train with Megatron Core, which is not in this version: true is an error, or with policy.backend=torch "
        "read as what the torch learner is to do.",
    )
