"""Log to Trackio: a database on this machine (``trackio show``), or a Space of the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.extensions.trackers.service_tracker import ServiceTracker, check_package, create_run_id, read_run_id, store_run_id
from strop.extensions.trackers.trackers_config import TrackioConfig
from strop.monitoring.trackers.base import SampleTable, StepMedia, TrackedRun

if TYPE_CHECKING:
    import trackio


NAME_FILE = "trackio_run_name"


class TrackioTracker(ServiceTracker["trackio.Run"]):
    """Logs to Trackio, in TRACKIO_DIR or its default folder, and to ``space_id`` if one is given.

    Trackio identifies a run by name, so the name ends with an id stored in the log folder. Steps that run again are in it twice.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._log_dir = Path(log_dir).absolute()
        self._project, self._name = project, name
        self._init = {"group": group, "space_id": space_id, "config": dict(config or {})}
        check_package("trackio")

    def log_media(self, step: int, media: StepMedia) -> None:
        import trackio

        run = self._get_run()
        for histogram in media.histograms:
            run.log({histogram.name: trackio.Histogram(list(histogram.values))}, step=step)
        for table in media.tables:
            run.log({table.name: trackio.Table(columns=list(SampleTable.COLUMNS), data=table.values())}, step=step)
        for image in media.images:
            run.log({image.name: trackio.Image(str(image.path), caption=image.caption)}, step=step)

    def _open_run(self, resume_step: int | None) -> trackio.Run:
        import trackio

        from_scratch = resume_step is not None and resume_step < 0
        name = None if from_scratch else read_run_id(self._log_dir, NAME_FILE)
        if name is None:
            made = create_run_id(self._log_dir, NAME_FILE)
            name = store_run_id(self._log_dir, NAME_FILE, f"{self._name}-{made}" if self._name else made)
        if not self._init["space_id"]:
            _check_folder(Path(trackio.TRACKIO_DIR))  # Trackio only warns if it cannot write there
        off = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}  # Strop has its own monitors
        return trackio.init(project=self._project, name=name, resume="allow", **off, **self._init)


def _check_folder(folder: Path) -> None:
    """Raise OSError if a folder, which is created if needed, is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")


def make_tracker(run: TrackedRun) -> TrackioTracker:
    section = TrackioConfig.of(run.logger)
    return TrackioTracker(
        run.folder,
        project=section.project,
        name=section.name or run.name,
        group=section.group,
        space_id=section.space_id,
        config=run.settings,
    )
