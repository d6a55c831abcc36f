"""Section ``logger``: destinations of metrics and rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig, PathText, fields_of, subsection
from strop.monitoring.profiling.profile_config import ProfileConfig
from strop.packages import install_command
from strop.problems import Problem
from strop.user_code import UserCodeError, import_attribute

SWANLAB_PROJECT = r"[0-9a-zA-Z_\-+.]{1,100}"
SERVICES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # also the names of their packages


class WandbConfig(BaseConfig):
    """Weights & Biases."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    project: str | None = Field(None, min_length=1, description="Project name; null is WANDB_PROJECT, or else strop.")
    entity: str | None = Field(None, description="Team or user that the project belongs to; null is the one that is logged in.")
    name: str | None = Field(None, description="Run name; null is run_name, and without one Weights & Biases chooses.")
    group: str | None = Field(None, description="Group of runs that belong together, such as the seeds of one experiment.")
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")
    notes: str | None = Field(None, description="A longer description, like a commit message.")
    job_type: str | None = Field(None, description="Kind of run within the group, such as train.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline keeps the run on this machine for a later wandb sync; null is WANDB_MODE, or else online."
    )
    dir: PathText | None = Field(None, description="Folder of its wandb folder; null is the run's log folder.")


class TensorboardConfig(BaseConfig):
    """TensorBoard."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    log_dir: PathText | None = Field(None, description="Folder of the event files; null is tensorboard in the run's log folder.")


class MlflowConfig(BaseConfig):
    """MLflow."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    experiment_name: str | None = Field(
        None,
        min_length=1,
        description="Experiment, created if it does not exist; null is MLFLOW_EXPERIMENT_NAME, or else strop.",
    )
    run_name: str | None = Field(None, description="Run name; null is run_name, and without one MLflow chooses.")
    run_id: str | None = Field(
        None, description="A run that exists, to log into; null is that of the log folder, MLFLOW_RUN_ID or a new one."
    )
    tracking_uri: str | None = Field(
        None, description="Server or database; null is MLFLOW_TRACKING_URI, or else mlflow.db in the run's log folder."
    )
    artifact_location: str | None = Field(None, description="Artifact location of a new experiment; null: the server decides.")
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the run.")


class SwanlabConfig(BaseConfig):
    """SwanLab."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    project: str | None = Field(None, min_length=1, description="Project name; null is SWANLAB_PROJ_NAME, or else strop.")
    name: str | None = Field(None, description="Run name; null is run_name, and without one SwanLab chooses.")
    workspace: str | None = Field(
        None, description="Team or user that the project belongs to; null is the one that is logged in."
    )
    group: str | None = Field(None, description="Group of runs that belong together.")
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")
    notes: str | None = Field(None, description="A longer description.")
    mode: Literal["online", "offline", "local", "disabled"] | None = Field(
        None, description="offline keeps the run on this machine for a later swanlab sync; null is SWANLAB_MODE, or else online."
    )


class TrackioConfig(BaseConfig):
    """Trackio."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    project: str = Field("strop", min_length=1, description="Project name.")
    name: str | None = Field(None, description="Run name, to which an id is added; null is run_name.")
    group: str | None = Field(None, description="Group of runs that belong together.")
    space_id: str | None = Field(
        None, description="Space of the Hugging Face hub that gets the run too, as user/space; null: none."
    )


class TrackerConfig(BaseConfig):
    """The section of a tracker added by an extension, which attaches a subclass to ``LoggerConfig`` under the tracker's name."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(False, description="Log to it.")


class GpuMonitoringConfig(BaseConfig):
    """How often GPUs and machines are sampled."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    collection_interval: float = Field(10, gt=0, description="Seconds between two samples of each machine (s).")
    flush_interval: float = Field(
        10,
        gt=0,
        description="Seconds between two reports of a machine to the driver (s). A step logs the means since the last one.",
    )


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
    wandb_enabled: bool = Field(False, description="Log to Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Log to TensorBoard.")
    mlflow_enabled: bool = Field(False, description="Log to MLflow.")
    swanlab_enabled: bool = Field(False, description="Log to SwanLab.")
    trackio_enabled: bool = Field(False, description="Log to Trackio.")
    monitor_gpus: bool = Field(
        True, description="Log the utilisation of each machine's GPUs, processors, memory, disk and network, as system/...."
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak arithmetic of one training device, for perf/mfu (10^12 FLOPs per second). null: from a table of GPUs.",
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
    metric_aliases: bool = Field(
        True, description="Log metrics to these two under the names of TRL and verl too, such as train/completions/mean_length."
    )
    wandb: WandbConfig = subsection(WandbConfig)
    tensorboard: TensorboardConfig = subsection(TensorboardConfig)
    profile: ProfileConfig = subsection(ProfileConfig)
    mlflow: MlflowConfig = subsection(MlflowConfig)
    swanlab: SwanlabConfig = subsection(SwanlabConfig)
    trackio: TrackioConfig = subsection(TrackioConfig)
    gpu_monitoring: GpuMonitoringConfig = subsection(GpuMonitoringConfig)

    @property
    def services(self) -> tuple[str, ...]:
        """The enabled services, those of extensions last."""
        own = [name for name in SERVICES if getattr(self, f"{name}_enabled")]
        attached = [(name, getattr(self, name)) for name in fields_of(type(self))]
        return (*own, *(name for name, section in attached if isinstance(section, TrackerConfig) and section.enabled))

    @property
    def shown_samples(self) -> int | None:
        """Number of rollouts that services show; None: no service is enabled, or none are to be shown."""
        return self.tracked_samples if self.services and self.tracked_samples else None

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        for path in self.listeners:
            try:
                import_attribute(path)
            except UserCodeError as error:
                yield Problem(f"{key}.listeners", str(error))

    def errors(self, key: str) -> Iterator[Problem]:
        for name in SERVICES:
            if getattr(self, f"{name}_enabled") and not packages.is_installed(name):
                yield Problem(
                    f"{key}.{name}_enabled",
                    f"found true, but the package {name} is not installed",
                    f"Run {install_command(name)}, or set {key}.{name}_enabled=false.",
                )
        if self.swanlab_enabled and self.swanlab.project and not re.fullmatch(SWANLAB_PROJECT, self.swanlab.project):
            yield Problem(
                f"{key}.swanlab.project",
                f"found {self.swanlab.project!r:.120}, but SwanLab takes at most 100 letters, digits and _ - + .",
                "Take another name.",
            )
