"""Log to SwanLab. The run's id is stored in the log folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.extensions.trackers.service_tracker import ServiceTracker, check_package, create_run_id, read_run_id
from strop.extensions.trackers.trackers_config import SwanlabConfig
from strop.monitoring.trackers.base import MetricHistogram, StepMedia, TrackedRun, name_project

if TYPE_CHECKING:
    import swanlab


ID_FILE = "swanlab_run_id"


class SwanlabTracker(ServiceTracker["swanlab.Run"]):
    """Logs to SwanLab. ``mode``: online, offline (uploaded by a later ``swanlab sync``), local or disabled; None: SWANLAB_MODE.

    Steps that run again keep their first record, because SwanLab does not overwrite a metric's step. Histograms are ECharts bar
    charts. Samples are plain texts.
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
        super().__init__()
        self._log_dir = Path(log_dir).absolute()
        options = {"workspace": workspace, "mode": mode, "group": group, "tags": list(tags) or None, "description": notes}
        given = {key: value for key, value in options.items() if value is not None}
        self._init = {"project": project, "name": name, "config": dict(config or {}), **given}
        check_package("swanlab")

    def log_media(self, step: int, media: StepMedia) -> None:
        import swanlab

        run = self._get_run()
        for histogram in media.histograms:
            run.log({histogram.name: swanlab.ECharts(_draw_bars(histogram), caption=f"step {step}")}, step=step)
        for table in media.tables:
            run.log({table.name: swanlab.Text(table.as_text(), caption=f"step {step}")}, step=step)
        for image in media.images:
            run.log({image.name: swanlab.Image(str(image.path), caption=image.caption)}, step=step)

    def _open_run(self, resume_step: int | None) -> swanlab.Run:
        import swanlab

        folder = self._log_dir / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        from_scratch = resume_step is not None and resume_step < 0
        known = None if from_scratch else read_run_id(self._log_dir, ID_FILE)
        run_id = known or create_run_id(self._log_dir, ID_FILE, bytes=10)
        # An interactive question could not be answered, terminal capture would record every redraw, and Strop has its own
        # monitors.
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, probe={"monitor": False})
        try:
            return swanlab.init(id=run_id, resume="allow", log_dir=str(folder), settings=settings, **self._init)
        except RuntimeError as error:
            if "API key" not in str(error):
                raise
            fix = "run `swanlab login`, set SWANLAB_API_KEY, or set logger.swanlab.mode=offline to keep the run on this machine"
            raise RuntimeError(f"there is no API key of SwanLab: {fix}") from error


def _draw_bars(histogram: MetricHistogram) -> swanlab.echarts.Bar:
    from swanlab import echarts  # an attribute, not a module

    middles, counts = histogram.count()
    bars = echarts.Bar().add_xaxis([f"{middle:.4g}" for middle in middles])
    bars.add_yaxis("values", list(counts), category_gap=0, label_opts=echarts.options.LabelOpts(is_show=False))
    bars.set_global_opts(
        legend_opts=echarts.options.LegendOpts(is_show=False),
        xaxis_opts=echarts.options.AxisOpts(name="middle of the bin", name_location="middle", name_gap=28),
        tooltip_opts=echarts.options.TooltipOpts(trigger="axis"),
    )
    return bars


def make_tracker(run: TrackedRun) -> SwanlabTracker:
    section = SwanlabConfig.of(run.logger)
    return SwanlabTracker(
        run.folder,
        project=name_project(section.project, "SWANLAB_PROJ_NAME"),
        name=section.name or run.name,
        workspace=section.workspace,
        mode=section.mode,
        group=section.group,
        tags=section.tags,
        notes=section.notes,
        config=run.settings,
    )
