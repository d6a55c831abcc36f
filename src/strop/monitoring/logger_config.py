"""Section ``logger``: destinations of metrics and rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from strop.base_config import BaseConfig, PathText, fields_of
from strop.problems import Problem
from strop.user_code import UserCodeError, import_attribute


class TrackerSection(BaseConfig):
    """The section of a tracker, attached to ``LoggerConfig`` under the tracker's name. ``logger.NAME_enabled`` switches it on."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    def closing_hints(self, log_dir: str) -> Iterator[str]:
        """Yield what the last lines of a run with this tracker tell besides its results."""
        return iter(())


class TrackerConfig(TrackerSection):
    """The section of a tracker that is switched on by its key ``enabled``."""

    enabled: bool = Field(False, description="Log to it.")


class LoggerConfig(BaseConfig):
    """Destinations of metrics and rollouts."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    log_dir: PathText = Field("logs", min_length=1, description="Folder of the runs' log folders, each with a metrics.jsonl.")
    num_val_samples_to_print: int = Field(0, ge=0, description="Rollouts printed at each validation (rollouts).")
    console: Literal["auto", "live", "plain", "none"] = Field(
        "auto", description="live redraws, plain prints lines; auto is live in a terminal and plain elsewhere."
    )
    listeners: list[str] = Field(
        default_factory=list,
        description="Classes or functions of yours, as file.py:NAME or module:NAME, that are called with the run and return a listener, "
        "which sees each step.",
    )
    rollouts: Literal["parquet", "jsonl", "none"] = Field(
        "parquet", description="Format of the stored rollouts, those of every step."
    )
    token_columns: Literal["sampled", "all", "none"] = Field(
        "sampled",
        description="Per-token results of the update to store with the rollouts: for sampled tokens, for all (recorded data is stored "
        "too), or none.",
    )
    routes: bool = Field(
        False,
        description="Store the experts of each token with the rollouts, with policy.router_replay, so that `strop replay` can train a "
        "step again: a byte per token, layer and chosen expert, or two with more than 128 experts.",
    )
    tracked_samples: int = Field(
        8,
        ge=0,
        description="Rollouts of a validation and of a step shown in these services (rollouts); 0: none, and no histograms.",
    )
    tracked_samples_period: int = Field(10, ge=1, description="Interval at which training rollouts are shown (steps).")
    tracked_checkpoints: Literal["none", "reference", "upload"] = Field(
        "none", description="Checkpoints in Weights & Biases and MLflow: none, only their location, or their files."
    )
    close_timeout: float = Field(60, gt=0, description="How long the end of a run waits for each service (s).")

    @property
    def services(self) -> tuple[str, ...]:
        """The names of the enabled trackers."""
        return tuple(self.trackers)

    @property
    def trackers(self) -> Mapping[str, TrackerSection]:
        """The sections of the enabled trackers."""
        attached = {name: getattr(self, name) for name in fields_of(type(self))}
        sections = {name: section for name, section in attached.items() if isinstance(section, TrackerSection)}
        return {
            name: section
            for name, section in sections.items()
            if (section.enabled if isinstance(section, TrackerConfig) else getattr(self, f"{name}_enabled"))
        }

    @property
    def shown_samples(self) -> int | None:
        """Number of rollouts that services show; None: no service is enabled, or none are to be shown."""
        return self.tracked_samples if self.services and self.tracked_samples else None

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().examine(key, environments)
        for path in self.listeners:
            try:
                import_attribute(path)
            except UserCodeError as error:
                yield Problem(f"{key}.listeners", str(error))


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
