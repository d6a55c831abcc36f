"""Section ``pacing`` of a run on rollouts: how many episodes run at once, and what happens when an environment's infrastructure fails."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig


class PacingConfig(BaseConfig):
    """Follow what engines and sandboxes can bear, and wait while the infrastructure of an environment fails."""

    adaptive_concurrency: bool = Field(
        True,
        description="Halve the number of episodes in flight when engines preempt requests, sandboxes are full or a provider refuses "
        "requests, and raise it again one by one; the slots of the run are its upper bound.",
    )
    pause_above: float | None = Field(
        0.5,
        gt=0,
        lt=1,
        description="Pause an environment that has worked in this run once more than this share of its last 32 rollouts failed by its "
        "infrastructure; one rollout at a time tests whether it works again, and those that fail meanwhile are sampled again. null never "
        "pauses.",
    )
    max_pause_minutes: float = Field(
        30.0, gt=0, description="End the run once an environment has been paused for this long (minutes)."
    )
