"""Run the watchdog of a run as configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.config import TrainingRunConfig
from strop.monitoring.trackers.base import CompositeTracker, Tracker
from strop.monitoring.watchdog.stalls import WaitLimits
from strop.monitoring.watchdog.watchdog import Watchdog, WatchdogTimeout, schedule_exit


@contextmanager
def watch_run(config: TrainingRunConfig, tracker: Tracker) -> Iterator[Tracker]:
    """Run the watchdog inside the context, in a running event loop. Yields the tracker to use, which also reports to the watchdog.

    Raises WatchdogTimeout."""
    section = config.watchdog
    if not section.enabled:
        yield tracker
        return
    watchdog = Watchdog(
        Path(config.logger.log_dir),
        note=tracker.note,
        limits=WaitLimits(**section.limits()),
        interval=section.interval_seconds,
        stop_after=section.stop_after_seconds,
        checkpoints=config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None,
    )
    try:
        with watchdog:
            yield CompositeTracker([tracker, watchdog.status_tracker])
    except WatchdogTimeout as stuck:
        schedule_exit(stuck)
        raise
