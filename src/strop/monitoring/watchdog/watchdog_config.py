"""Section ``watchdog``: limits on waits."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from strop.base_config import BaseConfig


class WatchdogConfig(BaseConfig):
    """How long the parts of a run may wait for each other. A wait over its limit appears in the log and in status.json; 0 means
    no limit.
    """

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Watch the run, and write status.json into its log folder.")
    environment_seconds: float = Field(
        600.0, ge=0, description="One call of an environment: open, turn, rewards or close (seconds)."
    )
    generation_seconds: float = Field(
        1800.0, ge=0, description="One completion, including its time in the engine's queue (seconds)."
    )
    training_seconds: float = Field(3600.0, ge=0, description="The update of one step, or filling its columns (seconds).")
    weight_sync_seconds: float = Field(600.0, ge=0, description="Publishing one step's weights (seconds).")
    checkpoint_seconds: float = Field(1800.0, ge=0, description="Saving one checkpoint (seconds).")
    event_loop_seconds: float = Field(300.0, ge=0, description="A blocked process, in a wait without its own limit (seconds).")
    interval_seconds: float = Field(5.0, gt=0, description="How often the watchdog checks and rewrites status.json (seconds).")
    stop_after_seconds: float | None = Field(
        None,
        gt=0,
        description="End the run with exit code 1 when a wait is over its limit and has lasted this long; null never does "
        "(seconds).",
    )

    @field_validator("stop_after_seconds")
    @classmethod
    def _check_enabled(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("enabled") is False:
            raise ValueError(
                "watchdog.enabled is false, so nothing would stop the run; set watchdog.enabled=true, or stop_after_seconds=null"
            )
        return value

    def by_kind(self) -> dict[str, float]:
        """Return the limit of each kind of wait, in seconds."""
        names = ("environment", "generation", "training", "weight_sync", "checkpoint")
        return {name: getattr(self, f"{name}_seconds") for name in names}
