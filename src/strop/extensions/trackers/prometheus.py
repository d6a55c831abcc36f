"""Write the metrics of the last step as a file that Prometheus reads, by node_exporter's textfile collector or any web server.

The text format is version 0.0.4: ``strop_train_reward{run="adding"} 0.53``. OpenTelemetry's collector reads it too, with its Prometheus
receiver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from strop.extensions.trackers.trackers_config import PrometheusConfig
from strop.monitoring.trackers.base import NullTracker, TrackedRun
from strop.storage.files import atomic_write

FILE = "metrics.prom"


class PrometheusTracker(NullTracker):
    """Writes each step to ``path``, whole or not at all, in place of the one before. Removes it when the run ends: a metric that is still
    exported says that the run is there.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = Path(path).absolute()
        self._label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {make_name(name): value for name, value in {**metrics, "step": float(step)}.items()}
        lines = [f'# TYPE {name} gauge\n{name}{{run="{self._label}"}} {format_value(value)}\n' for name, value in values.items()]
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
            temporary.chmod(0o644)  # another user's exporter reads it

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def make_name(metric: str) -> str:
    """``train/rewards/is-right`` -> ``strop_train_rewards_is_right``"""
    return "strop_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def format_value(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def make_tracker(run: TrackedRun) -> PrometheusTracker:
    section = PrometheusConfig.of(run.logger)
    return PrometheusTracker(
        Path(section.file) if section.file else run.folder / FILE, section.run or run.name or run.folder.name
    )
