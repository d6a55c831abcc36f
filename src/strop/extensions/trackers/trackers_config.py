"""The sections of the services that a run can log to, and their keys in ``logger``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop import packages
from strop.base_config import BaseConfig, PathText
from strop.monitoring.logger_config import TrackerConfig, TrackerSection
from strop.packages import install_command
from strop.problems import Problem
from strop.storage.folder_lock import find_folder_problem

SWANLAB_PROJECT = r"[0-9a-zA-Z_\-+.]{1,100}"
SERVICES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")  # also the names of their packages


def is_offline(mode: str | None) -> bool:
    """Return whether Weights & Biases keeps runs on this machine. ``mode`` None: from the environment."""
    return str(mode or os.environ.get("WANDB_MODE", "")).lower() in ("offline", "dryrun", "disabled")


class WandbConfig(TrackerSection):
    """Weights & Biases."""

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

    def closing_hints(self, log_dir: str) -> Iterator[str]:
        if is_offline(self.mode):
            why = "WANDB_MODE" if self.mode is None else f"logger.wandb.mode={self.mode}"
            folder = Path(self.dir or log_dir) / "wandb" / "offline-run-*"
            yield f"Weights & Biases is offline ({why}): nothing is sent; to send it later: wandb sync {folder}"


class TensorboardConfig(TrackerSection):
    """TensorBoard."""

    log_dir: PathText | None = Field(None, description="Folder of the event files; null is tensorboard in the run's log folder.")


class MlflowConfig(TrackerSection):
    """MLflow."""

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


class SwanlabConfig(TrackerSection):
    """SwanLab."""

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


class TrackioConfig(TrackerSection):
    """Trackio."""

    project: str = Field("strop", min_length=1, description="Project name.")
    name: str | None = Field(None, description="Run name, to which an id is added; null is run_name.")
    group: str | None = Field(None, description="Group of runs that belong together.")
    space_id: str | None = Field(
        None, description="Space of the Hugging Face hub that gets the run too, as user/space; null: none."
    )


class PrometheusConfig(TrackerConfig):
    """Prometheus, and what reads its format: the metrics of the last step in a file, until the run ends."""

    file: PathText | None = Field(
        None,
        description="The file, such as NAME.prom in the folder of node_exporter's textfile collector; null is LOG_DIR/metrics.prom.",
    )
    run: str | None = Field(None, description="Label of the metrics; null is run_name, or else the name of the log folder.")


class ServicesConfig(BaseConfig):
    """Services that a run can log to."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    wandb_enabled: bool = Field(False, description="Log to Weights & Biases.")
    tensorboard_enabled: bool = Field(False, description="Log to TensorBoard.")
    mlflow_enabled: bool = Field(False, description="Log to MLflow.")
    swanlab_enabled: bool = Field(False, description="Log to SwanLab.")
    trackio_enabled: bool = Field(False, description="Log to Trackio.")
    metric_aliases: bool = Field(
        True,
        description="Log metrics to Weights & Biases and TensorBoard under the names of TRL and verl too, such as "
        "train/completions/mean_length.",
    )

    @property
    def _section_of(self) -> Any:
        """``logger`` itself, which inherits from this."""
        return self

    def errors(self, key: str) -> Iterator[Problem]:
        yield from super().errors(key)
        for name in SERVICES:
            if getattr(self, f"{name}_enabled") and not packages.is_installed(name):
                yield Problem(
                    f"{key}.{name}_enabled",
                    f"found true, but the package {name} is not installed",
                    f"Run {install_command(name)}, or set {key}.{name}_enabled=false.",
                )
        project = self._section_of.swanlab.project
        if self.swanlab_enabled and project and not re.fullmatch(SWANLAB_PROJECT, project):
            yield Problem(
                f"{key}.swanlab.project",
                f"found {project!r:.120}, but SwanLab takes at most 100 letters, digits and _ - + .",
                "Take another name.",
            )

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().examine(key, environments)
        folder = self._section_of.tensorboard.log_dir
        if self.tensorboard_enabled and folder and (problem := find_folder_problem(Path(folder).absolute())):
            yield Problem(f"{key}.tensorboard.log_dir", problem)
