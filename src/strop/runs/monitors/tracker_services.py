"""The services that a run logs to, as configured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.base_config import to_tree
from strop.config import TrainingRunConfig
from strop.monitoring.trackers.base import Tracker
from strop.safety.redaction import redact_secrets


def make_services(config: TrainingRunConfig) -> list[Tracker]:
    """Make the trackers of the enabled services, and import only those. Raises ImportError or ValueError for one that cannot work."""
    folder, settings = Path(config.logger.log_dir), redact_secrets(to_tree(config))
    return [MAKE_SERVICE[name](config, folder, settings) for name in config.logger.services]


def _make_tensorboard(config: TrainingRunConfig, folder: Path, settings: dict[str, Any]) -> Tracker:
    from strop.monitoring.trackers.tensorboard import TensorBoardTracker

    section = config.logger.tensorboard
    events = Path(section.log_dir) if section.log_dir else folder / "tensorboard"
    return TensorBoardTracker(events, aliases=config.logger.metric_aliases, config=settings)


def _make_wandb(config: TrainingRunConfig, folder: Path, settings: dict[str, Any]) -> Tracker:
    from strop.monitoring.trackers.wandb import WandbTracker

    logger, section = config.logger, config.logger.wandb
    options: dict[str, Any] = {
        "entity": section.entity,
        "group": section.group,
        "tags": section.tags,
        "notes": section.notes,
        "job_type": section.job_type,
        "mode": section.mode,
        "dir": section.dir and str(Path(section.dir).absolute()),
        "config": settings,
    }
    return WandbTracker(
        folder,
        project=_name_project(section.project, "WANDB_PROJECT"),
        name=section.name or config.run_name,
        aliases=logger.metric_aliases,
        checkpoints=logger.tracked_checkpoints,
        **options,
    )


def _make_mlflow(config: TrainingRunConfig, folder: Path, settings: dict[str, Any]) -> Tracker:
    from strop.monitoring.trackers.mlflow import MlflowTracker

    section = config.logger.mlflow
    return MlflowTracker(
        folder,
        experiment=_name_project(section.experiment_name, "MLFLOW_EXPERIMENT_NAME"),
        name=section.run_name or config.run_name,
        run_id=section.run_id,
        tracking_uri=section.tracking_uri,
        artifact_location=section.artifact_location,
        tags=section.tags,
        config=settings,
        checkpoints=config.logger.tracked_checkpoints,
    )


def _make_swanlab(config: TrainingRunConfig, folder: Path, settings: dict[str, Any]) -> Tracker:
    from strop.monitoring.trackers.swanlab import SwanlabTracker

    section = config.logger.swanlab
    return SwanlabTracker(
        folder,
        project=_name_project(section.project, "SWANLAB_PROJ_NAME"),
        name=section.name or config.run_name,
        workspace=section.workspace,
        mode=section.mode,
        group=section.group,
        tags=section.tags,
        notes=section.notes,
        config=settings,
    )


def _make_trackio(config: TrainingRunConfig, folder: Path, settings: dict[str, Any]) -> Tracker:
    from strop.monitoring.trackers.trackio import TrackioTracker

    section = config.logger.trackio
    name = section.name or config.run_name
    return TrackioTracker(
        folder, project=section.project, name=name, group=section.group, space_id=section.space_id, config=settings
    )


def _name_project(configured: str | None, variable: str) -> str:
    return configured or os.environ.get(variable) or "strop"


MAKE_SERVICE: Mapping[str, Callable[[TrainingRunConfig, Path, dict[str, Any]], Tracker]] = {
    "tensorboard": _make_tensorboard,
    "wandb": _make_wandb,
    "mlflow": _make_mlflow,
    "swanlab": _make_swanlab,
    "trackio": _make_trackio,
}
