"""``strop grpo``, ``sft``, ``dpo``, ...: build a run from its configuration and train."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from strop.algorithms.base import Algorithm
from strop.build.algorithm.run_algorithm import make_run_algorithm
from strop.build.cluster.cluster_run import open_cluster, run_with_restarts
from strop.build.exit_codes import run_command
from strop.build.lifecycle import make_tracker, seed_everything, watch_run
from strop.build.recorded_run import build_recorded_run
from strop.build.rollout_run import build_rollout_run
from strop.build.summary import summarize
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.distributed.base import Cluster
from strop.generation.base import Generator
from strop.monitoring.trackers.base import Tracker
from strop.stopping import RunStopped
from strop.trainer.run import TrainingRun
from strop.trainer.stop_signal import SignalHandler, handle_stop_signals
from strop.trainer.train import train


def run_training(config: TrainingRunConfig) -> int:
    """Train as configured. Return 0 on success, 1 after printing an error."""
    return run_command(train_as_configured(config))


async def train_as_configured(config: TrainingRunConfig) -> None:
    """Train, from the newest checkpoint on. Raises RunStopped if a stop signal ends the run."""
    algorithm = make_run_algorithm(config)  # may refuse the run, before a log folder is made and processes are started
    tracker = make_tracker(config)
    try:
        with handle_stop_signals(config.checkpointing) as signals, watch_run(config, tracker) as watched:
            await run_with_restarts(config, watched, partial(_run_attempt, config, algorithm, watched, signals))
    finally:
        tracker.close()


async def _run_attempt(config: TrainingRunConfig, algorithm: Algorithm, tracker: Tracker, signals: SignalHandler) -> None:
    """Run one attempt: from the newest checkpoint to the end of the run. Raises RunStopped if a stop signal ends it."""
    async with open_cluster(config, tracker) as cluster:
        signals.install()
        run, generator = await build_run(config, tracker, cluster, algorithm)
        run.stop_request = signals.stop_request
        try:
            await train(run)
            if run.checkpoints is not None:
                await asyncio.to_thread(run.checkpoints.finish)
        finally:
            if run.checkpoints is not None:
                with suppress(Exception):  # may fail for the same reason; but no write may overlap with the next attempt
                    await asyncio.to_thread(run.checkpoints.finish)
            await run.stream.close()
            if generator is not None:
                await generator.close()
        if run.ending == "stopped":
            raise RunStopped(f"{signals.stop_request.reason}: the run ended after step {run.step}.")
        run.tracker.note(f"done after step {run.step}; metrics in {config.logger.log_dir}")


async def build_run(
    config: TrainingRunConfig, tracker: Tracker, cluster: Cluster | None = None, algorithm: Algorithm | None = None
) -> tuple[TrainingRun, Generator | None]:
    """Build a run, in this process or on ``cluster``, restored from its newest checkpoint if there is one. Return it with its generator,
    or None for a run on recorded data. ``algorithm``: the configuration's, if it has been made."""
    algorithm = algorithm or make_run_algorithm(config)
    seed_everything(config.training.seed)
    for line in summarize(config, algorithm, on_cpu=None if cluster is None else cluster.on_cpu).splitlines():
        tracker.note(line)
    if isinstance(config, RolloutRunConfig):
        return await build_rollout_run(config, algorithm, tracker, cluster)
    assert isinstance(config, RecordedRunConfig)
    return await build_recorded_run(config, algorithm, tracker, cluster), None
