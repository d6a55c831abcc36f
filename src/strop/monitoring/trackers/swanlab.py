"""Log to SwanLab. The log folder keeps the run's id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import packages
from strop.monitoring.trackers.base import NullTracker
from strop.monitoring.trackers.media import StepMedia
from strop.monitoring.trackers.run_ids import create_run_id, read_run_id

if TYPE_CHECKING:
    import swanlab

ID_FILE = "swanlab_run_id"


class SwanlabTracker(NullTracker):
    """Logs to SwanLab. ``mode``: online, offline (a later ``swanlab sync`` sends it), local or disabled; None: SWANLAB_MODE.

    Steps that run again keep their first record: SwanLab does not take a step of a metric twice. It has no histograms: quantiles are
    metrics instead (``histograms/reward/p50``). Samples are plain texts.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        project: str,
        name: str | None = None,
        workspace: str | None = None,
        mode: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._log_dir = Path(log_dir).absolute()
        options = {"workspace": workspace, "mode": mode, "group": group, "tags": list(tags) or None, "description": notes}
        given = {key: value for key, value in options.items() if value is not None}
        self._init = {"project": project, "name": name, "config": dict(config or {}), **given}
        self._run: swanlab.Run | None = None
        if not packages.is_installed("swanlab"):
            raise ImportError(
                "logger.swanlab_enabled is true, but swanlab is not installed; "
                "install it (pip install 'strop[swanlab]') or set logger.swanlab_enabled=false"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._get_run().log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_media(self, step: int, media: StepMedia) -> None:
        import swanlab

        run = self._get_run()
        for histogram in media.histograms:
            run.log(histogram.quantiles(), step=step)
        for table in media.tables:
            run.log({table.name: swanlab.Text(table.as_text(), caption=f"step {step}")}, step=step)
        for image in media.images:
            run.log({image.name: swanlab.Image(str(image.path), caption=image.caption)}, step=step)

    def resume(self, step: int) -> None:
        self._get_run(from_scratch=step < 0)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _get_run(self, from_scratch: bool = False) -> swanlab.Run:
        if self._run is None:
            import swanlab

            folder = self._log_dir / "swanlab"
            folder.mkdir(parents=True, exist_ok=True)
            known = None if from_scratch else read_run_id(self._log_dir, ID_FILE)
            run_id = known or create_run_id(self._log_dir, ID_FILE, bytes=10)
            self._run = swanlab.init(id=run_id, resume="allow", log_dir=str(folder), **self._init)
        return self._run
