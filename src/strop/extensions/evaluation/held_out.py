"""The last words of a run about its policy: the accuracy on held-out tasks, first and last, with 95 % intervals."""

from __future__ import annotations

import asyncio
from pathlib import Path

from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.monitors.run_listeners import RunSetup
from strop.trainer.listeners import RunListener


class HeldOutScore(RunListener):
    """Notes the scores of the run when it ends."""

    name = "held_out"

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._tracker: Tracker | None = None

    async def on_start(self, step: int, tracker: Tracker) -> None:
        self._tracker = tracker

    async def on_end(self) -> None:
        text = await asyncio.to_thread(describe_scores, self._log_dir)
        if self._tracker is not None and text:
            self._tracker.note(f"held out    {text}")


def make_held_out_score(setup: RunSetup) -> RunListener:
    """The entry point of ``strop.listeners``."""
    return HeldOutScore(Path(setup.config.logger.log_dir))


def describe_scores(log_dir: Path) -> str:
    """Describe the first and the last validation of a run that logged an accuracy; empty if there is none."""
    steps = [(step, values) for step, values in read_metrics(log_dir / METRICS_FILE) if "validation/accuracy" in values]
    scores = []
    tasks = 0
    for step, values in dict((steps[0], steps[-1]) if steps else ()).items():
        accuracy, text = values["validation/accuracy"], ""
        if (found := _find_interval(log_dir, step, accuracy, values.get("validation/examples"))) is not None:
            low, high, tasks = found
            text = f" [{low:.3f}, {high:.3f}]"
        scores.append(f"{accuracy:.3f}{text} after step {step}")
    return f"accuracy {', '.join(scores)}{f' ({tasks} tasks, 95 % intervals)' if tasks else ''}" if scores else ""


def _find_interval(log_dir: Path, step: int, accuracy: float, examples: float | None) -> tuple[float, float, int] | None:
    """Return the ends of the interval and the number of tasks: from stored samples, or for recorded data from the share of examples."""
    if examples is not None:
        from strop.extensions.evaluation.statistics import SHARE, confidence_interval

        right = round(accuracy * examples)
        interval = confidence_interval([1.0] * right + [0.0] * (round(examples) - right), bounds=SHARE)
        return interval.low, interval.high, round(examples)
    from strop.results import read_interval

    return read_interval(log_dir, step)
