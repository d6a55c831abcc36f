"""Section ``failures``: what becomes of rollouts that fail."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig


class FailuresConfig(BaseConfig):
    """Rollouts that fail: the policy's own failures get a reward, and others are left out of their group."""

    reward: float | None = Field(
        0.0,
        description="Reward of a rollout that the policy made fail, by a crash or a time limit, before reward_scaling; null asks "
        "the environment, which scores what there is.",
    )
    retries: int = Field(
        0, ge=0, description="Sample a rollout that failed by no fault of the policy again, at most this often (attempts)."
    )
    min_rollouts: int = Field(
        2,
        ge=1,
        description="Drop a group if fewer of its rollouts than this can be trained on, because others were left out (rollouts).",
    )
