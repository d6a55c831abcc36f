"""Log to MLflow: a server, or a database file in the log folder. The run's id is stored in the log folder."""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strop.extensions.trackers.service_tracker import check_package, flatten_settings, read_run_id, store_run_id
from strop.extensions.trackers.trackers_config import MlflowConfig
from strop.monitoring.trackers.base import MetricHistogram, NullTracker, SavedCheckpoint, StepMedia, TrackedRun, name_project

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from PIL.Image import Image


logger = logging.getLogger(__name__)

ID_FILE = "mlflow_run_id"
BATCH = 100  # parameters in a request
LONGEST = 500  # characters of a parameter, in every version of MLflow
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MlflowTracker(NullTracker):
    """Logs to the MLflow server at ``tracking_uri``; None: MLFLOW_TRACKING_URI, or else ``<log_dir>/mlflow.db``.

    A resumed run stays the same run. MLflow cannot delete metrics: steps that run again are in it twice, and its charts show
    both. It has no histograms: their quantiles are logged as metrics (``histograms/reward/p50``) and, if samples are shown, as
    an image per step. Samples are text files among the artifacts.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        experiment: str,
        name: str | None = None,
        run_id: str | None = None,  # of an existing run; None: from the log folder or MLFLOW_RUN_ID, or a new one
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        checkpoints: Literal["none", "reference", "upload"] = "none",
    ) -> None:
        self._log_dir = Path(log_dir).absolute()
        self._experiment, self._name, self._run_id = experiment, name, run_id
        self._own = None if tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") else self._log_dir / "mlflow.db"
        self._uri = f"sqlite:///{self._own}" if self._own else tracking_uri
        self._artifacts = artifact_location or ((self._log_dir / "mlflow_artifacts").as_uri() if self._own else None)
        self._tags, self._config, self._checkpoints = dict(tags or {}), dict(config or {}), checkpoints
        self._client: MlflowClient | None = None
        check_package("mlflow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        client, now = self._get_client(), int(time.time() * 1000)
        values = [Metric(_FORBIDDEN.sub("_", name), float(value), now, step) for name, value in metrics.items()]
        for start in range(0, len(values), 1000):
            client.log_batch(self._id, metrics=values[start : start + 1000])

    def log_media(self, step: int, media: StepMedia) -> None:
        client = self._get_client()
        for histogram in media.histograms:
            self.log(step, histogram.quantiles())
            if media.tables:  # two artifact files each, so not at every step
                client.log_image(self._id, _draw_bars(histogram), key=histogram.name, step=step)
        for table in media.tables:
            client.log_text(self._id, table.as_text(), f"{table.name}/step_{step:06d}.txt")
        for image in media.images:
            client.log_artifact(self._id, str(image.path), f"{image.name}/step_{step:06d}")

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        client = self._get_client()
        if self._checkpoints == "upload":
            client.log_artifacts(self._id, str(saved.folder), f"checkpoints/step_{saved.step}")
        elif self._checkpoints == "reference":
            client.set_tag(self._id, f"checkpoint.step_{saved.step}", str(saved.folder))

    def resume(self, step: int) -> None:
        self._get_client(from_scratch=step < 0)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)
            self._client = None

    @property
    def _id(self) -> str:
        assert self._run_id is not None
        return self._run_id

    def _get_client(self, from_scratch: bool = False) -> MlflowClient:
        if self._client is None:
            from mlflow import MlflowClient

            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._own is not None:
                self._own.open("ab").close()  # otherwise MLflow retries for minutes
            client = MlflowClient(tracking_uri=self._uri)
            known = self._run_id or (None if from_scratch else read_run_id(self._log_dir, ID_FILE))
            known = known or os.environ.get("MLFLOW_RUN_ID")  # set by platforms that have already started the run
            if known is None or not self._reopen(client, known):
                self._run_id = store_run_id(self._log_dir, ID_FILE, self._create_run(client))
                self._log_settings(client)
            self._client = client
        return self._client

    def _reopen(self, client: MlflowClient, run_id: str) -> bool:
        try:
            client.update_run(run_id, status="RUNNING")
        except Exception as error:
            if self._run_id is not None:
                raise  # the user named it
            logger.warning("MLflow does not know the run %s of this log folder (%s): a new one begins", run_id, error)
            return False
        self._run_id = run_id
        return True

    def _create_run(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else client.create_experiment(self._experiment, self._artifacts)
        run_id: str = client.create_run(experiment, run_name=self._name, tags=self._tags).info.run_id
        return run_id

    def _log_settings(self, client: MlflowClient) -> None:
        from mlflow.entities import Param

        settings = [
            Param(_FORBIDDEN.sub("_", name), str(value)[:LONGEST])
            for name, value in flatten_settings(self._config)
            if value != ""
        ]
        for start in range(0, len(settings), BATCH):
            client.log_batch(self._id, params=settings[start : start + BATCH])


def _draw_bars(histogram: MetricHistogram) -> Image:
    """Return an image of 480 x 300 pixels. No pyplot, which retains figures and is not thread-safe."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(4.8, 3), dpi=100)
    axes = figure.add_axes((0.15, 0.12, 0.82, 0.78))  # automatic label layout would take a third longer
    middles, counts = histogram.count()
    width = (middles[-1] - middles[0]) / (len(middles) - 1) if len(middles) > 1 else 1.0
    axes.bar(middles, counts, width=width * 0.92)
    axes.locator_params(axis="y", integer=True)
    if len(middles) <= 6:
        axes.set_xticks(middles)
    axes.set(title=histogram.name, ylabel=f"of {sum(counts)} values")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return Image.open(content).convert("RGB")


def make_tracker(run: TrackedRun) -> MlflowTracker:
    section = MlflowConfig.of(run.logger)
    return MlflowTracker(
        run.folder,
        experiment=name_project(section.experiment_name, "MLFLOW_EXPERIMENT_NAME"),
        name=section.run_name or run.name,
        run_id=section.run_id,
        tracking_uri=section.tracking_uri,
        artifact_location=section.artifact_location,
        tags=section.tags,
        config=run.settings,
        checkpoints=run.logger.tracked_checkpoints,
    )
