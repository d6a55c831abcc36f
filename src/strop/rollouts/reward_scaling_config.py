"""Section ``reward_scaling``: a linear map of rewards."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from strop.base_config import BaseConfig
from strop.problems import Problem


class RewardScalingConfig(BaseConfig):
    """A linear map of rewards, clipped to the source range first."""

    enabled: bool = Field(False, description="Map rewards from the source range to the target range.")
    source_min: float = Field(0.0, description="Lower end of the source range (reward).")
    source_max: float = Field(1.0, description="Upper end of the source range (reward).")
    target_min: float = Field(0.0, description="Image of source_min (reward).")
    target_max: float = Field(1.0, description="Image of source_max (reward).")

    def __call__(self, reward: float) -> float:
        clipped = min(max(reward, self.source_min), self.source_max)
        fraction = (clipped - self.source_min) / (self.source_max - self.source_min)
        return self.target_min + fraction * (self.target_max - self.target_min)

    @property
    def slope(self) -> float:
        """The factor for a step's reward, which is part of the rollout's reward."""
        return (self.target_max - self.target_min) / (self.source_max - self.source_min)

    def errors(self, key: str) -> Iterator[Problem]:
        if self.enabled and self.source_min >= self.source_max:
            yield Problem(
                f"{key}.source_max",
                f"found {self.source_max}, which is not above source_min = {self.source_min}",
                "Set it above source_min.",
            )
